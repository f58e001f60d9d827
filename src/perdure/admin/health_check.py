"""Inspection: looking over a whole store. Who works on it, and whether every open run will go on (guarantee 5).

A run that has not ended has a worker that is alive, a moment at which it is due, mail to read, something that it waits
for, or a named reason to be held. `examine` holds every open run against that, and looks at what else may be stuck. It
changes nothing; what can be mended is mended by `mending`.
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

PAGE = 500
OVERDUE_AFTER_SECONDS = 60.0  # seconds after which what should have been done at once is called stuck
MAX_CLOCK_SKEW_SECONDS = 1.0  # seconds that clocks may differ without anybody noticing
LARGE_PAYLOAD_BYTES = 1_000_000  # bytes of one payload from which on it is better kept elsewhere
WARN_AT = 0.8  # of a limit
OPEN = (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.SUSPENDED)

Progress = Callable[[int], None]
"""Told how many more runs were looked at."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as people see it. One that is not `alive` has let its lease run out, or was declared gone."""

    id: str
    pool: str
    workflows: tuple[tuple[str, int], ...]
    alive: bool
    runs: int
    started_at: datetime
    lease_until: datetime
    node: str
    pid: int


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be. An error breaks a promise, a warning may be on purpose.

    `mends` names what a repair does about it (see `mending`), if it can do anything; `subject` is what it does that to.
    """

    kind: str
    severity: str  # "error", "warning"
    text: str
    advice: str
    subject: str | None = None
    repair: str | None = None


@dataclass(frozen=True, slots=True)
class HealthReport:
    """What was found. `grounds` counts the open runs by what will make them go on."""

    at: datetime
    open_runs: int
    progress_reasons: Mapping[str, int]
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> int:
        return sum(finding.severity == "error" for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Prunable:
    """About how many runs would be deleted, and the first of them."""

    count: int
    first: tuple[RunDescription, ...]


async def workers_of(client: Client) -> list[WorkerView]:
    """Every worker that the store knows, those that are alive first."""
    link = client._open
    now, records = link.clock.now(), await link.read(link.store.workers)
    views = [_worker_view(each, now, len(await link.read(partial(link.store.owned, each.id)))) for each in records]
    return sorted(views, key=lambda view: (not view.alive, view.pool, view.started_at))


async def find_dead_letter(client: Client, letter_id: str) -> DeadLetterView | None:
    """One dead letter."""
    letter = await client._open.read(partial(client._open.store.dead_letter, letter_id))
    return None if letter is None else dead_letter_view(letter, client._open.codec)


async def published_workflows(client: Client) -> list[str]:
    """The names of the workflows that live workers have: what can be started by name."""
    link = client._open
    facts = StoreState(link.clock.now(), {worker.id: worker for worker in await link.read(link.store.workers)})
    return sorted({name for each in facts.workers.values() if facts.is_alive(each.id) for name, _ in each.workflows})


async def records_of(client: Client, query: RunQuery | None = None) -> AsyncIterator[list[RunRecord]]:
    """The rows of all runs that a query means, in pages; of those that are open, if it names no status."""
    query, after = query or RunQuery(), None
    while True:
        asked = replace(query, status=query.status or OPEN, limit=PAGE, after=after)
        page = await client._open.read(partial(client._open.store.runs, asked))
        if page.runs:
            yield list(page.runs)
        if page.next is None:
            return
        after = page.next


async def check_health(client: Client, *, deep: bool = False, progress: Progress | None = None) -> HealthReport:
    """Look over the store. `deep` reads every history too, for payloads that are too large."""
    survey = _HealthCheck(client, await _facts(client))
    async for page in records_of(client):
        await survey.check_runs(page)
        if deep:
            await survey.check_histories([record.id for record in page])
        if progress is not None:
            progress(len(page))
    survey.add_aggregates()
    await survey.look_at_duties()
    await survey.look_at_clocks()
    found = sorted(survey.findings, key=lambda finding: (finding.severity, finding.kind, finding.subject or ""))
    return HealthReport(to_datetime(survey.facts.now), survey.runs, dict(survey.progress_reasons), tuple(found))


async def prunable(client: Client, *, first: int = 0, progress: Progress | None = None) -> Prunable:
    """Finished runs that have outlived their retention; some may still owe something, and stay."""
    link, count = client._open, 0
    shown: list[RunDescription] = []
    kept, now = client._config.seconds("run_retention"), link.clock.now()
    ended = RunQuery(status=(RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED))
    async for page in records_of(client, ended):
        for record in page:
            retention = kept if record.retention is None else record.retention
            if record.ended_at is not None and record.ended_at + retention <= now:
                count += 1
                if len(shown) < first:
                    shown.append(describe_run(record, link.codec))
        if progress is not None:
            progress(len(page))
    return Prunable(count, tuple(shown))


# --- one run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreState:
    """What is known of the rest of the store when runs are judged."""

    now: float
    workers: Mapping[str, WorkerRecord] = field(default_factory=dict)
    unfinalized: frozenset[str] = frozenset()  # runs that have ended and still have to tell others of it

    def is_alive(self, worker_id: str) -> bool:
        worker = self.workers.get(worker_id)
        return worker is not None and not worker.fenced and worker.lease_until >= self.now

    def serves(self, record: RunRecord) -> bool:
        """Whether a live worker has the run's workflow, in its pool."""
        wanted = (record.workflow, record.version)
        return any(
            wanted in worker.workflows and worker.pool == record.pool and self.is_alive(worker.id)
            for worker in self.workers.values()
        )


def progress_reason(
    record: RunRecord, facts: StoreState, awaited: Mapping[str, RunRecord | None], mail: frozenset[str]
) -> str:
    """What will make an open run go on, in a word; a word that begins with `no ` if nothing will.

    `awaited` are the runs that it waits for, `mail` the names of the events that it has not read.
    """
    if record.owner is not None:
        return "owner" if facts.is_alive(record.owner) else "no owner"
    if record.wake_at is not None:
        return "due"
    if record.held is not None:
        return "held"
    waits = {wait.kind: wait.name for wait in record.waits}
    if any(wait.kind == "event" and wait.name in mail for wait in record.waits):
        return "no look at its mail"
    if "event" in waits or "deferred" in waits:
        return "event" if "event" in waits else "deferred"
    children = [wait.name for wait in record.waits if wait.kind == "child" and wait.name is not None]
    if any(_will_tell(awaited.get(child), facts) for child in children):
        return "child"
    return "no news of a run that has ended" if children else "no ground"


def _will_tell(child: RunRecord | None, facts: StoreState) -> bool:
    return child is not None and (not child.status.terminal or child.id in facts.unfinalized)


# --- the whole store -----------------------------------------------------------------------------------------------


class _HealthCheck:
    """Goes over the store and gathers findings. What concerns many runs alike is one finding."""

    def __init__(self, client: Client, facts: StoreState) -> None:
        self.facts = facts
        self.findings: list[Finding] = []
        self.progress_reasons: Counter[str] = Counter()
        self.runs = 0
        self._client = client
        self._link = client._open
        self._limit = client._config.max_pending_events
        self._owners: Counter[str] = Counter()  # runs of owners that are not alive
        self._unserved: Counter[str] = Counter()
        self._overdue: list[RunRecord] = []
        self._future = 0

    async def check_runs(self, page: Sequence[RunRecord]) -> None:
        self.runs += len(page)
        parents = await self._runs_named({each.parent for each in page if each.attached and each.parent is not None})
        for record, ground in zip(page, await self._grounds(page), strict=True):
            if ground.startswith("no ") and record.owner is None:
                await self._confirm(record)
            else:
                self._count(record, ground)
            self._look_at_size(record)
            self._look_at_parent(record, parents)
        for record in page:
            if record.last_message_no >= WARN_AT * self._limit:
                await self._look_at_mailbox(record)

    async def check_histories(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            for row in await self._link.read(partial(self._link.store.history, run_id)):
                size = len(row.entry.value or b"")
                if size >= LARGE_PAYLOAD_BYTES:
                    self._too_large(run_id, f"the result at {row.entry.location}", size)

    def add_aggregates(self) -> None:
        """What was counted over all runs."""
        now = self.facts.now
        for worker in self.facts.workers.values():
            if not self.facts.is_alive(worker.id):
                self._dead_worker(worker, self._owners.pop(worker.id, 0))
        for owner, count in self._owners.items():
            text = f"{_runs(count)} owned by worker {owner}, which is not there"
            self._add("orphans", "error", text, "released so that others take them up", owner, "release")
        for name, count in sorted(self._unserved.items()):
            text = f"{count} due, of {name}, and no live worker has it"
            self._add("no_worker", "warning", text, "start one: perdure worker TARGET", name)
        if self._overdue:
            worst = min(self._overdue, key=lambda record: record.wake_at or 0.0)
            late = timedelta(seconds=int(now - (worst.wake_at or now)))
            text = f"{_runs(len(self._overdue))} due for up to {late}, and not taken up ({worst.id} is the earliest)"
            self._add("overdue", "warning", text, "more workers, or a higher --concurrency", worst.id)
        if self._future:
            text = f"{_runs(self._future)} created in the future, by the store's time"
            self._add("clock_skew", "warning", text, "set the clocks of the machines that start runs")

    async def look_at_duties(self) -> None:
        link, latest = self._link, self.facts.now - OVERDUE_AFTER_SECONDS
        for owing in await link.read(partial(link.store.unfinalized, PAGE)):
            if (owing.record.ended_at or 0.0) < latest:
                run_id = owing.record.id
                text = f"run {run_id} has ended, and {_owes(len(owing.observers), len(owing.messages), owing.orphans)}"
                self._add("unsettled", "error", text, "settled, as a worker would", run_id, "settle")
        for event in await link.read(partial(link.store.unfinished_broadcasts, PAGE)):
            if event.sent_at < latest:
                text = f"event {event.id} of topic {event.topic} was not given to all runs that waited for it"
                self._add("unfinished_broadcast", "error", text, "given to the rest", event.topic, "fan_out")

    async def look_at_clocks(self) -> None:
        offset = await self._link.read(self._link.store.now) - self._client._clock.now()
        if abs(offset) > MAX_CLOCK_SKEW_SECONDS:
            text = f"this machine's clock is {abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} the store's"
            self._add("clock_skew", "warning", text, "set this machine's clock")
        for worker in self.facts.workers.values():
            ahead = worker.started_at - self.facts.now
            if ahead > MAX_CLOCK_SKEW_SECONDS:
                text = f"worker {worker.id} (pid {worker.pid}) started {ahead:.1f} s in the future, by the store's time"
                self._add("clock_skew", "warning", text, "set the clock of its machine", worker.id)
        self._look_at_leases()

    def _look_at_leases(self) -> None:
        """Leases are equally long: one that ends much later than all others is by a clock that is ahead."""
        now = self.facts.now
        alive = sorted(
            (each.lease_until, each.id) for each in self.facts.workers.values() if self.facts.is_alive(each.id)
        )
        if len(alive) < 2:
            return
        (usual, _), (longest, worker_id) = alive[-2:]
        ahead = longest - max(usual, now + self._client._config.seconds("lease"))
        if ahead > MAX_CLOCK_SKEW_SECONDS:
            text = f"worker {worker_id} has a lease that ends {ahead:.1f} s later than any other: its clock is ahead"
            self._add(
                "clock_skew", "warning", text, "set the clock of its machine, or give all the same lease", worker_id
            )

    async def _grounds(self, page: Sequence[RunRecord]) -> list[str]:
        quiet = [each for each in page if each.owner is None and each.wake_at is None and each.held is None]
        awaited = await self._runs_named(
            {wait.name for each in quiet for wait in each.waits if wait.kind == "child" and wait.name is not None}
        )
        mail = {each.id: await self._mail(each.id) for each in quiet if each.last_message_no}
        return [progress_reason(each, self.facts, awaited, mail.get(each.id, frozenset())) for each in page]

    async def _runs_named(self, ids: set[str]) -> dict[str, RunRecord | None]:
        if not ids:
            return {}
        asked = sorted(ids)
        return dict(zip(asked, await self._link.read(partial(self._link.store.records, asked)), strict=True))

    async def _mail(self, run_id: str) -> frozenset[str]:
        mail = await self._link.read(partial(self._link.store.inbox, run_id))
        return frozenset(message.name for message in mail if message.kind == "event")

    async def _confirm(self, seen: RunRecord) -> None:
        """The store moves on while it is looked at: what is read again, and is still without a ground, has none."""
        [record] = await self._link.read(partial(self._link.store.records, [seen.id]))
        if record is None or record.status.terminal:
            self.runs -= 1
            return
        facts = await _facts(self._client)
        survey = _HealthCheck(self._client, facts)
        [ground] = await survey._grounds([record])
        if record.owner is None and ground.startswith("no "):
            self.progress_reasons["nothing"] += 1
            text = f"run {record.id} ({record.workflow}, {record.status}) waits for ever: it has {ground}"
            self._add("stuck", "error", text, "resumed", record.id, "resume")
        else:
            self._count(record, ground)

    def _count(self, record: RunRecord, ground: str) -> None:
        if ground == "no owner" and record.owner is not None:
            self._owners[record.owner] += 1
            self.progress_reasons["nothing"] += 1
            return
        self.progress_reasons[ground] += 1
        now = self.facts.now
        if record.created_at > now + MAX_CLOCK_SKEW_SECONDS:
            self._future += 1
        if ground == "due" and record.wake_at is not None and record.wake_at <= now:
            if not self.facts.serves(record):
                self._unserved[f"workflow {record.workflow} v{record.version} (pool {record.pool})"] += 1
            elif record.wake_at < now - OVERDUE_AFTER_SECONDS:
                self._overdue.append(record)

    def _dead_worker(self, worker: WorkerRecord, runs: int) -> None:
        ago = timedelta(seconds=int(max(0.0, self.facts.now - worker.lease_until)))
        text = f"worker {worker.id} (pid {worker.pid}) " + (
            "was declared gone" if worker.fenced else f"has not been heard of: its lease ran out {ago} ago"
        )
        if runs:
            text += f", and {_runs(runs)} still its own"
            self._add("expired_lease", "error", text, "declared gone, its runs released", worker.id, "bury")
        else:
            self._add("dead_worker", "warning", text, "forgotten", worker.id, "bury")

    def _look_at_size(self, record: RunRecord) -> None:
        if len(record.input) >= LARGE_PAYLOAD_BYTES:
            self._too_large(record.id, "its payload", len(record.input))

    def _too_large(self, run_id: str, what: str, size: int) -> None:
        text = f"run {run_id}: {what} has {size / 1e6:.1f} MB"
        self._add("large_payload", "warning", text, "keep large values elsewhere, and their names in the run", run_id)

    def _look_at_parent(self, record: RunRecord, parents: Mapping[str, RunRecord | None]) -> None:
        parent = parents.get(record.parent) if record.parent is not None else None
        if parent is None or parent.id in self.facts.unfinalized:
            return
        if parent.status in (RunStatus.FAILED, RunStatus.CANCELLED):
            text = f"run {record.id} should have ended with its parent {parent.id}, which {parent.status}"
            self._add("orphan_child", "warning", text, "cancelled", record.id, "cancel")

    async def _look_at_mailbox(self, record: RunRecord) -> None:
        mail = await self._link.read(partial(self._link.store.inbox, record.id))
        unread = sum(message.kind in ("event", "assignment") for message in mail)
        if unread >= WARN_AT * self._limit:
            text = f"run {record.id} has {unread} unread events; from {self._limit} on it refuses more"
            self._add("full_mailbox", "warning", text, f"see what it waits for: perdure show {record.id}", record.id)

    def _add(
        self, kind: str, severity: str, text: str, advice: str, subject: str | None = None, repair: str | None = None
    ) -> None:
        self.findings.append(Finding(kind, severity, text, advice, subject, repair))


async def _facts(client: Client) -> StoreState:
    link = client._open
    workers = {worker.id: worker for worker in await link.read(link.store.workers)}
    unfinalized = await link.read(partial(link.store.unfinalized, PAGE))
    return StoreState(link.clock.now(), workers, frozenset(each.record.id for each in unfinalized))


def _worker_view(record: WorkerRecord, now: float, runs: int) -> WorkerView:
    return WorkerView(
        id=record.id,
        pool=record.pool,
        workflows=record.workflows,
        alive=not record.fenced and record.lease_until >= now,
        runs=runs,
        started_at=to_datetime(record.started_at),
        lease_until=to_datetime(record.lease_until),
        node=record.node,
        pid=record.pid,
    )


def _runs(count: int) -> str:
    return "1 run is" if count == 1 else f"{count} runs are"


def _owes(observers: int, mail: int, orphans: bool) -> str:
    parts = []
    if observers:
        parts.append(f"{observers} who wait for its end were not told")
    if mail:
        parts.append(f"{mail} unread messages were not dealt with")
    if orphans:
        parts.append("its children were not ended with it")
    return ", ".join(parts) or "its duties were not ticked off"
