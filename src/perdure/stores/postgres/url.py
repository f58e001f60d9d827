"""PostgresUrl: the address of a PostgreSQL store and its options."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

from msgspec import Struct

from perdure.errors import StoreError

Number = TypeVar("Number", int, float)


class PostgresUrl(Struct, frozen=True):
    """Where a store lives: a server, as asyncpg's URLs name it, a schema, and how to talk to it."""

    dsn: str
    schema: str = "perdure"
    connections: int = 4
    statement_cache_size: int = 100
    listen: bool = True
    timeout: float = 30.0

    @property
    def quoted(self) -> str:
        """The schema's name as it stands in SQL."""
        return '"' + self.schema.replace('"', '""') + '"'

    @property
    def name(self) -> str:
        """What errors call it: without the password."""
        parts = urlsplit(self.dsn)
        host = parts.netloc.rpartition("@")[2]
        return f"postgresql://{host}{parts.path} (schema {self.schema})"


_OWN_OPTIONS = ("schema", "connections", "statement_cache_size", "listen", "timeout")


def parse_url(url: str) -> PostgresUrl:
    """Our options out of a URL; what is left is asyncpg's."""
    server, _, query = url.partition("?")
    given = parse_qsl(query, keep_blank_values=True)
    own = {name: value for name, value in given if name in _OWN_OPTIONS}
    rest = urlencode([(name, value) for name, value in given if name not in _OWN_OPTIONS])
    try:
        return PostgresUrl(
            dsn=f"{server}?{rest}" if rest else server,
            schema=_schema(own.get("schema", "perdure")),
            connections=_at_least(1, int(own.get("connections", "4"))),
            statement_cache_size=_at_least(0, int(own.get("statement_cache_size", "100"))),
            listen={"yes": True, "no": False}[own.get("listen", "yes")],
            timeout=_at_least(1, float(own.get("timeout", "30"))),
        )
    except (ValueError, KeyError) as error:
        raise StoreError(
            f"a bad option in the URL of a PostgreSQL store ({error}); there are schema=name, connections=4, "
            "statement_cache_size=100, listen=yes|no and timeout=30 (seconds); all others are asyncpg's"
        ) from error


def _schema(name: str) -> str:
    if not name or len(name.encode()) > 63 or name.startswith("pg_") or "\0" in name:
        raise ValueError(f"{name!r} cannot be the name of a schema")
    return name


def _at_least(least: int, number: Number) -> Number:
    if not number >= least:
        raise ValueError(f"{number} is less than {least}")
    return number
