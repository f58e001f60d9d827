"""Log records about runs: a hold, a failed run, a dead letter. Ids are in the message and in `extra`.

No payload is logged: of an error only its type and message.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from perdure.model.records import DeadLetter, ErrorRecord, Hold, RunRecord

LOGGER = logging.getLogger("perdure.execution")

_RETRIED = "deploy code that fixes it: the run is retried when its workers change; or run `perdure resume {id}`"
_RESUME = "fix the cause, then run `perdure resume {id}`"
_ADVICE = {
    "diverged": _RETRIED,
    "deadlock": f"{_RETRIED}, or cancel the run",
    "livelock": f"{_RETRIED}, or cancel the run",
    "poison": "find out why its workers die, then run `perdure resume {id}`",
    "paused": "run `perdure resume {id}` to continue it",
    "sealed": "start a worker that has the key, then run `perdure resume {id}`",
    "imported": "run `perdure resume {id}` to continue it",
    "internal_error": "report it; the run is retried when its workers change; or run `perdure resume {id}`",
}


def log_extra(record: RunRecord, worker: str) -> dict[str, str]:
    """Return the fields of a log record about a run."""
    return {"run_id": record.id, "workflow": record.workflow, "worker": worker}


def log_held(record: RunRecord, hold: Hold, worker: str) -> None:
    """Log that a run is held: why, where, and what to do."""
    where = (("location", hold.location), ("line", hold.line))
    details = [f"workflow {record.workflow} v{record.version}", f"kind {hold.kind}"]
    details += [f"{name} {value}" for name, value in where if value is not None]
    LOGGER.error(
        "Run %s held: %s (%s); %s",
        record.id,
        hold.reason,
        ", ".join(details),
        _ADVICE.get(hold.kind, _RESUME).format(id=record.id),
        extra=log_extra(record, worker)
        | {"kind": hold.kind, "reason": hold.reason, "location": hold.location, "line": hold.line},
    )


def log_failed(record: RunRecord, error: ErrorRecord, worker: str, retry_in: float | None) -> None:
    """Log that a run has failed; `retry_in`: seconds until its next attempt, if it has one."""
    extra = log_extra(record, worker) | {
        "location": error.location,
        "error_type": error.type,
        "attempt": record.run_attempt,
        "retry_in": retry_in,
    }
    where = f" at {error.location}" if error.location else ""
    if retry_in is None:
        LOGGER.error("Run %s failed%s: %s: %s", record.id, where, error.type, error.message, extra=extra)
    else:
        text = "Run %s failed%s (attempt %d): %s: %s; retrying in %.3g seconds"
        LOGGER.warning(text, record.id, where, record.run_attempt, error.type, error.message, retry_in, extra=extra)


def log_dead_letters(record: RunRecord, dead_letters: Iterable[DeadLetter], worker: str = "") -> None:
    """Log dead letters of a run."""
    for dead_letter in dead_letters:
        LOGGER.warning(
            "Run %s: dead letter %s (%s): %s",
            record.id,
            dead_letter.id,
            dead_letter.kind,
            dead_letter.reason,
            extra=log_extra(record, worker) | {"dead_letter": dead_letter.id, "kind": dead_letter.kind},
        )
