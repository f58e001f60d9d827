"""Run a workflow in a seeded order and replay it from its written entries after every turn: both states must be equal.

At random turns the test continues with the replayed run, as after a crash. The state that a replay builds in memory
must therefore be sufficient for the rest of the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.runner.turn_driver import EntryStatus, Play

SEND = "(send)"
Event = tuple[str, Any] | Callable[[Play], Any]
"""An external input, applied in this order at random times: an event to send, or a function of the fixture."""


def run_with_crashes(fn: Any, *args: Any, seed: int = 1, events: Sequence[Event] = (), **options: Any) -> Play:
    """Run the workflow to its end and return the fixture. The states before and after each crash must be equal."""
    randomness = random.Random(seed)
    waiting = list(events)
    play = Play(fn, *args, seed=seed, **options).begin()
    check_replay(play)
    while play.alive:
        choices = play.choices() + ([SEND] if waiting else [])
        if not choices:
            break
        choice = randomness.choice(choices)
        if choice == SEND:
            apply_event(play, waiting.pop(0))
        else:
            play.move(choice)
        if play.alive:
            check_replay(play)
            play = play if randomness.random() < 0.6 else crashed(play)
    check_call_order(play)
    return play


def apply_event(play: Play, event: Event) -> None:
    """Send an event, or call a function with the fixture."""
    if isinstance(event, tuple):
        play.send(*event)
    else:
        event(play)


def crashed(play: Play) -> Play:
    """Return the run after a crash, in its first turn, with the outputs that it has produced so far."""
    cold = play.crash()
    cold.extras, cold.cancelled = list(play.extras), list(play.cancelled)
    return cold.begin()


def check_replay(play: Play) -> None:
    """Assert that a replay of the run has the same state and writes nothing."""
    if play.turn.wake_at is not None and play.turn.wake_at <= play.now:
        return  # The run continues at once, and so does a replay.
    cold = play.replayed_by(play.definition, run_attempt=1)
    cold.message_count, cold.waiting_for = play.message_count, list(play.waiting_for)
    written = len(cold.rows)
    cold.begin()
    warm_state, cold_state = visible(play), visible(cold)
    assert cold_state == warm_state, f"\ncold {cold_state}\nwarm {warm_state}"
    assert cold.rows[written:] == [], "a replay without new input must write nothing"
    cold.close()


def check_call_order(play: Play) -> None:
    """Assert that call numbers are unique, also for requests after a crash. A rewind depends on them."""
    rows = [row for row in play.entries.values() if row.kind not in ("version", "removed")]
    numbers = [row.call_seq for row in rows]
    assert len(set(numbers)) == len(numbers), sorted((row.call_seq, row.location) for row in rows)


def visible(play: Play) -> dict[str, Any]:
    """Return the state that must be equal after a crash. A cancelled external effect may still be running."""
    state = play.state()
    state["notes"] = []
    entries = play.entries
    # A pending wait is requested again if the run was not suspended since. The request is idempotent.
    awaited = {target.partition("/")[2] for _, target in play.waiting_for}
    pending = [each for each in play.effects if each in entries and entries[each].status is EntryStatus.PENDING]
    state["effects"] = sorted(set(pending) - awaited)
    return state
