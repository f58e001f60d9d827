"""Map SQLite errors to `StoreError`, retryable if the same call may succeed later."""

from __future__ import annotations

import apsw

from perdure.errors import PerdureError, StoreError

_RETRYABLE = (
    apsw.BusyError,
    apsw.LockedError,
    apsw.IOError,
    apsw.FullError,
    apsw.CantOpenError,
    apsw.InterruptError,
    apsw.ProtocolError,
    apsw.NoMemError,
    apsw.SchemaChangeError,
)


def as_store_error(error: BaseException) -> BaseException:
    """Return the error that a caller of the store gets.

    Errors of perdure, and errors that are not SQLite's, are returned unchanged.
    """
    if isinstance(error, PerdureError):
        return error
    if isinstance(error, _RETRYABLE):
        return _caused(
            StoreError(
                f"SQLite is temporarily unable to execute the call ({_describe(error)}); try again", retryable=True
            ),
            error,
        )
    if isinstance(error, UnicodeError):
        return _caused(StoreError(f"text must be valid Unicode to be stored: {error}"), error)
    if isinstance(error, (apsw.Error, ValueError, TypeError, OverflowError)):
        return _caused(StoreError(f"SQLite refused the call ({_describe(error)})"), error)
    return error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _caused(outcome: StoreError, cause: BaseException) -> StoreError:
    outcome.__cause__ = cause
    return outcome
