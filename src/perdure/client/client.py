"""Client: every call about runs, without executing any.

A facade: it checks what it is given, hands a write to the committer or a question to the store, and turns the answer
into what callers see. `Engine` is this plus a worker in the same process. Starting, looking and stopping are here; the
rooms it is built on have the rest: events and deferreds in `messaging`, dead letters in `letters`, `streams`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

from perdure.client.rewind import plan_fork, plan_rewind
from perdure.client.run_export import export_snapshot
from perdure.client.run_handle import Run
from perdure.client.streams import StreamClient
from perdure.client.views import (
    HistoryEntry,
    RunDescription,
    RunList,
    Suspended,
    build_history,
    describe_run,
    entry_view,
    published_values,
    waiting_reasons,
)
from perdure.errors import RunCancelled, RunConflict, RunFailed, RunNotFound, StoreError
from perdure.execution.store_writes import build_end_run, cancel_message, raise_for_delivery
from perdure.model.ids import new_run_id, new_token, shard_of
from perdure.model.queries import RunQuery
from perdure.model.records import Message, RunRecord, RunStatus
from perdure.model.validation import check_name, check_seconds
from perdure.stores.results import AlreadyStarted, Committed, Created, IdTaken, MessageDelivered, Snapshot, WriteResult
from perdure.stores.writes import CreateRun
from perdure.workflows.context import Context
from perdure.workflows.definition import REGISTRY, BoundWorkflow, StartOptions, Workflow
from perdure.workflows.start_request import (
    StartRequest,
    build_start_request,
    build_start_request_by_name,
    check_same_run,
    start_options,
)
from perdure.workflows.types import Complete

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
Body = Coroutine[Any, Any, R]
REWIND_TRIES = 20  # a run that is busy moves on under one's hands


class StartKeywords(TypedDict, total=False):
    """The options of a start; see `StartOptions`."""

    id: str | None
    tags: Mapping[str, str] | None
    queue: str | None
    delay: float | timedelta | None
    retention: float | timedelta | None


class Client(StreamClient):
    """`async with Client(url) as client:` asks and tells; runs are executed by workers elsewhere."""

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
        order = await self._build_start_request(wf, args, given)
        created = self._check_created(order, await self._create(order))
        return Run(order.record.id, self, order.workflow, created=created)

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
        return await self._execute(await self._build_start_request(wf, args, given))

    async def _build_start_request(self, wf: Any, args: tuple[Any, ...], given: dict[str, Any]) -> StartRequest:
        if isinstance(wf, str) and REGISTRY.latest(check_name("a workflow's name", wf)) is None:
            return await self._order_by_name(wf, args, start_options(given))
        bound = isinstance(wf, BoundWorkflow)
        return build_start_request(
            wf,
            args,
            given if bound else {},
            StartOptions() if bound else start_options(given),
            codec=self._open.codec,
            config=self._config,
            now=self._open.clock.now(),
        )

    async def _order_by_name(self, name: str, args: tuple[Any, ...], options: StartOptions) -> StartRequest:
        workers = await self._open.read(self._open.store.workers)
        codec, now = self._open.codec, self._open.clock.now()
        return build_start_request_by_name(name, args, options, workers, codec=codec, config=self._config, now=now)

    async def _create(self, order: StartRequest) -> WriteResult:
        return await self._open.committer.write(CreateRun(order.record))

    def _check_created(self, order: StartRequest, answer: WriteResult) -> bool:
        """Whether the run was made; if not, it is observed, or `RunConflict`."""
        if isinstance(answer, IdTaken):
            check_same_run(order, answer.record, self._open.codec)
        return isinstance(answer, Created)

    async def _execute(self, order: StartRequest) -> Any:
        self._check_created(order, await self._create(order))
        return await self.result_of(order.record.id, order.workflow, None)

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
            return Suspended(waiting_reasons(record, await self._has_live_worker(record)))
        return None

    async def result(self, run_id: str, timeout: float | timedelta | None = None) -> Any:
        """Wait for the end of a run and return its value."""
        return await self.result_of(run_id, None, timeout)

    async def result_of(
        self, run_id: str, definition: Workflow[Any, Any] | None, timeout: float | timedelta | None
    ) -> Any:
        seconds = None if timeout is None else check_seconds("timeout", timeout)
        return self._outcome(await self._ended(check_name("a run's id", run_id), seconds), definition)

    def _outcome(self, record: RunRecord, definition: Workflow[Any, Any] | None) -> Any:
        """What a run that has ended returned, or the error that says how else it has ended."""
        if record.status is RunStatus.CANCELLED:
            raise RunCancelled(record.id)
        if record.status is RunStatus.FAILED:
            assert record.error is not None
            error = record.error
            raise RunFailed(record.id, error.type, error.message, error.traceback, error.location)
        return self._decode_result(record, definition)

    async def describe(self, run_id: str) -> RunDescription:
        """Everything about a run, and why it waits. `RunNotFound` if there is none."""
        record = await self._record(run_id)
        reasons = waiting_reasons(record, await self._has_live_worker(record))
        return describe_run(record, self._open.codec, reasons, await self._published_values(run_id))

    async def published(self, run_id: str) -> dict[str, Any]:
        """The last value that a run's workflow has published under each key. `RunNotFound` if there is no run."""
        await self._record(run_id)
        return await self._published_values(run_id)

    async def history(self, run_id: str) -> list[HistoryEntry]:
        """The entries of a run in the order in which they were asked for."""
        await self._record(run_id)
        rows = await self._open.read(lambda: self._open.store.history(run_id))
        return build_history(rows, self._open.codec)

    async def export_history(self, run_id: str) -> dict[str, Any]:
        """A run with its history as plain data: what `perdure export` writes, and `perdure.testing.replay` takes."""
        return export_snapshot(await self._snapshot(run_id))

    async def watch(self, run_id: str) -> AsyncIterator[HistoryEntry]:
        """Entries as they are recorded or change, from the first; ends when the run does."""
        link, position = self._open, 0
        since = link.clock.now()
        while True:
            news = link.waiters.wait(run_id, end=False)
            try:
                record = await self._record(run_id, retry_forever=True)
                for row in await link.read(partial(link.store.history, run_id, position), retry_forever=True):
                    position = max(position, row.position)
                    yield entry_view(row.entry, link.codec)
                    since = link.clock.now()
                if record.status.terminal:
                    return
                await self._wait_for_change_or_poll(run_id, news, since)
            finally:
                link.waiters.remove(run_id, news, end=False)

    async def runs(self, query: RunQuery | None = None) -> RunList:
        """Runs by status, workflow, tag, parent, time and id prefix, newest first, in pages."""
        page = await self._open.read(lambda: self._open.store.runs(query or RunQuery()))
        return RunList(tuple(describe_run(record, self._open.codec) for record in page.runs), page.next)

    # --- telling

    async def cancel(self, run_id: str) -> bool:
        """Ask a run to stop: cancellation is raised in its workflow. False if it has ended or there is none."""
        name, now = f"cancel/{new_token()}", self._open.clock.now()
        answer = await self._end(run_id, only_if_not_started=True)
        if isinstance(answer, AlreadyStarted):
            answer = await self._deliver(run_id, cancel_message(name, now))
            return isinstance(answer, MessageDelivered)
        return isinstance(answer, Committed)

    async def terminate(self, run_id: str) -> bool:
        """End a run at once, without compensation. False if it has ended or there is none."""
        return isinstance(await self._end(run_id, only_if_not_started=False), Committed)

    async def resume(self, run_id: str) -> None:
        """Drive a suspended run on now; one that is held gets another chance."""
        message = Message(id=f"resume/{new_token()}", kind="resume", sent_at=self._open.clock.now())
        raise_for_delivery(run_id, await self._deliver(run_id, message))

    async def _end(self, run_id: str, *, only_if_not_started: bool) -> WriteResult:
        check_name("a run's id", run_id)
        write = build_end_run(
            run_id, new_token(), self._open.clock.now(), self._config, only_if_not_started=only_if_not_started
        )
        answer = await self._open.committer.write(write)
        if not isinstance(answer, AlreadyStarted):
            self._open.waiters.notify((run_id,))
            self._cut_off(run_id)
        return answer

    # --- doing again

    async def rewind(self, run_id: str, location: str) -> None:
        """Drop what a run did at this location and after it, and let it go on from there; it may have ended.

        Raises `RunNotFound`, or a `WorkflowMisuse` if its history has no such location, or no longer.
        """
        name = new_token()
        for _ in range(REWIND_TRIES):
            snapshot = await self._snapshot(run_id)
            now = self._open.clock.now()
            answer = await self._open.committer.write(plan_rewind(snapshot, location, now=now, turn_id=name))
            if isinstance(answer, Committed):
                self._open.waiters.notify((run_id,))
                self._cut_off(run_id)
                self._mailed(run_id)
                return
        raise StoreError(f"run {run_id!r} moved on each time it was to be rewound; try again", retryable=True)

    async def fork(self, run_id: str, location: str, *, id: str | None = None) -> Run[Any]:
        """Start a new run with a copy of what this one did before the location; this one is left alone.

        Raises what `rewind` raises, and `RunConflict` if the new id is taken.
        """
        snapshot, now = await self._snapshot(run_id), self._open.clock.now()
        new_id = new_run_id(now) if id is None else check_name("a run's id", id)
        shard = shard_of(new_id, self._config.shards)
        write = plan_fork(snapshot, location, run_id=new_id, created_by=new_token(), shard=shard, now=now)
        if isinstance(await self._open.committer.write(write), IdTaken):
            raise RunConflict(new_id, "a history of its own")
        self._mailed(new_id)
        return Run(new_id, self, None, created=True)

    async def _snapshot(self, run_id: str) -> Snapshot:
        check_name("a run's id", run_id)
        snapshot = (await self._open.read(lambda: self._open.store.load([run_id])))[0]
        if snapshot is None:
            raise RunNotFound(run_id)
        return snapshot

    # --- helpers

    async def _published_values(self, run_id: str) -> dict[str, Any]:
        values = await self._open.read(lambda: self._open.store.published(run_id))
        return published_values(values, self._open.codec, self._open.clock.now())

    async def _has_live_worker(self, record: RunRecord) -> bool:
        """Whether a live worker of the run's pool has its workflow and version."""
        now = self._open.clock.now()
        wanted = (record.workflow, record.version)
        workers = await self._open.read(self._open.store.workers)
        alive = (each for each in workers if each.pool == record.pool and not each.fenced and each.lease_until >= now)
        return any(wanted in worker.workflows for worker in alive)

    async def _ended(self, run_id: str, timeout: float | None) -> RunRecord:
        clock, hub = self._open.clock, self._open.waiters
        deadline = None if timeout is None else clock.now() + timeout
        while True:
            news = hub.wait(run_id, end=True)
            try:
                if not self._executes(run_id):
                    record = await self._record(run_id, retry_forever=timeout is None)
                    if record.status.terminal:
                        return record
                if deadline is not None and clock.now() >= deadline:
                    raise TimeoutError(f"run {run_id!r} has not ended within {timeout} seconds; it goes on")
                ended = await self._wait_for_change(news, deadline)
                if ended is not None:
                    return ended
            finally:
                hub.remove(run_id, news, end=True)

    def _decode_result(self, record: RunRecord, definition: Workflow[Any, Any] | None) -> Any:
        assert record.result is not None
        if definition is None or (definition.name, definition.version) != (record.workflow, record.version):
            definition = REGISTRY.unambiguous().get((record.workflow, record.version))
        annotation = Any if definition is None else definition.returns
        return self._open.codec.decode(record.result, annotation, what=f"result of run {record.id!r}")
