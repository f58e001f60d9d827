"""Plays a workflow in a seeded order and, after every turn, once more from what was written: both must stand alike.

Now and then the run goes on from the cold one, as after a real crash: so what a replay leaves behind in memory must do
for the rest of the run, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.runner.turn_driver import EntryStatus, Play

SEND = "(send)"
Event = tuple[str, Any] | Callable[[Play], Any]
"""What comes from outside, in this order but at any moment: an event to send, or something to do to the run."""


def play_everywhere(fn: Any, *args: Any, seed: int = 1, events: Sequence[Event] = (), **options: Any) -> Play:
    """To the end. Where the run was before each crash and after it must be the same, and so must its last state."""
    dice = random.Random(seed)
    waiting = list(events)
    play = Play(fn, *args, seed=seed, **options).begin()
    check_cold(play)
    while play.alive:
        choices = play.choices() + ([SEND] if waiting else [])
        if not choices:
            break
        choice = dice.choice(choices)
        if choice == SEND:
            happen(play, waiting.pop(0))
        else:
            play.move(choice)
        if play.alive:
            check_cold(play)
            play = play if dice.random() < 0.6 else crashed(play)
    check_asked(play)
    return play


def happen(play: Play, event: Event) -> None:
    if isinstance(event, tuple):
        play.send(*event)
    else:
        event(play)


def crashed(play: Play) -> Play:
    """The run after a crash, in its first turn, with what the world has seen of it so far."""
    cold = play.crash()
    cold.extras, cold.cancelled = list(play.extras), list(play.cancelled)
    return cold.begin()


def check_cold(play: Play) -> None:
    if play.turn.wake_at is not None and play.turn.wake_at <= play.now:
        return  # it goes on at once, as whoever replays it does
    cold = play.replayed_by(play.definition, run_attempt=1)
    cold.mail, cold.waiting_for = play.mail, list(play.waiting_for)
    written = len(cold.rows)
    cold.begin()
    warm_state, cold_state = visible(play), visible(cold)
    assert cold_state == warm_state, f"\ncold {cold_state}\nwarm {warm_state}"
    assert cold.rows[written:] == [], "a replay without new input writes nothing"
    cold.close()


def check_asked(play: Play) -> None:
    """What was asked for later has a higher number, also if it was asked for after a crash: a rewind goes by it."""
    rows = [row for row in play.entries.values() if row.kind not in ("version", "removed")]
    numbers = [row.call_seq for row in rows]
    assert len(set(numbers)) == len(numbers), sorted((row.call_seq, row.location) for row in rows)


def visible(play: Play) -> dict[str, Any]:
    """What must be the same after a crash. An errand that was given up may still be under way."""
    state = play.state()
    state["notes"] = []
    entries = play.entries
    # A wait that stands is set up again if the run was not suspended since; that does no harm.
    standing = {target.partition("/")[2] for _, target in play.waiting_for}
    pending = [each for each in play.errands if each in entries and entries[each].status is EntryStatus.PENDING]
    state["errands"] = sorted(set(pending) - standing)
    return state
