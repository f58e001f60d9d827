"""A parent with children, a loop and compensations is killed repeatedly: each recorded effect happens once."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.effect_log import Effect
from tests.crash.process_harness import STORES, Scenario, scenario
from tests.crash.programs.parent_and_children import CHILDREN, ROUNDS, expected

KILLS = 12
EFFECTS = 2 * CHILDREN + 2 * ROUNDS


@pytest.mark.parametrize("kind", STORES)
def test_parent_and_children_survive_repeated_sigkill(kind: str, tmp_path: Path) -> None:
    dice = random.Random(20_250_302)
    with scenario(tmp_path, kind) as here:
        recorded_at_kills = []  # (how many effects there were, what was recorded)
        for number in range(KILLS):
            _kill_at_some_moment(here, dice, early=number % 4 == 3)
            recorded_at_kills.append((len(here.effects()), _recorded(here)))
            if here.statuses().get("family") == "failed":
                break
        assert len(recorded_at_kills) >= KILLS // 2, "it was killed while there was work"
        here.until_ended(here.start("parent_and_children"))
        _check_outcome(here)
        _check_effects(here.effects(), recorded_at_kills)


def _kill_at_some_moment(here: Scenario, dice: random.Random, *, early: bool) -> None:
    """Kill a worker while it starts up, or after it has executed more steps."""
    before = len(here.effects())
    worker = here.start("parent_and_children")
    if early:
        until, more = time.monotonic() + dice.uniform(0.1, 0.6), 10**9
    else:
        until, more = time.monotonic() + 20.0, dice.randint(1, 2 * EFFECTS // KILLS)
    here.until(
        lambda: time.monotonic() > until or len(here.effects()) >= before + more or worker.poll() is not None,
        "the moment to kill has come",
    )
    here.kill(worker)


def _recorded(here: Scenario) -> frozenset[tuple[str, str]]:
    """The steps that have a result, including those of pruned loop iterations."""
    begun = [location for run, location in here.history() if run == "family" and location.startswith("rounds/~")]
    last = max((int(location.split("/")[1][1:]) for location in begun), default=0)
    return here.recorded() | {("family", f"rounds/~{number}/do") for number in range(last)}


def _check_outcome(here: Scenario) -> None:
    children = {
        f"family/crash.child#{number}" if number else "family/crash.child": number for number in range(CHILDREN)
    }
    assert here.results() == {run: str(n**2 + (n + 1) ** 2) for run, n in children.items()}
    assert here.statuses() == {**dict.fromkeys(children, "succeeded"), "family": "failed"}
    runs = {run.id: run for run in here.book.runs()}
    assert f"{expected()} in all" in (runs["family"].error or "")
    assert not any(run.unfinalized for run in runs.values())


def _check_effects(lines: list[Effect], recorded_at_kills: list[tuple[int, frozenset[tuple[str, str]]]]) -> None:
    steps = {(line.step, line.what) for line in lines}
    assert len(steps) == EFFECTS, "every step was executed, and every one of the loop was undone"
    undone = [int(line.what.partition("-")[2]) for line in lines if line.what.startswith("undone")]
    assert list(dict.fromkeys(undone)) == list(reversed(range(ROUNDS))), "the last one first"
    for (step, pid), times in Counter((line.step, line.pid) for line in lines).items():
        assert times == 1, f"{step} was executed {times} times by process {pid}"
    for effects_before, recorded in recorded_at_kills:
        again = {line.step for line in lines[effects_before:]} & recorded
        assert not again, f"recorded before a kill, and executed after it: {sorted(again)}"
    # A step that was executed twice was running at a kill: executed, but not recorded.
    in_flight: Counter[tuple[str, str]] = Counter()
    for effects_before, recorded in recorded_at_kills:
        pid = lines[effects_before - 1].pid if effects_before else 0
        in_flight.update({line.step for line in lines[:effects_before] if line.pid == pid} - recorded)
    done = Counter(line.step for line in lines)
    assert {step: times for step, times in done.items() if times > 1 + in_flight[step]} == {}
