"""Client: every call about runs, without executing any.

A facade: it checks what it is given, hands a write to the committer or a question to the store, and turns the answer
into what callers see. `Engine` is this plus a worker in the same process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Self, TypedDict, TypeVar, Unpack, overload

from perdure.clock import SYSTEM_CLOCK, Clock
from perdure.config import EngineConfig
from perdure.context import Context
from perdure.definition import REGISTRY, BoundWorkflow, StartOptions, Workflow
from perdure.engine.hub import News
from perdure.engine.link import Link
from perdure.errors import InvalidArgument, RunCancelled, RunFailed, RunNotFound, RunTerminated, WorkflowMisuse
from perdure.handle import Run
from perdure.ids import new_token
from perdure.names import check_name, check_seconds
from perdure.records import Message, RunQuery, RunRecord, RunStatus
from perdure.starting import Order, check_same_run, order_of, start_options
from perdure.store.base import (
    Answer,
    Begun,
    Committed,
    Created,
    CreateRun,
    Deliver,
    Delivered,
    Ended,
    EndRun,
    Exists,
    Missing,
    Store,
)
from perdure.stores import store_at
from perdure.views import (
    Complete,
    DeadLetterView,
    HistoryEntry,
    RunDescription,
    RunList,
    Suspended,
    dead_letter_view,
    describe_run,
    entry_view,
    history_of,
    reasons_of,
)

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
Body = Coroutine[Any, Any, R]


class StartKeywords(TypedDict, total=False):
    """The options of a start; see `StartOptions`."""

    id: str | None
    tags: Mapping[str, str] | None
    queue: str | None
    delay: float | timedelta | None
    retention: float | timedelta | None


class Client:
    """`async with Client(url) as client:` asks and tells; runs are executed by workers elsewhere."""

    def __init__(self, url: str | Store, *, config: EngineConfig | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise InvalidArgument(f"config must be an EngineConfig, not {config!r}")
        self._config = config or EngineConfig()
        self._clock = clock
        self._store = store_at(url, clock)
        self._link: Link | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def open(self) -> None:
        """Open the store; `async with` does it."""
        if self._link is None:
            link = Link(self._store, self._clock, self._config)
            await link.open()
            self._link = link

    async def shutdown(self, grace: float | timedelta | None = None) -> None:
        """Close the store; `async with` does it."""
        if self._link is not None:
            link, self._link = self._link, None
            await link.close()

    @property
    def _open(self) -> Link:
        if self._link is None:
            raise WorkflowMisuse(f"this {type(self).__name__} is not open: use `async with {type(self).__name__}(...)`")
        return self._link

    # --- starting

    @overload
    async def start(self, wf: Callable[[Context], Body[R]], /, **options: Unpack[StartKeywords]) -> Run[R]: ...
    @overload
    async def start(self, wf: Callable[[Context, A], Body[R]], a: A, /, **options: Unpack[StartKeywords]) -> Run[R]: ...
    @overload
    async def start(
        self, wf: Callable[[Context, A, B], Body[R]], a: A, b: B, /, **options: Unpack[StartKeywords]
    ) -> Run[R]: ...
    @overload
    async def start(
        self, wf: Callable[[Context, A, B, C], Body[R]], a: A, b: B, c: C, /, **options: Unpack[StartKeywords]
    ) -> Run[R]: ...
    @overload
    async def start(
        self, wf: Callable[[Context, A, B, C, D], Body[R]], a: A, b: B, c: C, d: D, /, **options: Unpack[StartKeywords]
    ) -> Run[R]: ...
    @overload
    async def start(self, wf: BoundWorkflow[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    async def start(self, wf: str, /, *args: Any, **options: Unpack[StartKeywords]) -> Run[Any]: ...
    async def start(self, wf: Any, /, *args: Any, **given: Any) -> Run[Any]:
        """Start a run, or observe the one that has this id; returns once it is durable."""
        order = self._order(wf, args, given)
        answer = await self._create(order)
        if isinstance(answer, Exists):
            check_same_run(order, answer.record, self._open.codec)
        return Run(order.record.id, self, order.workflow, created=isinstance(answer, Created))

    @overload
    async def execute(self, wf: Callable[[Context], Body[R]], /, **options: Unpack[StartKeywords]) -> R: ...
    @overload
    async def execute(self, wf: Callable[[Context, A], Body[R]], a: A, /, **options: Unpack[StartKeywords]) -> R: ...
    @overload
    async def execute(
        self, wf: Callable[[Context, A, B], Body[R]], a: A, b: B, /, **options: Unpack[StartKeywords]
    ) -> R: ...
    @overload
    async def execute(
        self, wf: Callable[[Context, A, B, C], Body[R]], a: A, b: B, c: C, /, **options: Unpack[StartKeywords]
    ) -> R: ...
    @overload
    async def execute(
        self, wf: Callable[[Context, A, B, C, D], Body[R]], a: A, b: B, c: C, d: D, /, **options: Unpack[StartKeywords]
    ) -> R: ...
    @overload
    async def execute(self, wf: BoundWorkflow[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def execute(self, wf: str, /, *args: Any, **options: Unpack[StartKeywords]) -> Any: ...
    async def execute(self, wf: Any, /, *args: Any, **given: Any) -> Any:
        """Start a run, or observe the one that has this id, and wait for its result."""
        run: Run[Any] = await self.start(wf, *args, **given)
        return await run.result()

    def _order(self, wf: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Order:
        bound = isinstance(wf, BoundWorkflow)
        return order_of(
            wf,
            args,
            given if bound else {},
            StartOptions() if bound else start_options(given),
            codec=self._open.codec,
            config=self._config,
            now=self._open.clock.now(),
        )

    async def _create(self, order: Order) -> Answer:
        return await self._open.committer.put(CreateRun(order.record))

    # --- looking

    def get(self, run_id: str) -> Run[Any]:
        """A handle on a run, whether or not it exists: `RunNotFound` comes when it is used."""
        return Run(check_name("a run's id", run_id), self, None, created=False)

    async def status(self, run_id: str) -> RunStatus | None:
        """Where a run stands; None if there is no such run."""
        record = await self._find(run_id)
        return None if record is None else record.status

    async def poll(self, run_id: str) -> Complete[Any] | Suspended | None:
        """The latest outcome without waiting; None while the run executes, or if there is none."""
        record = await self._find(run_id)
        if record is None:
            return None
        if record.status.terminal:
            value = None if record.result is None else self._decode_result(record, None)
            return Complete(record.status, value, record.error)
        if record.status is RunStatus.SUSPENDED:
            return Suspended(reasons_of(record, await self._served(record)))
        return None

    async def result(self, run_id: str, timeout: float | timedelta | None = None) -> Any:
        """Wait for the end of a run and return its value."""
        return await self.result_of(run_id, None, timeout)

    async def result_of(
        self, run_id: str, definition: Workflow[Any, Any] | None, timeout: float | timedelta | None
    ) -> Any:
        seconds = None if timeout is None else check_seconds("timeout", timeout)
        record = await self._ended(check_name("a run's id", run_id), seconds)
        if record.status is RunStatus.CANCELLED:
            raise RunCancelled(run_id)
        if record.status is RunStatus.FAILED:
            assert record.error is not None
            error = record.error
            raise RunFailed(run_id, error.type, error.message, error.traceback, error.location)
        return self._decode_result(record, definition)

    async def describe(self, run_id: str) -> RunDescription:
        """Everything about a run, and why it waits. `RunNotFound` if there is none."""
        record = await self._record(run_id)
        return describe_run(record, self._open.codec, reasons_of(record, await self._served(record)))

    async def history(self, run_id: str) -> list[HistoryEntry]:
        """The entries of a run in the order in which they were asked for."""
        await self._record(run_id)
        rows = await self._open.read(lambda: self._open.store.history(run_id))
        return history_of(rows, self._open.codec)

    async def watch(self, run_id: str) -> AsyncIterator[HistoryEntry]:
        """Entries as they are recorded or change, from the first; ends when the run does."""
        position = 0
        while True:
            news = self._open.hub.wait(run_id, end=False)
            try:
                record = await self._record(run_id, for_ever=True)
                news_of = partial(self._open.store.history, run_id, position)
                for row in await self._open.read(news_of, for_ever=True):
                    position = max(position, row.position)
                    yield entry_view(row.entry, self._open.codec)
                if record.status.terminal:
                    return
                await self._await_hint(news, None)
            finally:
                self._open.hub.leave(run_id, news, end=False)

    async def runs(self, query: RunQuery | None = None) -> RunList:
        """Runs by status, workflow, tag, parent, time and id prefix, newest first, in pages."""
        page = await self._open.read(lambda: self._open.store.runs(query or RunQuery()))
        return RunList(tuple(describe_run(record, self._open.codec) for record in page.runs), page.next)

    async def dead_letters(self, *, limit: int = 100, after: str | None = None) -> list[DeadLetterView]:
        """What could not be delivered or carried out."""
        letters = await self._open.read(lambda: self._open.store.dead_letters(limit, after))
        return [dead_letter_view(letter, self._open.codec) for letter in letters]

    # --- telling

    async def cancel(self, run_id: str) -> bool:
        """Ask a run to stop: cancellation is raised in its workflow. False if it has ended or there is none."""
        check_name("a run's id", run_id)
        answer = await self._open.committer.put(self._end(run_id, unless_begun=True))
        if isinstance(answer, Begun):
            answer = await self._deliver(run_id, Message(id="cancel", kind="cancel", sent_at=self._open.clock.now()))
            return isinstance(answer, Delivered)
        self._open.hub.changed((run_id,))
        return isinstance(answer, Committed)

    async def terminate(self, run_id: str) -> bool:
        """End a run at once, without compensation. False if it has ended or there is none."""
        answer = await self._open.committer.put(self._end(check_name("a run's id", run_id), unless_begun=False))
        self._open.hub.changed((run_id,))
        return isinstance(answer, Committed)

    async def resume(self, run_id: str) -> None:
        """Drive a suspended run on now; one that is held gets another chance."""
        message = Message(id=f"resume/{new_token()}", kind="resume", sent_at=self._open.clock.now())
        answer = await self._deliver(check_name("a run's id", run_id), message)
        if isinstance(answer, Missing):
            raise RunNotFound(run_id)
        if isinstance(answer, Ended):
            raise RunTerminated(run_id, answer.status)

    async def _deliver(self, run_id: str, message: Message) -> Answer:
        return await self._open.committer.put(Deliver(run_id=run_id, message=message, now=self._open.clock.now()))

    def _end(self, run_id: str, *, unless_begun: bool) -> EndRun:
        return EndRun(
            run_id=run_id,
            turn_id=new_token(),
            now=self._open.clock.now(),
            unless_begun=unless_begun,
            prune_after=self._config.seconds("run_retention"),
        )

    # --- helpers

    async def _find(self, run_id: str, *, for_ever: bool = False) -> RunRecord | None:
        check_name("a run's id", run_id)
        return (await self._open.read(lambda: self._open.store.records([run_id]), for_ever=for_ever))[0]

    async def _record(self, run_id: str, *, for_ever: bool = False) -> RunRecord:
        record = await self._find(run_id, for_ever=for_ever)
        if record is None:
            raise RunNotFound(run_id)
        return record

    async def _served(self, record: RunRecord) -> bool:
        """Whether a live worker has the run's workflow and version."""
        now = self._open.clock.now()
        wanted = (record.workflow, record.version)
        workers = await self._open.read(self._open.store.workers)
        return any(wanted in worker.workflows and not worker.gone and worker.lease_until >= now for worker in workers)

    async def _ended(self, run_id: str, timeout: float | None) -> RunRecord:
        clock, hub = self._open.clock, self._open.hub
        deadline = None if timeout is None else clock.now() + timeout
        while True:
            news = hub.wait(run_id, end=True)
            try:
                if not self._executes(run_id):
                    record = await self._record(run_id, for_ever=timeout is None)
                    if record.status.terminal:
                        return record
                if deadline is not None and clock.now() >= deadline:
                    raise TimeoutError(f"run {run_id!r} has not ended within {timeout} seconds; it goes on")
                ended = await self._await_hint(news, deadline)
                if ended is not None:
                    return ended
            finally:
                hub.leave(run_id, news, end=True)

    async def _await_hint(self, news: News, deadline: float | None) -> RunRecord | None:
        """Wait for a hint; one comes with every sweep at least. Gives the run's last record if the hint is that."""
        if deadline is None:
            return await news
        timer = self._open.clock.call_at(deadline, lambda: None if news.done() else news.set_result(None))
        try:
            return await news
        finally:
            timer.cancel()

    def _executes(self, run_id: str) -> bool:
        """Whether this process executes the run, so that it will know of the end by itself."""
        return False

    def _decode_result(self, record: RunRecord, definition: Workflow[Any, Any] | None) -> Any:
        assert record.result is not None
        if definition is None or (definition.name, definition.version) != (record.workflow, record.version):
            definition = REGISTRY.unambiguous().get((record.workflow, record.version))
        annotation = Any if definition is None else definition.returns
        return self._open.codec.decode(record.result, annotation, what=f"result of run {record.id!r}")
