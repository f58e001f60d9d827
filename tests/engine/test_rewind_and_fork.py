"""Rewind and fork by a client: entries at or after a location are executed again, in the run or in a new run."""

import asyncio

import pytest

from perdure import (
    Break,
    Context,
    Continue,
    RunCancelled,
    RunConflict,
    RunFailed,
    RunNotFound,
    RunStatus,
    WorkflowMisuse,
    current_step,
    event,
    step,
    workflow,
)
from tests.engine.crash_points import crash_script
from tests.engine.store_matrix import STORES, another_handle, everything_in, on_every_store

LOG: list[str] = []
KEYS: list[str] = []
BROKEN: set[str] = set()
GATES: dict[str, asyncio.Event] = {}


@pytest.fixture(autouse=True)
def forget():
    begin()
    GATES.clear()


def begin():
    LOG.clear()
    KEYS.clear()
    BROKEN.clear()


@event
class RewoundNews:
    n: int


async def undo(what: str) -> None:
    LOG.append(f"undo {what}")


@step(retry=None)
async def do(what: str) -> str:
    LOG.append(what)
    KEYS.append(current_step().idempotency_key)
    if what in BROKEN:
        raise OSError(f"{what} is broken")
    return what


@step
async def gated(what: str) -> str:
    """Return a value known before the wait, so that a late attempt differs from its successor."""
    LOG.append(what)
    number = LOG.count(what)
    if what in GATES and number == 1:
        await GATES[what].wait()
    return f"{what} {number}"


async def locations(engine, run_id):
    """Return the locations that the workflow requested, in order; internal locations start with a tilde."""
    return [entry.location for entry in await engine.history(run_id) if not entry.location.startswith("~")]


# --- which entries go


@workflow(name="rewind.chain")
async def chain(ctx: Context) -> list[str]:
    names = ["delta", "alpha", "charlie", "alpha", "bravo"]
    return [await do.options(name=name)(f"{name} {number}") for number, name in enumerate(names)]


CHAIN = ["delta 0", "alpha 1", "charlie 2", "alpha 3", "bravo 4"]


@on_every_store
async def test_rewind_drops_entries_by_order_not_by_name(h):
    engine = await h.engine(chain)
    assert await h.run_to_end(await engine.start(chain, id="r")) == CHAIN
    await engine.rewind("r", "charlie")
    assert await h.drive(engine.result("r")) == CHAIN
    assert CHAIN + CHAIN[2:] == LOG, "alpha came before, alpha#1 after"
    assert (await engine.describe("r")).generation == 1


@on_every_store
async def test_rewind_cuts_branches_by_request_order(h):
    @workflow(name="rewind.branches")
    async def branches(ctx: Context) -> dict:
        async def branch(name: str, pause: float) -> list[str]:
            first = await do(f"{name} first")
            await ctx.sleep(pause)
            return [first, await do(f"{name} second")]

        return await ctx.join(slow=branch("slow", 20), quick=branch("quick", 10))

    engine = await h.engine(branches)
    run = await engine.start(branches, id="r")
    expected = await h.run_to_end(run)
    LOG.clear()
    await engine.rewind("r", "join/quick/do#1")
    assert await h.run_to_end(run) == expected
    assert LOG == ["quick second", "slow second"]


@on_every_store
async def test_rewind_to_the_first_entry_repeats_everything(h):
    engine = await h.engine(chain)
    await h.run_to_end(await engine.start(chain, id="r"))
    await engine.rewind("r", "delta")
    await h.drive(engine.result("r"))
    assert LOG == CHAIN * 2


@on_every_store
async def test_effects_get_new_ids(h):
    engine = await h.engine(chain)
    await h.run_to_end(await engine.start(chain, id="r"))
    await engine.rewind("r", "alpha#1")
    await h.drive(engine.result("r"))
    assert len(KEYS) == len(set(KEYS)) == 7


# --- refusals


@on_every_store
async def test_unknown_location_is_refused_and_nothing_is_stored(h):
    engine = await h.engine(chain)
    await h.run_to_end(await engine.start(chain, id="r"))
    before = await everything_in(h.store, "r")
    for call in (engine.rewind, engine.fork):
        with pytest.raises(WorkflowMisuse, match=r"'r' has no entry at 'charley'.*'charlie'"):
            await call("r", "charley")
        with pytest.raises(RunNotFound):
            await call("unknown", "charlie")
    assert await everything_in(h.store, "r") == before
    assert len((await engine.runs()).runs) == 1


@workflow(name="rewind.loop")
async def looping(ctx: Context, until: int) -> list[str]:
    async def body(ctx: Context, state: list[str]) -> Continue[list[str]] | Break[list[str]]:
        n = len(state)
        state = [*state, await do(f"{n}")]
        await ctx.sleep(1)
        await do(f"{n} again")
        return Break(state) if len(state) == until else Continue(state)

    nothing: list[str] = []
    return await ctx.loop("pages", body, nothing, prune_every=5, keep=5)


@on_every_store
async def test_rewind_location_in_a_loop_means_that_iteration(h):
    engine = await h.engine(looping)
    run = await engine.start(looping, 6, id="r")
    assert await h.run_to_end(run) == ["0", "1", "2", "3", "4", "5"]
    LOG.clear()
    await engine.rewind("r", "pages/~3/do#1")
    assert await h.run_to_end(run) == ["0", "1", "2", "3", "4", "5"]
    assert LOG == ["3 again", "4", "4 again", "5", "5 again"]
    LOG.clear()
    await engine.rewind("r", "pages/~4")
    assert await h.run_to_end(run) == ["0", "1", "2", "3", "4", "5"]
    assert LOG == ["4", "4 again", "5", "5 again"]


@on_every_store
async def test_an_iteration_that_was_pruned_is_refused(h):
    engine = await h.engine(looping)
    run = await engine.start(looping, 30, id="r")
    await h.run_to_end(run)
    before = await everything_in(h.store, "r")
    with pytest.raises(WorkflowMisuse, match="has been pruned"):
        await engine.rewind("r", "pages/~2/do")
    assert await everything_in(h.store, "r") == before
    LOG.clear()
    await engine.rewind("r", "pages/~27/do")
    assert await h.run_to_end(run) == [str(n) for n in range(30)]
    assert LOG[0] == "27"


# --- in every state


@on_every_store
async def test_rewound_failed_run_continues_at_the_failed_step(h):
    BROKEN.add("charlie 2")
    engine = await h.engine(chain)
    run = await engine.start(chain, id="r")
    with pytest.raises(RunFailed):
        await h.run_to_end(run)
    BROKEN.clear()
    await engine.rewind("r", "charlie")
    assert await h.run_to_end(run) == CHAIN
    assert LOG == ["delta 0", "alpha 1", "charlie 2", "charlie 2", "alpha 3", "bravo 4"]
    seen = await engine.describe("r")
    assert (seen.status, seen.error) == (RunStatus.SUCCEEDED, None)


@workflow(name="rewind.sleeps")
async def sleeps(ctx: Context) -> list[str]:
    first = await do("first")
    await ctx.sleep(100)
    return [first, await do("second")]


@on_every_store
async def test_cancelled_run_can_be_rewound(h):
    engine = await h.engine(sleeps)
    run = await engine.start(sleeps, id="r")
    await h.settle()
    await run.cancel()
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)
    await engine.rewind("r", "sleep")
    assert await run.status() is RunStatus.RUNNING or await run.status() is RunStatus.SUSPENDED
    assert await h.run_to_end(run) == ["first", "second"]
    assert LOG == ["first", "second"]


@on_every_store
async def test_terminated_run_can_be_rewound(h):
    engine = await h.engine(sleeps)
    run = await engine.start(sleeps, id="r")
    await h.settle()
    await engine.terminate("r")
    await engine.rewind("r", "sleep")
    assert await h.run_to_end(run) == ["first", "second"]


@on_every_store
async def test_rewound_sleep_gets_a_new_deadline(h):
    engine = await h.engine(sleeps)
    run = await engine.start(sleeps, id="r")
    await h.clock.advance(60)
    await engine.rewind("r", "sleep")
    await h.clock.advance(60)
    await h.settle()
    assert await run.status() is RunStatus.SUSPENDED, "its deadline is fixed when it is reached again"
    assert await h.run_to_end(run) == ["first", "second"]


@on_every_store
async def test_client_rewinds_a_run_that_no_worker_has_cached(h):
    engine = await h.engine(sleeps)
    await engine.start(sleeps, id="r")
    await h.settle()
    await h.crash(engine)
    client = await h.client(store=another_handle(h.store, h.clock))
    await client.rewind("r", "do")
    second = await h.engine(sleeps, store=another_handle(h.store, h.clock))
    assert await h.drive(second.get("r").result()) == ["first", "second"]
    assert LOG == ["first", "first", "second"]


@on_every_store
async def test_run_executing_on_another_worker_can_be_rewound(h):
    @workflow(name="rewind.elsewhere")
    async def elsewhere(ctx: Context) -> list[str]:
        return [await gated("a"), await gated("b")]

    GATES["b"] = asyncio.Event()
    engine = await h.engine(elsewhere)
    run = await engine.start(elsewhere, id="r")
    await h.settle()
    client = await h.client(store=another_handle(h.store, h.clock))
    await client.rewind("r", "gated")
    await h.clock.advance(30)
    GATES["b"].set()
    assert await h.run_to_end(run) == ["a 2", "b 2"]


@on_every_store
async def test_the_result_of_an_attempt_in_flight_is_refused(h):
    @workflow(name="rewind.in-flight")
    async def in_flight(ctx: Context) -> list[str]:
        return [await gated("a"), await gated("b")]

    GATES["b"] = asyncio.Event()
    engine = await h.engine(in_flight)
    run = await engine.start(in_flight, id="r")
    await h.settle()
    assert LOG == ["a", "b"]
    await h.clock.advance(5)  # a long step is recorded as started
    await engine.rewind("r", "gated#1")
    GATES["b"].set()
    assert await h.run_to_end(run) == ["a 1", "b 2"], "not the value of the attempt before the rewind"
    assert engine.slots_taken == 0


@on_every_store
async def test_rewind_releases_a_held_run(h):
    @workflow(name="rewind.held", suspend_on_failure=True)
    async def held(ctx: Context) -> list[str]:
        return [await do("first"), await do("second")]

    BROKEN.add("second")
    engine = await h.engine(held)
    run = await engine.start(held, id="r")
    await h.settle()
    assert any(reason.kind == "held" for reason in (await run.describe()).waiting_for)
    BROKEN.clear()
    await engine.rewind("r", "do")
    assert await h.run_to_end(run) == ["first", "second"]
    assert LOG == ["first", "second", "first", "second"]


@on_every_store
async def test_a_rewind_can_be_repeated(h):
    engine = await h.engine(chain)
    run = await engine.start(chain, id="r")
    await h.run_to_end(run)
    for at in ("bravo", "alpha#1", "alpha", "charlie"):
        await engine.rewind("r", at)
        assert await h.run_to_end(run) == CHAIN
    assert (await engine.describe("r")).generation == 4
    assert await locations(engine, "r") == ["delta", "alpha", "charlie", "alpha#1", "bravo"]


# --- what reaches across the cut


@workflow(name="rewind.reads")
async def reads(ctx: Context) -> list[int]:
    seen = []
    for _ in range(4):
        seen.append((await ctx.receive(RewoundNews)).n)
        await do(f"read {seen[-1]}")
    return seen


@on_every_store
async def test_consumed_events_return_to_the_mailbox_in_order(h):
    engine = await h.engine(reads)
    run = await engine.start(reads, id="r")
    for n in range(3):
        await engine.send("r", RewoundNews(n))
        await h.settle()
    await engine.rewind("r", "RewoundNews#1")
    await h.settle()
    assert LOG == ["read 0", "read 1", "read 2", "read 1", "read 2"]
    await engine.send("r", RewoundNews(3))
    assert await h.run_to_end(run) == [0, 1, 2, 3]


@on_every_store
async def test_events_of_a_topic_return_to_the_mailbox(h):
    engine = await h.engine(reads)
    run = await engine.start(reads, id="r")
    await h.settle()
    for n in range(4):
        assert await engine.broadcast(RewoundNews(n)) == 1
        await h.settle()
    assert await h.run_to_end(run) == [0, 1, 2, 3]
    await engine.rewind("r", "RewoundNews#2")
    assert await h.run_to_end(run) == [0, 1, 2, 3]


@on_every_store
async def test_abandoned_receive_can_be_requested_again(h):
    @workflow(name="rewind.gives-up")
    async def gives_up(ctx: Context) -> list:
        await do("first")
        winner, _ = await ctx.race(news=ctx.receive(RewoundNews), limit=ctx.sleep(50))
        return [winner]

    engine = await h.engine(gives_up)
    run = await engine.start(gives_up, id="r")
    assert await h.run_to_end(run) == ["limit"]
    await engine.rewind("r", "race/limit/sleep")
    await h.settle()
    assert await engine.broadcast(RewoundNews(1)) == 1, "it has subscribed again"
    assert await h.run_to_end(run) == ["news"]


@workflow(name="rewind.kid")
async def kid(ctx: Context, name: str) -> str:
    await ctx.sleep(50)
    return name


@workflow(name="rewind.parent")
async def parent(ctx: Context) -> list:
    kept = await ctx.start_child(kid, "kept")
    await do("between")
    dropped = await ctx.start_child(kid, "dropped")
    detached = await ctx.start_child(kid, "detached", id="detached", detached=True)
    return [dropped.id, await kept.result(), await dropped.result(), await detached.result()]


@on_every_store
async def test_rewind_cancels_and_restarts_children(h):
    engine = await h.engine(parent, kid)
    run = await engine.start(parent, id="r")
    await h.settle()
    await engine.rewind("r", "do")
    assert await h.run_to_end(run) == ["r/rewind.kid#1@1", "kept", "dropped", "detached"]
    assert await engine.status("r/rewind.kid") is RunStatus.SUCCEEDED
    assert await engine.status("r/rewind.kid#1") is RunStatus.CANCELLED
    assert await engine.status("detached") is RunStatus.SUCCEEDED


@on_every_store
async def test_completed_deferreds_survive_a_rewind(h):
    @workflow(name="rewind.deferred")
    async def waits(ctx: Context) -> list:
        number = await ctx.deferred("n", int)
        return [number, await do("after")]

    engine = await h.engine(waits)
    run = await engine.start(waits, id="r")
    await h.settle()
    token = await engine.deferred_token("r", "n")
    assert await engine.complete(token, 7)
    await h.run_to_end(run)
    await engine.rewind("r", "n")
    assert await engine.deferred_token("r", "n") == token
    assert await engine.complete(token, 8) is False
    assert await h.run_to_end(run) == [7, "after"]


@workflow(name="rewind.saga")
async def saga(ctx: Context) -> list[str]:
    first = await do.options(compensate=undo)("first")
    middle = await do("middle")
    second = await do.options(compensate=undo)("second")
    ctx.on_exit(undo, "nothing, at the exit")
    return [first, middle, second, await do("last")]


@on_every_store
async def test_kept_steps_that_were_compensated_run_again_in_place(h):
    BROKEN.add("last")
    engine = await h.engine(saga)
    run = await engine.start(saga, id="r")
    with pytest.raises(RunFailed):
        await h.run_to_end(run)
    assert LOG == ["first", "middle", "second", "last", "undo second", "undo first", "undo nothing, at the exit"]
    order = await locations(engine, "r")
    BROKEN.clear()
    LOG.clear()
    await engine.rewind("r", "do#3")
    assert await h.run_to_end(run) == ["first", "middle", "second", "last"]
    assert LOG == ["first", "second", "last", "undo nothing, at the exit"], "middle was never undone"
    assert (await locations(engine, "r"))[:4] == order[:4] == ["do", "do#1", "do#2", "do#3"]
    keys = [key for key in KEYS if key.endswith("/do")]
    assert len(keys) == len(set(keys)) == 2


@on_every_store
async def test_a_run_that_is_rewound_and_fails_again_is_compensated_again(h):
    BROKEN.add("last")
    engine = await h.engine(saga)
    run = await engine.start(saga, id="r")
    for _ in range(2):
        with pytest.raises(RunFailed):
            await h.run_to_end(run)
        await engine.rewind("r", "do#3")
    with pytest.raises(RunFailed):
        await h.run_to_end(run)
    assert LOG.count("undo first") == LOG.count("first") == 3


@on_every_store
async def test_waiter_of_a_rewound_run_waits_for_its_new_end(h):
    engine = await h.engine(sleeps)
    run = await engine.start(sleeps, id="r")
    await h.run_to_end(run)
    await engine.rewind("r", "sleep")
    waiting = h.background(run.result())
    await h.clock.advance(50)
    assert not waiting.done()
    await h.clock.advance(60)
    await h.settle()
    assert waiting.result() == ["first", "second"]


# --- fork


@on_every_store
async def test_fork_continues_from_the_location_and_leaves_the_original_alone(h):
    engine = await h.engine(chain)
    await h.run_to_end(await engine.start(chain, id="r"))
    before = await everything_in(h.store, "r")
    LOG.clear()
    run = await engine.fork("r", "charlie")
    assert run.created
    assert await h.run_to_end(run) == CHAIN
    assert CHAIN[2:] == LOG
    assert await everything_in(h.store, "r") == before
    assert (await run.describe()).parent is None
    named = await engine.fork("r", "bravo", id="f")
    assert named.id == "f"
    assert await h.run_to_end(named) == CHAIN
    with pytest.raises(RunConflict):
        await engine.fork("r", "bravo", id="f")


@on_every_store
async def test_forks_share_nothing_afterwards(h):
    engine = await h.engine(reads)
    old = await engine.start(reads, id="r")
    for n in range(2):
        await engine.send("r", RewoundNews(n))
    await h.settle()
    new = await engine.fork("r", "RewoundNews#1", id="f")
    await h.settle()
    assert LOG == ["read 0", "read 1", "read 1"], "the fork has its own copy of what was read since"
    await engine.send("f", RewoundNews(20))
    await engine.send("f", RewoundNews(30))
    await engine.send("r", RewoundNews(2))
    await engine.send("r", RewoundNews(3))
    assert await h.run_to_end(old) == [0, 1, 2, 3]
    assert await h.run_to_end(new) == [0, 1, 20, 30]
    await engine.rewind("r", "RewoundNews")
    assert await engine.status("f") is RunStatus.SUCCEEDED
    assert len(KEYS) == len(set(KEYS))


@on_every_store
async def test_a_fork_cancels_no_children_and_starts_its_own(h):
    engine = await h.engine(parent, kid)
    old = await engine.start(parent, id="r")
    await h.settle()
    new = await engine.fork("r", "rewind.kid#1", id="f")
    results = [await h.run_to_end(old), await h.run_to_end(new)]
    assert [result[1:] for result in results] == [["kept", "dropped", "detached"]] * 2
    assert results[0][0] == "r/rewind.kid#1"
    assert results[1][0].startswith("f/rewind.kid#1")
    assert await engine.status("r/rewind.kid#1") is RunStatus.SUCCEEDED


@on_every_store
async def test_cancelling_a_fork_leaves_the_old_runs_children_alone(h):
    engine = await h.engine(parent, kid)
    old = await engine.start(parent, id="r")
    await h.settle()
    new = await engine.fork("r", "rewind.kid#2", id="f")
    await h.settle()
    await new.cancel()
    with pytest.raises(RunCancelled):
        await h.run_to_end(new)
    assert (await h.run_to_end(old))[1:] == ["kept", "dropped", "detached"]


@on_every_store
async def test_a_fork_of_a_running_run_does_not_wait_for_it(h):
    engine = await h.engine(sleeps)
    old = await engine.start(sleeps, id="r")
    await h.settle()
    new = await engine.fork("r", "sleep", id="f")
    await old.cancel()
    with pytest.raises(RunCancelled):
        await h.run_to_end(old)
    assert await h.run_to_end(new) == ["first", "second"]
    assert LOG == ["first", "second"]


@on_every_store
async def test_fork_of_a_compensated_run_repeats_compensated_steps(h):
    BROKEN.add("last")
    engine = await h.engine(saga)
    with pytest.raises(RunFailed):
        await h.run_to_end(await engine.start(saga, id="r"))
    BROKEN.clear()
    LOG.clear()
    run = await engine.fork("r", "do#3")
    assert await h.run_to_end(run) == ["first", "middle", "second", "last"]
    assert LOG == ["first", "second", "last", "undo nothing, at the exit"]


# --- crashes


@workflow(name="rewind.all")
async def all_at_once(ctx: Context) -> list:
    first = await do.options(compensate=undo)("first")
    child = await ctx.start_child(kid, "child")

    async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
        news = await ctx.receive(RewoundNews)
        await do(f"news {news.n}")
        return Break(n) if n == 2 else Continue(n + 1)

    await ctx.loop("news", body, 0)
    late = await ctx.start_child(kid, "late")
    value = await ctx.deferred("value", int)
    return [first, await child.result(), await late.result(), value, await do("last")]


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_a_crash_at_every_commit_around_a_rewind(kind, tmp_path):
    def again():
        begin()
        BROKEN.add("last")

    async def fail_and_rewind(h, engine):
        run = await engine.start(all_at_once, id="r")
        for n in range(3):
            if not (await run.status()).terminal:
                await engine.send("r", RewoundNews(n), event_id=f"news {n}")
        if (await run.describe()).generation == 0:
            await engine.complete(await engine.deferred_token("r", "value"), 7)
            with pytest.raises(RunFailed, match="last is broken"):
                await run.result()
            BROKEN.clear()
            await engine.rewind("r", "news/~1/RewoundNews")
        BROKEN.clear()
        if (await run.describe()).status is RunStatus.FAILED:
            await engine.rewind("r", "news/~1/RewoundNews")
        assert await run.result() == ["first", "child", "late", 7, "last"]
        assert {line: LOG.count(line) for line in ("news 0", "news 1", "news 2")} in ALLOWED
        assert await engine.status("r/rewind.kid#1@1") is RunStatus.SUCCEEDED, "the second child was started again"

    assert crash_script(kind, tmp_path, [all_at_once, kid], fail_and_rewind, again) > 25


ALLOWED = [{"news 0": a, "news 1": b, "news 2": c} for a in (1, 2) for b in (2, 3) for c in (2, 3) if a + b + c <= 6]
"""Events before the cut were read once and those after it twice; a crash may repeat one of them."""
