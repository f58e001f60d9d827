"""Moved events: a dead letter that several callers replay, and messages of a run that is rewound while finalized.

Each scenario runs in every order in which its processes can reach the store.
"""

import asyncio
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, EngineConfig, workflow
from perdure.model.records import DeadLetter, Message
from perdure.model.turns import TurnExtras
from perdure.stores.results import Committed, Snapshot
from perdure.stores.writes import RewindRun
from perdure.testing import Harness, VirtualClock
from tests.engine.interleaving import CallScheduler, Choose, in_every_order
from tests.engine.store_matrix import STORES, make_store
from tests.engine.store_setup import Stage

LONG = EngineConfig(sweep_interval=100_000.0, lease=500_000.0)  # nothing is found by a sweep
REPLAYING = frozenset(("dead_letter", "remove_dead_letter", "commit"))


@workflow
async def once_nothing(ctx: Context) -> None:
    """A workflow without steps, for an engine that only handles messages of other runs."""


@pytest.fixture(params=STORES)
def orders(request, tmp_path: Path):
    """Runs a scenario on new stores in every order, and counts the outcomes."""
    names = count()

    def play(scenario) -> Counter[Any]:
        outcomes: Counter[Any] = Counter()

        async def once(choose: Choose) -> None:
            clock = VirtualClock()
            store = make_store(request.param, tmp_path, clock, f"store-{next(names)}")
            async with Harness(store, clock=clock) as harness:
                scheduler = CallScheduler(harness, choose)
                try:
                    outcomes[await scenario(harness, scheduler)] += 1
                except BaseException as error:
                    error.add_note("\n".join(["in this order:", *scheduler.passed]))
                    raise

        in_every_order(once)
        return outcomes

    return play


async def at_once(h: Harness, scheduler: CallScheduler, *actions: Any) -> list[Any]:
    """Run these calls in the chosen order. Return the outcome of each."""
    tasks = [h.background(action) for action in actions]
    await scheduler.play()
    scheduler.leave()
    return list(await h.drive(asyncio.gather(*tasks, return_exceptions=True)))


async def create_dead_letter(h: Harness) -> None:
    """Create a dead letter, and two runs that wait for nothing."""
    stage = Stage(h)
    dead_letter = DeadLetter(id="d", kind="event", at=1.0, reason="why", event_name="lost", event_id="e", value=b"7")
    for id in ("a", "b"):
        await stage.run(id)
    await stage.turn("a", extras=TurnExtras(dead_letters=(dead_letter,)))


async def where_it_is(h: Harness, client: Any) -> list[str]:
    """Return every location that holds the event now."""
    found = [id for id in ("a", "b") for message in await h.store.inbox(id) if message.event_id == "e"]
    found += ["topic" for each in await h.store.topic("lost") if each.event_id == "e"]
    return found + ["dead letter" for _ in await client.dead_letters()]


def test_concurrent_replays_of_a_dead_letter_one_wins(orders):
    async def scenario(h: Harness, scheduler: CallScheduler) -> tuple[Any, ...]:
        await create_dead_letter(h)
        one, other = [await h.client(config=LONG) for _ in range(2)]
        scheduler.hold("one", one, REPLAYING)
        scheduler.hold("the other", other, REPLAYING)
        answers = await at_once(
            h, scheduler, one.replay_dead_letter("d", to="a"), other.replay_dead_letter("d", to="b")
        )
        assert sorted(answers) == [False, True]
        assert await where_it_is(h, one) == ["a" if answers[0] else "b"]
        return tuple(answers)

    assert set(orders(scenario)) == {(True, False), (False, True)}


def test_concurrent_replay_and_removal_of_a_dead_letter_one_wins(orders):
    async def scenario(h: Harness, scheduler: CallScheduler) -> tuple[Any, ...]:
        await create_dead_letter(h)
        one, other = [await h.client(config=LONG) for _ in range(2)]
        scheduler.hold("one", one, REPLAYING)
        scheduler.hold("the other", other, REPLAYING)
        answers = await at_once(h, scheduler, one.replay_dead_letter("d"), other.remove_dead_letter("d"))
        assert sorted(answers) == [False, True]
        assert await where_it_is(h, one) == (["topic"] if answers[0] else [])
        return tuple(answers)

    assert set(orders(scenario)) == {(True, False), (False, True)}


def test_dead_letter_replayed_to_an_ending_run_is_not_lost(orders):
    async def scenario(h: Harness, scheduler: CallScheduler) -> str:
        await create_dead_letter(h)
        one, other = [await h.client(config=LONG) for _ in range(2)]
        scheduler.hold("one", one, REPLAYING)
        scheduler.hold("the other", other, frozenset(("commit",)), answers=False)
        answer, stopped = await at_once(h, scheduler, one.replay_dead_letter("d", to="b"), other.terminate("b"))
        assert stopped is True
        await settled(h)
        (letter,) = await one.dead_letters()
        assert (letter.event_id, letter.value) == ("e", 7)
        assert letter.original_target == ("b" if answer is True else None)
        return "sent" if answer is True else type(answer).__name__

    assert set(orders(scenario)) == {"sent", "RunTerminated"}


async def settled(h: Harness) -> None:
    """Let a worker of its own finalize ended runs."""
    await h.engine(once_nothing)
    await h.clock.advance(6)
    assert await h.store.unfinalized() == []


def test_messages_of_a_run_rewound_during_finalization_are_not_duplicated(orders):
    async def scenario(h: Harness, scheduler: CallScheduler) -> str:
        stage = Stage(h)
        await stage.run("e")
        await stage.run("r")
        await stage.observe("r", "e")  # so that settling takes two commits
        message = Message(id="event/e", event_id="e", kind="event", name="lost", body=b"7", policy="broadcast")
        await stage.deliver("r", message)
        engine = await h.engine(once_nothing, config=LONG)
        client: Any = await h.client(config=LONG)
        await stage.end("r")
        scheduler.hold("the engine", engine, frozenset(("commit", "unfinalized")), answers=False)
        scheduler.hold("who rewinds", client, frozenset(("commit",)), answers=False)
        scheduler.let_pass(1.0)
        ((rewound,),) = await at_once(h, scheduler, client._session.store.commit([await rewinding(h, "r")]))
        assert rewound == Committed()
        await settled(h)
        unread = [each.event_id for each in await h.store.inbox("r")]
        moved = [each.event_id for each in await h.store.topic("lost")]
        assert unread + moved == ["e"]
        return "unread" if unread else "moved"

    assert set(orders(scenario)) == {"unread", "moved"}


async def rewinding(h: Harness, run_id: str) -> RewindRun:
    (snapshot,) = await h.store.load([run_id])
    assert isinstance(snapshot, Snapshot)
    return RewindRun(run_id=run_id, base=snapshot.position, turn_id="back", now=h.clock.now(), dropped=())
