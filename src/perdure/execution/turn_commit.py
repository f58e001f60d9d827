"""From a turn to the write that commits it. Pure: what the run's row is after the turn, and whether to touch it."""

from __future__ import annotations

import itertools
import zlib

from msgspec.structs import replace

from perdure.config import EngineConfig
from perdure.execution.run_cache import CachedRun
from perdure.model.records import DeadLetter, Hold, RunRecord, RunStatus, Wait
from perdure.model.turns import Cancelled, Continued, Failed, Succeeded, Turn, TurnExtras
from perdure.stores.writes import CommitTurn, ContinueAs, RunPatch

_TURNS = itertools.count(1)  # with the worker's id, which is never used twice, one of them names one turn


def build_turn_commit(
    resident: CachedRun, turn: Turn, worker: str, now: float, config: EngineConfig
) -> CommitTurn | None:
    """The write for a turn, or None if there is nothing to write: what it asks for is derived again by replay."""
    restart, patch = None, None
    # Whether the run still needs its owner: work is under way, or it could go on at once.
    if (
        not (turn.busy or turn.more) or turn.outcome is not None or turn.held is not None
    ):  # else the run is running and ours already: a step's commit touches no row but its own
        restart, restart_at = _restart(resident, turn, now)
        patch = _patch(resident, turn, now, config, restart, restart_at)
    elif not turn.entries and not turn.consumed and turn.extras is None:
        return None
    return CommitTurn(
        run_id=resident.id,
        base=resident.position,
        turn_id=f"{worker}/{next(_TURNS)}",
        worker=worker,
        owned=True,
        now=now,
        entries=turn.entries + turn.version_pins if turn.version_pins else turn.entries,
        patch=patch,
        seen=resident.seen,
        consumed=turn.consumed,
        continue_as=restart,
        extras=turn.extras,
        observed=resident.record.parent is not None,
    )


def build_hold_commit(run_id: str, base: int, seen: int, held: Hold, worker: str, now: float) -> CommitTurn:
    """The write that holds a run which could not even be advanced; a poison run is shown as a dead letter too."""
    extras = None
    if held.kind == "poison":
        letter = DeadLetter(
            id=f"poison/{run_id}/{base}",
            kind="poison",
            at=now,
            reason=held.reason,
            original_target=run_id,
            target_status=RunStatus.SUSPENDED,
        )
        extras = TurnExtras(dead_letters=(letter,))
    return CommitTurn(
        run_id=run_id,
        base=base,
        turn_id=f"{worker}/{next(_TURNS)}",
        worker=worker,
        owned=True,
        now=now,
        patch=RunPatch(status=RunStatus.SUSPENDED, held=held, waits=(Wait("held", name=held.reason),)),
        seen=seen,
        extras=extras,
    )


def ended_record(record: RunRecord, patch: RunPatch) -> RunRecord:
    """A run's record after its end: as the store has it."""
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


def _restart(resident: CachedRun, turn: Turn, now: float) -> tuple[ContinueAs | None, float]:
    """A new generation: because the workflow continued as another, or failed and its run is to be tried again."""
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
    retry = resident.definition.settings.retry
    attempt = resident.record.run_attempt
    if not isinstance(outcome, Failed) or not outcome.retryable or retry is None or attempt >= retry.max_attempts:
        return None, 0.0
    record = resident.record
    chance = zlib.crc32(f"{record.seed}/{attempt}".encode()) / 2**32
    again = ContinueAs(
        workflow=record.workflow,
        version=record.version,
        input=record.input,
        first_executed_at=None,
        run_attempt=attempt + 1,
    )
    return again, now + retry.delay_after(attempt, chance)


def _patch(
    resident: CachedRun,
    turn: Turn,
    now: float,
    config: EngineConfig,
    restart: ContinueAs | None,
    restart_at: float,
) -> RunPatch:
    """The run's row after a turn that leaves it suspended, held, ended or begun anew."""
    record = resident.record
    if isinstance(turn.outcome, Continued):
        return RunPatch(status=RunStatus.RUNNING, wake_at=restart_at)  # due at once, for whoever has the workflow
    if restart is not None:
        return RunPatch(status=RunStatus.SUSPENDED, wake_at=restart_at, waits=(Wait("retry", until=restart_at),))
    if turn.held is not None:
        waits = (*turn.waits, Wait("held", name=turn.held.reason))
        return RunPatch(status=RunStatus.SUSPENDED, held=turn.held, waits=waits, drift=turn.drift)
    if turn.outcome is not None:
        kept = config.seconds("run_retention") if record.retention is None else record.retention
        ended = {"ended_at": now, "prune_at": now + kept, "drift": turn.drift, "recoveries": record.recoveries}
        match turn.outcome:
            case Succeeded(value):
                return RunPatch(status=RunStatus.SUCCEEDED, result=value, **ended)  # type: ignore[arg-type]
            case Failed(error):
                return RunPatch(status=RunStatus.FAILED, error=error, **ended)  # type: ignore[arg-type]
            case Cancelled():
                return RunPatch(status=RunStatus.CANCELLED, **ended)  # type: ignore[arg-type]
    return RunPatch(status=RunStatus.SUSPENDED, wake_at=turn.wake_at, waits=turn.waits, drift=turn.drift, recoveries=0)
