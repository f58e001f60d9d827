"""Files of a SQLite store: only their owner can read them, and a store whose file was deleted or replaced says so."""

import asyncio
import contextlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure import Client, Context, Engine, EngineConfig, StoreError, step, workflow
from perdure.errors import PerdureError
from perdure.stores.sqlite import schema
from perdure.stores.sqlite.store import SqliteStore

PRIVATE = 0o600


@step
async def work(n: int) -> int:
    return n


@workflow(name="files.works")
async def works(ctx: Context, n: int) -> int:
    await work(n)
    if n:
        await ctx.receive("go")
    return await work(n + 1)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o277])
def test_new_files_are_private_whatever_the_umask(tmp_path, mask):
    async def main() -> None:
        async with Engine(f"sqlite:///{tmp_path}/shop.db") as engine:
            assert await engine.execute(works, 0) == 1
            assert modes(tmp_path) == dict.fromkeys(("shop.db", "shop.db-wal", "shop.db-shm"), PRIVATE)
            assert stat.S_IMODE((tmp_path / "shop.db-peers").stat().st_mode) == 0o700

    with umask(mask):
        asyncio.run(main())
    assert modes(tmp_path) == {"shop.db": PRIVATE}


def test_new_files_are_private_if_a_command_creates_them(tmp_path):
    command = [sys.executable, "-m", "perdure.cli", "migrate", "--store", f"sqlite:///{tmp_path}/shop.db"]
    with umask(0o000):
        subprocess.run(command, check=True, capture_output=True)
    assert modes(tmp_path) == {"shop.db": PRIVATE}


def test_lock_file_of_an_old_library_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "library_version", lambda: (3, 40, 0))

    async def main() -> None:
        store = SqliteStore(str(tmp_path / "shop.db"))
        await store.open(shards=8)
        assert set(modes(tmp_path).values()) == {PRIVATE}
        assert "shop.db-sole-use" in modes(tmp_path)
        await store.close()

    with umask(0o000):
        asyncio.run(main())


def test_existing_files_keep_their_mode(tmp_path):
    file = tmp_path / "shop.db"
    file.touch()
    file.chmod(0o640)

    async def main() -> None:
        async with Engine(f"sqlite:///{file}") as engine:
            assert await engine.execute(works, 0) == 1
            assert modes(tmp_path) == dict.fromkeys(("shop.db", "shop.db-wal", "shop.db-shm"), 416)

    asyncio.run(main())


def delete(file: Path) -> None:
    file.unlink()


def move(file: Path) -> None:
    file.rename(file.with_suffix(".old"))


def replace(file: Path) -> None:
    shutil.copy(file, file.with_suffix(".copy"))
    file.with_suffix(".copy").rename(file)


def replace_folder(file: Path) -> None:
    file.parent.rename(file.parent.with_suffix(".old"))
    file.parent.write_text("not a folder")


LOST = [
    (delete, "was deleted or moved while the store was open"),
    (move, "was deleted or moved while the store was open"),
    (replace, "was replaced by another file while the store was open"),
    (replace_folder, "was deleted or moved while the store was open"),
]


@pytest.mark.parametrize(("lose", "words"), LOST)
@pytest.mark.parametrize("kind", [Engine, Client])
def test_every_call_fails_when_the_file_was_deleted_or_replaced(tmp_path, kind, lose, words):
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "shop.db"

    def calls(client: Any) -> Iterator[Any]:
        yield client.status("x")
        yield client.start(works, 1, id="y")
        yield client.send("x", "go")
        yield client.cancel("x")
        yield client.runs()
        yield client.dead_letters()
        yield client.remove_dead_letter("1")
        yield client.emit("topic")
        yield client.result("x")

    async def main() -> None:
        async with Engine(f"sqlite:///{file}") as engine:
            await engine.start(works, 1, id="x")
        async with kind(f"sqlite:///{file}") as client:
            assert await client.status("x") is not None
            lose(file)
            for call in calls(client):
                with pytest.raises(StoreError, match=words) as caught:
                    await asyncio.wait_for(call, 10)
                assert not caught.value.retryable
                assert repr(str(file)) in str(caught.value)

    asyncio.run(main())


@pytest.mark.parametrize("lose", [delete, replace])
def test_write_of_a_caller_after_the_loss_of_the_file_is_not_stored(tmp_path, lose):
    file = tmp_path / "shop.db"

    async def main() -> None:
        async with Engine(f"sqlite:///{file}") as engine:
            assert await engine.execute(works, 0, id="stored") == 1
            lose(file)
            with pytest.raises(StoreError):
                await engine.execute(works, 0, id="lost")
        async with Engine(f"sqlite:///{file}") as engine:
            assert await engine.status("lost") is None
            assert await engine.execute(works, 0, id="new") == 1

    asyncio.run(main())


def test_run_that_executes_when_the_file_is_deleted_stops(tmp_path):
    """Its turns, one per commit, are not checked each: the thread of the connection notices the loss."""
    file = tmp_path / "shop.db"
    executed = []

    @step
    async def counted(n: int) -> None:
        executed.append(n)
        await asyncio.sleep(0.001)

    @workflow(name="files.endless")
    async def endless(ctx: Context) -> None:
        for n in range(1_000_000):
            await counted(n)

    async def main() -> None:
        async with Engine(f"sqlite:///{file}") as engine:
            run = await engine.start(endless, id="x")
            while len(executed) < 5:
                await asyncio.sleep(0.01)
            delete(file)
            with pytest.raises(StoreError, match="was deleted or moved"):
                await asyncio.wait_for(run.result(), 60)

    asyncio.run(main())


def test_log_of_a_replacement_is_not_deleted_when_the_old_store_closes(tmp_path):
    file = tmp_path / "shop.db"

    async def main() -> None:
        old = Client(f"sqlite:///{file}")
        await old.open()
        await old.start(works, 1, id="old")
        for path in tmp_path.iterdir():
            if path.is_file():
                path.unlink()
        async with Client(f"sqlite:///{file}") as new:
            await new.start(works, 1, id="new")
            await old.shutdown()
            assert (tmp_path / "shop.db-wal").exists()
        async with Client(f"sqlite:///{file}") as new:
            assert await new.status("new") == "pending"

    asyncio.run(main())


def test_caller_that_waits_gets_the_error_of_an_engine_whose_file_is_lost(tmp_path):
    file = tmp_path / "shop.db"
    config = EngineConfig(sweep_interval=0.05, lease=0.3)

    async def main() -> None:
        async with Engine(f"sqlite:///{file}", config=config) as engine:
            run = await engine.start(works, 1, id="x")
            waiting = asyncio.ensure_future(run.result())
            while await run.status() != "suspended":
                await asyncio.sleep(0.01)
            delete(file)
            with pytest.raises(StoreError, match="was deleted or moved"):
                await asyncio.wait_for(waiting, 30)

    asyncio.run(main())


def test_store_that_is_opened_again_uses_the_file_that_is_there(tmp_path):
    file = tmp_path / "shop.db"

    async def main() -> None:
        store = SqliteStore(str(file))
        async with Client(store) as client:
            delete(file)
            with pytest.raises(StoreError):
                await client.status("x")
        async with Client(store) as client:
            assert await client.status("x") is None
            await client.start(works, 1, id="x")
        async with Client(f"sqlite:///{file}") as client:
            assert await client.status("x") == "pending"

    asyncio.run(main())


@pytest.mark.parametrize("name", ["x" * 300, "a" * 5000, "\ud800.db", "nothing/\x01/x.db"])
def test_odd_path_is_refused_with_an_error_of_perdure(tmp_path, name):
    async def main() -> None:
        with pytest.raises(PerdureError):
            await Client(f"sqlite:///{tmp_path}/{name}").open()

    asyncio.run(main())
