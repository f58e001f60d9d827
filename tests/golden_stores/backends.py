"""Copy the contents of a store into a file of this folder, and a file into a new store.

SQLite is copied as a whole. Of PostgreSQL the rows are kept: migrations are never changed, so that the first n of them
make the schema of then. Of Redis the values of all keys are kept, without the prefix.
"""

from __future__ import annotations

import base64
import gzip
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import asyncpg
import redis

from perdure.stores.postgres import schema as postgres_schema
from perdure.stores.protocol import Store
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing import VirtualClock
from tests.servers import postgres, redis_prefixes
from tests.servers import postgres_schemas as schemas
from tests.servers import redis as redis_servers

FOLDER = Path(__file__).parent / "data"
SEQUENCES = """
    SELECT s.sequencename, s.last_value FROM pg_sequences s
    WHERE s.schemaname = $1 AND NOT EXISTS (  -- those of identity columns follow from the rows
        SELECT FROM pg_depend d WHERE d.objid = format('%I.%I', s.schemaname, s.sequencename)::regclass
            AND d.deptype = 'i')
    ORDER BY 1"""

COLUMNS = """
    SELECT column_name FROM information_schema.columns
    WHERE table_schema = $1 AND table_name = $2 AND is_generated = 'NEVER' ORDER BY ordinal_position"""


class Backend(Protocol):
    """One kind of store."""

    def make(self, folder: Path, clock: VirtualClock) -> Store:
        """Return a new, empty store."""

    async def dump(self, store: Any) -> bytes:
        """Return the contents of a closed store."""

    async def restore(self, store: Any, dump: bytes) -> None:
        """Write contents into a new store that was not opened yet."""


class Sqlite:
    def make(self, folder: Path, clock: VirtualClock) -> Store:
        return SqliteStore(str(folder / "golden.db"), clock=clock, synchronous="off")

    async def dump(self, store: Any) -> bytes:
        source = sqlite3.connect(store._path)
        source.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        source.close()
        return gzip.compress(Path(store._path).read_bytes(), mtime=0)

    async def restore(self, store: Any, dump: bytes) -> None:
        Path(store._path).write_bytes(gzip.decompress(dump))


class Postgres:
    def make(self, folder: Path, clock: VirtualClock) -> Store:
        schema = schemas.Schema()
        schemas._borrowed.append(schema)  # dropped at the end of the session
        return schema.store(clock)

    async def dump(self, store: Any) -> bytes:
        connection = await asyncpg.connect(postgres.shared_url())
        schema = store.schema.name
        tables = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = $1 ORDER BY 1", schema)
        rows = {}
        for (table,) in tables:
            found = await connection.fetch(f'SELECT to_json(t)::text FROM {schema}."{table}" t')
            rows[table] = sorted((json.loads(row[0]) for row in found), key=json.dumps)
        found = await connection.fetch(SEQUENCES, schema)
        await connection.close()
        version = len(postgres_schema.migrations())
        return _json({"migrations": version, "tables": rows, "sequences": {row[0]: row[1] for row in found}})

    async def restore(self, store: Any, dump: bytes) -> None:
        given = json.loads(dump)
        connection = await asyncpg.connect(postgres.shared_url())
        schema = store.schema.name
        await connection.execute(f"CREATE SCHEMA {schema}; SET search_path = {schema}, pg_temp")
        for script in postgres_schema.migrations()[: given["migrations"]]:
            await connection.execute(script)
        await connection.execute(f"COMMENT ON SCHEMA {schema} IS '{postgres_schema._OURS}'")
        for table, rows in given["tables"].items():
            await connection.execute(f'DELETE FROM "{table}"')
            columns = ", ".join(f'"{row[0]}"' for row in await connection.fetch(COLUMNS, schema, table))
            await connection.execute(
                f'INSERT INTO "{table}" ({columns}) OVERRIDING SYSTEM VALUE '
                f'SELECT {columns} FROM json_populate_recordset(NULL::"{table}", $1)',
                json.dumps(rows),
            )
            if rows and "pk" in rows[0] and await _is_identity(connection, schema, table):
                await connection.execute(
                    f"SELECT setval(pg_get_serial_sequence('\"{table}\"', 'pk'), (SELECT max(pk) FROM \"{table}\"))"
                )
        for sequence, value in given.get("sequences", {}).items():
            if value is not None:
                await connection.fetchval("SELECT setval($1::text::regclass, $2)", sequence, value)
        await connection.close()
        store.schema.is_created = True


async def _is_identity(connection: Any, schema: str, table: str) -> bool:
    found = await connection.fetchval(
        "SELECT is_identity FROM information_schema.columns "
        "WHERE table_schema = $1 AND table_name = $2 AND column_name = 'pk'",
        schema,
        table,
    )
    return bool(found == "YES")


class Redis:
    def make(self, folder: Path, clock: VirtualClock) -> Store:
        return redis_prefixes.borrow(clock)

    async def dump(self, store: Any) -> bytes:
        prefix = store._server.address.prefix
        with redis.Redis.from_url(redis_servers.shared_url()) as client:
            keys = sorted(client.scan_iter(match=f"{{{prefix}:*", count=1000))
            values = {_text(key.replace(prefix.encode(), b"PREFIX")): _read(client, key) for key in keys}
        return _json(values)

    async def restore(self, store: Any, dump: bytes) -> None:
        prefix = store._server.address.prefix
        with redis.Redis.from_url(redis_servers.shared_url()) as client:
            for key, (kind, value) in json.loads(dump).items():
                _write(client, _bytes(key).replace(b"PREFIX", prefix.encode()), kind, value)


def _read(client: Any, key: bytes) -> list[Any]:
    kind = client.type(key).decode()
    read: dict[str, Callable[[], Any]] = {
        "string": lambda: _text(client.get(key)),
        "hash": lambda: sorted([_text(field), _text(value)] for field, value in client.hgetall(key).items()),
        "set": lambda: sorted(map(_text, client.smembers(key))),
        "list": lambda: [_text(item) for item in client.lrange(key, 0, -1)],
        "zset": lambda: [[_text(member), score] for member, score in client.zrange(key, 0, -1, withscores=True)],
    }
    return [kind, read[kind]()]


def _write(client: Any, key: bytes, kind: str, value: Any) -> None:
    match kind:
        case "string":
            client.set(key, _bytes(value))
        case "hash":
            client.hset(key, mapping={_bytes(field): _bytes(each) for field, each in value})
        case "set":
            client.sadd(key, *map(_bytes, value))
        case "list":
            client.rpush(key, *map(_bytes, value))
        case "zset":
            client.zadd(key, {_bytes(member): score for member, score in value})


def _text(value: bytes) -> str:
    """Return bytes as text: as they are if they are printable, else in base64."""
    text = value.decode("utf-8", "replace")
    if text.isprintable() and text.encode() == value and not text.startswith("base64:"):
        return text
    return f"base64:{base64.b64encode(value).decode()}"


def _bytes(text: str) -> bytes:
    return base64.b64decode(text.removeprefix("base64:")) if text.startswith("base64:") else text.encode()


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


BACKENDS: dict[str, Backend] = {"sqlite": Sqlite(), "postgres": Postgres(), "redis": Redis()}
SUFFIXES = {"sqlite": ".db.gz", "postgres": ".json", "redis": ".json"}


def path_of(name: str, kind: str) -> Path:
    """Return the file of a golden store."""
    return FOLDER / name / f"{kind}{SUFFIXES[kind]}"
