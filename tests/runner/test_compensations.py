"""Compensation: which steps are compensated when a run fails or is cancelled, and in which order."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import pytest

from perdure import Break, Context, Continue, CriticalError, Retry, step, workflow
from perdure.model.records import Entry, EntryStatus
from perdure.model.turns import Cancelled, Continued, Failed, Succeeded
from tests.runner.crash_after_every_turn import check_replay, crashed, run_with_crashes
from tests.runner.turn_driver import Play, note
from tests.runner.workflows import fetch

SEEDS = range(12)
DONE: list[Any] = []
FAULTS: dict[Any, int] = {}


@pytest.fixture(autouse=True)
def fresh() -> None:
    DONE.clear()
    FAULTS.clear()


@dataclass
class Seat:
    number: int


async def unbook(seat: Seat) -> None:
    if FAULTS.get(seat.number, 0):
        FAULTS[seat.number] -= 1
        raise OSError("no line")
    DONE.append(seat.number)


@step(retry=None, compensate=unbook)
async def book(number: int) -> Seat:
    if number < 0:
        raise CriticalError("no such seat")
    return Seat(number)


def undo(what: Any) -> None:
    DONE.append(what)


def leave(what: Any) -> None:
    DONE.append(["left", what])


@workflow(name="runner_compensations_kid")
async def kid(ctx: Context) -> None:
    pass


def seq_of(row: Entry) -> int:
    assert row.seq is not None, row
    return row.seq


def letters(play: Play) -> list[Any]:
    return [letter for extras in play.extras for letter in extras.dead_letters]


# --- which steps are compensated, and in which order


@pytest.mark.parametrize("seed", SEEDS)
def test_compensations_run_in_reverse_order_over_all_scopes(seed):
    async def trip(ctx):
        order = []

        async def branch(number):
            seat = await book(number)
            order.append(seat.number)

        await book(1)
        order.append(1)
        ctx.on_rollback(undo, "by hand")
        await ctx.join(branch(2), branch(3))
        async with asyncio.TaskGroup() as group:
            group.create_task(branch(4))
            group.create_task(branch(5))
        await fetch(order)
        raise ValueError("no")

    play = run_with_crashes(trip, seed=seed)
    assert play.failure.message == "no"
    settled = {seq_of(row): row.location for row in play.entries.values() if row.name == "book"}
    seats = {"book": 1, "join/~0/book": 2, "join/~1/book": 3, "branch/book": 4, "branch#1/book": 5}
    order = [seats[settled[seq]] for seq in sorted(settled)]
    assert list(reversed(DONE)) == [1, "by hand", *order[1:]]


def test_each_compensation_is_a_durable_step_that_names_its_step():
    async def trip(ctx):
        await book(1)
        ctx.on_rollback(undo, "x")
        await book(2)
        raise ValueError("no")

    play = Play(trip).run()
    compensations = [row for row in play.entries.values() if row.location.startswith("~rollback/")]
    assert [(row.location, row.detail) for row in compensations] == [
        ("~rollback/unbook", b'{"of":"book#1"}'),
        ("~rollback/undo", b'{"of":null}'),
        ("~rollback/unbook#1", b'{"of":"book"}'),
    ]


def test_compensation_gets_the_typed_result_of_its_step():
    async def trip(ctx):
        await book(7)
        raise ValueError("no")

    Play(trip).run()
    assert DONE == [7]


def test_only_succeeded_steps_are_compensated():
    async def trip(ctx):
        await book(1)
        asyncio.create_task(book(2))  # noqa: RUF006 - running when the run fails
        await book(-1)

    play = Play(trip).begin()
    play.complete("book")
    play.complete("book#1")
    assert list(play.attempts) == ["~rollback/unbook"]
    play.complete()
    assert play.failure.message.endswith("no such seat")
    assert DONE == [1]


def test_no_compensation_runs_when_the_run_succeeds():
    async def trip(ctx):
        await book(1)
        ctx.on_rollback(undo, "x")
        return "fine"

    play = Play(trip).run()
    assert play.value == "fine"
    assert DONE == []


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_of_a_race_loser_are_compensated(seed):
    async def slow(ctx):
        await book(1)
        await ctx.receive("never")

    async def trip(ctx):
        await ctx.race(slow(ctx), ctx.sleep(5))
        await book(2)
        raise ValueError("no")

    play = run_with_crashes(trip, seed=seed)
    assert play.failure.message == "no"
    assert DONE in ([2, 1], [2]), "the loser may have lost before its step was done"
    assert (1 in DONE) == (play.entries["race/~0/book"].status is EntryStatus.SUCCEEDED)


@pytest.mark.parametrize("seed", SEEDS)
def test_cancelled_run_is_rolled_back(seed):
    async def trip(ctx):
        await book(1)
        try:
            await ctx.receive("never")
        finally:
            await fetch("handler")
            DONE.append("handled")

    play = run_with_crashes(trip, seed=seed, events=[lambda play: play.cancel()])
    assert play.was_cancelled
    assert [each for each in DONE if each != "handled"] in ([1], [])
    assert (1 in DONE) == ("never" in play.entries)


def test_run_timeout_rolls_the_run_back():
    async def trip(ctx):
        await book(1)
        await ctx.sleep(1_000)

    play = Play(trip, deadline_at=1_100.0).run()
    assert play.failure.type == "TimeoutError"
    assert DONE == [1]


def test_decorated_step_can_be_a_compensation():
    @step(retry=None)
    async def clear(what):
        DONE.append(["cleared", what])

    async def trip(ctx):
        await fetch.options(compensate=clear)(1)
        ctx.on_rollback(clear, 2)
        raise ValueError("no")

    play = Play(trip).run()
    assert DONE == [["cleared", 2], ["cleared", 1]]
    assert play.entries["~rollback/clear"].name == "clear"


def test_on_rollback_rejects_a_value_that_is_not_callable():
    async def trip(ctx):
        ctx.on_rollback("undo")

    assert Play(trip).run().failure.type == "WorkflowMisuse"


# --- crashing and failing while rolling back


@pytest.mark.parametrize("seed", SEEDS)
def test_crash_does_not_repeat_finished_compensations(seed):
    async def trip(ctx):
        for number in range(5):
            await book(number)
        raise ValueError("no")

    run_with_crashes(trip, seed=seed)
    assert DONE == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_compensation_is_retried(seed):
    FAULTS[1] = 3

    async def trip(ctx):
        await book(1)
        await book(2)
        raise ValueError("no")

    play = run_with_crashes(trip, seed=seed)
    assert DONE == [2, 1]
    assert play.entries["~rollback/unbook#1"].attempts == 4
    assert letters(play) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_exhausted_compensation_becomes_a_dead_letter_and_the_others_run(seed, caplog):
    FAULTS[2] = 100

    async def trip(ctx):
        for number in (1, 2, 3):
            await book(number)
        raise ValueError("no")

    with caplog.at_level(logging.CRITICAL):
        play = run_with_crashes(trip, seed=seed)
    assert play.failure.message == "no"
    assert DONE == [3, 1]
    [letter] = letters(play)
    assert (letter.kind, letter.original_target) == ("compensation", "run-1")
    assert letter.id == "compensation/run-1/0/book#1"
    assert "no line" in letter.reason
    assert "book#1" in letter.reason


@pytest.mark.parametrize("seed", SEEDS)
def test_cancel_does_not_interrupt_a_rollback(seed):
    async def trip(ctx):
        await book(1)
        await book(2)
        raise ValueError("no")

    play = Play(trip, seed=seed).begin()
    play.complete()
    play.complete()
    turn = play.cancel()
    assert (turn.entries, turn.consumed, play.cancelled) == ((), (1,), [])
    check_replay(play)
    play = crashed(play)
    play.complete()
    play.cancel()
    play.complete()
    assert play.failure.message == "no"
    assert DONE == [2, 1]


def test_run_timeout_does_not_apply_during_rollback():
    FAULTS[1] = 3

    async def trip(ctx):
        await book(1)
        await ctx.sleep(1_000)

    play = Play(trip, deadline_at=1_100.0).begin()
    play.complete()
    play.advance(now=1_100.0)
    while play.alive:
        play.move(play.choices()[0])
    assert play.failure.type == "TimeoutError"
    assert DONE == [1]


def test_failed_compensation_does_not_hold_a_run_that_suspends_on_failure():
    FAULTS[1] = 100

    async def trip(ctx):
        await book(1)
        raise ValueError("no")

    logging.disable(logging.CRITICAL)
    try:
        play = Play(trip, suspend_on_failure=True).run()
    finally:
        logging.disable(logging.NOTSET)
    assert play.failure.message == "no"
    assert len(letters(play)) == 1


# --- rollback scopes


@pytest.mark.parametrize("seed", SEEDS)
def test_rollback_scope_that_raises_compensates_before_the_error_propagates(seed):
    async def trip(ctx):
        await book(1)
        try:
            async with ctx.rollback_scope():
                await book(2)
                ctx.on_rollback(undo, "two")
                await book(-1)
        except Exception as error:
            await fetch("caught")
            DONE.append(type(error).__name__)
        await book(3)
        raise ValueError("no")

    play = run_with_crashes(trip, seed=seed)
    named = [each for each in DONE if each != "StepFailed"]
    assert named == ["two", 2, 3, 1]
    assert DONE[2] == "StepFailed"
    assert play.entries["~rollback/undo"].ordinal == 0
    assert "~rollback#1/unbook#1" in play.entries


def test_rollback_scope_that_succeeds_leaves_compensations_registered():
    async def trip(ctx):
        async with ctx.rollback_scope():
            await book(1)
        await fetch("after")
        raise ValueError("no")

    Play(trip).run()
    assert DONE == [1]


@pytest.mark.parametrize("seed", SEEDS)
def test_nested_rollback_scopes_each_run_their_own_compensations(seed):
    async def trip(ctx):
        try:
            async with ctx.rollback_scope():
                await book(1)
                try:
                    async with ctx.rollback_scope():
                        await book(2)
                        raise KeyError("inner")
                except KeyError:
                    await book(3)
                async with ctx.rollback_scope():
                    await book(4)
                raise ValueError("outer")
        except ValueError:
            await fetch("between")
        return "fine"

    play = run_with_crashes(trip, seed=seed)
    assert play.value == "fine"
    assert DONE == [2, 4, 3, 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_tasks_started_in_a_rollback_scope_belong_to_it(seed):
    async def branch(number):
        await book(number)

    async def trip(ctx):
        outside = asyncio.create_task(branch(9))
        try:
            async with ctx.rollback_scope():
                await ctx.join(branch(1), branch(2))
                async with asyncio.TaskGroup() as group:
                    group.create_task(branch(3))
                raise ValueError("no")
        except ValueError:
            note("rolled back")
        await outside
        return "fine"

    play = run_with_crashes(trip, seed=seed)
    assert play.value == "fine"
    assert DONE[0] == 3
    assert sorted(DONE) == [1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_cancel_inside_a_rollback_scope_rolls_back_the_scope_and_then_the_run(seed):
    async def trip(ctx):
        await book(1)
        async with ctx.rollback_scope():
            await book(2)
            await ctx.receive("never")

    play = run_with_crashes(trip, seed=seed, events=[lambda play: play.cancel(), lambda play: play.cancel()])
    assert play.was_cancelled
    done = [row.location for row in play.entries.values() if row.name == "book" and row.status is EntryStatus.SUCCEEDED]
    assert [2, 1][-len(done) or 2 :] == DONE


def test_cancel_waits_for_the_rollback_of_a_scope():
    async def trip(ctx):
        try:
            async with ctx.rollback_scope():
                await book(1)
                await book(2)
                raise ValueError("no")
        except asyncio.CancelledError:
            DONE.append("cancelled")
            raise

    play = Play(trip).begin()
    play.complete()
    play.complete()
    play.cancel()
    assert list(play.attempts) == ["~rollback/unbook"]
    check_replay(play)
    play = crashed(play)
    play.complete()
    check_replay(play)
    play.complete()
    assert DONE == [2, 1, "cancelled"]
    assert play.was_cancelled


def test_rollback_scope_of_a_race_loser_is_rolled_back_before_the_run_ends():
    async def careful(ctx):
        async with ctx.rollback_scope():
            await book(1)
            await ctx.receive("never")

    async def trip(ctx):
        await ctx.race(careful(ctx), ctx.sleep(5))
        await fetch("x")
        return "fine"

    play = Play(trip).begin()
    play.complete()
    play.advance(now=1_005.0)
    assert list(play.attempts) == ["fetch", "race/~0/~rollback/unbook"]
    play.complete("fetch")
    assert play.alive
    assert list(play.attempts) == ["race/~0/~rollback/unbook"]
    assert play.cancelled == []
    check_replay(play)
    play = crashed(play)
    play.complete()
    assert play.value == "fine"
    assert DONE == [1]


@pytest.mark.parametrize("seed", SEEDS)
def test_rollback_scopes_in_a_loop_are_rolled_back_per_iteration_and_leave_no_entries(seed):
    async def trip(ctx):
        async def body(ctx, count: int) -> Continue[int] | Break[int]:
            try:
                async with ctx.rollback_scope():
                    await book(count)
                    if count % 2:
                        raise KeyError
            except KeyError:
                await fetch("again")
            return Continue(count + 1) if count < 5 else Break(count)

        await ctx.loop("trips", body, 0, prune_every=1, keep=0)
        raise ValueError("no")

    play = run_with_crashes(trip, seed=seed)
    assert DONE == [1, 3, 5, 4, 2, 0]
    notes = [row for row in play.entries.values() if row.kind == "compensation"]
    assert all(row.status is EntryStatus.CANCELLED for row in notes)
    assert len(notes) <= 4, "finished compensations of pruned iterations are deleted"


@pytest.mark.parametrize("seed", SEEDS)
def test_rollback_scope_around_a_loop_compensates_pruned_iterations(seed):
    async def trip(ctx):
        async def body(ctx, count: int) -> Continue[int] | Break[int]:
            await book(count)
            return Continue(count + 1) if count < 4 else Break(count)

        try:
            async with ctx.rollback_scope():
                await ctx.loop("trips", body, 0, prune_every=1, keep=0)
                raise KeyError
        except KeyError:
            await fetch("again")
        raise ValueError("no")

    run_with_crashes(trip, seed=seed)
    assert DONE == [4, 3, 2, 1, 0]


# --- exit hooks


@pytest.mark.parametrize("how", ["succeeds", "fails", "is cancelled"])
@pytest.mark.parametrize("seed", range(6))
def test_exit_hooks_run_for_every_outcome(how, seed):
    async def trip(ctx):
        ctx.on_exit(leave, 1)
        await book(1)
        ctx.on_exit(leave, 2)
        if how == "fails":
            raise ValueError("no")
        if how == "is cancelled":
            await ctx.receive("never")
        return "fine"

    play = run_with_crashes(trip, seed=seed) if how != "is cancelled" else Play(trip).run()
    if how == "is cancelled":
        play.cancel()
        while play.alive:
            check_replay(play)
            play = crashed(play)
            play.complete()
    compensated = [] if how == "succeeds" else [1]
    assert [*compensated, ["left", 2], ["left", 1]] == DONE
    assert isinstance(play.outcome, {"succeeds": Succeeded, "fails": Failed, "is cancelled": Cancelled}[how])
    assert "~exit/leave" in play.entries


def test_cleanup_order_is_handlers_children_compensations_exit_hooks():
    async def trip(ctx):
        ctx.on_exit(leave, "exit")
        ctx.on_rollback(undo, "rollback")
        await ctx.start_child(kid)
        try:
            await ctx.sleep(1_000)
        finally:
            await fetch("handler")

    play = Play(trip).begin()
    play.apply_effect("runner_compensations_kid")
    play.cancel()
    seen = []
    while play.alive:
        seen += [*play.running, *play.effects]
        check_replay(play)
        if play.running:
            play.complete()
        else:
            play.apply_effect(next(iter(play.effects)))
    assert seen == ["fetch", "~children", "~rollback/undo", "~exit/leave"]
    assert play.was_cancelled


def test_failed_exit_hook_becomes_a_dead_letter_without_other_effects(caplog):
    def bad():
        raise CriticalError("gone")

    async def trip(ctx):
        ctx.on_exit(leave, 1)
        ctx.on_exit(bad)
        return "fine"

    with caplog.at_level(logging.CRITICAL):
        play = Play(trip).run()
    assert play.value == "fine"
    assert DONE == [["left", 1]]
    assert [letter.id.partition("/")[0] for letter in letters(play)] == ["exit"]


def test_exit_hook_registered_in_a_rolled_back_scope_stays_registered():
    async def trip(ctx):
        try:
            async with ctx.rollback_scope():
                ctx.on_exit(leave, 1)
                raise KeyError
        except KeyError:
            await fetch("x")
        return "fine"

    play = Play(trip).run()
    assert play.value == "fine"
    assert DONE == [["left", 1]]


# --- run-level retry


def test_retried_run_is_rolled_back_but_its_exit_hooks_wait_for_the_last_attempt():
    async def trip(ctx):
        ctx.on_exit(leave, 1)
        await book(1)
        raise ValueError("no")

    first = Play(trip, retry=Retry(max_attempts=2)).run()
    assert isinstance(first.outcome, Failed)
    assert first.outcome.retryable
    assert DONE == [1]
    DONE.clear()
    last = Play(trip, retry=Retry(max_attempts=2), run_attempt=2).run()
    assert isinstance(last.outcome, Failed)
    assert DONE == [1, ["left", 1]]
    DONE.clear()
    Play(trip, retry=Retry(max_attempts=2, retry_on=KeyError)).run()
    assert DONE == [1, ["left", 1]], "it is not tried again"


# --- continue_as


async def continuing(ctx: Context, left: int) -> Any:
    await book(left)
    ctx.on_rollback(undo, ["after", left])
    ctx.on_exit(leave, left)
    if left:
        await ctx.continue_as(left - 1)
    raise ValueError("no")


def test_registered_compensations_survive_continue_as():
    play = Play(continuing, 2).run()
    for epoch in (1, 2):
        assert isinstance(play.outcome, Continued)
        assert DONE == []
        assert all(row.kind == "compensation" for row in play.outcome.carried)
        rows = play.outcome.carried
        play = Play(continuing, 2 - epoch, rows=rows, epoch=epoch, generation=epoch).begin()
        if epoch == 1:
            play.complete()
    check_replay(play)
    while play.alive:
        check_replay(play)
        play = crashed(play)
        play.move(play.choices()[0])
    assert play.failure.message == "no"
    assert DONE == [["after", 0], 0, ["after", 1], 1, ["after", 2], 2, ["left", 0], ["left", 1], ["left", 2]]


def test_compensation_without_a_registered_name_prevents_continue_as():
    async def local(ctx):
        ctx.on_rollback(lambda: DONE.append("local"))
        await ctx.continue_as()

    play = Play(local).run()
    assert play.failure.type == "WorkflowMisuse"
    assert "decorate it with @step" in play.failure.message
    assert DONE == ["local"]


def test_compensations_that_a_scope_ran_are_not_carried_over():
    async def local(ctx):
        try:
            async with ctx.rollback_scope():
                await book(1)
                raise KeyError
        except KeyError:
            await ctx.continue_as()

    play = Play(local).run()
    assert isinstance(play.outcome, Continued)
    assert play.outcome.carried == ()


def test_continue_as_works_while_a_handler_waits():
    async def waiting(ctx):
        try:
            await ctx.continue_as()
        finally:
            await fetch("never completed")

    assert isinstance(Play(waiting).run().outcome, Continued)


def test_system_exit_fails_the_run_while_its_function_waits_in_a_handler():
    async def leaving(ctx):
        async def exits():
            raise SystemExit(3)

        asyncio.create_task(exits())  # noqa: RUF006 - left open on purpose
        try:
            await ctx.sleep(10)
        finally:
            await fetch("never completed")

    assert Play(leaving).run().failure.type == "SystemExit"


# --- late ends


def test_cancelled_step_is_not_compensated():
    async def trip(ctx):
        try:
            await asyncio.wait_for(book(1), 5)
        except TimeoutError:
            raise ValueError("too slow") from None

    play = Play(trip).begin()
    late = play.outcome_of_body("book")
    play.advance(now=1_005.0)
    assert late.error is None
    assert play.failure.message == "too slow"
    assert DONE == []


def test_registering_after_the_end_of_the_run_has_no_effect():
    async def trip(ctx):
        async def late():
            try:
                await ctx.sleep(100)
            finally:
                ctx.on_rollback(undo, "late")

        asyncio.create_task(late())  # noqa: RUF006 - left open on purpose
        await fetch(1)
        raise ValueError("no")

    Play(trip).run()
    assert DONE == []


# --- rollback scopes of tasks that are not awaited


@pytest.mark.parametrize("goes_on", [False, True])
def test_rollback_scope_of_a_race_loser_is_rolled_back_though_the_function_ends_at_once(goes_on: bool) -> None:
    def seat() -> Seat:
        return Seat(4)

    async def books(ctx: Context) -> None:
        async with ctx.rollback_scope():
            await ctx.step("book", seat, compensate=unbook)
            await ctx.sleep(1_000)

    async def raced(ctx: Context) -> Any:
        winner, _ = await ctx.race(books=books(ctx), quick=ctx.sleep(5))
        if goes_on:
            await ctx.continue_as()
        return winner

    play = run_with_crashes(raced)
    assert isinstance(play.outcome, Continued if goes_on else Succeeded)
    assert play.entries["race/books/~rollback/unbook"].status is EntryStatus.SUCCEEDED
