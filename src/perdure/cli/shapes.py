"""Shapes: what `--json` prints. Documented in docs/cli.md and held by golden tests: fields are added, never changed.

Times are ISO 8601 in UTC, durations seconds, payloads the JSON that they are. An absent value is null, never left out.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.inspection import Examination, Finding, WorkerView
    from perdure.records import ErrorRecord
    from perdure.rehearsal import Misfit, Rehearsal
    from perdure.views import DeadLetterView, HistoryEntry, Reason, RunDescription, RunList

Shape = dict[str, Any]


def run_shape(run: RunDescription) -> Shape:
    return {
        "id": run.id,
        "workflow": run.workflow,
        "version": run.version,
        "status": run.status.value,
        "input": run.input,
        "result": run.result,
        "error": error_shape(run.error),
        "parent": run.parent,
        "tags": dict(run.tags),
        "created_at": time_shape(run.created_at),
        "updated_at": time_shape(run.updated_at),
        "ended_at": time_shape(run.ended_at),
        "generation": run.generation,
        "recoveries": run.recoveries,
        "owner": run.owner,
        "waiting_for": [reason_shape(reason) for reason in run.waiting_for],
        "drift": list(run.drift),
        "published": dict(run.published),
    }


def page_shape(page: RunList) -> Shape:
    return {"runs": [run_shape(run) for run in page], "next": page.next}


def entry_shape(entry: HistoryEntry) -> Shape:
    return {
        "location": entry.location,
        "kind": entry.kind,
        "name": entry.name,
        "status": entry.status.value,
        "value": entry.value,
        "error": error_shape(entry.error),
        "attempts": entry.attempts,
        "seq": entry.seq,
        "started_at": time_shape(entry.started_at),
        "settled_at": time_shape(entry.settled_at),
    }


def error_shape(error: ErrorRecord | None) -> Shape | None:
    if error is None:
        return None
    return {
        "type": error.type,
        "message": error.message,
        "traceback": error.traceback,
        "location": error.location,
        "cause": error_shape(error.cause),
    }


def reason_shape(reason: Reason) -> Shape:
    return {
        "kind": reason.kind,
        "text": reason.text,
        "location": reason.location,
        "name": reason.name,
        "until": time_shape(reason.until),
    }


def letter_shape(letter: DeadLetterView) -> Shape:
    return {
        "id": letter.id,
        "kind": letter.kind,
        "reason": letter.reason,
        "event_id": letter.event_id,
        "event_name": letter.event_name,
        "value": letter.value,
        "original_target": letter.original_target,
        "target_status": letter.target_status,
        "target_ended_at": time_shape(letter.target_ended_at),
        "sent_at": time_shape(letter.sent_at),
    }


def worker_shape(worker: WorkerView) -> Shape:
    return {
        "id": worker.id,
        "pool": worker.pool,
        "alive": worker.alive,
        "runs": worker.runs,
        "pid": worker.pid,
        "node": worker.node,
        "started_at": time_shape(worker.started_at),
        "lease_until": time_shape(worker.lease_until),
        "workflows": [{"name": name, "version": version} for name, version in worker.workflows],
    }


def examination_shape(found: Examination, deeds: list[str]) -> Shape:
    return {
        "healthy": found.errors == 0,
        "at": time_shape(found.at),
        "open_runs": found.open_runs,
        "grounds": dict(found.grounds),
        "findings": [finding_shape(finding) for finding in found.findings],
        "repaired": deeds,
    }


def finding_shape(finding: Finding) -> Shape:
    return {
        "kind": finding.kind,
        "severity": finding.severity,
        "text": finding.text,
        "advice": finding.advice,
        "subject": finding.subject,
        "repairable": finding.mends is not None,
    }


def rehearsal_shape(rehearsal: Rehearsal) -> Shape:
    return {
        "fits": not rehearsal.misfits,
        "fitting": rehearsal.fitting,
        "misfits": [misfit_shape(misfit) for misfit in rehearsal.misfits],
        "foreign": dict(rehearsal.foreign),
    }


def misfit_shape(misfit: Misfit) -> Shape:
    return {
        "run": misfit.run_id,
        "workflow": misfit.workflow,
        "version": misfit.version,
        "kind": misfit.kind,
        "reason": misfit.reason,
        "location": misfit.location,
        "recorded": misfit.recorded,
        "asked": misfit.asked,
        "line": misfit.line,
        "remedy": misfit.remedy,
    }


def time_shape(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
