"""Session: a client for the length of one command, and what its errors mean to a shell.

0  done
1  failed: the run, the store, a check
2  usage: a wrong option, argument or payload
3  not found: no such run, letter, token, file
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
    RunCancelled,
    RunConflict,
    RunFailed,
    RunNotFound,
    RunTerminated,
    StoreError,
    WorkflowMisuse,
)

if TYPE_CHECKING:
    import asyncio

    from perdure.client.client import Client

T = TypeVar("T")
DONE, FAILED, USAGE, NOT_FOUND, CONFLICT = range(5)
INTERRUPTED = 130
AWAY = 5.0  # seconds without the store until a command gives up

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (RunNotFound, NOT_FOUND),
    (InvalidToken, NOT_FOUND),
    (RunConflict, CONFLICT),
    (RunTerminated, CONFLICT),
    (QueueFull, CONFLICT),
    (InvalidPayload, USAGE),
    (WorkflowMisuse, USAGE),
)


class CommandError(Exception):
    """A command cannot do what it is asked: why, and the next thing to try."""

    def __init__(self, message: str, advice: str = "", code: int = FAILED, run_id: str | None = None) -> None:
        super().__init__(message)
        self.advice = advice
        self.code = code
        self.run_id = run_id


class UsageError(CommandError):
    """The command was given something that it cannot use."""

    def __init__(self, message: str, advice: str = "", code: int = USAGE) -> None:
        super().__init__(message, advice, code)


def with_client(url: str, question: Callable[[Client], Awaitable[T]]) -> T:
    """Open the store, ask, close."""
    import asyncio

    from perdure.client.client import Client

    async def main() -> T:
        with _listening() as ear:
            client = Client(url)
            await _open(client, url, ear)
            try:
                return await question(client)
            finally:
                await client.shutdown()

    return asyncio.run(main())


async def _open(client: Client, url: str, ear: StoreErrorCapture) -> None:
    """A worker waits for its store however long it is away; whoever sits at a terminal wants to know."""
    import asyncio

    from perdure.client.store_urls import redact_password

    opening = asyncio.create_task(client.open())
    while not (await asyncio.wait({opening}, timeout=AWAY))[0]:
        if ear.heard is not None:  # else it only takes long: a large store is being migrated perhaps
            opening.cancel()
            await asyncio.wait({opening})
            raise StoreError(f"{redact_password(url)} cannot be reached: {ear.heard}", retryable=True)
    await opening


class StoreErrorCapture(logging.Handler):
    """Hears of a store that is away, so that a command says it once and not with every try."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: StoreError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        errors = [each for each in record.args or () if isinstance(each, StoreError)]
        if errors and self.heard is None and sys.stderr.isatty():
            from perdure.cli.output import warn

            warn(f"the store is away, and is tried again: {errors[-1]}")
        self.heard = errors[-1] if errors else self.heard


@contextmanager
def _listening() -> Iterator[StoreErrorCapture]:
    ear, logger = StoreErrorCapture(), logging.getLogger("perdure")
    logger.addHandler(ear)
    try:
        yield ear
    finally:
        logger.removeHandler(ear)


def stop_event() -> asyncio.Event:
    """Set by SIGTERM or SIGINT, of which nobody dies from now on."""
    import asyncio
    import signal

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


@contextmanager
def error_reporting(json: bool = False) -> Iterator[None]:
    """Errors in words on stderr (as an object with `--json`), with the next command to try, and the exit code."""
    try:
        yield
    except (PerdureError, CommandError, TimeoutError) as error:
        _report(error, json)
        raise typer.Exit(code_of(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # whoever was reading, `head` perhaps, has seen enough
        sys.stderr.close()
        raise typer.Exit(DONE) from None


def confirm_or_exit(deed: str, more: int = 0) -> None:
    """Ask whether this may be done, to things of which the first were shown, and `more` were not.

    Whoever does not say yes, or cannot because nobody sits there, has nothing done.
    """
    from perdure.cli.output import confirm, warn

    if more > 0:
        warn(f"and {more} more")
    if not confirm(f"{deed}?"):
        raise CommandError(f"to {deed} takes a yes; nothing was done", "the same with --yes", USAGE)


def code_of(error: BaseException) -> int:
    if isinstance(error, CommandError):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)


def advice_for(error: BaseException) -> str:
    """The next command to try."""
    run_id = getattr(error, "run_id", None)
    match error:
        case CommandError():
            return error.advice
        case RunNotFound():
            return f"perdure ls --prefix {str(run_id)[:8]}"
        case RunTerminated():
            return f"perdure show {run_id}   (perdure rewind {run_id} LOCATION lets it go on from there)"
        case RunConflict() | RunFailed() | RunCancelled():
            return f"perdure show {run_id}"
        case InvalidToken():
            return "the token is what the workflow's deferred gave out as `.token`; copy all of it"
        case QueueFull():
            return "perdure doctor"
        case StoreError() if error.retryable:
            return "the same command again, later"
        case _:
            return ""


def _report(error: BaseException, json: bool) -> None:
    from perdure.cli.output import errors_to

    errors_to(type(error).__name__, str(error), advice_for(error), getattr(error, "run_id", None), json=json)
