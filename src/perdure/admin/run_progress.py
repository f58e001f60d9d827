"""Whether an open run can make progress, decided from its row and what surrounds it. Pure functions, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from perdure.admin.store_views import is_alive
from perdure.model.queue_records import QueueSummary
from perdure.model.records import Entry, EntryStatus, Message, RunRecord, RunStatus, Wait, WorkerRecord
from perdure.stores.results import UnreadableRun
from perdure.workflows.internal import is_internal_name

STALLED_AFTER_SECONDS = 120.0  # without any step that executes, a worker writes to its runs much more often
TIMER_TOLERANCE_SECONDS = 1.0
TIMES = ("created_at", "first_executed_at", "updated_at", "ended_at", "wake_at", "deadline_at", "retention")


@dataclass(frozen=True, slots=True)
class StoreState:
    """The state of the store that the check of one run needs."""

    now: float
    workers: Mapping[str, WorkerRecord] = field(default_factory=dict)
    unfinalized: frozenset[str] = frozenset()  # ended runs that still have to notify others
    queues: Mapping[str, QueueSummary] | None = None  # those that can be read, if they were read

    def is_alive(self, worker_id: str) -> bool:
        worker = self.workers.get(worker_id)
        return worker is not None and is_alive(worker, self.now)

    def serves(self, record: RunRecord) -> bool:
        """Return whether a live worker of the run's pool has its workflow and version."""
        if is_internal_name(record.workflow):  # every worker serves internal runs
            return any(map(self.is_alive, self.workers))
        wanted = (record.workflow, record.version)
        return any(
            wanted in worker.workflows and worker.pool == record.pool and self.is_alive(worker.id)
            for worker in self.workers.values()
        )


def progress_reason(
    record: RunRecord,
    state: StoreState,
    awaited: Mapping[str, RunRecord | UnreadableRun | None],
    unread: frozenset[str],
    unhandled: frozenset[str] = frozenset(),
) -> str:
    """Return what will let an open run continue; a text that starts with `no ` if nothing will.

    `awaited` are the runs that it waits for, `unread` the names of its unread events, `unhandled` the kinds of other
    messages in its inbox.
    """
    if record.owner is not None:
        return "owner" if state.is_alive(record.owner) else "no owner"
    if record.waiting:
        if state.queues is not None and record.queue not in state.queues:
            return f"no queue named {record.queue!r} to be admitted from"
        return "held" if record.held is not None else "queue"
    if record.held is None and (timer := _missed_timer(record, state.now)) is not None:
        return timer
    if record.wake_at is not None:
        return "due"
    if record.held is not None:
        return "held"
    if unhandled:
        return f"no wake-up for an unread message ({', '.join(sorted(unhandled))})"
    if record.status is RunStatus.RUNNING:
        return "no owner and no due time, though it is running"
    if any(wait.kind == "event" and _names(wait) & unread for wait in record.waits):
        return "no wake-up for an unread event"
    kinds = {wait.kind for wait in record.waits}
    if "event" in kinds or "deferred" in kinds:
        return "event" if "event" in kinds else "deferred"
    children = _awaited_runs(record)
    if any(_will_notify(awaited.get(child), state) for child in children):
        return "child"
    return "no notification of the end of a child" if children else "no reason to continue"


def unhandled_kinds(record: RunRecord, inbox: Iterable[Message]) -> frozenset[str]:
    """Return the kinds of messages, other than events, that the next turn of the run would handle.

    A result of a child or a deferred that the run does not await yet stays unread.
    """
    locations = {wait.location for wait in record.waits}
    deferreds = {f"deferred/{record.epoch}/{wait.name}" for wait in record.waits if wait.kind == "deferred"}
    return frozenset(
        message.kind
        for message in inbox
        if message.kind in ("cancel", "resume")
        or (message.kind == "deferred" and message.id in deferreds)
        or (message.kind == "assignment" and _location_of(message.target or "") in locations)
    )


def lost_subscriptions(record: RunRecord, subscribed: frozenset[str], inbox: Iterable[Message]) -> list[Wait]:
    """Return the open receives without a subscription: no broadcast event reaches them.

    An event that was assigned to the receive has ended its subscription.
    """
    served = {_location_of(target) for target in subscribed}
    served.update(_location_of(message.target) for message in inbox if message.target is not None)
    return [wait for wait in record.waits if wait.kind == "event" and wait.location not in served]


def damage_of(record: RunRecord) -> str | None:
    """Return why a row that can be decoded cannot be right, or None."""
    for name in TIMES:
        value = getattr(record, name)
        if value is not None and not math.isfinite(value):
            return f"{name} is {value}"
    if record.status.terminal and record.ended_at is None:
        return f"it is {record.status}, but ended_at is missing"
    if not record.status.terminal and record.ended_at is not None:
        return f"it is {record.status}, but ended_at is set, so no worker claims it"
    return None


def is_stalled(record: RunRecord, entries: Sequence[Entry], now: float) -> bool:
    """Return whether the owner of a run neither executes a step of it nor has written to it for a while.

    A step that runs for a second is recorded as pending.
    """
    if any(entry.kind == "step" and entry.status is EntryStatus.PENDING for entry in entries):
        return False
    times = [time for entry in entries for time in (entry.started_at, entry.settled_at) if time is not None]
    return max([record.created_at, record.updated_at, *times]) < now - STALLED_AFTER_SECONDS


def waits_for_runs_only(record: RunRecord) -> frozenset[str]:
    """Return the runs that a run waits for, if it waits for nothing else; otherwise no run."""
    idle = record.owner is None and record.wake_at is None and record.held is None
    only_runs = bool(record.waits) and all(wait.kind == "child" for wait in record.waits)
    return frozenset(_awaited_runs(record)) if idle and only_runs else frozenset()


def find_wait_cycles(waits: Mapping[str, frozenset[str]]) -> list[tuple[str, ...]]:
    """Return groups of runs that wait for each other, or for such runs, and for nothing else.

    `waits` has the awaited runs of each run that waits for runs only.
    """
    stuck = dict(waits)
    while free := [run_id for run_id, awaited in stuck.items() if not awaited or not awaited <= stuck.keys()]:
        for run_id in free:
            del stuck[run_id]
    groups: dict[frozenset[str], None] = {}
    for run_id in sorted(stuck):
        path: list[str] = []
        while run_id not in path:
            path.append(run_id)
            run_id = min(stuck[run_id])
        groups.setdefault(frozenset(path[path.index(run_id) :]))
    return [tuple(sorted(group)) for group in groups]


def _missed_timer(record: RunRecord, now: float) -> str | None:
    """Return that a suspended run is not due when its earliest timer fires, or None."""
    if record.status is not RunStatus.SUSPENDED:
        return None
    timers = [wait.until for wait in record.waits if wait.until is not None]
    latest = max(now, min(timers, default=now)) + TIMER_TOLERANCE_SECONDS
    is_missed = timers and (record.wake_at is None or record.wake_at > latest)
    return "no wake-up at the time of its timer" if is_missed else None


def _names(wait: Wait) -> frozenset[str]:
    """Return the names of the events that a receive accepts."""
    return frozenset((wait.name or "").split(","))


def _awaited_runs(record: RunRecord) -> list[str]:
    return [wait.name for wait in record.waits if wait.kind == "child" and wait.name is not None]


def _location_of(target: str) -> str:
    """Return the location in the address of an open receive, which starts with a generation."""
    return target.partition("/")[2]


def _will_notify(child: RunRecord | UnreadableRun | None, state: StoreState) -> bool:
    if isinstance(child, UnreadableRun):
        return True  # it is a finding of its own
    return child is not None and (not child.status.terminal or child.id in state.unfinalized)
