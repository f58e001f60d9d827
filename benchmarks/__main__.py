"""The command: measure workloads, print tables and save results; or build page and chart from saved results."""

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

from benchmarks.chart import build_chart
from benchmarks.harness import ROOT, Result, compute_figures, load_workload
from benchmarks.machine_info import collect_machine_info
from benchmarks.peer_protocol import select_entrants
from benchmarks.report import build_markdown, build_tables, replace_between_markers
from benchmarks.rounds import Outcome, Session, measure
from benchmarks.servers import SETTINGS, BenchmarkServers
from benchmarks.workloads import MODULES

RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "performance.md"
ROUNDS = 5


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    options.results.mkdir(parents=True, exist_ok=True)
    # Figures of small sizes mean nothing, so they must not replace real ones.
    saved = options.results / ("latest.json" if options.scale == 1 else "quick.json")
    if options.markdown is not None:
        update_page(saved, options.markdown)
        return
    screen, log = Console(), Console(stderr=True)
    if not screen.is_terminal:
        screen.width = 140
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers are stopped
    with BenchmarkServers(options.results / f"servers-{os.getpid()}") as servers:
        session = Session(options.results, servers, options.engines, options.rounds, options.scale, log.print)
        for name in options.names or MODULES:
            outcome = measure(name, session)
            if not any(outcome.rounds) and not outcome.missing:
                log.print(f"{name}: nothing to measure with these engines")
                continue
            result = _result(name, outcome, session)
            save_result(saved, result)
            for table in build_tables(result):
                screen.print(table)
                screen.print()
    if options.page:
        update_page(saved, PAGE)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure perdure and other engines.")
    names = f"workloads: {', '.join(MODULES)} (default: all)"
    parser.add_argument("names", nargs="*", metavar="name", help=names)
    parser.add_argument("--engines", default="", metavar="A,B", help="engines, by name or prefix: dbos")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: a functional check")
    parser.add_argument("--scale", type=float, help="sizes as a share of the full ones: 0.1")
    parser.add_argument("--rounds", type=int, help=f"measurements per subject (default: {ROUNDS})")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for results and temporary data")
    parser.add_argument("--page", action="store_true", help="write the results to docs/performance.md at the end")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="measure nothing; write the latest results there")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in MODULES]
    if unknown:
        parser.error(f"unknown workload: {', '.join(unknown)}; use one of {', '.join(MODULES)}")
    if options.scale is None:
        options.scale = 0.0 if options.quick else 1.0
    if options.rounds is None:
        options.rounds = 1 if options.quick else ROUNDS
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    is_complete = not options.names and not options.engines and options.scale == 1 and options.rounds >= ROUNDS
    options.page = options.page and is_complete  # a partial measurement must not replace a page of full ones
    options.results = options.results.resolve()
    options.engines = select_entrants([word for word in options.engines.split(",") if word])
    return options


def _result(name: str, outcome: Outcome, session: Session) -> Result:
    workload = load_workload(name)
    compared = [figure for each in workload.compared for figure in each.figures(outcome.entrants)]
    return Result(
        workload=name,
        title=workload.title.format(**outcome.sizes),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine={**collect_machine_info(), "servers": dict(session.servers.versions), "server_settings": SETTINGS},
        sizes=outcome.sizes,
        rounds=outcome.rounds,
        figures=compute_figures([*compared, *workload.figures], outcome.rounds),
        engines={
            each.name: "; ".join(filter(None, [each.title, session.versions[each.peer_name], each.peer.settings]))
            for each in outcome.entrants
        },
        missing=outcome.missing,
    )


def update_page(saved: Path, page: Path) -> None:
    """Write figures and chart of the saved results into the page, and the results next to it.

    Workloads without a saved result keep the figures that the page has.
    """
    measured = read_results(saved)
    if not measured:
        raise SystemExit(f"{saved} has no results; measure first: python -m benchmarks")
    page_results = page.with_suffix(".json")
    results = _latest_per_workload([*read_results(page_results), *measured])
    replace_between_markers(page, build_markdown(results, page.with_suffix(".svg").name))
    page.with_suffix(".svg").write_text(build_chart(results), encoding="utf-8")
    _write(page_results, results)


def read_results(path: Path) -> list[Result]:
    """Return the saved results, in the order of the workloads."""
    return _latest_per_workload(map(Result.from_dict, json.loads(path.read_text())["results"])) if path.exists() else []


def save_result(path: Path, result: Result) -> None:
    """Replace the saved result of this workload; other workloads are unchanged."""
    _write(path, _latest_per_workload([*read_results(path), result]))


def _latest_per_workload(results: Iterable[Result]) -> list[Result]:
    """Return the last result of each workload, in the order of the workloads."""
    latest = {each.workload: each for each in results}
    return [latest[name] for name in MODULES if name in latest]


def _write(path: Path, results: Sequence[Result]) -> None:
    text = json.dumps({"results": [each.to_dict() for each in results]}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
