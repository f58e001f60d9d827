"""Compensations run in reverse order, each once at any crash; and the order of events when a run fails."""

import asyncio
import contextlib

import pytest

from perdure import (
    Break,
    Context,
    Continue,
    Retry,
    RollbackError,
    RunCancelled,
    RunFailed,
    RunStatus,
    StepFailed,
    WorkflowMisuse,
    current_step,
    step,
    workflow,
)
from perdure.clock import sleep_on
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import STORES, another_handle, on_every_store

LOG: list[str] = []
GATES: dict[str, asyncio.Event] = {}


@pytest.fixture(autouse=True)
def forget():
    LOG.clear()
    GATES.clear()


async def undo(what: str) -> None:
    LOG.append(f"undo {what}")


@step(compensate=undo)
async def do(what: str) -> str:
    LOG.append(what)
    return what


@step
async def note(what: str) -> None:
    LOG.append(what)


@step(retry=None)
async def collapse() -> None:
    LOG.append("collapse")
    raise OSError("collapsed")


async def fails_twice(what: str) -> None:
    LOG.append(f"undo {what}, attempt {current_step().attempt}")
    if current_step().attempt < 3:
        raise ConnectionError("not yet")


stubborn = step(retry=Retry(max_attempts=2, initial=1, jitter=0))


@stubborn
async def never_undone(what: str) -> None:
    LOG.append(f"cannot undo {what}")
    raise ConnectionError(f"{what} is for ever")


def undone() -> list[str]:
    return [line.removeprefix("undo ") for line in LOG if line.startswith("undo ")]


async def failed(h, engine, wf, *args, id="c"):
    with pytest.raises(RunFailed) as error:
        await h.run_to_end(await engine.start(wf, *args, id=id))
    return error.value


# --- on failure


async def branch(ctx: Context, name: str) -> None:
    await do(f"{name} 1")
    await ctx.sleep(1)
    await do(f"{name} 2")


async def loser(ctx: Context) -> None:
    await do("loser")
    await ctx.sleep(1000)


@workflow(name="undo.everywhere")
async def everywhere(ctx: Context) -> None:
    await do("first")
    ctx.on_rollback(undo, "by hand")
    await ctx.join(a=branch(ctx, "a"), b=branch(ctx, "b"))
    await ctx.race(loser=loser(ctx), winner=ctx.sleep(100))

    async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
        await do(f"loop {n}")
        return Break(n) if n == 2 else Continue(n + 1)

    await ctx.loop("loop", body, 0)
    await do("last")
    await collapse()


EVERYTHING = ["last", "loop 2", "loop 1", "loop 0", "loser", "b 2", "a 2", "b 1", "a 1", "by hand", "first"]


@on_every_store
async def test_compensations_run_last_first_wherever_they_were_registered(h):
    engine = await h.engine(everywhere)
    error = await failed(h, engine, everywhere)
    assert (error.type, error.location) == ("StepFailed", "collapse")
    assert undone() == EVERYTHING
    assert LOG.index("collapse") < LOG.index("undo last")
    rollback = [entry for entry in await engine.history("c") if entry.location.startswith("~rollback/")]
    assert len(rollback) == len(EVERYTHING)
    assert all(entry.status == "succeeded" for entry in rollback)


@on_every_store
async def test_only_succeeded_steps_are_compensated(h):
    @step(compensate=undo, retry=None)
    async def fails() -> str:
        raise OSError("no")

    @workflow(name="undo.only-succeeded")
    async def only_succeeded(ctx: Context) -> None:
        await do("done")
        with contextlib.suppress(StepFailed):
            await fails()
        raise ValueError("over")

    await failed(h, await h.engine(only_succeeded), only_succeeded)
    assert undone() == ["done"]


@on_every_store
async def test_successful_run_compensates_nothing(h):
    @workflow(name="undo.succeeds")
    async def succeeds(ctx: Context) -> str:
        ctx.on_rollback(undo, "by hand")
        return await do("work")

    engine = await h.engine(succeeds)
    assert await h.run_to_end(await engine.start(succeeds)) == "work"
    assert LOG == ["work"]


@on_every_store
async def test_a_rollback_error_rolls_back_without_another_attempt(h):
    @step(retry=Retry(max_attempts=5))
    async def wants_rollback() -> None:
        LOG.append("wants rollback")
        raise RollbackError("undo it all")

    @workflow(name="undo.rollback-error")
    async def rollback_error(ctx: Context) -> None:
        await do("work")
        await wants_rollback()

    await failed(h, await h.engine(rollback_error), rollback_error)
    assert LOG == ["work", "wants rollback", "undo work"]


@on_every_store
async def test_compensations_see_the_results_of_their_steps_by_type(h):
    seen = []

    async def refund(receipt: tuple[str, int]) -> None:
        seen.append(receipt)

    @step(compensate=refund)
    async def charge() -> tuple[str, int]:
        return ("r", 5)

    @workflow(name="undo.typed")
    async def typed(ctx: Context) -> None:
        await charge()
        raise ValueError("over")

    await failed(h, await h.engine(typed), typed)
    assert seen == [("r", 5)]


@on_every_store
async def test_a_compensating_run_shows_as_running_and_is_retried(h):
    @workflow(name="undo.retried")
    async def retried(ctx: Context) -> None:
        await do("first")
        await do.options(compensate=fails_twice)("hard")
        raise ValueError("over")

    engine = await h.engine(retried)
    run = await engine.start(retried, id="c")
    await h.settle()
    assert LOG[-1] == "undo hard, attempt 1"
    with pytest.raises(RunFailed, match="over"):
        await h.run_to_end(run)
    assert LOG[2:] == ["undo hard, attempt 1", "undo hard, attempt 2", "undo hard, attempt 3", "undo first"]


@on_every_store
async def test_a_compensating_run_shows_as_running(h):
    @workflow(name="undo.shows")
    async def shows(ctx: Context) -> None:
        await do.options(compensate=parked)("x")
        raise ValueError("over")

    GATES["x"] = asyncio.Event()
    engine = await h.engine(shows)
    run = await engine.start(shows, id="c")
    await h.settle()
    assert LOG[-1] == "begin to undo x"
    assert await run.status() is RunStatus.RUNNING
    GATES["x"].set()
    with pytest.raises(RunFailed):
        await h.run_to_end(run)


async def parked(what: str) -> None:
    LOG.append(f"begin to undo {what}")
    await GATES[what].wait()
    LOG.append(f"undo {what}")


@on_every_store
async def test_an_exhausted_compensation_becomes_a_dead_letter_and_the_rest_still_run(h):
    @workflow(name="undo.exhausted")
    async def exhausted(ctx: Context) -> None:
        await do("first")
        await do.options(compensate=never_undone)("stone")
        await do("last")
        raise ValueError("over")

    engine = await h.engine(exhausted)
    error = await failed(h, engine, exhausted)
    assert error.message == "over"
    assert LOG[3:] == ["undo last", "cannot undo stone", "cannot undo stone", "undo first"]
    [letter] = await engine.dead_letters()
    assert (letter.kind, letter.original_target) == ("compensation", "c")
    assert "stone is for ever" in letter.reason
    assert "never_undone" in letter.reason


# --- on cancel, not on terminate


@workflow(name="undo.waits")
async def waits(ctx: Context) -> None:
    ctx.on_exit(note, "exit 1")
    await do("first")
    await ctx.start_child(child_that_cleans_up, id="child")
    ctx.on_exit(note, "exit 2")
    try:
        await ctx.sleep(1000)
    except asyncio.CancelledError:
        await note("handler")
        raise


@workflow(name="undo.child")
async def child_that_cleans_up(ctx: Context) -> None:
    try:
        await ctx.sleep(1000)
    finally:
        await ctx.sleep(5)
        await note("child ends")


@on_every_store
async def test_cancel_runs_handlers_then_children_then_compensations_then_exits(h):
    engine = await h.engine(waits, child_that_cleans_up)
    run = await engine.start(waits, id="c")
    await h.settle()
    assert await run.cancel()
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)
    assert LOG == ["first", "handler", "child ends", "undo first", "exit 2", "exit 1"]
    [cancel] = [entry for entry in await engine.history("c") if entry.kind == "cancel"]
    assert cancel.status == "succeeded"


@on_every_store
async def test_terminate_compensates_nothing_and_runs_no_exit(h):
    engine = await h.engine(waits, child_that_cleans_up)
    run = await engine.start(waits, id="c")
    await h.settle()
    assert await engine.terminate("c")
    await h.clock.advance(60)
    await h.settle()
    assert await run.status() is RunStatus.CANCELLED
    assert LOG == ["first"]


@on_every_store
async def test_cancelling_while_compensations_run_does_not_interrupt_them(h):
    @workflow(name="undo.uninterrupted")
    async def uninterrupted(ctx: Context) -> None:
        await do("first")
        await do.options(compensate=parked)("second")
        raise ValueError("over")

    GATES["second"] = asyncio.Event()
    engine = await h.engine(uninterrupted)
    run = await engine.start(uninterrupted, id="c")
    await h.settle()
    assert await run.cancel()
    await h.settle()
    assert LOG == ["first", "second", "begin to undo second"]
    GATES["second"].set()
    with pytest.raises(RunFailed, match="over"):
        await h.run_to_end(run)
    assert LOG[3:] == ["undo second", "undo first"]


@on_every_store
async def test_a_second_cancel_while_a_cancelled_run_compensates_changes_nothing(h):
    @workflow(name="undo.cancelled-twice")
    async def cancelled_twice(ctx: Context) -> None:
        await do.options(compensate=parked)("x")
        await ctx.sleep(1000)

    GATES["x"] = asyncio.Event()
    engine = await h.engine(cancelled_twice)
    run = await engine.start(cancelled_twice, id="c")
    await h.settle()
    await run.cancel()
    await h.settle()
    await run.cancel()
    await h.settle()
    GATES["x"].set()
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)
    assert LOG == ["x", "begin to undo x", "undo x"]


@on_every_store
async def test_run_that_exceeds_its_timeout_compensates_and_fails(h):
    @workflow(name="undo.too-long", timeout=50)
    async def too_long(ctx: Context) -> None:
        await do("work")
        await ctx.sleep(1000)

    engine = await h.engine(too_long)
    error = await failed(h, engine, too_long)
    assert error.type == "TimeoutError"
    assert undone() == ["work"]


@on_every_store
async def test_exit_hooks_run_for_every_outcome(h):
    @workflow(name="undo.exits")
    async def exits(ctx: Context, how: str) -> str:
        ctx.on_exit(note, f"exit of {how}")
        await do(how)
        if how == "fail":
            raise ValueError("over")
        if how == "cancel":
            await ctx.sleep(1000)
        if how == "continue":
            await ctx.continue_as("return")
        return how

    engine = await h.engine(exits)
    assert await h.run_to_end(await engine.start(exits, "return", id="r")) == "return"
    assert LOG == ["return", "exit of return"]
    LOG.clear()
    await failed(h, engine, exits, "fail")
    assert LOG == ["fail", "undo fail", "exit of fail"]
    LOG.clear()
    run = await engine.start(exits, "cancel", id="x")
    await h.settle()
    await run.cancel()
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)
    assert LOG == ["cancel", "undo cancel", "exit of cancel"]
    LOG.clear()
    assert await h.run_to_end(await engine.start(exits, "continue", id="k")) == "return"
    assert sorted(LOG) == ["continue", "exit of continue", "exit of return", "return"]


# --- in loops and across continuations


@workflow(name="undo.pruned")
async def pruned(ctx: Context) -> None:
    async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
        await do(f"{n}")
        if n % 10 == 0:
            ctx.on_rollback(undo, f"mark {n}")
        return Break(n) if n == 59 else Continue(n + 1)

    await ctx.loop("pages", body, 0, prune_every=5, keep=2)
    await ctx.sleep(100)
    raise ValueError("over")


@on_every_store
async def test_compensations_registered_in_a_loop_survive_its_pruning_and_a_restart(h):
    engine = await h.engine(pruned)
    await engine.start(pruned, id="c")
    await h.settle()
    assert len(LOG) == 60
    locations = {entry.location for entry in await engine.history("c")}
    assert "pages/~5/do" not in locations
    await h.crash(engine)
    second = await h.engine(pruned, store=another_handle(h.store, h.clock))
    with pytest.raises(RunFailed):
        await h.drive(second.get("c").result())
    expected = []
    for n in range(60):
        expected += [f"{n}", f"mark {n}"] if n % 10 == 0 else [f"{n}"]
    assert undone() == expected[::-1]


@on_every_store
async def test_a_compensation_in_a_loop_must_have_a_registered_name(h):
    async def local(what: str) -> None: ...

    @workflow(name="undo.local")
    async def not_importable(ctx: Context) -> None:
        async def body(ctx: Context, n: int) -> Break[int]:
            await do.options(compensate=local)("x")
            return Break(n)

        await ctx.loop("l", body, 0)

    error = await failed(h, await h.engine(not_importable), not_importable)
    assert error.type == WorkflowMisuse.__name__
    assert LOG == []


@on_every_store
async def test_compensations_survive_continuations(h):
    @workflow(name="undo.continues")
    async def continues(ctx: Context, n: int) -> None:
        await do(f"{n}")
        if n < 3:
            await ctx.continue_as(n + 1)
        raise ValueError("over")

    engine = await h.engine(continues)
    await failed(h, engine, continues, 0)
    assert undone() == ["3", "2", "1", "0"]


# --- rollback_scope


@workflow(name="undo.scope")
async def scoped(ctx: Context, again: bool = False) -> str:
    await do("outside")
    try:
        async with ctx.rollback_scope():
            await do("inside 1")
            await ctx.join(a=do("branch a"), b=do("branch b"))
            await collapse()
    except StepFailed as error:
        await note(f"caught {error.type}")
    async with ctx.rollback_scope():
        await do("kept")
    await ctx.sleep(10)
    if again:
        raise ValueError("over")
    return "done"


SCOPED = ["outside", "inside 1", "branch a", "branch b", "collapse"]
UNSCOPED = ["undo branch b", "undo branch a", "undo inside 1", "caught OSError"]


@on_every_store
async def test_rollback_scope_compensates_before_the_error_propagates(h):
    engine = await h.engine(scoped)
    assert await h.run_to_end(await engine.start(scoped)) == "done"
    assert [*SCOPED, *UNSCOPED, "kept"] == LOG


@on_every_store
async def test_rollback_scope_leaves_outer_compensations_and_repeats_none(h):
    await failed(h, await h.engine(scoped), scoped, True)
    assert [*SCOPED, *UNSCOPED, "kept", "undo kept", "undo outside"] == LOG


# --- crashes


def crashing(kind, tmp_path, wf, *args, **options):
    return crash_on(kind, tmp_path, wf, *args, begin=LOG.clear, **options)


def without_repetition(lines: list[str]) -> list[str]:
    """Remove repetitions: the step that was running at a crash is executed again at once."""
    return [line for at, line in enumerate(lines) if line not in lines[:at]]


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_a_crash_at_every_commit_of_a_rollback(kind, tmp_path):
    async def check(engine):
        assert without_repetition(undone()) == EVERYTHING
        assert len(undone()) <= len(EVERYTHING) + 1, "at most the one that was under way was repeated"

    report = crashing(kind, tmp_path, everywhere, check=check)
    assert report.outcome[:2] == ("failed", "StepFailed")


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_a_crash_at_every_commit_of_rollback_scopes(kind, tmp_path):
    async def check(engine):
        assert without_repetition(LOG) == [*SCOPED, *UNSCOPED, "kept", "undo kept", "undo outside"]

    report = crashing(kind, tmp_path, scoped, True, check=check)
    assert report.outcome[:2] == ("failed", "ValueError")


@workflow(name="undo.letters")
async def leaves_letters(ctx: Context) -> None:
    async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
        await do.options(compensate=never_undone if n == 2 else undo)(f"{n}")
        return Break(n) if n == 6 else Continue(n + 1)

    await ctx.loop("pages", body, 0, prune_every=1, keep=0)
    ctx.on_exit(note, "exit")
    await do.options(compensate=never_undone)("stone")
    raise ValueError("over")


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_a_crash_at_every_commit_with_compensations_that_are_exhausted(kind, tmp_path):
    async def check(engine):
        letters = await engine.dead_letters()
        assert len(letters) == 2
        assert {letter.kind for letter in letters} == {"compensation"}
        assert without_repetition(undone()) == ["6", "5", "4", "3", "1", "0"]
        assert LOG[-1] == "exit"

    report = crashing(kind, tmp_path, leaves_letters, check=check)
    assert report.outcome == ("failed", "ValueError", "over")


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_a_crash_at_every_commit_of_a_run_that_is_cancelled(kind, tmp_path):
    async def cancel(engine):
        while not any(entry.kind == "sleep" for entry in await engine.history("crash-everywhere")):
            await sleep_on(engine._session.clock, 1)
        await engine.cancel("crash-everywhere")

    async def check(engine):
        assert without_repetition(LOG) == ["first", "handler", "child ends", "undo first", "exit 2", "exit 1"]

    report = crashing(kind, tmp_path, waits, also=[child_that_cleans_up], drive=cancel, check=check)
    assert report.outcome == ("cancelled",)


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_crash_at_every_commit_of_compensated_continuations(kind, tmp_path):
    @workflow(name="undo.continues-and-crashes")
    async def continues(ctx: Context, n: int) -> None:
        ctx.on_exit(note, f"exit {n}")
        await do(f"{n}")
        if n < 2:
            await ctx.continue_as(n + 1)
        raise ValueError("over")

    async def check(engine):
        assert without_repetition(LOG) == ["0", "1", "2", "undo 2", "undo 1", "undo 0", "exit 2", "exit 1", "exit 0"]

    crashing(kind, tmp_path, continues, 0, check=check)
