"""A store, an effect log, processes that use them, and readers of the store.

The test is the parent: it starts programs of `tests/crash/programs`, signals them, and reads the store directly
(`tests/crash/store_readers.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.crash.effect_log import Effect, effects
from tests.crash.store_readers import TIMEOUT_SECONDS, Recorded, StoreReader, reader_of

ROOT = Path(__file__).resolve().parents[2]
STORES = ("sqlite", "postgres", "redis")
POLL = 0.005


class Scenario:
    """Starts and signals test programs. Processes that still run at the end are killed."""

    def __init__(self, folder: Path, book: StoreReader) -> None:
        self.folder = folder
        self.book = book
        self.log = folder / "effects.log"
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return self.book.url

    # --- processes

    def start(self, program: str, *args: object, talks: bool = False) -> subprocess.Popen[bytes]:
        """Start `tests/crash/programs/<program>.py URL LOG ARGS...`; with `talks`, its stdin and stdout are pipes."""
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
        process.wait(TIMEOUT_SECONDS)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)  # ends a stopped one too
            process.wait(TIMEOUT_SECONDS)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    # --- polling and reading

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Poll until the condition holds, and return its value."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (found := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"waited in vain: {what}\n{self.explanation()}")
            time.sleep(POLL)
        return found

    def until_ended(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until a process has ended with exit code 0."""
        self.until(lambda: process.poll() is not None, "the program ends")
        assert process.returncode == 0, self.explanation()

    def explanation(self) -> str:
        """Return the details for a failed assertion."""
        errors = self.folder / "stderr.log"
        runs = [run for run in self.book.runs() if run.ended_at is None]
        said = errors.read_text()[-6000:] if errors.exists() else ""
        return f"workers: {self.book.workers()}\nunfinished runs: {runs[:20]}\n{said}"

    def effects(self, what: str | None = None) -> list[Effect]:
        return effects(self.log, what)

    def history(self) -> dict[tuple[str, str], Recorded]:
        """The latest row of every entry, by run and location."""
        return {(row.run, row.location): row for row in self.book.history()}

    def recorded(self) -> frozenset[tuple[str, str]]:
        """The steps that have a result."""
        return frozenset(
            key for key, entry in self.history().items() if entry.kind == "step" and entry.status == "succeeded"
        )

    def statuses(self) -> dict[str, str]:
        return {run.id: run.status for run in self.book.runs()}

    def results(self) -> dict[str, Any]:
        return {run.id: run.result for run in self.book.runs() if run.status == "succeeded"}

    def all_succeeded(self) -> bool:
        statuses = self.statuses()
        return bool(statuses) and set(statuses.values()) == {"succeeded"}


@contextmanager
def scenario(folder: Path, kind: str) -> Iterator[Scenario]:
    with reader_of(kind, folder) as book:
        made = Scenario(folder, book)
        try:
            yield made
        finally:
            made.close()
