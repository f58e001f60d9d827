"""A run is restarted under its id, although the caller or the worker of the old generation dies or stops."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest

from tests.crash.process_harness import STORES, Scenario, scenario

CALLS = 12
LONG_LEASE = 60.0


def restart(here: Scenario, first: int, count: int, gate: Path | str = "") -> None:
    """Restart the run with these numbers, in a process that ends afterwards."""
    here.until_ended(here.start("restart_caller", first, count, gate))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", STORES)
def test_a_killed_caller_leaves_a_run_with_its_message_or_an_ended_one(kind: str, seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    with scenario(tmp_path, kind) as here:
        here.start("restart_worker", LONG_LEASE)
        number = 0
        while number < CALLS:
            caller = here.start("restart_caller", number, CALLS, "", talks=True)
            assert caller.stdout is not None
            for _ in range(chance.randint(1, 4)):  # the next call has begun when the line is read
                number = int(caller.stdout.readline()) + 1
            here.kill(caller)
            if (run := next(iter(here.book.runs()), None)) is not None:
                assert run.status in ("pending", "running", "suspended", "succeeded", "cancelled")
            number += 1
        restart(here, number, 1)
        here.until(here.all_succeeded, "the last generation ends")
        assert json.loads(here.results()["job"]) == [number, number]
        finished = [effect.what.split("-")[1:] for effect in here.effects() if effect.what.startswith("finished")]
        assert all(own == message for own, message in finished), "a generation has the message that it was started with"
        assert here.book.unread_events() == []


@pytest.mark.parametrize("kind", STORES)
def test_a_stopped_worker_of_the_old_generation_changes_nothing_when_it_returns(kind: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with scenario(tmp_path, kind) as here:
        old = here.start("restart_worker", LONG_LEASE)
        here.until(here.book.workers, "the first worker joins")
        restart(here, 1, 1, gate)
        here.until(lambda: here.effects("begun-1"), "the first generation executes")
        old.send_signal(signal.SIGSTOP)
        here.start("restart_worker", LONG_LEASE)
        here.until(lambda: len(here.book.workers()) == 2, "the second worker joins")
        restart(here, 2, 1)
        here.until(here.all_succeeded, "the second generation ends on the second worker")
        before = here.book.everything_about("job")
        gate.touch()
        old.send_signal(signal.SIGCONT)
        end_first_worker(here)
        assert here.book.everything_about("job") == before
        assert json.loads(here.results()["job"]) == [2, 2]
        assert not here.effects("finished-1-1")


def end_first_worker(here: Scenario) -> None:
    """Let the worker that was stopped continue to its end: it processes its results before it ends."""
    first = here.processes[0]
    first.send_signal(signal.SIGTERM)
    here.until_ended(first)
