"""Workloads, rounds and their results.

A workload has subjects that are measured next to each other: engines (`peer_protocol.py`), and subjects of its own (the
raw store, the engine in memory, ...). A round measures each subject once, each in a new process (`rounds.py`). Rounds
are repeated, so that a temporary slowdown of the machine affects all subjects. Figures and ratios are computed per
round, and reported as the median over the rounds with the lowest and the highest.

Imports only the standard library: peers import this module in their own environments.
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
UNSCALED = ("at_once", "settle_ms")  # sizes that define the workload, not its duration

Measures = Mapping[str, float]
"""The measures of one subject, by name."""
Round = Mapping[str, Measures]
"""The measures of one round, by subject."""
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Setting:
    """The input of a subject: sizes, folders and servers.

    `folder` is new in each round and shared by its subjects; the workload's `prepare` has filled `prepared`. `urls` are
    those of unused servers: `postgres` an empty database, `redis` an empty server.
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
    """One line of the report, computed from a round. A missed target is reported and fails nothing.

    `subject` is set if the figure is the measure of a single subject.
    """

    title: str
    unit: str
    value: Callable[[Round], float]
    at_least: float | None = None
    at_most: float | None = None
    subject: str | None = None


@dataclass(frozen=True)
class Workload:
    """A workload: its subjects, figures and sizes. The title may contain sizes.

    `prepare` runs once, before the first round. `quick` sizes are for functional checks only. `needs` names the servers
    of subjects. With `compared`, every engine that supports the workload is measured too, by the function of its name
    in `measurements.py`. With `shares_servers`, the subjects of a round share servers and not only a folder, because
    some continue with the data of others.

    Names of sizes and subjects stay the same over time: `compare_commits.py` passes them to older commits.
    """

    title: str
    subjects: Mapping[str, Subject]
    figures: Sequence[Figure]
    sizes: Sizes
    quick: Sizes
    prepare: Subject | None = None
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    compared: Sequence[Comparison] = ()
    shares_servers: bool = False

    def sized(self, scale: float) -> Sizes:
        """Return the sizes at a scale: 1 for the full sizes, 0 for the quick ones, which are also the minimum.

        Sizes of `UNSCALED` are not scaled.
        """
        if scale == 0:
            return self.quick
        scaled = {name: max(self.quick[name], round(size * scale)) for name, size in self.sizes.items()}
        return scaled | {name: self.sizes[name] for name in UNSCALED if name in self.sizes}


@dataclass(frozen=True)
class FigureResult:
    """A figure, summarized over all rounds."""

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
        """Whether the median meets the target; True without a target."""
        return (self.at_least is None or self.median >= self.at_least) and (
            self.at_most is None or self.median <= self.at_most
        )


@dataclass(frozen=True)
class Result:
    """The result of a workload. It is self-contained: one file may have results of different days.

    `engines` describes each measured engine; `missing` has the reason for each subject that was not measured.
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


def load_workload(name: str) -> Workload:
    """Return the workload with this id."""
    found: Workload = importlib.import_module(f"benchmarks.workloads.{MODULES[name]}").WORKLOAD
    return found


def compute_figures(figures: Sequence[Figure], rounds: Sequence[Round]) -> list[FigureResult]:
    """Compute each figure per round and summarize it over the rounds. Figures of missing subjects are left out."""
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
