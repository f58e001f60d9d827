"""Races: each scenario runs in every order in which its processes can reach the store.

In every order an event is received once, or is where it belongs: in a mailbox, a topic, or among the dead
letters. `tests/engine/interleaving.py` says how the orders are found.
"""

import asyncio
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, EngineConfig, RunStatus, RunTerminated, event, step, workflow
from perdure.testing import Harness, VirtualClock
from tests.engine.interleaving import CallScheduler, Choose, in_every_order
from tests.engine.store_matrix import STORES, make_store

LONG = EngineConfig(sweep_interval=100_000.0, lease=500_000.0)  # no sweeps: only change hints and commits


@event(on_target_terminated="dead_letter")
class Letter:
    n: int


@event
class Offer:
    n: int


@event(delivery="after_wait")
class Shout:
    n: int


KINDS: dict[str, Any] = {cls.__name__: cls for cls in (Letter, Offer, Shout)}


@workflow
async def race_receiver(ctx: Context, kind: str) -> Any:
    got = await ctx.receive(KINDS[kind], "stop")
    return got if isinstance(got, str) else got.n


@workflow
async def race_twice(ctx: Context, kind: str, timeout: float) -> list[Any]:
    """A receive that may time out, and then one that does not."""
    try:
        return ["in time", (await ctx.receive(KINDS[kind], timeout=timeout)).n]
    except TimeoutError:
        return ["late", (await ctx.receive(KINDS[kind])).n]


@workflow
async def race_once(ctx: Context, kind: str, timeout: float | None) -> int | None:
    try:
        return (await ctx.receive(KINDS[kind], timeout=timeout)).n
    except TimeoutError:
        return None


@step
async def race_endless() -> None:
    await asyncio.Event().wait()


@workflow
async def race_busy(ctx: Context) -> str:
    """Waits for an event while a step keeps it busy: it stays with its worker."""
    winner, _ = await ctx.race(work=race_endless(), event=ctx.receive(Letter))
    return winner


class Stage:
    """A harness with an engine that executes and two clients that interfere."""

    def __init__(self, harness: Harness, choose: Choose) -> None:
        self.h = harness
        self.scheduler = CallScheduler(harness, choose)

    async def open(self) -> None:
        self.engine = await self.h.engine(race_receiver, race_twice, race_once, race_busy, config=LONG)
        self.one, self.other = [await self.h.client(config=LONG) for _ in range(2)]

    async def begin(self, workflow: Any, *args: Any, id: str) -> None:
        """A run that waits in its receive, before anything is held."""
        await self.one.start(workflow, *args, id=id)
        await self.h.settle()
        assert await self.one.status(id) is RunStatus.SUSPENDED

    async def at_once(self, *actions: Any) -> list[Any]:
        """Run these calls and their effects in the chosen order. Return the outcome of each."""
        tasks = [self.h.background(action) for action in actions]
        await self.scheduler.play()
        self.scheduler.leave()
        await self.h.clock.advance(1.0)
        return list(await self.h.drive(asyncio.gather(*tasks, return_exceptions=True)))

    def hold(self) -> None:
        self.scheduler.hold("the engine", self.engine)
        self.scheduler.hold("one", self.one, answers=False)
        self.scheduler.hold("the other", self.other, answers=False)

    async def ended(self, id: str) -> Any:
        """Return the outcome of a run: its value, its other end, or None while it waits."""
        status = await self.one.status(id)
        if status is RunStatus.SUCCEEDED:
            return await self.one.result(id)
        return str(status) if status is not None and status.terminal else None


@pytest.fixture(params=STORES)
def orders(request, tmp_path: Path):
    """Runs a scenario on new stores in every order, and counts the outcomes."""
    names = count()

    def play(scenario) -> Counter[str]:
        outcomes: Counter[str] = Counter()

        async def once(choose: Choose) -> None:
            clock = VirtualClock()
            store = make_store(request.param, tmp_path, clock, f"store-{next(names)}")
            async with Harness(store, clock=clock) as harness:
                stage = Stage(harness, choose)
                await stage.open()
                try:
                    outcomes[await scenario(stage)] += 1
                except BaseException as error:
                    error.add_note("\n".join(["in this order:", *stage.scheduler.passed]))
                    raise

        in_every_order(once)
        return outcomes

    return play


# --- send and suspend


def test_an_event_that_is_sent_while_the_run_suspends_is_received(orders):
    async def scenario(stage: Stage) -> str:
        stage.scheduler.hold("the engine", stage.engine)
        await stage.one.start(race_receiver, "Letter", id="r")  # from here on: claimed, loaded, advanced, suspended
        stage.scheduler.hold("the other", stage.other)
        await stage.at_once(stage.other.send("r", Letter(1)))
        assert await stage.ended("r") == 1
        return "received"

    assert orders(scenario)["received"] > 5


def test_an_event_that_is_sent_while_a_busy_run_commits_is_received(orders):
    async def scenario(stage: Stage) -> str:
        stage.scheduler.hold("the engine", stage.engine)
        await stage.one.start(race_busy, id="r")
        stage.scheduler.hold("the other", stage.other)
        await stage.at_once(stage.other.send("r", Letter(1)))
        assert await stage.ended("r") == "event"
        return "received"

    assert orders(scenario)["received"] > 5


def test_first_of_two_events_sent_during_suspension_is_received_and_the_second_retained(orders):
    async def scenario(stage: Stage) -> str:
        stage.scheduler.hold("the engine", stage.engine, answers=False)
        await stage.one.start(race_receiver, "Letter", id="r")
        stage.scheduler.hold("one", stage.one, answers=False)
        stage.scheduler.hold("the other", stage.other, answers=False)
        first, second = await stage.at_once(stage.one.send("r", Letter(1)), stage.other.send("r", Letter(2)))
        received = await stage.ended("r")
        assert received in (1, 2)
        kept = [letter.value["n"] for letter in await stage.one.dead_letters()]
        refused = [n for n, answer in ((1, first), (2, second)) if isinstance(answer, RunTerminated)]
        assert sorted([received, *kept, *refused]) == [1, 2]
        return "kept" if kept else "refused"

    assert set(orders(scenario)) == {"kept", "refused"}


# --- publish and subscribe


def test_an_event_that_is_broadcast_while_the_run_suspends_is_received(orders):
    async def scenario(stage: Stage) -> str:
        stage.scheduler.hold("the engine", stage.engine)
        await stage.one.start(race_receiver, "Offer", id="r")
        stage.scheduler.hold("the other", stage.other)
        (woken,) = await stage.at_once(stage.other.broadcast(Offer(1)))
        assert await stage.ended("r") == 1
        assert await stage.h.store.topic("Offer") == []
        return f"woken {woken}"

    assert set(orders(scenario)) == {"woken 0", "woken 1"}


def test_after_wait_event_is_received_exactly_when_it_woke_the_run(orders):
    async def scenario(stage: Stage) -> str:
        stage.scheduler.hold("the engine", stage.engine)
        await stage.one.start(race_receiver, "Shout", id="r")
        stage.scheduler.hold("the other", stage.other)
        (woken,) = await stage.at_once(stage.other.broadcast(Shout(1)))
        assert await stage.ended("r") == (1 if woken else None)
        assert await stage.h.store.topic("Shout") == []
        return f"woken {woken}"

    assert set(orders(scenario)) == {"woken 0", "woken 1"}


def test_one_event_for_two_runs_that_subscribe_at_once_is_received_by_one(orders):
    async def scenario(stage: Stage) -> str:
        stage.scheduler.hold("the engine", stage.engine, frozenset(("commit",)), answers=False)
        for id in ("a", "b"):
            await stage.one.start(race_receiver, "Offer", id=id)
        stage.scheduler.hold("the other", stage.other, answers=False)
        await stage.at_once(stage.other.broadcast(Offer(1)))
        ended = [await stage.ended(id) for id in ("a", "b")]
        assert sorted(map(str, ended)) == ["1", "None"]
        assert await stage.other.broadcast(Offer(2)) == 1
        await stage.h.clock.advance(1.0)
        assert sorted([await stage.ended(id) for id in ("a", "b")]) == [1, 2]
        return str(ended)

    orders(scenario)


# --- cancel and deliver


def test_event_sent_during_a_cancel_is_received_dead_lettered_or_refused(orders):
    async def scenario(stage: Stage) -> str:
        await stage.begin(race_receiver, "Letter", id="r")
        stage.hold()
        _, sent = await stage.at_once(stage.one.cancel("r"), stage.other.send("r", Letter(1)))
        letters = [letter.value for letter in await stage.one.dead_letters()]
        ended = await stage.ended("r")
        if isinstance(sent, RunTerminated):
            assert (ended, letters) == ("cancelled", [])
            return "refused"
        assert sent is None
        assert (ended, letters) in ((1, []), ("cancelled", [{"n": 1}]))
        return "letter" if letters else "received"

    assert set(orders(scenario)) == {"received", "letter", "refused"}


@pytest.mark.parametrize("how", ["cancel", "terminate"])
def test_broadcast_assigned_to_a_cancelled_receive_goes_to_the_next_waiter(orders, how):
    async def scenario(stage: Stage) -> str:
        await stage.begin(race_receiver, "Offer", id="first")
        await stage.begin(race_receiver, "Offer", id="second")
        stage.hold()
        _, woken = await stage.at_once(getattr(stage.one, how)("first"), stage.other.broadcast(Offer(1)))
        assert woken == 1
        ended = [await stage.ended(id) for id in ("first", "second")]
        assert ended in ([1, None], ["cancelled", 1])
        assert await stage.h.store.topic("Offer") == []
        return str(ended)

    assert set(orders(scenario)) == {"[1, None]", "['cancelled', 1]"}


# --- timeout and delivery


def test_event_sent_at_a_receive_timeout_is_received_by_it_or_the_next(orders):
    async def scenario(stage: Stage) -> str:
        await stage.begin(race_twice, "Letter", 50.0, id="r")
        stage.hold()
        stage.scheduler.let_pass(60.0)
        await stage.at_once(stage.other.send("r", Letter(1)))
        when, number = await stage.ended("r")
        assert number == 1
        assert await stage.one.dead_letters() == []
        return str(when)

    assert set(orders(scenario)) == {"in time", "late"}


def test_broadcast_that_meets_a_receive_timeout_goes_to_the_next_receive(orders):
    async def scenario(stage: Stage) -> str:
        await stage.begin(race_once, "Offer", 50.0, id="first")
        await stage.begin(race_once, "Offer", None, id="second")
        stage.hold()
        stage.scheduler.let_pass(60.0)
        (woken,) = await stage.at_once(stage.other.broadcast(Offer(1)))
        assert woken == 1
        received = [await stage.ended(id) for id in ("first", "second")]
        statuses = [await stage.one.status(id) for id in ("first", "second")]
        assert statuses[0] is RunStatus.SUCCEEDED
        assert received in ([1, None], [None, 1])
        assert (statuses[1] is RunStatus.SUCCEEDED) == (received[1] == 1)
        assert await stage.h.store.topic("Offer") == []
        return str(received)

    assert set(orders(scenario)) == {"[1, None]", "[None, 1]"}


def test_event_that_meets_the_only_receive_timeout_stays_in_its_topic(orders):
    async def scenario(stage: Stage) -> str:
        await stage.begin(race_once, "Offer", 50.0, id="r")
        stage.hold()
        stage.scheduler.let_pass(60.0)
        await stage.at_once(stage.other.broadcast(Offer(1)))
        received = await stage.ended("r")
        left = [each.body for each in await stage.h.store.topic("Offer")]
        assert (received, left) in ((1, []), (None, [b'{"n":1}']))
        return "received" if received else "left"

    assert set(orders(scenario)) == {"received", "left"}
