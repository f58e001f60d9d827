"""A client for one command, and the exit codes of errors.

0  done
1  failed: the run, the store, a check
2  usage: a wrong option, argument or payload
3  not found: run, dead letter, token or file
4  conflict: the id is taken, the run has ended, the mailbox is full
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import typer

from perdure.errors import (
    InvalidPayload,
    InvalidToken,
    PerdureError,
    QueueFull,
    QueueNotFound,
    RunCancelled,
    RunConflict,
    RunFailed,
    RunHeld,
    RunInUse,
    RunNotFound,
    RunTerminated,
    ScheduleConflict,
    ScheduleNotFound,
    StoreError,
    WorkflowMisuse,
)

if TYPE_CHECKING:
    import asyncio

    from perdure.client.client import Client

T = TypeVar("T")
DONE, FAILED, USAGE, NOT_FOUND, CONFLICT = range(5)
INTERRUPTED = 130
STORE_TIMEOUT_SECONDS = 5.0  # a command gives up when the store is unavailable for this long

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (RunNotFound, NOT_FOUND),
    (QueueNotFound, NOT_FOUND),
    (ScheduleNotFound, NOT_FOUND),
    (InvalidToken, NOT_FOUND),
    (RunConflict, CONFLICT),
    (ScheduleConflict, CONFLICT),
    (RunTerminated, CONFLICT),
    (QueueFull, CONFLICT),
    (InvalidPayload, USAGE),
    (WorkflowMisuse, USAGE),
)


class CommandError(Exception):
    """A command failed. `advice` names the next command to try."""

    def __init__(self, message: str, advice: str = "", code: int = FAILED, run_id: str | None = None) -> None:
        super().__init__(message)
        self.advice = advice
        self.code = code
        self.run_id = run_id


class UsageError(CommandError):
    """Invalid command-line usage (exit code 2)."""

    def __init__(self, message: str, advice: str = "", code: int = USAGE) -> None:
        super().__init__(message, advice, code)


def with_client(url: str, call: Callable[[Client], Awaitable[T]]) -> T:
    """Open a client on the store, await `call` with it, close it, and return the result."""
    import asyncio

    from perdure.client.client import Client

    async def main() -> T:
        with _capturing_store_errors() as capture:
            client = Client(url)
            await _open(client, url, capture)
            try:
                return await call(client)
            finally:
                await client.shutdown()

    return asyncio.run(main())


async def _open(client: Client, url: str, capture: StoreErrorCapture) -> None:
    """Open the client; raise `StoreError` if the store stays unavailable. (A worker would wait for it.)"""
    import asyncio

    from perdure.client.store_urls import redact_password

    opening = asyncio.create_task(client.open())
    while not (await asyncio.wait({opening}, timeout=STORE_TIMEOUT_SECONDS))[0]:
        if capture.error is not None:  # without an error opening is just slow, for example during a migration
            opening.cancel()
            await asyncio.wait({opening})
            raise StoreError(f"{redact_password(url)} cannot be reached: {capture.error}", retryable=True)
    await opening


class StoreErrorCapture(logging.Handler):
    """Captures store errors from the log, so that a command reports the first one and not every retry."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.error: StoreError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        errors = [each for each in record.args or () if isinstance(each, StoreError)]
        if errors and self.error is None and sys.stderr.isatty():
            from perdure.cli.output import warn

            warn(f"Store unavailable, retrying: {errors[-1]}")
        self.error = errors[-1] if errors else self.error


@contextmanager
def _capturing_store_errors() -> Iterator[StoreErrorCapture]:
    capture, logger = StoreErrorCapture(), logging.getLogger("perdure")
    logger.addHandler(capture)
    try:
        yield capture
    finally:
        logger.removeHandler(capture)


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, instead of ending the process."""
    import asyncio
    import signal

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


@contextmanager
def error_reporting(json: bool = False) -> Iterator[None]:
    """Print errors on stderr (with `json` as an object), with the next command to try, and exit with their code."""
    try:
        yield
    except (PerdureError, CommandError, TimeoutError) as error:
        _report(error, json)
        raise typer.Exit(code_of(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader, for example `head`, has closed the pipe
        sys.stderr.close()
        raise typer.Exit(DONE) from None


def confirm_or_exit(action: str, more: int = 0) -> None:
    """Ask for confirmation of an action on several things, of which `more` were not shown.

    Raises `CommandError` if the user declines, or if stdin is not a terminal.
    """
    from perdure.cli.output import confirm, warn

    if more > 0:
        warn(f"... and {more} more")
    if not confirm(f"{action[:1].upper()}{action[1:]}?"):
        raise CommandError("Aborted: confirmation required (use --yes)", "the same command with --yes", USAGE)


def code_of(error: BaseException) -> int:
    if isinstance(error, CommandError):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)


def advice_for(error: BaseException) -> str:
    """Return the next command to try, or an empty text."""
    run_id = getattr(error, "run_id", None)
    match error:
        case CommandError():
            return error.advice
        case RunNotFound():
            return f"perdure ls --prefix {str(run_id)[:8]}"
        case QueueNotFound():
            return "perdure queues ls"
        case ScheduleNotFound():
            return "perdure schedules ls"
        case RunInUse():
            return f"perdure terminate {run_id}"
        case RunTerminated():
            return f"perdure show {run_id}   (perdure rewind {run_id} LOCATION continues it from there)"
        case RunConflict() | RunFailed() | RunCancelled() | RunHeld():
            return f"perdure show {run_id}"
        case InvalidToken():
            return "the token is the `.token` of the workflow's deferred; copy all of it"
        case QueueFull():
            return "perdure doctor"
        case StoreError() if error.retryable:
            return "retry later"
        case _:
            return ""


def _report(error: BaseException, json: bool) -> None:
    from perdure.cli.output import errors_to

    errors_to(type(error).__name__, str(error), advice_for(error), getattr(error, "run_id", None), json=json)
