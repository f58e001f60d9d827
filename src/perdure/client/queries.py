"""QueryClient: read runs, their histories and results, and wait for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from msgspec.structs import replace

from perdure.client.queue_reader import QueueReader
from perdure.client.run_export import export_snapshot
from perdure.client.session import ClientSession
from perdure.client.views import (
    CancelRequest,
    HistoryEntry,
    Reason,
    RunDescription,
    RunList,
    Suspended,
    build_history,
    cancel_reason_of,
    describe_run,
    entry_view,
    find_cancel,
    published_values,
    running_heartbeats,
    waiting_reasons,
)
from perdure.codec.failures import reconstruct_error
from perdure.errors import InvalidArgument, InvalidPayload, RunCancelled, RunFailed, RunHeld
from perdure.execution.open_children import is_of_earlier_run
from perdure.model.filters import resolve
from perdure.model.queries import MAX_LIMIT, RunQuery
from perdure.model.records import Hold, RunRecord, RunStatus, WorkerRecord
from perdure.model.validation import check_count, check_name, check_seconds, describe_value
from perdure.stores.results import StoredEntry, UnreadableRun
from perdure.workflows.definition import Workflow
from perdure.workflows.internal import is_internal_name
from perdure.workflows.types import Complete, error_view


class QueryClient:
    """The calls of a client that change nothing; `Client` documents them."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._queues = QueueReader(session)

    async def status(self, run_id: str) -> RunStatus | None:
        record = await self._session.find_run(run_id)
        return None if record is None else record.status

    async def poll(self, run_id: str, type: Any) -> Complete[Any] | Suspended | None:
        record = await self._session.find_run(run_id)
        if record is None:
            return None
        if record.status.terminal:
            value = None if record.result is None else self._decode_result(record, None, type)
            error = None if record.status is RunStatus.CANCELLED else record.error
            shown = error_view(error, self._session.codec, self._session.known_types.raised_types(record))
            return Complete(record.status, value, shown, cancel_reason_of(record))
        if record.status is RunStatus.SUSPENDED:
            return Suspended(await self._reasons(record))
        return None

    async def result(
        self,
        run_id: str,
        timeout: float | timedelta | None,
        definition: Workflow[Any, Any] | None = None,
        *,
        raise_if_held: bool = False,
        type: Any = None,
    ) -> Any:
        """Wait for the end of a run and return its value, decoded as `type`, else as `definition` declares it."""
        seconds = None if timeout is None else check_seconds("timeout", timeout)
        record = await self.wait_for_end(check_name("a run's id", run_id), seconds, raise_if_held=raise_if_held)
        return self.value_or_error(record, definition, type)

    async def wait_for_end(
        self, run_id: str, timeout: float | None = None, *, raise_if_held: bool = False
    ) -> RunRecord:
        """Return the record of a run after its end.

        Raises `TimeoutError` after `timeout` seconds and, with `raise_if_held`, `RunHeld` when the run is held.
        """
        session = self._session
        clock, waiters = session.clock, session.waiters
        deadline = None if timeout is None else clock.now() + timeout
        while True:
            change = waiters.wait(run_id, end=True)
            hold: Hold | None = None
            try:
                # While writes are retried, the read raises if the store is unavailable.
                if not session.local_worker.is_executing(run_id) or session.committer.is_retrying:
                    record = await session.get_run(run_id)
                    if record.status.terminal:
                        return record
                    hold = record.current_hold
                if hold is not None and raise_if_held:
                    raise RunHeld(run_id, hold.kind, hold.reason, hold.location, hold.line)
                if deadline is not None and clock.now() >= deadline:
                    state = "it continues to run" if hold is None else f"it is held ({hold.kind}): {hold.reason}"
                    raise TimeoutError(f"run {run_id!r} has not ended within {timeout} seconds; {state}")
                ended = await session.wait_for_end(run_id, change, deadline)
                if ended is not None:
                    return ended
            finally:
                waiters.remove(run_id, change, end=True)

    def value_or_error(self, record: RunRecord, definition: Workflow[Any, Any] | None, type: Any = None) -> Any:
        """Return the value of an ended run; raise `RunFailed` or `RunCancelled` if it has none.

        The cause of `RunFailed` is the error of the run if its workflow, as this process knows it, declares the type.
        """
        if record.status is RunStatus.CANCELLED:
            raise RunCancelled(record.id, cancel_reason_of(record))
        if record.status is RunStatus.FAILED:
            assert record.error is not None
            error = record.error
            raises = self._session.known_types.raised_types(record, definition)
            cause = reconstruct_error(error, self._session.codec, raises)
            raise RunFailed(record.id, error.type, error.message, error.traceback, error.location) from cause
        return self._decode_result(record, definition, type)

    async def describe(self, run_id: str) -> RunDescription:
        record = await self._session.get_run(run_id)
        reasons = await self._reasons(record)
        published, codec = await self.published(record.id, None, None), self._session.codec
        may_be_cancelled = _may_be_cancelled(record)
        history: Sequence[StoredEntry] = ()
        if record.status is RunStatus.RUNNING or (may_be_cancelled and not record.status.terminal):
            history = await self._session.read(lambda: self._session.store.history(record.id))
        cancel = await self._find_cancel(record, history) if may_be_cancelled else None
        return describe_run(record, codec, reasons, published, cancel, running_heartbeats(history, codec))

    async def _reasons(self, record: RunRecord) -> tuple[Reason, ...]:
        """Return why a run waits: in its queue, or for what its workflow awaits."""
        if not record.waiting:
            return waiting_reasons(record, await self._has_live_worker(record))
        held = () if record.held is None else (Reason("held", f"held: {record.held.reason}", name=record.held.reason),)
        return (*held, await self._queues.reason(record))

    async def _find_cancel(self, record: RunRecord, history: Sequence[StoredEntry]) -> CancelRequest | None:
        """Return the cancel of a run, if its record does not show it."""
        session = self._session
        inbox = await session.read(lambda: session.store.inbox(record.id))
        return find_cancel(record, inbox, history, session.codec)

    async def published(self, run_id: str, key: str | None, type: Any) -> Any:
        session, kind = self._session, Any if type is None else type
        key = None if key is None else check_name("a published key", key)
        record = await session.get_run(run_id)
        stored = await session.read(lambda: session.store.published(record.id))
        values = published_values(stored, session.clock.now())

        def decode(key: str) -> Any:
            return session.codec.decode(values[key], kind, what=f"the value {key!r} that run {run_id!r} published")

        if key is not None:
            return decode(key) if key in values else None
        return {key: decode(key) for key in values}

    async def history(self, run_id: str, after: int, limit: int | None) -> list[HistoryEntry]:
        session = self._session
        after = check_count("after", after, minimum=0)
        limit = None if limit is None else check_count("limit", limit, maximum=MAX_LIMIT)
        record = await session.get_run(run_id)
        decode = session.known_types.entry_decoder(record, session.codec)
        rows = await session.read(lambda: session.store.history(record.id, after, limit))
        if limit is None:
            return build_history(rows, session.codec, decode)
        return [entry_view(row.entry, session.codec, decode(row.entry), row.position) for row in rows]

    async def export_history(self, run_id: str) -> dict[str, Any]:
        return export_snapshot(await self._session.load_snapshot(run_id))

    async def watch(self, run_id: str) -> AsyncIterator[HistoryEntry]:
        run_id, session, position = check_name("a run's id", run_id), self._session, 0
        clock, waiters = session.clock, session.waiters
        since = clock.now()
        with session.follow(run_id) as follower:
            while True:
                change = waiters.wait(run_id, end=False)
                try:
                    follower.follow_if_remote()
                    record = await session.get_run(run_id)
                    decode = session.known_types.entry_decoder(record, session.codec)
                    for row in await session.read(partial(session.store.history, run_id, position)):
                        position = max(position, row.position)
                        yield entry_view(row.entry, session.codec, decode(row.entry), row.position)
                        since = clock.now()
                    if record.status.terminal:
                        return
                    await session.wait_for_change(run_id, "change", change, since)
                finally:
                    waiters.remove(run_id, change, end=False)

    async def runs(self, query: RunQuery | None) -> RunList:
        if query is not None and not isinstance(query, RunQuery):
            raise InvalidArgument(f"runs takes a RunQuery, not {describe_value(query)}")
        session, query = self._session, query or RunQuery()
        parent: RunRecord | UnreadableRun | None = None
        if query.parent:
            wanted = [query.parent]
            parent = (await session.read(lambda: session.store.records(wanted)))[0]
        query = self._resolve(query)
        page = await session.read(lambda: session.store.runs(query, bare=True))
        unowned = any(record.owner is None and not record.status.terminal for record in page.runs)
        workers = await session.read(session.store.workers) if unowned else []
        described: list[RunDescription] = []
        unreadable = list(page.unreadable)
        for record in page.runs:
            if isinstance(parent, RunRecord) and is_of_earlier_run(record, parent):
                continue  # an earlier run with the id of the parent has left it
            try:
                reasons = waiting_reasons(record, self._is_served(record, workers))
                described.append(describe_run(record, session.codec, reasons))
            except (InvalidPayload, ValueError, OverflowError) as error:  # an error or a time
                unreadable.append(UnreadableRun(record.id, str(error)))
        return RunList(tuple(described), page.next, tuple(unreadable), page.scanned)

    async def count(self, query: RunQuery | None, cap: int) -> int:
        """Return the number of matching runs, at most `cap`."""
        if query is not None and not isinstance(query, RunQuery):
            raise InvalidArgument(f"count takes a RunQuery, not {describe_value(query)}")
        session, query, cap = self._session, self._resolve(query or RunQuery()), check_count("cap", cap)
        return await session.read(lambda: session.store.count(query, cap))

    def _resolve(self, query: RunQuery) -> RunQuery:
        """Return the query with times relative to now as times of the store's clock."""
        return query if query.filter is None else replace(query, where=resolve(query.filter, self._session.clock.now()))

    async def _has_live_worker(self, record: RunRecord) -> bool:
        """Return whether a live worker of the run's pool has its workflow and version."""
        session = self._session
        if session.local_worker.can_execute(record):
            return True
        return self._is_served(record, await session.read(session.store.workers))

    def _is_served(self, record: RunRecord, workers: Sequence[WorkerRecord]) -> bool:
        """Return whether one of these workers, or the local one, is alive and can execute the run."""
        if self._session.local_worker.can_execute(record):
            return True
        now, wanted = self._session.clock.now(), (record.workflow, record.version)
        alive = [each for each in workers if not each.fenced and each.lease_until >= now]
        if is_internal_name(record.workflow):  # every worker serves internal runs
            return bool(alive)
        return any(wanted in worker.workflows for worker in alive if worker.pool == record.pool)

    def _decode_result(self, record: RunRecord, definition: Workflow[Any, Any] | None, type: Any) -> Any:
        assert record.result is not None
        kind = self._session.known_types.result_type(record, definition) if type is None else type
        return self._session.codec.decode(record.result, kind, what=f"result of run {record.id!r}")


def _may_be_cancelled(record: RunRecord) -> bool:
    """Return whether a cancel may be found that the record does not show. A run without a message has none."""
    has_none = record.last_message_no == 0 or record.status in (RunStatus.SUCCEEDED, RunStatus.FAILED)
    return not has_none and record.error is None
