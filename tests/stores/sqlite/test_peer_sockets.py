"""Datagrams between processes that share a file: files, permissions, and what happens when they do not work."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from perdure.stores.sqlite import peer_sockets
from perdure.stores.sqlite import store as store_module
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing.contract.builders import entry, run, turn, worker
from perdure.testing.contract.streams import append, item

HOUR = 3600.0
TIMEOUT_SECONDS = 60.0

OPEN_AND_WAIT = """
import asyncio, os, sys
from perdure.stores.sqlite.store import SqliteStore

async def main():
    store = SqliteStore(sys.argv[1])
    await store.open(shards=16)
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    if sys.argv[2] == "close":
        await store.close()
    return store

store = asyncio.run(main())
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(len(os.listdir(sys.argv[1] + "-peers")), flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s.db")


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "POLL_INTERVAL_SECONDS", HOUR)


@asynccontextmanager
async def opened(path: str) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, synchronous="off")
    await store.open(shards=16)
    try:
        yield store
    finally:
        await store.close()


def sockets_of(path: str) -> list[Path]:
    folder = Path(f"{path}-peers")
    return sorted(folder.iterdir()) if folder.exists() else []


def start(path: str, how: str) -> subprocess.Popen[str]:
    """Start a process that has the file open until it gets a line, and then ends as `how` says."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", OPEN_AND_WAIT, path, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


async def hint_of(store: SqliteStore, other: SqliteStore, run_id: str = "new") -> frozenset[str] | None:
    """Return the change hint that `store` gets when `other` creates a run."""
    hints: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
    unsubscribe = store.on_change(hints.put_nowait)
    await other.commit([run(run_id)])
    hint = await asyncio.wait_for(hints.get(), TIMEOUT_SECONDS)
    unsubscribe()
    return hint


# --- hints


def test_change_hint_names_the_runs_and_needs_no_poll(path: str, no_polls: None) -> None:
    async def main() -> None:
        async with opened(path) as store, opened(path) as other:
            assert await hint_of(store, other) == frozenset(["new"])
            assert await hint_of(other, store, "back") == frozenset(["back"])

    asyncio.run(main())


def test_output_is_sent_to_followers_only(path: str, no_polls: None) -> None:
    async def main() -> None:
        async with opened(path) as store, opened(path) as other:
            await store.join(worker("a"))
            await store.commit([run(owner="a")])
            sent: list[bytes] = []
            other._sockets._on_datagram = sent.append
            await store.commit([append(item())])
            await store.commit([turn(0, entry())])
            assert await hint_of(other, other) == frozenset(["new"])  # all datagrams would have arrived before
            assert sent == []

    asyncio.run(main())


def test_store_receives_on_the_event_loop_that_opens_it_again(path: str, no_polls: None) -> None:
    """The first loop is closed without the store."""
    store, other = SqliteStore(path), SqliteStore(path)
    asyncio.run(store.open(shards=16))

    async def main() -> None:
        await store.open(shards=16)
        await other.open(shards=16)
        assert await hint_of(store, other) == frozenset(["new"])
        for each in (store, store, other):
            await each.close()

    asyncio.run(main())
    assert sockets_of(path) == []


# --- files


def test_socket_is_private_and_removed_with_its_directory(path: str) -> None:
    async def main() -> None:
        async with opened(path):
            (created,) = sockets_of(path)
            assert stat.S_ISSOCK(created.stat().st_mode)
            assert stat.S_IMODE(created.stat().st_mode) == 0o600
            assert stat.S_IMODE(created.parent.stat().st_mode) == 0o700
            async with opened(path):
                assert len(sockets_of(path)) == 2
            assert sockets_of(path) == [created]
        assert not created.parent.exists()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["close", "exit without close"])
def test_process_that_ends_removes_its_socket(how: str, path: str) -> None:
    process = start(path, how)
    assert len(sockets_of(path)) == 1
    process.communicate("\n", TIMEOUT_SECONDS)
    assert process.returncode == 0
    assert not Path(f"{path}-peers").exists()


def test_forked_child_leaves_the_socket_of_its_parent(path: str) -> None:
    process = start(path, "fork")
    assert process.communicate("\n", TIMEOUT_SECONDS)[0] == "1\n"
    assert process.returncode == 0
    assert sockets_of(path) == []


def test_socket_of_a_killed_process_is_removed_by_the_next_one(path: str) -> None:
    process = start(path, "killed")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_SECONDS)
    (stale,) = sockets_of(path)

    async def main() -> None:
        async with opened(path) as store:
            assert stale not in sockets_of(path)
            assert not store._sockets.has_peers()

    asyncio.run(main())


def test_socket_of_a_process_killed_later_is_removed_by_the_next_send(path: str) -> None:
    async def main() -> None:
        async with opened(path) as store:
            process = start(path, "killed")
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while not store._sockets.has_peers():
                    await asyncio.sleep(0)
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=TIMEOUT_SECONDS)
            await store.commit([run("new")])
            assert len(sockets_of(path)) == 1
            assert not store._sockets.has_peers()

    asyncio.run(main())


def test_other_files_in_the_directory_are_left_alone(path: str) -> None:
    folder = Path(f"{path}-peers")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")

    async def main() -> None:
        async with opened(path) as store:
            await store.commit([run("new")])

    asyncio.run(main())
    assert (folder / "notes.txt").read_text() == "mine"


# --- without datagrams, polling finds the change


def check_polling(path: str) -> None:
    async def main() -> None:
        async with opened(path) as store, opened(path) as other:
            assert not other._sockets.has_peers()
            assert await hint_of(store, other) is None, "a poll does not know which run has changed"

    asyncio.run(main())


def test_long_path_has_no_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    check_polling(str(folder / "s.db"))


def test_system_without_unix_sockets(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_sockets, "socket", SimpleNamespace())
    check_polling(path)
    assert not Path(f"{path}-peers").exists()


def test_event_loop_that_cannot_watch_sockets(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the Proactor event loop on Windows."""

    def refuse(*given: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_reader", refuse)
    check_polling(path)
    assert sockets_of(path) == []


def test_directory_that_cannot_be_created(path: str) -> None:
    Path(f"{path}-peers").write_text("in the way")
    check_polling(path)


COMMIT_AS_ANOTHER_USER = """
import asyncio, os, sys
from perdure.stores.sqlite import schema
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing.contract.builders import run

async def commit(path):
    store = SqliteStore(path)
    await store.open(shards=16)
    assert not store._sockets.has_peers()
    await store.commit([run("theirs")])
    await store.close()

scripts = schema.migrations()
schema.migrations = lambda: scripts
asyncio.run(commit(sys.argv[1] + "-unrelated"))  # imports all: the other user may not read the modules
os.setuid(65534)
asyncio.run(commit(sys.argv[1]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_process_of_another_user_is_found_by_polling() -> None:
    async def main(folder: Path) -> None:
        path = str(folder / "s.db")
        async with opened(path) as store:
            for file in folder.iterdir():
                if file.is_file():
                    file.chmod(0o666)
            hints: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
            store.on_change(hints.put_nowait)
            command = [sys.executable, "-c", COMMIT_AS_ANOTHER_USER, path]
            process = await asyncio.create_subprocess_exec(*command, cwd="/")
            assert await asyncio.wait_for(process.wait(), TIMEOUT_SECONDS) == 0
            assert await asyncio.wait_for(hints.get(), TIMEOUT_SECONDS) is None
            assert (await store.records(["theirs"]))[0] is not None

    with tempfile.TemporaryDirectory() as folder:  # pytest's directories are closed to other users
        Path(folder).chmod(0o777)
        asyncio.run(main(Path(folder)))


def test_directory_of_another_user_is_not_used(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(f"{path}-peers")
    folder.mkdir()
    folder.chmod(0o500)
    if os.geteuid() == 0:  # root may write into any directory
        monkeypatch.setattr(peer_sockets, "_bind", refuse_to_bind)
    check_polling(path)


def refuse_to_bind(created: socket.socket, path: Path) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_process_that_does_not_read_blocks_no_sender(path: str, no_polls: None) -> None:
    async def main() -> None:
        async with opened(path) as store, opened(path) as other:
            asyncio.get_running_loop().remove_reader(other._sockets._socket.fileno())  # type: ignore[union-attr]
            for _ in range(20_000):
                store._sockets.send(b"x" * 100)
            await store.commit([run("new")])
            assert store._sockets.has_peers(), "it is alive"

    asyncio.run(main())


def test_garbage_is_ignored(path: str, no_polls: None) -> None:
    async def main() -> None:
        async with opened(path) as store, opened(path) as other:
            for garbage in (b"", b"\xff", b"[]", b'["../../x","join",[]]', b"x" * 2 * peer_sockets.MAX_DATAGRAM_BYTES):
                other._sockets.send(garbage)
            assert await hint_of(store, other) == frozenset(["new"])
            assert store._sockets._peers == {other._sockets.name}

    asyncio.run(main())
