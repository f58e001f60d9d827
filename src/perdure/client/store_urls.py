"""Open a store by its URL. This is the only module that names the concrete stores. Its errors show no password."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from urllib.parse import parse_qsl, unquote

from perdure.clock import SYSTEM_CLOCK, WALL_CLOCK, Clock
from perdure.errors import InvalidArgument, StoreError
from perdure.stores.protocol import Store
from perdure.stores.urls import find_mistake, redact_password, without_secrets

__all__ = ["open_store", "redact_password"]

SCHEMES = (
    "memory://, sqlite:///relative.db, sqlite:////absolute.db, postgresql://user@host/database, redis://host:6379/0"
)


def open_store(url: str | Store, clock: Clock, *, owns_loop: bool = False) -> Store:
    """Return the store that a URL names, or the given store. Nothing is opened or created yet.

    `owns_loop`: the event loop runs nothing but perdure, so a SQLite store may commit on it (ADR 11).
    """
    if not isinstance(url, str):
        if isinstance(url, Store):
            return url
        raise InvalidArgument(f"a store must be a URL ({SCHEMES}) or a Store, not {type(url).__name__}")
    url = str.__str__(url)
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise InvalidArgument(f"{redact_password(url)!r} is not a store URL; use one of {SCHEMES}")
    match scheme:
        case "memory":
            return _memory(url, rest, clock)
        case "sqlite":
            return _sqlite(url, clock, owns_loop)
        case "postgresql" | "postgres":
            return _postgres(url)
        case "redis" | "rediss" | "redis+unix":
            return _redis(url)
        case _:
            shown = redact_password(f"{scheme}://").removesuffix("://")
            raise InvalidArgument(f"unknown store scheme {shown!r}; use one of {SCHEMES}")


def _memory(url: str, rest: str, clock: Clock) -> Store:
    from perdure.stores.memory.store import MemoryStore

    if rest:
        raise InvalidArgument(f"{redact_password(url)!r}: a memory store has no name; use memory://")
    return MemoryStore(clock)


def _sqlite(url: str, clock: Clock, owns_loop: bool) -> Store:
    from perdure.stores.sqlite.store import SqliteStore

    shown = redact_password(url)
    if "#" in url:
        raise InvalidArgument(f"{shown!r} has a #, which ends the path of a URL; write it as %23")
    server, slash, rest = url.removeprefix("sqlite://").partition("/")
    name, _, query = rest.partition("?")
    path = unquote(name)
    if server or not slash or not path or path == ":memory:" or "\0" in path:
        raise InvalidArgument(
            f"{shown!r} names no file; use sqlite:///relative.db or sqlite:////absolute.db, or memory:// to store "
            "nothing"
        )
    options = dict(parse_qsl(query, keep_blank_values=True))
    synchronous = options.pop("synchronous", "full").lower()
    if options or synchronous not in ("full", "normal", "off"):
        raise InvalidArgument(f"{shown!r}: the only option is synchronous=full|normal|off")
    # The processes that share the file agree on the machine's clock, also after it was set (ADR 19).
    clock = WALL_CLOCK if clock is SYSTEM_CLOCK else clock
    return SqliteStore(path, clock=clock, synchronous=synchronous, commit_on_loop=owns_loop)


# Stores on servers take no clock: they use the server's time, so that all workers agree on it.


def _postgres(url: str) -> Store:
    with _requires_extra("postgres", driver="asyncpg"):
        from perdure.stores.postgres.store import PostgresStore
    return _build(PostgresStore, url)


def _redis(url: str) -> Store:
    with _requires_extra("redis", driver="redis"):
        from perdure.stores.redis.store import RedisStore
    return _build(RedisStore, url)


@contextlib.contextmanager
def _requires_extra(name: str, driver: str) -> Iterator[None]:
    """Raise `InvalidArgument` that names the extra to install if the driver is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != driver:
            raise
        raise InvalidArgument(
            f"the {name} store needs {driver}, which is not installed: pip install 'perdure[{name}]'"
        ) from error


def _build(kind: Callable[[str], Store], url: str) -> Store:
    """Return the store of a URL. Raises `InvalidArgument` without its password."""
    mistake = find_mistake(url)
    if mistake is None:
        try:
            return kind(url)
        except (StoreError, ValueError) as error:
            mistake = without_secrets(str(error), url)
    # Raised outside of `except`: the context of an exception is shown by some loggers, and may quote the URL.
    raise InvalidArgument(f"{redact_password(url)!r}: {mistake}")
