"""Making a schema ready: is it ours, do we know its version; then the migrations that it lacks, under a lock.

The scripts are numbered and only added to. They must leave what older processes call as it is, so that workers of two
versions can share a store while they are replaced: a function that changes what it takes or does gets another name.
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
# Not with obj_description() and to_regnamespace(): they answer from the session's cache, which a lock does not refresh.
_COMMENT = """
    SELECT d.description FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_description d
    ON d.objoid = n.oid AND d.classoid = 'pg_catalog.pg_namespace'::regclass AND d.objsubid = 0
    WHERE n.nspname = $1"""
_SCHEMA_EXISTS = "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = $1"
_OURS = "perdure: runs, histories and mail"


def migrations() -> list[str]:
    """The scripts in order; the number of a schema's version is how many of them it has seen."""
    folder = importlib.resources.files("perdure.stores.postgres") / "migrations"
    scripts = sorted((file.name, file) for file in folder.iterdir() if file.name.endswith(".sql"))
    return [file.read_text("utf-8") for _, file in scripts]


async def prepare(connection: Connection, target: PostgresUrl, shards: int) -> None:
    """Make the schema ready: new ones are made, old ones migrated, foreign and newer ones refused."""
    with translate_errors():
        async with connection.transaction():  # one server behind a pooler, too
            await _check_server(connection, target)
            if await _version(connection, target) == len(migrations()):
                await _check_shards(connection, target, shards)
                return
        async with connection.transaction():  # another: the lock is to come before all that it reads
            await _migrate(connection, target, shards)
            await _check_shards(connection, target, shards)


async def _check_server(connection: Connection, target: PostgresUrl) -> None:
    version = await connection.fetchval("SELECT current_setting('server_version_num')::int")
    if version < OLDEST_SERVER:
        raise StoreError(f"{target.name} runs PostgreSQL {version // 10_000}; perdure needs 14 or later")
    encoding = await connection.fetchval("SELECT current_setting('server_encoding')")
    if encoding != "UTF8":
        raise StoreError(f"{target.name} is encoded as {encoding}; make a database with ENCODING 'UTF8'")


async def _version(connection: Connection, target: PostgresUrl) -> int:
    """The schema's version, 0 if it is new or empty; raises if it is not for us."""
    ours = await connection.fetchval(_COMMENT, target.schema)
    if ours != _OURS:
        if await connection.fetchval(_RELATIONS, target.schema):
            raise StoreError(
                f"the schema {target.schema!r} holds tables that are not perdure's; "
                "name another one in the URL (?schema=name)"
            )
        return 0
    version = int(await connection.fetchval(f"SELECT value FROM {target.quoted}.meta WHERE key = 'version'"))
    if version > len(migrations()):
        raise StoreError(
            f"{target.name} has version {version}, and this perdure knows {len(migrations())} at most; upgrade perdure"
        )
    return version


async def _migrate(connection: Connection, target: PostgresUrl, shards: int) -> None:
    """Run the scripts that the schema lacks, all or none, while nobody else may."""
    await connection.fetch(_LOCK, target.schema)
    await connection.execute("SET LOCAL client_min_messages = warning")
    version = await _version(connection, target)  # again: another process may have been first
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
        raise StoreError(f"{target.name} is cut into {stored} shards, not {shards}; open it with shards={stored}")
