"""Base of the servers that tests start: a process in its own directory, shared by one test session.

A `ServerProcess` keeps its data while it is stopped. `shared` gives all processes of one test session, xdist workers
included, the same server. Each of them holds a lock on a file while it lives. A guard process waits until no lock is
held, then stops the server and removes its files, also if the session is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 60.0  # seconds


# --- one server ----------------------------------------------------------------------------------------------------


class ServerProcess(ABC):
    """A server process. A subclass defines how it starts and when it is ready."""

    name: ClassVar[str]
    in_order: ClassVar[signal.Signals] = signal.SIGTERM
    at_once: ClassVar[signal.Signals] = signal.SIGKILL

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str: ...

    def start(self) -> None:
        """Start the server, create its files if there are none, and wait until it is ready."""
        self._make()
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._options(),
            )
        wait_until(self._ready, f"{self.name} answers")

    def stop(self, how: signal.Signals | None = None) -> None:
        """`in_order` by default; `at_once` is as a crash would be."""
        if self._process is not None:
            self._process.send_signal(how or self.in_order)
            self._process.wait()
            self._process = None

    def restart(self, how: signal.Signals | None = None) -> None:
        self.stop(how)
        self.start()

    def remove(self) -> None:
        self.stop(self.at_once)
        shutil.rmtree(self.folder, ignore_errors=True)

    def said(self) -> str:
        return (self.folder / "server.log").read_text("utf-8", "replace")

    @abstractmethod
    def _make(self) -> None:
        """Create the missing files."""

    @abstractmethod
    def _command(self) -> Sequence[str | Path]: ...

    def _options(self) -> dict[str, Any]:
        """Return additional `Popen` options."""
        return {}

    @abstractmethod
    def _answers(self) -> bool: ...

    def _ready(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"{self.name} did not start:\n{self.said()[-4000:]}")
        return self._answers()


def wait_until(holds: Callable[[], bool], what: str, poll: float = 0.02) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited in vain: {what}")
        time.sleep(poll)


# --- one server for a session ----------------------------------------------------------------------------------------

_held: list[IO[str]] = []  # open, and so locked, until this process ends


def shared(kind: str) -> Path:
    """The folder of this session's server of a kind (a module beside this one), which is started if there is none."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    note = Path(tempfile.gettempdir()) / f"perdure-{kind}-{os.getuid()}-{session}"
    with note.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        folder = file.read()
        if not folder or not _hold(Path(folder)):
            folder = tempfile.mkdtemp(prefix=f"perdure-{kind}-")
            (Path(folder) / "users").touch()
            assert _hold(Path(folder))
            _start_guarded(kind, Path(folder), note)
            file.truncate(0)
            file.write(folder)
            file.flush()
    return Path(folder)


def _hold(folder: Path) -> bool:
    """Take the lock that keeps the server alive. Return False if the guard has stopped it."""
    try:
        users = (folder / "users").open("r")
        fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    _held.append(users)
    return True


def _start_guarded(kind: str, folder: Path, note: Path) -> None:
    with (folder / "guard.log").open("wb") as log:
        guard = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.server_process", kind, folder, note],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert guard.stdout is not None
    with guard.stdout as answer:
        if answer.readline() != b"ready\n":
            raise RuntimeError((folder / "guard.log").read_text("utf-8", "replace"))
    guard.returncode = 0  # outlives this process on purpose: no wait


def _guard(kind: str, folder: Path, note: Path) -> None:
    """Run the server while any process holds its lock."""
    server: ServerProcess = importlib.import_module(f"tests.servers.{kind}").session_server(folder)
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
    _guard(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
