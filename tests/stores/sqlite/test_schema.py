"""Opening files: what cannot be used is refused with an error message that says what to do, and is not changed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import apsw
import pytest

from perdure.stores.sqlite import schema
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing.contract.builders import load, refused, run, worker


async def message_of_opening(path: str | Path, shards: int = 16) -> str:
    store = SqliteStore(str(path))
    error = await refused(store.open(shards=shards))
    await store.close()
    return str(error)


async def create(path: str | Path) -> None:
    store = SqliteStore(str(path))
    await store.open(shards=16)
    await store.commit([run()])
    await store.close()


def test_a_path_that_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is a directory" in asyncio.run(message_of_opening(tmp_path))
    assert "does not exist; create it first" in asyncio.run(message_of_opening(tmp_path / "nowhere" / "x.db"))
    assert "is not a directory" in asyncio.run(message_of_opening(tmp_path / "file" / "x.db"))
    assert "regular file" in asyncio.run(message_of_opening("/dev/null"))


def test_a_file_without_write_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    asyncio.run(create(path))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert "cannot be written to" in asyncio.run(message_of_opening(path))


def test_a_directory_in_which_no_file_can_be_created_is_refused() -> None:
    assert "cannot create" in asyncio.run(message_of_opening("/proc/perdure-test.db"))


def test_an_empty_or_memory_path_is_refused() -> None:
    for path in ("", ":memory:"):
        with pytest.raises(Exception, match="memory://"):
            SqliteStore(path)


def test_a_file_that_is_not_a_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    text = "Dear reader, " * 1000
    path.write_text(text)
    assert "is not a SQLite database" in asyncio.run(message_of_opening(path))
    assert path.read_text() == text


def test_a_database_of_another_application_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    other = apsw.Connection(str(path))
    other.execute("CREATE TABLE runs (x); INSERT INTO runs VALUES (1)")
    other.close()
    before = path.read_bytes()
    assert "not a store of perdure" in asyncio.run(message_of_opening(path))
    assert path.read_bytes() == before


def test_a_database_with_another_application_id_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    other = apsw.Connection(str(path))
    other.execute("PRAGMA application_id = 42")
    other.close()
    assert "not a store of perdure" in asyncio.run(message_of_opening(path))


def test_a_file_of_the_unreleased_schema_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    old = apsw.Connection(str(path))
    old.execute("CREATE TABLE runs (no INTEGER PRIMARY KEY, has_messages INTEGER)")
    old.execute(f"PRAGMA application_id = {0x50445552}; PRAGMA user_version = 1")
    old.close()
    before = path.read_bytes()
    message = asyncio.run(message_of_opening(path))
    assert "was written by an unreleased version of perdure" in message
    assert "use a new file" in message
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    asyncio.run(create(path))
    apsw.Connection(str(path)).execute("PRAGMA user_version = 99")
    message = asyncio.run(message_of_opening(path))
    assert "schema version 99" in message
    assert f"at most {len(schema.migrations())}" in message
    assert "upgrade perdure" in message


def test_another_number_of_shards_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    asyncio.run(create(path))
    assert "shards=16" in asyncio.run(message_of_opening(path, shards=8))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    asyncio.run(create(path))
    content = bytearray(path.read_bytes())
    content[100:4096] = os.urandom(3996)
    path.write_bytes(content)
    assert "restore it from a backup" in asyncio.run(message_of_opening(path))


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"")
    asyncio.run(create(path))


def test_a_failed_migration_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    sound = schema.migrations()
    monkeypatch.setattr(schema, "migrations", lambda: [*sound, "CREATE TABLE more (x); CREATE TABLE runs (x)"])
    asyncio.run(message_of_opening(path))
    monkeypatch.setattr(schema, "migrations", lambda: sound)
    asyncio.run(create(path))


def test_an_older_file_gets_the_missing_migrations_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    asyncio.run(create(path))
    scripts = [*schema.migrations(), "CREATE TABLE more (x)", "INSERT INTO more VALUES (1)"]
    monkeypatch.setattr(schema, "migrations", lambda: scripts)

    async def reopen() -> None:
        stores = [SqliteStore(str(path)) for _ in range(4)]
        await asyncio.gather(*(store.open(shards=16) for store in stores))
        assert (await load(stores[0])).record.id == "r"
        for store in stores:
            await store.close()

    asyncio.run(reopen())
    reader = apsw.Connection(str(path))
    assert reader.execute("SELECT x FROM more").fetchall() == [(1,)]
    assert reader.pragma("user_version") == len(scripts)


def test_several_stores_can_open_a_new_file_concurrently(tmp_path: Path) -> None:
    async def main() -> None:
        stores = [SqliteStore(str(tmp_path / "new.db")) for _ in range(12)]
        await asyncio.gather(*(store.open(shards=16) for store in stores))
        await asyncio.gather(*(store.join(worker(f"w{n}")) for n, store in enumerate(stores)))
        assert len(await stores[0].workers()) == 12
        await asyncio.gather(*(store.close() for store in stores))

    asyncio.run(main())


# --- SQLite versions that must not share a file -----------------------------------------------------------------------


def test_the_bundled_sqlite_version_can_share_a_file() -> None:
    assert schema.library_version() >= schema.SAFE_TO_SHARE


def test_a_sqlite_version_with_the_wal_reset_bug_locks_the_file_exclusively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "library_version", lambda: (3, 40, 1))
    path = str(tmp_path / "store.db")

    async def main() -> None:
        first = SqliteStore(path)
        await first.open(shards=16)
        await first.commit([run()])
        message = await message_of_opening(path)
        assert "3.40.1" in message
        assert "upgrade apsw" in message
        await first.close()
        second = SqliteStore(path)
        await second.open(shards=16)
        assert (await load(second)).record.id == "r"
        await second.close()

    asyncio.run(main())
