"""A worker is killed with SIGKILL repeatedly: every run ends, and no recorded step is executed again."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.effect_log import Effect
from tests.crash.process_harness import STORES, Scenario, scenario
from tests.crash.programs.ten_steps import RUNS, STEPS, expected
from tests.repetitions import repetitions

KILLS = repetitions(6, 14)


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_runs_survive_repeated_sigkill(kind: str, tmp_path: Path) -> None:
    dice = random.Random(20_240_817)
    with scenario(tmp_path, kind) as here:
        recorded_at_kills = []  # (how many effects there were, what was recorded)
        for number in range(KILLS):
            _kill_at_some_moment(here, dice, early=number % 4 == 3)
            recorded_at_kills.append((len(here.effects()), here.recorded()))
            if len(here.results()) == RUNS:
                break
        assert len(recorded_at_kills) >= KILLS // 2, "it was killed while there was work"
        here.until_ended(here.start("ten_steps"))
        _check_outcome(here)
        _check_effects(here, recorded_at_kills)


def _kill_at_some_moment(here: Scenario, dice: random.Random, *, early: bool) -> None:
    """Kill a worker while it starts up, or after it has executed more steps."""
    before = len(here.effects())
    worker = here.start("ten_steps")
    if early:
        until, more = time.monotonic() + dice.uniform(0.1, 0.6), 10**9
    else:
        until, more = time.monotonic() + 20.0, dice.randint(1, 2 * RUNS * STEPS // KILLS)
    here.until(
        lambda: time.monotonic() > until or len(here.effects()) >= before + more or worker.poll() is not None,
        "the moment to kill has come",
    )
    here.kill(worker)


def _check_outcome(here: Scenario) -> None:
    assert here.results() == {f"run-{number}": str(expected(number)) for number in range(RUNS)}
    locations = ["square", *(f"square#{number}" for number in range(1, STEPS))]
    assert here.recorded() == {(f"run-{run}", location) for run in range(RUNS) for location in locations}


def _check_effects(here: Scenario, recorded_at_kills: list[tuple[int, frozenset[tuple[str, str]]]]) -> None:
    lines = here.effects()
    done = Counter(line.step for line in lines)
    assert set(done) == here.recorded(), "every step was executed"
    assert all(line.attempt == 1 for line in lines), "an attempt that a crash cut short uses up none"
    for (step, pid), times in Counter((line.step, line.pid) for line in lines).items():
        assert times == 1, f"{step} was executed {times} times by process {pid}"
    for effects_before, recorded in recorded_at_kills:
        again = {line.step for line in lines[effects_before:]} & recorded
        assert not again, f"recorded before a kill, and executed after it: {sorted(again)}"
        _check_one_step_at_a_time(lines[:effects_before], recorded)
    # A step that was executed twice was running at a kill, and not recorded: at most one step of a run per kill.
    in_flight: Counter[tuple[str, str]] = Counter()
    for effects_before, recorded in recorded_at_kills:
        pid = lines[effects_before - 1].pid if effects_before else 0
        in_flight.update(
            {line.step for line in lines[:effects_before] if line.pid == pid and line.step not in recorded}
        )
    assert {step: times for step, times in done.items() if times > 1 + in_flight[step]} == {}


def _check_one_step_at_a_time(lines: list[Effect], recorded: frozenset[tuple[str, str]]) -> None:
    """A result is durable before the next step starts: in each run at most the last executed step is not recorded."""
    unrecorded = Counter(run for run, _ in {line.step for line in lines} - recorded)
    assert all(count == 1 for count in unrecorded.values()), unrecorded
