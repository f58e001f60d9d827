"""TestEngine: an in-memory engine on a virtual clock that skips waiting times.

    async with TestEngine() as engine:
        charged = engine.mock(charge, returns="receipt-42")
        assert await engine.execute(reminder, order) == "receipt-42"     # a month passes, in milliseconds
        assert len(charged.calls) == 1

It has every method of `Engine`. Time stands still, except while a caller waits for a result, a reply or a stream: then
time skips from wake-up to wake-up. A wait that nothing can end fails at once, with what the run waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from perdure.client.run_handle import Run
from perdure.client.session import Awaited, Change
from perdure.client.views import HistoryEntry
from perdure.clock import to_datetime
from perdure.config import EngineConfig
from perdure.errors import WorkflowMisuse
from perdure.execution.lifespan import LifespanOption
from perdure.execution.runtime import WorkerRuntime
from perdure.model.records import RunRecord
from perdure.model.turns import RunStep
from perdure.model.validation import check_seconds
from perdure.runner.blocking_guard import blocking_refused
from perdure.testing.harness import Harness, WatchedEngine, use_lazy_clock, without_sweeps
from perdure.testing.mocks import StepMock, Target
from perdure.testing.time_skipping import SWEEP_DISABLED_SECONDS, NothingDue, TimeSkipper, TooMany
from perdure.workflows.definition import Workflow
from perdure.workflows.steps import UNSET, Step


class Recorded(NamedTuple):
    """One entry of a history, comparable with a plain tuple. The value of a failed entry is its error as text."""

    location: str
    status: str
    value: Any


class TestEngine(WatchedEngine):
    """An in-memory engine on virtual time. `workflows`, `config` and `lifespan` are those of `Engine`.

    Ended runs are retained. `async with` opens it; so does the first call, unless it has a lifespan. Runs that have not
    ended when it closes are dropped.
    """

    __test__ = False  # pytest would collect it as a test class

    def __init__(
        self,
        workflows: Iterable[Workflow[Any, Any]] | None = None,
        config: EngineConfig | None = None,
        lifespan: LifespanOption | None = None,
        *,
        refuse_blocking: bool = True,
    ) -> None:
        harness = Harness()
        super().__init__(
            harness,
            1,
            harness.faulty(),
            workflows=workflows,
            config=without_sweeps(config or EngineConfig(run_retention=SWEEP_DISABLED_SECONDS)),
            lifespan=lifespan,
            clock=harness.clock,
            queues=[],  # a queue is declared when a run is first started into it
        )
        self._session.declares_queue = lambda queue: True
        self.clock = harness.clock
        self._passing = TimeSkipper(harness.clock, harness.settle, lambda: self.bodies_under_way)
        self._session.wait_strategy = _TimeSkippingWait(self._passing, self.now, self._reasons)
        self._session.open_on_use = self._open_on_use
        self._mocks: list[StepMock] = []
        self._guard = contextlib.ExitStack()
        self._refuse_blocking = refuse_blocking
        self._home: asyncio.AbstractEventLoop | None = None
        self._closed = False

    # --- lifecycle

    async def open(self) -> None:
        if self._closed:
            raise WorkflowMisuse("this TestEngine is closed; create a new one")
        if self._home is None:
            self._home = asyncio.get_running_loop()
            if self._refuse_blocking:
                self._guard.enter_context(blocking_refused())
        if self._runtime is None:
            await super().open()

    async def _declare_schedules(self) -> None:
        """Apply none: runs that start by themselves would disturb tests. A test calls `schedule`."""

    def _open_on_use(self) -> None:
        if self._lifespan_option is not None:
            raise WorkflowMisuse("a TestEngine with a lifespan must be opened: use `async with TestEngine(...)`")
        _at_once(self.open())

    async def shutdown(self, grace: float | timedelta | None = None) -> None:
        """Drop all runs without waiting for them, and stop all mocks."""
        self._stop_mocks()
        await self._abandon()
        await self._harness.close()

    def drop(self) -> None:
        """`shutdown` for a caller without a running event loop."""
        home = self._home
        if home is None or home.is_closed() or home.is_running():
            self._stop_mocks()
            self._drop_all()
        else:
            home.run_until_complete(self.shutdown())

    def _stop_mocks(self) -> None:
        self._closed = True
        self._guard.close()
        for mock in self._mocks:
            mock.stop()

    def _build_runtime(self) -> WorkerRuntime:
        runtime = super()._build_runtime()
        runtime.publishes_at_start = False  # opening must not wait: see `_at_once`
        use_lazy_clock(runtime, self._passing.lazy_clock)
        return runtime

    # --- time

    def now(self) -> datetime:
        """Return the virtual time of the engine."""
        return to_datetime(self.clock.now())

    async def advance(self, duration: float | timedelta) -> None:
        """Move time forward. Each wake-up happens at its own time; returns when all its effects are complete."""
        seconds = check_seconds("duration", duration)
        await self.open()
        await self._passing.advance(seconds)

    async def settle(self) -> None:
        """Wait until nothing can happen without time passing."""
        await self.open()
        await self._passing.settled()

    async def _reasons(self, run_id: str) -> str:
        found = [str(reason) for reason in (await self.describe(run_id)).waiting_for]
        bodies = [body.location for body in self.bodies_under_way if body.run_id == run_id]
        if bodies:
            found.append(f"a step that does not end: {', '.join(bodies)}")
        return "; ".join(found)

    # --- mocks

    def mock(self, target: Target, *, returns: Any = UNSET, raises: Any = UNSET, side_effect: Any = UNSET) -> StepMock:
        """Replace the body of a step: return a value, raise an error, or call a function.

        `target` is the step, its function, or its name. `side_effect` is a sync or async function, called with the
        step's arguments; or a list of results, one per call, of which exceptions are raised. Retries and all other
        settings of the step apply. The latest mock of a step takes precedence.
        """
        mock = StepMock(target, returns, raises, side_effect)
        self._mocks.append(mock)
        return mock

    def _replace_step(self, step: RunStep) -> RunStep:
        for mock in reversed(self._mocks):
            if mock.takes(step.call.step):
                return mock.in_place_of(step)
        return step

    # --- assertions

    async def history_of(self, run: Run[Any] | str) -> list[Recorded]:
        """Return a run's history in short form: `[("charge", "succeeded", "receipt-42"), ...]`."""
        return [_recorded(entry) for entry in await self.history(_id_of(run))]

    def assert_ran(self, run: Run[Any] | str, step: Step[Any, Any] | str, *, times: int | None = None) -> None:
        """Assert that this run has executed a step `times` times, or at least once. Every attempt counts.

        `step` is a step, the name of a step, which includes all its locations, or one location.
        """
        run_id, name = _id_of(run), step if isinstance(step, str) else step.name
        executed = [each for each in self._harness.executions if each.run_id == run_id]
        found = sum(name in (each.name, each.location) for each in executed)
        if found == times or (times is None and found):
            return
        wanted = "at least once" if times is None else _often(times)
        ran = ", ".join(f"{each.location} (attempt {each.attempt})" for each in executed) or "nothing"
        raise AssertionError(
            f"run {run_id!r} was expected to execute {name} {wanted}, but did {_often(found)}; it executed {ran}"
        )


class _TimeSkippingWait:
    """The `WaitStrategy` of a `TestEngine`: time passes while a caller waits.

    It never polls: there is no other process, and a poll would let time pass. A wait that cannot end fails, with the
    reasons why the run waits.
    """

    polls = False

    def __init__(
        self, passing: TimeSkipper, now: Callable[[], datetime], reasons: Callable[[str], Awaitable[str]]
    ) -> None:
        self._passing = passing
        self._now = now
        self._reasons = reasons

    async def wait(self, run_id: str, awaited: Awaited, change: Change) -> RunRecord | None:
        try:
            return await self._passing.until(change)
        except (NothingDue, TooMany) as stuck:
            if awaited == "change":
                raise
            if awaited == "reply":
                what = "does not reply"
            elif isinstance(stuck, TooMany):
                what = f"has not ended by {self._now():%Y-%m-%d}"
            else:
                what = "will not end by itself"
            reason = f"run {run_id!r} {what}: it waits for {await self._reasons(run_id)}"
        raise AssertionError(reason)


def _at_once(opening: Any) -> None:
    """Drive a coroutine that has nothing to wait for, as nothing in memory has."""
    try:
        opening.send(None)
    except StopIteration:
        return
    opening.close()
    raise AssertionError("opening an in-memory engine must not wait")


def _id_of(run: Run[Any] | str) -> str:
    return run if isinstance(run, str) else run.id


def _recorded(entry: HistoryEntry) -> Recorded:
    value = entry.value if entry.error is None else f"{entry.error.type}: {entry.error.message}"
    return Recorded(entry.location, entry.status.value, value)


def _often(times: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(times, f"{times} times")
