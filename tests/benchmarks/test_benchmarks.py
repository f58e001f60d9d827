"""The benchmarks run and report their measurements. No test asserts on time."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main, read_results, save_result
from benchmarks.chart import build_chart
from benchmarks.harness import Figure, FigureResult, Result, Workload, compute_figures, load_workload
from benchmarks.machine_info import collect_machine_info
from benchmarks.report import BEGIN, END, build_markdown, build_tables, format_number, format_row
from benchmarks.workloads import MODULES
from tests.repetitions import LONG

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
TITLES = {"postgres": "PostgreSQL", "redis": "Redis"}
ONLY_ON_SERVERS = ("fleet",)
ON_SERVERS = {
    **dict.fromkeys(("noop10", "sleepers", "events") if LONG else ("noop10",), ("postgres", "redis")),
    **dict.fromkeys(("history", "fleet") if LONG else ("fleet",), ("redis",)),
}


def test_all_workloads_run_and_print_their_tables(tmp_path):
    output = quick(tmp_path, "--engines", "perdure-sqlite")
    results = {result.workload: result for result in read_results(tmp_path / "quick.json")}
    assert list(results) == [name for name in MODULES if name not in ONLY_ON_SERVERS]
    for name, result in results.items():
        assert f"{name}: {result.title}" in output
        for figure in result.figures:
            assert figure.title in output
    assert [path.name for path in tmp_path.iterdir()] == ["quick.json"], "data was left behind"
    counts = {figure.title: figure.median for result in results.values() for figure in result.figures}
    assert counts["commits per run"] == 2
    assert counts["loads per resumption"] == 1
    assert counts["other store calls per run"] >= 0


@pytest.mark.long
def test_workloads_run_on_servers(tmp_path):
    for servers in set(ON_SERVERS.values()):
        names = [name for name, these in ON_SERVERS.items() if these == servers]
        quick(tmp_path, *names, "--engines", ",".join(f"perdure-{server}" for server in servers))
    results = {result.workload: result for result in read_results(tmp_path / "quick.json")}
    for name, servers in ON_SERVERS.items():
        assert not results[name].missing
        assert set(results[name].machine["servers"]) == set(servers)
        for server in servers:
            assert any(TITLES[server] in figure.title for figure in results[name].figures)
    assert set(results["noop10"].rounds[0]) >= {"perdure-postgres", "perdure-redis", "raw, postgres", "raw, redis"}
    assert [path.name for path in tmp_path.iterdir()] == ["quick.json"], "data or servers were left behind"


def quick(folder: Path, *given: str) -> str:
    """Run the command with the smallest sizes and this results folder; return its output."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *given, "--quick", "--results", str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_unknown_workload_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "unknown workload: nonsense; use one of noop10" in capsys.readouterr().err


def test_ratios_are_computed_per_round():
    figures = [
        Figure("ratio", "x", lambda measured: measured["a"]["n"] / measured["b"]["n"], at_most=2),
        Figure("of a subject that was not measured", "x", lambda measured: measured["c"]["n"]),
    ]
    rounds = [{"a": {"n": a}, "b": {"n": b}} for a, b in ((2, 1), (30, 10), (5, 5), (8, 2), (9, 9))]
    [ratio] = compute_figures(figures, rounds)
    assert (ratio.median, ratio.low, ratio.high, ratio.met) == (2, 1, 4, True)


def test_sizes_are_scaled_except_unscaled_ones():
    scaled = Workload("", {}, [], sizes={"runs": 1000, "at_once": 100}, quick={"runs": 30, "at_once": 10})
    assert scaled.sized(1) == {"runs": 1000, "at_once": 100}
    assert scaled.sized(0.1) == {"runs": 100, "at_once": 100}
    assert scaled.sized(0.001) == {"runs": 30, "at_once": 100}
    assert scaled.sized(0) == {"runs": 30, "at_once": 10}


def test_new_result_replaces_the_previous_one_of_its_workload(tmp_path):
    saved = tmp_path / "latest.json"
    for name, median in (("latency", 1.0), ("noop10", 2.0), ("latency", 3.0)):
        save_result(saved, result(name, median))
    assert [(each.workload, each.figures[0].median) for each in read_results(saved)] == [
        ("noop10", 2.0),
        ("latency", 3.0),
    ]
    assert json.loads(saved.read_text())["results"][0]["machine"]["cores"] >= 1


def test_page_gets_the_latest_results_between_its_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    save_result(tmp_path / "latest.json", result("noop10", 12_345.6))
    for _ in range(2):
        main(["--markdown", str(page), "--results", str(tmp_path)])
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert text.count("| durable steps | 12,346 steps/s | 1 to 20,000 | at least 15,000, missed |") == 1
    assert "old" not in text


def test_page_keeps_results_of_workloads_that_were_not_measured_again(tmp_path):
    """Also on another machine, which only has the older results of the page."""
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    for machine, name, median in (("one", "noop10", 111.0), ("one", "latency", 222.0), ("other", "noop10", 333.0)):
        (tmp_path / machine).mkdir(exist_ok=True)
        save_result(tmp_path / machine / "latest.json", result(name, median))
    for machine in ("one", "other"):
        main(["--markdown", str(page), "--results", str(tmp_path / machine)])
    text = page.read_text()
    assert [n for n in (111, 222, 333) if f" {n} steps/s" in text] == [222, 333]
    assert [(each.workload, each.figures[0].median) for each in read_results(tmp_path / "page.json")] == [
        ("noop10", 333.0),
        ("latency", 222.0),
    ]


def test_page_without_results_or_markers_is_not_changed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n")
    with pytest.raises(SystemExit, match="measure first"):
        main(["--markdown", str(page), "--results", str(tmp_path)])
    save_result(tmp_path / "latest.json", result("noop10", 1.0))
    with pytest.raises(SystemExit, match="no markers for the figures"):
        main(["--markdown", str(page), "--results", str(tmp_path)])
    assert page.read_text() == "text\n"
    assert not (tmp_path / "page.json").exists()


UNMEASURED = ("schedules", "queues", "search")
"""Workloads without figures on the page, which says so. Remove a name when it is measured."""


def test_page_and_chart_are_generated_from_the_results_file():
    results = read_results(PAGE.with_suffix(".json"))
    assert [each.workload for each in results] == [name for name in MODULES if name not in UNMEASURED]
    figures = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert figures.strip() == build_markdown(results, "performance.svg").strip()
    assert PAGE.with_suffix(".svg").read_text(encoding="utf-8") == build_chart(results)


def test_page_explains_every_workload():
    text = PAGE.read_text(encoding="utf-8")
    explained, begin, _ = text.partition(BEGIN)
    assert begin
    assert text.count(END) == 1
    assert [name for name in MODULES if f"`{name}`" not in explained] == []


def test_report_shows_why_a_subject_was_not_measured():
    reported = replace(result("noop10", 1.0), missing={"absurd": "not installed: no network"})
    assert "- absurd: not installed: no network" in build_markdown([reported], "chart.svg")
    assert len(build_tables(reported)) == 2


def test_report_shows_figures_with_a_target_first():
    without_target = FigureResult("in memory", "ms", 1.0, 1.0, 1.0)
    reported = replace(result("noop10", 16_000.0), figures=[without_target, *result("noop10", 16_000.0).figures])
    missed = result("latency", 1.0)
    first = build_markdown([reported, missed], "chart.svg").partition("### `noop10`")[0].splitlines()
    assert [line for line in first if line.startswith("| `")] == [
        "| `noop10` | durable steps | 16,000 steps/s | at least 15,000 |",
        "| `latency` | durable steps | 1 steps/s | at least 15,000, missed |",
    ]


def test_every_workload_has_a_docstring():
    for name in MODULES:
        load_workload(name)
        assert sys.modules[f"benchmarks.workloads.{MODULES[name]}"].__doc__


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1.0, "1"), (0.123, "0.12"), (12.34, "12.3"), (123.4, "123"), (12_345.6, "12,346"), (-1.5, "-1.50")],
)
def test_number_has_three_significant_digits(value, shown):
    assert format_number(value) == shown


def test_figure_without_target_has_an_empty_target_column():
    assert format_row(FigureResult("p50", "ms", 1.5, 1.0, 2.25)) == ("p50", "1.50 ms", "1 to 2.25", "")


def result(name: str, median: float) -> Result:
    figure = FigureResult("durable steps", "steps/s", median, 1, 20_000, at_least=15_000)
    return Result(name, "a title", "2025-01-02T03:04:05+00:00", collect_machine_info(), {"runs": 1}, [{}], [figure])
