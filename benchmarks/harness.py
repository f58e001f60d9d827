"""Workloads and their rounds.

A workload has subjects (perdure on SQLite, the raw store, ...) that are measured side by side. A round measures each of
them once, in order, each in a fresh process; rounds follow each other, so that whatever slows the machine for a while
slows all subjects. A figure is computed per round, ratios too, and reported as the median over the rounds with the
lowest and the highest.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 900.0  # seconds until a subject is given up

Measures = Mapping[str, float]
"""What a subject measured, by name."""
Round = Mapping[str, Measures]
"""The measures of one round, by subject."""
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Setting:
    """What a subject gets: how much to do and where.

    `folder` is new in each round and shared by its subjects, `prepared` is what the workload's `prepare` has filled.
    """

    folder: Path
    prepared: Path
    sizes: Sizes

    @classmethod
    def from_json(cls, text: str) -> Setting:
        given = json.loads(text)
        return cls(Path(given["folder"]), Path(given["prepared"]), given["sizes"])

    def to_json(self) -> str:
        return json.dumps({"folder": str(self.folder), "prepared": str(self.prepared), "sizes": dict(self.sizes)})


Subject = Callable[[Setting], Measures]


@dataclass(frozen=True)
class Figure:
    """One line of the report, computed from a round. The target is for the reader; nothing fails when it is missed."""

    title: str
    unit: str
    value: Callable[[Round], float]
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Workload:
    """`prepare` runs once, before the first round; `quick` sizes only show that it works. The title names sizes."""

    title: str
    subjects: Mapping[str, Subject]
    figures: Sequence[Figure]
    sizes: Sizes
    quick: Sizes
    prepare: Subject | None = None


@dataclass(frozen=True)
class FigureResult:
    """A figure over all rounds."""

    title: str
    unit: str
    median: float
    low: float
    high: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        """Whether the median is where it should be; True without a target."""
        return (self.at_least is None or self.median >= self.at_least) and (
            self.at_most is None or self.median <= self.at_most
        )


@dataclass(frozen=True)
class Result:
    """A workload as it was measured. Self-contained: results of different days may lie in one file."""

    workload: str
    title: str
    measured_at: str
    machine: Mapping[str, Any]
    sizes: Sizes
    rounds: Sequence[Round]
    figures: Sequence[FigureResult] = field(default=())

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Result:
        return cls(**{**given, "figures": [FigureResult(**figure) for figure in given["figures"]]})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def workload(name: str) -> Workload:
    """The workload in the file of this name."""
    found: Workload = importlib.import_module(f"benchmarks.workloads.{name}").WORKLOAD
    return found


def measure(name: str, *, rounds: int, quick: bool, data: Path, progress: Callable[[str], None]) -> Sequence[Round]:
    """Run all rounds of a workload, with its files in a folder below `data` that is removed in the end."""
    chosen = workload(name)
    sizes = chosen.quick if quick else chosen.sizes
    measured = []
    with tempfile.TemporaryDirectory(dir=data, prefix=f"{name}-") as folder:
        prepared = Path(folder) / "prepared"
        prepared.mkdir()
        if chosen.prepare is not None:
            progress(f"{name}: preparing")
            in_a_process_of_its_own(name, "prepare", Setting(prepared, prepared, sizes))
        for number in range(1, rounds + 1):
            with tempfile.TemporaryDirectory(dir=folder, prefix="round-") as own:
                setting = Setting(Path(own), prepared, sizes)
                measured.append(
                    {
                        subject: _measured(name, subject, setting, f"round {number} of {rounds}", progress)
                        for subject in chosen.subjects
                    }
                )
    return measured


def _measured(name: str, subject: str, setting: Setting, which: str, progress: Callable[[str], None]) -> Measures:
    progress(f"{name}: {which}, {subject}")
    return in_a_process_of_its_own(name, subject, setting)


def in_a_process_of_its_own(name: str, subject: str, setting: Setting) -> Measures:
    """The measures that a subject prints; its output is shown if it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.round", name, subject, setting.to_json()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if done.returncode != 0:
        raise SystemExit(f"{name}, {subject}: failed with {done.returncode}\n{done.stdout}{done.stderr}")
    measures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measures


def figures_of(chosen: Workload, rounds: Sequence[Round]) -> list[FigureResult]:
    """Each figure computed per round, then summed up over the rounds."""
    results = []
    for figure in chosen.figures:
        values = [figure.value(measured) for measured in rounds]
        median = statistics.median(values)
        results.append(
            FigureResult(figure.title, figure.unit, median, min(values), max(values), figure.at_least, figure.at_most)
        )
    return results
