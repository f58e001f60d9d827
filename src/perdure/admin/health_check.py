"""Health check of a whole store: its workers, and whether every open run can make progress (guarantee 5).

An open run has a live worker that executes it, a time at which it is due, unread messages, something that it waits for,
or a reason to be held. `check_health` finds runs that have none of these, and other problems of the store. It changes
nothing; `perdure.admin.repair` repairs what it finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from datetime import timedelta
from functools import partial

from perdure.admin.findings import Findings, HealthReport
from perdure.admin.queue_health import QueueCheck
from perdure.admin.queue_progress import waiting_reason
from perdure.admin.run_progress import (
    STALLED_AFTER_SECONDS,
    TIMER_TOLERANCE_SECONDS,
    StoreState,
    damage_of,
    find_wait_cycles,
    is_stalled,
    lost_subscriptions,
    progress_reason,
    unhandled_kinds,
    waits_for_runs_only,
)
from perdure.admin.schedule_checks import add_undeclared, find_undeclared
from perdure.admin.store_views import ENDED, PAGE, Progress, pages_of
from perdure.client.client import Client
from perdure.clock import to_datetime
from perdure.errors import StoreError
from perdure.model.queries import RunQuery
from perdure.model.queue_records import PlaceRecord, QueueSummary
from perdure.model.records import Message, RunRecord, RunStatus, WorkerRecord
from perdure.stores.results import Snapshot, UnreadableRun

LOAD_PAGE = 50  # runs with their histories
OVERDUE_AFTER_SECONDS = 60.0  # work that is due at once and older than this is reported
MAX_CLOCK_SKEW_SECONDS = 1.0
LARGE_PAYLOAD_BYTES = 1_000_000  # payloads from this size on are reported
SHOWN_RUNS = 5  # of a finding about many
CHECKED_WAKE_UPS = 100  # runs per pool that must be found by the search for due runs
WARN_AT = 0.8  # fraction of a limit


async def check_health(
    client: Client,
    *,
    deep: bool = False,
    progress: Progress | None = None,
    declared_schedules: Set[str] | None = None,
) -> HealthReport:
    """Check the store. With `deep`, also read the histories of all open runs, and all ended runs.

    `declared_schedules` are the ids of the schedules that the code declares, if the code is known.
    """
    queues = await client._session.read(client._session.store.queues)
    check = _HealthCheck(client, await _read_state(client), queues)
    async for page in pages_of(client):
        check.add_unreadable(page.unreadable)
        await check.check_runs(page.runs)
        if deep:
            await check.check_histories([record.id for record in page.runs])
        if progress is not None:
            progress(len(page.runs))
    if deep:
        async for page in pages_of(client, RunQuery(status=ENDED)):
            check.add_unreadable(page.unreadable)
            check.check_rows(page.runs)
    await check.check_wait_cycles()
    await check.check_due_index()
    check.add_aggregates()
    if declared_schedules is not None:
        add_undeclared(check.findings, await find_undeclared(client, declared_schedules))
    await check.check_finalization()
    await check.queues.check_queues()
    await check.check_clocks()
    found = check.findings.in_order()
    return HealthReport(to_datetime(check.state.now), check.runs, dict(check.progress_reasons), found)


class _HealthCheck:
    """Collects findings over the whole store. A problem that many runs share is one finding."""

    def __init__(self, client: Client, state: StoreState, queues: Sequence[QueueSummary] = ()) -> None:
        self.state = state
        self.findings = Findings()
        self.queues = QueueCheck(client, self.findings, state, queues)
        self.progress_reasons: Counter[str] = Counter()
        self.runs = 0
        self._client = client
        self._session = client._session
        self._limit = client._session.config.max_pending_events
        self._dead_owners: dict[str, list[str]] = {}  # runs by worker that is not alive
        self._without_worker: dict[str, list[str]] = {}  # due runs by workflow that no live worker has
        self._overdue: list[RunRecord] = []
        self._future = 0
        self._earliest: dict[
            str, list[tuple[float, str]]
        ] = {}  # times and ids of the runs of a pool that are due first
        self._waits: dict[str, frozenset[str]] = {}  # awaited runs of those that wait for runs only

    # --- runs

    def add_unreadable(self, marks: Sequence[UnreadableRun]) -> None:
        for mark in marks:
            self.findings.add_unreadable(mark.id, mark.reason)

    async def check_runs(self, page: Sequence[RunRecord]) -> None:
        """Check open runs."""
        self.runs += len(page)
        self.check_rows(page)
        parents = await self._runs_named({each.parent for each in page if each.attached and each.parent is not None})
        for record, reason in zip(page, await self._progress_reasons(page), strict=True):
            if reason.startswith("no ") and record.owner is None:
                await self._confirm(record)
            else:
                self._count(record, reason)
            self.queues.check_run(record)
            self._check_input_size(record)
            self._check_parent(record, parents)
        for record in page:
            if record.last_message_no >= WARN_AT * self._limit:
                await self._check_mailbox(record)
        await self._check_subscriptions(page)
        await self._check_owned(page)

    def check_rows(self, page: Sequence[RunRecord]) -> None:
        """Find rows that contradict themselves."""
        for record in page:
            if (damage := damage_of(record)) is not None:
                text = f"The row of run {record.id} ({record.workflow}) is damaged: {damage}"
                self.findings.add("damaged", "error", text, "restore it from a backup, or correct it", record.id)

    async def check_histories(self, run_ids: Sequence[str]) -> None:
        """Read runs with histories and messages: find those that cannot be read, and large values."""
        for first in range(0, len(run_ids), LOAD_PAGE):
            page = run_ids[first : first + LOAD_PAGE]
            for snapshot in await self._session.read(partial(self._session.store.load, page)):
                if isinstance(snapshot, UnreadableRun):
                    self.findings.add_unreadable(snapshot.id, snapshot.reason)
                elif snapshot is not None:
                    self._check_value_sizes(snapshot)

    async def check_wait_cycles(self) -> None:
        """Find runs that wait for themselves or for each other. They are read again: the store has changed since."""
        for group in find_wait_cycles(self._waits):
            found = await self._runs_named(set(group))
            waits = {id: waits_for_runs_only(each) for id, each in found.items() if isinstance(each, RunRecord)}
            if find_wait_cycles(waits):
                names = ", ".join(group)
                text = f"Run {names} waits for itself" if len(group) == 1 else f"Runs {names} wait for each other"
                advice = f"end one of them: perdure terminate {group[0]}"
                self.findings.add("wait_cycle", "error", text, advice, group[0])

    async def check_due_index(self) -> None:
        """Find runs that are due before every run that the store's search for due runs finds."""
        for pool, earliest in self._earliest.items():
            next_wake = await self._session.read(partial(self._session.store.next_wake, pool))
            for wake_at, run_id in sorted(earliest)[:CHECKED_WAKE_UPS]:
                if next_wake is not None and next_wake <= wake_at + TIMER_TOLERANCE_SECONDS:
                    break
                record = await self._read_again(run_id)
                if record is not None and record.owner is None and record.wake_at == wake_at:  # not claimed meanwhile
                    text = f"Run {run_id} ({record.workflow}) has a due time, but no search for due runs finds it"
                    self.findings.add("lost_wake_up", "error", text, "resume it", run_id, "resume")

    async def _progress_reasons(self, page: Sequence[RunRecord]) -> list[str]:
        waiting = [
            each
            for each in page
            if each.owner is None and each.wake_at is None and each.held is None and not each.waiting
        ]
        places = {each.id: await self._place(each.id) for each in page if each.waiting}
        awaited = await self._runs_named(
            {wait.name for each in waiting for wait in each.waits if wait.kind == "child" and wait.name is not None}
        )
        inboxes = {each.id: await self._inbox(each.id) for each in waiting if each.last_message_no}
        return [
            waiting_reason(each, places[each.id], self.state)
            if each.waiting
            else progress_reason(
                each,
                self.state,
                awaited,
                frozenset(message.name for message in inboxes.get(each.id, ()) if message.kind == "event"),
                unhandled_kinds(each, inboxes.get(each.id, ())),
            )
            for each in page
        ]

    async def _runs_named(self, ids: set[str]) -> Mapping[str, RunRecord | UnreadableRun | None]:
        names = sorted(ids)
        if not names:
            return {}
        found = await self._session.read(partial(self._session.store.records, names))
        self.add_unreadable([each for each in found if isinstance(each, UnreadableRun)])
        return dict(zip(names, found, strict=True))

    async def _place(self, run_id: str) -> PlaceRecord | None:
        """Return the place of a run; none, and a finding, if it cannot be read."""
        try:
            return await self._session.read(partial(self._session.store.place, run_id))
        except StoreError as error:
            if error.retryable:
                raise
            self.findings.add_unreadable(run_id, str(error))
            return None

    async def _inbox(self, run_id: str) -> list[Message]:
        """Return the unread messages of a run; none, and a finding, if they cannot be read."""
        try:
            return await self._session.read(partial(self._session.store.inbox, run_id))
        except StoreError as error:
            if error.retryable:
                raise
            self.findings.add_unreadable(run_id, str(error))
            return []

    async def _confirm(self, seen: RunRecord) -> None:
        """Read a run again that seemed stuck, because the store changes during the check; report it if it still is."""
        record = await self._read_again(seen.id)
        if record is None or record.status.terminal:
            self.runs -= 1
            return
        check = _HealthCheck(self._client, await _read_state(self._client))
        [reason] = await check._progress_reasons([record])
        if record.owner is None and reason.startswith("no "):
            self.progress_reasons["nothing"] += 1
            text = f"Run {record.id} ({record.workflow}, {record.status}) is stuck: it has {reason}"
            self.findings.add("stuck", "error", text, "resume it", record.id, "resume")
        else:
            self._count(record, reason)

    async def _read_again(self, run_id: str) -> RunRecord | None:
        found = (await self._runs_named({run_id}))[run_id]
        return found if isinstance(found, RunRecord) else None

    def _count(self, record: RunRecord, reason: str) -> None:
        if reason == "no owner" and record.owner is not None:
            self._dead_owners.setdefault(record.owner, []).append(record.id)
            self.progress_reasons["nothing"] += 1
            return
        self.progress_reasons[reason] += 1
        if reason == "held" or record.held is not None:
            self._add_held(record)
        if awaited := waits_for_runs_only(record):
            self._waits[record.id] = awaited
        now = self.state.now
        if record.owner is None and record.wake_at is not None:
            earliest = self._earliest.setdefault(record.pool, [])
            earliest.append((record.wake_at, record.id))
            if len(earliest) > 10 * CHECKED_WAKE_UPS:
                self._earliest[record.pool] = sorted(earliest)[:CHECKED_WAKE_UPS]
        if record.created_at > now + MAX_CLOCK_SKEW_SECONDS:
            self._future += 1
        if reason == "queue" and not self.state.serves(record):
            self._add_without_worker(record)
        if reason == "due" and record.gate and record.gate not in (self.state.queues or {}):
            text = f"Run {record.id} ({record.workflow}) is due behind the gate of an unknown queue, {record.gate!r}"
            self.findings.add("damaged", "error", text, "restore its row from a backup, or correct it", record.id)
        if reason == "due" and record.wake_at is not None and record.wake_at <= now:
            if not self.state.serves(record):
                self._add_without_worker(record)
            elif record.wake_at < now - OVERDUE_AFTER_SECONDS:
                self._overdue.append(record)

    def _add_without_worker(self, record: RunRecord) -> None:
        name = f"workflow {record.workflow} v{record.version} (pool {record.pool})"
        self._without_worker.setdefault(name, []).append(record.id)

    def _add_held(self, record: RunRecord) -> None:
        if record.held is not None and record.owner is None and record.wake_at is None:
            text = f"Run {record.id} ({record.workflow}) is held ({record.held.kind}): {record.held.reason}"
            advice = f"fix the cause, then resume it: perdure resume {record.id}"
            self.findings.add("held", "error", text, advice, record.id)

    async def _check_subscriptions(self, page: Sequence[RunRecord]) -> None:
        """Find suspended runs whose receive has lost its subscription to the topics of its events."""
        waiting = [
            each
            for each in page
            if each.owner is None and each.wake_at is None and each.held is None and each.status is RunStatus.SUSPENDED
        ]
        receiving = [each for each in waiting if any(wait.kind == "event" for wait in each.waits)]
        if not receiving:
            return
        ids = [each.id for each in receiving]
        subscribed = await self._session.read(partial(self._session.store.subscribed, ids))
        for record, targets in zip(receiving, subscribed, strict=True):
            if lost_subscriptions(record, targets, ()):
                await self._confirm_lost_subscription(record, targets)

    async def _confirm_lost_subscription(self, record: RunRecord, targets: frozenset[str]) -> None:
        """Report a lost subscription, unless an event was assigned to the receive or the run has continued."""
        lost = lost_subscriptions(record, targets, await self._inbox(record.id))
        again = await self._read_again(record.id)
        if lost and again is not None and again == record:
            text = f"Run {record.id} ({record.workflow}) waits for event {lost[0].name} without a subscription"
            self.findings.add("lost_subscription", "error", text, "subscribe it again", record.id, "subscribe")

    async def _check_owned(self, page: Sequence[RunRecord]) -> None:
        """Find runs whose owner is alive and makes no progress."""
        quiet = self.state.now - STALLED_AFTER_SECONDS
        for record in page:
            changed_at = max(record.created_at, record.updated_at)
            if record.owner is None or changed_at >= quiet or not self.state.is_alive(record.owner):
                continue
            [snapshot] = await self._session.read(partial(self._session.store.load, [record.id]))
            if isinstance(snapshot, UnreadableRun):
                self.findings.add_unreadable(snapshot.id, snapshot.reason)
            elif snapshot is not None and snapshot.record.owner == record.owner:
                self._check_stalled(snapshot)

    def _check_stalled(self, snapshot: Snapshot) -> None:
        record = snapshot.record
        if is_stalled(record, snapshot.entries, self.state.now):
            text = f"Run {record.id} ({record.workflow}): its worker {record.owner} is alive and makes no progress"
            advice = "release it to be claimed again, and look for errors in the log of the worker"
            self.findings.add("stalled", "error", text, advice, record.id, "release_run")

    # --- sizes and parents

    def _check_value_sizes(self, snapshot: Snapshot) -> None:
        for entry in snapshot.entries:
            size = len(entry.value or b"")
            if size >= LARGE_PAYLOAD_BYTES:
                self._add_large_payload(snapshot.record.id, f"the result at {entry.location}", size)

    def _check_input_size(self, record: RunRecord) -> None:
        if len(record.input) >= LARGE_PAYLOAD_BYTES:
            self._add_large_payload(record.id, "its payload", len(record.input))

    def _add_large_payload(self, run_id: str, what: str, size: int) -> None:
        text = f"Run {run_id}: {what} has {size / 1e6:.1f} MB"
        advice = "store large values elsewhere and pass references"
        self.findings.add("large_payload", "warning", text, advice, run_id)

    def _check_parent(self, record: RunRecord, parents: Mapping[str, RunRecord | UnreadableRun | None]) -> None:
        parent = parents.get(record.parent) if record.parent is not None else None
        if not isinstance(parent, RunRecord) or parent.id in self.state.unfinalized:
            return
        if parent.status in (RunStatus.FAILED, RunStatus.CANCELLED):
            text = f"Run {record.id} is still open, but its parent {parent.id} ended ({parent.status})"
            self.findings.add("orphan_child", "warning", text, "cancel it", record.id, "cancel")

    async def _check_mailbox(self, record: RunRecord) -> None:
        events = [message.name for message in await self._inbox(record.id) if message.kind in ("event", "assignment")]
        for name, unread in Counter(events).most_common(1):
            if unread < WARN_AT * self._limit:
                return
            limit = f"its mailbox holds at most {self._limit} of the name {name!r}"
            text = f"Run {record.id} has {unread} unread events; {limit}"
            advice = f"find out what it waits for: perdure show {record.id}"
            self.findings.add("mailbox_nearly_full", "warning", text, advice, record.id)

    # --- workers, finalization and clocks

    def add_aggregates(self) -> None:
        """Add the findings that were counted over all runs."""
        now, add = self.state.now, self.findings.add
        for worker in self.state.workers.values():
            if not self.state.is_alive(worker.id):
                self._add_dead_worker(worker, len(self._dead_owners.pop(worker.id, ())))
        for owner, ids in self._dead_owners.items():
            text = f"{_runs(len(ids))} owned by unknown worker {owner}: {', '.join(ids[:SHOWN_RUNS])}"
            add("orphaned_runs", "error", text, "release them to other workers", owner, "release_runs")
        for name, ids in sorted(self._without_worker.items()):
            text = f"{_runs(len(ids))} to be executed, but no live worker has {name}: {', '.join(ids[:SHOWN_RUNS])}"
            add("no_worker", "warning", text, "start a worker: perdure worker TARGET", name)
        if self._overdue:
            worst = min(self._overdue, key=lambda record: record.wake_at or 0.0)
            late = timedelta(seconds=int(now - (worst.wake_at or now)))
            text = f"{_runs(len(self._overdue))} due for up to {late} and not claimed (earliest: {worst.id})"
            add("overdue", "warning", text, "start more workers, or raise --concurrency", worst.id)
        if self._future:
            text = f"{_runs(self._future)} created in the future, by the store's time"
            add("clock_skew", "warning", text, "correct the clocks of the machines that start runs")

    def _add_dead_worker(self, worker: WorkerRecord, runs: int) -> None:
        ago = timedelta(seconds=int(max(0.0, self.state.now - worker.lease_until)))
        text = f"Worker {worker.id} (pid {worker.pid}): " + ("fenced" if worker.fenced else f"lease expired {ago} ago")
        if runs:
            text += f", and it still owns {runs} run{'' if runs == 1 else 's'}"
            advice = "fence it and release its runs"
            self.findings.add("expired_lease", "error", text, advice, worker.id, "remove_worker")
        else:
            self.findings.add("dead_worker", "warning", text, "remove it", worker.id, "remove_worker")

    async def check_finalization(self) -> None:
        """Find ended runs and broadcasts that no worker has completed in time."""
        session, latest, add = self._session, self.state.now - OVERDUE_AFTER_SECONDS, self.findings.add
        for ended in await session.read(partial(session.store.unfinalized, PAGE)):
            if (ended.record.ended_at or 0.0) < latest:
                run_id = ended.record.id
                missing = _missing_finalization(len(ended.observers), len(ended.messages), ended.orphaned_children)
                add("unfinalized", "error", f"Run {run_id} ended, but {missing}", "finalize it", run_id, "finalize")
        for event in await session.read(partial(session.store.unfinished_broadcasts, PAGE)):
            if event.sent_at < latest:
                text = f"Event {event.id} of topic {event.topic} was not delivered to all runs that waited for it"
                advice = "deliver it to the remaining runs"
                add("unfinished_broadcast", "error", text, advice, event.topic, "fan_out")

    async def check_clocks(self) -> None:
        offset = await self._session.read(self._session.store.now) - self._session.process_clock.now()
        if abs(offset) > MAX_CLOCK_SKEW_SECONDS:
            text = f"This machine's clock is {abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} the store's"
            self.findings.add("clock_skew", "warning", text, "correct this machine's clock")
        for worker in self.state.workers.values():
            ahead = worker.started_at - self.state.now
            if ahead > MAX_CLOCK_SKEW_SECONDS:
                text = f"Worker {worker.id} (pid {worker.pid}) started {ahead:.1f} s in the future, by the store's time"
                self.findings.add("clock_skew", "warning", text, "correct the clock of its machine", worker.id)
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
            self.findings.add("clock_skew", "warning", text, advice, worker_id)


async def _read_state(client: Client) -> StoreState:
    session = client._session
    workers = {worker.id: worker for worker in await session.read(session.store.workers)}
    unfinalized = await session.read(partial(session.store.unfinalized, PAGE))
    queues = {queue.name: queue for queue in await session.read(session.store.queues)}
    return StoreState(session.clock.now(), workers, frozenset(each.record.id for each in unfinalized), queues)


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
