"""Replay: at every point a run that was lost is the run that it was, and finishes as it would have."""

import asyncio
import gc
import random

import pytest
from msgspec.structs import replace

from perdure.model.records import ErrorRecord
from tests.runner.turn_driver import CLOCK, Play
from tests.runner.workflows import WORKFLOWS, fetch

SEEDS = range(12)

all_workflows = pytest.mark.parametrize("fn", WORKFLOWS, ids=lambda fn: fn.__name__)


def play_noting_choices(fn, seed):
    """A run in a seeded order, with the choices made and the state and number of rows after each turn."""
    dice = random.Random(seed)
    play = Play(fn, seed=seed * 7919 + 1).begin()
    choices, points = [], [(play.state(), len(play.rows), play.now)]
    while play.alive and (open_choices := play.choices()):
        choice = dice.choice(open_choices)
        # A step may also be cut short, and seen by people, at any time.
        if choice != CLOCK and dice.random() < 0.2:
            choices.append(("expose", choice))
            play.expose(choice)
        else:
            choices.append(("move", choice))
            play.move(choice)
        points.append((play.state(), len(play.rows), play.now))
    return play, choices, points


def make_heap_noise(seed):
    dice = random.Random(seed)
    noise = [bytearray(dice.randrange(40, 600)) for _ in range(dice.randrange(300))]
    del noise[:: dice.randrange(2, 5)]
    return noise


@all_workflows
@pytest.mark.parametrize("seed", SEEDS)
def test_replay_at_every_crash_point_restores_the_state_of_the_run(fn, seed):
    live, _, points = play_noting_choices(fn, seed)
    for state, written, now in points:
        noise = make_heap_noise(seed)
        cold = Play(fn, seed=live.seed, rows=live.rows[:written], now=now).begin()
        assert cold.state() == state
        cold.close()
        del noise


@all_workflows
@pytest.mark.parametrize("seed", SEEDS)
def test_replay_without_new_input_writes_nothing(fn, seed):
    live, _, points = play_noting_choices(fn, seed)
    for _, written, now in points[1:]:
        if not written:
            continue  # nothing was committed yet, so that what the first turn wrote is new
        cold = Play(fn, seed=live.seed, rows=live.rows[:written], now=now).begin()
        assert (cold.turn.entries, cold.turn.consumed, cold.turn.drift) == ((), (), ())
        cold.close()


@all_workflows
@pytest.mark.parametrize("seed", range(4))
def test_run_that_crashes_after_every_turn_ends_with_the_same_history(fn, seed):
    live, choices, _ = play_noting_choices(fn, seed)
    play = Play(fn, seed=live.seed).begin()
    for what, choice in choices:
        play = play.crash().begin()
        play.expose(choice) if what == "expose" else play.move(choice)
    assert play.state()["outcome"] == live.state()["outcome"]
    assert without_tracebacks(play.rows) == without_tracebacks(live.rows)


@all_workflows
def test_every_workflow_ends_in_every_order_of_inputs(fn):
    assert all(not play_noting_choices(fn, seed)[0].alive for seed in SEEDS)


def without_tracebacks(rows):
    return [
        replace(row, error=None if row.error is None else ErrorRecord(row.error.type, row.error.message))
        for row in rows
    ]


def test_replay_restarts_only_unrecorded_steps():
    async def two(ctx):
        await fetch("first")
        await fetch("second")

    play = Play(two).begin()
    play.complete("fetch")
    assert play.attempts == {"fetch#1": 1}
    again = play.crash().begin()
    assert again.attempts == {"fetch#1": 1}
    assert again.turn.entries == ()


def test_replay_does_not_restart_the_step_of_a_race_loser():
    async def racing(ctx):
        tasks = [asyncio.create_task(fetch(name)) for name in ("winner", "loser")]
        _, losers = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for loser in losers:
            loser.cancel()
        await fetch("after")

    play = Play(racing).begin()
    play.complete("fetch")
    assert play.cancelled == ["fetch#1"]
    assert play.crash().begin().attempts == {"fetch#2": 1}


def test_last_result_and_end_of_the_run_are_in_one_turn():
    async def one(ctx):
        return await fetch("only")

    turn = Play(one).begin().complete("fetch")
    assert [entry.location for entry in turn.entries] == ["fetch"]
    assert turn.outcome is not None


def test_start_of_a_step_writes_nothing():
    async def one(ctx):
        await fetch("only")

    play = Play(one).begin()
    assert play.turn.entries == ()
    assert play.turn.busy
    play.close()


def test_several_results_in_one_turn_are_applied_in_order():
    async def both(ctx):
        results = []

        async def one(name):
            results.append(await fetch(name))

        await asyncio.gather(one("a"), one("b"))
        return results

    play = Play(both).begin()
    b, a = (play.outcome_of_body(location) for location in ("one#1/fetch", "one/fetch"))
    play.running.clear()
    play.advance(b, a)
    assert play.value == ["b", "a"]
    assert play.replayed_by(both).begin().value == ["b", "a"]


async def one_after_the_other(ctx):
    for number in range(30):
        await fetch(number)
        for _ in range(5):
            await asyncio.sleep(0)
    return "end"


async def two_by_two(ctx):
    async def one(number):
        await asyncio.sleep(0)
        return await fetch(number)

    for number in range(30):
        await asyncio.gather(one(number), one(number))
    return "end"


@pytest.mark.parametrize("fn", [one_after_the_other, two_by_two])
def test_replay_of_a_long_history_is_not_held_for_spinning(fn, monkeypatch):
    monkeypatch.setattr("perdure.runner.event_loop.MAX_CALLBACKS", 100)
    live = Play(fn).run()
    assert live.value == "end"
    assert live.replayed_by(fn).begin().value == "end"


def test_replay_does_not_depend_on_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        live, _, points = play_noting_choices(WORKFLOWS[1], 3)
        state, written, now = points[-1]
        assert Play(WORKFLOWS[1], seed=live.seed, rows=live.rows[:written], now=now).begin().state() == state
    finally:
        gc.enable()
