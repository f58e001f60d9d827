"""The command: measure workloads, print their tables, keep the results; or put kept results into a page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks import machine
from benchmarks.harness import Result, figures_of, measure, workload
from benchmarks.report import markdown_of, put_between_markers, table_of
from benchmarks.workloads import NAMES

RESULTS = Path(__file__).parent / "results"
ROUNDS = 5


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    options.results.mkdir(parents=True, exist_ok=True)
    # Quick figures mean nothing, so that they must not take the place of real ones.
    kept = options.results / ("quick.json" if options.quick else "latest.json")
    if options.markdown is not None:
        results = read(kept)
        if not results:
            raise SystemExit(f"there are no results in {kept}; measure first: python -m benchmarks")
        put_between_markers(options.markdown, markdown_of(results))
        return
    screen, log = Console(), Console(stderr=True)
    if not screen.is_terminal:
        screen.width = 140
    for name in options.names or NAMES:
        result = _measured(name, options, log)
        keep(kept, result)
        screen.print(table_of(result))
        screen.print()


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what perdure costs.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"which workloads: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: shows that it works, not how fast")
    parser.add_argument("--rounds", type=int, help=f"how often each subject is measured (default: {ROUNDS})")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for results, and data while measuring")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="measure nothing; put the latest results there")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(NAMES)}")
    if options.rounds is None:
        options.rounds = 1 if options.quick else ROUNDS
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def _measured(name: str, options: argparse.Namespace, log: Console) -> Result:
    chosen = workload(name)
    sizes = chosen.quick if options.quick else chosen.sizes
    rounds = measure(name, rounds=options.rounds, quick=options.quick, data=options.results, progress=log.print)
    return Result(
        workload=name,
        title=chosen.title.format(**sizes),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine.facts(),
        sizes=sizes,
        rounds=rounds,
        figures=figures_of(chosen, rounds),
    )


def read(path: Path) -> list[Result]:
    """The kept results, in the order of the workloads."""
    if not path.exists():
        return []
    found = {given["workload"]: Result.from_dict(given) for given in json.loads(path.read_text())["results"]}
    return [found[name] for name in NAMES if name in found]


def keep(path: Path, result: Result) -> None:
    """Put a result in the place of the last one of its workload; the others stay."""
    results = {kept.workload: kept for kept in read(path)}
    results[result.workload] = result
    text = json.dumps({"results": [kept.to_dict() for kept in results.values()]}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
