"""`make bench-compare`: the statistics on known data, the options, and one real run. No test asserts on time."""

import json
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import compare_commits
from benchmarks.compare_commits import (
    Interval,
    Options,
    Pair,
    Ratio,
    StoreMeasurement,
    build_environment,
    build_table,
    compute_ratios,
    find_runner,
    is_compared,
    main,
    median_interval,
    parse_limit,
    parse_options,
    select_subjects,
    tree_order,
    worktree,
)
from benchmarks.harness import Setting, load_workload
from benchmarks.servers import BenchmarkServers

ROOT = Path(__file__).resolve().parents[2]


# --- the interval


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [  # as in tables of the sign test
        (1, 1, 1, 0.0),
        (3, 1, 3, 0.75),
        (5, 1, 5, 0.9375),
        (6, 1, 6, 0.96875),
        (8, 1, 8, 0.9921875),
        (9, 2, 8, 0.9609375),
        (10, 2, 9, 0.978515625),
        (15, 4, 12, 0.96484375),
        (20, 6, 15, 0.9586105346679688),
    ],
)
def test_interval_uses_the_ranks_of_the_sign_test(count, low, high, confidence):
    shuffled = [float(value) for value in sorted(range(1, count + 1), key=lambda value: value * 7 % 11)]
    found = median_interval(shuffled)
    assert (found.low, found.high) == (low, high)
    assert found.confidence == pytest.approx(confidence)


def test_interval_of_no_values_is_refused():
    with pytest.raises(ValueError, match="at least one value"):
        median_interval([])


def test_interval_ignores_outliers_that_the_median_ignores():
    assert median_interval([1.0] * 12 + [0.1, 9.0, 50.0]) == Interval(1.0, 1.0, median_interval([1.0] * 15).confidence)


# --- ratios


def test_ratios_are_paired_per_round_and_leave_out_counts():
    pairs = [
        Pair("noop10", {"perdure-sqlite": {"steps_per_s": base, "runs": 7}}, {"perdure-sqlite": {"steps_per_s": now}})
        for base, now in ((100.0, 110.0), (200.0, 180.0), (50.0, 50.0))
    ]
    [ratio] = compute_ratios(pairs)
    assert (ratio.workload, ratio.subject, ratio.measure) == ("noop10", "perdure-sqlite", "steps_per_s")
    assert (ratio.base, ratio.current, ratio.median) == (100.0, 110.0, 1.0)
    assert (ratio.interval.low, ratio.interval.high) == pytest.approx((0.9, 1.1))


def test_measure_that_only_one_tree_has_is_left_out():
    pair = Pair("latency", {"perdure-redis": {"p50_ms": 2.0}}, {"perdure-redis": {"p50_ms": 1.0, "p99_ms": 3.0}})
    assert [(each.measure, each.median) for each in compute_ratios([pair])] == [("p50_ms", 0.5)]


def test_rates_and_durations_are_compared():
    measures = ["steps_per_s", "recovery_s", "p99_ms", "first_50_us", "runs", "batch", "bytes_per_run", "memory"]
    assert list(filter(is_compared, measures)) == ["steps_per_s", "recovery_s", "p99_ms", "first_50_us"]


# --- the limit


@pytest.mark.parametrize(
    ("measure", "low", "high", "is_broken"),
    [
        ("steps_per_s", 0.95, 0.979, True),
        ("steps_per_s", 0.95, 0.981, False),  # the interval contains the limit
        ("steps_per_s", 1.03, 1.20, False),  # better
        ("p50_ms", 1.021, 1.10, True),
        ("p50_ms", 1.019, 1.10, False),
        ("p50_ms", 0.80, 0.90, False),  # better
    ],
)
def test_limit_is_broken_when_the_whole_interval_is_worse(measure, low, high, is_broken):
    assert ratio_of(measure, low, high).breaks(0.02) is is_broken


def test_table_marks_broken_limits():
    options = Options("main", ("noop10",), ("sqlite",), 15, 1.0, 0.02, ROOT)
    table = build_table([ratio_of("steps_per_s", 0.9, 0.95), ratio_of("p50_ms", 0.9, 0.95)], options)
    assert list(table.columns[-1].cells) == ["broken", "kept"]
    assert [column.header for column in table.columns][-2:] == ["95 % interval", "limit 2 %"]


def test_table_names_the_confidence_that_few_rounds_reach():
    options = Options("main", ("noop10",), ("sqlite",), 3, 1.0, None, ROOT)
    ratio = compute_ratios([Pair("noop10", {"a": {"x_s": 1.0}}, {"a": {"x_s": 1.0}})] * 3)
    assert [column.header for column in build_table(ratio, options).columns][-1] == "75 % interval"


def ratio_of(measure: str, low: float, high: float) -> Ratio:
    return Ratio("noop10", "perdure-sqlite", measure, 1.0, 1.0, (low + high) / 2, Interval(low, high, 0.96))


# --- order, options, subjects


def test_order_of_trees_alternates_per_round():
    order = [tree for number in range(1, 5) for tree in tree_order(number)]
    assert order == ["base", "current", "current", "base"] * 2


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), ("2.5 %", 0.025), ("0", 0.0), ("10", 0.1)])
def test_limit_is_a_percentage(text, share):
    assert parse_limit(text) == pytest.approx(share)


def test_options_have_the_defaults_of_the_gates():
    options = parse_options(["main"])
    assert options.only == ("noop10", "latency")
    assert options.stores == ("sqlite", "postgres", "redis")
    assert (options.rounds, options.scale, options.limit) == (15, 1.0, None)


def test_options_take_lists():
    options = parse_options(["main", "--only", "fleet, noop10,fleet", "--stores", "redis", "--limit", "2%"])
    assert (options.only, options.stores, options.limit) == (("fleet", "noop10"), ("redis",), 0.02)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--only", "nonsense"], "--only must be a list of noop10, latency"),
        (["--stores", "memory"], "--stores must be a list of sqlite, postgres, redis; it is memory"),
        (["--stores", ","], "it is empty"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--limit", "much"], "'much' is not a percentage; use for example 2%"),
        (["--limit", "2%", "--rounds", "5"], "--limit needs at least 6 rounds"),
        (["--scale", "-1"], "--scale must not be negative"),
    ],
)
def test_wrong_options_are_refused_with_an_error_message(given, message, capsys):
    with pytest.raises(SystemExit):
        parse_options(["main", *given])
    assert message in capsys.readouterr().err


def test_workloads_own_subjects_are_those_of_the_store_without_raw_ones():
    multiple_workers = load_workload("fleet")
    assert select_subjects(multiple_workers, "sqlite") == ()
    subjects = select_subjects(multiple_workers, "redis")
    assert "redis, 1" in subjects
    assert all(subject.startswith("redis, ") and "raw" not in subject for subject in subjects)
    assert select_subjects(load_workload("evicted"), "sqlite")
    assert select_subjects(load_workload("evicted"), "redis") == ()


def test_workload_whose_own_subjects_share_a_folder_is_measured(tmp_path):
    with BenchmarkServers(tmp_path / "servers") as servers:
        measurement = StoreMeasurement("history", "sqlite", 0, servers, tmp_path)
        assert measurement.is_possible()
        measured = measurement.measure(ROOT)
    assert measured["sqlite"]["steps_per_s"] > 0
    assert measured["sqlite, replay"]["load_ms"] > 0


# --- trees


def test_runner_is_found_under_older_names(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    with pytest.raises(SystemExit, match="use a newer BASE"):
        find_runner(tmp_path, "engine")
    (tmp_path / "benchmarks" / "versus.py").touch()
    assert find_runner(tmp_path, "engine") == "benchmarks.versus"
    (tmp_path / "benchmarks" / "run_peer.py").touch()
    assert find_runner(tmp_path, "engine") == "benchmarks.run_peer"


def test_current_tree_has_runners():
    assert find_runner(ROOT, "engine")
    assert find_runner(ROOT, "subject")


def test_setting_keeps_the_keys_that_older_commits_read():
    """A renamed key would make this commit incomparable with all earlier ones."""
    assert set(json.loads(Setting(ROOT, ROOT, {"runs": 1}).to_json())) == {"folder", "prepared", "sizes", "urls"}


def test_unknown_base_is_refused():
    with (
        pytest.raises(SystemExit, match="BASE is not a commit of this repository: 'no-such-commit'"),
        worktree("no-such-commit"),
    ):
        pass


def test_process_of_a_worktree_imports_from_it_and_the_worktree_is_removed():
    with worktree("HEAD") as tree:
        done = subprocess.run(
            [sys.executable, "-c", "import perdure, benchmarks; print(perdure.__file__, benchmarks.__file__)"],
            cwd=tree,
            env=build_environment(tree),
            capture_output=True,
            text=True,
            check=True,
        )
        assert all(Path(path).is_relative_to(tree) for path in done.stdout.split()), done.stdout
    assert not tree.parent.exists()
    listed = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert str(tree) not in listed.stdout


# --- the command


def test_command_compares_head_with_the_current_tree(tmp_path):
    process = start(tmp_path, "--rounds", "2")
    output, log = process.communicate(timeout=120)
    assert process.returncode == 0, output + log
    assert "current over HEAD, median of 2 rounds" in output
    assert "steps_per_s" in output
    assert [line.rpartition(", ")[2] for line in log.splitlines()] == ["base", "current", "current", "base"]
    assert list(tmp_path.iterdir()) == [], "data was left behind"


def test_command_removes_its_worktree_when_it_is_interrupted(tmp_path):
    process = start(tmp_path, "--rounds", "1000")
    assert process.stderr is not None
    assert process.stderr.readline().startswith("round 1 of 1000")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == [], "data or the worktree was left behind"


@pytest.mark.parametrize(("current", "fails"), [(97.0, True), (99.0, False), (120.0, False)])
def test_command_fails_when_a_limit_is_broken(current, fails, tmp_path, monkeypatch):
    pair = Pair("noop10", {"perdure-sqlite": {"steps_per_s": 100.0}}, {"perdure-sqlite": {"steps_per_s": current}})
    monkeypatch.setattr(compare_commits, "worktree", lambda _: nullcontext(ROOT))
    monkeypatch.setattr(compare_commits, "measure_pairs", lambda *_: [pair] * 6)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    given = ["HEAD", "--limit", "2%", "--rounds", "6", "--results", str(tmp_path)]
    if fails:
        with pytest.raises(SystemExit) as ended:
            main(given)
        assert ended.value.code == 1
    else:
        main(given)


def start(folder: Path, *given: str) -> subprocess.Popen[str]:
    """Start noop10 on SQLite with the smallest sizes, its worktree and its data in this folder."""
    command = [sys.executable, "-m", "benchmarks.compare_commits", "HEAD", "--only", "noop10", "--stores", "sqlite"]
    return subprocess.Popen(
        [*command, "--scale", "0", "--results", str(folder), *given],
        cwd=ROOT,
        env={**build_environment(ROOT), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
