"""Opening a store by its URL. The only room that knows which stores there are."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

from perdure.clock import Clock
from perdure.errors import InvalidArgument
from perdure.store.base import Store

SCHEMES = "memory://, sqlite:///relative.db, sqlite:////absolute.db"


def store_at(url: str | Store, clock: Clock) -> Store:
    """The store that a URL names; nothing is opened or created yet."""
    if not isinstance(url, str):
        if isinstance(url, Store):
            return url
        raise InvalidArgument(f"a store is a URL ({SCHEMES}) or a Store, not {url!r}")
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise InvalidArgument(f"{url!r} is no store URL; it should look like one of {SCHEMES}")
    match scheme:
        case "memory":
            return _memory(url, rest, clock)
        case "sqlite":
            return _sqlite(url, clock)
        case "postgresql" | "postgres" | "redis" | "rediss":
            raise InvalidArgument(f"the {scheme} store is not part of this version yet; use one of {SCHEMES}")
        case _:
            raise InvalidArgument(f"unknown store scheme {scheme!r}; use one of {SCHEMES}")


def _memory(url: str, rest: str, clock: Clock) -> Store:
    from perdure.store.memory import MemoryStore

    if rest:
        raise InvalidArgument(f"{url!r}: a memory store has no name; write memory://")
    return MemoryStore(clock)


def _sqlite(url: str, clock: Clock) -> Store:
    from perdure.store.sqlite import SqliteStore

    parts = urlsplit(url)
    path = unquote(parts.path)[1:]
    if parts.netloc or not path or path == ":memory:":
        raise InvalidArgument(
            f"{url!r} names no file; write sqlite:///relative.db or sqlite:////absolute.db (memory:// keeps nothing)"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    synchronous = options.pop("synchronous", "full").lower()
    if options or synchronous not in ("full", "normal", "off"):
        raise InvalidArgument(f"{url!r}: the only option is synchronous=full|normal|off")
    return SqliteStore(path, clock=clock, synchronous=synchronous)
