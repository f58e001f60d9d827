"""Turn commits: from the inputs of a run to its next turn, and from the turn to the write that commits it.

No I/O here. A turn that leaves the run running and owned writes entries only; any other turn also patches the run's
row: suspended, held, ended, or restarted as a new generation.
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Sequence

from msgspec.structs import replace

from perdure.config import EngineConfig
from perdure.errors import InvalidPayload
from perdure.execution.run_cache import CachedRun
from perdure.execution.run_log import log_extra
from perdure.model.records import DeadLetter, Entry, EntryStatus, ErrorRecord, Hold, RunRecord, RunStatus, Wait
from perdure.model.turns import Cancelled, Continued, Failed, Input, Succeeded, Turn, TurnExtras
from perdure.stores.writes import CommitTurn, ContinueAs, RunPatch

LOGGER = logging.getLogger("perdure.execution")
_TURNS = itertools.count(1)  # unique per process; turn ids also contain the worker id, which is never used again


def next_turn(
    cached: CachedRun, now: float, taken: Sequence[Input], worker: str, *, paused_before: bool = False
) -> Turn | None:
    """Run the workflow with these inputs and return its turn, or None if it was paused.

    An error of the runner is a turn that holds the run.
    """
    try:
        return cached.runner.continue_turn() if paused_before else cached.runner.advance(now, taken)
    except InvalidPayload as mismatch:  # the recorded payload does not match the annotations of this code
        return Turn(held=Hold("diverged", str(mismatch), recorded="the payload", asked="one of another type"))
    except Exception as error:
        extra = log_extra(cached.record, worker)
        LOGGER.exception("Run %s: internal error while advancing; run is held", cached.id, extra=extra)
        return Turn(held=Hold("internal_error", f"{type(error).__name__}: {error}"))


def build_turn_commit(
    cached: CachedRun, turn: Turn, worker: str, now: float, config: EngineConfig
) -> CommitTurn | None:
    """Return the write that commits a turn, or None if the turn changes nothing that a replay does not derive again."""
    restart, patch = None, None
    # A run that continues keeps its owner and its row: the commit of a step writes nothing but its entry.
    continues = turn.busy or turn.more
    if not continues or turn.outcome is not None or turn.held is not None:
        restart, restart_at = _restart(cached, turn, now)
        patch = _patch(cached, turn, now, config, restart, restart_at)
    elif not turn.entries and not turn.consumed and turn.extras is None:
        return None
    entries = turn.entries + turn.version_pins if turn.version_pins else turn.entries
    return CommitTurn(
        run_id=cached.id,
        base=cached.position,
        turn_id=f"{worker}/{next(_TURNS)}",
        worker=worker,
        owned=True,
        now=now,
        entries=entries,
        patch=patch,
        seen=cached.seen,
        consumed=turn.consumed,
        continue_as=restart,
        extras=turn.extras if cached.progress_rows is None else _replace_progress_rows(cached, entries, turn.extras),
        observed=cached.record.parent is not None,
    )


def _replace_progress_rows(cached: CachedRun, entries: Sequence[Entry], extras: TurnExtras | None) -> TurnExtras | None:
    """Add to the extras the rows of pending steps that newer versions in this turn replace.

    A step that sends heartbeats for days keeps one row. The positions noted here are right if the turn is committed;
    otherwise the run is loaded again, without them.
    """
    rows = cached.progress_rows
    assert rows is not None
    replaced: list[int] = []
    for position, entry in enumerate(entries, cached.position + 1):
        earlier = rows.pop(entry.location, None)
        if earlier is not None:
            replaced.append(earlier)
        if entry.status is EntryStatus.PENDING and entry.value is not None:
            rows[entry.location] = position
    return replace(extras or TurnExtras(), replaced=tuple(replaced)) if replaced else extras


def build_hold_commit(run_id: str, base: int, seen: int, held: Hold, worker: str, now: float) -> CommitTurn:
    """Return the write that holds a run without a turn of it; for a poison run it also adds a dead letter."""
    extras, turn_id = None, f"{worker}/{next(_TURNS)}"
    if held.kind == "poison":
        dead_letter = DeadLetter(
            id=f"poison/{run_id}/{base}/{turn_id}",  # base alone is not unique: an id can be used again
            kind="poison",
            at=now,
            reason=held.reason,
            original_target=run_id,
            target_status=RunStatus.SUSPENDED,
        )
        extras = TurnExtras(dead_letters=(dead_letter,))
    return CommitTurn(
        run_id=run_id,
        base=base,
        turn_id=turn_id,
        worker=worker,
        owned=True,
        now=now,
        patch=RunPatch(status=RunStatus.SUSPENDED, held=held, waits=(Wait("held", name=held.reason),)),
        seen=seen,
        extras=extras,
    )


def ended_record(record: RunRecord, patch: RunPatch) -> RunRecord:
    """Return the record of a run after its end, equal to the one in the store."""
    return replace(
        record,
        status=patch.status,
        result=patch.result,
        error=patch.error,
        ended_at=patch.ended_at,
        owner=None,
        wake_at=None,
        waits=(),
    )


def _restart(cached: CachedRun, turn: Turn, now: float) -> tuple[ContinueAs | None, float]:
    """Return the next generation and its time: the workflow continued as new, or failed and the run is retried."""
    outcome = turn.outcome
    if isinstance(outcome, Continued):
        at = now if outcome.at is None else outcome.at
        return ContinueAs(
            workflow=outcome.workflow,
            version=outcome.version,
            input=outcome.input,
            first_executed_at=None,
            run_attempt=outcome.run_attempt,
            pool=outcome.pool,
            entries=outcome.carried,
        ), at
    retry = cached.definition.settings.retry
    attempt = cached.record.run_attempt
    if not isinstance(outcome, Failed) or not outcome.retryable or retry is None or attempt >= retry.max_attempts:
        return None, 0.0
    record = cached.record
    jitter = zlib.crc32(f"{record.seed}/{attempt}".encode()) / 2**32
    again = ContinueAs(
        workflow=record.workflow,
        version=record.version,
        input=record.input,
        first_executed_at=None,
        run_attempt=attempt + 1,
    )
    requested = outcome.error.retry_after
    return again, now + (retry.delay_after(attempt, jitter) if requested is None else requested)


def _patch(
    cached: CachedRun,
    turn: Turn,
    now: float,
    config: EngineConfig,
    restart: ContinueAs | None,
    restart_at: float,
) -> RunPatch:
    """Return the changes of the run's row by a turn after which it is suspended, held, ended or restarted."""
    record = cached.record
    if isinstance(turn.outcome, Continued):
        return RunPatch(status=RunStatus.RUNNING, wake_at=restart_at)  # due now, for any worker with the workflow
    if restart is not None:
        return RunPatch(status=RunStatus.SUSPENDED, wake_at=restart_at, waits=(Wait("retry", until=restart_at),))
    if turn.held is not None:
        waits = (*turn.waits, Wait("held", name=turn.held.reason))
        return RunPatch(status=RunStatus.SUSPENDED, held=turn.held, waits=waits, drift=turn.drift)
    if turn.outcome is not None:
        retention = config.seconds("run_retention") if record.retention is None else record.retention
        ended = {"ended_at": now, "prune_at": now + retention, "drift": turn.drift, "recoveries": record.recoveries}
        match turn.outcome:
            case Succeeded(value):
                return RunPatch(status=RunStatus.SUCCEEDED, result=value, **ended)  # type: ignore[arg-type]
            case Failed(error):
                return RunPatch(status=RunStatus.FAILED, error=error, **ended)  # type: ignore[arg-type]
            case Cancelled(reason):
                given = None if reason is None else ErrorRecord("RunCancelled", reason)
                return RunPatch(status=RunStatus.CANCELLED, error=given, **ended)  # type: ignore[arg-type]
    return RunPatch(status=RunStatus.SUSPENDED, wake_at=turn.wake_at, waits=turn.waits, drift=turn.drift, recoveries=0)
