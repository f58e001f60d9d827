"""ctx.loop: durable state, bounded history, and exact resumption."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest

from perdure import Break, Context, Continue, step
from perdure.model.records import EntryStatus
from perdure.model.turns import CancelStep
from tests.runner.crash_after_every_turn import check_call_order, check_replay, crashed, run_with_crashes
from tests.runner.turn_driver import Play, note
from tests.runner.workflows import fetch

SEEDS = range(12)
COMPENSATED: list[Any] = []


@dataclass
class Page:
    number: int
    seen: list[date]


async def pages(ctx: Context) -> Any:
    async def body(ctx: Context, page: Page) -> Continue[Page] | Break[Page]:
        note(type(page).__name__)
        page.seen.append(date(2024, 1, await fetch(page.number)))
        return Continue(Page(page.number + 1, page.seen)) if page.number < 3 else Break(page)

    end = await ctx.loop("pages", body, Page(1, []))
    return [type(end).__name__, end]


def locations(play: Play) -> list[str]:
    return [row.location for row in sorted(play.entries.values(), key=lambda row: row.call_seq)]


# --- state and value


@pytest.mark.parametrize("seed", SEEDS)
def test_state_is_passed_to_the_next_iteration_with_its_annotated_type(seed):
    play = run_with_crashes(pages, seed=seed)
    assert play.value == ["Page", {"number": 3, "seen": ["2024-01-01", "2024-01-02", "2024-01-03"]}]
    assert set(play.notes) <= {"Page"}
    assert locations(play) == [
        "pages",
        "pages/~0/fetch",
        "pages/~1",
        "pages/~1/fetch",
        "pages/~2",
        "pages/~2/fetch",
    ]
    assert play.entries["pages"].status is EntryStatus.SUCCEEDED
    assert [play.entries[f"pages/~{number}"].kind for number in (1, 2)] == ["iteration"] * 2


def test_iteration_starts_in_the_turn_in_which_the_previous_one_ends():
    play = Play(pages).begin()
    turn = play.complete("pages/~0/fetch")
    assert [(row.location, row.status) for row in turn.entries] == [
        ("pages/~0/fetch", EntryStatus.SUCCEEDED),
        ("pages/~1", EntryStatus.SUCCEEDED),
    ]
    assert play.attempts == {"pages/~1/fetch": 1}


def test_initial_state_is_encoded_and_decoded_too():
    async def shared(ctx):
        mine: dict[str, Any] = {"a": (1, 2)}

        async def body(ctx, state):
            note(state is mine)
            note(state)
            mine["b"] = "leak"
            return Continue(state) if await fetch(len(mine)) < 3 and len(ctx.stream("x").name) > 1 else Break(state)

        return await ctx.loop("shared", body, mine)

    play = Play(shared).run()
    assert play.notes == [False, {"a": [1, 2]}]


@pytest.mark.parametrize("seed", SEEDS)
def test_loop_without_state_continues_when_its_body_returns_none(seed):
    async def stateless(ctx):
        async def body(ctx):
            got = await ctx.receive("next", "stop")
            return None if got < 3 else Break(got)

        return [await ctx.loop("one", body), await ctx.loop("two", body)]

    events = [("next", 1), ("next", 2), ("stop", 3), ("next", 1), ("stop", 4)]
    assert run_with_crashes(stateless, seed=seed, events=events).value == [3, 4]


def test_state_can_become_none():
    async def fading(ctx):
        async def body(ctx, state: int | None) -> Continue[int | None] | Break[str]:
            await fetch(1)
            return Break("gone") if state is None else Continue(None)

        return await ctx.loop("fading", body, 1)

    assert run_with_crashes(fading).value == "gone"


@pytest.mark.parametrize("returned", [None, 5, "Break"])
def test_body_that_returns_another_value_is_rejected(returned):
    async def wrong(ctx):
        async def body(ctx, state):
            return returned

        await ctx.loop("wrong", body, 1)

    failure = Play(wrong).run().failure
    assert failure.type == "WorkflowMisuse"
    assert "'wrong'" in failure.message


def test_state_that_does_not_match_its_annotation_is_rejected():
    async def wrong(ctx):
        async def body(ctx, state: int) -> Continue[Any]:
            return Continue("not a number")

        await ctx.loop("wrong", body, 1)

    assert Play(wrong).run().failure.type == "InvalidPayload"


@pytest.mark.parametrize("options", [{"commit_every": 0}, {"prune_every": 0}, {"keep": -1}, {"commit_every": 1.5}])
def test_invalid_options_are_rejected(options):
    async def wrong(ctx):
        async def body(ctx):
            return Break()

        await ctx.loop("wrong", body, **options)

    assert Play(wrong).run().failure.type == "InvalidArgument"


def test_body_that_is_not_a_function_is_rejected():
    async def wrong(ctx):
        await ctx.loop("wrong", 5)

    assert Play(wrong).run().failure.type == "WorkflowMisuse"


def test_loops_with_the_same_name_are_numbered():
    async def twice(ctx):
        async def body(ctx):
            return Break(await fetch("x"))

        await ctx.loop("same", body)
        await ctx.loop("same", body)

    assert locations(Play(twice).run()) == ["same", "same/~0/fetch", "same#1", "same#1/~0/fetch"]


# --- commit interval


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("every", [2, 3, 10])
def test_state_is_committed_every_commit_every_iterations(every, seed):
    async def counting(ctx):
        async def body(ctx, count: int) -> Continue[int] | Break[int]:
            await fetch(count)
            return Continue(count + 1) if count < 7 else Break(count)

        return await ctx.loop("counting", body, 0, commit_every=every)

    play = run_with_crashes(counting, seed=seed)
    assert play.value == 7
    begun = [row.location for row in play.entries.values() if row.kind == "iteration"]
    assert begun == [f"counting/~{number}" for number in range(every, 8, every)]
    steps = [row for row in play.entries.values() if row.kind == "step"]
    assert [row.value for row in steps] == [str(number).encode() for number in range(8)]


def test_loop_resumes_at_its_last_committed_state():
    async def counting(ctx):
        async def body(ctx, count: int) -> Continue[int]:
            note(count)
            await fetch(count)
            return Continue(count + 1)

        await ctx.loop("counting", body, 0, commit_every=3)

    play = Play(counting).begin()
    for _ in range(8):
        play.complete()
    cold = crashed(play)
    assert cold.notes == [6, 7, 8]
    assert cold.attempts == {"counting/~8/fetch": 1}


# --- pruning


async def long_loop(ctx: Context, last: int) -> Any:
    async def body(ctx: Context, count: int) -> Continue[int] | Break[int]:
        await fetch(count)
        return Continue(count + 1) if count < last else Break(count)

    return await ctx.loop("long", body, 0)


def test_long_loop_has_a_bounded_history():
    play = Play(long_loop, 2_000).begin()
    most = 0
    while play.alive:
        play.complete()
        most = max(most, len(play.entries))
        if len(play.rows) > 500 or play.running.keys() == {"long/~1000/fetch"}:
            play.rows = list(play.entries.values())
        if next(iter(play.running), "").startswith("long/~1000/"):
            check_replay(play)
    assert play.value == 2_000
    assert most <= 2 * 40 + 3, "forty iterations of two entries, and the loop itself"
    kept = {row.location.split("/")[1] for row in play.entries.values() if "/" in row.location}
    assert f"~{2_000}" in kept
    assert "~1900" not in kept


@pytest.mark.parametrize(("every", "keep"), [(1, 0), (5, 0), (1, 3), (7, 2)])
def test_number_of_retained_iterations_is_bounded_by_prune_every_and_keep(every, keep):
    async def bounded(ctx):
        async def body(ctx, count: int) -> Continue[int] | Break[int]:
            await fetch(count)
            return Continue(count + 1) if count < 60 else Break(count)

        return await ctx.loop("bounded", body, 0, prune_every=every, keep=keep)

    play = Play(bounded).begin()
    while play.alive:
        iterations = {row.location.split("/")[1] for row in play.entries.values() if "/" in row.location}
        assert len(iterations) <= keep + every
        play.complete()
        if play.alive:
            check_replay(play)
    assert play.value == 60
    dropped = [path for extras in play.extras for path in extras.dropped]
    assert len(dropped) == len(set(dropped))
    assert dropped[0] == "bounded/~0"


def test_pruning_resumes_after_a_crash():
    play = Play(long_loop, 300).begin()
    for turn in range(200):
        play.complete()
        if turn % 7 == 0:
            play = crashed(play)
    assert len(play.entries) <= 83
    dropped = [path for extras in play.extras for path in extras.dropped]
    assert len(dropped) == len(set(dropped))


def test_iteration_with_a_pending_entry_is_not_pruned():
    async def leaving(ctx):
        async def loser():
            try:
                await ctx.sleep(50)
            finally:
                await ctx.sleep(500)  # Continues after the end of the race.
                note("seen out")

        async def body(ctx, count: int) -> Continue[int] | Break[int]:
            await fetch(count)
            return Continue(count + 1) if count < 5 else Break(count)

        async def beside():
            return await ctx.loop("beside", body, 0, prune_every=1, keep=0)

        await ctx.race(loser(), fetch("fast"))
        return await beside()

    play = run_with_crashes(leaving)
    assert play.value == 5


def test_iteration_with_an_open_child_is_not_pruned():
    from tests.runner.test_children import kid

    async def starting(ctx):
        async def body(ctx, count: int) -> Continue[int] | Break[int]:
            if count == 1:
                task = asyncio.create_task(ctx.run_child(kid, "x"))
                await asyncio.sleep(0)
                task.cancel()
            await fetch(count)
            return Continue(count + 1) if count < 8 else Break(count)

        return await ctx.loop("starting", body, 0, prune_every=1, keep=0)

    play = Play(starting).run()
    assert play.value == 8


# --- loops beside other tasks


async def nested(ctx: Context) -> Any:
    async def outer(ctx: Context, done: list[Any]) -> Continue[list[Any]] | Break[list[Any]]:
        async def inner(ctx: Context, count: int) -> Continue[int] | Break[int]:
            async def innermost(ctx: Context, left: int) -> Continue[int] | Break[int]:
                left -= await fetch(1)
                return Continue(left) if left else Break(count)

            got = await ctx.receive("go")
            await ctx.loop("innermost", innermost, 2)
            return Continue(count + got) if count < 2 else Break(count)

        pair = await ctx.join(
            counted=ctx.loop("inner", inner, 0),
            first=ctx.race(ctx.sleep(3), ctx.loop("inner", inner, 1)),
        )
        done = [*done, pair["counted"], pair["first"][0]]
        return Continue(done) if len(done) < 4 else Break(done)

    return await ctx.loop("outer", outer, [])


@pytest.mark.parametrize("seed", range(25))
def test_nested_loops_resume_at_the_same_point(seed):
    play = run_with_crashes(nested, seed=seed, events=[("go", 1)] * 30)
    if play.turn.outcome is None:
        pytest.fail(f"ended as {play.turn}")
    counted = play.value
    assert (len(counted), counted[0], counted[2]) == (4, 2, 2)


def test_loop_suspended_in_a_nested_loop_resumes_only_in_the_nested_loop():
    async def two_deep(ctx):
        async def outer(ctx, n: int) -> Continue[int]:
            async def inner(ctx, m: int) -> Continue[int] | Break[int]:
                note((n, m))
                await ctx.sleep(1)
                return Continue(m + 1) if m < 2 else Break(m)

            await ctx.loop("inner", inner, 0)
            return Continue(n + 1)

        await ctx.loop("outer", outer, 0)

    play = Play(two_deep).begin()
    for _ in range(10):
        play.advance(now=play.turn.wake_at)
    cold = crashed(play)
    assert cold.notes == [(3, 1)]
    assert cold.waits == [("outer/~3/inner/~1/sleep", play.turn.wake_at)]


@pytest.mark.parametrize("seed", range(20))
def test_requests_beside_and_after_a_loop_are_numbered_in_order_after_a_crash(seed):
    async def beside(ctx):
        await asyncio.gather(long_loop(ctx, 3), fetch("slow"), ctx.sleep(4))
        await fetch("after")
        await asyncio.gather(fetch("x"), fetch("y"))

    play = run_with_crashes(beside, seed=seed)
    last = max(row.call_seq for row in play.entries.values() if row.location.startswith("long_loop/"))
    assert min(play.entries[f"fetch#{n}"].call_seq for n in (1, 2, 3)) > last
    check_call_order(play)


def test_cancelling_a_loop_in_a_gather_cancels_its_steps():
    async def raced(ctx):
        async def body(ctx, count: int) -> Continue[int]:
            await fetch(count)
            return Continue(count + 1)

        winner, _ = await ctx.race(loop=ctx.loop("endless", body, 0), limit=ctx.sleep(10))
        note(winner)
        await ctx.sleep(5)

    play = Play(raced).begin()
    for _ in range(3):
        play.complete()
    turn = play.advance(now=1_010.0)
    assert turn.effects == (CancelStep("race/loop/endless/~3/fetch"),)
    assert play.entries["race/loop/endless"].status is EntryStatus.CANCELLED
    check_replay(play)
    cold = crashed(play)
    assert cold.notes == ["limit"]
    assert cold.waits == [("sleep", 1_015.0)]


@pytest.mark.parametrize("seed", SEEDS)
def test_body_that_raises_ends_the_loop(seed):
    async def raising(ctx):
        async def body(ctx, count: int) -> Continue[int]:
            await fetch(count)
            if count == 2:
                raise KeyError("two")
            return Continue(count + 1)

        try:
            await ctx.loop("raising", body, 0)
        except KeyError as error:
            await fetch("caught")
            return str(error)

    play = run_with_crashes(raising, seed=seed)
    assert play.value == "'two'"
    entry = play.entries["raising"]
    assert entry.error is not None
    assert (entry.status, entry.error.type, entry.seq) == (EntryStatus.FAILED, "KeyError", None)


# --- tasks of an iteration


@pytest.mark.parametrize("seed", SEEDS)
def test_tasks_of_an_iteration_are_cancelled_and_awaited_at_its_end(seed):
    async def opening(ctx):
        async def beside(number):
            try:
                await ctx.receive("never")
            finally:
                await fetch(["tidy", number])

        async def body(ctx, count: int) -> Continue[int] | Break[int]:
            asyncio.create_task(beside(count))  # noqa: RUF006 - left open on purpose
            await fetch(count)
            return Continue(count + 1) if count < 2 else Break(count)

        got = await ctx.loop("opening", body, 0)
        await fetch("after")
        return got

    play = run_with_crashes(opening, seed=seed)
    assert play.value == 2
    for number in range(3):
        assert play.entries[f"opening/~{number}/beside/never"].status is EntryStatus.CANCELLED
        assert play.entries[f"opening/~{number}/beside/fetch"].status is EntryStatus.SUCCEEDED


def test_tasks_of_the_workflow_keep_running_across_iterations():
    async def around(ctx):
        async def ticking():
            for number in range(3):
                await ctx.sleep(10)
                note(number)

        async def body(ctx, count: int) -> Continue[int] | Break[int]:
            await ctx.sleep(7)
            return Continue(count + 1) if count < 5 else Break(count)

        task = asyncio.create_task(ticking())
        await ctx.loop("around", body, 0)
        await task

    play = Play(around).run()
    assert play.notes == [0, 1, 2]


# --- a loop that never waits


def test_loop_that_never_waits_makes_turns_and_is_not_held():
    async def spinning(ctx):
        async def body(ctx, count: int) -> Continue[int] | Break[int]:
            return Continue(count + 1) if count < 5_500 else Break(count)

        return await ctx.loop("spinning", body, 0)

    play = Play(spinning).begin()
    turns = 1
    while play.alive:
        assert play.turn.more
        assert play.turn.busy, "its owner continues it"
        assert len(play.entries) <= 1_100
        if turns == 2:
            check_cold_when_more(play)
            play = crashed(play)
        play.advance()
        turns += 1
    assert play.value == 5_500
    assert 5 <= turns <= 8
    assert len(play.entries) <= 45


def check_cold_when_more(play: Play) -> None:
    """A replayed run continues at once, so it is at least as far."""
    cold = play.replayed_by(play.definition).begin()
    assert cold.turn.held is None
    assert cold.turn.more
    cold.close()


def test_endless_loop_can_be_cancelled():
    async def endless(ctx):
        async def body(ctx):
            return None

        await ctx.loop("endless", body)

    play = Play(endless).begin()
    assert play.turn.more
    play.cancel()
    assert play.was_cancelled


# --- compensations in loops


@step(retry=None)
async def unbook(seat: int) -> None:
    COMPENSATED.append(seat)


@step(retry=None, compensate=unbook)
async def book(seat: int) -> int:
    return seat


def compensate_by_hand(what: str, page: Page) -> None:
    COMPENSATED.append([what, page])


@pytest.mark.parametrize("seed", SEEDS)
def test_compensations_of_pruned_iterations_still_run(seed):
    async def booking(ctx):
        async def body(ctx, seat: int) -> Continue[int]:
            await book(seat)
            if seat % 2:
                ctx.on_rollback(compensate_by_hand, "by hand", Page(seat, []))
            if seat == 5:
                raise ValueError("no more seats")
            return Continue(seat + 1)

        await book(100)
        await ctx.loop("booking", body, 0, prune_every=1, keep=0)

    COMPENSATED.clear()
    play = run_with_crashes(booking, seed=seed)
    assert play.failure.message == "no more seats"
    by_hand = {seat: ["by hand", Page(seat, [])] for seat in range(6)}
    expected = [by_hand[5], 5, 4, by_hand[3], 3, 2, by_hand[1], 1, 0, 100]
    assert expected == COMPENSATED
    assert not any(row.location.startswith("booking/~2") for row in play.entries.values())


def test_pending_compensations_do_not_restart_pruning():
    async def booking(ctx):
        async def body(ctx, seat: int) -> Continue[int] | Break[int]:
            await book(seat)
            return Continue(seat + 1) if seat < 12 else Break(seat)

        await ctx.loop("booking", body, 0, prune_every=1, keep=1)

    play = Play(booking).begin()
    while play.alive:
        play.complete()
        play = crashed(play) if play.alive else play
    dropped = [path for extras in play.extras for path in extras.dropped]
    assert dropped == [f"booking/~{number}" for number in range(len(dropped))]
    assert len(dropped) == 11


@pytest.mark.parametrize("how", ["step", "on_rollback", "on_exit"])
def test_compensation_without_a_registered_name_is_rejected_in_a_loop(how):
    async def local(ctx):
        def undo(*args):
            pass

        async def body(ctx):
            if how == "step":
                await fetch.options(compensate=undo)(1)
            else:
                getattr(ctx, how)(undo)
            return Break()

        async def inner(ctx):
            await ctx.join(ctx.loop("local", body))
            return Break()

        await ctx.loop("outer", inner)

    play = Play(local).run()
    assert play.failure.type == "JoinError"
    assert "decorate it with @step" in play.failure.message
    assert "fetch" not in str(play.entries.keys())


def test_compensation_outside_of_loops_can_be_any_function():
    compensated = []

    async def plain(ctx):
        ctx.on_rollback(lambda: compensated.append(1))

        async def body(ctx):
            return Break()

        await ctx.loop("loop", body)
        ctx.on_rollback(lambda: compensated.append(2))
        raise ValueError

    Play(plain).run()
    assert compensated == [2, 1]
