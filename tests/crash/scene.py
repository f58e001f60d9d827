"""A folder with a SQLite store and an effect log, processes that work on it, and a look at what the store holds.

The test is the parent: it starts programs of `tests/crash/programs`, signals them, and reads the file with SQL, so that
what it checks does not come from the code under test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.crash.effects import Effect, effects

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds until a test is given up; none waits that long on purpose
POLL = 0.005


@dataclass(frozen=True)
class Recorded:
    """The latest row of an entry."""

    run: str
    location: str
    kind: str
    status: str
    attempts: int
    value: Any
    due_at: float | None


class Scene:
    """See the module's docstring. Processes that are still there in the end are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.db = folder / "store.db"
        self.log = folder / "effects.log"
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return f"sqlite:///{self.db}"

    # --- processes

    def start(self, program: str, *args: object, talks: bool = False) -> subprocess.Popen[bytes]:
        """Start `tests/crash/programs/<program>.py URL LOG ARGS...`; with `talks`, one can write to it and read."""
        path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        with (self.folder / "stderr.log").open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", f"tests.crash.programs.{program}", self.url, str(self.log), *map(str, args)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else None,
                stderr=errors,
            )
        self.processes.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)  # ends a stopped one too
            process.wait(PATIENCE)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    # --- waiting and looking

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Poll until the condition holds; what it returned."""
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"waited in vain: {what}\n{self.explanation()}")
            time.sleep(POLL)
        return found

    def until_ended(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until a process has ended by itself, well."""
        self.until(lambda: process.poll() is not None, "the program ends")
        assert process.returncode == 0, self.explanation()

    def explanation(self) -> str:
        """What to show when something went wrong."""
        errors = self.folder / "stderr.log"
        runs = self.query("SELECT id, status, owner, wake_at, recoveries, waits FROM runs WHERE ended_at IS NULL")
        workers = self.query("SELECT id, pid, lease_until, gone FROM workers")
        said = errors.read_text()[-6000:] if errors.exists() else ""
        return f"workers: {workers}\nunfinished runs: {runs[:20]}\n{said}"

    def effects(self, what: str | None = None) -> list[Effect]:
        return effects(self.log, what)

    def query(self, sql: str, *values: object) -> list[Any]:
        """Rows of the store, read without its code. Leaves the write-ahead log as it is, as a dead process does."""
        if not self.db.exists():
            return []
        connection = apsw.Connection(str(self.db))
        try:
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            connection.set_busy_timeout(int(PATIENCE * 1000))
            if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'history'").get:
                return []  # killed before the file was made
            return connection.execute(sql, tuple(values)).fetchall()
        finally:
            connection.close()

    def can_write(self) -> bool:
        """Whether nobody holds the write lock right now."""
        connection = apsw.Connection(str(self.db))
        try:
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            connection.execute("BEGIN IMMEDIATE; ROLLBACK")
            return True
        except apsw.BusyError:
            return False
        finally:
            connection.close()

    def history(self) -> dict[tuple[str, str], Recorded]:
        """The latest row of every entry, by run and location."""
        rows = self.query(
            "SELECT run, location, kind, status, attempts, value, due_at FROM history ORDER BY run, position"
        )
        return {(row[0], row[1]): Recorded(*row) for row in rows}

    def recorded(self) -> frozenset[tuple[str, str]]:
        """The steps that have a result."""
        return frozenset(
            key for key, entry in self.history().items() if entry.kind == "step" and entry.status == "succeeded"
        )

    def statuses(self) -> dict[str, str]:
        return dict(self.query("SELECT id, status FROM runs"))

    def results(self) -> dict[str, Any]:
        return dict(self.query("SELECT id, result FROM runs WHERE status = 'succeeded'"))

    def all_succeeded(self) -> bool:
        statuses = self.statuses()
        return bool(statuses) and set(statuses.values()) == {"succeeded"}


@contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    made = Scene(folder)
    try:
        yield made
    finally:
        made.close()
