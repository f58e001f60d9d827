"""The comparison with peers, without peers: what is installed, left out, compared and drawn. No test asks how fast."""

import asyncio
import os
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import rounds
from benchmarks.chart import chart_of
from benchmarks.comparison import Comparison, rivals
from benchmarks.harness import FigureResult, Result, Setting, Workload, figures_of, workload
from benchmarks.machine_info import facts
from benchmarks.peer_environments import NotInstallable, python_of
from benchmarks.peer_protocol import PEERS, Adapter, Entrant, Peer, Variant, chosen, entrants, peer, peer_names
from benchmarks.rounds import Rig, SubjectFailed, measure
from benchmarks.servers import Hosts
from benchmarks.step_bodies import WORKFLOWS, Gate
from benchmarks.workloads import MODULES
from benchmarks.workloads.throughput import WORKLOAD as NOOP10


class Pretended(Adapter):
    """An engine that does nothing, at once."""

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def execute(self, workflow: str, number: int) -> int:
        return number


def pretended(**given: object) -> Peer:
    peer = Peer("Pretended", Pretended, {"": Variant("", ("noop10",))}, settings="none", python=("pretended",))
    return replace(peer, **given)  # type: ignore[arg-type]


# --- what peers say of themselves ------------------------------------------------------------------------------------


def test_every_file_of_peers_is_an_engine_and_perdure_is_the_first():
    assert peer_names()[0] == "perdure"
    assert {"dbos", "restate", "absurd", "rivet"} <= set(peer_names())
    for name in peer_names():
        assert peer(name).title
        assert peer(name).settings
        assert (PEERS / f"{name}.py").exists()


def test_a_peer_measures_or_explains_every_workload_that_is_compared():
    compared = [name for name in MODULES if workload(name).compared]
    for name in peer_names():
        able = {each for variant in peer(name).variants.values() for each in variant.workloads}
        assert able | set(peer(name).cannot) == set(compared)


def test_engines_are_chosen_by_name_or_its_beginning():
    assert [each.name for each in chosen(["dbos-sqlite"])] == ["dbos-sqlite", "dbos-sqlite-sync"]
    assert {each.peer_name for each in chosen(["restate", "perdure"])} == {"restate", "perdure"}
    assert len(chosen([])) == len(entrants())
    with pytest.raises(SystemExit, match="no such engine: temporal; there are perdure-sqlite"):
        chosen(["temporal"])


def test_peers_have_environments_of_their_own():
    assert "dbos" in python_of("dbos", peer("dbos"))
    assert python_of("dbos", peer("dbos")) != python_of("perdure", peer("perdure"))


def test_what_peers_import_here_is_in_the_standard_library():
    """They are read in each other's environments, where nothing else is installed."""
    for name in ("peer_protocol", "measurements", "step_bodies", "harness", "peer_environments", "run_peer"):
        text = (PEERS.parent / f"{name}.py").read_text()
        assert not [word for word in ("apsw", "msgspec", "rich", "asyncpg", "from perdure") if f"import {word}" in text]
        assert "from perdure" not in text


# --- the gate of recovery --------------------------------------------------------------------------------------------


def test_nobody_passes_a_gate_that_is_shut(tmp_path):
    async def main() -> None:
        gate = Gate(tmp_path)
        assert gate.arrivals == 0
        stopped = [asyncio.create_task(Gate(tmp_path).stop(n)) for n in range(3)]
        await asyncio.sleep(0)
        assert gate.arrivals == 3
        assert not any(task.done() for task in stopped)
        for task in stopped:
            task.cancel()
        gate.open()
        assert await gate.stop(7) == 7
        assert gate.arrivals == 3

    asyncio.run(main())
    assert set(WORKFLOWS) == {"one_step", "ten_steps", "halfway", "children", "parallel"}


# --- who is left out -------------------------------------------------------------------------------------------------


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(rounds, "workload", lambda name: replace(NOOP10, subjects={}))
    entrant = Entrant("pretended", "", pretended())
    return Rig(tmp_path, Hosts(tmp_path / "servers"), [entrant], rounds=2, scale=0, progress=lambda text: None)


def test_a_peer_that_cannot_be_installed_is_missing_with_the_reason(rig, monkeypatch):
    def refuse(name, peer):
        raise NotInstallable("there is no network")

    monkeypatch.setattr(rounds, "install", refuse)
    outcome = measure("noop10", rig)
    assert outcome.missing == {"pretended": "not installed: there is no network"}
    assert outcome.rounds == [{}, {}]


def test_a_peer_that_fails_is_missing_with_the_reason_and_counts_in_no_round(rig, monkeypatch):
    answers = iter([{"steps_per_s": 1.0}, SubjectFailed("a long story\nConnectionError: it ends here\n")])

    def run(*given):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(rounds, "install", lambda name, peer: "pretended 1.0")
    monkeypatch.setattr(rounds, "_run", run)
    outcome = measure("noop10", rig)
    assert outcome.missing == {"pretended": "failed in round 2: ConnectionError: it ends here"}
    assert outcome.rounds == [{}, {}]
    assert outcome.entrants == []


def test_a_peer_without_its_server_is_missing_with_the_reason(rig, monkeypatch):
    needing = pretended(variants={"": Variant("", ("noop10",), needs=("postgres",))})
    rig.entrants = [Entrant("pretended", "", needing)]
    rig.hosts.missing["postgres"] = "nothing to start"
    monkeypatch.setattr(rounds, "install", lambda name, peer: "pretended 1.0")
    assert measure("noop10", rig).missing == {"pretended": "no postgres: nothing to start"}


def test_what_a_peer_cannot_do_is_missing_with_the_reason(rig):
    rig.entrants = [Entrant("pretended", "", pretended(variants={"": Variant("", ())}, cannot={"noop10": "no steps"}))]
    assert measure("noop10", rig).missing == {"pretended": "no steps"}


def test_perdure_that_fails_ends_the_measurement(rig, monkeypatch):
    rig.entrants = chosen(["perdure-sqlite"])

    def fail(*given):
        raise SubjectFailed("a defect")

    monkeypatch.setattr(rounds, "_run", fail)
    with pytest.raises(SystemExit, match="perdure-sqlite: failed\na defect"):
        measure("noop10", rig)


def test_nobody_pays_for_his_neighbours(rig, monkeypatch):
    """What the one before has left to write is on the disk, and no engine always follows the same other."""
    variants = {name: Variant(name, ("noop10",)) for name in ("a", "b", "c")}
    rig.entrants = [Entrant("pretended", name, pretended(variants=variants)) for name in variants]
    happened = []

    def run(command, **given):
        happened.append(command[4])
        return subprocess.CompletedProcess(command, 0, stdout='{"steps_per_s": 1}\n')

    monkeypatch.setattr(rounds, "install", lambda name, peer: "pretended 1.0")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(os, "sync", lambda: happened.append("sync"))
    measure("noop10", rig)
    a, b, c = (entrant.name for entrant in rig.entrants)
    assert happened == ["sync", a, "sync", b, "sync", c, "sync", b, "sync", c, "sync", a]


def test_an_engine_is_measured_through_its_adapter(tmp_path):
    from benchmarks.measurements import _with_engine, latency, noop10

    sizes = {"warm_up_ms": 0, "measured_ms": 1, "at_once": 2, "warm_up": 1, "runs": 20, "most_ms": 1}
    setting = Setting(tmp_path, tmp_path, sizes)
    entrant = Entrant("pretended", "", pretended())
    assert asyncio.run(_with_engine(noop10, entrant, setting))["runs"] >= 2
    assert asyncio.run(_with_engine(latency, entrant, setting))["runs"] == 20


# --- ratios and the chart --------------------------------------------------------------------------------------------


def test_ratios_say_how_many_times_better_we_are():
    ours, theirs = chosen(["perdure-sqlite"])[0], chosen(["restate"])[0]
    measured = [{"perdure-sqlite": {"n": 20.0}, "restate": {"n": 5.0}}]
    more = Comparison("n", "steps", "steps/s", targets={("sqlite", "restate"): 5})
    less = Comparison("n", "seconds", "s", more_is_better=False)
    ratio = figures_of(list(more.figures([ours, theirs])), measured)[-1]
    assert (ratio.title, ratio.median, ratio.met) == ("steps: Perdure, SQLite against Restate", 4.0, False)
    assert figures_of(list(less.figures([ours, theirs])), measured)[-1].median == 0.25


def test_no_target_is_held_against_what_is_measured_aside():
    ours, plain, grouped = (chosen([name])[0] for name in ("perdure-sqlite", "rivet", "rivet-grouped"))
    comparison = Comparison("n", "steps", "steps/s", targets={("sqlite", "rivet"): 5})
    ratios = [each for each in comparison.figures([ours, plain, grouped]) if each.unit == "x"]
    assert [each.at_least for each in ratios] == [5, None]


def test_stores_are_compared_with_what_their_users_would_take_instead():
    everyone = {each.name: each for each in entrants()}

    def of(name: str) -> set[str]:
        return {other for other, each in everyone.items() if rivals(everyone[name], each)}

    assert of("perdure-sqlite") == {"dbos-sqlite", "dbos-sqlite-sync", "restate", "rivet", "rivet-grouped"}
    servers = {"dbos-postgres", "dbos-postgres-sync", "restate", "absurd"}
    assert of("perdure-postgres") == servers
    assert of("perdure-redis") == servers | {"perdure-postgres"}


def test_targets_name_stores_and_peers_that_there_are():
    for name in MODULES:
        for comparison in workload(name).compared:
            for store, rival in comparison.targets:
                assert store in peer("perdure").variants
                assert rival in peer_names()


def test_the_chart_has_a_bar_for_every_engine():
    figures = [
        FigureResult("steps: Perdure, SQLite", "steps/s", 12_000, 1, 2, subject="perdure-sqlite"),
        FigureResult("steps: A & B", "steps/s", 200, 1, 2, subject="a"),
        FigureResult("steps: Perdure, SQLite against A & B", "x", 60, 1, 2),
    ]
    told = Result("noop10", "a title", "2025-01-02T03:04:05+00:00", facts(), {"runs": 1}, [{}], figures)
    drawn = ET.fromstring(chart_of([told]))
    bars = drawn.findall("{http://www.w3.org/2000/svg}rect")
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [float(bar.attrib["width"]) > 0 for bar in bars] == [True, True]
    assert "noop10: steps (steps/s, more is better)" in texts
    assert "A & B" in texts
    assert "12,000" in texts


def test_a_workload_that_is_not_compared_has_no_engines(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "workload", lambda name: Workload("", {}, [], sizes={}, quick={}))
    given = Rig(tmp_path, Hosts(tmp_path / "servers"), entrants(), rounds=1, scale=1, progress=lambda text: None)
    assert measure("evicted", given).rounds == [{}]
