"""QueryClient: read runs, their histories and results, and wait for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial
from typing import Any

from perdure.client.run_export import export_snapshot
from perdure.client.session import ClientSession
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
from perdure.errors import InvalidPayload, RunCancelled, RunFailed
from perdure.model.queries import RunQuery
from perdure.model.records import RunRecord, RunStatus
from perdure.model.validation import check_name, check_seconds
from perdure.stores.results import UnreadableRun
from perdure.workflows.definition import REGISTRY, Workflow
from perdure.workflows.types import Complete


class QueryClient:
    """The calls of a client that change nothing; `Client` documents them."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def status(self, run_id: str) -> RunStatus | None:
        record = await self._session.find_run(run_id)
        return None if record is None else record.status

    async def poll(self, run_id: str) -> Complete[Any] | Suspended | None:
        record = await self._session.find_run(run_id)
        if record is None:
            return None
        if record.status.terminal:
            value = None if record.result is None else self._decode_result(record, None)
            return Complete(record.status, value, record.error)
        if record.status is RunStatus.SUSPENDED:
            return Suspended(waiting_reasons(record, await self._has_live_worker(record)))
        return None

    async def result(
        self, run_id: str, timeout: float | timedelta | None, definition: Workflow[Any, Any] | None = None
    ) -> Any:
        """Wait for the end of a run and return its value, decoded as `definition` declares it."""
        seconds = None if timeout is None else check_seconds("timeout", timeout)
        record = await self.wait_for_end(check_name("a run's id", run_id), seconds)
        return self.value_or_error(record, definition)

    async def wait_for_end(self, run_id: str, timeout: float | None = None) -> RunRecord:
        """Return the record of a run after its end; `TimeoutError` after `timeout` seconds."""
        session = self._session
        clock, waiters = session.clock, session.waiters
        deadline = None if timeout is None else clock.now() + timeout
        while True:
            change = waiters.wait(run_id, end=True)
            try:
                if not session.local_worker.is_executing(run_id):
                    record = await session.get_run(run_id, retry_forever=timeout is None)
                    if record.status.terminal:
                        return record
                if deadline is not None and clock.now() >= deadline:
                    raise TimeoutError(f"run {run_id!r} has not ended within {timeout} seconds; it continues to run")
                ended = await session.wait_for_end(run_id, change, deadline)
                if ended is not None:
                    return ended
            finally:
                waiters.remove(run_id, change, end=True)

    def value_or_error(self, record: RunRecord, definition: Workflow[Any, Any] | None) -> Any:
        """Return the value of an ended run; raise `RunFailed` or `RunCancelled` if it has none."""
        if record.status is RunStatus.CANCELLED:
            raise RunCancelled(record.id)
        if record.status is RunStatus.FAILED:
            assert record.error is not None
            error = record.error
            raise RunFailed(record.id, error.type, error.message, error.traceback, error.location)
        return self._decode_result(record, definition)

    async def describe(self, run_id: str) -> RunDescription:
        record = await self._session.get_run(run_id)
        reasons = waiting_reasons(record, await self._has_live_worker(record))
        return describe_run(record, self._session.codec, reasons, await self._published_values(run_id))

    async def published(self, run_id: str) -> dict[str, Any]:
        await self._session.get_run(run_id)
        return await self._published_values(run_id)

    async def history(self, run_id: str) -> list[HistoryEntry]:
        session = self._session
        await session.get_run(run_id)
        return build_history(await session.read(lambda: session.store.history(run_id)), session.codec)

    async def export_history(self, run_id: str) -> dict[str, Any]:
        return export_snapshot(await self._session.load_snapshot(run_id))

    async def watch(self, run_id: str) -> AsyncIterator[HistoryEntry]:
        session, position = self._session, 0
        clock, waiters = session.clock, session.waiters
        since = clock.now()
        while True:
            change = waiters.wait(run_id, end=False)
            try:
                record = await session.get_run(run_id, retry_forever=True)
                for row in await session.read(partial(session.store.history, run_id, position), retry_forever=True):
                    position = max(position, row.position)
                    yield entry_view(row.entry, session.codec)
                    since = clock.now()
                if record.status.terminal:
                    return
                await session.wait_for_change(run_id, "change", change, since)
            finally:
                waiters.remove(run_id, change, end=False)

    async def runs(self, query: RunQuery | None) -> RunList:
        session = self._session
        page = await session.read(lambda: session.store.runs(query or RunQuery()))
        described: list[RunDescription] = []
        unreadable = list(page.unreadable)
        for record in page.runs:
            try:
                described.append(describe_run(record, session.codec))
            except (InvalidPayload, ValueError, OverflowError) as error:  # a payload or a time
                unreadable.append(UnreadableRun(record.id, str(error)))
        return RunList(tuple(described), page.next, tuple(unreadable))

    async def _published_values(self, run_id: str) -> dict[str, Any]:
        session = self._session
        values = await session.read(lambda: session.store.published(run_id))
        return published_values(values, session.codec, session.clock.now())

    async def _has_live_worker(self, record: RunRecord) -> bool:
        """Return whether a live worker of the run's pool has its workflow and version."""
        session = self._session
        if session.local_worker.can_execute(record):
            return True
        now, wanted = session.clock.now(), (record.workflow, record.version)
        workers = await session.read(session.store.workers)
        alive = (each for each in workers if each.pool == record.pool and not each.fenced and each.lease_until >= now)
        return any(wanted in worker.workflows for worker in alive)

    def _decode_result(self, record: RunRecord, definition: Workflow[Any, Any] | None) -> Any:
        assert record.result is not None
        if definition is None or (definition.name, definition.version) != (record.workflow, record.version):
            definition = REGISTRY.unambiguous().get((record.workflow, record.version))
        annotation = Any if definition is None else definition.returns
        return self._session.codec.decode(record.result, annotation, what=f"result of run {record.id!r}")
