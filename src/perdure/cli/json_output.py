"""What `--json` prints. Documented in docs/cli.md and checked by tests: fields are added, never changed.

Times are ISO 8601 in UTC, durations are seconds, payloads are their JSON. An absent value is null, never left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.admin.compatibility import CompatibilityReport, IncompatibleRun
    from perdure.admin.findings import Finding, HealthReport
    from perdure.admin.lint import LintFinding
    from perdure.admin.store_views import RejectedRequest, WorkerView
    from perdure.client.queue_views import QueueDescription, QueueLimits, WaitingRun
    from perdure.client.schedule_views import ScheduleDescription
    from perdure.client.views import DeadLetterView, HistoryEntry, Reason, RunDescription, RunList
    from perdure.model.records import Hold
    from perdure.workflows.types import ErrorView

Shape = dict[str, Any]

# The fields of each value, in printed order. They are listed here and not read from the values, so that a new field of
# a value does not change the output that programs rely on.
RUN = (
    *("id", "workflow", "version", "status", "input", "result", "error", "parent", "tags"),
    *("created_at", "updated_at", "ended_at", "generation", "recoveries", "owner", "waiting_for", "drift", "published"),
    *("held", "cancel_reason", "cancel_pending", "queue", "partition", "priority"),
)
HOLD = ("kind", "reason", "location", "line", "recorded", "asked")
UNREADABLE_RUN = ("id", "reason")
REASON = ("kind", "text", "location", "name", "until")
ENTRY = (
    *("location", "kind", "name", "status", "value", "error", "attempts", "seq"),
    *("started_at", "settled_at", "heartbeat", "heartbeat_at"),
)
ERROR = ("type", "message", "traceback", "location", "cause", "fields", "dropped")
DEAD_LETTER = (
    *("id", "kind", "reason", "event_id", "event_name", "value", "original_target"),
    *("target_status", "target_ended_at", "sent_at"),
)
QUEUE = (
    *("name", "declared", "override", "effective", "partitioned", "paused", "waiting", "held", "partitions_waiting"),
    *("oldest", "next_admission_at", "admissions_last_minute", "limited_by", "holders"),
)
QUEUE_LIMITS = (
    *("concurrency", "worker_concurrency", "rate", "partition_concurrency", "partition_rate", "max_waiting"),
)
QUEUE_PAUSE = ("by", "reason", "since")
SLOT_HOLDERS = ("executing", "suspended", "held", "held_runs")
WAITING_RUN = ("run_id", "partition", "priority", "since", "position", "cursor", "eligible_at", "expires_at")
REJECTED_REQUEST = ("event_id", "event_name", "at", "type", "message")
SCHEDULE = (
    *("id", "workflow", "input", "rule", "tz", "overlap", "catch_up", "limit", "next_slots", "pending", "finished"),
    *("started", "skipped", "missed", "conflicts", "triggered", "last_run", "declared_by", "created_at", "tags"),
    *("queue", "note", "pause_on_failure"),
)
SCHEDULE_PAUSE = ("by", "reason", "since")
SLOT = ("slot", "outcome", "run_id", "last", "count")
WORKER = ("id", "pool", "alive", "runs", "pid", "host", "started_at", "lease_until", "workflows")
FINDING = ("kind", "severity", "text", "advice", "subject", "repairable")
LINT_FINDING = ("path", "line", "workflow", "text", "remedy")
INCOMPATIBLE_RUN = (
    *("run", "workflow", "version", "kind", "reason", "location", "recorded", "asked", "line"),
    "suggested_fix",
)


def run_shape(run: RunDescription) -> Shape:
    reasons = [reason_shape(reason) for reason in run.waiting_for]
    held = None if run.held is None else hold_shape(run.held)
    return _shape(run, RUN, error=error_shape(run.error), waiting_for=reasons, held=held)


def hold_shape(hold: Hold) -> Shape:
    return _shape(hold, HOLD)


def lint_shape(finding: LintFinding) -> Shape:
    return _shape(finding, LINT_FINDING)


def page_shape(page: RunList) -> Shape:
    unreadable = [_shape(mark, UNREADABLE_RUN) for mark in page.unreadable]
    return {"runs": [run_shape(run) for run in page], "next": page.next, "unreadable": unreadable}


def reason_shape(reason: Reason) -> Shape:
    return _shape(reason, REASON)


def entry_shape(entry: HistoryEntry) -> Shape:
    return _shape(entry, ENTRY, error=error_shape(entry.error))


def error_shape(error: ErrorView | None) -> Shape | None:
    return None if error is None else _shape(error, ERROR, cause=error_shape(error.cause))


def rejected_shape(rejected: RejectedRequest) -> Shape:
    return _shape(rejected, REJECTED_REQUEST)


def dead_letter_shape(dead_letter: DeadLetterView[Any]) -> Shape:
    return _shape(dead_letter, DEAD_LETTER)


def schedule_shape(schedule: ScheduleDescription) -> Shape:
    paused = None if schedule.paused is None else _shape(schedule.paused, SCHEDULE_PAUSE)
    return _shape(schedule, SCHEDULE, paused=paused, recent=[_shape(each, SLOT) for each in schedule.recent])


def queue_shape(queue: QueueDescription) -> Shape:
    return _shape(
        queue,
        QUEUE,
        declared=_limits_shape(queue.declared),
        override={name: _rate_shape(limit) for name, limit in queue.override.items()},
        effective=_limits_shape(queue.effective),
        paused=None if queue.paused is None else _shape(queue.paused, QUEUE_PAUSE),
        oldest=None if queue.oldest is None else waiting_run_shape(queue.oldest),
        holders=_shape(queue.holders, SLOT_HOLDERS),
    )


def waiting_run_shape(waiting: WaitingRun) -> Shape:
    return _shape(waiting, WAITING_RUN)


def _limits_shape(limits: QueueLimits) -> Shape:
    return {name: _rate_shape(getattr(limits, name)) for name in QUEUE_LIMITS}


def _rate_shape(limit: Any) -> Any:
    return {"limit": limit.limit, "per": limit.per} if hasattr(limit, "per") else limit


def worker_shape(worker: WorkerView) -> Shape:
    return _shape(worker, WORKER, workflows=[workflow_shape(*each) for each in worker.workflows])


def workflow_shape(name: str, version: int) -> Shape:
    return {"name": name, "version": version}


def health_report_shape(found: HealthReport, repairs: list[str]) -> Shape:
    return {
        "healthy": found.errors == 0,
        "at": _plain(found.at),
        "open_runs": found.open_runs,
        "progress_reasons": dict(found.progress_reasons),
        "findings": [finding_shape(finding) for finding in found.findings],
        "repairs": repairs,
    }


def finding_shape(finding: Finding) -> Shape:
    return _shape(finding, FINDING, repairable=finding.repair is not None)


def compatibility_shape(report: CompatibilityReport) -> Shape:
    return {
        "compatible": not report.incompatible,
        "compatible_runs": report.compatible,
        "incompatible_runs": [incompatible_run_shape(run) for run in report.incompatible],
        "unknown_workflows": dict(report.unknown_workflows),
    }


def incompatible_run_shape(run: IncompatibleRun) -> Shape:
    return _shape(run, INCOMPATIBLE_RUN, run=run.run_id)


def _shape(value: object, names: tuple[str, ...], **other: Any) -> Shape:
    """Return the named fields of a value; `other` replaces some of them."""
    return {name: other[name] if name in other else _plain(getattr(value, name)) for name in names}


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        case Enum():
            return value.value
        case tuple():
            return list(value)
        case Mapping():
            return dict(value)
        case _:
            return value
