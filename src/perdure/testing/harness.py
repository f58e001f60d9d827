"""Harness: engines on a virtual clock over one store, for tests such as "when all is idle, let an hour pass".

The harness reads engine internals that have no public interface: which step bodies execute and which threads are busy.
It is the only module that does so.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from perdure.client.client import Client
from perdure.client.run_handle import Run
from perdure.client.session import DirectWait
from perdure.clock import SYSTEM_CLOCK, Clock, sleep_on
from perdure.config import EngineConfig
from perdure.engine import Engine
from perdure.execution.maintenance import RECORD_RUNNING_AFTER_SECONDS
from perdure.execution.runtime import WorkerRuntime
from perdure.execution.step_executor import Attempt, StepExecutor
from perdure.model.turns import RunStep
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.testing.clock import VirtualClock, drain_loop
from perdure.testing.faults import FaultyStore
from perdure.testing.step_interception import intercept_steps
from perdure.testing.time_skipping import REAL_POLL_SECONDS, SWEEP_DISABLED_SECONDS, LazyClock, RealWaits
from perdure.workflows.definition import Workflow
from perdure.workflows.work_queues import QUEUES, WorkQueue

R = TypeVar("R")
HOUR = 3600.0
WAITED_FOR = ("claim", "finalize", "broadcast", "admission", "schedules", "internal")
HANG_TIMEOUT_SECONDS = 60.0  # real seconds that a thread may take before the harness reports that it hangs
OUTSIDE_TIMEOUT_SECONDS = 2.0  # real seconds for work outside the store, such as cancelling a call to a server


@dataclass(frozen=True, slots=True)
class Execution:
    """One attempt of a step that an engine started."""

    engine: int
    run_id: str
    location: str
    attempt: int
    at_most_once: bool = False
    key: str = ""  # the idempotency key; one location has a different key in each generation
    name: str = ""


class WatchedEngine(Engine):
    """An engine with an injectable store (`faults`), whose harness records the step attempts."""

    def __init__(self, harness: Harness, number: int, faults: FaultyStore, **options: Any) -> None:
        super().__init__(faults, **options)
        self.faults = faults
        self.number = number
        self._harness = harness
        # Where time is skipped there is no other process, and a poll would let time pass.
        self._session.wait_strategy = DirectWait(polls=not harness.skips)

    def _build_runtime(self) -> WorkerRuntime:
        runtime = super()._build_runtime()
        if self._harness.skips:
            use_lazy_clock(runtime, LazyClock(self._harness.clock))
        self._watch(runtime.coordinator.executor)
        return runtime

    def _replace_step(self, step: RunStep) -> RunStep:
        """Return the step to execute instead of `step`."""
        return step

    @property
    def worker(self) -> str:
        """The id under which this engine is a member now."""
        assert self._runtime is not None
        return self._runtime.coordinator.worker

    @property
    def loaded_runs(self) -> list[str]:
        """Ids of the runs that this engine holds in memory."""
        assert self._runtime is not None
        return [loaded.id for loaded in self._runtime.coordinator.cache]

    @property
    def slots_taken(self) -> int:
        assert self._runtime is not None
        return self._runtime.coordinator.executor.busy

    @property
    def bodies_under_way(self) -> list[Attempt]:
        """Attempts whose bodies are coroutines on this loop; those in threads are the harness's own concern."""
        if self._runtime is None:
            return []
        running = self._runtime.coordinator.executor._running.values()
        return [attempt for of_run in running for attempt in of_run.values() if attempt.task is not None]

    def _drop_all(self) -> None:
        """Forget every run and body, where there is no event loop any more to do it in an orderly way."""
        runtime = self._detach()
        if runtime is not None:
            runtime.coordinator.discard_all()
            runtime.coordinator.executor.close()
        self._session.discard()

    def _watch(self, executor: StepExecutor) -> None:
        in_thread = executor._threads.run

        def record_execution(run_id: str, step: RunStep) -> RunStep:
            once = step.call.step.settings.at_most_once
            key = step.idempotency_key
            self._harness.executions.append(
                Execution(self.number, run_id, step.location, step.attempt, once, key, step.name)
            )
            return self._replace_step(step)

        intercept_steps(executor, record_execution)
        executor._threads.run = lambda call: in_thread(  # type: ignore[method-assign]
            self._harness.bodies.watched(call)
        )


class Harness:
    """`async with Harness(store) as harness:`; engines that are open at the end are abandoned.

    The store outlives its engines; each engine uses it through its own `FaultyStore`. With `skips`, which requires an
    in-memory store, time moves from wake-up to wake-up of runs, without sweeps and lease renewals. With `given_up`, a
    step body that waits for real I/O gets real time before virtual time moves; the set collects the attempts that
    reached the limit of real time (`RealWaits`).
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        clock: VirtualClock | None = None,
        config: EngineConfig | None = None,
        skips: bool = False,
        given_up: set[tuple[str, int]] | None = None,
    ) -> None:
        self.skips = skips
        self.clock = clock or VirtualClock()
        waits = None if given_up is None else RealWaits(self.settle, self._bodies_under_way, given_up)
        self.clock.settle = self.settle if waits is None else waits.settle
        self.store: Store = MemoryStore(self.clock) if store is None else store
        self.config = without_sweeps(config or EngineConfig()) if skips else config or EngineConfig()
        self._queues_before = {each.name: each for each in QUEUES.all()}
        self.executions: list[Execution] = []
        self.bodies = ThreadStepTracker()
        self._open: list[Client] = []
        self._engines = 0
        self._faulty: list[FaultyStore] = []
        self._tasks: set[asyncio.Future[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Abandon open engines and clients, and close the store as often as it was opened."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._open:
            await _abandon(client)
        for faulty in self._faulty:
            for _ in range(faulty.opened):
                await faulty.inner.close()

    # --- engines

    async def engine(
        self,
        *workflows: Workflow[Any, Any],
        config: EngineConfig | None = None,
        store: Store | None = None,
        **options: Any,
    ) -> WatchedEngine:
        """Return an open engine that executes these workflows, or all registered ones without arguments.

        It declares the work queues that the test has made and those of these workflows, not all that other tests have
        imported. `queues` names others; with None it declares all.
        """
        self._engines += 1
        faulty = self.faulty(store)
        declares_started = "queues" not in options
        options.setdefault("queues", self._own_queues(workflows))
        engine = WatchedEngine(
            self,
            self._engines,
            faulty,
            workflows=list(workflows) or None,
            config=config or self.config,
            clock=self.clock,
            **options,
        )
        if declares_started:
            engine._session.declares_queue = lambda queue: True
        self._open.append(engine)
        await self.drive(engine.open())
        return engine

    def _own_queues(self, workflows: Sequence[Workflow[Any, Any]]) -> list[WorkQueue]:
        """Return the queues that were defined since this harness, and those of the workflows."""
        defined = [each for each in QUEUES.all() if self._queues_before.get(each.name) is not each]
        defaults = (each.settings.queue for each in workflows)
        found = {each.name: each for each in defaults if isinstance(each, WorkQueue)}
        return list({**found, **{each.name: each for each in defined}}.values())

    async def client(self, *, config: EngineConfig | None = None, store: Store | None = None) -> Client:
        """Return an open client, which executes no runs."""
        client = Client(self.faulty(store), config=config or self.config, clock=self.clock)
        self._open.append(client)
        await self.drive(client.open())
        return client

    def faulty(self, store: Store | None = None) -> FaultyStore:
        """Return a new `FaultyStore` around the store, with its own fault plan."""
        faulty = FaultyStore(self.store if store is None else store)
        self._faulty.append(faulty)
        return faulty

    async def crash(self, engine: Engine) -> None:
        """Simulate the death of the engine's process: it writes nothing more and releases no runs."""
        if self.skips and isinstance(engine, WatchedEngine):  # no lease expires, so fence it at once
            await self.store.fence_worker(engine.worker)
        await _abandon(engine)
        await self.settle()

    def executed(self, run_id: str | None = None) -> list[tuple[str, int]]:
        """Return (location, attempt) of every step body that was started, of all runs or of one run."""
        return [(each.location, each.attempt) for each in self.executions if run_id in (None, each.run_id)]

    # --- time

    async def settle(self) -> None:
        """Wait until only the passing of time or an external call can change anything."""
        while True:
            await drain_loop()
            busy = next((faulty for faulty in self._faulty if faulty.in_flight), None)
            event = busy.call_returned if busy is not None else self.bodies.finished if self.bodies.working else None
            if event is None:
                return
            event.clear()
            async with asyncio.timeout(HANG_TIMEOUT_SECONDS):
                await event.wait()

    async def drive(self, work: Awaitable[R], within: float = HOUR) -> R:
        """Return the result of `work`. Whenever everything is idle, time moves to the next timer.

        Raises AssertionError if the work takes longer than `within` virtual seconds.
        """
        task = self.background(work)
        if await self._pass_time(task, task.done, within):
            return task.result()
        raise AssertionError(f"{work!r} was not done within {within:g} seconds of virtual time")

    async def run_to_end(self, run: Run[R], within: float = HOUR) -> R:
        """Drive a run to its end and return its result. Raises the errors of `run.result()`."""
        return await self.drive(run.result(), within)

    async def drive_until_crash(self, engine: WatchedEngine, work: Awaitable[R], within: float = HOUR) -> R | None:
        """Like `drive`, but return None when the planned crash of the engine has happened."""
        task = self.background(work)
        if await self._pass_time(task, lambda: task.done() or engine.faults.crashed.is_set(), within):
            return task.result() if task.done() else None
        raise AssertionError(f"{work!r} was neither done nor interrupted within {within:g} virtual seconds")

    async def _pass_time(self, task: asyncio.Future[R], is_done: Callable[[], bool], within: float) -> bool:
        """Move time from timer to timer until `is_done`. Return False, and cancel the task, after `within` seconds."""
        limit = self.clock.now() + within
        await self.clock.settle()
        while not is_done():
            if not (await self.clock.move_to_next(limit) or await self._wait_in_real_time(is_done, limit)):
                task.cancel()
                return False
        return True

    async def _wait_in_real_time(self, is_done: Callable[[], bool], limit: float) -> bool:
        """Wait for work outside the store. Return False if it neither ends the wait nor sets a timer up to `limit`."""
        for _ in range(int(OUTSIDE_TIMEOUT_SECONDS / REAL_POLL_SECONDS)):
            await sleep_on(SYSTEM_CLOCK, REAL_POLL_SECONDS)
            await self.clock.settle()
            due = self.clock.next_due
            if is_done() or (due is not None and due <= limit):
                return True
        return False

    def _bodies_under_way(self) -> list[Attempt]:
        """Return the running coroutine bodies of engines that have not crashed."""
        engines = [each for each in self._open if isinstance(each, WatchedEngine)]
        return [body for each in engines if not each.faults.crashed.is_set() for body in each.bodies_under_way]

    def background(self, work: Awaitable[R]) -> asyncio.Future[R]:
        """Start `work` without waiting for it. It is cancelled when the harness closes."""
        task: asyncio.Future[R] = asyncio.ensure_future(work)
        self._tasks.add(task)
        return task


def use_lazy_clock(core: WorkerRuntime, clock: Clock) -> None:
    """Let the periodic tasks use this clock, except for those that a run may wait for.

    Long steps are still recorded as running in time: that is a commit, and therefore a crash point.
    """
    executor, time = core.coordinator.executor, core.coordinator.executor._clock

    def schedule_record(run_id: str, step: RunStep) -> RunStep:
        time.call_at(time.now() + RECORD_RUNNING_AFTER_SECONDS, exposure.trigger)
        return step

    for task in core._periodic_tasks:
        if task.name == "slow_steps":
            exposure = task
        if task.name not in WAITED_FOR:
            task._clock = clock
    intercept_steps(executor, schedule_record)


def without_sweeps(config: EngineConfig) -> EngineConfig:
    """Return the config for an in-memory store without sweeps and lease expiry. Memory loses no notification."""
    return dataclasses.replace(config, lease=SWEEP_DISABLED_SECONDS, sweep_interval=SWEEP_DISABLED_SECONDS)


class ThreadStepTracker:
    """Counts the sync step bodies that run in threads. `settle` waits for them, except for parked ones."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()
        self._lock = threading.Lock()
        self._working = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def working(self) -> int:
        with self._lock:
            return self._working

    def watched(self, call: Callable[[], None]) -> Callable[[], None]:
        self._loop = asyncio.get_running_loop()
        self._count(1)

        def run() -> None:
            try:
                call()
            finally:
                self._count(-1)

        return run

    @contextlib.contextmanager
    def parked(self) -> Iterator[None]:
        """Exclude the body from the count while it waits for an action of the test."""
        self._count(-1)
        try:
            yield
        finally:
            self._count(1)

    def _count(self, change: int) -> None:
        with self._lock:
            self._working += change
        if change < 0 and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the test is over
                self._loop.call_soon_threadsafe(self.finished.set)


async def _abandon(client: Client) -> None:
    if isinstance(client, Engine):
        await client._abandon()
    else:
        await client._session.abandon()


def on_virtual_time(test: Callable[[Harness], Coroutine[Any, Any, R]], store: Store | None = None) -> R:
    """Run an async test function with a new harness, for tests without an async plugin."""

    async def main() -> R:
        async with Harness(store) as harness:
            return await test(harness)

    return asyncio.run(main())
