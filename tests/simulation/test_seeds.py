"""Tests of the simulator, which run seeds as the command line does, in a separate process."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.testing.simulation.fault_plan import (
    AT_CALLS,
    AT_CLAIMS,
    AT_COMMITS,
    IN_TIME,
    ROW_UNREADABLE,
    Fault,
    Plan,
    draw_plan,
    shrink,
)
from perdure.testing.simulation.randomness import seeded_random
from tests.servers.postgres import ENVIRONMENT, shared_url
from tests.simulation.mutations import MUTANTS
from tests.simulation.postgres_store import postgres
from tests.simulation.queue_mutations import QUEUE_MUTANTS
from tests.simulation.random_programs import RUNS
from tests.simulation.reference_model import expected_of_run
from tests.simulation.run_seed import CLIENTS, WORKERS, _deploy, _program, simulate
from tests.simulation.schedule_mutations import SCHEDULE_MUTANTS
from tests.simulation.stores import sqlite
from tests.simulation.workflows import FLOWS

ROOT = Path(__file__).parents[2]
SEEDS, SHARDS = 80, 4  # `make test-long` runs 1,000
ENOUGH = 200  # seeds that must detect a mutant


def run_simulator(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *options],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("shard", range(SHARDS))
def test_all_guarantees_hold_for_many_seeds(shard):
    size = SEEDS // SHARDS
    result = run_simulator("--start", str(shard * size), "--seeds", str(size))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("shard", range(SHARDS))
def test_all_guarantees_hold_for_runs_of_queues(shard):
    size = SEEDS // SHARDS
    result = run_simulator("--queues", "--start", str(30_000 + shard * size), "--seeds", str(size))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "options", [("--schedules",), ("--schedules", "--queues"), ("--schedules", "--store", "sqlite")]
)
def test_all_guarantees_hold_for_schedules(options):
    size = "10" if "sqlite" in options else str(SEEDS // SHARDS)
    result = run_simulator(*options, "--start", "60000", "--seeds", size)
    assert result.returncode == 0, result.stdout + result.stderr


def test_all_guarantees_hold_for_runs_of_queues_on_sqlite():
    result = run_simulator("--queues", "--store", "sqlite", "--seeds", "10", "--start", "40000")
    assert result.returncode == 0, result.stdout + result.stderr


def test_all_guarantees_hold_for_runs_of_queues_on_postgres():
    server = {ENVIRONMENT: shared_url()}
    result = run_simulator("--queues", "--store", "postgres", "--seeds", "3", "--start", "50000", **server)
    assert result.returncode == 0, result.stdout + result.stderr


def test_all_guarantees_hold_on_sqlite():
    result = run_simulator("--store", "sqlite", "--seeds", "10", "--start", "10000")
    assert result.returncode == 0, result.stdout + result.stderr


def test_all_guarantees_hold_on_postgres():
    server = {ENVIRONMENT: shared_url()}
    result = run_simulator("--store", "postgres", "--seeds", "3", "--start", "20000", **server)  # `test-long`: 200
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("mutant", [*MUTANTS, *QUEUE_MUTANTS, *SCHEDULE_MUTANTS])
def test_a_planted_bug_is_caught(mutant):
    result = run_simulator("--mutant", mutant, "--seeds", str(ENOUGH))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("seed", [1, 4, 9])
def test_seed_determines_the_trace(seed):
    assert simulate(seed).trace == simulate(seed).trace


def test_seed_determines_the_trace_of_queues():
    first, second = (run_simulator("--queues", "--seed", "7", "--trace").stdout for _ in range(2))
    assert "Admitted" in first
    assert first == second


def test_seed_determines_the_trace_in_every_process():
    first, second = (run_simulator("--seed", "7", "--trace").stdout for _ in range(2))
    assert len(first) > 1_000
    assert first == second


def test_seed_determines_the_trace_on_sqlite():
    with sqlite() as make_store:
        assert simulate(3, make_store=make_store).trace == simulate(3, make_store=make_store).trace


def test_seed_determines_the_trace_on_postgres():
    with postgres() as make_store:
        first, second = (simulate(3, make_store=make_store).trace for _ in range(2))
    assert len(first) > 100
    assert first == second


def test_another_seed_gives_another_trace():
    assert simulate(1).trace != simulate(2).trace


def test_failure_report_says_how_to_reproduce_it():
    """A mutant causes the failure. The report has the seed, the violations, the needed faults and a command."""
    code = (
        "import sys; from tests.simulation import command_line, mutations\n"
        "sys.argv = ['simulate', '--seeds', '20']\n"
        "with mutations.drop_messages_on_suspend(): command_line.main()"
    )
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    seed = re.search(r"seed (\d+) fails:", done.stdout)
    assert seed is not None
    assert "faults it still does:" in done.stdout
    assert f"python -m tests.simulation --seed {seed[1]} --trace" in done.stdout


def test_fault_plan_is_shrunk_to_the_faults_it_needs():
    faults = tuple(Fault("slow", "w0", n) for n in range(8))
    needed = {faults[2], faults[5]}
    assert set(shrink(Plan(faults), lambda plan: needed <= set(plan.faults)).faults) == needed


def test_random_plans_contain_every_kind_of_fault():
    drawn = [draw_plan(random.Random(seed), WORKERS, CLIENTS, RUNS) for seed in range(200)]
    kinds = {fault.kind for plan in drawn for fault in plan.faults}
    assert kinds == {*AT_COMMITS, *AT_CALLS, *AT_CLAIMS, *IN_TIME, ROW_UNREADABLE}


@pytest.mark.parametrize(
    ("trees", "outcome"),
    [
        ([["seq", 0, [["ok", 3, []], ["flaky", 4, []]]]], ("value", [3, 4])),
        ([["seq", 0, [["fails", 3, []], ["receive", 0, []]]]], ("error", "StepFailed")),
        ([["seq", 0, [["receive", 0, []], ["fails", 3, []]]]], None),
        ([["raise", 0, []], ["ok", 1, []]], ("error", "LookupError")),
        ([["join", 0, [["ok", 1, []], ["hangs", 1, []]]]], ("value", "JoinError")),
        ([["loop", 2, [["seq", 0, [["ok", 5, []]]]]]], ("value", [2, [5]])),
        ([["child", 0, [["seq", 0, [["fails", 1, []]]]]]], ("error", "ChildFailed")),
        ([["started", 0, [["seq", 0, [["fails", 1, []]]]]]], ("value", ["failed", None])),
    ],
)
def test_the_model_says_what_a_tree_comes_to(trees, outcome):
    assert expected_of_run(trees) == outcome


@pytest.mark.parametrize(
    ("flow", "trees", "outcome"),
    [
        ("sim.tree", [["seq", 0, [["lately", 3, []]]]], ("error", "StepFailed")),
        ("sim.again", [["seq", 0, [["lately", 3, []]]]], ("value", [3])),
        ("sim.again", [["seq", 0, [["fails", 3, []]]]], ("error", "StepFailed")),
        ("sim.holding", [["seq", 0, [["fails", 3, []]]]], ("value", [3])),
        ("sim.holding", [["ok", 3, []], ["ok", 4, []]], ("value", 4)),
        ("sim.holding", [["ok", 3, []], ["fails", 4, []]], None),  # it continues as sim.tree, repaired or not
        ("sim.hasty", [["ok", 1, []]], None),
        ("sim.grown", [["ok", 1, []]], ("value", 1)),
        ("sim.grown", [["ok", 1, []], ["ok", 2, []]], ("value", ["version 2", 1, 2])),
        ("sim.gated", [["ok", 1, []], ["ok", 2, []]], ("value", ["gate", 1, 2])),
        ("sim.tree", [["child", 3, [["lately", 5, []]]]], ("value", 5)),  # a child that is retried
        ("sim.tree", [["child", 4, [["ok", 5, []]]]], None),  # a child that may time out
    ],
)
def test_the_model_knows_what_a_workflow_makes_of_a_tree(flow, trees, outcome):
    assert expected_of_run(trees, flow) == outcome


def test_random_seeds_cover_every_workflow_and_code_change():
    deploys = [_deploy(seeded_random(seed, "deploy"), WORKERS, None) for seed in range(100)]
    drawn = {(deploy.rolling, _program(seeded_random(n), deploy, None).flow) for n, deploy in enumerate(deploys * 10)}
    assert {flow for rolling, flow in drawn if not rolling} == set(FLOWS)
    assert {flow for rolling, flow in drawn if rolling} == set(FLOWS) - {"sim.gated"}
