"""Simulation: starts, kills and restarts workers over one store, as the fault plan defines.

It also checks every step body that a worker starts: the recorded state must permit the attempt at that time.
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
from perdure.errors import StoreError
from perdure.model.records import EntryStatus
from perdure.model.turns import RunStep
from perdure.runner.attempt_tracker import EXHAUSTED
from perdure.stores.protocol import Store
from perdure.testing.simulation.event_loop import SimulatedLoop
from perdure.testing.simulation.fault_plan import ROW_UNREADABLE, Fault, Plan
from perdure.testing.simulation.faulty_connection import FaultyConnection
from perdure.testing.simulation.invariant_checker import InvariantChecker
from perdure.testing.simulation.process import Process
from perdure.testing.simulation.randomness import seeded_random
from perdure.testing.step_interception import intercept_steps
from perdure.workflows.definition import Workflow
from perdure.workflows.work_queues import WorkQueue

MakeStore = Callable[[Clock], Store]
Workflows = Sequence[Workflow[Any, Any]]
RESTART_SECONDS = (0.0, 0.5, 2.0)  # seconds until a new process replaces a dead one
REOPEN_SECONDS = 0.5  # seconds until a client opens again after an error


@dataclass(frozen=True, slots=True)
class Deploy:
    """The workflows of workers before and after a deployment.

    `rolling`: each worker shuts down and restarts with the new code at its own time (`at`, in seconds from the start),
    the last ones after the fault phase. Otherwise all workers die at the first of these times, so that no old code is
    executed after new code.
    """

    before: Workflows
    after: Workflows
    rolling: bool = True
    at: Mapping[str, float] = field(default_factory=dict)

    def deploy_at(self, name: str) -> float:
        return self.at.get(name, math.inf) if self.rolling else min(self.at.values(), default=math.inf)


@dataclass(frozen=True, slots=True)
class Body:
    """A step body that a worker started."""

    process: str
    run_id: str
    location: str
    attempt: int
    key: str
    at: float = 0.0
    freezes: Sequence[tuple[float, float]] = field(default=(), compare=False)  # of its process, also later ones


class SimulatedEngine(Engine):
    """An engine that reports every step attempt to its simulation."""

    def __init__(self, simulation: Simulation, process: Process, connection: FaultyConnection, **options: Any) -> None:
        super().__init__(connection, clock=process, **options)
        self.connection = connection
        self.process = process
        self.known = {(each.name, each.version): each for each in options["workflows"]}
        self._simulation = simulation

    def has(self, workflows: Workflows) -> bool:
        return list(self.known.values()) == list(workflows)

    async def open(self) -> None:
        await Client.open(self)
        await self._declare_queues()
        runtime = self._build_runtime()
        self._attach(runtime)  # before it starts, so that a crash while it starts stops it
        executor, coordinator = runtime.coordinator.executor, runtime.coordinator

        def check_attempt(run_id: str, step: RunStep) -> RunStep:
            self._simulation.on_attempt(self.process, coordinator.worker, run_id, step)
            return step

        intercept_steps(executor, check_attempt)
        self._simulation.writings[id(executor._stream_writer)] = self.process
        await runtime.start()


class Simulation:
    """One simulation, created inside the simulated loop. `trace` records events as text; seed and plan determine it."""

    def __init__(
        self,
        seed: object,
        plan: Plan,
        make_store: MakeStore,
        deploy: Deploy,
        config: EngineConfig,
        queues: Sequence[WorkQueue] = (),
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        self.loop = loop
        self.seed = seed
        self.plan = plan
        self.lines: list[str] = []
        self.began_at = loop.current_time
        self.names: dict[str, str] = {}
        self.store = make_store(Process("store", loop, self.trace, {}))
        self.checker = InvariantChecker(self.store, self.trace, config.seconds("run_retention"), self._store_time)
        self.bodies: list[Body] = []
        self.damaged: set[str] = set()  # runs whose rows were unreadable for a while
        self.writings: dict[int, Process] = {}
        self._deploy = deploy
        self._config = config
        self._queues = queues
        self._counts: dict[str, dict[str, int]] = {}
        self._faults_ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._engines: dict[str, SimulatedEngine] = {}
        self._leaving: dict[str, asyncio.Event] = {}
        self._clients: list[Client] = []
        self._connections: list[FaultyConnection] = []

    def _store_time(self) -> float:
        return self.loop.current_time

    # --- trace

    def trace(self, line: str) -> None:
        self.lines.append(f"{self.loop.current_time - self.began_at:9.4f} {line}")

    # --- processes

    def start_worker(self, name: str) -> None:
        self._tasks.append(self.loop.create_task(self._run_worker(name)))
        self._tasks.append(self.loop.create_task(self._change_code(name)))
        for fault in self.plan.in_time(name):
            self._tasks.append(self.loop.create_task(self._disturb(fault)))

    async def client(self, name: str) -> Client:
        """Return an open client in its own process, which does not die. Opening it may take several attempts."""
        process, connection = self._process(name)
        while True:
            client = Client(connection, config=self._config, clock=process)
            try:
                await client.open()
            except StoreError as error:
                self.trace(f"{name} cannot open its client: {error}")
                await process.wait(REOPEN_SECONDS)
            else:
                self._clients.append(client)
                return client

    def damage_rows(self) -> None:
        """Make rows unreadable as planned, until the end of the fault phase."""
        for fault in self.plan.faults:
            if fault.kind == ROW_UNREADABLE:
                self._tasks.append(self.loop.create_task(self._damage_row(fault)))

    async def _damage_row(self, fault: Fault) -> None:
        await self._until(fault.at)
        if not self._faults_ended.is_set():
            self.trace(str(fault))
            self.checker.unreadable.add(fault.process)
            self.damaged.add(fault.process)

    async def heal(self) -> None:
        """End the fault phase: dead workers restart, frozen processes continue, clocks are correct."""
        self.trace("the fault phase ends")
        self._faults_ended.set()
        self.checker.unreadable.clear()
        for connection in self._connections:
            connection.healed = True
            connection.process.thaw()
            connection.process.correct_clock()

    async def close(self) -> None:
        """Kill all processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in self._engines.values():
            await engine._abandon()
        for client in self._clients:
            await client._session.abandon()

    def _process(self, name: str) -> tuple[Process, FaultyConnection]:
        process = Process(name, self.loop, self.trace, self._counts.setdefault(name, {}))
        connection = FaultyConnection(self.checker, process, self.plan, self.seed)
        connection.healed = self._faults_ended.is_set()
        self._connections.append(connection)
        return process, connection

    async def _run_worker(self, name: str) -> None:
        rng = seeded_random(self.seed, name, "life")
        while True:
            process, connection = self._process(name)
            workflows = self._deploy.after if self._is_deployed(name) else self._deploy.before
            options = {"workflows": workflows, "queues": self._queues, "config": self._config}
            engine = SimulatedEngine(self, process, connection, **options)
            self._engines[name] = engine
            leaving = self._leaving[name] = asyncio.Event()
            self.trace(f"{name} starts")
            opened = await _finish_before_death(self.loop, process, engine.open())
            if opened and await _finish_before_death(self.loop, process, leaving.wait()):
                self.trace(f"{name} leaves")
                await _finish_before_death(self.loop, process, engine.shutdown(rng.choice((0.0, 1.0))))
            process.dead.set()
            await engine._abandon()
            await process.wait(0.0 if self._faults_ended.is_set() else rng.choice(RESTART_SECONDS))

    def _is_deployed(self, name: str) -> bool:
        return self._faults_ended.is_set() or self.loop.current_time >= self.began_at + self._deploy.deploy_at(name)

    async def _change_code(self, name: str) -> None:
        await self._until(self._deploy.deploy_at(name))
        engine = self._engines.get(name)
        if engine is None or engine.has(self._deploy.after):
            return
        self.trace(f"{name} gets new code")
        if self._deploy.rolling:
            self._leaving[name].set()
        else:
            engine.process.die()

    async def _until(self, at: float) -> None:
        """Wait until `at` seconds from the start, or until the end of the fault phase."""
        waiting = self.loop.create_task(self._faults_ended.wait())
        left = self.began_at + at - self.loop.current_time
        await asyncio.wait((waiting,), timeout=None if math.isinf(left) else max(0.0, left))
        waiting.cancel()

    async def _disturb(self, fault: Fault) -> None:
        await self._until(fault.at)
        engine = self._engines.get(fault.process)
        if self._faults_ended.is_set() or engine is None:
            return
        self.trace(str(fault))
        process = engine.process
        match fault.kind:
            case "paused":
                process.freeze(fault.amount)
            case "clock jumps":
                process.skew += fault.amount
            case "clock drifts":
                process.set_clock_rate(fault.amount)
            case "clock stands still":
                process.set_clock_rate(0.0)
                await self._until(fault.at + fault.amount)
                process.set_clock_rate(1.0)
            case "leaves":
                self._leaving[fault.process].set()
            case _:
                engine.connection.disturb_hints(fault.kind, fault.amount)

    # --- step bodies

    def on_attempt(self, process: Process, worker: str, run_id: str, step: RunStep) -> None:
        """Check that the recorded state permits the step attempt that a worker starts."""
        if run_id not in self.checker.models:
            return  # the run was stopped and deleted meanwhile
        now, key = self.loop.current_time, step.idempotency_key
        self.bodies.append(Body(process.name, run_id, step.location, step.attempt, key, now, process.freezes))
        self.trace(f"{process.name} executes {step.idempotency_key} (attempt {step.attempt})")
        run, checker = self.checker.models[run_id], self.checker
        if run.owner != worker:
            # The run was taken over or stopped meanwhile. A step body that runs already cannot be fenced.
            if worker not in checker.fenced and not run.touched:
                checker.report(f"{process.name} executes {step.location} of run {run_id}, which {run.owner} owns")
            return
        if (run.workflow, run.version) not in self._engines[process.name].known:
            checker.report(f"{process.name} executes {run.workflow} version {run.version}, which it has not registered")
        entry = run.entries.get(step.location)
        where = f"step {step.location} of run {run_id}"
        if run.completed_entry(step.location) is not None:
            checker.report(f"{where} is recorded, but is executed again")
        if entry is not None and entry.due_at is not None and step.attempt <= entry.attempts:
            checker.report(f"attempt {step.attempt} of {where} is recorded as failed, but is executed again")
        if entry is not None and entry.detail == EXHAUSTED:
            checker.report(f"{where} holds the run, but is executed before a resume")
        recorded = entry is not None and entry.status is EntryStatus.PENDING and entry.attempts >= step.attempt
        if step.call.step.settings.at_most_once and not recorded:
            checker.report(f"{where} is at-most-once, but starts before its attempt is recorded")


async def _finish_before_death(loop: SimulatedLoop, process: Process, work: Coroutine[Any, Any, object]) -> bool:
    """Wait for `work` of a process until the process dies. Return whether the work succeeded."""
    task, death = loop.create_task(work), loop.create_task(process.dead.wait())
    try:
        await asyncio.wait((task, death), return_when=asyncio.FIRST_COMPLETED)
        return task.done() and task.exception() is None
    finally:
        task.cancel()
        death.cancel()
        await asyncio.gather(task, death, return_exceptions=True)
