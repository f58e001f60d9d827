"""Every error that perdure raises, in one tree.

    PerdureError
    ├── WorkflowMisuse          code that a durable workflow cannot contain, or a wrong call
    │   └── InvalidArgument     ... with a bad name, duration or option (a ValueError too)
    ├── InvalidPayload          a value that does not fit its type, or cannot be encoded
    ├── RunNotFound             no run has this id
    ├── RunTerminated           the run has ended and takes no more input
    ├── RunConflict             the id belongs to a run of other code or other input
    ├── RunFailed               the run that was waited for failed
    ├── RunCancelled            the run that was waited for was cancelled
    ├── StepFailed              a step used up its attempts
    │   └── StepInterrupted     an at-most-once step was cut short by a crash
    ├── CriticalError           raised by a step that must not be retried
    │   └── RollbackError       ... and wants the run rolled back
    ├── JoinError               branches of a join failed
    ├── RaceError               every branch of a race failed
    ├── ChildFailed             a child run that was waited for failed
    ├── HistoryDiverged         the code asks for something else than was recorded
    ├── InvalidToken            a deferred's token is forged or unknown
    ├── QueueFull               a mailbox or topic has reached its limit
    ├── RecordedError           an error of a type that this process cannot rebuild
    └── StoreError              the store could not do what it was asked (`retryable` says whether it may later)

This room knows no other room.
"""

from __future__ import annotations

from collections.abc import Mapping


class PerdureError(Exception):
    """The root: everything that perdure raises on purpose is one of these."""


class WorkflowMisuse(PerdureError):
    """Something that a durable workflow cannot do, or a call that makes no sense here."""


class InvalidArgument(WorkflowMisuse, ValueError):
    """A name, duration or option that is refused before anything is stored."""


class InvalidPayload(PerdureError):
    """A value does not fit its annotation, or cannot be encoded; the message names the field's path."""


class RunNotFound(PerdureError):
    """No run has this id."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"no run has the id {run_id!r}; it was never started here, or it has been pruned")
        self.run_id = run_id


class RunTerminated(PerdureError):
    """The run has ended, and takes no more input."""

    def __init__(self, run_id: str, status: str) -> None:
        super().__init__(f"run {run_id!r} has ended ({status}) and takes no more input")
        self.run_id = run_id
        self.status = status


class RunConflict(PerdureError):
    """The id is taken by a run of another workflow or with another payload."""

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(
            f"run {run_id!r} exists already with {reason}; use another id, or the same workflow and payload"
        )
        self.run_id = run_id


class RunFailed(PerdureError):
    """The run failed: `type`, `message`, `traceback` and `location` are those of the recorded error."""

    def __init__(self, run_id: str, type: str, message: str, traceback: str = "", location: str | None = None) -> None:
        where = f" at {location}" if location else ""
        super().__init__(f"run {run_id!r} failed{where}: {type}: {message}")
        self.run_id = run_id
        self.type = type
        self.message = message
        self.traceback = traceback
        self.location = location


class RunCancelled(PerdureError):
    """The run was cancelled or terminated."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"run {run_id!r} was cancelled")
        self.run_id = run_id


class StepFailed(PerdureError):
    """A step has no attempts left; `type` and `message` are those of its last error, `cause` that error rebuilt."""

    def __init__(
        self, location: str, attempts: int, type: str, message: str, cause: BaseException | None = None
    ) -> None:
        tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        super().__init__(f"step {location} failed after {tries}: {type}: {message}")
        self.location = location
        self.attempts = attempts
        self.type = type
        self.message = message
        self.cause = cause


class StepInterrupted(StepFailed):
    """An `at_most_once` step was begun, and a crash left its outcome unknown; it is not run again."""

    def __init__(self, location: str, attempts: int) -> None:
        super().__init__(
            location,
            attempts,
            "StepInterrupted",
            "the worker went away while the body ran, so whether its effect happened is unknown",
        )


class CriticalError(PerdureError):
    """Raise it in a step to fail without another attempt."""


class RollbackError(CriticalError):
    """Raise it in a step to fail without another attempt and roll the run back."""


class JoinError(PerdureError):
    """Branches of a join failed; `errors` maps each failed branch to its error."""

    def __init__(self, errors: Mapping[str | int, BaseException]) -> None:
        super().__init__("; ".join(f"branch {name}: {error}" for name, error in errors.items()))
        self.errors = dict(errors)


class RaceError(PerdureError):
    """Every branch of a race failed; `errors` maps each branch to its error."""

    def __init__(self, errors: Mapping[str | int, BaseException]) -> None:
        super().__init__("; ".join(f"branch {name}: {error}" for name, error in errors.items()))
        self.errors = dict(errors)


class ChildFailed(PerdureError):
    """A child run failed or was cancelled; `type`, `message` and `location` are those of its error."""

    def __init__(self, run_id: str, type: str, message: str, location: str | None = None) -> None:
        super().__init__(f"child run {run_id!r} failed: {type}: {message}")
        self.run_id = run_id
        self.type = type
        self.message = message
        self.location = location


class HistoryDiverged(PerdureError):
    """The code asked for something else than its history holds; the run is held until fitting code owns it."""

    def __init__(self, location: str, recorded: str, asked: str, line: str | None = None) -> None:
        at = f" (at {line})" if line else ""
        super().__init__(
            f"history diverged at {location}: recorded {recorded}, asked {asked}{at}; deploy the code that made the "
            "history, or guard the change with ctx.version or ctx.removed, then resume the run"
        )
        self.location = location
        self.recorded = recorded
        self.asked = asked
        self.line = line


class InvalidToken(PerdureError):
    """A deferred's token is forged, foreign or unknown."""


class QueueFull(PerdureError):
    """A mailbox or topic holds as many events as it may."""


class RecordedError(PerdureError):
    """Stands for a recorded error whose type this process does not rebuild."""

    def __init__(self, type: str, message: str) -> None:
        super().__init__(f"{type}: {message}")
        self.type = type
        self.message = message


class StoreError(PerdureError):
    """The store could not carry out a call; nothing of it was stored, or its answer was lost.

    `retryable`: the same call may succeed later (locked, restarting, unreachable). Otherwise it never will.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
