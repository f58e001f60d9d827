"""Reads of a whole store for operators: its workers, pages of all its runs, and what a prune would delete."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from msgspec.structs import replace

from perdure.client.client import Client
from perdure.client.views import DeadLetterView, RunDescription, dead_letter_view, describe_run
from perdure.clock import to_datetime
from perdure.model.filters import Term
from perdure.model.queries import MAX_LIMIT, RunQuery
from perdure.model.records import RunRecord, RunStatus, WorkerRecord
from perdure.model.validation import check_text
from perdure.stores.results import RunPage
from perdure.workflows.replies import read_rejections

PAGE = 500
OPEN = (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.SUSPENDED)
ENDED = (RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED)

Progress = Callable[[int], None]
"""Called with the number of runs checked since the last call."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """Public view of a worker. A worker that is not `alive` was fenced, or its lease expired."""

    id: str
    pool: str
    workflows: tuple[tuple[str, int], ...]
    alive: bool
    runs: int
    started_at: datetime
    lease_until: datetime
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class RejectedRequest:
    """A request that a run rejected in the last seven days: the ids and names of its event, when and why."""

    event_id: str
    event_name: str
    at: datetime
    type: str
    message: str


@dataclass(frozen=True, slots=True)
class Prunable:
    """The approximate number of runs that a prune would delete, and the first of them."""

    count: int
    first: tuple[RunDescription, ...]


def is_alive(worker: WorkerRecord, now: float) -> bool:
    """Return whether the worker is not fenced and its lease is valid."""
    return not worker.fenced and worker.lease_until >= now


async def workers_of(client: Client) -> list[WorkerView]:
    """Return all workers that the store has, live ones first."""
    session = client._session
    now, records = session.clock.now(), await session.read(session.store.workers)
    views = [_worker_view(each, now, await _count_owned(client, each.id)) for each in records]
    return sorted(views, key=lambda view: (not view.alive, view.pool, view.started_at))


async def _count_owned(client: Client, worker: str) -> int:
    """Return the number of runs that a worker owns. It may own very many, so their ids are not read."""
    query = RunQuery(where=Term("worker", ":", worker), internal=True)
    return await client._session.read(partial(client._session.store.count, query, MAX_LIMIT))


async def find_dead_letter(client: Client, dead_letter_id: str) -> DeadLetterView[Any] | None:
    """Return one dead letter; None if it does not exist."""
    session, checked_id = client._session, check_text("a dead letter's id", dead_letter_id)
    dead_letter = await session.read(partial(session.store.dead_letter, checked_id))
    return None if dead_letter is None else dead_letter_view(dead_letter, session.codec)


async def rejected_requests(client: Client, run_id: str) -> list[RejectedRequest]:
    """Return the requests that a run rejected and whose callers can still fetch the rejection, earliest first."""
    session = client._session
    found = read_rejections(await session.read(partial(session.store.published, run_id)))
    return [
        RejectedRequest(id, each.event, to_datetime(each.at), each.error.type, each.error.message)
        for id, each in sorted(found.items(), key=lambda item: item[1].at)
    ]


async def published_workflows(client: Client) -> list[str]:
    """Return the names of the workflows that live workers have: these can be started by name."""
    session = client._session
    now, workers = session.clock.now(), await session.read(session.store.workers)
    return sorted({name for worker in workers if is_alive(worker, now) for name, _ in worker.workflows})


async def pages_of(client: Client, query: RunQuery | None = None) -> AsyncIterator[RunPage]:
    """Yield pages of all runs that match a query, with marks of those that cannot be read; open runs by default."""
    query, after = query or RunQuery(), None
    while True:
        page_query = replace(query, status=query.status or OPEN, limit=PAGE, after=after, internal=True)
        page = await client._session.read(partial(client._session.store.runs, page_query))
        yield page
        if page.next is None:
            return
        after = page.next


async def records_of(client: Client, query: RunQuery | None = None) -> AsyncIterator[list[RunRecord]]:
    """Yield pages of all runs that match a query; only open runs if it names no status."""
    async for page in pages_of(client, query):
        if page.runs:
            yield list(page.runs)


async def prunable(client: Client, *, first: int = 0, progress: Progress | None = None) -> Prunable:
    """Return the finished runs whose retention is over. A prune keeps those that still need finalization."""
    session, count = client._session, 0
    shown: list[RunDescription] = []
    default_retention, now = session.config.seconds("run_retention"), session.clock.now()
    async for page in records_of(client, RunQuery(status=ENDED)):
        for record in page:
            retention = default_retention if record.retention is None else record.retention
            if record.ended_at is not None and record.ended_at + retention <= now:
                count += 1
                if len(shown) < first:
                    shown.append(describe_run(record, session.codec))
        if progress is not None:
            progress(len(page))
    return Prunable(count, tuple(shown))


def _worker_view(record: WorkerRecord, now: float, runs: int) -> WorkerView:
    return WorkerView(
        id=record.id,
        pool=record.pool,
        workflows=record.workflows,
        alive=is_alive(record, now),
        runs=runs,
        started_at=to_datetime(record.started_at),
        lease_until=to_datetime(record.lease_until),
        host=record.host,
        pid=record.pid,
    )
