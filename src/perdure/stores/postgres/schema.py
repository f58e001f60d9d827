"""Prepare a schema: check that it belongs to perdure and that its version is known, then apply missing migrations.

Migrations are numbered, only added, and applied under a lock. They must not change what older processes call, because
workers of two versions share a store while they are replaced: a function whose parameters or effect change gets another
name.
"""

from __future__ import annotations

import importlib.resources

from perdure.errors import StoreError
from perdure.stores.postgres.errors import translate_errors
from perdure.stores.postgres.pool import Connection
from perdure.stores.postgres.url import PostgresUrl

OLDEST_SERVER = 140_000
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('perdure/' || $1, 0))"
_RELATIONS = """
    SELECT count(*) FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1"""
# Not with obj_description() and to_regnamespace(): they read the session's cache, which a lock does not refresh.
_COMMENT = """
    SELECT d.description FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_description d
    ON d.objoid = n.oid AND d.classoid = 'pg_catalog.pg_namespace'::regclass AND d.objsubid = 0
    WHERE n.nspname = $1"""
_SCHEMA_EXISTS = "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = $1"
_OURS = "perdure: runs, histories and messages"
_OURS_BEFORE = frozenset(["perdure: runs, histories and mail"])
"""Comments on schemas of unreleased versions, whose tables have other names. There is no migration from them."""


def migrations() -> list[str]:
    """Return the scripts in order. The version of a schema is the number of scripts applied to it."""
    folder = importlib.resources.files("perdure.stores.postgres") / "migrations"
    scripts = sorted((file.name, file) for file in folder.iterdir() if file.name.endswith(".sql"))
    return [file.read_text("utf-8") for _, file in scripts]


async def prepare(connection: Connection, target: PostgresUrl, shards: int) -> None:
    """Create the schema if it is missing and migrate it if it is old.

    Raises `StoreError` for a schema that is not perdure's, is newer than this version, or has another number of shards.
    """
    with translate_errors():
        async with connection.transaction():  # a pooler in transaction mode then uses one server connection
            await _check_server(connection, target)
            if await _version(connection, target) == len(migrations()):
                await _check_shards(connection, target, shards)
                return
        async with connection.transaction():  # a second one: the lock must precede everything that it reads
            await _migrate(connection, target, shards)
            await _check_shards(connection, target, shards)


async def _check_server(connection: Connection, target: PostgresUrl) -> None:
    version = await connection.fetchval("SELECT current_setting('server_version_num')::int")
    if version < OLDEST_SERVER:
        raise StoreError(f"{target.name} runs PostgreSQL {version // 10_000}; perdure needs 14 or later")
    encoding = await connection.fetchval("SELECT current_setting('server_encoding')")
    if encoding != "UTF8":
        raise StoreError(f"{target.name} has the encoding {encoding}; use a database created with ENCODING 'UTF8'")


async def _version(connection: Connection, target: PostgresUrl) -> int:
    """Return the schema's version, 0 if it is missing or empty. Raises if this perdure cannot use it."""
    comment = await connection.fetchval(_COMMENT, target.schema)
    if comment in _OURS_BEFORE:
        raise StoreError(
            f"the schema {target.schema!r} was created by an unreleased version of perdure with other table names; "
            "it cannot be migrated: use another schema in the URL (?schema=name), or drop this one"
        )
    if comment != _OURS:
        if await connection.fetchval(_RELATIONS, target.schema):
            raise StoreError(
                f"the schema {target.schema!r} contains tables that are not perdure's; "
                "use another schema in the URL (?schema=name)"
            )
        return 0
    version = int(await connection.fetchval(f"SELECT value FROM {target.quoted}.meta WHERE key = 'version'"))
    if version > len(migrations()):
        raise StoreError(
            f"{target.name} has schema version {version}; this perdure supports at most {len(migrations())}: "
            "upgrade perdure"
        )
    return version


async def _migrate(connection: Connection, target: PostgresUrl, shards: int) -> None:
    """Apply the missing scripts in one transaction, while the lock keeps other processes from doing the same."""
    await connection.fetch(_LOCK, target.schema)
    await connection.execute("SET LOCAL client_min_messages = warning")
    version = await _version(connection, target)  # read again: another process may have migrated meanwhile
    if not await connection.fetchval(_SCHEMA_EXISTS, target.schema):
        await connection.execute(f"CREATE SCHEMA {target.quoted}")
    await connection.execute(f"SET LOCAL search_path = {target.quoted}, pg_temp")
    for script in migrations()[version:]:
        await connection.execute(script)
    if version == 0:
        await connection.execute("INSERT INTO meta (key, value) VALUES ('version', '0'), ('shards', $1)", str(shards))
        await connection.execute(f"COMMENT ON SCHEMA {target.quoted} IS '{_OURS}'")
    await connection.execute("UPDATE meta SET value = $1 WHERE key = 'version'", str(len(migrations())))


async def _check_shards(connection: Connection, target: PostgresUrl, shards: int) -> None:
    stored = int(await connection.fetchval(f"SELECT value FROM {target.quoted}.meta WHERE key = 'shards'"))
    if stored != shards:
        raise StoreError(f"{target.name} has {stored} shards, not {shards}; open it with shards={stored}")
