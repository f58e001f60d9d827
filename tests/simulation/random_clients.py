"""Random clients: what they ask for, and what they were told. Each is a process of its own, and may be told nothing."""

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from perdure import (
    Client,
    InvalidPayload,
    InvalidToken,
    RunCancelled,
    RunConflict,
    RunFailed,
    RunNotFound,
    RunQuery,
    RunTerminated,
    StoreError,
    WorkflowMisuse,
)
from perdure.admin.repair import prune
from perdure.client.views import RunDescription
from perdure.stores.results import Snapshot
from perdure.testing.simulation.run_model import RunModel
from perdure.testing.simulation.simulation import Simulation
from tests.simulation.event_types import BROADCAST, TARGETED, Question
from tests.simulation.fork_model import wrong_with_fork
from tests.simulation.random_programs import FORKS, RUNS, Node
from tests.simulation.workflows import FLOWS, tree

REFUSALS = (InvalidPayload, InvalidToken, RunConflict, RunNotFound, RunTerminated, WorkflowMisuse)


@dataclass(frozen=True)
class Life:
    """One generation of a run: an id may be used again when its run was pruned."""

    id: str
    created_at: float
    generation: int

    def is_of(self, run: RunModel) -> bool:
        return (run.id, run.generation) == (self.id, self.generation) and abs(run.created_at - self.created_at) < 0.5


@dataclass(frozen=True)
class Program:
    """What a run is to do: its workflow, by name, and the trees that it grows."""

    flow: str
    parts: list[Node]


@dataclass
class Seen:
    """What clients were told: `sent` by number ("ok", "refused" or "unsure"), what they created, ends, records."""

    sent: dict[str, str] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)
    ends: list[tuple[Life, str]] = field(default_factory=list)  # with its status
    records: list[tuple[Life, str, Any]] = field(default_factory=list)  # with a location and its value
    forks: dict[str, str] = field(default_factory=dict)  # of which run each is a copy
    settled: list[tuple[str, str, bool]] = field(default_factory=list)  # token of a deferred: who was first
    broken: list[str] = field(default_factory=list)
    calls: int = 0
    refused: int = 0


class Caller:
    """One client: a row of calls, drawn from its dice, with pauses between them."""

    def __init__(self, world: Simulation, name: str, chance: random.Random, programs: dict[str, Program], seen: Seen):
        self._world = world
        self._name = name
        self._chance = chance
        self._programs = programs
        self._seen = seen
        self._sent = 0
        self.client: Client = None  # type: ignore[assignment]

    async def live(self, until: float) -> None:
        self.client = await self._world.client(self._name)
        process: Any = self.client._session.process_clock
        while self._world.loop.moment - self._world.began_at < until:
            await process.wait(self._chance.choice((0.0, 0.01, 0.1, 0.3, 1.0)))
            await self.call()

    async def call(self) -> None:
        ways: list[tuple[int, Callable[[str], Awaitable[Any]]]] = [
            (10, self._start),
            (8, self._send),
            (6, self._broadcast),
            (5, self._complete),
            (3, self._look),
            (2, self._cancel),
            (1, self._terminate),
            (1, self._resume),
            (1, self._rewind),
            (1, self._fork),
            (1, self._prune),
            (2, self._request),
            (2, self._refused),
        ]
        way = self._chance.choices([each for _, each in ways], [weight for weight, _ in ways])[0]
        run_id = self._chance.choice(RUNS if way == self._start else [*RUNS, *RUNS, *FORKS])
        self._world.trace(f"{self._name}{way.__name__.replace('_', ' ', 1)} {run_id}")
        self._seen.calls += 1
        try:
            told = await way(run_id)
        except REFUSALS as error:
            self._seen.refused += 1
            told = type(error).__name__
        except (StoreError, TimeoutError) as error:
            told = f"{type(error).__name__} (who knows)"
        if told is not None:
            self._world.trace(f"{self._name} is told: {told}")

    # --- calls

    async def _start(self, run_id: str) -> str:
        program = self._programs[run_id]
        run: Any = await self.client.start(FLOWS[program.flow], program.parts, id=run_id)
        if run.created:
            self._seen.created.append(run_id)
        return f"created={run.created}"

    async def _send(self, run_id: str) -> None:
        await self._sending(
            lambda n: self._chance.choice(TARGETED)(n), lambda e, id: self.client.send(run_id, e, event_id=id)
        )

    async def _broadcast(self, run_id: str) -> None:
        kind = self._chance.choice(BROADCAST)
        await self._sending(kind, lambda event, id: self.client.broadcast(event, event_id=id))

    async def _request(self, run_id: str) -> str | None:
        async def ask(event: Any, event_id: str) -> Any:
            return await self.client.request(run_id, event, timeout=1.0, event_id=event_id)

        number = self._next()
        answer = await ask(Question(number), f"id {number}")
        if answer != f"re {number}":
            self._seen.broken.append(f"{self._name} asked {number} and was answered {answer!r}")
        return str(answer)

    async def _sending(self, make: Callable[[str], Any], send: Callable[[Any, str], Awaitable[Any]]) -> None:
        number = self._next()
        event = make(number)
        self._seen.sent[number] = "unsure"
        try:
            for _ in range(self._chance.choice((1, 1, 2))):  # twice under one id is once
                await send(event, f"id {number}")
                self._seen.sent[number] = "ok"
        except (RunNotFound, RunTerminated):
            if self._seen.sent[number] == "unsure":
                self._seen.sent[number] = "refused"
            raise

    def _next(self) -> str:
        self._sent += 1
        return f"{self._name}/{self._sent}"

    async def _complete(self, run_id: str) -> str:
        token = await self.client.deferred_token(run_id, f"d{self._chance.randrange(3)}")
        first = await self.client.complete(token, self._chance.randrange(100))
        self._seen.settled.append((run_id, token, first))
        return f"first={first}"

    async def _look(self, run_id: str) -> str | None:
        described = await self.client.describe(run_id)
        history = await self.client.history(run_id)
        again = await self.client.describe(run_id)
        life = _life(described)
        if life == _life(again):
            for entry in history:
                if entry.status != "pending":
                    self._seen.records.append((life, entry.location, entry.value))
        if described.status.terminal:
            self._seen.ends.append((life, str(described.status)))
            await self._read_result(run_id, life, str(described.status))
        return str(described.status)

    async def _read_result(self, run_id: str, life: Life, status: str) -> None:
        try:
            await self.client.result(run_id, timeout=0.0)
            told = "succeeded"
        except RunFailed:
            told = "failed"
        except RunCancelled:
            told = "cancelled"
        if told != status and _life(await self.client.describe(run_id)) == life:
            self._seen.broken.append(f"run {run_id} was {status}, and then {told}")

    async def _cancel(self, run_id: str) -> str:
        return str(await self.client.cancel(run_id))

    async def _terminate(self, run_id: str) -> str:
        return str(await self.client.terminate(run_id))

    async def _resume(self, run_id: str) -> None:
        await self.client.resume(run_id)

    async def _rewind(self, run_id: str) -> str:
        history = await self.client.history(run_id)
        location = self._chance.choice([entry.location for entry in history] or ["nowhere"])
        await self.client.rewind(run_id, location)
        return f"to {location}"

    async def _fork(self, run_id: str) -> str:
        history = await self.client.history(run_id)
        location = self._chance.choice([entry.location for entry in history] or ["nowhere"])
        fork_id, world = self._chance.choice(FORKS), self._world
        with self._snapshots() as read:
            run = await self.client.fork(run_id, location, id=fork_id)
        self._seen.forks[run.id] = run_id
        for wrong in wrong_with_fork(read[-1], location, world.witness.births[run.id]):
            self._seen.broken.append(f"{run.id}, forked from {run_id} at {location}: {wrong}")
        return f"{fork_id} at {location}"

    @contextmanager
    def _snapshots(self) -> Iterator[list[Snapshot]]:
        """What the client reads of runs within this block."""
        client: Any = self.client
        read, snapshot_of = [], client._session.load_snapshot

        async def remember(run_id: str) -> Snapshot:
            read.append(await snapshot_of(run_id))
            return read[-1]

        client._session.load_snapshot = remember
        try:
            yield read
        finally:
            del client._session.load_snapshot

    async def _prune(self, run_id: str) -> str:
        return str(await prune(self.client, 100))

    async def _refused(self, run_id: str) -> None:
        """Calls that cannot be granted; that they leave nothing is seen by the witness."""
        match self._chance.randrange(5):
            case 0:
                await self.client.start(tree, [["ok", 99, []]], id=run_id)  # clashes, unless it is the first
            case 1:
                await self.client.send("nobody", TARGETED[0](self._next()))
            case 2:
                await self.client.complete("forged", 1)
            case 3:
                await self.client.rewind(run_id, "no/such/place")
            case _:
                await self.client.start(tree, object(), id="never")  # cannot be encoded


def _life(described: RunDescription) -> Life:
    return Life(described.id, described.created_at.timestamp(), described.generation)


async def all_records(client: Client) -> list[Any]:
    page = await client._session.store.runs(RunQuery(limit=1_000))
    return list(page.runs)
