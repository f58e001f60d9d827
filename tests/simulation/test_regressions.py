"""Regression tests for defects that the simulator has found, without randomness."""

from datetime import timedelta
from typing import Any

import pytest

from perdure import Break, Context, Continue, Retry, StoreError, step, workflow
from perdure.errors import InvalidArgument
from perdure.stores.writes import EndRun
from perdure.testing import Harness, on_virtual_time


@workflow(name="found.pair")
async def pair(ctx: Context) -> None:
    await ctx.join(first=ctx.receive("found.first"), second=ctx.receive("found.second"))


def test_entry_abandoned_in_its_first_turn_is_a_rewind_location():
    """After a rewind and a cancel, the second receive is requested again and cancelled at once.

    A rewind to the cancel kept the receive as cancelled, although no request cancels it: the history diverged.
    """

    async def scenario(harness: Harness) -> None:
        first = await harness.engine(pair)
        await first.start(pair, id="pair")
        await harness.settle()
        await harness.drive(first.shutdown())
        client: Any = await harness.client()
        await client.rewind("pair", "join/second/found.second")
        await client.cancel("pair")
        engine = await harness.engine(pair)
        await harness.settle()
        assert await client.status("pair") == "cancelled"
        await client.rewind("pair", "~cancel")
        await harness.settle()
        described = await engine.describe("pair")
        assert [reason.kind for reason in described.waiting_for] == ["event", "event"]
        await client.emit("found.first", 1)
        await client.emit("found.second", 2)
        await harness.run_to_end(engine.get("pair"))

    on_virtual_time(scenario)


@workflow(name="found.nap")
async def nap(ctx: Context) -> list[Any]:
    async def receive_or_time_out() -> str:
        try:
            return str(await ctx.receive("found.late", timeout=40))
        except TimeoutError:
            return "nothing came"

    return list(await ctx.join(ctx.receive("found.first"), ctx.sleep(30), receive_or_time_out()))


def test_sleep_abandoned_in_its_first_turn_keeps_its_deadline_after_rewind():
    """The only record of the sleep was its cancellation, without the deadline, so the run was held.

    A receive was opened again and would have waited without end.
    """

    async def scenario(harness: Harness) -> None:
        first = await harness.engine(nap)
        await first.start(nap, id="nap")
        await harness.settle()
        await harness.drive(first.shutdown())
        client: Any = await harness.client()
        await client.rewind("nap", "join/~1/sleep")
        await client.cancel("nap")
        engine = await harness.engine(nap)
        await harness.settle()
        assert await client.status("nap") == "cancelled"
        await client.rewind("nap", "~cancel")
        await harness.settle()
        described = await engine.describe("nap")
        assert sorted(reason.kind for reason in described.waiting_for) == ["event", "event", "timer"]
        await client.emit("found.first", 1)
        assert await harness.run_to_end(engine.get("nap")) == [1, None, "nothing came"]

    on_virtual_time(scenario)


@workflow(name="found.sleeper")
async def sleeper(ctx: Context) -> str:
    await ctx.sleep(10)
    return "awake"


def test_claim_with_a_lost_response_is_found_although_the_run_is_cached():
    """The worker looked up its runs, found the run in its cache, and left it suspended and owned without end."""

    async def scenario(harness: Harness) -> None:
        engine = await harness.engine(sleeper)
        run = await engine.start(sleeper, id="sleeper")
        await harness.settle()
        claim, lost = engine.faults.claim, [True]

        async def claim_and_lose(request: Any) -> Any:
            claimed = await claim(request)
            if claimed and lost.pop():
                raise StoreError("the result was lost", retryable=True)
            return claimed

        engine.faults.claim = claim_and_lose  # type: ignore[method-assign, assignment]
        assert await harness.run_to_end(run) == "awake"
        assert lost == []

    on_virtual_time(scenario)


async def nothing(value: int) -> None:
    return


@step(compensate=nothing)
async def compensated() -> int:
    return 1


@workflow(name="found.noted")
async def noted(ctx: Context) -> None:
    async def body(ctx: Context, count: int) -> Continue[int]:
        await compensated()
        await ctx.sleep(100)
        return Continue(count + 1)

    await ctx.loop("rounds", body, 0)


def test_compensation_record_is_not_a_rewind_location():
    """The record has no position in the order of requests: its step was recorded, but never requested."""

    async def scenario(harness: Harness) -> None:
        engine = await harness.engine(noted)
        await engine.start(noted, id="noted")
        await harness.settle()
        with pytest.raises(InvalidArgument, match="has no entry at"):
            await engine.rewind("noted", "~compensation/rounds/~0/compensated")
        await engine.rewind("noted", "rounds/~0/compensated")

    on_virtual_time(scenario)


@workflow(name="found.late")
async def late(ctx: Context) -> None:
    wake_at = ctx.now() + timedelta(seconds=50)
    await compensated()
    await ctx.join(ctx.sleep_until(wake_at), compensated())


def test_sleep_until_a_past_time_is_requested_again_after_rewind():
    """The replay requests the sleep when its time has passed, so that its record was not matched."""

    async def scenario(harness: Harness) -> None:
        engine = await harness.engine(late)
        run = await engine.start(late, id="late")
        await harness.settle()
        await engine.cancel("late")
        await harness.settle()
        await harness.clock.advance(100)
        await engine.rewind("late", "join/~1/compensated")
        await harness.run_to_end(run)

    on_virtual_time(scenario)


@workflow(name="found.waits")
async def waits(ctx: Context) -> None:
    await ctx.receive("found.never")


@workflow(name="found.parent")
async def parent(ctx: Context) -> None:
    await ctx.run_child(waits)


def test_child_restarted_by_a_rewind_is_cancelled_by_the_next_rewind():
    """The entry still named the first child, so that the second child ran without end."""

    async def scenario(harness: Harness) -> None:
        engine = await harness.engine(parent, waits)
        await engine.start(parent, id="parent")
        await harness.settle()
        await engine.cancel("parent")
        await harness.settle()
        await engine.rewind("parent", "~cancel")
        await harness.settle()
        assert await engine.status("parent/found.waits@1") == "suspended"
        await engine.rewind("parent", "found.waits")
        await harness.settle()
        assert await engine.status("parent/found.waits@1") == "cancelled"
        assert await engine.status("parent/found.waits@2") == "suspended"

    on_virtual_time(scenario)


@workflow(name="found.starts")
async def starts(ctx: Context) -> None:
    await ctx.start_child(waits)
    await ctx.join(ctx.run_child(waits), ctx.receive("found.never"))


def test_rewind_of_a_fork_leaves_the_originals_children_alone():
    """The copied entries named the children as attached to the fork, and the rewind cancelled them."""

    async def scenario(harness: Harness) -> None:
        engine = await harness.engine(starts, waits)
        await engine.start(starts, id="old")
        await harness.settle()
        await engine.fork("old", "join/~1/found.never", id="new")
        await harness.settle()
        await engine.rewind("new", "found.waits")
        await harness.settle()
        for child in ("old/found.waits", "old/join/~0/found.waits"):
            assert await engine.status(child) == "suspended"
        assert await engine.status("new/join/~0/found.waits") == "cancelled"

    on_virtual_time(scenario)


@workflow(name="found.rounds")
async def rounds(ctx: Context) -> list[Any]:
    async def body(ctx: Context, count: int) -> Continue[int] | Break[int]:
        await compensated()
        return Continue(count + 1) if count < 3 else Break(count)

    looping = ctx.loop("rounds", body, 0, commit_every=2, prune_every=1, keep=1)
    return list(await ctx.join(looping, compensated(), name="both"))


def test_rewind_marker_is_not_a_rewind_location():
    """The marker has the number of the last kept request. The rewind removed that too, here the state of a loop."""

    async def scenario(harness: Harness) -> None:
        engine = await harness.engine(rounds)
        await harness.run_to_end(await engine.start(rounds, id="rounds"))
        await engine.rewind("rounds", "both/~0/rounds/~2/compensated")
        await harness.run_to_end(engine.get("rounds"))
        with pytest.raises(InvalidArgument, match="has no entry at"):
            await engine.rewind("rounds", "~rewind/1")

    on_virtual_time(scenario)


def test_rewind_into_a_pruned_sibling_loop_is_refused():
    """The loop state was pruned: the loop restarted, and diverged from the records of later iterations."""

    async def scenario(harness: Harness) -> None:
        engine = await harness.engine(rounds)
        await harness.run_to_end(await engine.start(rounds, id="beside"))
        assert "both/~0/rounds/~0/compensated" not in [entry.location for entry in await engine.history("beside")]
        with pytest.raises(InvalidArgument, match="loop 'both/~0/rounds' had done by then have been pruned"):
            await engine.rewind("beside", "both/~1/compensated")
        await engine.rewind("beside", "both/~0/rounds")
        assert await harness.run_to_end(engine.get("beside")) == [3, 1]

    on_virtual_time(scenario)


@workflow(name="found.again")
async def again(ctx: Context) -> list[int]:
    async def body(ctx: Context, count: int) -> Continue[int] | Break[int]:
        await ctx.receive("found.next")
        value = await ctx.deferred("word", int)
        return Continue(count + 1) if count < 2 else Break(value)

    return [await ctx.loop("rounds", body, 0, prune_every=1, keep=0), await ctx.deferred("word", int)]


def test_deferred_awaited_again_in_a_loop_keeps_its_value():
    """The value was pruned with its iteration or the loop, and a wait after a crash never ended."""

    async def scenario(harness: Harness) -> None:
        engine = await harness.engine(again)
        await engine.start(again, id="again")
        await engine.complete(await engine.deferred_token("again", "word"), 7)
        for _ in range(3):
            await harness.settle()
            await harness.drive(engine.shutdown())
            engine = await harness.engine(again)
            await engine.send("again", "found.next", 1)
        assert await harness.run_to_end(engine.get("again")) == [7, 7]

    on_virtual_time(scenario)


@workflow(name="found.brief", retention=1.0)
async def brief(ctx: Context) -> Any:
    return await ctx.receive("found.word")


def test_reused_run_id_is_not_confused_with_the_pruned_run():
    """A worker had the ended run in its cache. The new run was owned by the worker and stayed suspended."""

    async def scenario(harness: Harness) -> None:
        first = await harness.engine(brief)
        client: Any = await harness.client()
        await first.start(brief, id="brief")
        await harness.settle()
        await harness.store.commit([EndRun(run_id="brief", turn_id="t", now=harness.clock.now(), prune_after=1.0)])
        await harness.clock.advance(20)
        await harness.settle()
        await harness.store.prune(harness.clock.now())
        assert await client.status("brief") is None
        await first.start(brief, id="brief")
        await client.send("brief", "found.word", "new")
        assert await harness.run_to_end(first.get("brief")) == "new"

    on_virtual_time(scenario)


def test_cached_run_older_than_its_retention_is_not_activated():
    """Another run may have the same id and the same position by then."""

    async def scenario(harness: Harness) -> None:
        engine = await harness.engine(brief)
        run = await engine.start(brief, id="copy")
        await harness.settle()
        await harness.clock.advance(20)
        loads = engine.faults.calls["load"]
        await engine.send("copy", "found.word", "late")
        assert await harness.run_to_end(run) == "late"
        assert engine.faults.calls["load"] == loads + 1

    on_virtual_time(scenario)


@step(retry=Retry(max_attempts=2, initial=20.0, jitter=0.0))
async def refuse() -> None:
    raise ConnectionError


@workflow(name="found.slow_end", timeout=5.0)
async def slow_end(ctx: Context) -> None:
    ctx.on_rollback(refuse)
    await compensated()
    raise LookupError


def test_a_run_that_rolls_back_beyond_its_timeout_waits_for_its_next_attempt():
    """The limit no longer applied, but was still the next wake-up: the run was due without end."""

    async def scenario(harness: Harness) -> None:
        engine = await harness.engine(slow_end)
        await engine.start(slow_end, id="slow")
        await harness.settle()
        described = await engine.describe("slow")
        assert [reason.kind for reason in described.waiting_for] == ["retry"]
        record = (await harness.store.load(["slow"]))[0].record  # type: ignore[union-attr]
        assert record.wake_at == pytest.approx(record.created_at + 20.0, abs=1.0)

    on_virtual_time(scenario)
