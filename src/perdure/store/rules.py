"""What a write means, in pure functions: for the stores that judge in Python (memory and SQLite).

A write is held against the run's `Standing`, the few facts of its row and history that decide. No storage here: the
same rules, asked in the same order, are what makes two stores answer alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import StoreError
from perdure.records import Entry, Message, RunRecord, RunStatus
from perdure.store.base import (
    Answer,
    CommitTurn,
    CreateRun,
    Deliver,
    Ended,
    EndRun,
    ReleaseRun,
    RunPatch,
    Superseded,
    Write,
)

MARKER = "marker"
"""The kind of the row that a turn without entries leaves, so that it takes a position and can be recognised."""

WAKES_HELD = frozenset(("resume", "cancel"))
"""The only mail for which a held run is woken."""


class Standing(Struct):
    """What of a run decides whether a write is taken. `position` counts the fence in."""

    status: RunStatus
    owner: str | None
    position: int
    inbox_last: int
    wake_at: float | None
    mailed: bool  # owned, and mail came that the owner has not seen
    held: bool
    begun: bool


# --- before anything is stored -----------------------------------------------------------------------------------


def run_of(write: Write) -> str:
    """The one run that a write touches."""
    return write.record.id if isinstance(write, CreateRun) else write.run_id


def check_batch(batch: Sequence[Write]) -> None:
    """Refuse malformed writes before the first one is carried out, so that nothing of their batch stays."""
    for write in batch:
        match write:
            case CommitTurn():
                _check_text("a run id", write.run_id)
                _check_text("a turn id", write.turn_id)
                for entry in write.entries:
                    _check_entry(write.run_id, entry)
            case CreateRun():
                _check_text("a run id", write.record.id)
                _check_bytes(f"the input of run {write.record.id!r}", write.record.input)
            case Deliver():
                _check_text("a run id", write.run_id)
                _check_text("a message id", write.message.id)
                _check_bytes(f"a message to run {write.run_id!r}", write.message.body)
            case EndRun():
                _check_text("a run id", write.run_id)
                _check_text("a turn id", write.turn_id)
                if not write.status.terminal:
                    raise StoreError(f"run {write.run_id!r} cannot be ended as {write.status}; give a terminal status")
            case ReleaseRun():
                _check_text("a run id", write.run_id)
            case _:
                raise StoreError(f"{type(write).__name__} is not a write that this store knows; upgrade the store")


def _check_text(what: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise StoreError(f"{what} must be a non-empty string, not {text!r}")


def _check_bytes(what: str, value: object) -> None:
    if value is not None and not isinstance(value, bytes):
        raise StoreError(f"{what} must be encoded bytes, not {type(value).__name__}; encode it with the codec")


def _check_entry(run_id: str, entry: object) -> None:
    if not isinstance(entry, Entry):
        raise StoreError(f"a turn of run {run_id!r} holds {type(entry).__name__} where entries belong")
    if entry.kind == MARKER:
        raise StoreError(
            f"entry {entry.location!r} of run {run_id!r} has the kind {MARKER!r}, which is the store's own"
        )
    value: object = entry.value
    if value is not None and not isinstance(value, bytes):  # asked first: the words cost more than the question
        _check_bytes(f"the value of entry {entry.location!r} of run {run_id!r}", value)


# --- judging -----------------------------------------------------------------------------------------------------


def refuse_turn(turn: CommitTurn, run: Standing, alive: bool) -> Answer | None:
    """Why a turn that is not stored yet cannot be taken, or None. A position is given once: base must be the last."""
    if run.status.terminal:
        return Ended(run.status)
    if not alive:
        return Superseded()
    if run.owner != turn.worker and (turn.owned or run.owner is not None):
        return Superseded()
    if turn.base != run.position:
        return Superseded()
    return None


def last_position(turn: CommitTurn) -> int:
    """Where the history ends once this turn is in it; one without entries takes a position too."""
    return turn.base + max(1, len(turn.entries))


def born(record: RunRecord, alive: bool) -> RunRecord:
    """A new run as it is first stored: claimed by its owner if that worker is alive, else due."""
    owned = record.owner is not None and alive
    wake_at = record.created_at if record.wake_at is None else record.wake_at
    return replace(
        record,
        status=RunStatus.RUNNING if owned else RunStatus.PENDING,
        owner=record.owner if owned else None,
        wake_at=None if owned else wake_at,
        begun_at=record.created_at if owned else None,
        updated_at=record.created_at,
        ended_at=None,
        result=None,
        error=None,
        waits=(),
        held=None,
        drift=(),
        recoveries=0,
        inbox_last=0,
        fence=0,
    )


# --- wake-ups ----------------------------------------------------------------------------------------------------


def wakes(message: Message, run: Standing) -> bool:
    """Whether mail makes a run due. A held one stays until somebody resumes it, unless a worker is at it already."""
    return not run.held or run.owner is not None or message.kind in WAKES_HELD


def wake_after(patch: RunPatch, now: float, unseen: bool) -> float | None:
    """When to look at a run again after this patch; `unseen`: mail is there that would wake the run as it now is."""
    if patch.status.terminal:
        return None
    return now if unseen else patch.wake_at


def earliest(wake_at: float | None, now: float) -> float:
    return now if wake_at is None or wake_at > now else wake_at


def status_released(begun: bool) -> RunStatus:
    """What a run is called whose owner gave it back: it goes on as if it had been waiting for a worker."""
    return RunStatus.RUNNING if begun else RunStatus.PENDING
