"""Translate errors of asyncpg into `StoreError`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import asyncpg
from asyncpg import exceptions as pg

from perdure.errors import StoreError

RETRY_IMMEDIATELY = (pg.DeadlockDetectedError, pg.SerializationError, pg.LockNotAvailableError)
_PREPARED_STATEMENT_LOST = (pg.InvalidSQLStatementNameError, pg.DuplicatePreparedStatementError)
_RETRYABLE = (
    *RETRY_IMMEDIATELY,
    OSError,
    TimeoutError,
    pg.PostgresConnectionError,
    pg.InternalClientError,
    pg.InsufficientResourcesError,
    pg.OperatorInterventionError,
    pg.ObjectInUseError,
    pg.ReadOnlySQLTransactionError,  # a standby: until it is promoted, or until the client finds the primary
    pg.CannotConnectNowError,
    pg.PostgresSystemError,
    pg.InvalidCachedStatementError,
)


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Raise the `StoreError` for an error of asyncpg or of the server; other errors pass unchanged."""
    try:
        yield
    except Exception as error:
        store_error = as_store_error(error)
        if store_error is None:
            raise
        raise store_error from error


def as_store_error(error: Exception) -> StoreError | None:
    """Return the `StoreError` for an error, `retryable` if the same call may succeed later.

    Returns None for an error that comes from neither asyncpg nor the server.
    """
    if isinstance(error, _PREPARED_STATEMENT_LOST):
        advice = "if a pooler without prepared statements is in use, add statement_cache_size=0 to the URL"
        return StoreError(f"PostgreSQL lost a prepared statement ({error}); {advice}", retryable=True)
    if isinstance(error, _RETRYABLE) or _is_lost_connection(error):
        return StoreError(f"PostgreSQL is unavailable or gave the statement up ({_describe(error)})", retryable=True)
    if isinstance(error, UnicodeError) or isinstance(error.__cause__, UnicodeError):
        return StoreError(f"text that is not valid Unicode cannot be stored: {error}")
    if isinstance(error, (asyncpg.PostgresError, asyncpg.InterfaceError, ValueError, TypeError, OverflowError)):
        return StoreError(f"PostgreSQL refused the statement ({_describe(error)})")
    return None


def _is_lost_connection(error: BaseException) -> bool:
    """Whether the connection was closed or abandoned. The next call gets another connection."""
    return isinstance(error, asyncpg.InterfaceError) and not isinstance(error, (ValueError, TypeError))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
