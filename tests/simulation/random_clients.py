"""Random clients, and a record of their calls and responses. Each is a separate process; responses may be lost."""

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from perdure import (
    Client,
    InvalidPayload,
    InvalidToken,
    RunCancelled,
    RunConflict,
    RunFailed,
    RunNotFound,
    RunQuery,
    RunStatus,
    RunTerminated,
    StoreError,
    WorkflowMisuse,
)
from perdure.admin.repair import prune
from perdure.admin.run_import import import_run
from perdure.client.views import RunDescription
from perdure.stores.results import Snapshot
from perdure.testing.simulation.run_model import RunModel
from perdure.testing.simulation.simulation import Simulation
from tests.simulation.event_types import BROADCAST, TARGETED, Request
from tests.simulation.fork_model import wrong_with_fork
from tests.simulation.random_programs import FORKS, IMPORTS, RUNS, Node
from tests.simulation.random_queues import REFUSALS as QUEUE_REFUSALS
from tests.simulation.random_queues import control_queue, draw_start_options
from tests.simulation.random_schedules import control_schedule, create_schedules
from tests.simulation.stream_followers import STREAMS, Follower
from tests.simulation.workflows import FLOWS, tree

CLEANUP = ("~cancel", "~cleanup", "~exit", "~children", "~removed")  # locations
OF_CHILDREN = ("child", "start_child", "result", "outcome", "watch", "stop")  # kinds of entries
REFUSALS = (InvalidPayload, InvalidToken, RunConflict, RunNotFound, RunTerminated, WorkflowMisuse)


@dataclass(frozen=True)
class Life:
    """One generation of a run. An id may be used again after its run was pruned."""

    id: str
    created_at: float
    generation: int

    def is_of(self, run: RunModel) -> bool:
        return (run.id, run.generation) == (self.id, self.generation) and abs(run.created_at - self.created_at) < 0.5


@dataclass(frozen=True)
class Program:
    """The program of a run: the name of its workflow, and the trees that it executes."""

    flow: str
    parts: list[Node]


@dataclass
class Responses:
    """The responses of clients: `sent` by event number ("ok", "refused" or "unsure"), created runs, ends, records."""

    sent: dict[str, str] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)
    ends: list[tuple[Life, str]] = field(default_factory=list)  # with its status
    records: list[tuple[Life, str, Any]] = field(default_factory=list)  # with a location and its value
    forks: dict[str, str] = field(default_factory=dict)  # the original run of each fork
    completed: list[tuple[str, str, bool]] = field(default_factory=list)  # run, token, whether it was first
    followers: list[Follower] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    calls: int = 0
    refused: int = 0


class Caller:
    """One client: a sequence of random calls with pauses between them."""

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        rng: random.Random,
        programs: dict[str, Program],
        responses: Responses,
        *,
        restarts: bool = False,
        queues: bool = False,
        schedules: bool = False,
    ):
        self._simulation = simulation
        self._name = name
        self._rng = rng
        self._programs = programs
        self._responses = responses
        self._sent = 0
        self._restarts = restarts
        self._queues = queues
        self._schedules = schedules
        self.client: Client = None  # type: ignore[assignment]

    async def run(self, until: float) -> None:
        self.client = await self._simulation.client(self._name)
        process: Any = self.client._session.process_clock
        if self._schedules:
            await create_schedules(self._simulation, self.client)
        while self._simulation.loop.current_time - self._simulation.began_at < until:
            await process.wait(self._rng.choice((0.0, 0.01, 0.1, 0.3, 1.0)))
            await self.call()

    async def call(self) -> None:
        ways: list[tuple[int, Callable[[str], Awaitable[Any]]]] = [
            (10, self._start),
            (8, self._send),
            (6, self._broadcast),
            (5, self._complete),
            (3, self._describe),
            (2, self._cancel),
            (1, self._terminate),
            (1, self._resume),
            (1, self._rewind),
            (1, self._fork),
            (1, self._import),
            (2, self._follow),
            (1, self._prune),
            (2, self._request),
            (2, self._refused),
        ]
        if self._restarts:
            ways.append((8, self._restart))
        if self._queues:
            ways += [(12, self._start), (6, self._control_queue), (1, self._pause)]
        if self._schedules:
            ways.append((3, self._control_schedule))
        way = self._rng.choices([each for _, each in ways], [weight for weight, _ in ways])[0]
        run_id = self._rng.choice(RUNS if way in (self._start, self._restart) else [*RUNS, *RUNS, *FORKS, *IMPORTS])
        self._simulation.trace(f"{self._name}{way.__name__.replace('_', ' ', 1)} {run_id}")
        self._responses.calls += 1
        try:
            response = await way(run_id)
        except (*REFUSALS, *QUEUE_REFUSALS) as error:
            self._responses.refused += 1
            response = type(error).__name__
        except (StoreError, TimeoutError, msgspec.ValidationError) as error:  # the last: an unreadable row
            response = f"{type(error).__name__} (outcome unknown)"
        if response is not None:
            self._simulation.trace(f"{self._name} receives: {response}")

    # --- calls

    async def _start(self, run_id: str) -> str:
        program = self._programs[run_id]
        options = draw_start_options(self._rng, run_id) if self._queues else {"id": run_id}
        run: Any = await self.client.start(FLOWS[program.flow], program.parts, **options)
        if run.created:
            self._responses.created.append(run.id)
        return f"created={run.created}"

    async def _control_queue(self, run_id: str) -> str:
        return await control_queue(self._rng, self.client)

    async def _control_schedule(self, run_id: str) -> str:
        return await control_schedule(self._rng, self.client)

    async def _pause(self, run_id: str) -> None:
        await self.client.pause(run_id)

    async def _restart(self, run_id: str) -> str:
        program, if_exists = self._programs[run_id], self._rng.choice(("restart", "restart_ended"))
        run: Any = await self.client.start(FLOWS[program.flow], program.parts, id=run_id, if_exists=if_exists)
        if run.created:
            self._responses.created.append(run_id)
        return f"{if_exists}: created={run.created}"

    async def _send(self, run_id: str) -> None:
        await self._sending(
            lambda n: self._rng.choice(TARGETED)(n), lambda e, id: self.client.send(run_id, e, event_id=id)
        )

    async def _broadcast(self, run_id: str) -> None:
        kind = self._rng.choice(BROADCAST)
        await self._sending(kind, lambda event, id: self.client.broadcast(event, event_id=id))

    async def _request(self, run_id: str) -> str | None:
        async def request(event: Any, event_id: str) -> Any:
            return await self.client.request(run_id, event, timeout=1.0, event_id=event_id)

        number = self._next()
        reply = await request(Request(number), f"id {number}")
        if reply != f"re {number}":
            self._responses.violations.append(f"{self._name} requested {number} and received {reply!r}")
        return str(reply)

    async def _sending(self, make: Callable[[str], Any], send: Callable[[Any, str], Awaitable[Any]]) -> None:
        number = self._next()
        event = make(number)
        self._responses.sent[number] = "unsure"
        try:
            for _ in range(self._rng.choice((1, 1, 2))):  # a repeated event id is delivered once
                await send(event, f"id {number}")
                self._responses.sent[number] = "ok"
        except (RunNotFound, RunTerminated):
            if self._responses.sent[number] == "unsure":
                self._responses.sent[number] = "refused"
            raise

    def _next(self) -> str:
        self._sent += 1
        return f"{self._name}/{self._sent}"

    async def _complete(self, run_id: str) -> str:
        token = await self.client.deferred_token(run_id, f"d{self._rng.randrange(3)}")
        first = await self.client.complete(token, self._rng.randrange(100))
        self._responses.completed.append((run_id, token, first))
        return f"first={first}"

    async def _describe(self, run_id: str) -> str | None:
        described = await self.client.describe(run_id)
        history = await self.client.history(run_id)
        again = await self.client.describe(run_id)
        life = _life(described)
        if life == _life(again):
            for entry in history:
                if entry.status != "pending":
                    self._responses.records.append((life, entry.location, entry.value))
        if described.status.terminal:
            self._responses.ends.append((life, str(described.status)))
            await self._read_result(run_id, life, str(described.status))
        return str(described.status)

    async def _read_result(self, run_id: str, life: Life, status: str) -> None:
        try:
            await self.client.result(run_id, timeout=0.0)
            result = "succeeded"
        except RunFailed:
            result = "failed"
        except RunCancelled:
            result = "cancelled"
        if result != status and _life(await self.client.describe(run_id)) == life:
            self._responses.violations.append(f"run {run_id} was {status}, and then {result}")

    async def _cancel(self, run_id: str) -> str:
        return str(await self.client.cancel(run_id))

    async def _terminate(self, run_id: str) -> str:
        return str(await self.client.terminate(run_id))

    async def _resume(self, run_id: str) -> None:
        await self.client.resume(run_id)

    async def _rewind(self, run_id: str) -> str:
        history = await self.client.history(run_id)
        location = self._rng.choice([entry.location for entry in history] or ["nowhere"])
        await self.client.rewind(run_id, location)
        return f"to {location}"

    async def _fork(self, run_id: str) -> str:
        history = await self.client.history(run_id)
        location = self._rng.choice([entry.location for entry in history] or ["nowhere"])
        fork_id, simulation = self._rng.choice(FORKS), self._simulation
        with self._snapshots() as read:
            run = await self.client.fork(run_id, location, id=fork_id)
        self._responses.forks[run.id] = run_id
        for wrong in wrong_with_fork(read[-1], location, simulation.checker.creations[run.id]):
            self._responses.violations.append(f"{run.id}, forked from {run_id} at {location}: {wrong}")
        return f"{fork_id} at {location}"

    async def _import(self, run_id: str) -> str:
        """Import a copy of an open run, as from another store: such a run has no children here."""
        data, new_id = await self.client.export_history(run_id), self._rng.choice(IMPORTS)
        if not _is_importable(data):
            return "not imported"
        return f"imported as {await import_run(self.client, data, run_id=new_id)}"

    async def _follow(self, run_id: str) -> None:
        await self.client.describe(run_id)  # refused if the run does not exist
        follower = Follower(run_id, self._rng.choice(STREAMS), self._rng.choice((0, 0, 1, 3)))
        self._responses.followers.append(follower)
        follower.begin(self.client)

    @contextmanager
    def _snapshots(self) -> Iterator[list[Snapshot]]:
        """Collect the snapshots that the client reads within this block."""
        client: Any = self.client
        read, snapshot_of = [], client._session.load_snapshot

        async def collect(run_id: str) -> Snapshot:
            read.append(await snapshot_of(run_id))
            return read[-1]

        client._session.load_snapshot = collect
        try:
            yield read
        finally:
            del client._session.load_snapshot

    async def _prune(self, run_id: str) -> str:
        return str(await prune(self.client, 100))

    async def _refused(self, run_id: str) -> None:
        """Make an invalid call. The invariant checker detects writes of rejected calls."""
        match self._rng.randrange(5):
            case 0:
                await self.client.start(tree, [["ok", 99, []]], id=run_id)  # conflicts, unless it is the first start
            case 1:
                await self.client.send("unknown", TARGETED[0](self._next()))
            case 2:
                await self.client.complete("forged", 1)
            case 3:
                await self.client.rewind(run_id, "no/such/place")
            case _:
                await self.client.start(tree, object(), id="never")  # cannot be encoded


def _is_importable(data: dict[str, Any]) -> bool:
    """Return whether an exported run is open, without children, and has not begun to clean up."""
    entries = [(entry["kind"], entry["location"]) for entry in data["entries"]]
    cleans_up = any(location.startswith(CLEANUP) or "~rollback" in location for _, location in entries)
    has_children = any(kind in OF_CHILDREN for kind, _ in entries)
    return not (RunStatus(data["run"].get("status", "pending")).terminal or cleans_up or has_children)


def _life(described: RunDescription) -> Life:
    return Life(described.id, described.created_at.timestamp(), described.generation)


async def all_records(client: Client) -> list[Any]:
    page = await client._session.store.runs(RunQuery(limit=1_000))
    return list(page.runs)
