"""Comparison with peers, tested without peers: missing peers, ratios and chart. No test asserts on time."""

import asyncio
import os
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import rounds
from benchmarks.chart import build_chart
from benchmarks.comparison import Comparison, is_alternative
from benchmarks.harness import FigureResult, Result, Setting, Workload, compute_figures, load_workload
from benchmarks.machine_info import collect_machine_info
from benchmarks.peer_environments import NotInstallable, python_path
from benchmarks.peer_protocol import (
    PEERS,
    Adapter,
    Entrant,
    Peer,
    Variant,
    all_entrants,
    load_peer,
    peer_names,
    select_entrants,
)
from benchmarks.rounds import Session, SubjectFailed, measure
from benchmarks.servers import BenchmarkServers
from benchmarks.step_bodies import WORKFLOWS, Gate
from benchmarks.workloads import MODULES
from benchmarks.workloads.throughput import WORKLOAD as NOOP10


class FakeEngine(Adapter):
    """An engine that returns at once."""

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def execute(self, workflow: str, number: int) -> int:
        return number


def fake_peer(**given: object) -> Peer:
    peer = Peer("Fake", FakeEngine, {"": Variant("", ("noop10",))}, settings="none", python=("fake",))
    return replace(peer, **given)  # type: ignore[arg-type]


# --- definitions of peers --------------------------------------------------------------------------------------------


def test_every_file_of_peers_defines_an_engine_and_perdure_is_first():
    assert peer_names()[0] == "perdure"
    assert {"dbos", "restate", "absurd", "rivet"} <= set(peer_names())
    for name in peer_names():
        assert load_peer(name).title
        assert load_peer(name).settings
        assert (PEERS / f"{name}.py").exists()


def test_peer_supports_or_explains_every_compared_workload():
    compared = [name for name in MODULES if load_workload(name).compared]
    for name in peer_names():
        able = {each for variant in load_peer(name).variants.values() for each in variant.workloads}
        assert able | set(load_peer(name).unsupported) == set(compared)


def test_engines_are_selected_by_name_or_prefix():
    assert [each.name for each in select_entrants(["dbos-sqlite"])] == ["dbos-sqlite", "dbos-sqlite-sync"]
    assert {each.peer_name for each in select_entrants(["restate", "perdure"])} == {"restate", "perdure"}
    assert len(select_entrants([])) == len(all_entrants())
    with pytest.raises(SystemExit, match="unknown engine: temporal; use one of perdure-sqlite"):
        select_entrants(["temporal"])


def test_peer_has_its_own_environment():
    assert "dbos" in python_path("dbos", load_peer("dbos"))
    assert python_path("dbos", load_peer("dbos")) != python_path("perdure", load_peer("perdure"))


def test_modules_that_peers_import_use_only_the_standard_library():
    """Peers import these modules in their own environments, which lack the project's packages."""
    for name in ("peer_protocol", "measurements", "step_bodies", "harness", "peer_environments", "run_peer"):
        text = (PEERS.parent / f"{name}.py").read_text()
        assert not [word for word in ("apsw", "msgspec", "rich", "asyncpg", "from perdure") if f"import {word}" in text]
        assert "from perdure" not in text


# --- gate -----------------------------------------------------------------------------------------------------------


def test_closed_gate_blocks_every_run(tmp_path):
    async def main() -> None:
        gate = Gate(tmp_path)
        assert gate.arrivals == 0
        blocked = [asyncio.create_task(Gate(tmp_path).stop(n)) for n in range(3)]
        await asyncio.sleep(0)
        assert gate.arrivals == 3
        assert not any(task.done() for task in blocked)
        for task in blocked:
            task.cancel()
        gate.open()
        assert await gate.stop(7) == 7
        assert gate.arrivals == 3

    asyncio.run(main())
    assert set(WORKFLOWS) == {"one_step", "ten_steps", "halfway", "children", "parallel"}


# --- missing peers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(rounds, "load_workload", lambda name: replace(NOOP10, subjects={}))
    entrant = Entrant("fake", "", fake_peer())
    return Session(
        tmp_path, BenchmarkServers(tmp_path / "servers"), [entrant], rounds=2, scale=0, progress=lambda text: None
    )


def test_peer_that_cannot_be_installed_is_missing_with_the_reason(session, monkeypatch):
    def refuse(name, peer):
        raise NotInstallable("no network")

    monkeypatch.setattr(rounds, "install", refuse)
    outcome = measure("noop10", session)
    assert outcome.missing == {"fake": "not installed: no network"}
    assert outcome.rounds == [{}, {}]


def test_failing_peer_is_missing_with_the_reason_and_removed_from_all_rounds(session, monkeypatch):
    outcomes = iter([{"steps_per_s": 1.0}, SubjectFailed("first line\nConnectionError: last line\n")])

    def run(*given):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(rounds, "install", lambda name, peer: "fake 1.0")
    monkeypatch.setattr(rounds, "_run", run)
    outcome = measure("noop10", session)
    assert outcome.missing == {"fake": "failed in round 2: ConnectionError: last line"}
    assert outcome.rounds == [{}, {}]
    assert outcome.entrants == []


def test_peer_without_its_server_is_missing_with_the_reason(session, monkeypatch):
    needs_postgres = fake_peer(variants={"": Variant("", ("noop10",), needs=("postgres",))})
    session.entrants = [Entrant("fake", "", needs_postgres)]
    session.servers.missing["postgres"] = "no program"
    monkeypatch.setattr(rounds, "install", lambda name, peer: "fake 1.0")
    assert measure("noop10", session).missing == {"fake": "no postgres: no program"}


def test_unsupported_workload_is_missing_with_the_reason(session):
    session.entrants = [
        Entrant("fake", "", fake_peer(variants={"": Variant("", ())}, unsupported={"noop10": "no steps"}))
    ]
    assert measure("noop10", session).missing == {"fake": "no steps"}


def test_failing_perdure_ends_the_measurement(session, monkeypatch):
    session.entrants = select_entrants(["perdure-sqlite"])

    def fail(*given):
        raise SubjectFailed("a defect")

    monkeypatch.setattr(rounds, "_run", fail)
    with pytest.raises(SystemExit, match="perdure-sqlite: failed\na defect"):
        measure("noop10", session)


def test_subjects_are_isolated_by_sync_and_rotation(session, monkeypatch):
    """Pending writes are flushed before each subject, and each round starts with another engine."""
    variants = {name: Variant(name, ("noop10",)) for name in ("a", "b", "c")}
    session.entrants = [Entrant("fake", name, fake_peer(variants=variants)) for name in variants]
    calls = []

    def run(command, **given):
        calls.append(command[4])
        return subprocess.CompletedProcess(command, 0, stdout='{"steps_per_s": 1}\n')

    monkeypatch.setattr(rounds, "install", lambda name, peer: "fake 1.0")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(os, "sync", lambda: calls.append("sync"))
    measure("noop10", session)
    a, b, c = (entrant.name for entrant in session.entrants)
    assert calls == ["sync", a, "sync", b, "sync", c, "sync", b, "sync", c, "sync", a]


def test_engine_is_measured_through_its_adapter(tmp_path):
    from benchmarks.measurements import _with_engine, latency, noop10

    sizes = {"warm_up_ms": 0, "measured_ms": 1, "at_once": 2, "warm_up": 1, "runs": 20, "most_ms": 1}
    setting = Setting(tmp_path, tmp_path, sizes)
    entrant = Entrant("fake", "", fake_peer())
    assert asyncio.run(_with_engine(noop10, entrant, setting))["runs"] >= 2
    assert asyncio.run(_with_engine(latency, entrant, setting))["runs"] == 20


# --- ratios and the chart --------------------------------------------------------------------------------------------


def test_ratio_is_how_many_times_better_perdure_is():
    ours, theirs = select_entrants(["perdure-sqlite"])[0], select_entrants(["restate"])[0]
    measured = [{"perdure-sqlite": {"n": 20.0}, "restate": {"n": 5.0}}]
    more = Comparison("n", "steps", "steps/s", targets={("sqlite", "restate"): 5})
    less = Comparison("n", "seconds", "s", more_is_better=False)
    ratio = compute_figures(list(more.figures([ours, theirs])), measured)[-1]
    assert (ratio.title, ratio.median, ratio.met) == ("steps: Perdure, SQLite against Restate", 4.0, False)
    assert compute_figures(list(less.figures([ours, theirs])), measured)[-1].median == 0.25


def test_variant_without_target_gets_none():
    ours, plain, grouped = (select_entrants([name])[0] for name in ("perdure-sqlite", "rivet", "rivet-grouped"))
    comparison = Comparison("n", "steps", "steps/s", targets={("sqlite", "rivet"): 5})
    ratios = [each for each in comparison.figures([ours, plain, grouped]) if each.unit == "x"]
    assert [each.at_least for each in ratios] == [5, None]


def test_stores_are_compared_with_the_alternatives_of_their_users():
    by_name = {each.name: each for each in all_entrants()}

    def alternatives(name: str) -> set[str]:
        return {other for other, each in by_name.items() if is_alternative(by_name[name], each)}

    assert alternatives("perdure-sqlite") == {"dbos-sqlite", "dbos-sqlite-sync", "restate", "rivet", "rivet-grouped"}
    servers = {"dbos-postgres", "dbos-postgres-sync", "restate", "absurd"}
    assert alternatives("perdure-postgres") == servers
    assert alternatives("perdure-redis") == servers | {"perdure-postgres"}


def test_targets_name_existing_stores_and_peers():
    for name in MODULES:
        for comparison in load_workload(name).compared:
            for store, peer_name in comparison.targets:
                assert store in load_peer("perdure").variants
                assert peer_name in peer_names()


def test_chart_has_a_bar_for_every_engine():
    figures = [
        FigureResult("steps: Perdure, SQLite", "steps/s", 12_000, 1, 2, subject="perdure-sqlite"),
        FigureResult("steps: A & B", "steps/s", 200, 1, 2, subject="a"),
        FigureResult("steps: Perdure, SQLite against A & B", "x", 60, 1, 2),
    ]
    result = Result(
        "noop10", "a title", "2025-01-02T03:04:05+00:00", collect_machine_info(), {"runs": 1}, [{}], figures
    )
    drawn = ET.fromstring(build_chart([result]))
    bars = drawn.findall("{http://www.w3.org/2000/svg}rect")
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [float(bar.attrib["width"]) > 0 for bar in bars] == [True, True]
    assert "noop10: steps (steps/s, more is better)" in texts
    assert "A & B" in texts
    assert "12,000" in texts


def test_workload_without_comparison_has_no_engines(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "load_workload", lambda name: Workload("", {}, [], sizes={}, quick={}))
    given = Session(
        tmp_path, BenchmarkServers(tmp_path / "servers"), all_entrants(), rounds=1, scale=1, progress=lambda text: None
    )
    assert measure("evicted", given).rounds == [{}]
