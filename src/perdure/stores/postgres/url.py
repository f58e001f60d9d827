"""PostgresUrl: the address of a PostgreSQL store and its options."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

from msgspec import Struct

from perdure.errors import StoreError
from perdure.stores.urls import find_mistake

Number = TypeVar("Number", int, float)


class PostgresUrl(Struct, frozen=True):
    """The address of a store: the server in asyncpg's URL format, the schema, and the connection options."""

    dsn: str
    schema: str = "perdure"
    connections: int = 4
    statement_cache_size: int = 100
    listen: bool = True
    timeout: float = 30.0

    @property
    def quoted(self) -> str:
        """The schema's name as a quoted SQL identifier."""
        return '"' + self.schema.replace('"', '""') + '"'

    def __repr__(self) -> str:
        return f"<{self.name}>"  # the default would show the password

    @property
    def name(self) -> str:
        """The store's name in error messages, without the password."""
        parts = urlsplit(self.dsn)
        host = parts.netloc.rpartition("@")[2]
        return f"postgresql://{host}{parts.path} (schema {self.schema})"


_OWN_OPTIONS = ("schema", "connections", "statement_cache_size", "listen", "timeout")


def parse_url(url: str) -> PostgresUrl:
    """Parse a URL: take the options of perdure out of it and leave the others to asyncpg.

    Raises `StoreError` if the URL or an option of perdure is invalid; no message quotes the password.
    """
    if (mistake := find_mistake(url)) is not None:
        raise StoreError(mistake)
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
            f"invalid option in the URL of a PostgreSQL store ({error}); use schema=name, connections=4, "
            "statement_cache_size=100, listen=yes|no or timeout=30 (seconds); asyncpg takes all other options"
        ) from error


def _schema(name: str) -> str:
    if not name or len(name.encode()) > 63 or name.startswith("pg_") or "\0" in name:
        raise ValueError(f"{name!r} is not a valid name of a schema")
    return name


def _at_least(least: int, number: Number) -> Number:
    if not number >= least:
        raise ValueError(f"{number} is less than {least}")
    return number
