"""The errors of SQLite as those of a store: may the same call succeed later, or is it refused for good?"""

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
    """What the callers of a store see: ours as they are, SQLite's by whether the same call may succeed later."""
    if isinstance(error, PerdureError):
        return error
    if isinstance(error, _RETRYABLE):
        return _caused(StoreError(f"SQLite could not do it now ({_describe(error)})", retryable=True), error)
    if isinstance(error, UnicodeError):
        return _caused(StoreError(f"text that is not valid Unicode cannot be stored: {error}"), error)
    if isinstance(error, (apsw.Error, ValueError, TypeError, OverflowError)):
        return _caused(StoreError(f"SQLite refused it ({_describe(error)})"), error)
    return error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _caused(outcome: StoreError, cause: BaseException) -> StoreError:
    outcome.__cause__ = cause
    return outcome
