"""Workloads, and what comes of their rounds.

A workload has subjects that are measured side by side: engines (`engines.py`), and subjects of its own (the raw store,
the engine in memory, ...). A round measures each of them once, each in a fresh process (`rounds.py`); rounds follow
each other, so that whatever slows the machine for a while slows all subjects. A figure is computed per round, ratios
too, and reported as the median over the rounds with the lowest and the highest.

Only the standard library: peers import this in environments of their own.
"""

from __future__ import annotations

import importlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.workloads import MODULES

if TYPE_CHECKING:
    from benchmarks.comparison import Comparison

ROOT = Path(__file__).resolve().parents[1]
UNSCALED = ("at_once", "settle_ms")

Measures = Mapping[str, float]
"""What a subject measured, by name."""
Round = Mapping[str, Measures]
"""The measures of one round, by subject."""
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Setting:
    """What a subject gets: how much to do and where.

    `folder` is new in each round and shared by its subjects, `prepared` is what the workload's `prepare` has filled.
    `urls` are those of servers, where nobody else has been: `postgres` a database, `redis` an empty server.
    """

    folder: Path
    prepared: Path
    sizes: Sizes
    urls: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> Setting:
        given = json.loads(text)
        return cls(Path(given["folder"]), Path(given["prepared"]), given["sizes"], given["urls"])

    def to_json(self) -> str:
        return json.dumps(
            {
                "folder": str(self.folder),
                "prepared": str(self.prepared),
                "sizes": dict(self.sizes),
                "urls": dict(self.urls),
            }
        )


Subject = Callable[[Setting], Measures]


@dataclass(frozen=True)
class Figure:
    """One line of the report, computed from a round. The target is for the reader; nothing fails when it is missed.

    `subject` is set where the figure is nothing but what that subject measured.
    """

    title: str
    unit: str
    value: Callable[[Round], float]
    at_least: float | None = None
    at_most: float | None = None
    subject: str | None = None


@dataclass(frozen=True)
class Workload:
    """`prepare` runs once, before the first round; `quick` sizes only show that it works. The title names sizes.

    `needs` are the servers of subjects that use any. With `compared`, every engine that can do the workload is measured
    too, by the function of its name in `driving.py`. With `one_place`, the subjects of a round share servers as well as
    a folder: some go on with what another left.
    """

    title: str
    subjects: Mapping[str, Subject]
    figures: Sequence[Figure]
    sizes: Sizes
    quick: Sizes
    prepare: Subject | None = None
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    compared: Sequence[Comparison] = ()
    one_place: bool = False

    def sized(self, scale: float) -> Sizes:
        """The sizes at a scale: 1 is what figures are made of, 0 the quick ones, below which nothing goes.

        What makes the workload what it is, and not how long it takes, is not scaled.
        """
        if scale == 0:
            return self.quick
        scaled = {name: max(self.quick[name], round(size * scale)) for name, size in self.sizes.items()}
        return scaled | {name: self.sizes[name] for name in UNSCALED if name in self.sizes}


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
    subject: str | None = None

    @property
    def met(self) -> bool:
        """Whether the median is where it should be; True without a target."""
        return (self.at_least is None or self.median >= self.at_least) and (
            self.at_most is None or self.median <= self.at_most
        )


@dataclass(frozen=True)
class Result:
    """A workload as it was measured. Self-contained: results of different days may lie in one file.

    `engines` says of each engine that was measured what it is; `missing` of what was not measured, why.
    """

    workload: str
    title: str
    measured_at: str
    machine: Mapping[str, Any]
    sizes: Sizes
    rounds: Sequence[Round]
    figures: Sequence[FigureResult] = field(default=())
    engines: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Result:
        return cls(**{**given, "figures": [FigureResult(**figure) for figure in given["figures"]]})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def workload(name: str) -> Workload:
    """The workload in the file of this name."""
    found: Workload = importlib.import_module(f"benchmarks.workloads.{MODULES[name]}").WORKLOAD
    return found


def figures_of(figures: Sequence[Figure], rounds: Sequence[Round]) -> list[FigureResult]:
    """Each figure computed per round, then summed up over the rounds; without those of subjects not measured."""
    results = []
    for figure in figures:
        try:
            values = [figure.value(measured) for measured in rounds]
        except KeyError:
            continue
        results.append(
            FigureResult(
                title=figure.title,
                unit=figure.unit,
                median=statistics.median(values),
                low=min(values),
                high=max(values),
                at_least=figure.at_least,
                at_most=figure.at_most,
                subject=figure.subject,
            )
        )
    return results
