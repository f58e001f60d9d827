"""Guarantee 4 under load: at the end each accepted event is accounted for exactly once.

Eight senders, two hundred runs, targeted and broadcast events mixed, with cancels, terminated runs, dead letters that
several replay at once, engines that die during a commit or shut down, and lost responses.
Everything is drawn from a seed.
"""

import asyncio
import os
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, EngineConfig, RunStatus, RunTerminated, event, workflow
from perdure.stores.writes import FanOut, PublishEvent
from perdure.testing import Harness, VirtualClock
from tests.engine.store_matrix import SERVERS, STORES, make_store

RUNS, SENDERS, ROUNDS = 200, 8, 25
SEEDS = int(os.environ.get("PERDURE_STRESS_SEEDS", "0"))  # for a longer look, at full size on every store
SHARE_ON_SERVERS = 1.0 if SEEDS else 0.4  # of runs and rounds: each call is a real round trip there
CONFIG = EngineConfig(lease=3.0, sweep_interval=1.0, max_recoveries=10_000)


@event
class Plain:
    n: int


@event(on_target_terminated="broadcast")
class Passed:
    n: int


@event(on_target_terminated="dead_letter")
class Precious:
    n: int


@event(on_target_terminated="dead_letter", expire_after=2.0)
class Short:
    n: int


@event
class Shared:
    n: int


@event(delivery="after_wait")
class Loud:
    n: int


@event(consume=False)
class News:
    n: int


@event(expire_after=2.0)
class Passing:
    n: int


TARGETED = (Plain, Passed, Precious, Short)
BROADCAST = (Shared, Loud, News, Passing)
ALL = (*TARGETED, *BROADCAST)
MAY_EXPIRE = ("Short", "Passing")


@workflow
async def stress_receiver(ctx: Context, seed: int, stays: bool) -> str:
    """Receive in every way, with timeouts and races; then end with a non-empty mailbox, or stay open."""
    dice = random.Random(seed)
    for _ in range(dice.randrange(2, 8)):
        way = dice.randrange(4)
        wanted = dice.sample(ALL, dice.randrange(1, len(ALL)))
        timeout = dice.choice([0.0, 0.3, 1.0, 3.0])
        try:
            if way == 0:
                await ctx.receive(*ALL, timeout=timeout)
            elif way == 1:
                await ctx.receive_batch(*wanted, max=3, timeout=timeout)
            elif way == 2:
                await ctx.race(event=ctx.receive(*wanted), limit=ctx.sleep(timeout))
            else:
                await asyncio.gather(ctx.receive(*wanted, timeout=1.0), ctx.receive(*ALL, timeout=2.0))
        except TimeoutError:
            await ctx.sleep(0.1)
    while stays:
        await ctx.receive(*ALL)
    return "enough"


@workflow
async def stress_deaf(ctx: Context) -> None:
    """Receives nothing: its events are in its mailbox when it is stopped."""
    await ctx.sleep(3600)


class Ledger:
    """What was accepted, by number: the event's name and, if it was targeted, the run that it was for."""

    def __init__(self) -> None:
        self.accepted: dict[int, tuple[str, str | None]] = {}
        self.replayed: set[int] = set()  # to any run or to the topic
        self.refused = 0
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


class Storm:
    def __init__(self, harness: Harness, seed: int, share: float) -> None:
        self.h = harness
        self.rounds = int(ROUNDS * share)
        self.dice = random.Random(seed)
        self.ledger = Ledger()
        self.engines: list[Any] = []
        self.senders: list[Any] = []
        self.deaths = 0
        self.ids = [f"run-{n:03}" for n in range(int(RUNS * share))]
        self.deaf = [f"deaf-{n:02}" for n in range(self.rounds)]  # one for each round, in which it is stopped

    async def blow(self) -> None:
        self.senders = [await self.h.client(config=CONFIG) for _ in range(SENDERS)]
        self.engines = [await self._engine() for _ in range(2)]
        seeds = [self.dice.randrange(1_000_000) for _ in self.ids]
        starter = self.senders[0]
        starts = [
            starter.start(stress_receiver, seed, seed % 5 == 0, id=id) for id, seed in zip(self.ids, seeds, strict=True)
        ]
        await self.h.drive(asyncio.gather(*starts, *(starter.start(stress_deaf, id=id) for id in self.deaf)))
        for number, deaf in enumerate(self.deaf):
            self._plan_trouble(fatal=number % 3 == 0)
            sending = [self._send(sender) for sender in self.senders]
            await self.h.drive(asyncio.gather(*sending, *self._stops(), self._strand(deaf), self._replay_some()))
            await self.h.clock.advance(self.dice.choice([0.0, 0.05, 0.5]))
            await self._replace_the_dead()
        for engine in self.engines:
            engine.faults.crash(1_000_000, "before")  # never reached: from here on no engine dies
        await self.h.clock.advance(15.0)

    def _plan_trouble(self, *, fatal: bool) -> None:
        """Crash an engine at random, and in every third round for certain if it has something to commit."""
        engine = self.dice.choice(self.engines)
        chance = self.dice.random()
        if fatal or chance < 0.2:
            engine.faults.crash(self.dice.randrange(1, 6), self.dice.choice(["before", "after"]))
        elif chance < 0.5:
            engine.faults.lose_responses(self.dice.randrange(1, 3))
        self.dice.choice(self.senders)._session.store.lose_responses(self.dice.randrange(2))

    async def _replace_the_dead(self) -> None:
        for engine in list(self.engines):
            leaves = self.dice.random() < 0.02
            if not engine.faults.crashed.is_set() and not leaves:
                continue
            self.engines.remove(engine)
            self.deaths += 1
            if not engine.faults.crashed.is_set():
                await self.h.drive_until_crash(engine, engine.shutdown(grace=1.0))
            if engine.faults.crashed.is_set():  # before, or while it was leaving
                await self.h.crash(engine)
            self.engines.append(await self._engine())

    async def _engine(self) -> Any:
        return await self.h.engine(stress_receiver, stress_deaf, config=CONFIG)

    def _stops(self) -> list[Any]:
        sender = self.dice.choice(self.senders)
        stops = [sender.cancel(id) for id in self.dice.sample(self.ids, self.dice.randrange(2))]
        if self.dice.random() < 0.2:
            stops.append(sender.terminate(self.dice.choice(self.ids)))
        return stops

    async def _strand(self, deaf: str) -> None:
        """Create two dead letters, one of them for replay, so that every seed has some."""
        sender = self.dice.choice(self.senders)
        for number in (self.ledger.next(), self.ledger.next()):
            await sender.send(deaf, Precious(number), event_id=f"e-{number}")
            self.ledger.accepted[number] = ("Precious", deaf)
        assert await sender.terminate(deaf)

    async def _replay_some(self) -> None:
        """Replay the same dead letters three times at once: to two runs and to the topic. Every other one stays."""
        letters = await self.senders[0].dead_letters(limit=50)
        for letter in [each for each in letters if each.value["n"] % 2][:2]:
            self.ledger.replayed.add(letter.value["n"])
            places = [*self.dice.sample(self.ids, 2), None]
            senders = self.dice.sample(self.senders, 3)
            trials = (self._replay(sender, letter.id, to) for sender, to in zip(senders, places, strict=True))
            assert sum(await asyncio.gather(*trials)) <= 1

    async def _replay(self, sender: Any, dead_letter_id: str, to: str | None) -> bool:
        try:
            return bool(await sender.replay_dead_letter(dead_letter_id, to))
        except RunTerminated:
            return False

    async def _send(self, sender: Any) -> None:
        for _ in range(self.dice.randrange(1, 6)):
            number, id = self.ledger.next(), self.dice.choice(self.ids)
            event_id = f"e-{number}"
            if self.dice.random() < 0.5:
                kind: Any = self.dice.choice(TARGETED)
                try:
                    await sender.send(id, kind(number), event_id=event_id)
                except RunTerminated:
                    self.ledger.refused += 1
                    continue
                self.ledger.accepted[number] = (kind.__name__, id)
            else:
                kind = self.dice.choice(BROADCAST)
                await sender.broadcast(kind(number), event_id=event_id)
                self.ledger.accepted[number] = (kind.__name__, None)


class Found:
    """Where events are at the end."""

    def __init__(self) -> None:
        self.received: dict[int, list[str]] = {}
        self.queued: Counter[int] = Counter()  # in a mailbox or a topic
        self.letters: Counter[int] = Counter()
        self.status: dict[str, RunStatus] = {}
        self.waiting: list[tuple[str, set[str]]] = []  # open runs, and what they wait for

    async def look(self, storm: Storm) -> None:
        client, store = storm.senders[0], storm.h.store
        for id in (*storm.ids, *storm.deaf):
            self.status[id] = (await client.describe(id)).status
            for entry in await client.history(id):
                if entry.kind.startswith("receive") and entry.status == "succeeded":
                    for value in entry.value if entry.kind == "receive_batch" else [entry.value]:
                        self.received.setdefault(value.n, []).append(id)
                elif entry.kind.startswith("receive") and entry.status == "pending" and not self.status[id].terminal:
                    self.waiting.append((id, set(entry.name.split(","))))
            for message in await store.inbox(id):
                if message.kind == "event":
                    self.queued[_number(message.body)] += 1
        for kind in ALL:
            after = 0
            while page := await store.topic(kind.__name__, 100, after):
                self.queued.update(_number(each.body) for each in page)
                after = page[-1].offset
        for letter in await client.dead_letters(limit=10_000):
            self.letters[letter.value["n"]] += 1


def _number(body: bytes | None) -> int:
    assert body is not None
    return int(body.split(b":")[1].rstrip(b"}"))


def unaccounted(number: int, name: str, target: str | None, found: Found, *, replayed: bool) -> str | None:
    """Return what is wrong with the location of an accepted event; None if it has exactly one valid location."""
    received, queued, letters = found.received.get(number, []), found.queued[number], found.letters[number]
    if name == "News":
        return None if len(received) == len(set(received)) and queued == 1 else "not once to each reader"
    places = len(received) + queued + letters
    if places > 1:
        return "in more than one place"
    if places == 1:
        stranger = target is not None and received not in ([], [target]) and name != "Passed" and not replayed
        return "received by another run than it was for" if stranger else None
    if name in MAY_EXPIRE or name == "Loud":
        return None  # expired, or its reader was terminated and no other run waited
    if name == "Plain" and target is not None and found.status[target].terminal:
        return None  # discarded, as its type says
    return "lost"


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the page size, so that a broadcast takes several commits."""
    monkeypatch.setattr("perdure.execution.store_writes.PublishEvent", partial(PublishEvent, page=7))
    for module in ("store_writes", "maintenance"):
        monkeypatch.setattr(f"perdure.execution.{module}.FanOut", partial(FanOut, page=7))


@pytest.mark.parametrize(
    ("kind", "seed"), [(kind, seed) for kind in STORES for seed in range(SEEDS or (1 if kind in SERVERS else 2))]
)
def test_every_accepted_event_is_accounted_for_once(kind: str, seed: int, tmp_path: Path) -> None:
    async def main() -> None:
        clock = VirtualClock()
        async with Harness(make_store(kind, tmp_path, clock), clock=clock, config=CONFIG) as harness:
            random.seed(seed)  # pauses between tries are drawn by lot
            share = SHARE_ON_SERVERS if kind in SERVERS else 1.0
            storm, found = Storm(harness, seed, share), Found()
            await storm.blow()
            await found.look(storm)
            accepted = storm.ledger.accepted
            assert {*found.received, *found.letters} <= accepted.keys()
            faults = [
                f"{name} {number} for {target}: {wrong}: {found.received.get(number)} {found.queued[number]}"
                for number, (name, target) in accepted.items()
                if (wrong := unaccounted(number, name, target, found, replayed=number in storm.ledger.replayed))
            ]
            assert faults == []
            _check_no_run_waits_in_vain(storm, found)
            assert await harness.store.unfinalized() == []
            assert await harness.store.unfinished_broadcasts() == []
            assert storm.deaths > 0
            assert len(accepted) > 300 * share
            if share == 1.0:
                assert len(found.received) > 100
                assert storm.deaths > 3
            assert found.letters
            assert found.waiting
            assert storm.ledger.replayed.intersection(found.received)

    asyncio.run(main())


def _check_no_run_waits_in_vain(storm: Storm, found: Found) -> None:
    """An open run that waits for a kind of event has none of it in its mailbox, and none is left in the topic."""
    for id, names in found.waiting:
        for number in found.queued:
            name, target = storm.ledger.accepted[number]
            seen = name == "News" and id in found.received.get(number, [])
            reaches = target in (None, id) or (name == "Passed" and found.status[target].terminal)
            there = name in names and name not in MAY_EXPIRE  # what has expired stays until it is pruned
            assert not (there and reaches and not seen), f"{id} waits for {name}, and {number} is there"
