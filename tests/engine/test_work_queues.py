"""Runs of work queues: limits, order, fairness, duplicates, debounce, expiry and control, on every store."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from perdure import (
    Client,
    Context,
    Debounce,
    InvalidArgument,
    QueueFull,
    Rate,
    Run,
    RunCancelled,
    RunConflict,
    RunStatus,
    StoreError,
    WorkQueue,
    step,
    workflow,
)
from perdure.testing import Harness
from tests.engine.store_matrix import on_every_store


@dataclass
class Gate:
    """Lets the bodies of a test's steps pass, and counts how many execute at once."""

    running: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    most: int = 0
    opened: asyncio.Event = field(default_factory=asyncio.Event)


GATE = Gate()


@pytest.fixture(autouse=True)
def _new_gate():
    global GATE
    GATE = Gate()


@step
async def work(item: str) -> str:
    gate = GATE
    gate.running.append(item)
    gate.order.append(item)
    gate.most = max(gate.most, len(gate.running))
    try:
        await gate.opened.wait()
    finally:
        gate.running.remove(item)
    return item


@workflow(name="queued.job")
async def job(ctx: Context, item: str) -> str:
    return await work(item)


@workflow(name="queued.instant")
async def instant(ctx: Context, item: str) -> str:
    GATE.order.append(item)
    GATE.at.append(ctx.now().timestamp())
    return item


@step
async def note(item: str) -> None: ...


@workflow(name="queued.two-steps")
async def two_steps(ctx: Context, item: str) -> str:
    await note(item)
    return await work(item)


@workflow(name="queued.waiter")
async def waiter(ctx: Context, item: str) -> str:
    GATE.order.append(item)
    return str(await ctx.receive("go"))


@workflow(name="queued.called-worker")
async def called_worker(ctx: Context, item: str) -> str:
    await ctx.receive("go")
    return await work(item)


async def start_all(engine: Client, items: list[str], queue: WorkQueue, wf=job, **options) -> list[Run[str]]:
    return [await engine.start(wf, item, queue=queue, id=item, **options) for item in items]


async def finish(h: Harness, runs: list[Run[str]]) -> list[str]:
    GATE.opened.set()
    return [await h.run_to_end(run) for run in runs]


# --- limits and order ----------------------------------------------------------------------------------------------


@on_every_store
async def test_concurrency_limits_the_runs_that_execute(h):
    queue = WorkQueue("q-concurrency", 2)
    engine = await h.engine(queues=[queue])
    runs = await start_all(engine, ["a", "b", "c", "d", "e"], queue)
    await h.settle()
    assert GATE.running == ["a", "b"]
    assert [await run.status() for run in runs[2:]] == [RunStatus.PENDING] * 3
    assert await finish(h, runs) == ["a", "b", "c", "d", "e"]
    assert GATE.most == 2
    assert GATE.order == ["a", "b", "c", "d", "e"]


@on_every_store
async def test_limit_holds_over_two_engines_and_a_crash(h):
    queue = WorkQueue("q-two-engines", 2)
    first, second = await h.engine(queues=[queue]), await h.engine(queues=[queue])
    runs = await start_all(first, [f"i{number}" for number in range(6)], queue)
    await h.settle()
    assert len(GATE.running) == 2
    await h.crash(first)
    await h.clock.advance(60.0)
    await h.settle()
    described = [await second.get(run.id).status() for run in runs]
    assert sum(status is not RunStatus.PENDING for status in described) == 2
    GATE.opened.set()
    for run in runs:
        assert await h.run_to_end(second.get(run.id)) == run.id


@on_every_store
async def test_priorities_are_strict(h):
    queue = WorkQueue("q-priority", 1)
    engine = await h.engine(queues=[queue])
    runs = [await engine.start(job, "first", queue=queue)]
    await h.settle()
    for item, priority in (("low", 5), ("high", -5), ("normal", 0), ("high2", -5)):
        runs.append(await engine.start(job, item, queue=queue, priority=priority))
    await finish(h, runs)
    assert GATE.order == ["first", "high", "high2", "normal", "low"]


@on_every_store
async def test_partitions_take_turns(h):
    queue = WorkQueue("q-turns", 1, partition_key=lambda item: item[0])
    engine = await h.engine(queues=[queue])
    await engine.queue("q-turns").pause("until all wait")
    runs = await start_all(engine, ["a1", "a2", "a3", "b1", "b2", "c1"], queue)
    await h.settle()
    assert GATE.order == []
    await engine.queue("q-turns").resume()
    await finish(h, runs)
    assert GATE.order == ["a1", "b1", "c1", "a2", "b2", "a3"]


@on_every_store
async def test_partition_concurrency(h):
    queue = WorkQueue("q-partition", partition_key=lambda item: item[0], partition_concurrency=1)
    engine = await h.engine(queues=[queue])
    runs = await start_all(engine, ["a1", "a2", "b1", "b2"], queue)
    await h.settle()
    assert sorted(GATE.running) == ["a1", "b1"]
    await finish(h, runs)
    assert GATE.order.index("a1") < GATE.order.index("a2")


@on_every_store
async def test_rate_limits_admissions(h):
    queue = WorkQueue("q-rate", rate=Rate(3, per=10))
    engine = await h.engine(queues=[queue])
    runs = await start_all(engine, [f"r{number}" for number in range(10)], queue, wf=instant)
    assert await finish(h, runs) == [f"r{number}" for number in range(10)]
    for number in range(len(GATE.at) - 3):
        assert GATE.at[number + 3] - GATE.at[number] >= 10.0
    assert GATE.at[-1] - GATE.at[0] <= 3 * 10.0 * 1.04 + 0.2


@on_every_store
async def test_worker_concurrency_limits_each_worker(h):
    queue = WorkQueue("q-worker", worker_concurrency=2)
    first, second = await h.engine(queues=[queue]), await h.engine(queues=[queue])
    runs = await start_all(first, [f"w{number}" for number in range(9)], queue)
    await h.clock.advance(20.0)
    await h.settle()
    executing = [(each.engine, each.run_id) for each in h.executions]
    assert sorted(engine for engine, _ in executing) == [1, 1, 2, 2]
    assert second is not first
    assert sorted(await finish(h, runs)) == sorted(run.id for run in runs)
    assert GATE.most == 4


@on_every_store
async def test_a_full_gate_does_not_delay_other_runs(h):
    queue = WorkQueue("q-gate", worker_concurrency=1)
    engine = await h.engine(queues=[queue])
    runs = await start_all(engine, ["g1", "g2"], queue)
    await h.settle()
    assert GATE.running == ["g1"]
    other = await engine.start(instant, "other", delay=2.0)
    assert await h.run_to_end(other, within=2.5) == "other"
    await finish(h, runs)


@on_every_store
async def test_runs_of_a_lost_claim_count_for_the_limit_per_worker(h):
    queue = WorkQueue("q-lost", worker_concurrency=1)
    engine = await h.engine(queues=[queue])
    runs = await start_all(engine, ["l1", "l2"], queue, wf=called_worker)
    await h.clock.advance(15.0)
    await h.settle()
    assert (await engine.queue(queue.name).describe()).held == 2  # both are suspended
    claim, load, may_load = engine.faults.claim, engine.faults.load, asyncio.Event()
    lost: list[Any] = []

    async def load_slowly(ids):
        await may_load.wait()
        return await load(ids)

    async def lose_first_result(request):
        claimed = await claim(request)
        if claimed and request.gates and not lost:
            lost.extend(claimed)
            raise StoreError("the result was lost (planned)", retryable=True)
        return claimed

    engine.faults.claim, engine.faults.load = lose_first_result, load_slowly
    await asyncio.gather(*(run.send("go", "x") for run in runs))
    await h.clock.advance(3.0)
    may_load.set()
    await h.clock.advance(3.0)
    await h.settle()
    assert len(lost) == 1
    assert GATE.running == [lost[0].id]
    await finish(h, runs)
    assert GATE.most == 1


@on_every_store
async def test_suspended_run_keeps_its_slot_and_executes_again_through_the_gate(h):
    queue = WorkQueue("q-suspended", 1, 1)
    engine = await h.engine(queues=[queue])
    runs = await start_all(engine, ["s1", "s2"], queue, wf=waiter)
    await h.clock.advance(30.0)
    await h.settle()
    assert GATE.order == ["s1"]
    await runs[0].send("go", "x")
    assert await h.run_to_end(runs[0]) == "x"
    await h.settle()
    assert GATE.order == ["s1", "s2"]
    await runs[1].send("go", "y")
    assert await h.run_to_end(runs[1]) == "y"


@on_every_store
async def test_removed_worker_limit_leaves_no_run_behind(h):
    limited, unlimited = WorkQueue("q-removed", worker_concurrency=1), None
    engine = await h.engine(queues=[limited])
    runs = await start_all(engine, ["u1"], limited, wf=waiter)
    await h.settle()
    unlimited = WorkQueue("q-removed")
    await h.crash(engine)
    second = await h.engine(queues=[unlimited])
    await h.clock.advance(60.0)
    await second.send(runs[0].id, "go", "x")
    assert await h.run_to_end(second.get(runs[0].id)) == "x"


@on_every_store
async def test_default_queue_of_a_workflow_and_its_bypass(h):
    queue = WorkQueue("q-default", 1)

    @workflow(name="queued.by-default", queue=queue)
    async def by_default(ctx: Context, item: str) -> str:
        return await work(item)

    engine = await h.engine(job, by_default, queues=[queue])
    runs = [await engine.start(by_default, item) for item in ("x", "y")]
    bypass = await engine.start(by_default, "z", queue=None)
    await h.settle()
    assert sorted(GATE.running) == ["x", "z"]
    await finish(h, [*runs, bypass])


@on_every_store
async def test_delayed_runs_get_their_place_when_their_time_comes(h):
    queue = WorkQueue("q-delay", 1)
    engine = await h.engine(queues=[queue])
    first = await engine.start(waiter, "first", queue=queue)
    delayed = await engine.start(instant, "delayed", queue=queue, delay=30.0)
    await h.clock.advance(60.0)
    await h.settle()
    later = await engine.start(instant, "later", queue=queue)
    assert GATE.order == ["first"]
    await first.send("go", "x")
    for run in (first, delayed, later):
        await h.run_to_end(run)
    assert GATE.order == ["first", "delayed", "later"]


@on_every_store
async def test_delayed_run_is_admitted_at_its_time(h):
    queue = WorkQueue("q-delay-only")
    engine = await h.engine(queues=[queue])
    began = h.clock.now()
    run = await engine.start(instant, "x", queue=queue, delay=7.0)
    await h.run_to_end(run)
    assert 7.0 <= GATE.at[0] - began <= 7.5


# --- duplicates ----------------------------------------------------------------------------------------------------


@on_every_store
async def test_dedupe_returns_the_open_run(h):
    queue = WorkQueue("q-dedupe", 1)
    engine = await h.engine(queues=[queue])
    first = await engine.start(job, "x", queue=queue, dedupe="k")
    second = await engine.start(job, "y", queue=queue, dedupe="k")
    assert (second.id, second.created) == (first.id, False)
    await h.settle()
    third = await engine.start(job, "z", queue=queue, dedupe="k")
    assert (third.id, third.created) == (first.id, False)
    with pytest.raises(RunConflict, match="dedupe key 'k'"):
        await engine.start(job, "z", queue=queue, dedupe="k", on_duplicate="refuse")
    assert await finish(h, [first]) == ["x"]
    fourth = await engine.start(job, "w", queue=queue, dedupe="k")
    assert fourth.created
    assert await finish(h, [fourth]) == ["w"]


@on_every_store
async def test_replace_changes_the_run_that_waits(h):
    queue = WorkQueue("q-replace", 1)
    engine = await h.engine(queues=[queue])
    first = await engine.start(job, "one", queue=queue, dedupe="k", on_duplicate="replace")
    await h.settle()
    second = await engine.start(job, "two", queue=queue, dedupe="k", on_duplicate="replace")
    third = await engine.start(job, "three", queue=queue, dedupe="k", on_duplicate="replace")
    assert (second.created, third.created, third.id) == (True, False, second.id)
    assert await finish(h, [first, third]) == ["one", "three"]


@on_every_store
async def test_dedupe_without_a_queue_uses_an_implicit_one(h):
    engine = await h.engine(queues=[])
    client = await h.client()
    first = await client.start(job, "x", dedupe="k")
    second = await client.start(job, "y", dedupe="k")
    assert (second.id, second.created) == (first.id, False)
    await h.clock.advance(10.0)
    await h.settle()
    assert await finish(h, [engine.get(first.id)]) == ["x"]
    assert [each.name for each in await engine.queues()] == ["~queued.job"]


@on_every_store
async def test_execute_returns_the_result_of_the_joined_run(h):
    engine = await h.engine()
    await engine.start(job, "x", dedupe="k")
    executing = h.background(engine.execute(job, "y", dedupe="k"))
    await h.settle()
    GATE.opened.set()
    assert await h.drive(executing) == "x"


@on_every_store
async def test_messages_of_a_start_reach_the_joined_run(h):
    engine = await h.engine()
    first = await engine.start(waiter, "x", dedupe="k")
    second = await engine.start(waiter, "x", dedupe="k", send=[("go", "hello")])
    assert second.id == first.id
    assert await h.run_to_end(second) == "hello"


@on_every_store
async def test_debounce_joins_starts_until_they_are_quiet(h):
    engine = await h.engine()
    began = h.clock.now()
    runs = []
    for number in range(4):
        runs.append(await engine.start(instant, f"v{number}", debounce=Debounce("k", quiet=5.0, max_wait=60.0)))
        await h.clock.advance(3.0)
    assert [run.created for run in runs] == [True, False, False, False]
    assert len({run.id for run in runs}) == 1
    assert await h.run_to_end(runs[0]) == "v3"
    assert 9.0 + 5.0 <= GATE.at[0] - began <= 9.0 + 5.5


@on_every_store
async def test_debounce_waits_at_most_its_bound_and_keeps_the_first(h):
    engine = await h.engine()
    began = h.clock.now()
    bounce = Debounce("k", quiet=5.0, max_wait=8.0, keep="first")
    first = await engine.start(instant, "v0", debounce=bounce)
    for number in range(1, 4):
        await h.clock.advance(2.0)
        await engine.start(instant, f"v{number}", debounce=bounce)
    assert await h.run_to_end(first) == "v0"
    assert 8.0 <= GATE.at[0] - began <= 8.5
    assert (await engine.start(instant, "next", debounce=bounce)).created


# --- errors --------------------------------------------------------------------------------------------------------


@on_every_store
async def test_unknown_queue_is_refused_and_nothing_is_stored(h):
    engine = await h.engine(queues=[])
    client = await h.client()
    queue = WorkQueue("q-unknown", 1)
    for each in (engine, client):
        with pytest.raises(InvalidArgument, match=r"declare WorkQueue\('q-unknown'\) in a worker"):
            await each.start(job, "x", queue=queue, id="x")
        with pytest.raises(InvalidArgument, match="q-unknown"):
            await each.start("queued.job", "x", queue="q-unknown", id="x")
    assert await engine.status("x") is None


@on_every_store
async def test_client_names_a_queue_that_it_has_not_imported(h):
    engine = await h.engine(queues=[WorkQueue("q-named", 1), WorkQueue("q-split", partition_concurrency=1)])
    client = await h.client()
    plain = await client.start("queued.job", "x", queue="q-named")
    with pytest.raises(InvalidArgument, match="is partitioned"):
        await client.start(job, "x", queue="q-split")
    with pytest.raises(InvalidArgument, match="is not partitioned"):
        await client.start(job, "x", queue="q-named", partition="p")
    split = await client.start(job, "y", queue="q-split", partition="p")
    await h.clock.advance(10.0)
    assert await finish(h, [engine.get(plain.id), engine.get(split.id)]) == ["x", "y"]


@on_every_store
async def test_queue_that_is_imported_later_is_declared_by_the_start(h):
    engine = await h.engine()
    queue = WorkQueue("q-later", 1)
    run = await engine.start(job, "x", queue=queue)
    await h.settle()
    assert (await engine.queue("q-later").describe()).effective.concurrency == 1
    assert await finish(h, [run]) == ["x"]


@on_every_store
async def test_full_queue_refuses_starts(h):
    queue = WorkQueue("q-full", 1, max_waiting=3)
    engine = await h.engine(queues=[queue])
    runs = await start_all(engine, ["f0", "f1", "f2", "f3"], queue)
    await h.clock.advance(6.0)  # the next sweep counts the places
    await h.settle()
    with pytest.raises(QueueFull, match="q-full"):
        await engine.start(job, "more", queue=queue, id="more")
    assert await engine.status("more") is None
    await finish(h, runs)
    await h.clock.advance(6.0)
    assert await finish(h, [await engine.start(job, "more", queue=queue)]) == ["more"]


@on_every_store
async def test_exception_of_the_partition_key_fails_the_start(h):
    queue = WorkQueue("q-key", partition_key=lambda item: {"known": "p"}[item])
    engine = await h.engine(queues=[queue])
    with pytest.raises(KeyError):
        await engine.start(job, "unknown", queue=queue, id="x")
    assert await engine.status("x") is None


# --- control -------------------------------------------------------------------------------------------------------


@on_every_store
async def test_waiting_run_is_cancelled_at_once_and_gives_up_its_place(h):
    queue = WorkQueue("q-cancel", 1)
    engine = await h.engine(queues=[queue])
    runs = await start_all(engine, ["c1", "c2", "c3"], queue)
    await h.settle()
    assert await engine.cancel("c2", "not needed")
    assert await engine.terminate("c3")
    assert await engine.status("c2") is RunStatus.CANCELLED
    assert (await engine.queue("q-cancel").describe()).waiting == 0
    assert (await engine.describe("c2")).cancel_reason == "not needed"
    assert await finish(h, runs[:1]) == ["c1"]


@on_every_store
async def test_every_kind_of_end_returns_the_slot(h):
    queue = WorkQueue("q-ends", 1)
    engine = await h.engine(queues=[queue])

    async def last_is_admitted(item: str) -> None:
        await h.settle()
        await h.clock.advance(1.0)
        await h.settle()
        assert GATE.running == [item]

    runs = await start_all(engine, ["e1", "e2", "e3"], queue)
    await last_is_admitted("e1")
    await engine.terminate("e1")
    await last_is_admitted("e2")
    await engine.cancel("e2")
    await last_is_admitted("e3")
    await finish(h, runs[2:])


@on_every_store
async def test_paused_run_waits_without_a_slot_until_it_is_resumed(h):
    queue = WorkQueue("q-pause-run", 1)
    engine = await h.engine(queues=[queue])
    runs = await start_all(engine, ["p1", "p2", "p3"], queue)
    await h.settle()
    await engine.pause("p2")
    GATE.opened.set()
    await h.run_to_end(runs[0])
    await h.run_to_end(runs[2])
    assert await engine.status("p2") is RunStatus.PENDING
    await engine.resume("p2")
    assert await h.run_to_end(runs[1]) == "p2"


@on_every_store
async def test_ended_run_that_is_rewound_waits_for_a_slot_again(h):
    queue = WorkQueue("q-rewind", 1)
    engine = await h.engine(queues=[queue])
    first = await engine.start(job, "one", queue=queue, id="one")
    await finish(h, [first])
    GATE.opened.clear()
    other = await engine.start(job, "two", queue=queue, id="two")
    await h.settle()
    await engine.rewind("one", "work")
    await h.settle()
    assert GATE.running == ["two"]
    [reason] = (await engine.describe("one")).waiting_for
    assert reason.kind == "queue"
    assert await finish(h, [other, first]) == ["two", "one"]


@on_every_store
async def test_open_run_that_is_rewound_keeps_its_slot(h):
    queue = WorkQueue("q-rewind-open", 1)
    engine = await h.engine(queues=[queue])
    runs = await start_all(engine, ["o1", "o2"], queue, wf=two_steps)
    await h.settle()
    await engine.rewind("o1", "note")
    await h.settle()
    assert GATE.running == ["o1"]
    assert await finish(h, runs) == ["o1", "o2"]


@pytest.mark.parametrize("if_exists", ["restart", "restart_ended"])
@on_every_store
async def test_restarted_run_waits_for_a_slot(h, if_exists):
    queue = WorkQueue("q-restart", 1)
    engine = await h.engine(queues=[queue])
    first = await engine.start(job, "one", queue=queue, id="x")
    await finish(h, [first])
    GATE.opened.clear()
    other = await engine.start(job, "two", queue=queue)
    await h.settle()
    again = await engine.start(job, "three", queue=queue, id="x", if_exists=if_exists)
    await h.settle()
    assert GATE.running == ["two"]
    assert await finish(h, [other, again]) == ["two", "three"]


@on_every_store
async def test_open_run_that_is_restarted_gives_up_its_slot(h):
    queue = WorkQueue("q-restart-open", 1)
    engine = await h.engine(queues=[queue])
    await engine.start(job, "one", queue=queue, id="x")
    await h.settle()
    second = await engine.start(job, "two", queue=queue, id="y")
    again = await engine.start(job, "three", queue=queue, id="x", if_exists="restart")
    await h.settle()
    assert GATE.running == ["two"]
    assert await finish(h, [second, again]) == ["two", "three"]


@on_every_store
async def test_run_that_is_not_admitted_in_time_ends_with_a_dead_letter(h):
    queue = WorkQueue("q-expires", 1)
    engine = await h.engine(queues=[queue])
    first = await engine.start(job, "one", queue=queue)
    await h.settle()
    second = await engine.start(job, "two", queue=queue, id="two", max_wait=20.0)
    third = await engine.start(job, "three", queue=queue, max_wait=20.0)
    await engine.cancel(third.id)
    with pytest.raises(RunCancelled):
        await h.run_to_end(second)
    assert "not admitted in time" in ((await engine.describe("two")).cancel_reason or "")
    await h.clock.advance(10.0)
    await h.settle()
    [letter] = await engine.dead_letters()
    assert (letter.kind, letter.original_target, letter.value) == ("expired_wait", "two", {"item": "two"})
    assert "q-expires" in letter.reason
    assert await finish(h, [first]) == ["one"]


@on_every_store
async def test_admitted_run_does_not_expire(h):
    queue = WorkQueue("q-no-expiry", 1)
    engine = await h.engine(queues=[queue])
    run = await engine.start(job, "one", queue=queue, max_wait=20.0)
    await h.clock.advance(60.0)
    assert await finish(h, [run]) == ["one"]
    assert await engine.dead_letters() == []


@on_every_store
async def test_runs_that_no_worker_serves_take_no_slots(h):
    queue = WorkQueue("q-unserved", 1)

    @workflow(name="queued.elsewhere")
    async def elsewhere(ctx: Context, item: str) -> str:
        return item

    engine = await h.engine(job, queues=[queue])
    client = await h.client()
    unserved = await client.start(elsewhere, "x", queue=queue, id="x")
    served = await client.start(job, "y", queue=queue)
    await h.clock.advance(10.0)
    await h.settle()
    assert GATE.running == ["y"]
    await finish(h, [engine.get(served.id)])
    [reason] = (await engine.describe("x")).waiting_for
    assert (reason.kind, reason.limited_by) == ("queue", "no_worker")
    second = await h.engine(elsewhere, queues=[queue])
    assert await h.run_to_end(second.get(unserved.id)) == "x"


@on_every_store
async def test_changed_declaration_is_logged_once_and_applies(h, caplog):
    engine = await h.engine(queues=[WorkQueue("q-declared", 1)])
    runs = await start_all(engine, ["d1", "d2", "d3"], WorkQueue("q-declared", 1))
    await h.settle()
    with caplog.at_level(logging.INFO, logger="perdure.execution"):
        await h.engine(queues=[WorkQueue("q-declared", 2)])
        await h.engine(queues=[WorkQueue("q-declared", 2)])
    await h.settle()
    assert [record.message for record in caplog.records if "Declaration" in record.message] == [
        "Declaration of queue q-declared changed: concurrency 1 to 2"
    ]
    assert len(GATE.running) == 2
    await finish(h, runs)


# --- children ------------------------------------------------------------------------------------------------------


@on_every_store
async def test_children_wait_in_queues(h):
    queue = WorkQueue("q-children", 1, partition_key=lambda item: item[0])

    @workflow(name="queued.parent")
    async def parent(ctx: Context) -> list[str]:
        started = [await ctx.start_child(job, item, queue=queue, priority=-number) for number, item in enumerate("aaa")]
        results = [await child.result() for child in started]
        return [*results, await ctx.run_child(job, "b", queue=queue)]

    engine = await h.engine(job, parent, queues=[queue])
    run = await engine.start(parent)
    await h.settle()
    assert GATE.most == 1
    GATE.opened.set()
    assert await h.run_to_end(run) == ["a", "a", "a", "b"]
    assert GATE.most == 1


@on_every_store
async def test_child_of_an_unknown_queue_raises_in_the_workflow(h):
    @workflow(name="queued.wrong-parent")
    async def parent(ctx: Context) -> str:
        try:
            return await ctx.run_child(job, "x", queue="q-nowhere")
        except InvalidArgument as error:
            return str(error)

    engine = await h.engine(job, parent, queues=[])
    assert "declare WorkQueue('q-nowhere')" in await h.run_to_end(await engine.start(parent))


@on_every_store
async def test_attached_child_in_the_queue_of_its_ancestor_is_refused(h):
    queue, other = WorkQueue("q-cycle", 1), WorkQueue("q-no-limit")

    @workflow(name="queued.grandparent")
    async def grandparent(ctx: Context, detached: bool) -> str:
        return await ctx.run_child(middle, detached)

    @workflow(name="queued.middle")
    async def middle(ctx: Context, detached: bool) -> str:
        if detached:
            child = await ctx.start_child(job, "x", queue=queue, detached=True)
            return child.id
        try:
            return await ctx.run_child(job, "x", queue=queue)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    engine = await h.engine(job, grandparent, middle, queues=[queue, other])
    refused = await h.run_to_end(await engine.start(grandparent, False, queue=queue))
    assert refused.startswith("WorkflowMisuse: ")
    assert "use queue=None, another queue, or detached=True" in refused
    GATE.opened.set()
    assert await h.run_to_end(await engine.start(grandparent, True, queue=queue))


@on_every_store
async def test_attached_child_in_a_queue_without_a_limit_of_concurrency_is_accepted(h):
    queue = WorkQueue("q-rate-only", rate=Rate(100, per=1))

    @workflow(name="queued.rate-parent")
    async def parent(ctx: Context) -> str:
        return await ctx.run_child(job, "x", queue=queue)

    engine = await h.engine(job, parent, queues=[queue])
    GATE.opened.set()
    assert await h.run_to_end(await engine.start(parent, queue=queue)) == "x"


# --- unused features are free --------------------------------------------------------------------------------------


@on_every_store
async def test_store_without_queues_is_not_read_for_them(h):
    engine = await h.engine(job, queues=[])
    GATE.opened.set()
    await h.settle()
    calls = engine.faults.calls.copy()
    for number in range(20):
        await h.run_to_end(await engine.start(job, f"{number}"))
    await h.clock.advance(30.0)
    after = engine.faults.calls
    for method in ("queues", "queue_view", "places", "place", "places_ahead"):
        assert after[method] == calls[method], method


@on_every_store
async def test_idle_queue_costs_one_read_per_sweep(h):
    queues = [WorkQueue(f"q-idle-{number}", 1) for number in range(5)]
    engine = await h.engine(job, queues=queues)
    await h.settle()
    calls = engine.faults.calls.copy()
    await h.clock.advance(50.0)
    assert engine.faults.calls["queues"] - calls["queues"] <= 11
    assert engine.faults.calls["queue_view"] == calls["queue_view"]
