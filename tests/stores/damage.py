"""Damage to a living store: delete one row, or set one column or Redis field to null or garbage.

The rows are changed behind the store's back, as a person with a database client or a defective disk would do.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import apsw
import asyncpg
import redis.asyncio

from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.sqlite.store import SqliteStore
from tests.servers import postgres_schemas as schemas
from tests.servers import redis_prefixes as prefixes
from tests.servers.postgres import shared_url as postgres_url
from tests.servers.redis import shared_url as redis_url

GARBAGE_TEXT = "\x01 garbage {["
GARBAGE_BYTES = b"\xff\xfe garbage"
GARBAGE_NUMBERS = (-1, 10**9)


@dataclass(frozen=True)
class Damage:
    """One change of a store. `apply` returns False if the store's own constraints refuse it."""

    text: str
    apply: Callable[[], Awaitable[bool]]


async def choose_damage(store: Store, choice: random.Random) -> Damage:
    """Return a random damage of what the store contains."""
    match store:
        case SqliteStore():
            return _damage_of_sqlite(store, choice)
        case schemas.BorrowedStore():
            return await _damage_of_postgres(store, choice)
        case prefixes.BorrowedStore():
            return await _damage_of_redis(store, choice)
        case _:
            raise AssertionError(f"no damage for {store!r}")


async def delete_worker_row(store: Store, worker_id: str) -> None:
    """Delete the row of a worker that still owns runs."""
    match store:
        case MemoryStore():
            del store._workers[worker_id]
        case SqliteStore():
            _execute_on_sqlite(store, "DELETE FROM workers WHERE id = ?", worker_id)
        case schemas.BorrowedStore():
            await _execute_on_postgres(f"DELETE FROM {store.schema.name}.workers WHERE id = $1", worker_id)
        case prefixes.BorrowedStore():
            tag = store._partitions.tag(0)
            async with redis.asyncio.Redis.from_url(redis_url()) as client:
                await client.hdel(f"{tag}:workers:", worker_id)
                await client.hdel(f"{tag}:leases:", worker_id)
                await client.srem(f"{tag}:alive:", worker_id)


# --- SQL -------------------------------------------------------------------------------------------------------------

KEPT = ("meta",)  # its values are checked when a store is opened


def _change(choice: random.Random, table: str, columns: list[tuple[str, str]]) -> tuple[str, str, Any]:
    """Return a text, the column (empty: delete the row) and its new value."""
    if choice.random() < 0.2:
        return f"delete a row of {table}", "", None
    name, kind = choice.choice(columns)
    if choice.random() < 0.3:
        return f"set {table}.{name} to null", name, None
    value = _garbage(choice, kind)
    return f"set {table}.{name} to {value!r}", name, value


def _garbage(choice: random.Random, kind: str) -> Any:
    match kind:
        case "text":
            return GARBAGE_TEXT.replace("\x01", "")
        case "json":
            return choice.choice(("[]", '"garbage"', "7"))
        case "bytes":
            return GARBAGE_BYTES
        case "bool":
            return choice.choice((True, False))
        case "integer":
            return choice.choice(GARBAGE_NUMBERS)
        case _:
            return choice.choice((-1.0, 1e300))


def _damage_of_sqlite(store: SqliteStore, choice: random.Random) -> Damage:
    connection = apsw.Connection(store._path)
    connection.set_busy_timeout(5_000)
    names = [
        name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
    ]
    filled = [name for name in names if name not in KEPT and connection.execute(f"SELECT 1 FROM {name} LIMIT 1").get]
    table = choice.choice([name for name in filled if not name.startswith("sqlite_")])
    kinds = {"TEXT": "text", "REAL": "float", "INTEGER": "integer"}
    found = [*connection.execute(f"PRAGMA table_info({table})")]
    columns = [(row[1], kinds.get(row[2], "bytes")) for row in found]
    key = [row[1] for row in found if row[5]] or ["rowid"]
    rows = [*connection.execute(f"SELECT {', '.join(key)} FROM {table} ORDER BY {', '.join(key)}")]
    chosen = choice.choice(rows)
    text, column, value = _change(choice, table, columns)
    where = " AND ".join(f"{name} IS ?" for name in key)

    async def apply() -> bool:
        try:
            if column:
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (value, *chosen))
            else:
                connection.execute(f"DELETE FROM {table} WHERE {where}", chosen)
        except apsw.Error:
            return False
        finally:
            connection.close()
        return True

    return Damage(f"{text} where {dict(zip(key, chosen, strict=True))}", apply)


async def _damage_of_postgres(store: schemas.BorrowedStore, choice: random.Random) -> Damage:
    schema, connection = store.schema.name, await asyncpg.connect(postgres_url())
    names = [
        row[0]
        for row in await connection.fetch(
            "SELECT tablename FROM pg_tables WHERE schemaname = $1 ORDER BY tablename", schema
        )
    ]
    filled = [
        name for name in names if name not in KEPT and await connection.fetch(f"SELECT 1 FROM {schema}.{name} LIMIT 1")
    ]
    table = choice.choice(filled)
    kinds = {"text": "text", "jsonb": "json", "bytea": "bytes", "boolean": "bool", "double precision": "float"}
    found = await connection.fetch(
        "SELECT column_name, data_type FROM information_schema.columns WHERE table_schema = $1 AND table_name = $2 "
        "ORDER BY ordinal_position",
        schema,
        table,
    )
    columns = [(row[0], kinds.get(row[1], "integer")) for row in found]
    rows = await connection.fetch(f"SELECT ctid::text FROM {schema}.{table} ORDER BY ctid")
    chosen = choice.choice(rows)[0]
    text, column, value = _change(choice, table, columns)

    async def apply() -> bool:
        try:
            if column:
                given = value if not isinstance(value, str) else value.replace("\x00", "")
                statement = f"UPDATE {schema}.{table} SET {column} = $1 WHERE ctid = $2::text::tid"
                await connection.execute(statement, given, chosen)
            else:
                await connection.execute(f"DELETE FROM {schema}.{table} WHERE ctid = $1::text::tid", chosen)
        except (asyncpg.PostgresError, asyncpg.DataError):
            return False
        finally:
            await connection.close()
        return True

    return Damage(f"{text} at {chosen}", apply)


# --- Redis -----------------------------------------------------------------------------------------------------------


async def _damage_of_redis(store: prefixes.BorrowedStore, choice: random.Random) -> Damage:
    client = redis.asyncio.Redis.from_url(redis_url())
    tag = store._partitions.tag(0)
    names = sorted([name async for name in client.scan_iter(match=f"{tag}:*", count=1000)])
    name = choice.choice([each for each in names if each != f"{tag}:meta:".encode()])
    kind = await client.type(name)
    short = name.decode(errors="replace").removeprefix(f"{tag}:")
    if choice.random() < 0.2 or kind not in (b"hash", b"zset", b"set", b"list"):
        return Damage(f"delete key {short}", lambda: _redis_change(client, "DEL", name))
    if kind == b"hash":
        field = choice.choice(sorted(await client.hkeys(name)))
        if choice.random() < 0.4:
            return Damage(f"delete field {field!r} of {short}", lambda: _redis_change(client, "HDEL", name, field))
        value = choice.choice((GARBAGE_BYTES, b""))
        text = f"set field {field!r} of {short} to {value!r}"
        return Damage(text, lambda: _redis_change(client, "HSET", name, field, value))
    if kind == b"list":
        return Damage(f"set {short}[0] to garbage", lambda: _redis_change(client, "LSET", name, 0, GARBAGE_BYTES))
    members = await client.zrange(name, 0, -1) if kind == b"zset" else await client.smembers(name)
    member = choice.choice(sorted(members))
    command = "ZREM" if kind == b"zset" else "SREM"
    return Damage(f"remove {member!r} from {short}", lambda: _redis_change(client, command, name, member))


async def _redis_change(client: redis.asyncio.Redis, *command: Any) -> bool:
    try:
        await client.execute_command(*command)
    finally:
        await client.aclose()
    return True


# --- planned damage --------------------------------------------------------------------------------------------------


async def damage_run(store: Store, run_id: str, column: str, value: Any) -> None:
    """Set one column or field of a run."""
    match store:
        case SqliteStore():
            _execute_on_sqlite(store, f"UPDATE runs SET {column} = ? WHERE id = ?", value, run_id)
        case schemas.BorrowedStore():
            statement = f"UPDATE {store.schema.name}.runs SET {column} = $1 WHERE id = $2"
            await _execute_on_postgres(statement, value, run_id)
        case prefixes.BorrowedStore():
            client = redis.asyncio.Redis.from_url(redis_url())
            await _redis_change(client, "HSET", f"{store._partitions.tag(0)}:run:{run_id}", column, value)


async def delete_subscriptions(store: Store, run_id: str) -> None:
    """Delete the subscriptions of a run."""
    match store:
        case SqliteStore():
            where = "run_pk = (SELECT pk FROM runs WHERE id = ?)"
            _execute_on_sqlite(store, f"DELETE FROM subscriptions WHERE {where}", run_id)
        case schemas.BorrowedStore():
            schema = store.schema.name
            where = f"run_pk = (SELECT pk FROM {schema}.runs WHERE id = $1)"
            await _execute_on_postgres(f"DELETE FROM {schema}.subscriptions WHERE {where}", run_id)
        case prefixes.BorrowedStore():
            client = redis.asyncio.Redis.from_url(redis_url())
            await _redis_change(client, "DEL", f"{store._partitions.tag(0)}:subscriptions:{run_id}")


def _execute_on_sqlite(store: SqliteStore, statement: str, *values: Any) -> None:
    connection = apsw.Connection(store._path)
    connection.set_busy_timeout(5_000)
    connection.execute(statement, values)
    connection.close()


async def _execute_on_postgres(statement: str, *values: Any) -> None:
    connection = await asyncpg.connect(postgres_url())
    await connection.execute(statement, *values)
    await connection.close()
