"""Health check of a whole store: its workers, and whether every open run can make progress (guarantee 5).

An open run has a live worker, a time at which it is due, unread messages, something that it waits for, or a reason to
be held. `check_health` finds runs that have none of these, and other problems of the store. It changes nothing;
`perdure.admin.repair` repairs what it finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

from msgspec.structs import replace

from perdure.client.client import Client
from perdure.client.views import DeadLetterView, RunDescription, dead_letter_view, describe_run
from perdure.clock import to_datetime
from perdure.model.queries import RunQuery
from perdure.model.records import RunRecord, RunStatus, WorkerRecord
from perdure.model.validation import check_text

PAGE = 500
OVERDUE_AFTER_SECONDS = 60.0  # work that is due at once and older than this is reported
MAX_CLOCK_SKEW_SECONDS = 1.0
LARGE_PAYLOAD_BYTES = 1_000_000  # payloads from this size on are reported
WARN_AT = 0.8  # fraction of a limit
OPEN = (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.SUSPENDED)

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
class Finding:
    """A problem of the store. An error violates a guarantee; a warning may be intended.

    `repair` names the action of `perdure.admin.repair` that fixes it, if there is one. The action applies to `subject`.
    """

    kind: str
    severity: str  # "error", "warning"
    text: str
    advice: str
    subject: str | None = None
    repair: str | None = None


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The result of a health check. `progress_reasons` counts the open runs by what will let them continue."""

    at: datetime
    open_runs: int
    progress_reasons: Mapping[str, int]
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> int:
        return sum(finding.severity == "error" for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Prunable:
    """The approximate number of runs that a prune would delete, and the first of them."""

    count: int
    first: tuple[RunDescription, ...]


async def workers_of(client: Client) -> list[WorkerView]:
    """Return all workers that the store has, live ones first."""
    session = client._session
    now, records = session.clock.now(), await session.read(session.store.workers)
    views = [
        _worker_view(each, now, len(await session.read(partial(session.store.owned, each.id)))) for each in records
    ]
    return sorted(views, key=lambda view: (not view.alive, view.pool, view.started_at))


async def find_dead_letter(client: Client, dead_letter_id: str) -> DeadLetterView | None:
    """Return one dead letter; None if it does not exist."""
    session, checked_id = client._session, check_text("a dead letter's id", dead_letter_id)
    dead_letter = await session.read(partial(session.store.dead_letter, checked_id))
    return None if dead_letter is None else dead_letter_view(dead_letter, session.codec)


async def published_workflows(client: Client) -> list[str]:
    """Return the names of the workflows that live workers have: these can be started by name."""
    session = client._session
    state = StoreState(session.clock.now(), {worker.id: worker for worker in await session.read(session.store.workers)})
    return sorted({name for each in state.workers.values() if state.is_alive(each.id) for name, _ in each.workflows})


async def records_of(client: Client, query: RunQuery | None = None) -> AsyncIterator[list[RunRecord]]:
    """Yield pages of all runs that match a query; only open runs if it names no status."""
    query, after = query or RunQuery(), None
    while True:
        page_query = replace(query, status=query.status or OPEN, limit=PAGE, after=after)
        page = await client._session.read(partial(client._session.store.runs, page_query))
        if page.runs:
            yield list(page.runs)
        if page.next is None:
            return
        after = page.next


async def check_health(client: Client, *, deep: bool = False, progress: Progress | None = None) -> HealthReport:
    """Check the store. With `deep`, also read the history of every open run, to find large payloads."""
    check = _HealthCheck(client, await _read_state(client))
    async for page in records_of(client):
        await check.check_runs(page)
        if deep:
            await check.check_histories([record.id for record in page])
        if progress is not None:
            progress(len(page))
    check.add_aggregates()
    await check.check_finalization()
    await check.check_clocks()
    found = sorted(check.findings, key=lambda finding: (finding.severity, finding.kind, finding.subject or ""))
    return HealthReport(to_datetime(check.state.now), check.runs, dict(check.progress_reasons), tuple(found))


async def prunable(client: Client, *, first: int = 0, progress: Progress | None = None) -> Prunable:
    """Return the finished runs whose retention is over. A prune keeps those that still need finalization."""
    session, count = client._session, 0
    shown: list[RunDescription] = []
    default_retention, now = session.config.seconds("run_retention"), session.clock.now()
    ended = RunQuery(status=(RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED))
    async for page in records_of(client, ended):
        for record in page:
            retention = default_retention if record.retention is None else record.retention
            if record.ended_at is not None and record.ended_at + retention <= now:
                count += 1
                if len(shown) < first:
                    shown.append(describe_run(record, session.codec))
        if progress is not None:
            progress(len(page))
    return Prunable(count, tuple(shown))


# --- one run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreState:
    """The state of the store that the check of one run needs."""

    now: float
    workers: Mapping[str, WorkerRecord] = field(default_factory=dict)
    unfinalized: frozenset[str] = frozenset()  # ended runs that still have to notify others

    def is_alive(self, worker_id: str) -> bool:
        worker = self.workers.get(worker_id)
        return worker is not None and not worker.fenced and worker.lease_until >= self.now

    def serves(self, record: RunRecord) -> bool:
        """Return whether a live worker of the run's pool has its workflow and version."""
        wanted = (record.workflow, record.version)
        return any(
            wanted in worker.workflows and worker.pool == record.pool and self.is_alive(worker.id)
            for worker in self.workers.values()
        )


def progress_reason(
    record: RunRecord, state: StoreState, awaited: Mapping[str, RunRecord | None], unread: frozenset[str]
) -> str:
    """Return what will let an open run continue; a text that starts with `no ` if nothing will.

    `awaited` are the runs that it waits for, `unread` the names of its unread events.
    """
    if record.owner is not None:
        return "owner" if state.is_alive(record.owner) else "no owner"
    if record.wake_at is not None:
        return "due"
    if record.held is not None:
        return "held"
    waits = {wait.kind: wait.name for wait in record.waits}
    if any(wait.kind == "event" and wait.name in unread for wait in record.waits):
        return "no wake-up for an unread event"
    if "event" in waits or "deferred" in waits:
        return "event" if "event" in waits else "deferred"
    children = [wait.name for wait in record.waits if wait.kind == "child" and wait.name is not None]
    if any(_will_notify(awaited.get(child), state) for child in children):
        return "child"
    return "no notification of the end of a child" if children else "no reason to continue"


def _will_notify(child: RunRecord | None, state: StoreState) -> bool:
    return child is not None and (not child.status.terminal or child.id in state.unfinalized)


# --- the whole store -----------------------------------------------------------------------------------------------


class _HealthCheck:
    """Collects findings over the whole store. A problem that many runs share is one finding."""

    def __init__(self, client: Client, state: StoreState) -> None:
        self.state = state
        self.findings: list[Finding] = []
        self.progress_reasons: Counter[str] = Counter()
        self.runs = 0
        self._client = client
        self._session = client._session
        self._limit = client._session.config.max_pending_events
        self._dead_owners: Counter[str] = Counter()  # runs per worker that is not alive
        self._without_worker: Counter[str] = Counter()
        self._overdue: list[RunRecord] = []
        self._future = 0

    async def check_runs(self, page: Sequence[RunRecord]) -> None:
        self.runs += len(page)
        parents = await self._runs_named({each.parent for each in page if each.attached and each.parent is not None})
        for record, reason in zip(page, await self._progress_reasons(page), strict=True):
            if reason.startswith("no ") and record.owner is None:
                await self._confirm(record)
            else:
                self._count(record, reason)
            self._check_input_size(record)
            self._check_parent(record, parents)
        for record in page:
            if record.last_message_no >= WARN_AT * self._limit:
                await self._check_mailbox(record)

    async def check_histories(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            for row in await self._session.read(partial(self._session.store.history, run_id)):
                size = len(row.entry.value or b"")
                if size >= LARGE_PAYLOAD_BYTES:
                    self._add_large_payload(run_id, f"the result at {row.entry.location}", size)

    def add_aggregates(self) -> None:
        """Add the findings that were counted over all runs."""
        now = self.state.now
        for worker in self.state.workers.values():
            if not self.state.is_alive(worker.id):
                self._dead_worker(worker, self._dead_owners.pop(worker.id, 0))
        for owner, count in self._dead_owners.items():
            text = f"{_runs(count)} owned by unknown worker {owner}"
            self._add("orphaned_runs", "error", text, "release them to other workers", owner, "release_runs")
        for name, count in sorted(self._without_worker.items()):
            text = f"{_runs(count)} due, but no live worker has {name}"
            self._add("no_worker", "warning", text, "start a worker: perdure worker TARGET", name)
        if self._overdue:
            worst = min(self._overdue, key=lambda record: record.wake_at or 0.0)
            late = timedelta(seconds=int(now - (worst.wake_at or now)))
            text = f"{_runs(len(self._overdue))} due for up to {late} and not claimed (earliest: {worst.id})"
            self._add("overdue", "warning", text, "start more workers, or raise --concurrency", worst.id)
        if self._future:
            text = f"{_runs(self._future)} created in the future, by the store's time"
            self._add("clock_skew", "warning", text, "correct the clocks of the machines that start runs")

    async def check_finalization(self) -> None:
        """Find ended runs and broadcasts that no worker has completed in time."""
        session, latest = self._session, self.state.now - OVERDUE_AFTER_SECONDS
        for ended in await session.read(partial(session.store.unfinalized, PAGE)):
            if (ended.record.ended_at or 0.0) < latest:
                run_id = ended.record.id
                missing = _missing_finalization(len(ended.observers), len(ended.messages), ended.orphaned_children)
                self._add(
                    "unfinalized", "error", f"Run {run_id} ended, but {missing}", "finalize it", run_id, "finalize"
                )
        for event in await session.read(partial(session.store.unfinished_broadcasts, PAGE)):
            if event.sent_at < latest:
                text = f"Event {event.id} of topic {event.topic} was not delivered to all runs that waited for it"
                advice = "deliver it to the remaining runs"
                self._add("unfinished_broadcast", "error", text, advice, event.topic, "fan_out")

    async def check_clocks(self) -> None:
        offset = await self._session.read(self._session.store.now) - self._session.process_clock.now()
        if abs(offset) > MAX_CLOCK_SKEW_SECONDS:
            text = f"This machine's clock is {abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} the store's"
            self._add("clock_skew", "warning", text, "correct this machine's clock")
        for worker in self.state.workers.values():
            ahead = worker.started_at - self.state.now
            if ahead > MAX_CLOCK_SKEW_SECONDS:
                text = f"Worker {worker.id} (pid {worker.pid}) started {ahead:.1f} s in the future, by the store's time"
                self._add("clock_skew", "warning", text, "correct the clock of its machine", worker.id)
        self._check_leases()

    def _check_leases(self) -> None:
        """Find a worker whose clock is ahead: leases are equally long, so its lease ends much later than all others."""
        now = self.state.now
        alive = sorted(
            (each.lease_until, each.id) for each in self.state.workers.values() if self.state.is_alive(each.id)
        )
        if len(alive) < 2:
            return
        (usual, _), (longest, worker_id) = alive[-2:]
        ahead = longest - max(usual, now + self._session.config.seconds("lease"))
        if ahead > MAX_CLOCK_SKEW_SECONDS:
            text = f"Worker {worker_id}: lease ends {ahead:.1f} s later than any other; its clock may be ahead"
            advice = "correct the clock of its machine, or configure the same lease for all workers"
            self._add("clock_skew", "warning", text, advice, worker_id)

    async def _progress_reasons(self, page: Sequence[RunRecord]) -> list[str]:
        waiting = [each for each in page if each.owner is None and each.wake_at is None and each.held is None]
        awaited = await self._runs_named(
            {wait.name for each in waiting for wait in each.waits if wait.kind == "child" and wait.name is not None}
        )
        unread = {each.id: await self._unread_events(each.id) for each in waiting if each.last_message_no}
        return [progress_reason(each, self.state, awaited, unread.get(each.id, frozenset())) for each in page]

    async def _runs_named(self, ids: set[str]) -> dict[str, RunRecord | None]:
        if not ids:
            return {}
        names = sorted(ids)
        return dict(zip(names, await self._session.read(partial(self._session.store.records, names)), strict=True))

    async def _unread_events(self, run_id: str) -> frozenset[str]:
        inbox = await self._session.read(partial(self._session.store.inbox, run_id))
        return frozenset(message.name for message in inbox if message.kind == "event")

    async def _confirm(self, seen: RunRecord) -> None:
        """Read a run again that seemed stuck, because the store changes during the check; report it if it still is."""
        [record] = await self._session.read(partial(self._session.store.records, [seen.id]))
        if record is None or record.status.terminal:
            self.runs -= 1
            return
        check = _HealthCheck(self._client, await _read_state(self._client))
        [reason] = await check._progress_reasons([record])
        if record.owner is None and reason.startswith("no "):
            self.progress_reasons["nothing"] += 1
            text = f"Run {record.id} ({record.workflow}, {record.status}) is stuck: it has {reason}"
            self._add("stuck", "error", text, "resume it", record.id, "resume")
        else:
            self._count(record, reason)

    def _count(self, record: RunRecord, reason: str) -> None:
        if reason == "no owner" and record.owner is not None:
            self._dead_owners[record.owner] += 1
            self.progress_reasons["nothing"] += 1
            return
        self.progress_reasons[reason] += 1
        now = self.state.now
        if record.created_at > now + MAX_CLOCK_SKEW_SECONDS:
            self._future += 1
        if reason == "due" and record.wake_at is not None and record.wake_at <= now:
            if not self.state.serves(record):
                self._without_worker[f"workflow {record.workflow} v{record.version} (pool {record.pool})"] += 1
            elif record.wake_at < now - OVERDUE_AFTER_SECONDS:
                self._overdue.append(record)

    def _dead_worker(self, worker: WorkerRecord, runs: int) -> None:
        ago = timedelta(seconds=int(max(0.0, self.state.now - worker.lease_until)))
        text = f"Worker {worker.id} (pid {worker.pid}): " + ("fenced" if worker.fenced else f"lease expired {ago} ago")
        if runs:
            text += f", and it still owns {runs} run{'' if runs == 1 else 's'}"
            advice = "fence it and release its runs"
            self._add("expired_lease", "error", text, advice, worker.id, "remove_worker")
        else:
            self._add("dead_worker", "warning", text, "remove it", worker.id, "remove_worker")

    def _check_input_size(self, record: RunRecord) -> None:
        if len(record.input) >= LARGE_PAYLOAD_BYTES:
            self._add_large_payload(record.id, "its payload", len(record.input))

    def _add_large_payload(self, run_id: str, what: str, size: int) -> None:
        text = f"Run {run_id}: {what} has {size / 1e6:.1f} MB"
        self._add("large_payload", "warning", text, "store large values elsewhere and pass references", run_id)

    def _check_parent(self, record: RunRecord, parents: Mapping[str, RunRecord | None]) -> None:
        parent = parents.get(record.parent) if record.parent is not None else None
        if parent is None or parent.id in self.state.unfinalized:
            return
        if parent.status in (RunStatus.FAILED, RunStatus.CANCELLED):
            text = f"Run {record.id} is still open, but its parent {parent.id} ended ({parent.status})"
            self._add("orphan_child", "warning", text, "cancel it", record.id, "cancel")

    async def _check_mailbox(self, record: RunRecord) -> None:
        inbox = await self._session.read(partial(self._session.store.inbox, record.id))
        unread = sum(message.kind in ("event", "assignment") for message in inbox)
        if unread >= WARN_AT * self._limit:
            text = f"Run {record.id} has {unread} unread events; its mailbox holds at most {self._limit}"
            advice = f"find out what it waits for: perdure show {record.id}"
            self._add("mailbox_nearly_full", "warning", text, advice, record.id)

    def _add(
        self, kind: str, severity: str, text: str, advice: str, subject: str | None = None, repair: str | None = None
    ) -> None:
        self.findings.append(Finding(kind, severity, text, advice, subject, repair))


async def _read_state(client: Client) -> StoreState:
    session = client._session
    workers = {worker.id: worker for worker in await session.read(session.store.workers)}
    unfinalized = await session.read(partial(session.store.unfinalized, PAGE))
    return StoreState(session.clock.now(), workers, frozenset(each.record.id for each in unfinalized))


def _worker_view(record: WorkerRecord, now: float, runs: int) -> WorkerView:
    return WorkerView(
        id=record.id,
        pool=record.pool,
        workflows=record.workflows,
        alive=not record.fenced and record.lease_until >= now,
        runs=runs,
        started_at=to_datetime(record.started_at),
        lease_until=to_datetime(record.lease_until),
        host=record.host,
        pid=record.pid,
    )


def _runs(count: int) -> str:
    return "1 run is" if count == 1 else f"{count} runs are"


def _missing_finalization(observers: int, messages: int, children: bool) -> str:
    parts = []
    if observers:
        parts.append("1 observer was not notified" if observers == 1 else f"{observers} observers were not notified")
    if messages:
        parts.append(
            "1 unread message was not handled" if messages == 1 else f"{messages} unread messages were not handled"
        )
    if children:
        parts.append("its children were not ended")
    return ", ".join(parts) or "its finalization was not marked done"
