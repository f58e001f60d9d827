"""After a rewind: a retained step that was compensated is rerun at its location, and everything else waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Break, Context, Continue, Retry, step
from perdure.client.rewind import plan_rewind
from perdure.model.records import Entry, EntryStatus, RunRecord
from perdure.model.turns import MessageReceived
from perdure.stores.results import Snapshot
from tests.runner.turn_driver import BEGUN_AT, CLOCK, Play, note
from tests.runner.workflows import fetch

DONE: list[Any] = []
FAULTS: dict[Any, int] = {}


@pytest.fixture(autouse=True)
def fresh() -> None:
    DONE.clear()
    FAULTS.clear()


def unbook(seat: Any) -> None:
    DONE.append(["un", seat])


@step(retry=Retry(max_attempts=2, initial=10, jitter=0), compensate=unbook)
async def book(seat: Any) -> Any:
    if FAULTS.get(seat):
        FAULTS[seat] -= 1
        raise OSError("full")
    DONE.append(seat)
    return [seat, len(DONE)]


async def trip(ctx: Context) -> Any:
    a = await book("a")
    note(["a", a])
    b = await book("b")
    note(["b", b])
    c = await fetch("c")
    if "fail" in FAULTS:
        raise ValueError("no")
    got = await ctx.receive("go")
    return [a, b, c, got]


def rewound(play: Play, location: str, fn: Any = trip, **options: Any) -> Play:
    """Return the run after a rewind, not yet loaded."""
    record = RunRecord(
        id="run-1",
        workflow=play.definition.name,
        version=1,
        input=b"{}",
        created_at=0.0,
        created_by="x",
        seed=7,
        generation=play.facts.generation,
    )
    snapshot = Snapshot(record, position=1, entries=tuple(play.rows), inbox=())
    cut = plan_rewind(snapshot, location, now=play.now, turn_id="t")
    rows = [row for row in play.rows if row.location not in cut.dropped]
    rows.extend(cut.entries)
    again = Play(fn, rows=rows, now=play.now, generation=play.facts.generation + 1, **options)
    for message in cut.returned:
        again.inbox[message.number] = message
        again.message_count = max(again.message_count, message.number)
    return again


def failed_trip() -> Play:
    FAULTS["fail"] = 1
    play = Play(trip).run()
    assert play.failure.message == "no"
    assert DONE == ["a", "b", ["un", ["b", 2]], ["un", ["a", 1]]]
    del FAULTS["fail"]
    DONE.clear()
    return play


def crash(play: Play) -> Play:
    cold = Play(
        play.definition,
        rows=play.rows,
        now=play.now,
        generation=play.facts.generation,
        inbox=list(play.inbox.values()),
        waits=play.suspended_for,
    )
    cold.message_count = play.message_count
    play.close()
    return cold.begin()


def test_only_the_compensated_step_is_rerun_after_a_rewind():
    play = rewound(failed_trip(), "fetch").begin()
    assert play.attempts == {"book": 1}
    assert play.notes == []
    assert play.turn.entries == ()
    play = crash(play)
    assert play.attempts == {"book": 1}
    play.complete("book", now=2_000.0)
    assert play.attempts == {"book#1": 1}
    assert play.notes == [["a", ["a", 1]]], "the run continues with the new result"
    play = crash(play)
    play.complete("book#1")
    assert play.attempts == {"fetch": 1}
    play.complete("fetch")
    play.send("go", 1)
    assert play.value == [["a", 1], ["b", 2], "c", 1]
    assert DONE == ["a", "b"]


def test_rerun_step_keeps_its_position_in_the_completion_order():
    before = failed_trip()
    play = rewound(before, "fetch").begin()
    play.complete("book")
    play.complete("book#1")
    for location in ("book", "book#1"):
        old, new = before.entries[location], play.entries[location]
        assert (new.seq, new.call_seq, new.ordinal) == (old.seq, old.call_seq, old.ordinal)
        assert (new.status, new.generation) == (EntryStatus.SUCCEEDED, 1)
    assert play.entries["book"].value == b'["a",1]'


def test_rerun_step_has_a_new_idempotency_key():
    play = rewound(failed_trip(), "fetch").begin()
    assert play.running["book"].idempotency_key == "run-1/1/book"


def test_steps_that_were_not_compensated_are_not_rerun():
    async def mixed(ctx):
        got = [await fetch(1), await book("a"), await fetch(2)]
        note(got)
        await fetch("last")
        if "fail" in FAULTS:
            raise ValueError("no")
        return got

    FAULTS["fail"] = 1
    play = Play(mixed).run()
    del FAULTS["fail"]
    again = rewound(play, "fetch#2", mixed).begin()
    assert again.attempts == {"book": 1}
    again.complete()
    assert again.attempts == {"fetch#2": 1}, "what followed it was replayed"
    again.complete()
    assert again.value == [1, ["a", 3], 2]


def test_inputs_during_a_rerun_wait_and_are_applied_in_order_afterwards():
    play = rewound(failed_trip(), "fetch").begin()
    turn = play.send("go", 1)
    assert (turn.entries, turn.consumed) == ((), ())
    play.complete("book")
    turn = play.send("go", 2)
    assert turn.consumed == ()
    play.complete("book#1")
    play.complete("fetch")
    assert play.value[3] == 1
    assert play.inbox.keys() == {2}


def test_messages_that_wait_for_a_rerun_survive_a_crash():
    play = rewound(failed_trip(), "fetch").begin()
    play.send("go", 1)
    play = crash(play)
    assert play.turn.consumed == ()
    play.complete("book")
    play = crash(play)
    play.complete("book#1")
    play.complete("fetch")
    assert play.value[3] == 1


def test_cancel_during_a_rerun_is_applied_afterwards():
    play = rewound(failed_trip(), "fetch").begin()
    play.cancel()
    assert play.alive
    play.complete("book")
    play.complete("book#1")
    while play.alive:
        play.complete()
    assert play.was_cancelled
    assert DONE == ["a", "b", ["un", ["b", 2]], ["un", ["a", 1]]]


def test_rerun_step_is_retried_with_a_durable_delay():
    play = rewound(failed_trip(), "fetch").begin()
    FAULTS["a"] = 1
    turn = play.complete("book")
    assert not turn.busy
    assert turn.wake_at == play.now + 10
    assert turn.held is None
    [row] = turn.entries
    assert (row.status, row.attempts, row.due_at) == (EntryStatus.PENDING, 1, play.now + 10)
    assert row.seq == 1, "it is still to be done in its place"
    due = turn.wake_at
    play = crash(play)
    assert (play.attempts, play.turn.wake_at) == ({}, due)
    play.advance(now=due)
    assert play.attempts == {"book": 2}
    play = crash(play)
    play.now = due
    play.advance(now=due)
    play.complete("book")
    assert play.attempts == {"book#1": 1}


def test_resume_skips_the_retry_delay_of_a_rerun_step():
    play = rewound(failed_trip(), "fetch").begin()
    FAULTS["a"] = 1
    play.complete("book")
    play.resume()
    assert play.attempts == {"book": 2}
    play.complete("book")
    assert play.attempts == {"book#1": 1}


def test_exhausted_rerun_step_holds_the_run_and_resume_restores_its_attempts():
    play = rewound(failed_trip(), "fetch").begin()
    FAULTS["a"] = 2
    play.complete("book")
    play.advance(now=play.turn.wake_at)
    play.complete("book")
    assert play.held.kind == "step_failed"
    assert play.held.location == "book"
    assert play.entries["book"].seq == 1
    cold = crash(play)
    assert cold.turn.held == play.turn.held
    assert cold.running == {}
    cold = Play(trip, rows=cold.rows, now=cold.now, generation=1)
    cold.resume()
    assert cold.turn.consumed == (1,)
    assert cold.attempts == {"book": 1}
    cold.complete()
    assert cold.attempts == {"book#1": 1}
    cold.complete()
    cold.complete()
    cold.send("go", 1)
    assert cold.value == [["a", 1], ["b", 2], "c", 1]


def test_step_can_be_rerun_twice():
    play = rewound(failed_trip(), "fetch")
    FAULTS["fail"] = 1
    play.run()
    assert DONE == ["a", "b", ["un", ["b", 2]], ["un", ["a", 1]]]
    DONE.clear()
    del FAULTS["fail"]
    again = rewound(play, "fetch").begin()
    assert again.running["book"].idempotency_key == "run-1/2/book"
    again.complete()
    again.complete()
    again.complete()
    again.send("go", 1)
    assert again.value == [["a", 1], ["b", 2], "c", 1]


def test_rerun_step_is_compensated_again():
    play = rewound(failed_trip(), "fetch").begin()
    play.complete()
    play.complete()
    play.complete()
    play.cancel()
    while play.alive:
        play.complete()
    assert DONE == ["a", "b", ["un", ["b", 2]], ["un", ["a", 1]]]


def test_concurrent_steps_are_rerun_in_completion_order():
    async def both(ctx):
        got = await asyncio.gather(book("a"), book("b"))
        await fetch("x")
        if "fail" in FAULTS:
            raise ValueError("no")
        return got

    FAULTS["fail"] = 1
    play = Play(both).begin()
    play.complete("book#1")
    play.complete("book")
    while play.alive:
        play.complete()
    del FAULTS["fail"]
    DONE.clear()
    again = rewound(play, "fetch", both).begin()
    assert again.attempts == {"book#1": 1}, "the one that was done first"
    again.complete()
    assert again.attempts == {"book": 1}
    again.complete()
    again.complete()
    assert again.value == [["a", 2], ["b", 1]]


def test_receive_that_stays_open_over_a_rewind_subscribes_again_once():
    async def waits(ctx):
        return await ctx.receive("a")

    rows = [Entry("a", "receive", "a", EntryStatus.PENDING, 1, 0, generation=0, started_at=1_000.0)]
    play = Play(waits, rows=rows, generation=1).begin()
    assert play.turn.extras is not None
    assert [each.target for each in play.turn.extras.subscribe] == ["1/a"]
    assert [(row.location, row.generation) for row in play.turn.entries] == [("a", 1)]
    cold = crash(play)
    assert (cold.turn.extras, cold.turn.entries) == (None, ()), "a replay writes nothing"
    cold.post("assignment", "a", "topic", target="1/a")
    assert cold.value == "topic"


def test_literal_history_with_a_step_to_rerun():
    async def two(ctx):
        return [await fetch("a"), await fetch("b"), await fetch("c")]

    rows = [
        Entry("fetch", "step", "fetch", EntryStatus.PENDING, 1, 0, seq=1, generation=1, started_at=1_000.0),
        Entry("fetch#1", "step", "fetch", EntryStatus.SUCCEEDED, 2, 1, seq=2, value=b'"b"', settled_at=1_002.0),
    ]
    play = Play(two, rows=rows, generation=1).begin()
    assert play.attempts == {"fetch": 1}
    play.complete("fetch", now=1_500.0)
    assert play.attempts == {"fetch#2": 1}
    assert play.runner.state.loop.now == 1_500.0, "time never goes back"
    check = replace(play.entries["fetch"], value=None)
    assert (check.seq, check.status) == (1, EntryStatus.SUCCEEDED)
    play.complete()
    assert play.value == ["a", "b", "c"]


def test_rerun_step_of_a_loop_is_compensated_after_its_iteration_was_pruned():
    async def looped(ctx):
        async def body(ctx, number: int) -> Continue[int] | Break[int]:
            try:
                async with ctx.rollback_scope():
                    await book(number)
                    await fetch("check")
                    if "raise" in FAULTS:
                        raise KeyError
            except KeyError:
                await fetch("caught")
            return Continue(number + 1) if number < 3 else Break(number)

        await ctx.loop("loop", body, 0, prune_every=1, keep=0)
        raise ValueError("no")

    FAULTS["raise"] = 1
    play = Play(looped).begin()
    for _ in range(3):
        play.complete()
    assert play.attempts == {"loop/~0/fetch#1": 1}
    assert DONE == [0, ["un", [0, 1]]]
    FAULTS.clear()
    DONE.clear()
    again = rewound(play, "loop/~0/fetch", looped).begin()
    assert again.attempts == {"loop/~0/book": 1}
    while again.alive:
        again.complete()
        again = crash(again) if again.alive else again
    assert again.failure.message == "no"
    assert [each[1][0] for each in DONE if isinstance(each, list)] == [3, 2, 1, 0]


def test_several_inputs_of_one_turn_are_applied_after_the_rerun():
    play = rewound(failed_trip(), "fetch").begin()
    done = play.outcome_of_body("book")
    play.running.clear()
    event = play.add_message("event", "go", 1)
    play.advance(MessageReceived(event), done)
    assert play.attempts == {"book#1": 1}
    play.complete()
    play.complete()
    assert play.value[3] == 1


def test_replay_of_a_rerun_writes_nothing():
    play = rewound(failed_trip(), "fetch").begin()
    for _ in range(3):
        play.complete()
    cold = crash(play)
    assert (cold.turn.entries, cold.running) == ((), {})


# --- the clock after a rewind


def marked(rows, after: int, at: float):
    """Return the rows after a rewind: time continues from `at` after the completion `after`."""
    mark = Entry(
        "~rewind/1", "rewind", str(after), EntryStatus.SUCCEEDED, 1, generation=1, started_at=at, settled_at=at
    )
    return [*rows, mark]


async def naps(ctx):
    await fetch("a")
    started = ctx.now().timestamp()
    await ctx.sleep(10)
    return [started, ctx.now().timestamp()]


def test_requests_after_a_rewind_use_the_time_of_the_rewind():
    play = Play(naps).begin()
    play.complete("fetch", now=BEGUN_AT + 1)
    kept = [row for row in play.rows if row.location == "fetch"]
    last = kept[-1].seq
    assert last is not None
    again = play.replayed_by(naps, rows=marked(kept, last, BEGUN_AT + 500), generation=1, now=BEGUN_AT + 500)
    again.begin()
    assert again.turn.wake_at == BEGUN_AT + 510
    again.move(CLOCK)
    assert again.value == [BEGUN_AT + 500, BEGUN_AT + 510]


def test_run_rewound_to_its_beginning_starts_at_the_time_of_the_rewind():
    play = Play(naps).begin()
    again = play.replayed_by(naps, rows=marked([], 0, BEGUN_AT + 500), generation=1, now=BEGUN_AT + 500)
    again.begin()
    assert again.runner.state.loop.now == BEGUN_AT + 500
