"""Golden histories: recorded runs of workflows.py on one version of Python, replayed on every other version.

    python -m tests.runner.golden_histories record    writes golden/python3.NN.json for this interpreter
    python -m tests.runner.golden_histories check     replays every golden history; exits with 1 if one differs

A history that no longer replays would be a run that is held after an upgrade. Record again only for new workflows, or
for a format change that has a migration.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from perdure.model.records import Entry, ErrorRecord
from tests.runner.turn_driver import Play
from tests.runner.workflows import WORKFLOWS

FOLDER = Path(__file__).parent / "golden"
SEEDS = (1, 2)


class Point(msgspec.Struct, frozen=True):
    """State of a run after a turn: the number of written rows, the time, and the visible state."""

    written: int
    now: float
    choice: str
    state: str


class Golden(msgspec.Struct, frozen=True):
    workflow: str
    seed: int
    rows: list[Entry]
    points: list[Point]


def recorded(fn: Any, seed: int) -> Golden:
    """Run a workflow in a seeded order and return its golden history."""
    randomness = random.Random(seed)
    play = Play(fn, seed=seed).begin()
    points = [Point(len(play.rows), play.now, "", _state(play))]
    while play.alive and (choices := play.choices()):
        choice = randomness.choice(choices)
        play.move(choice)
        points.append(Point(len(play.rows), play.now, choice, _state(play)))
    return Golden(fn.__name__, seed, [_without_traceback(row) for row in play.rows], points)


def faults_of(golden: Golden) -> Iterator[str]:
    """Return the differences: replay the rows at every point, and repeat the same choices from the start."""
    fn = next(found for found in WORKFLOWS if found.__name__ == golden.workflow)
    for number, point in enumerate(golden.points):
        cold = Play(fn, seed=golden.seed, rows=golden.rows[: point.written], now=point.now).begin()
        if _state(cold) != point.state:
            yield f"{golden.workflow}, seed {golden.seed}, turn {number}: {_state(cold)} is not {point.state}"
        cold.close()
    live = Play(fn, seed=golden.seed).begin()
    for point in golden.points[1:]:
        live.move(point.choice)
    if [_without_traceback(row) for row in live.rows] != golden.rows:
        yield f"{golden.workflow}, seed {golden.seed}: the same choices lead to another history"


def read(path: Path) -> list[Golden]:
    return msgspec.json.decode(path.read_bytes(), type=list[Golden])


def _state(play: Play) -> str:
    return repr(play.state())


def _without_traceback(row: Entry) -> Entry:
    """Return the row without tracebacks, which contain paths of the recording machine."""
    if row.error is None:
        return row
    error = row.error
    plain = ErrorRecord(error.type, error.message, location=error.location, qualified=error.qualified)
    return msgspec.structs.replace(row, error=plain)


def main(what: str) -> int:
    if what == "record":
        path = FOLDER / f"python{sys.version_info[0]}.{sys.version_info[1]}.json"
        found = [recorded(fn, seed) for fn in WORKFLOWS for seed in SEEDS]
        path.write_bytes(b"[\n" + b",\n".join(msgspec.json.encode(each) for each in found) + b"\n]\n")
        return 0
    faults = [
        f"{path.name}: {fault}" for path in FOLDER.glob("*.json") for each in read(path) for fault in faults_of(each)
    ]
    sys.stdout.write("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
