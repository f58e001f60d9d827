"""Compare the speed of the current tree with that of another commit: `make bench-compare BASE=<commit>`.

The command checks out BASE into a git worktree and measures it and the current tree, uncommitted changes included, in
turn. A round measures both trees once per workload and store, next to each other in time, and every second round swaps
their order (base, current, current, base, ...). The machine's drift therefore affects both trees alike, and the ratio
of one round is a paired observation.

Both trees are measured as Python source, from their `src` folders, in this Python environment, on the same servers. The
command starts the measuring modules of each tree directly (`RUNNERS`) and depends on nothing else there, so that BASE
may have another layout. Commits are comparable as long as these agree: workload ids, the names of subjects and sizes,
the JSON of a `Setting`, and the JSON of measures in the last line of output.

For a workload with engines, the subject of a store is the engine `perdure-<store>`. For other workloads the subjects
are those of the workload that use the store, without the raw ones, which contain nothing of perdure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import ROOT, Measures, Setting, Workload, load_workload
from benchmarks.servers import BenchmarkServers
from benchmarks.workloads import MODULES

RESULTS = Path(__file__).parent / "results"
STORES = ("sqlite", "postgres", "redis")
DEFAULT_ONLY = "noop10,latency"
DEFAULT_ROUNDS = 15
CONFIDENCE = 0.95
MIN_ROUNDS_FOR_LIMIT = 6  # with fewer, even the interval from the lowest to the highest ratio has less confidence
SUBJECT_TIMEOUT_SECONDS = 900.0

RUNNERS = {"engine": ("run_peer", "versus"), "subject": ("run_subject", "round")}
"""The modules of `benchmarks` that measure one engine or one subject, in the order in which a tree is searched for
them: today's name, then older ones."""


# --- ratios and their interval


@dataclass(frozen=True)
class Interval:
    """An interval of the median, with the confidence that it has."""

    low: float
    high: float
    confidence: float


@dataclass(frozen=True)
class Ratio:
    """What all rounds say about one measure: medians of both trees, and the median ratio of current over base."""

    workload: str
    subject: str
    measure: str
    base: float
    current: float
    median: float
    interval: Interval

    def breaks(self, limit: float) -> bool:
        """Return whether the whole interval lies beyond the limit (0.02 is 2 %) on the worse side."""
        if is_throughput(self.measure):
            return self.interval.high < 1 - limit
        return self.interval.low > 1 + limit


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the exact order-statistic interval of the median: the k-th lowest to the k-th highest value.

    Each value lies below the true median with probability 1/2, independently. The number below it is therefore
    binomial, and the interval misses the median with probability 2 * P(fewer than k of n are below). This holds for
    every distribution, so nothing is resampled and the result is the same for the same values. k is the largest number
    that keeps the required confidence: 4 for 15 values (96.5 %). Fewer than 6 values cannot reach 95 %; then the
    interval runs from the lowest to the highest value and `confidence` has what that is worth.

    Raises ValueError for no values.
    """
    if not values:
        raise ValueError("median_interval needs at least one value")
    count, ordered = len(values), sorted(values)
    rank = 1
    while 2 * (rank + 1) <= count + 1 and _coverage(count, rank + 1) >= confidence:
        rank += 1
    return Interval(ordered[rank - 1], ordered[count - rank], _coverage(count, rank))


def _coverage(count: int, rank: int) -> float:
    return 1 - 2 * sum(comb(count, below) for below in range(rank)) / (1 << count)


def is_throughput(measure: str) -> bool:
    return measure.endswith("_per_s")


def is_compared(measure: str) -> bool:
    """Return whether the measure is a rate or a duration; counts and bytes are not compared."""
    return measure.endswith(("_per_s", "_s", "_ms", "_us"))


def compute_ratio(workload: str, subject: str, measure: str, pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Build the ratio of one measure from its pairs (base, current), one per round."""
    ratios = [current / base for base, current in pairs]
    return Ratio(
        workload=workload,
        subject=subject,
        measure=measure,
        base=statistics.median(base for base, _ in pairs),
        current=statistics.median(current for _, current in pairs),
        median=statistics.median(ratios),
        interval=median_interval(ratios),
    )


@dataclass(frozen=True)
class Pair:
    """One round of one workload and store: measures by subject, of both trees."""

    workload: str
    base: Mapping[str, Measures]
    current: Mapping[str, Measures]


def compute_ratios(pairs: Iterable[Pair]) -> list[Ratio]:
    """Return one ratio per workload, subject and measure that both trees have, in the order of the first round."""
    values: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for pair in pairs:
        for subject, measures in pair.current.items():
            for measure in filter(is_compared, measures):
                if measure in pair.base[subject]:
                    found = values.setdefault((pair.workload, subject, measure), [])
                    found.append((pair.base[subject][measure], measures[measure]))
    return [compute_ratio(*key, each) for key, each in values.items()]


def tree_order(number: int) -> tuple[str, str]:
    """Return which tree a round (1, 2, ...) measures first: base, current; current, base; and again (ABBA)."""
    return ("base", "current") if number % 2 else ("current", "base")


# --- options


@dataclass(frozen=True)
class Options:
    base: str
    only: tuple[str, ...]
    stores: tuple[str, ...]
    rounds: int
    scale: float
    limit: float | None
    results: Path


def parse_limit(text: str) -> float:
    """Return `2%`, `2.5 %` or `2` as a share: 0.02."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage; use for example 2%")
    return float(found[1]) / 100


def parse_options(argv: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_commits", description=__doc__.splitlines()[0])
    parser.add_argument("base", help="the commit to compare the current tree with: a hash, a branch or a tag")
    parser.add_argument("--only", default=DEFAULT_ONLY, metavar="A,B", help=f"workloads, default: {DEFAULT_ONLY}")
    parser.add_argument("--stores", default=",".join(STORES), metavar="A,B", help=f"default: {','.join(STORES)}")
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS, help=f"default: {DEFAULT_ROUNDS}")
    parser.add_argument("--scale", type=float, default=1.0, help="sizes as a share of the full ones; 0: the smallest")
    parser.add_argument("--limit", type=parse_limit, help="exit with 1 when a whole interval is worse by more: 2%%")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for data while measuring")
    given = parser.parse_args(argv)
    only, stores = _parse_names(given.only), _parse_names(given.stores)
    for option, names, known in (("--only", only, tuple(MODULES)), ("--stores", stores, STORES)):
        if not names or not set(names) <= set(known):
            parser.error(f"{option} must be a list of {', '.join(known)}; it is {','.join(names) or 'empty'}")
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1; it is {given.rounds}")
    if given.limit is not None and given.rounds < MIN_ROUNDS_FOR_LIMIT:
        parser.error(f"--limit needs at least {MIN_ROUNDS_FOR_LIMIT} rounds for an interval of 95 %; use --rounds 15")
    if given.scale < 0:
        parser.error(f"--scale must not be negative; it is {given.scale:g}")
    return Options(given.base, only, stores, given.rounds, given.scale, given.limit, given.results.resolve())


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, (word.strip() for word in text.split(",")))))


# --- trees and their processes


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Check out the commit into a temporary git worktree and remove it at the end, also after Ctrl-C."""
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
    if found.returncode != 0:
        raise SystemExit(f"BASE is not a commit of this repository: {commit!r}; use a hash, a branch or a tag")
    folder = Path(tempfile.mkdtemp(prefix="perdure-base-"))
    tree = folder / "tree"
    try:
        added = _git("worktree", "add", "--detach", str(tree), found.stdout.strip())
        if added.returncode != 0:
            raise SystemExit(f"git could not check out {commit}:\n{added.stderr}")
        yield tree
    finally:
        _git("worktree", "remove", "--force", str(tree))
        shutil.rmtree(folder, ignore_errors=True)
        _git("worktree", "prune")  # also drops the entry of a checkout that was interrupted


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def find_runner(tree: Path, kind: str) -> str:
    """Return the module of this tree that measures an engine or a subject."""
    for name in RUNNERS[kind]:
        if (tree / "benchmarks" / f"{name}.py").exists():
            return f"benchmarks.{name}"
    names = " or ".join(RUNNERS[kind])
    raise SystemExit(f"{tree} cannot be measured: it has no benchmarks/{names}.py; use a newer BASE")


def build_environment(tree: Path) -> dict[str, str]:
    """Return the environment in which a process imports perdure and benchmarks from this tree, and from no other."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "src")])}


def measure_subject(tree: Path, kind: str, name: str, subject: str, setting: Setting) -> Measures:
    """Measure one subject in a new process of a tree and return what it prints in its last line."""
    command = [sys.executable, "-m", find_runner(tree, kind), name, subject, setting.to_json()]
    os.sync()  # so that no subject waits for what an earlier one has left to write
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=build_environment(tree),
            capture_output=True,
            text=True,
            timeout=SUBJECT_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"{name}, {subject}: not done after {SUBJECT_TIMEOUT_SECONDS:.0f} s in {tree}") from error
    if done.returncode != 0:
        raise SystemExit(f"{name}, {subject}: failed in {tree}\n{done.stdout}{done.stderr}")
    measures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measures


def select_subjects(workload: Workload, store: str) -> tuple[str, ...]:
    """Return the workload's own subjects on this store. A subject that needs no server counts as one of SQLite."""
    return tuple(
        subject
        for subject in workload.subjects
        if workload.needs.get(subject, ("sqlite",)) == (store,) and "raw" not in re.findall(r"\w+", subject)
    )


@dataclass
class StoreMeasurement:
    """Measures one workload on one store, in either tree."""

    name: str
    store: str
    scale: float
    servers: BenchmarkServers
    data: Path

    @property
    def server_names(self) -> tuple[str, ...]:
        return () if self.store == "sqlite" else (self.store,)

    def is_possible(self) -> bool:
        """Return whether the workload has anything to measure on this store."""
        workload = load_workload(self.name)
        return bool(workload.compared or select_subjects(workload, self.store))

    def measure(self, tree: Path) -> dict[str, Measures]:
        """Measure every subject once, each in its own process, with files and databases that are new."""
        workload = load_workload(self.name)
        sizes = workload.sized(self.scale)
        with contextlib.ExitStack() as afterwards:
            folder = Path(afterwards.enter_context(tempfile.TemporaryDirectory(dir=self.data, prefix="compare-")))
            own, prepared = folder / "own", folder / "prepared"
            own.mkdir()
            prepared.mkdir()
            if workload.compared:
                urls = afterwards.enter_context(self.servers.fresh(self.server_names))
                engine = f"perdure-{self.store}"
                return {engine: measure_subject(tree, "engine", self.name, engine, Setting(own, prepared, sizes, urls))}
            shared: Mapping[str, str] | None = None
            if workload.shares_servers or workload.prepare is not None:
                shared = afterwards.enter_context(self.servers.fresh(self.server_names))
            if workload.prepare is not None:
                # Each tree prepares its own: the other one may not be able to read its format.
                setting = Setting(prepared, prepared, sizes, shared or {})
                measure_subject(tree, "subject", self.name, "prepare", setting)
            measured = {}
            for subject in select_subjects(workload, self.store):
                with contextlib.ExitStack() as after_subject:
                    urls = dict(shared or after_subject.enter_context(self.servers.fresh(self.server_names)))
                    setting = Setting(own, prepared, sizes, urls)
                    measured[subject] = measure_subject(tree, "subject", self.name, subject, setting)
            return measured


def measure_pairs(
    options: Options, trees: Mapping[str, Path], servers: BenchmarkServers, log: Console
) -> Iterator[Pair]:
    """Measure both trees in every round, with the order of `tree_order`."""
    possible: list[StoreMeasurement] = []
    for name in options.only:
        for store in options.stores:
            measurement = StoreMeasurement(name, store, options.scale, servers, options.results)
            if not measurement.is_possible():
                log.print(f"{name}: does not use {store}, left out")
            elif (reason := servers.ensure_started(measurement.server_names)) is not None:
                raise SystemExit(f"{reason}; use STORES to leave it out")
            else:
                possible.append(measurement)
    for number in range(1, options.rounds + 1):
        for measurement in possible:
            measured = {}
            for tree in tree_order(number):
                log.print(f"round {number} of {options.rounds}: {measurement.name}, {measurement.store}, {tree}")
                measured[tree] = measurement.measure(trees[tree])
            yield Pair(measurement.name, measured["base"], measured["current"])


# --- the command


def format_value(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def build_table(ratios: Sequence[Ratio], options: Options) -> Table:
    """Build the table that the command prints: one line per workload, subject and measure."""
    confidence = min(ratio.interval.confidence for ratio in ratios)
    title = f"current over {options.base}, median of {options.rounds} rounds"
    table = Table(title=title, title_justify="left")
    for heading in ("workload", "subject", "measure"):
        table.add_column(heading)
    reached = "95 %" if confidence >= CONFIDENCE else f"{100 * confidence:.0f} %"
    for heading in (f"{options.base[:12]}", "current", "ratio", f"{reached} interval"):
        table.add_column(heading, justify="right")
    if options.limit is not None:
        table.add_column(f"limit {100 * options.limit:g} %")
    for ratio in ratios:
        row = [
            ratio.workload,
            ratio.subject,
            ratio.measure,
            format_value(ratio.base),
            format_value(ratio.current),
            f"{ratio.median:.3f}",
            f"{ratio.interval.low:.3f} to {ratio.interval.high:.3f}",
        ]
        if options.limit is not None:
            row.append("broken" if ratio.breaks(options.limit) else "kept")
        table.add_row(*row)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    options.results.mkdir(parents=True, exist_ok=True)
    screen, log = Console(), Console(stderr=True)
    if not screen.is_terminal:
        screen.width = 140
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that cleanup runs
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts with it ignored
    with worktree(options.base) as base, BenchmarkServers(options.results / f"servers-{os.getpid()}") as servers:
        ratios = compute_ratios(measure_pairs(options, {"base": base, "current": ROOT}, servers, log))
    if not ratios:
        raise SystemExit("nothing to compare: these workloads measure no rate and no duration on these stores")
    screen.print(build_table(ratios, options))
    if options.limit is not None and any(ratio.breaks(options.limit) for ratio in ratios):
        sys.exit(1)


if __name__ == "__main__":
    main()
