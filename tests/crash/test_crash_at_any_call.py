"""A process dies at a random function call in the engine, the store or the workflow, and again after each restart."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.crash.effect_log import Effect
from tests.crash.process_harness import STORES, Scenario, scenario
from tests.crash.programs.crash_at_any_call import RUNS, expected
from tests.crash.store_readers import Recorded

SEEDS = {"sqlite": 6, "postgres": 3, "redis": 3}

# The steps that must be recorded before a step may start.
AFTER = {
    "fetch": ["compute", "sleep"],
    "compute#1": ["compute", "sleep"],
    "flaky": ["compute", "sleep"],
    "hopeless": ["fetch", "compute#1", "flaky"],
    **{f"branch{number}/fetch": ["hopeless", "~timer"] for number in ("", "#1", "#2")},
    **{f"branch{number}/compute": [f"branch{number}/fetch"] for number in ("", "#1", "#2")},
}

Snapshot = tuple[int, dict[tuple[str, str], Recorded]]  # how many effects there were, and what was recorded


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in STORES for seed in range(SEEDS[kind])])
def test_workflow_survives_sigkill_at_any_call(kind: str, seed: int, tmp_path: Path) -> None:
    with scenario(tmp_path, kind) as here:
        snapshots = _live_and_die(here, seed)
        assert snapshots, "it was killed at least once"
        results = {run: json.loads(result) for run, result in here.results().items()}
        assert results == {f"run-{number}": expected(number) for number in range(RUNS)}
        snapshots.append((len(here.effects()), here.history()))
        _check_effects(here.effects(), snapshots)
        _check_that_history_only_grows(snapshots)


def _live_and_die(here: Scenario, seed: int) -> list[Snapshot]:
    """Return the recorded steps at each death."""
    program = here.start("crash_at_any_call", seed, talks=True)
    assert program.stdout is not None
    assert program.stdin is not None
    snapshots = []
    while program.stdout.readline() == b"died\n":
        snapshots.append((len(here.effects()), here.history()))
        program.stdin.write(b"\n")
        program.stdin.flush()
    program.stdin.close()
    here.until_ended(program)
    return snapshots


def _check_effects(lines: list[Effect], snapshots: list[Snapshot]) -> None:
    for execution, times in Counter((line.step, line.attempt, line.pid) for line in lines).items():
        assert times == 1, f"executed {times} times in one life: {execution}"
    for effects_before, recorded in snapshots:
        for line in lines[:effects_before]:
            for earlier in AFTER.get(line.location, ()):
                entry = recorded.get((line.run, earlier))
                assert entry is not None, f"{line.step} began before {earlier} was recorded"
                assert entry.status != "pending", f"{line.step} began before {earlier} had ended"
        for line in lines[effects_before:]:
            entry = recorded.get(line.step)
            if entry is not None:
                assert entry.status == "pending", f"{line.step} had ended, and was executed again"
                assert line.attempt > entry.attempts, f"attempt {line.attempt} of {line.step} had failed already"
    for step, entry in snapshots[-1][1].items():
        if entry.kind == "step":
            attempts = {line.attempt for line in lines if line.step == step}
            assert attempts == set(range(1, entry.attempts + 1)), f"attempts of {step} were skipped or lost"


def _check_that_history_only_grows(snapshots: list[Snapshot]) -> None:
    for (_, before), (_, after) in pairwise(snapshots):
        for key, entry in before.items():
            later = after[key]
            if entry.status != "pending":
                assert later == entry, "what has ended does not change"
            elif later.attempts == entry.attempts and later.status in ("pending", "succeeded"):
                assert later.due_at == entry.due_at, f"a restart moved the time of {key}"
