"""Queries: status, poll, result, describe, history, runs, watch."""

import asyncio
from datetime import UTC, datetime

import pytest

from perdure import (
    Complete,
    Context,
    Retry,
    RunCancelled,
    RunFailed,
    RunNotFound,
    RunQuery,
    RunStatus,
    StoreError,
    Suspended,
    current_step,
    step,
    workflow,
)
from tests.engine.store_matrix import on_every_store


@step
async def double(n: int) -> int:
    return 2 * n


@step(retry=None)
async def explode() -> None:
    raise ValueError("boom")


@workflow
async def quick(ctx: Context, n: int) -> int:
    return await double(n)


@workflow
async def sleepy(ctx: Context, seconds: float) -> str:
    await double(1)
    await ctx.sleep(seconds)
    return "awake"


@workflow
async def failing(ctx: Context) -> None:
    await explode()


@on_every_store
async def test_status_from_start_to_end(h):
    gate = asyncio.Event()

    @step
    async def wait_for_gate() -> None:
        await gate.wait()

    @workflow
    async def life(ctx: Context) -> None:
        await wait_for_gate()
        await ctx.sleep(10)

    engine = await h.engine(life)
    assert await engine.status("life") is None
    run = await engine.start(life, id="life", delay=5)
    assert await run.status() is RunStatus.PENDING
    await h.clock.advance(6)
    assert await run.status() is RunStatus.RUNNING
    gate.set()
    await h.settle()
    assert await run.status() is RunStatus.SUSPENDED
    await h.clock.advance(11)
    assert await engine.status("life") is RunStatus.SUCCEEDED
    assert str(RunStatus.SUCCEEDED) == "succeeded"


@on_every_store
async def test_poll_returns_the_latest_outcome_without_waiting(h):
    engine = await h.engine(quick, sleepy, failing)
    assert await engine.poll("unknown") is None
    await engine.start(sleepy, 10.0, id="s")
    await h.settle()
    waiting = await engine.poll("s")
    assert isinstance(waiting, Suspended)
    assert waiting.waiting_for[0].kind == "timer"
    assert await h.run_to_end(await engine.start(quick, 4, id="q")) == 8
    assert await engine.poll("q") == Complete(RunStatus.SUCCEEDED, 8, None)
    await engine.start(failing, id="f")
    await h.settle()
    failed = await engine.poll("f")
    assert isinstance(failed, Complete)
    assert failed.status is RunStatus.FAILED
    assert failed.error is not None
    assert failed.error.type == "StepFailed"


@on_every_store
async def test_result_of_a_failed_run_raises_run_failed(h):
    engine = await h.engine(failing)
    run = await engine.start(failing)
    with pytest.raises(RunFailed) as raised:
        await h.run_to_end(run)
    assert raised.value.type == "StepFailed"
    assert "boom" in raised.value.message
    assert raised.value.location == "explode"
    assert "explode" in raised.value.traceback


@on_every_store
async def test_result_timeout_does_not_change_the_run(h):
    engine = await h.engine(sleepy)
    run = await engine.start(sleepy, 100.0)
    with pytest.raises(TimeoutError, match="it continues to run"):
        await h.drive(run.result(timeout=5))
    assert await h.run_to_end(run) == "awake"


@on_every_store
async def test_result_of_a_run_that_another_process_executes(h):
    client = await h.client()
    run = await client.start(sleepy, 20.0)
    result = h.background(client.result(run.id))
    await h.engine(sleepy)
    assert await h.drive(result) == "awake"


@on_every_store
async def test_wait_for_a_run_that_ends_in_this_process_reads_nothing_from_the_store(h):
    engine = await h.engine(quick)
    assert await h.drive(engine.execute(quick, 4)) == 8
    assert engine.faults.calls["records"] == 0


@on_every_store
async def test_calls_about_an_unknown_run_raise_run_not_found(h):
    engine = await h.engine(quick)
    run = engine.get("unknown")
    assert run.id == "unknown"
    assert not run.created
    for call in (run.status(), run.result(), run.describe(), engine.history("unknown"), engine.result("unknown")):
        with pytest.raises(RunNotFound, match="'unknown'"):
            await call
    with pytest.raises(RunNotFound):
        await anext(aiter(run.watch()))
    await h.settle()
    assert engine._session.waiters._end_waiters == {}
    assert engine._session.waiters.change_waiters == {}


@on_every_store
async def test_describe_returns_all_fields_of_a_run(h):
    engine = await h.engine(sleepy)
    started = datetime.fromtimestamp(h.clock.now(), UTC)
    run = await engine.start(sleepy, 60.0, id="s", tags={"who": "ada"})
    await h.settle()
    seen = await run.describe()
    assert (seen.id, seen.workflow, seen.version, seen.status) == ("s", "sleepy", 1, RunStatus.SUSPENDED)
    assert (seen.input, seen.result, seen.error, seen.parent) == ({"seconds": 60.0}, None, None, None)
    assert (seen.tags, seen.recoveries, seen.generation, seen.owner) == ({"who": "ada"}, 0, 0, None)
    assert seen.created_at == started
    assert seen.created_at.tzinfo is UTC
    assert seen.ended_at is None
    assert await h.run_to_end(run) == "awake"
    seen = await run.describe()
    assert (seen.status, seen.result, seen.waiting_for) == (RunStatus.SUCCEEDED, "awake", ())
    assert seen.ended_at is not None
    assert seen.ended_at >= started


@on_every_store
async def test_describe_names_the_timer_a_run_waits_for(h):
    engine = await h.engine(sleepy)
    run = await engine.start(sleepy, 60.0)
    await h.settle()
    (reason,) = (await run.describe()).waiting_for
    assert (reason.kind, reason.location) == ("timer", "sleep")
    assert reason.until is not None
    assert reason.until.timestamp() == pytest.approx(h.clock.now() + 60)
    assert "until" in str(reason)


@on_every_store
async def test_describe_names_the_retry_a_run_waits_for(h):
    @step(retry=Retry(initial=30, jitter=0))
    async def flaky() -> None:
        raise ValueError("no")

    @workflow
    async def trying(ctx: Context) -> None:
        await flaky()

    engine = await h.engine(trying)
    run = await engine.start(trying)
    await h.settle()
    (reason,) = (await run.describe()).waiting_for
    assert (reason.kind, reason.location, reason.name) == ("retry", "flaky", "flaky")
    assert reason.until is not None
    assert reason.until.timestamp() == pytest.approx(h.clock.now() + 30)
    assert "retry of step flaky" in str(reason)


@on_every_store
async def test_describe_names_the_reason_of_a_hold(h):
    @workflow
    async def dead_end(ctx: Context) -> None:
        await asyncio.Event().wait()

    engine = await h.engine(dead_end)
    run = await engine.start(dead_end)
    await h.settle()
    assert await run.status() is RunStatus.SUSPENDED
    (reason,) = (await run.describe()).waiting_for
    assert reason.kind == "held"
    assert "nothing can wake" in str(reason)


@on_every_store
async def test_describe_names_the_missing_worker(h):
    engine = await h.engine(sleepy)
    client = await h.client()
    run = await client.start(sleepy, 60.0)
    await h.clock.advance(1)
    await h.drive(engine.shutdown())
    reasons = (await run.describe()).waiting_for
    assert [reason.kind for reason in reasons] == ["timer", "no_worker"]
    assert "sleepy v1" in str(reasons[1])


@on_every_store
async def test_history_returns_the_entries_in_call_order(h):
    @step(retry=Retry(initial=1, jitter=0))
    async def second_time() -> str:
        if current_step().attempt == 1:
            raise ValueError("no")
        return "yes"

    @workflow
    async def several(ctx: Context) -> None:
        await double(1)
        await ctx.sleep(5)
        await second_time()
        try:
            await explode()
        except Exception:
            await double.options(key="k")(3)

    engine = await h.engine(several)
    run = await engine.start(several)
    await h.run_to_end(run)
    entries = await engine.history(run.id)
    assert [(e.location, e.kind, e.name, str(e.status), e.value, e.attempts, e.seq) for e in entries] == [
        ("double", "step", "double", "succeeded", 2, 1, 1),
        ("sleep", "sleep", "sleep", "succeeded", None, 0, 2),
        ("second_time", "step", "second_time", "succeeded", "yes", 2, 3),
        ("explode", "step", "explode", "failed", None, 1, 4),
        ("double[k]", "step", "double", "succeeded", 6, 1, 5),
    ]
    assert entries[3].error is not None
    assert (entries[3].error.type, entries[3].error.message) == ("ValueError", "boom")
    assert entries[1].settled_at is not None
    assert (entries[1].settled_at - entries[1].started_at).total_seconds() == pytest.approx(5, abs=0.1)


@on_every_store
async def test_slow_step_is_recorded_as_pending(h):
    gate = asyncio.Event()

    @step
    async def long() -> None:
        await gate.wait()

    @workflow
    async def slow_workflow(ctx: Context) -> None:
        await double(1)
        await long()

    engine = await h.engine(slow_workflow)
    run = await engine.start(slow_workflow)
    await h.clock.advance(0.5)
    assert [entry.location for entry in await engine.history(run.id)] == ["double"]
    await h.clock.advance(2)
    shown = (await engine.history(run.id))[-1]
    assert (shown.location, str(shown.status), shown.attempts, shown.settled_at) == ("long", "pending", 1, None)
    commits = engine.faults.commits
    await h.clock.advance(60)
    assert engine.faults.commits == commits  # recorded once
    gate.set()
    await h.run_to_end(run)
    assert [str(entry.status) for entry in await engine.history(run.id)] == ["succeeded", "succeeded"]
    assert h.executed() == [("double", 1), ("long", 1)]


@on_every_store
async def test_runs_returns_pages(h):
    engine = await h.engine(quick)
    for i in range(7):
        await engine.start(quick, i, id=f"run-{i}", delay=1000)
        await h.clock.advance(0.001)
    seen, after = [], None
    pages = 0
    while True:
        page = await engine.runs(RunQuery(limit=3, after=after))
        seen += [run.id for run in page.runs]
        pages += 1
        if pages == 1:  # runs created meanwhile do not shift the pages
            await engine.start(quick, 99, id="run-new", delay=1000)
        after = page.next
        if after is None:
            break
    assert seen == [f"run-{i}" for i in reversed(range(7))]
    assert pages == 3


@on_every_store
async def test_runs_filters_by_every_field_of_a_query(h):
    engine = await h.engine(quick, sleepy)
    await h.run_to_end(await engine.start(quick, 1, id="a-1", tags={"team": "x"}))
    await h.clock.advance(10)
    middle = h.clock.now()
    await h.clock.advance(10)
    await engine.start(sleepy, 1000.0, id="a-2", tags={"team": "y"})
    await engine.start(quick, 1, id="b_1", delay=1000)
    await h.settle()

    async def ids(**query) -> set[str]:
        return {run.id for run in (await engine.runs(RunQuery(**query))).runs}

    assert await ids() == {"a-1", "a-2", "b_1"}
    assert await ids(status=RunStatus.SUSPENDED) == {"a-2"}
    assert await ids(status=(RunStatus.SUSPENDED, RunStatus.PENDING)) == {"a-2", "b_1"}
    assert await ids(status="suspended") == {"a-2"}
    assert await ids(status=["suspended", "pending"]) == {"a-2", "b_1"}
    assert await ids(workflow="quick") == {"a-1", "b_1"}
    assert await ids(tags={"team": "x"}) == {"a-1"}
    assert await ids(id_prefix="a-") == {"a-1", "a-2"}
    assert await ids(id_prefix="b_") == {"b_1"}
    assert await ids(created_after=middle) == {"a-2", "b_1"}
    assert await ids(created_before=middle) == {"a-1"}
    assert await ids(created_before=datetime.fromtimestamp(middle, UTC)) == {"a-1"}
    assert len(await engine.runs()) == len([run.id async for run in _all(engine)]) == 3
    assert await ids(workflow="quick", status=RunStatus.SUCCEEDED) == {"a-1"}
    assert await ids(parent="unknown") == set()


async def _all(engine):
    for run in await engine.runs():
        yield run


@pytest.mark.parametrize(
    "bad", [{"status": "done"}, {"status": ("failed", "done")}, {"created_after": datetime.fromisoformat("2024-01-01")}]
)
def test_invalid_query_is_refused(bad):
    with pytest.raises(ValueError, match=r"not a run status|aware datetime"):
        RunQuery(**bad)


@on_every_store
async def test_forged_cursor_is_refused(h):
    engine = await h.engine(quick)
    with pytest.raises(StoreError, match="page"):
        await engine.runs(RunQuery(after="nonsense"))


@on_every_store
async def test_watch_yields_every_entry_and_ends_with_the_run(h):
    engine = await h.engine(sleepy)
    run = await engine.start(sleepy, 30.0)
    seen: list[tuple[str, str]] = []

    async def watch() -> None:
        async for entry in run.watch():
            seen.append((entry.location, str(entry.status)))  # noqa: PERF401 - a loop shows the order

    watching = h.background(watch())
    await h.clock.advance(5)
    assert seen == [("double", "succeeded"), ("sleep", "pending")]
    await h.drive(watching)
    assert seen[-1] == ("sleep", "succeeded")
    late = [entry.location async for entry in run.watch()]
    assert late[0] == "double"


@on_every_store
async def test_watch_from_a_process_that_does_not_execute_the_run(h):
    client = await h.client()
    run = await client.start(sleepy, 30.0)
    seen: list[str] = []

    async def watch() -> None:
        async for entry in run.watch():
            seen.append(f"{entry.location} {entry.status}")  # noqa: PERF401 - a loop shows the order

    watching = h.background(watch())
    await h.engine(sleepy)
    await h.drive(watching)
    assert seen == ["double succeeded", "sleep pending", "sleep succeeded"]


@on_every_store
async def test_result_of_a_cancelled_run_raises_run_cancelled(h):
    engine = await h.engine(sleepy)
    run = await engine.start(sleepy, 30.0)
    await h.settle()
    await run.cancel()
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)
