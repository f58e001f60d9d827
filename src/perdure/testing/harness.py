"""Engines on a virtual clock over one store, so that a test can say "when all is quiet, let an hour pass".

It looks into the engine where the engine has no door for it (which bodies execute, which threads are at work), and is
the only room that does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from perdure.client.client import Client, Run
from perdure.client.session import DirectWait
from perdure.clock import Clock
from perdure.config import EngineConfig
from perdure.engine import Engine
from perdure.execution.maintenance import RECORD_RUNNING_AFTER_SECONDS
from perdure.execution.runtime import WorkerRuntime
from perdure.execution.step_executor import Attempt, StepExecutor
from perdure.model.turns import RunStep
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.testing.clock import VirtualClock, let_the_loop_settle
from perdure.testing.faults import FaultyStore
from perdure.testing.step_interception import intercept_steps
from perdure.testing.time_skipping import SWEEP_DISABLED_SECONDS, LazyClock
from perdure.workflows.definition import Workflow

R = TypeVar("R")
HOUR = 3600.0
WAITED_FOR = ("claim", "finalize", "broadcast")
PATIENCE = 60.0  # real seconds that a thread may take before the harness says that it hangs
LAST_MOMENT = 2.0  # likewise, for what the store is not asked for, such as calling off a call to a server


@dataclass(frozen=True, slots=True)
class Execution:
    """One attempt of a step that an engine began to execute."""

    engine: int
    run_id: str
    location: str
    attempt: int
    at_most_once: bool = False
    key: str = ""  # its idempotency key: the same location of another generation is another step
    name: str = ""


class WatchedEngine(Engine):
    """An engine whose store can be told to fail (`faults`), and whose harness sees what it executes."""

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
            unhurried(runtime, LazyClock(self._harness.clock))
        self._watch(runtime.coordinator.executor)
        return runtime

    def _stand_in(self, step: RunStep) -> RunStep:
        """What is executed in place of a step."""
        return step

    @property
    def worker(self) -> str:
        """The id under which this engine is a member now."""
        assert self._runtime is not None
        return self._runtime.coordinator.worker

    @property
    def resident(self) -> list[str]:
        """The runs that are in its memory."""
        assert self._runtime is not None
        return [resident.id for resident in self._runtime.coordinator.cache]

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

        def begins(run_id: str, step: RunStep) -> RunStep:
            once = step.call.step.settings.at_most_once
            key = step.idempotency_key
            self._harness.executions.append(
                Execution(self.number, run_id, step.location, step.attempt, once, key, step.name)
            )
            return self._stand_in(step)

        intercept_steps(executor, begins)
        executor._threads.run = lambda call: in_thread(  # type: ignore[method-assign]
            self._harness.bodies.watched(call)
        )


class Harness:
    """`async with Harness(store) as harness:`; engines that are still open at the end are abandoned.

    The store survives its engines; each engine gets it through a `FaultyStore` of its own. With `skips` (in memory
    only) time goes from wake-up to wake-up of runs, and none is spent on sweeps and leases.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        clock: VirtualClock | None = None,
        config: EngineConfig | None = None,
        skips: bool = False,
    ) -> None:
        self.skips = skips
        self.clock = clock or VirtualClock()
        self.clock.settle = self.settle
        self.store: Store = MemoryStore(self.clock) if store is None else store
        self.config = unswept(config or EngineConfig()) if skips else config or EngineConfig()
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
        """Abandon what is open, and close the store as often as it was opened."""
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
        """An open engine that executes these workflows; without any, all that it can find."""
        self._engines += 1
        faulty = self.faulty(store)
        engine = WatchedEngine(
            self,
            self._engines,
            faulty,
            workflows=list(workflows) or None,
            config=config or self.config,
            clock=self.clock,
            **options,
        )
        self._open.append(engine)
        await self.drive(engine.open())
        return engine

    async def client(self, *, config: EngineConfig | None = None, store: Store | None = None) -> Client:
        """An open client, which executes nothing."""
        client = Client(self.faulty(store), config=config or self.config, clock=self.clock)
        self._open.append(client)
        await self.drive(client.open())
        return client

    def faulty(self, store: Store | None = None) -> FaultyStore:
        """A new way to the store, with a plan of its own."""
        faulty = FaultyStore(self.store if store is None else store)
        self._faulty.append(faulty)
        return faulty

    async def crash(self, engine: Engine) -> None:
        """The engine's process dies: no word to the store, nothing given back."""
        if self.skips and isinstance(engine, WatchedEngine):  # no lease will run out, so its death is noticed at once
            await self.store.fence_worker(engine.worker)
        await _abandon(engine)
        await self.settle()

    def executed(self, run_id: str | None = None) -> list[tuple[str, int]]:
        """(location, attempt) of every body that was begun, of all runs or of one."""
        return [(each.location, each.attempt) for each in self.executions if run_id in (None, each.run_id)]

    # --- time

    async def settle(self) -> None:
        """Wait until nothing happens any more: only time, or an outside call, can change anything."""
        while True:
            await let_the_loop_settle()
            busy = next((faulty for faulty in self._faulty if faulty.in_flight), None)
            news = busy.came_back if busy is not None else self.bodies.news if self.bodies.working else None
            if news is None:
                return
            news.clear()
            async with asyncio.timeout(PATIENCE):
                await news.wait()

    async def drive(self, work: Awaitable[R], within: float = HOUR) -> R:
        """Wait for something, letting time pass to the next timer whenever all is quiet."""
        task = self.background(work)
        limit = self.clock.now() + within
        await self.settle()
        while not task.done():
            if not await self.clock.move_to_next(limit):
                await asyncio.wait({task}, timeout=LAST_MOMENT)
                if task.done():
                    break
                task.cancel()
                raise AssertionError(f"{work!r} was not done within {within:g} seconds of virtual time")
        return task.result()

    async def run_to_end(self, run: Run[R], within: float = HOUR) -> R:
        """Drive a run to its end and return its value, or raise what `run.result()` raises."""
        return await self.drive(run.result(), within)

    async def drive_until_crash(self, engine: WatchedEngine, work: Awaitable[R], within: float = HOUR) -> R | None:
        """Like `drive`, but gives up with None once the engine's store has let it die."""
        task = self.background(work)
        limit = self.clock.now() + within
        await self.settle()
        while not task.done() and not engine.faults.crashed.is_set():
            if not await self.clock.move_to_next(limit):
                task.cancel()
                raise AssertionError(f"{work!r} was neither done nor cut short within {within:g} virtual seconds")
        return task.result() if task.done() else None

    def background(self, work: Awaitable[R]) -> asyncio.Future[R]:
        """Start something without waiting for it; cancelled when the harness closes."""
        task: asyncio.Future[R] = asyncio.ensure_future(work)
        self._tasks.add(task)
        return task


def unhurried(core: WorkerRuntime, clock: Clock) -> None:
    """Let duties that only look after things go by this clock: all but those which a run may wait for.

    Steps that take long are still shown in time, for that is a commit, and so a place to crash at.
    """
    executor, time = core.coordinator.executor, core.coordinator.executor._clock

    def begins(run_id: str, step: RunStep) -> RunStep:
        time.call_at(time.now() + RECORD_RUNNING_AFTER_SECONDS, exposure.trigger)
        return step

    for duty in core._periodic_tasks:
        if duty.name == "slow_steps":
            exposure = duty
        if duty.name not in WAITED_FOR:
            duty._clock = clock
    intercept_steps(executor, begins)


def unswept(config: EngineConfig) -> EngineConfig:
    """For a store in memory, where nothing gets lost that a sweep would have to find, and no lease runs out."""
    return dataclasses.replace(config, lease=SWEEP_DISABLED_SECONDS, sweep_interval=SWEEP_DISABLED_SECONDS)


class ThreadStepTracker:
    """Bodies of sync steps that are at work in threads; `settle` waits for them, short of those that are parked."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
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
        """Around what a body waits for and only the test can bring about."""
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
                self._loop.call_soon_threadsafe(self.news.set)


async def _abandon(client: Client) -> None:
    if isinstance(client, Engine):
        await client._abandon()
    else:
        await client._session.abandon()


def on_virtual_time(test: Callable[[Harness], Coroutine[Any, Any, R]], store: Store | None = None) -> R:
    """Run an async function with a harness of its own, to the end: for tests without an async plugin."""

    async def main() -> R:
        async with Harness(store) as harness:
            return await test(harness)

    return asyncio.run(main())
