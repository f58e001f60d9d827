"""Held runs: they are logged, listed and described with their reason, and other code continues them."""

import asyncio
import logging

import pytest

from perdure import Context, InvalidPayload, RunCancelled, RunHeld, RunQuery, RunStatus, event, step, workflow
from perdure.errors import InvalidArgument
from tests.engine.store_matrix import another_handle, on_every_store

TRIED: list[str] = []


@pytest.fixture(autouse=True)
def clear_tried():
    TRIED.clear()


@event(name="held.approved")
class HeldApproved:
    by: str


@step
async def first() -> str:
    return "first"


@step
async def second() -> str:
    return "second"


@workflow(name="held.release")
async def fits(ctx: Context) -> str:
    TRIED.append("fits")  # perdure: ignore
    await first()
    await ctx.sleep(100)
    return await second()


@workflow(name="held.release")
async def diverges(ctx: Context) -> str:
    TRIED.append("diverges")  # perdure: ignore
    return await second()


@workflow(name="held.deadlock")
async def deadlocks(ctx: Context) -> None:
    await asyncio.get_running_loop().create_future()


@workflow(name="held.spin")
async def spins(ctx: Context) -> None:
    while True:
        await asyncio.sleep(0)


@workflow(name="held.waits")
async def waits(ctx: Context) -> str:
    approval = await ctx.receive(HeldApproved)
    return f"{await first()} by {approval.by}"


async def start_and_suspend(h, count: int = 1) -> None:
    """Create runs of the code that fits, and stop its worker."""
    engine = await h.engine(fits)
    for n in range(count):
        await engine.start(fits, id=f"r{n}")
    await h.settle()
    await h.drive(engine.shutdown())
    TRIED.clear()


async def hold_by_divergence(h, count: int = 1):
    """Return an engine whose code has held these runs."""
    await start_and_suspend(h, count)
    engine = await h.engine(diverges)
    await h.clock.advance(120)
    assert len(await engine.runs(RunQuery(held="diverged"))) == count
    return engine


def held_logs(caplog) -> list[logging.LogRecord]:
    return [each for each in caplog.records if " held: " in each.getMessage()]


# --- visible ------------------------------------------------------------------------------------------------------


@on_every_store
async def test_hold_is_logged_as_an_error_with_reason_location_line_and_advice(h, caplog):
    engine = await hold_by_divergence(h)
    (log,) = held_logs(caplog)
    assert log.levelno == logging.ERROR
    for word in ("Run r0 held: ", "held.release", "diverged", "first", "test_held_runs.py", "perdure resume r0"):
        assert word in log.getMessage()
    fields = vars(log)
    assert (fields["run_id"], fields["workflow"], fields["worker"]) == ("r0", "held.release", engine.worker)
    assert (fields["kind"], fields["location"]) == ("diverged", "second")
    assert "test_held_runs.py" in fields["line"]


@on_every_store
async def test_description_of_a_deadlock_or_spin_has_the_line(h):
    engine = await h.engine(deadlocks, spins)
    for wf, kind, name in ((deadlocks, "deadlock", "deadlocks"), (spins, "livelock", "spins")):
        run = await engine.start(wf)
        await h.settle()
        seen = await run.describe()
        assert seen.status is RunStatus.SUSPENDED
        assert seen.held.kind == kind
        assert "test_held_runs.py" in seen.held.line
        assert f"in {name}" in seen.held.line
        assert seen.held.line in str(seen.waiting_for[-1])


@on_every_store
async def test_query_selects_held_runs_by_kind_in_pages(h):
    engine = await h.engine(deadlocks, waits)
    for n in range(5):
        await engine.start(deadlocks, id=f"d{n}")
        await engine.start(waits, id=f"w{n}")
        await h.clock.advance(1)
    await engine.pause("w1")
    await h.settle()
    page = await engine.runs(RunQuery(held=True, limit=4))
    rest = await engine.runs(RunQuery(held=True, limit=4, after=page.next))
    assert [run.id for run in (*page, *rest)] == ["d4", "d3", "d2", "w1", "d1", "d0"]
    assert rest.next is None
    assert [run.id for run in await engine.runs(RunQuery(held="paused"))] == ["w1"]
    assert [run.id for run in await engine.runs(RunQuery(held="deadlock", workflow="held.waits"))] == []
    assert {run.held.kind for run in page} == {"deadlock", "paused"}
    await engine.terminate("d0")
    await engine.resume("w1")
    await h.settle()
    assert len(await engine.runs(RunQuery(held=True))) == 4


@pytest.mark.parametrize("given", [False, "pending", "", 3])
def test_query_refuses_an_unknown_kind_of_hold(given):
    with pytest.raises(InvalidArgument, match=r"RunQuery.held must be True or one of diverged, .*paused"):
        RunQuery(held=given)


@on_every_store
async def test_result_raises_if_held_or_names_the_reason_in_its_timeout(h):
    engine = await h.engine(waits)
    client = await h.client()
    run = await engine.start(waits, id="w")
    watching = h.background(client.result("w", raise_if_held=True))
    await h.settle()
    assert not watching.done()
    await engine.pause("w", "the bank is closed")
    with pytest.raises(RunHeld, match="run 'w' is held \\(paused\\): paused: the bank is closed") as held:
        await h.drive(watching)
    assert (held.value.run_id, held.value.kind) == ("w", "paused")
    with pytest.raises(RunHeld):
        await h.drive(run.result(raise_if_held=True))
    with pytest.raises(TimeoutError, match="held \\(paused\\): paused: the bank is closed"):
        await h.drive(run.result(timeout=3))
    patient = h.background(run.result())
    await engine.resume("w")
    await engine.send("w", HeldApproved("ada"))
    assert await h.drive(patient) == "first by ada"


# --- retried ------------------------------------------------------------------------------------------------------


@on_every_store
async def test_rolled_out_release_frees_all_runs_that_the_old_code_holds(h):
    """As documented: the new worker starts first, then the old one stops."""
    old = await hold_by_divergence(h, count=8)
    fixed = await h.engine(fits, store=another_handle(h.store, h.clock))
    await h.clock.advance(20)
    await h.drive(old.shutdown())
    await h.clock.advance(20)
    assert {(await fixed.status(f"r{n}")) for n in range(8)} == {RunStatus.SUCCEEDED}
    assert h.executed().count(("first", 1)) == 8


@on_every_store
async def test_old_code_continues_what_a_release_holds_when_the_release_is_rolled_back(h):
    await start_and_suspend(h)
    broken = await h.engine(diverges)
    await h.clock.advance(120)
    old = await h.engine(fits, concurrency=1)
    run = old.get("r0")
    assert await h.run_to_end(run) == "second"
    await h.drive(broken.shutdown())


@on_every_store
async def test_runs_held_after_the_new_worker_joined_are_retried_when_the_old_one_leaves(h):
    await start_and_suspend(h)
    fixed = await h.engine(fits)
    fixed.faults.pause()  # the other worker claims the run first
    broken = await h.engine(diverges)
    await h.clock.advance(130)
    assert [run.id for run in await broken.runs(RunQuery(held="diverged"))] == ["r0"]
    fixed.faults.unblock()
    await h.drive(broken.shutdown())
    assert await h.run_to_end(fixed.get("r0")) == "second"


@on_every_store
async def test_code_that_held_a_run_does_not_try_it_again(h, caplog):
    engine = await hold_by_divergence(h)
    assert TRIED == ["diverges"]
    others = [await h.engine(diverges) for _ in range(3)]
    await h.clock.advance(30)
    await h.drive(others[0].shutdown())
    await h.crash(others[1])
    await h.clock.advance(60)
    await h.drive(engine.recover())
    assert TRIED == ["diverges"]
    assert len(held_logs(caplog)) == 1


@on_every_store
async def test_resume_tries_the_same_code_again(h):
    engine = await hold_by_divergence(h)
    await engine.resume("r0")
    await h.settle()
    assert TRIED == ["diverges", "diverges"]
    assert len(await engine.runs(RunQuery(held=True))) == 1


@on_every_store
async def test_hold_names_all_code_that_could_not_continue_the_run(h):
    @workflow(name="held.release")
    async def diverges_too(ctx: Context) -> str:
        TRIED.append("diverges too")
        await ctx.sleep(1)
        return await first()

    engine = await hold_by_divergence(h)
    other = await h.engine(diverges_too)
    await h.clock.advance(20)
    assert TRIED == ["diverges", "diverges too"]
    assert len((await engine.describe("r0")).held.fingerprints) == 2
    for _ in range(2):
        await h.drive((await h.engine(diverges)).shutdown())
        await h.drive((await h.engine(diverges_too)).shutdown())
        await h.clock.advance(20)
    assert TRIED == ["diverges", "diverges too"]
    await h.drive(other.shutdown())


@on_every_store
async def test_worker_without_free_slots_retries_held_runs_later(h):
    await h.drive((await hold_by_divergence(h, count=5)).shutdown())
    fixed = await h.engine(fits, concurrency=1)
    for n in range(5):
        assert await h.run_to_end(fixed.get(f"r{n}")) == "second"


@on_every_store
async def test_worker_of_another_pool_does_not_take_a_held_run(h):
    engine = await hold_by_divergence(h)
    await h.engine(fits, pool="other")
    await h.clock.advance(30)
    assert len(await engine.runs(RunQuery(held="diverged"))) == 1


@on_every_store
async def test_worker_that_dies_while_it_retries_a_held_run_leaves_it_to_others(h):
    await h.drive((await hold_by_divergence(h)).shutdown())
    dying = await h.engine(fits)
    await h.settle()
    await h.crash(dying)
    fixed = await h.engine(fits)
    assert await h.run_to_end(fixed.get("r0")) == "second"


# --- paused -------------------------------------------------------------------------------------------------------


@on_every_store
async def test_paused_run_waits_until_it_is_resumed(h):
    engine = await h.engine(waits)
    run = await engine.start(waits, id="w")
    await h.settle()
    await engine.pause("w", "the bank is closed")
    await h.settle()
    seen = await run.describe()
    assert (seen.status, seen.held.kind, seen.held.reason) == (
        RunStatus.SUSPENDED,
        "paused",
        "paused: the bank is closed",
    )
    await engine.send("w", HeldApproved("ada"))
    await h.clock.advance(60)
    await h.engine(waits)  # another worker does not resume it
    await h.clock.advance(60)
    assert h.executed() == []
    await engine.resume("w")
    assert await h.run_to_end(run) == "first by ada"


@on_every_store
async def test_pause_lets_running_steps_finish_and_starts_no_other(h):
    gate = asyncio.Event()

    @step
    async def gated_step() -> int:
        await gate.wait()
        return 1

    @workflow(name="held.gated")
    async def gated(ctx: Context) -> int:
        one = await gated_step()
        await second()
        return one

    engine = await h.engine(gated)
    run = await engine.start(gated, id="g")
    await h.settle()
    await engine.pause("g")
    await h.settle()
    assert (await run.describe()).held is None
    gate.set()
    await h.settle()
    assert (await run.describe()).held.kind == "paused"
    assert h.executed() == [("gated_step", 1)]
    await engine.resume("g")
    assert await h.run_to_end(run) == 1
    assert h.executed() == [("gated_step", 1), ("second", 1)]


@on_every_store
async def test_a_child_that_a_paused_run_has_not_started_is_started_after_the_resume(h):
    gate = asyncio.Event()

    @step
    async def step_before() -> int:
        await gate.wait()
        return 1

    @workflow(name="held.child")
    async def child(ctx: Context, n: int) -> int:
        return n + 1

    @workflow(name="held.parent")
    async def parent(ctx: Context) -> int:
        return await ctx.run_child(child, await step_before())

    engine = await h.engine(parent, child)
    run = await engine.start(parent, id="p")
    await h.settle()
    await engine.pause("p")
    gate.set()
    await h.settle()
    assert (await run.describe()).held.kind == "paused"
    assert [each.id for each in await engine.runs(RunQuery(parent="p"))] == []
    await engine.resume("p")
    assert await h.run_to_end(run) == 2


@on_every_store
async def test_pause_survives_a_crash_before_the_run_is_held(h):
    gate = asyncio.Event()

    @step
    async def lost_step() -> int:
        await gate.wait()
        return 1

    @workflow(name="held.lost")
    async def lost(ctx: Context) -> int:
        return await lost_step()

    engine = await h.engine(lost)
    await engine.start(lost, id="l")
    await h.settle()
    await engine.pause("l")
    await h.settle()
    await h.crash(engine)
    other = await h.engine(lost)
    await h.clock.advance(60)
    assert (await other.describe("l")).held.kind == "paused"
    gate.set()
    await other.resume("l")
    assert await h.run_to_end(other.get("l")) == 1


@on_every_store
async def test_resume_ends_a_pause_that_has_not_held_the_run_yet(h):
    gate = asyncio.Event()

    @step
    async def gated_again() -> int:
        await gate.wait()
        return 1

    @workflow(name="held.gated-again")
    async def gated(ctx: Context) -> int:
        await gated_again()
        return len(await second())

    engine = await h.engine(gated)
    run = await engine.start(gated, id="g")
    await h.settle()
    await engine.pause("g")
    await engine.resume("g")
    await h.settle()
    gate.set()
    assert await h.run_to_end(run) == 6


@on_every_store
async def test_paused_run_can_be_cancelled(h):
    engine = await h.engine(waits)
    run = await engine.start(waits, id="w")
    await h.settle()
    await engine.pause("w")
    await h.settle()
    assert await engine.cancel("w", "not needed") is True
    with pytest.raises(RunCancelled, match="run 'w' was cancelled: not needed") as cancelled:
        await h.run_to_end(run)
    assert cancelled.value.reason == "not needed"


# --- cancel -------------------------------------------------------------------------------------------------------


@on_every_store
async def test_cancel_of_a_held_run_is_shown_as_pending_with_its_reason(h):
    engine = await hold_by_divergence(h)
    assert not (await engine.describe("r0")).cancel_pending
    assert await engine.cancel("r0", "a duplicate") is True
    await h.settle()
    seen = await engine.describe("r0")
    assert (seen.status, seen.cancel_pending, seen.cancel_reason) == (RunStatus.SUSPENDED, True, "a duplicate")
    fixed = await h.engine(fits)
    with pytest.raises(RunCancelled, match="a duplicate"):
        await h.run_to_end(fixed.get("r0"))
    seen = await fixed.describe("r0")
    assert (seen.status, seen.cancel_pending, seen.cancel_reason) == (RunStatus.CANCELLED, False, "a duplicate")
    assert seen.error is None
    (entry,) = [each for each in await fixed.history("r0") if each.kind == "cancel"]
    assert entry.value == "a duplicate"


@on_every_store
async def test_reason_of_a_cancel_reaches_the_workflow_and_shows_while_it_compensates(h):
    messages = []

    @workflow(name="held.compensating")
    async def compensating(ctx: Context) -> None:
        try:
            await ctx.sleep(1000)
        except asyncio.CancelledError as error:
            messages.append(error.args)
            await ctx.sleep(50)
            raise

    engine = await h.engine(compensating)
    run = await engine.start(compensating, id="c")
    await h.settle()
    await run.cancel("too slow")
    await h.settle()
    seen = await run.describe()
    assert (seen.cancel_pending, seen.cancel_reason, seen.status) == (False, "too slow", RunStatus.SUSPENDED)
    await h.crash(engine)
    other = await h.engine(compensating)
    with pytest.raises(RunCancelled):
        await h.run_to_end(other.get("c"))
    assert set(messages) == {("too slow",)}


@on_every_store
async def test_reason_of_a_cancel_before_the_first_execution_is_described(h):
    client = await h.client()
    run = await client.start(waits, id="w")
    assert await run.cancel("too early") is True
    seen = await run.describe()
    assert (seen.status, seen.cancel_reason, seen.cancel_pending) == (RunStatus.CANCELLED, "too early", False)
    assert await run.cancel("again") is False
    assert await client.cancel("missing", "why") is False


@on_every_store
async def test_reasons_are_checked(h):
    client = await h.client()
    await client.start(waits, id="w")
    for call in (client.cancel, client.pause):
        with pytest.raises(InvalidArgument, match="a reason must be a string"):
            await call("w", 3)
    assert not isinstance(InvalidArgument("x"), InvalidPayload)


@on_every_store
async def test_run_that_spins_before_its_first_durable_call_can_be_cancelled(h):
    engine = await h.engine(spins)
    run = await engine.start(spins, id="s")
    await h.settle()
    assert (await run.describe()).held.kind == "livelock"
    assert await run.cancel() is True
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)


@on_every_store
async def test_run_that_spins_on_after_its_cancel_ends_and_runs_its_compensations(h):
    undone = []

    @step
    async def undo(what: str) -> None:
        undone.append(what)

    @workflow(name="held.stubborn")
    async def stubborn(ctx: Context) -> None:
        ctx.on_rollback(undo, "it")
        while True:
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                continue

    engine = await h.engine(stubborn)
    run = await engine.start(stubborn, id="s")
    await h.settle()
    assert (await run.describe()).held.kind == "livelock"
    await run.cancel("enough")
    with pytest.raises(RunCancelled, match="enough"):
        await h.run_to_end(run)
    assert undone == ["it"]


@on_every_store
async def test_cancelled_spin_is_replayed_after_a_crash(h):
    gate = asyncio.Event()

    @step
    async def gated_undo() -> None:
        await gate.wait()

    @workflow(name="held.spin-and-undo")
    async def spin_and_undo(ctx: Context) -> None:
        ctx.on_rollback(gated_undo)
        while True:
            await asyncio.sleep(0)

    engine = await h.engine(spin_and_undo)
    run = await engine.start(spin_and_undo, id="s")
    await h.settle()
    await run.cancel()
    await h.settle()
    assert h.executed() == [("~rollback/gated_undo", 1)]
    await h.crash(engine)
    gate.set()
    other = await h.engine(spin_and_undo)
    with pytest.raises(RunCancelled):
        await h.run_to_end(other.get("s"))
