"""Planned faults of the simulator have their effect, and the reference model allows their consequences."""

import asyncio
from typing import Any

import pytest

from perdure.testing.clock import START
from perdure.testing.simulation.event_loop import SimulatedLoop
from perdure.testing.simulation.fault_plan import Fault, Plan
from perdure.testing.simulation.process import Process
from tests.simulation.random_clients import Program
from tests.simulation.random_programs import RUNS
from tests.simulation.run_seed import simulate

SLOW_STEP = Program("sim.tree", [["seq", 0, [["slow", 3, []]]]])  # 0.8 seconds


def in_simulation(test: Any) -> Any:
    loop = SimulatedLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(test(Process("w0", loop, lambda line: None, {})))


def at(text: str, lines: list[str]) -> list[float]:
    """The times of the lines of a trace that contain a text."""
    return [float(line.split()[0]) for line in lines if text in line]


def test_client_that_opens_during_an_outage_opens_again():
    plan = Plan(tuple(Fault("error", "c0", n, amount=5.0) for n in (1, 6, 11)))
    result = simulate(1, plan)
    assert at("c0 cannot open its client", result.trace)
    assert result.violations == []


def test_step_may_time_out_when_its_worker_is_paused_for_longer_than_its_timeout():
    """The worker had the result and the timeout to handle at the same time, and may handle the timeout first."""
    timed_out = []
    for seed in range(3):
        programs = dict.fromkeys(RUNS, SLOW_STEP)
        started_at = at("executes", simulate(seed, Plan(), programs=programs).trace)[0]
        pauses = [Fault("paused", worker, at=started_at + 0.1, amount=8.0) for worker in ("w0", "w1", "w2")]
        result = simulate(seed, Plan(tuple(pauses)), programs=programs)
        assert result.violations == []
        timed_out += at("sim.work=failed", result.trace)
    assert timed_out, "no pause outlasted a step, so the test proves nothing"


def test_step_that_times_out_without_a_pause_is_a_violation(monkeypatch):
    monkeypatch.setattr("tests.simulation.random_programs.BEHAVIOURS", ("ok",))
    monkeypatch.setattr("tests.simulation.final_checks.expected_of_run", lambda *_, **__: ("value", ["done"]))
    hangs = Program("sim.tree", [["seq", 0, [["hangs", 3, []]]]])
    result = simulate(1, Plan(), programs=dict.fromkeys(RUNS, hangs))
    assert any("has outcome ('error', 'StepFailed')" in each for each in result.violations)


@pytest.mark.parametrize(("rate", "seconds"), [(0.5, 20.0), (1.0, 10.0), (1.5, 10.0 / 1.5)])
def test_timers_of_a_drifting_clock_follow_its_rate(rate, seconds):
    async def test(process: Process) -> None:
        fired = asyncio.get_running_loop().create_future()
        due = process.now() + 10.0
        process.call_at(due, lambda: fired.set_result(process.now()))
        process.set_clock_rate(rate)
        assert await fired >= due
        assert process.loop.current_time - START == pytest.approx(seconds, abs=1e-5)

    in_simulation(test)


def test_clock_that_stood_still_is_behind_until_it_is_corrected():
    async def test(process: Process) -> None:
        fired = asyncio.get_running_loop().create_future()
        process.call_at(process.now() + 1.0, lambda: fired.set_result(None))
        process.set_clock_rate(0.0)
        await process.wait(60.0)
        assert process.now() == START
        assert not fired.done()
        process.set_clock_rate(1.0)
        await fired
        assert process.loop.current_time == pytest.approx(START + 61.0)
        assert process.now() == pytest.approx(START + 1.0)
        process.correct_clock()
        assert process.now() == process.loop.current_time

    in_simulation(test)


def test_cancelled_timer_does_not_fire_after_the_rate_changes():
    async def test(process: Process) -> None:
        fired: list[float] = []
        process.call_at(process.now() + 1.0, lambda: fired.append(process.now())).cancel()
        process.set_clock_rate(2.0)
        await process.wait(10.0)
        assert fired == []

    in_simulation(test)


@pytest.mark.parametrize("kind", ["clock drifts", "clock stands still"])
def test_all_guarantees_hold_with_wrong_clocks(kind):
    faults = [Fault(kind, worker, at=1.0, amount=rate) for worker, rate in (("w0", 1.5), ("w1", 0.5))]
    for seed in range(3):
        result = simulate(seed, Plan(tuple(faults)))
        assert at("the clock of w0 runs at", result.trace)
        assert result.violations == []


def test_all_guarantees_hold_with_unreadable_rows():
    plan = Plan(tuple(Fault("row unreadable", run_id, at=0.0) for run_id in RUNS))
    result = simulate(1, plan)
    assert at("row unreadable", result.trace)
    assert result.violations == []


def test_imports_and_followers_are_drawn():
    counts: dict[str, int] = {}
    for seed in range(6):
        for what, n in simulate(seed).counts.items():
            counts[what] = counts.get(what, 0) + n
    assert counts["imports"]
    assert counts["followers"]
    assert counts["unreadable rows"]
