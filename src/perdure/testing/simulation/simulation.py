"""The world of one simulation: workers that live, die and come back, over one store, as the plan says.

It also looks over the shoulder of every worker as it begins to execute the body of a step, which must be allowed by
what is on record at that moment.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.client.client import Client
from perdure.clock import Clock
from perdure.config import EngineConfig
from perdure.engine import Engine
from perdure.model.records import EntryStatus
from perdure.model.turns import RunStep
from perdure.runner.attempt_tracker import EXHAUSTED
from perdure.stores.protocol import Store
from perdure.testing.simulation.event_loop import SimulatedLoop
from perdure.testing.simulation.fault_plan import Fault, Plan
from perdure.testing.simulation.faulty_connection import FaultyConnection
from perdure.testing.simulation.invariant_checker import InvariantChecker
from perdure.testing.simulation.process import Process
from perdure.testing.simulation.randomness import seeded_random
from perdure.testing.step_interception import intercept_steps
from perdure.workflows.definition import Workflow

MakeStore = Callable[[Clock], Store]
Workflows = Sequence[Workflow[Any, Any]]
RESTART = (0.0, 0.5, 2.0)  # seconds until another process takes the place of one that is gone


@dataclass(frozen=True, slots=True)
class Deploy:
    """What workers can execute before and after a change of code.

    `rolling`: each worker leaves and comes back with the new code at a moment of its own (`at`, in seconds from the
    start), the last ones when the storm is over. Otherwise all of them die at the first of these moments: no old code
    is executed after new code.
    """

    before: Workflows
    after: Workflows
    rolling: bool = True
    at: Mapping[str, float] = field(default_factory=dict)

    def moment(self, name: str) -> float:
        return self.at.get(name, math.inf) if self.rolling else min(self.at.values(), default=math.inf)


@dataclass(frozen=True, slots=True)
class Body:
    """A body that a worker began to execute."""

    process: str
    run_id: str
    location: str
    attempt: int
    key: str


class SimulatedEngine(Engine):
    """An engine whose world sees what it executes."""

    def __init__(self, world: Simulation, process: Process, door: FaultyConnection, **options: Any) -> None:
        super().__init__(door, clock=process, **options)
        self.door = door
        self.process = process
        self.known = {(each.name, each.version): each for each in options["workflows"]}
        self._world = world

    def has(self, workflows: Workflows) -> bool:
        return list(self.known.values()) == list(workflows)

    async def open(self) -> None:
        await Client.open(self)
        runtime = self._build_runtime()
        self._attach(runtime)  # before it starts, so that a crash while it starts stops it
        executor, coordinator = runtime.coordinator.executor, runtime.coordinator

        def begins(run_id: str, step: RunStep) -> RunStep:
            self._world.executes(self.process, coordinator.worker, run_id, step)
            return step

        intercept_steps(executor, begins)
        self._world.writings[id(executor._stream_writer)] = self.process
        await runtime.start()


class Simulation:
    """Made inside the simulated loop. `trace` gathers what happened, in words, the same for the same seed and plan."""

    def __init__(
        self,
        seed: object,
        plan: Plan,
        make_store: MakeStore,
        deploy: Deploy,
        config: EngineConfig,
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        self.loop = loop
        self.seed = seed
        self.plan = plan
        self.lines: list[str] = []
        self.began_at = loop.moment
        self.names: dict[str, str] = {}
        self.store = make_store(Process("store", loop, self.trace, {}))
        self.witness = InvariantChecker(self.store, self.trace, config.seconds("run_retention"))
        self.bodies: list[Body] = []
        self.writings: dict[int, Process] = {}
        self._deploy = deploy
        self._config = config
        self._counts: dict[str, dict[str, int]] = {}
        self._healed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._engines: dict[str, SimulatedEngine] = {}
        self._leaving: dict[str, asyncio.Event] = {}
        self._clients: list[Client] = []
        self._doors: list[FaultyConnection] = []

    # --- what happened

    def trace(self, line: str) -> None:
        self.lines.append(f"{self.loop.moment - self.began_at:9.4f} {line}")

    # --- processes

    def start_worker(self, name: str) -> None:
        self._tasks.append(self.loop.create_task(self._live(name)))
        self._tasks.append(self.loop.create_task(self._change_code(name)))
        for fault in self.plan.in_time(name):
            self._tasks.append(self.loop.create_task(self._disturb(fault)))

    async def client(self, name: str) -> Client:
        """An open client in a process of its own; it does not die."""
        process, door = self._process(name)
        client = Client(door, config=self._config, clock=process)
        await client.open()
        self._clients.append(client)
        return client

    async def heal(self) -> None:
        """From now on nothing goes wrong any more; whoever is dead comes back, whoever is frozen goes on."""
        self.trace("the storm is over")
        self._healed.set()
        for door in self._doors:
            door.healed = True
            door.process.thaw()
            door.process.skew = 0.0

    async def close(self) -> None:
        """All processes die."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in self._engines.values():
            await engine._abandon()
        for client in self._clients:
            await client._session.abandon()

    def _process(self, name: str) -> tuple[Process, FaultyConnection]:
        process = Process(name, self.loop, self.trace, self._counts.setdefault(name, {}))
        door = FaultyConnection(self.witness, process, self.plan, self.seed)
        door.healed = self._healed.is_set()
        self._doors.append(door)
        return process, door

    async def _live(self, name: str) -> None:
        chance = seeded_random(self.seed, name, "life")
        while True:
            process, door = self._process(name)
            workflows = self._deploy.after if self._is_deployed(name) else self._deploy.before
            engine = SimulatedEngine(self, process, door, workflows=workflows, config=self._config)
            self._engines[name] = engine
            leaving = self._leaving[name] = asyncio.Event()
            self.trace(f"{name} starts")
            opened = await _first(self.loop, process, engine.open())
            if opened and await _first(self.loop, process, leaving.wait()):
                self.trace(f"{name} leaves")
                await _first(self.loop, process, engine.shutdown(chance.choice((0.0, 1.0))))
            process.dead.set()
            await engine._abandon()
            await process.wait(0.0 if self._healed.is_set() else chance.choice(RESTART))

    def _is_deployed(self, name: str) -> bool:
        return self._healed.is_set() or self.loop.moment >= self.began_at + self._deploy.moment(name)

    async def _change_code(self, name: str) -> None:
        await self._until(self._deploy.moment(name))
        engine = self._engines.get(name)
        if engine is None or engine.has(self._deploy.after):
            return
        self.trace(f"{name} gets new code")
        if self._deploy.rolling:
            self._leaving[name].set()
        else:
            engine.process.die()

    async def _until(self, at: float) -> None:
        """The moment that is so many seconds from the start, or the end of the storm."""
        waiting = self.loop.create_task(self._healed.wait())
        left = self.began_at + at - self.loop.moment
        await asyncio.wait((waiting,), timeout=None if math.isinf(left) else max(0.0, left))
        waiting.cancel()

    async def _disturb(self, fault: Fault) -> None:
        await self._until(fault.at)
        engine = self._engines.get(fault.process)
        if self._healed.is_set() or engine is None:
            return
        self.trace(str(fault))
        process = engine.process
        match fault.kind:
            case "paused":
                process.freeze(fault.amount)
            case "clock jumps":
                process.skew += fault.amount
            case "leaves":
                self._leaving[fault.process].set()
            case _:
                engine.door.disturb_hints(fault.kind, fault.amount)

    # --- what bodies do

    def executes(self, process: Process, worker: str, run_id: str, step: RunStep) -> None:
        """A worker begins to execute a body: what is on record must allow it."""
        if run_id not in self.witness.models:
            return  # it was stopped under its hands, and is gone by now
        self.bodies.append(Body(process.name, run_id, step.location, step.attempt, step.idempotency_key))
        self.trace(f"{process.name} executes {step.idempotency_key} (attempt {step.attempt})")
        run, witness = self.witness.models[run_id], self.witness
        if run.owner != worker:
            # It was taken over, or the run was stopped under its hands: such a body cannot be fenced.
            if worker not in witness.gone and not run.touched:
                witness.breaks(f"{process.name} executes {step.location} of run {run_id}, which {run.owner} owns")
            return
        if (run.workflow, run.version) not in self._engines[process.name].known:
            witness.breaks(f"{process.name} executes {run.workflow} version {run.version}, which it does not have")
        entry = run.entries.get(step.location)
        where = f"step {step.location} of run {run_id}"
        if run.settled_at(step.location) is not None:
            witness.breaks(f"{where} is on record, and is executed again")
        if entry is not None and entry.due_at is not None and step.attempt <= entry.attempts:
            witness.breaks(f"attempt {step.attempt} of {where} is on record as failed, and is executed again")
        if entry is not None and entry.detail == EXHAUSTED:
            witness.breaks(f"{where} holds the run until it is resumed, and is executed")
        begun = entry is not None and entry.status is EntryStatus.PENDING and entry.attempts >= step.attempt
        if step.call.step.settings.at_most_once and not begun:
            witness.breaks(f"{where} is to be executed at most once, and begins before that is on record")


async def _first(loop: SimulatedLoop, process: Process, work: Coroutine[Any, Any, object]) -> bool:
    """Wait for something that a process does, unless it dies first. Whether it was done."""
    task, death = loop.create_task(work), loop.create_task(process.dead.wait())
    try:
        await asyncio.wait((task, death), return_when=asyncio.FIRST_COMPLETED)
        return task.done() and task.exception() is None
    finally:
        task.cancel()
        death.cancel()
        await asyncio.gather(task, death, return_exceptions=True)
