"""Errors of asyncpg as StoreError."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import asyncpg
from asyncpg import exceptions as pg

from perdure.errors import StoreError

RETRY_IMMEDIATELY = (pg.DeadlockDetectedError, pg.SerializationError, pg.LockNotAvailableError)
_POOLED = (pg.InvalidSQLStatementNameError, pg.DuplicatePreparedStatementError)
_RETRYABLE = (
    *RETRY_IMMEDIATELY,
    OSError,
    TimeoutError,
    pg.PostgresConnectionError,
    pg.InternalClientError,
    pg.InsufficientResourcesError,
    pg.OperatorInterventionError,
    pg.ObjectInUseError,
    pg.ReadOnlySQLTransactionError,  # a standby, until it is promoted or the primary is found
    pg.CannotConnectNowError,
    pg.PostgresSystemError,
    pg.InvalidCachedStatementError,
)


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """What asyncpg raises becomes what the callers of a store expect."""
    try:
        yield
    except Exception as error:
        meant = as_store_error(error)
        if meant is None:
            raise
        raise meant from error


def as_store_error(error: Exception) -> StoreError | None:
    """What an error of the server's means: whether the same call may succeed later. None: it is not the server's."""
    if isinstance(error, _POOLED):
        advice = "a pooler that keeps no prepared statements? Then add statement_cache_size=0 to the URL"
        return StoreError(f"PostgreSQL does not know a statement that was prepared ({error}): {advice}", retryable=True)
    if isinstance(error, _RETRYABLE) or _is_lost_connection(error):
        return StoreError(f"PostgreSQL could not do it now ({_describe(error)})", retryable=True)
    if isinstance(error, UnicodeError) or isinstance(error.__cause__, UnicodeError):
        return StoreError(f"text that is not valid Unicode cannot be stored: {error}")
    if isinstance(error, (asyncpg.PostgresError, asyncpg.InterfaceError, ValueError, TypeError, OverflowError)):
        return StoreError(f"PostgreSQL refused it ({_describe(error)})")
    return None


def _is_lost_connection(error: BaseException) -> bool:
    """A connection that was found closed, or is used by nobody any more: the next call gets another one."""
    return isinstance(error, asyncpg.InterfaceError) and not isinstance(error, (ValueError, TypeError))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
