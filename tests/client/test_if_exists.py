"""Start a run under an id that is taken: observe, reject or restart it."""

import asyncio

import pytest

from perdure import (
    Context,
    InvalidPayload,
    RunCancelled,
    RunConflict,
    RunNotFound,
    RunStatus,
    RunTerminated,
    StoreError,
    event,
    step,
    workflow,
)
from perdure.errors import InvalidArgument
from perdure.stores.writes import CreateRun
from tests.engine.store_matrix import another_handle, on_every_store

LOG: list[str] = []


@pytest.fixture(autouse=True)
def clear_log():
    LOG.clear()


@step
async def note(what: str) -> str:
    LOG.append(what)
    return what


@event(on_target_terminated="dead_letter")
class Approved:
    by: str


@workflow(name="if_exists.job")
async def job(ctx: Context, day: str, note_it: bool = True) -> str:
    if note_it:
        await note(day)
    return f"{day}/{ctx.generation}"


@workflow(name="if_exists.approval")
async def approval(ctx: Context, what: str) -> str:
    LOG.append(f"approval {what} starts")  # perdure: ignore
    approved = await ctx.receive(Approved)
    return f"{what} by {approved.by} in {ctx.generation}"


@workflow(name="if_exists.review")
async def review(ctx: Context, what: str) -> str:
    return await ctx.deferred("review", str)


@workflow(name="if_exists.parent")
async def parent(ctx: Context, what: str) -> str:
    await ctx.start_child(approval, what, id=f"{what}-attached")
    await ctx.start_child(approval, what, id=f"{what}-detached", detached=True)
    approved = await ctx.receive(Approved)
    return approved.by


@on_every_store
async def test_reject_refuses_an_id_that_is_taken_also_with_an_equal_payload(h):
    engine = await h.engine()
    run = await engine.start(job, "mon", id="j", if_exists="reject")
    assert run.created
    for _ in range(2):
        with pytest.raises(RunConflict, match="'j' already exists; use another id, or if_exists='observe'"):
            await engine.start(job, "mon", id="j", if_exists="reject")
        with pytest.raises(RunConflict):
            await engine.execute(job, "mon", id="j", if_exists="reject")
        assert await h.run_to_end(run) == "mon/0"
    assert LOG == ["mon"]


@on_every_store
async def test_reject_accepts_its_own_start_after_a_lost_response(h):
    engine = await h.engine()
    engine.faults.lose_responses(1)
    run = await h.drive(engine.start(job, "mon", id="j", if_exists="reject"))
    assert (run.created, await h.run_to_end(run)) == (True, "mon/0")


@pytest.mark.parametrize("if_exists", ["restart", "restart_ended"])
@on_every_store
async def test_restart_of_an_ended_run_is_a_new_generation_with_the_new_payload(h, if_exists):
    engine = await h.engine()
    assert await h.drive(engine.execute(job, "mon", id="j", tags={"n": "1"}, if_exists=if_exists)) == "mon/0"
    run = await h.drive(engine.start(job, "tue", id="j", tags={"n": "2"}, retention=60, if_exists=if_exists))
    assert run.created
    assert await h.run_to_end(run) == "tue/1"
    assert await h.drive(engine.execute(job, "wed", id="j", if_exists=if_exists)) == "wed/2"
    described = await run.describe()
    assert (described.generation, described.input, described.tags) == (2, {"day": "wed"}, {})
    assert [entry.location for entry in await engine.history("j")] == ["note"], "the history starts again"
    assert LOG == ["mon", "tue", "wed"]


@on_every_store
async def test_identity_after_a_restart_is_the_input_of_that_restart(h):
    engine = await h.engine()
    await h.drive(engine.execute(job, "mon", id="j"))
    await h.drive(engine.execute(job, "tue", id="j", if_exists="restart_ended"))
    assert not (await engine.start(job, "tue", id="j")).created
    with pytest.raises(RunConflict, match="another payload"):
        await engine.start(job, "mon", id="j")


@on_every_store
async def test_a_restart_of_a_failed_and_of_a_cancelled_run(h):
    attempts: list[int] = []

    @step(retry=None)
    async def fail_first() -> int:
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("first")
        return len(attempts)

    @workflow
    async def flaky(ctx: Context) -> int:
        return await fail_first()

    engine = await h.engine(flaky, approval)
    with pytest.raises(Exception, match="first"):
        await h.drive(engine.execute(flaky, id="f"))
    assert await h.drive(engine.execute(flaky, id="f", if_exists="restart_ended")) == 2
    await engine.start(approval, "a", id="a")
    await h.settle()
    await engine.cancel("a")
    with pytest.raises(RunCancelled):
        await h.drive(engine.result("a"))
    run = await h.drive(engine.start(approval, "a", id="a", if_exists="restart_ended"))
    await engine.send("a", Approved("ada"))
    assert await h.run_to_end(run) == "a by ada in 1"


@on_every_store
async def test_restart_ended_observes_an_open_run(h):
    engine = await h.engine()
    await engine.start(approval, "a", id="a")
    await h.settle()
    run = await engine.start(approval, "a", id="a", if_exists="restart_ended")
    assert not run.created
    with pytest.raises(RunConflict, match="another payload"):
        await engine.start(approval, "b", id="a", if_exists="restart_ended")
    await engine.send("a", Approved("ada"))
    assert await h.run_to_end(run) == "a by ada in 0"


@on_every_store
async def test_restart_terminates_an_open_run_with_its_attached_children(h):
    engine = await h.engine()
    await engine.start(parent, "p", id="p")
    await h.settle()
    waiting = h.background(engine.result("p"))
    await h.settle()
    run = await h.drive(engine.start(parent, "q", id="p", if_exists="restart"))
    assert run.created
    await h.settle()
    assert await engine.status("p-attached") is RunStatus.CANCELLED
    assert await engine.status("p-detached") is RunStatus.SUSPENDED
    assert await engine.status("q-attached") is RunStatus.SUSPENDED
    await engine.send("p", Approved("ada"))
    assert await h.run_to_end(run) == "ada"
    assert (await run.describe()).generation == 1
    waited = await h.drive(asyncio.gather(waiting, return_exceptions=True))
    assert waited == ["ada"] or isinstance(waited[0], RunCancelled), "a caller gets the end that it reads first"


@on_every_store
async def test_a_parent_that_waits_for_a_restarted_child_gets_the_end_of_the_old_generation(h):
    @workflow
    async def waits(ctx: Context) -> str:
        return str((await (await ctx.start_child(approval, "a", id="child")).outcome()).status)

    engine = await h.engine(waits, approval)
    run = await engine.start(waits)
    await h.settle()
    await h.drive(engine.start(approval, "b", id="child", if_exists="restart"))
    assert await h.run_to_end(run) == "cancelled"
    described = await engine.describe("child")
    assert (described.parent, described.status) == (None, RunStatus.SUSPENDED)


@on_every_store
async def test_unread_messages_of_the_old_generation_follow_their_policy_and_do_not_reach_the_new_one(h):
    engine = await h.engine()
    run = await engine.start(job, "mon", id="j", delay=1000)
    await engine.send("j", Approved("too early"), event_id="e")
    run = await h.drive(engine.start(approval.options(id="a"), "x"))
    await h.drive(engine.start(job, "tue", id="j", delay=1000, if_exists="restart"))
    (letter,) = await engine.dead_letters(Approved)
    assert (letter.event_id, letter.original_target) == ("e", "j")
    await engine.send("j", Approved("again"), event_id="e")
    assert await h.drive(engine.result("j")) == "tue/1"
    assert await run.status() is RunStatus.SUSPENDED


@on_every_store
async def test_tokens_of_the_old_generation_complete_nothing(h):
    engine = await h.engine()
    await engine.start(review, "a", id="r")
    await h.settle()
    old = await engine.deferred_token("r", "review")
    run = await h.drive(engine.start(review, "b", id="r", if_exists="restart"))
    await h.settle()
    assert not await engine.complete(old, "late")
    assert await engine.complete(await engine.deferred_token("r", "review"), "new")
    assert await h.run_to_end(run) == "new"


@on_every_store
async def test_published_values_and_streams_start_again(h):
    @workflow
    async def publishes(ctx: Context, n: int) -> None:
        if n == 1:
            await ctx.publish("progress", n)
        await ctx.stream("tokens").write(n)

    engine = await h.engine(publishes)
    await h.drive(engine.execute(publishes, 1, id="p"))
    await h.drive(engine.execute(publishes, 2, id="p", if_exists="restart"))
    assert await engine.published("p") == {}
    assert [item async for item in engine.read_stream("p", "tokens")] == [2]


@on_every_store
async def test_a_restarted_run_is_rewound_within_its_new_generation(h):
    engine = await h.engine()
    await h.drive(engine.execute(job, "mon", id="j"))
    run = await h.drive(engine.start(job, "tue", id="j", timeout=60, if_exists="restart"))
    await h.run_to_end(run)
    await engine.rewind("j", "note")
    assert await h.run_to_end(run) == "tue/2"
    assert LOG == ["mon", "tue", "tue"]


@on_every_store
async def test_another_workflow_is_never_restarted(h):
    engine = await h.engine()
    await h.drive(engine.execute(job, "mon", id="j"))
    await engine.start(approval, "a", id="a")
    await h.settle()
    for if_exists in ("restart", "restart_ended"):
        with pytest.raises(RunConflict, match="another workflow"):
            await h.drive(engine.start(approval, "x", id="j", if_exists=if_exists))
        with pytest.raises(RunConflict, match="another workflow"):
            await h.drive(engine.start(job, "x", id="a", if_exists=if_exists))
    assert await engine.status("a") is RunStatus.SUSPENDED


@on_every_store
async def test_an_invalid_restart_leaves_the_run_as_it_is(h):
    engine = await h.engine()
    await engine.start(approval, "a", id="a")
    await h.settle()
    before = engine.faults.commits
    for wrong, options in ((InvalidPayload, {}), (InvalidArgument, {"timeout": -1}), (InvalidArgument, {"delay": "x"})):
        payload = 5 if not options else "b"
        with pytest.raises(wrong):
            await engine.start(approval, payload, id="a", if_exists="restart", **options)
    with pytest.raises(InvalidArgument, match="if_exists must be one of 'observe'"):
        await engine.start(approval, "b", id="a", if_exists="replace")
    assert engine.faults.commits == before
    assert await engine.status("a") is RunStatus.SUSPENDED


@on_every_store
async def test_concurrent_restarts_each_get_a_generation_in_one_order(h):
    engine = await h.engine()
    client = await h.client(store=another_handle(h.store, h.clock))
    await engine.start(approval, "first", id="a")
    await h.settle()
    callers = [engine, client, engine, client]
    calls = [caller.start(approval, f"call {n}", id="a", if_exists="restart") for n, caller in enumerate(callers)]
    runs = await h.drive(asyncio.gather(*calls))
    assert all(run.created for run in runs)
    assert (await engine.describe("a")).generation == len(calls)
    await engine.send("a", Approved("ada"))
    assert (await h.drive(engine.result("a"))).endswith(f"by ada in {len(calls)}")


@on_every_store
async def test_of_concurrent_restarts_of_an_ended_run_the_others_observe_or_conflict(h):
    engine = await h.engine()
    await engine.start(approval, "first", id="a")
    await engine.send("a", Approved("ada"))
    await h.drive(engine.result("a"))
    calls = [engine.start(approval, "same", id="a", if_exists="restart_ended") for _ in range(5)]
    runs = await h.drive(asyncio.gather(*calls))
    assert [run.created for run in runs].count(True) == 1
    with pytest.raises(RunConflict):
        await engine.start(approval, "another", id="a", if_exists="restart_ended")
    assert (await engine.describe("a")).generation == 1


@on_every_store
async def test_a_client_without_a_worker_restarts_a_run(h):
    engine = await h.engine()
    await engine.start(parent, "p", id="p")
    await h.settle()
    await h.drive(engine.shutdown())
    client = await h.client()
    run = await h.drive(client.start(parent, "q", id="p", if_exists="restart"))
    assert run.created
    assert await client.status("p-attached") is RunStatus.CANCELLED
    engine = await h.engine()
    await engine.send("p", Approved("ada"))
    assert await h.run_to_end(engine.get("p")) == "ada"


@on_every_store
async def test_a_late_commit_of_the_old_owner_changes_nothing(h):
    gate = asyncio.Event()

    @step
    async def wait_for_gate(what: str) -> str:
        if what == "old":
            await gate.wait()
        return what

    @workflow
    async def gated(ctx: Context, what: str) -> str:
        result = await wait_for_gate(what)
        await note(f"after {result}")
        return result

    old = await h.engine(gated)
    run = await old.start(gated, "old", id="g")
    await h.settle()
    client = await h.client(store=another_handle(h.store, h.clock))
    await h.drive(client.start(gated, "new", id="g", if_exists="restart"))
    gate.set()
    assert await h.run_to_end(run) == "new"
    assert LOG == ["after new"]
    assert (await run.describe()).generation == 1


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("commit", range(1, 7))
@on_every_store
async def test_a_crash_during_a_restart_leaves_the_old_or_the_new_run(h, commit, side):
    engine = await h.engine()
    await engine.start(approval, "old", id="a")
    await engine.send("a", Approved("early"), event_id="unread")
    await h.drive(engine.result("a"))
    await engine.start(parent, "p", id="p")
    await h.settle()
    client = await h.client()
    faults = client._session.store
    faults.crash(commit, side)
    restarting = h.background(client.start(parent, "q", id="p", if_exists="restart"))
    await h.settle()
    await h.clock.advance(60)
    if not restarting.done():  # the caller is dead: it has no handle
        described = await engine.describe("p")
        assert (described.generation, described.status) in (
            (0, RunStatus.SUSPENDED),
            (0, RunStatus.CANCELLED),
            (1, RunStatus.SUSPENDED),
        )
        await h.drive(engine.start(parent, "q", id="p", if_exists="restart"))
    await h.settle()
    await engine.send("p", Approved("ada"))
    assert await h.drive(engine.result("p")) == "ada"
    assert (await engine.describe("p")).input == {"what": "q"}
    assert await engine.status("p-attached") is RunStatus.CANCELLED


@on_every_store
async def test_a_restart_that_the_store_refuses_raises_and_a_repeated_call_restarts(h):
    engine = await h.engine()
    await engine.start(approval, "old", id="a")
    await h.settle()
    engine.faults.refuse(lambda write: isinstance(write, CreateRun) and write.replaces is not None)
    with pytest.raises(StoreError):
        await h.drive(engine.start(approval, "new", id="a", if_exists="restart"))
    assert await engine.status("a") is RunStatus.CANCELLED
    engine.faults.refuse(None)
    run = await h.drive(engine.start(approval, "new", id="a", if_exists="restart"))
    await engine.send("a", Approved("ada"))
    assert await h.run_to_end(run) == "new by ada in 1"


@on_every_store
async def test_a_restart_after_lost_responses_starts_one_generation(h):
    engine = await h.engine()
    await engine.start(approval, "old", id="a")
    await h.settle()
    client = await h.client()
    client._session.store.lose_responses(3)
    run = await h.drive(client.start(approval, "new", id="a", if_exists="restart"))
    assert run.created
    assert (await engine.describe("a")).generation == 1


@on_every_store
async def test_a_request_to_the_old_generation_ends_with_a_restart(h):
    engine = await h.engine()
    await engine.start(review, "a", id="r")
    await h.settle()
    request = h.background(engine.request("r", Approved("ada")))
    await h.settle()
    await h.drive(engine.start(review, "b", id="r", if_exists="restart"))
    with pytest.raises(RunTerminated, match="cancelled"):
        await h.drive(request)


@on_every_store
async def test_restart_with_an_id_that_is_not_taken_creates_the_run(h):
    engine = await h.engine()
    with pytest.raises(RunNotFound):
        await engine.send("j", Approved("ada"))
    for if_exists in ("restart", "restart_ended"):
        assert await h.drive(engine.execute(job, "mon", id=if_exists, if_exists=if_exists)) == "mon/0"


@on_every_store
async def test_restart_of_a_run_that_is_started_by_name(h):
    engine = await h.engine()
    client = await h.client()
    await h.drive(engine.execute(job, "mon", id="j"))
    run = await h.drive(client.start("if_exists.job", "tue", id="j", if_exists="restart"))
    assert await h.run_to_end(engine.get(run.id)) == "tue/1"
    with pytest.raises(RunTerminated):
        await client.send("j", Approved("ada"))
