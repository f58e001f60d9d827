"""A turn that is computed in parts is the same as one that is computed at once, wherever it is paused.

The tests of other modules run again here, with a pause at every point at which a turn can be paused.
"""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from perdure import Context, step
from perdure.model.turns import Input, Turn
from perdure.runner import event_loop, history
from perdure.runner.runner import Runner, RunStart
from tests.runner import turn_driver
from tests.runner.test_branches import *  # noqa: F403
from tests.runner.test_cancel import *  # noqa: F403
from tests.runner.test_random_workflows import *  # noqa: F403
from tests.runner.test_receive import *  # noqa: F403
from tests.runner.test_rerun_after_rewind import *  # noqa: F403
from tests.runner.turn_driver import Play, note

PARTS: list[int] = [0]
"""The number of parts of the last turn."""


class PausingRunner(Runner):
    """Computes each turn in as many parts as possible."""

    __slots__ = ()

    def __init__(self, start: RunStart) -> None:
        super().__init__(replace(start, should_pause=lambda: True))

    def advance(self, now: float, inputs: Sequence[Input] = ()) -> Turn:
        PARTS[0] = 1
        turn = super().advance(now, inputs)
        while turn is None:
            assert not self.state.loop.open
            PARTS[0] += 1
            turn = self.continue_turn()
        return turn


@pytest.fixture(autouse=True)
def pause_everywhere(monkeypatch):
    monkeypatch.setattr(event_loop, "CALLBACKS_PER_PAUSE_CHECK", 1)
    monkeypatch.setattr(history, "FAST_PATH_LENGTH", 1)
    monkeypatch.setattr(turn_driver, "Runner", PausingRunner)


@step
async def visit(number: int) -> int:
    return number


async def sequence(ctx: Context, count: int) -> int:
    for number in range(count):
        note(await visit(number))
    return count


async def fan_out(ctx: Context, count: int) -> int:
    return len(await ctx.map(visit, range(count), concurrency=count))


def test_replay_of_a_sequence_is_paused_between_its_completions():
    play = Play(sequence, 50).run()
    cold = play.replayed_by(sequence).begin()
    assert cold.value == 50
    assert cold.notes == play.notes == list(range(50))
    assert PARTS[0] > 50


def test_turn_that_starts_many_tasks_is_paused_between_its_callbacks():
    play = Play(fan_out, 50).begin()
    assert len(play.running) == 50
    assert PARTS[0] > 50
    play.close()


def test_turn_with_many_inputs_is_paused_between_them():
    play = Play(fan_out, 50).begin()
    results = [play.outcome_of_body(location) for location in play.running]
    play.advance(*results)
    assert play.value == 50
    assert PARTS[0] > 50


def test_fast_path_of_a_replay_is_left_now_and_then(monkeypatch):
    monkeypatch.setattr(history, "FAST_PATH_LENGTH", 32)
    play = Play(sequence, 100).run()
    cold = play.replayed_by(sequence).begin()
    assert cold.notes == play.notes
    assert 3 <= PARTS[0] < 20


def test_run_can_be_evicted_while_its_turn_is_paused():
    play = Play(sequence, 5).run()
    runner = Runner(replace(play.replayed_by(sequence).runner.state.start, should_pause=lambda: True))
    assert runner.advance(play.now) is None
    runner.close()
    assert play.replayed_by(sequence).begin().value == 5


def test_turn_without_pauses_is_complete_at_once():
    play = Play(sequence, 5).run()
    runner = Runner(replace(play.replayed_by(sequence).runner.state.start, should_pause=lambda: False))
    assert runner.advance(play.now) is not None
