"""All exceptions that perdure raises, in one tree.

    PerdureError
    ├── WorkflowMisuse          code that a durable workflow must not contain, or an invalid call
    │   └── InvalidArgument     an invalid name, duration or option (also a ValueError)
    ├── InvalidPayload          a value does not match its type, or cannot be encoded
    ├── RunNotFound             no run has this id
    ├── QueueNotFound           no work queue of this store has this name
    ├── ScheduleNotFound        no schedule of this store has this id
    ├── RunTerminated           the run has ended and accepts no more input
    ├── RunConflict             the id belongs to a run of another workflow or payload
    │   └── RunInUse            the run cannot be deleted: it is open, or its parent is
    ├── ScheduleConflict        the id of a schedule is declared in code and was created by a call
    ├── RunFailed               the awaited run failed
    ├── RunCancelled            the awaited run was cancelled
    ├── RunHeld                 the awaited run is held, and the caller does not wait for such a run
    ├── RequestRejected         the run rejected a request
    ├── StepFailed              all attempts of a step failed
    │   └── StepInterrupted     a crash interrupted an at-most-once step
    ├── CriticalError           raised by a step body to fail without a retry
    │   └── RollbackError       raised by a step body to fail without a retry and roll the run back
    ├── JoinError               branches of a join failed
    ├── RaceError               all branches of a race failed
    ├── ChildFailed             the awaited child run failed or was cancelled
    ├── HistoryDiverged         the code requests an operation that differs from the recorded history
    ├── InvalidToken            the token of a deferred is forged or unknown
    ├── QueueFull               a mailbox, topic or work queue has reached its limit
    ├── RecordedError           a recorded error whose type cannot be reconstructed
    └── StoreError              a store call failed (`retryable`: it may succeed later)

This module imports no other module of perdure.
"""

from __future__ import annotations

from collections.abc import Mapping


class PerdureError(Exception):
    """Root of all exceptions that perdure raises."""


class WorkflowMisuse(PerdureError):
    """Workflow code did something that is not durable, or an API was called where it cannot be used."""


class InvalidArgument(WorkflowMisuse, ValueError):
    """A name, duration or option is invalid. Raised before anything is stored."""


class InvalidPayload(PerdureError):
    """A value does not match its annotation, or cannot be encoded. The message names the path of the field."""


class RunNotFound(PerdureError):
    """No run has this id."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"no run has the id {run_id!r}; it was never started in this store, or it has been pruned")
        self.run_id = run_id


class QueueNotFound(PerdureError):
    """No work queue of this store has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"no work queue of this store has the name {name!r}; declare WorkQueue({name!r}) in an engine or worker"
        )
        self.name = name


class ScheduleNotFound(PerdureError):
    """No schedule of this store has this id."""

    def __init__(self, schedule_id: str) -> None:
        super().__init__(f"no schedule of this store has the id {schedule_id!r}; it was never created, or was deleted")
        self.schedule_id = schedule_id


class RunTerminated(PerdureError):
    """The run has ended and accepts no more input."""

    def __init__(self, run_id: str, status: str) -> None:
        super().__init__(f"run {run_id!r} has ended ({status}) and accepts no more input")
        self.run_id = run_id
        self.status = status


class RunConflict(PerdureError):
    """A run with this id exists and has another workflow or another payload, or `if_exists` is "reject"."""

    def __init__(
        self, run_id: str, reason: str, remedy: str = "use another id, or the same workflow and payload"
    ) -> None:
        super().__init__(f"run {run_id!r} already exists{f' with {reason}' if reason else ''}; {remedy}")
        self.run_id = run_id


class RunInUse(RunConflict):
    """The run cannot be deleted: it has not ended, or its parent is open and may read its result."""

    def __init__(self, run_id: str, reason: str) -> None:
        PerdureError.__init__(self, f"run {run_id!r} cannot be deleted: {reason}")
        self.run_id = run_id


class ScheduleConflict(PerdureError):
    """The id of a schedule is declared in code and was created by a call, or by other code."""

    def __init__(self, schedule_id: str, reason: str) -> None:
        super().__init__(f"schedule {schedule_id!r} {reason}")
        self.schedule_id = schedule_id


class RunFailed(PerdureError):
    """The run failed. `type`, `message`, `traceback` and `location` describe the recorded error."""

    def __init__(self, run_id: str, type: str, message: str, traceback: str = "", location: str | None = None) -> None:
        where = f" at {location}" if location else ""
        super().__init__(f"run {run_id!r} failed{where}: {type}: {message}")
        self.run_id = run_id
        self.type = type
        self.message = message
        self.traceback = traceback
        self.location = location


class RunCancelled(PerdureError):
    """The run was cancelled or terminated. `reason` is that of the caller that cancelled it, if there was one."""

    def __init__(self, run_id: str, reason: str | None = None) -> None:
        super().__init__(f"run {run_id!r} was cancelled" + (f": {reason}" if reason else ""))
        self.run_id = run_id
        self.reason = reason


class RunHeld(PerdureError):
    """The run is held: it does not continue until a person, or compatible code, resumes it.

    `kind` and `reason` say why, `location` and `line` where, if that is known.
    """

    def __init__(
        self, run_id: str, kind: str, reason: str, location: str | None = None, line: str | None = None
    ) -> None:
        super().__init__(f"run {run_id!r} is held ({kind}): {reason}")
        self.run_id = run_id
        self.kind = kind
        self.reason = reason
        self.location = location
        self.line = line


class RequestRejected(PerdureError):
    """The run rejected a request. `type` and `message` describe the error that it rejected the request with.

    `type` is "RequestRejected" if the run gave a text instead of an exception.
    """

    def __init__(self, run_id: str, type: str, message: str) -> None:
        reason = message if type == "RequestRejected" else f"{type}: {message}"
        super().__init__(f"run {run_id!r} rejected the request: {reason}")
        self.run_id = run_id
        self.type = type
        self.message = message


class StepFailed(PerdureError):
    """All attempts of a step failed.

    `type` and `message` describe the last error; `cause` is that error, reconstructed.
    """

    cause: BaseException | None = None  # not recorded when a `StepFailed` is itself the recorded error of a run

    def __init__(
        self, location: str, attempts: int, type: str, message: str, cause: BaseException | None = None
    ) -> None:
        count = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        super().__init__(f"step {location} failed after {count}: {type}: {message}")
        self.location = location
        self.attempts = attempts
        self.type = type
        self.message = message
        self.cause = cause


class StepInterrupted(StepFailed):
    """A crash interrupted an `at_most_once` step. Its outcome is unknown and it is not executed again."""

    def __init__(self, location: str, attempts: int) -> None:
        super().__init__(
            location,
            attempts,
            "StepInterrupted",
            "the worker was lost while the body ran, so whether its effect happened is unknown",
        )


class CriticalError(PerdureError):
    """Raise this in a step body to fail the step without a retry."""


class RollbackError(CriticalError):
    """Raise this in a step body to fail the step without a retry and roll the run back."""


class JoinError(PerdureError):
    """At least one branch of a join failed. `errors` maps each failed branch to its error."""

    def __init__(self, errors: Mapping[str | int, BaseException]) -> None:
        super().__init__("; ".join(f"branch {name}: {error}" for name, error in errors.items()))
        self.errors = dict(errors)


class RaceError(PerdureError):
    """All branches of a race failed. `errors` maps each branch to its error."""

    def __init__(self, errors: Mapping[str | int, BaseException]) -> None:
        super().__init__("; ".join(f"branch {name}: {error}" for name, error in errors.items()))
        self.errors = dict(errors)


class ChildFailed(PerdureError):
    """The awaited child run failed or was cancelled. `type`, `message` and `location` describe its error."""

    def __init__(self, run_id: str, type: str, message: str, location: str | None = None) -> None:
        super().__init__(f"child run {run_id!r} failed: {type}: {message}")
        self.run_id = run_id
        self.type = type
        self.message = message
        self.location = location


class HistoryDiverged(PerdureError):
    """The code requested an operation that differs from the recorded history.

    The run is held until a worker with compatible code resumes it. `recorded` and `asked` describe the recorded and
    the requested operation, `line` the line of user code that requested it.
    """

    def __init__(self, location: str, recorded: str, asked: str, line: str | None = None) -> None:
        at = f" (at {line})" if line else ""
        super().__init__(
            f"history diverged at {location}: recorded {recorded}, requested {asked}{at}; deploy the code that "
            "recorded the history, or guard the change with ctx.version or ctx.removed, then resume the run"
        )
        self.location = location
        self.recorded = recorded
        self.asked = asked
        self.line = line


class InvalidToken(PerdureError):
    """The token of a deferred is forged, was issued by another store, or names an unknown deferred."""


class QueueFull(PerdureError):
    """A topic, a mailbox (of events of one name) or a work queue holds as much as its limit allows."""


class RecordedError(PerdureError):
    """Replacement for a recorded error whose type cannot be reconstructed in this process."""

    def __init__(self, type: str, message: str) -> None:
        super().__init__(f"{type}: {message}")
        self.type = type
        self.message = message


class StoreError(PerdureError):
    """A store call failed: nothing was stored, or the response was lost.

    `retryable` is True if the same call may succeed later (store locked, restarting or unreachable).
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
