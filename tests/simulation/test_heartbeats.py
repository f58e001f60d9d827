"""Simulated faults while every step sends heartbeats: all guarantees hold, and no step sees those of another."""

import pytest

from perdure.execution.step_executor import Attempt, StepExecutor
from tests.simulation.run_seed import simulate

SEEDS = range(8)


def test_all_guarantees_hold_while_steps_send_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    start = StepExecutor._start
    handed_on: list[str] = []
    foreign: list[str] = []

    def start_and_beat(self: StepExecutor, attempt: Attempt, now: float) -> None:
        start(self, attempt, now)
        last = attempt.last_heartbeat
        if last is not None:  # a rewind and a fork make a new key
            (handed_on if last == attempt.idempotency_key else foreign).append(last)

        def beat() -> None:
            if not attempt.ended:
                attempt.heartbeat(attempt.idempotency_key)
                self._clock.call_at(self._clock.now() + 0.4, beat)

        beat()

    monkeypatch.setattr(StepExecutor, "_start", start_and_beat)
    assert {seed: found for seed in SEEDS if (found := simulate(seed).violations)} == {}
    assert foreign == []
    assert len(handed_on) >= 5
