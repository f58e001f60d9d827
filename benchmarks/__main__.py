"""The command: measure workloads, print their tables, keep the results; or make page and chart of kept results."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks import machine_info as machine
from benchmarks import peer_protocol as engines
from benchmarks.chart import chart_of
from benchmarks.harness import ROOT, Result, figures_of, workload
from benchmarks.report import markdown_of, put_between_markers, tables_of
from benchmarks.rounds import Outcome, Rig, measure
from benchmarks.servers import SETTINGS, Hosts
from benchmarks.workloads import MODULES

RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "performance.md"
ROUNDS = 5


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    options.results.mkdir(parents=True, exist_ok=True)
    # Figures of small sizes mean nothing, so that they must not take the place of real ones.
    kept = options.results / ("latest.json" if options.scale == 1 else "quick.json")
    if options.markdown is not None:
        make_page(kept, options.markdown)
        return
    screen, log = Console(), Console(stderr=True)
    if not screen.is_terminal:
        screen.width = 140
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers are stopped on the way out
    with Hosts(options.results / f"servers-{os.getpid()}") as hosts:
        rig = Rig(options.results, hosts, options.engines, options.rounds, options.scale, log.print)
        for name in options.names or MODULES:
            outcome = measure(name, rig)
            if not any(outcome.rounds) and not outcome.missing:
                log.print(f"{name}: nothing to measure with these engines")
                continue
            result = _result(name, outcome, rig)
            keep(kept, result)
            for table in tables_of(result):
                screen.print(table)
                screen.print()
    if options.page:
        make_page(kept, PAGE)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what perdure costs.")
    which = f"which workloads: {', '.join(MODULES)} (default: all)"
    parser.add_argument("names", nargs="*", metavar="name", help=which)
    parser.add_argument("--engines", default="", metavar="A,B", help="which engines, by name or its beginning: dbos")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: shows that it works, not how fast")
    parser.add_argument("--scale", type=float, help="sizes as a share of the full ones, to try things out: 0.1")
    parser.add_argument("--rounds", type=int, help=f"how often each subject is measured (default: {ROUNDS})")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for results, and data while measuring")
    parser.add_argument("--page", action="store_true", help="put the results into docs/performance.md when all is done")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="measure nothing; put the latest results there")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in MODULES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(MODULES)}")
    if options.scale is None:
        options.scale = 0.0 if options.quick else 1.0
    if options.rounds is None:
        options.rounds = 1 if options.quick else ROUNDS
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    whole = not options.names and not options.engines and options.scale == 1 and options.rounds >= ROUNDS
    options.page = options.page and whole  # a part of the figures would be a page that leaves out the rest
    options.results = options.results.resolve()
    options.engines = engines.chosen([word for word in options.engines.split(",") if word])
    return options


def _result(name: str, outcome: Outcome, rig: Rig) -> Result:
    chosen = workload(name)
    compared = [figure for each in chosen.compared for figure in each.figures(outcome.entrants)]
    return Result(
        workload=name,
        title=chosen.title.format(**outcome.sizes),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine={**machine.facts(), "servers": dict(rig.hosts.versions), "server_settings": SETTINGS},
        sizes=outcome.sizes,
        rounds=outcome.rounds,
        figures=figures_of([*compared, *chosen.figures], outcome.rounds),
        engines={
            each.name: "; ".join(filter(None, [each.title, rig.versions[each.peer_name], each.peer.settings]))
            for each in outcome.entrants
        },
        missing=outcome.missing,
    )


def make_page(kept: Path, page: Path) -> None:
    """Figures and their chart, from kept results, which are put beside them. What was not measured again stays."""
    measured = read(kept)
    if not measured:
        raise SystemExit(f"there are no results in {kept}; measure first: python -m benchmarks")
    beside = page.with_suffix(".json")
    results = _newest([*read(beside), *measured])
    put_between_markers(page, markdown_of(results, page.with_suffix(".svg").name))
    page.with_suffix(".svg").write_text(chart_of(results), encoding="utf-8")
    _write(beside, results)


def read(path: Path) -> list[Result]:
    """The kept results, in the order of the workloads."""
    return _newest(map(Result.from_dict, json.loads(path.read_text())["results"])) if path.exists() else []


def keep(path: Path, result: Result) -> None:
    """Put a result in the place of the last one of its workload; the others stay."""
    _write(path, _newest([*read(path), result]))


def _newest(results: Iterable[Result]) -> list[Result]:
    """The last of each workload, in their order."""
    found = {each.workload: each for each in results}
    return [found[name] for name in MODULES if name in found]


def _write(path: Path, results: Sequence[Result]) -> None:
    text = json.dumps({"results": [each.to_dict() for each in results]}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
