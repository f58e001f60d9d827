"""The effect log: a file of all step effects, synced before a step returns, so that a kill cannot hide an effect."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from perdure import current_step


@dataclass(frozen=True)
class Effect:
    """One execution of a step's body."""

    run: str
    location: str
    attempt: int
    pid: int
    what: str

    @property
    def step(self) -> tuple[str, str]:
        return (self.run, self.location)


def effect(path: str, what: str = "done") -> None:
    """Append one line for the step that is executing, and return when it is on disk."""
    now = current_step()
    line = f"{now.run_id} {now.location} {now.attempt} {os.getpid()} {what}\n"
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(log, line.encode())
        os.fsync(log)
    finally:
        os.close(log)


def effects(path: Path, what: str | None = None) -> list[Effect]:
    """All lines in the order in which they happened, or those of one kind. A line without its end has not happened."""
    text = path.read_text() if path.exists() else ""
    lines = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    found = [Effect(run, location, int(attempt), int(pid), kind) for run, location, attempt, pid, kind in lines]
    return [line for line in found if what is None or line.what == what]
