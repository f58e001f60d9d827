"""Events that are sent to one run: which receive gets them, when, in what order, how often, and at what cost."""

import asyncio
from typing import Any

import pytest

from perdure import (
    Context,
    EngineConfig,
    QueueFull,
    RunNotFound,
    RunStatus,
    RunTerminated,
    event,
    step,
    workflow,
)
from perdure.stores.writes import CommitTurn
from tests.engine.store_matrix import everything_in, on_every_store

LONG = EngineConfig(sweep_interval=1000.0, lease=5000.0)  # nothing in these tests is found by a sweep
HOUR = 3600.0


@event
class Paid:
    cents: int


@event(name="orders.shipped")
class Shipped:
    by: str


@event(expire_after=30.0)
class Brief:
    n: int


@workflow
async def targeted_one(ctx: Context, timeout: float | None = None) -> Any:
    """Return the next event of two types, as text."""
    try:
        got = await ctx.receive(Paid, Shipped, timeout=timeout)
    except TimeoutError:
        return "nothing"
    return f"paid {got.cents}" if isinstance(got, Paid) else f"shipped by {got.by}"


@workflow
async def targeted_many(ctx: Context, count: int) -> list[Any]:
    return [(await ctx.receive(Paid)).cents for _ in range(count)]


@workflow
async def targeted_batches(ctx: Context, sizes: list[int], timeout: float | None = None) -> list[list[int]]:
    return [[each.cents for each in await ctx.receive_batch(Paid, max=size, timeout=timeout)] for size in sizes]


@workflow
async def targeted_ends(ctx: Context) -> None:
    await ctx.receive("end")


# --- receiving


@on_every_store
async def test_a_receive_takes_the_next_event_of_any_of_its_types(h):
    engine = await h.engine(targeted_one, config=LONG)
    runs = [await engine.start(targeted_one) for _ in range(2)]
    await h.settle()
    await runs[0].send(Shipped("sea"))
    await runs[1].send(Paid(7))
    assert [await h.run_to_end(run, within=1) for run in runs] == ["shipped by sea", "paid 7"]


@on_every_store
async def test_earliest_event_of_several_types_is_received_first(h):
    client = await h.client()
    first, second = [await client.start(targeted_one) for _ in range(2)]
    await first.send(Shipped("air"))
    await first.send(Paid(1))
    await second.send(Paid(1))
    await second.send(Shipped("air"))
    await h.engine(targeted_one)
    assert [await h.run_to_end(run, within=10) for run in (first, second)] == ["shipped by air", "paid 1"]


@on_every_store
async def test_topic_name_with_json_works_like_an_event_type(h):
    @workflow
    async def targeted_by_name(ctx: Context) -> list[Any]:
        first = await ctx.receive("orders.shipped")
        second = await ctx.receive(Shipped)
        return [first, second.by, await ctx.receive("plain", Shipped), await ctx.receive("plain")]

    engine = await h.engine(targeted_by_name, config=LONG)
    run = await engine.start(targeted_by_name)
    await run.send(Shipped("rail"))
    await run.send("orders.shipped", {"by": "road"})
    await run.send("plain", [1, None, {"a": 2}])
    await run.send("plain")
    assert await h.run_to_end(run, within=1) == [{"by": "rail"}, "road", [1, None, {"a": 2}], None]


@on_every_store
async def test_events_are_received_in_the_order_of_sending(h):
    engine = await h.engine(targeted_many, config=LONG)
    run = await engine.start(targeted_many, 20)
    for n in range(20):
        await run.send(Paid(n))
        if n % 7 == 0:
            await h.settle()
    assert await h.run_to_end(run, within=1) == list(range(20))


@on_every_store
async def test_earlier_receive_of_one_type_is_served_first(h):
    @workflow
    async def targeted_two_tasks(ctx: Context) -> list[int]:
        async def take() -> int:
            return (await ctx.receive(Paid)).cents

        return list(await asyncio.gather(take(), take()))

    engine = await h.engine(targeted_two_tasks, config=LONG)
    run = await engine.start(targeted_two_tasks)
    await h.settle()
    await run.send(Paid(1))
    await h.settle()
    await run.send(Paid(2))
    assert await h.run_to_end(run, within=1) == [1, 2]


@on_every_store
async def test_message_sent_before_the_first_execution_is_received(h):
    client = await h.client()
    await client.start(targeted_many, 2, id="early")
    await client.send("early", Paid(1))
    await client.send("early", Paid(2))
    engine = await h.engine(targeted_many)
    assert await h.drive(engine.result("early"), within=10) == [1, 2]


# --- timeouts and batches


@on_every_store
async def test_a_receive_times_out_at_its_deadline_and_not_before(h):
    engine = await h.engine(targeted_one, config=LONG)
    run = await engine.start(targeted_one, 100.0)
    await h.clock.advance(99.0)
    assert await run.status() is RunStatus.SUSPENDED
    await h.clock.advance(1.5)
    assert await run.result() == "nothing"


@on_every_store
async def test_a_restart_does_not_move_the_deadline_of_a_receive(h):
    first = await h.engine(targeted_one)
    run = await first.start(targeted_one, 100.0)
    await h.clock.advance(60.0)
    await h.crash(first)
    second = await h.engine(targeted_one)
    await h.clock.advance(39.0)
    assert await second.status(run.id) is RunStatus.SUSPENDED
    await h.clock.advance(2.0)
    assert await second.result(run.id) == "nothing"


@on_every_store
async def test_event_sent_before_the_deadline_is_received_after_it(h):
    client = await h.client()
    first = await h.engine(targeted_one)
    run = await first.start(targeted_one, 100.0)
    await h.settle()
    await h.crash(first)
    await client.send(run.id, Paid(3))
    await h.clock.advance(500.0)
    second = await h.engine(targeted_one)
    assert await h.drive(second.result(run.id)) == "paid 3"


@on_every_store
async def test_event_after_a_timeout_stays_for_the_next_receive(h):
    @workflow
    async def targeted_patient(ctx: Context) -> list[Any]:
        try:
            await ctx.receive(Paid, timeout=10)
        except TimeoutError:
            return ["late", (await ctx.receive(Paid)).cents]
        return []

    engine = await h.engine(targeted_patient, config=LONG)
    run = await engine.start(targeted_patient)
    await h.clock.advance(11)
    await run.send(Paid(9))
    assert await h.run_to_end(run, within=1) == ["late", 9]


@on_every_store
async def test_zero_timeout_receives_what_is_available(h):
    @workflow
    async def targeted_at_once(ctx: Context) -> list[Any]:
        await ctx.receive("go")
        found: list[Any] = []
        for _ in range(3):
            try:
                found.append((await ctx.receive(Paid, timeout=0)).cents)
            except TimeoutError:
                found.append(None)
        return found

    engine = await h.engine(targeted_at_once, config=LONG)
    run = await engine.start(targeted_at_once)
    await run.send(Paid(1))
    await run.send(Paid(2))
    await run.send("go")
    assert await h.run_to_end(run, within=1) == [1, 2, None]


@on_every_store
async def test_receive_batch_returns_available_events_in_order_up_to_max(h):
    client = await h.client()
    run = await client.start(targeted_batches, [3, 3, 3])
    for n in range(5):
        await run.send(Paid(n))
    await h.engine(targeted_batches)
    await h.clock.advance(11)
    assert await run.status() is RunStatus.SUSPENDED  # the third batch has nothing yet, and waits
    await run.send(Paid(5))
    assert await h.run_to_end(run, within=10) == [[0, 1, 2], [3, 4], [5]]


@on_every_store
async def test_receive_batch_is_empty_on_timeout(h):
    engine = await h.engine(targeted_batches, config=LONG)
    run = await engine.start(targeted_batches, [2, 2], 5.0)
    await h.clock.advance(3)
    await run.send(Paid(1))
    await h.clock.advance(6)
    assert await run.result() == [[1], []]


# --- once per event id


@on_every_store
async def test_an_event_id_is_remembered_after_the_event_was_received(h):
    engine = await h.engine(targeted_many, config=LONG)
    run = await engine.start(targeted_many, 2)
    for _ in range(3):
        await run.send(Paid(1), event_id="once")
        await h.settle()
    assert await run.status() is RunStatus.SUSPENDED
    await run.send(Paid(2), event_id="twice")
    assert await h.run_to_end(run, within=1) == [1, 2]
    await run.send(Paid(2), event_id="twice")  # accepted before: the run's end does not make it an error


@on_every_store
async def test_event_id_is_forgotten_after_the_retention(h):
    engine = await h.engine(targeted_many, config=EngineConfig(event_retention=HOUR, sweep_interval=100.0, lease=500.0))
    run = await engine.start(targeted_many, 3)
    await h.clock.advance(HOUR)
    await run.send(Paid(1), event_id="e")
    await h.settle()
    await h.clock.advance(HOUR - 120.0)
    await run.send(Paid(2), event_id="e")
    await h.settle()
    assert len(await h.store.inbox(run.id)) == 0
    await h.clock.advance(300.0)
    await run.send(Paid(3), event_id="e")
    await run.send(Paid(4))
    assert await h.run_to_end(run, within=10) == [1, 3, 4]


@on_every_store
async def test_id_of_an_unread_event_is_never_forgotten(h):
    engine = await h.engine(targeted_ends, config=EngineConfig(event_retention=60.0, sweep_interval=100.0, lease=500.0))
    run = await engine.start(targeted_ends)
    await run.send(Paid(1), event_id="e")
    await h.clock.advance(HOUR)
    await run.send(Paid(1), event_id="e")
    assert len(await h.store.inbox(run.id)) == 1


@on_every_store
async def test_one_event_id_is_one_event_for_each_run(h):
    engine = await h.engine(targeted_many, config=LONG)
    runs = [await engine.start(targeted_many, 1) for _ in range(2)]
    for number, run in enumerate(runs):
        await run.send(Paid(number), event_id="same")
    assert [await h.run_to_end(run, within=1) for run in runs] == [[0], [1]]


# --- what is refused, and leaves nothing behind


@on_every_store
async def test_unknown_and_ended_runs_raise_different_errors(h):
    engine = await h.engine(targeted_ends, config=LONG)
    with pytest.raises(RunNotFound):
        await engine.send("unknown", Paid(1))
    run = await engine.start(targeted_ends)
    await run.send("end")
    await h.run_to_end(run, within=1)
    before = await everything_in(h.store, run.id)
    with pytest.raises(RunTerminated) as raised:
        await run.send(Paid(1))
    assert (raised.value.run_id, raised.value.status) == (run.id, RunStatus.SUCCEEDED)
    assert await everything_in(h.store, run.id) == before


@on_every_store
async def test_a_full_mailbox_refuses_and_stores_nothing(h):
    engine = await h.engine(targeted_ends, config=EngineConfig(max_pending_events=3))
    run = await engine.start(targeted_ends)
    for n in range(3):
        await run.send(Paid(n), event_id=f"e-{n}")
    await h.settle()
    before = await everything_in(h.store, run.id)
    with pytest.raises(QueueFull):
        await run.send(Paid(3), event_id="e-3")
    await run.send(Paid(2), event_id="e-2")  # it is in there already
    assert await everything_in(h.store, run.id) == before
    assert await engine.cancel(run.id)  # which is no event
    await h.settle()
    assert await run.status() is RunStatus.CANCELLED


@on_every_store
async def test_mailbox_accepts_events_again_after_a_receive(h):
    client = await h.client(config=EngineConfig(max_pending_events=1))
    run = await client.start(targeted_many, 3)
    await run.send(Paid(1))
    with pytest.raises(QueueFull):
        await run.send(Paid(2))
    await h.engine(targeted_many)
    for n in (2, 3):
        await run.send(Paid(n))
        await h.clock.advance(6)
    assert await run.result() == [1, 2, 3]


# --- expiry


@on_every_store
async def test_event_older_than_its_expiry_is_not_received(h):
    @workflow
    async def targeted_slow(ctx: Context) -> list[Any]:
        await ctx.sleep(31)
        return [type(await ctx.receive(Brief, Paid, timeout=5)).__name__]

    engine = await h.engine(targeted_slow, config=LONG)
    run = await engine.start(targeted_slow)
    await run.send(Brief(1))
    await h.clock.advance(5)
    await run.send(Paid(2))
    assert await h.run_to_end(run, within=40) == ["Paid"]
    assert await h.store.inbox(run.id) == []


@on_every_store
async def test_an_event_that_has_expired_on_arrival_is_accepted_and_not_delivered(h):
    @event(expire_after=0)
    class Stillborn:
        n: int

    @workflow
    async def targeted_stillborn(ctx: Context) -> str:
        try:
            await ctx.receive(Stillborn, timeout=10)
        except TimeoutError:
            return "nothing"
        return "received"

    engine = await h.engine(targeted_stillborn, config=LONG)
    run = await engine.start(targeted_stillborn)
    await h.settle()
    await run.send(Stillborn(1))
    assert await engine.broadcast(Stillborn(2)) == 0
    assert await h.run_to_end(run, within=11) == "nothing"
    assert await h.store.topic("Stillborn") == []
    assert await engine.dead_letters() == []


@on_every_store
async def test_message_without_expiry_lives_as_long_as_its_run(h):
    @workflow
    async def targeted_late_reader(ctx: Context) -> int:
        await ctx.sleep(HOUR)
        return (await ctx.receive(Paid)).cents

    config = EngineConfig(event_retention=60.0, sweep_interval=100.0, lease=500.0)
    engine = await h.engine(targeted_late_reader, config=config)
    run = await engine.start(targeted_late_reader)
    await run.send(Paid(1))
    assert await h.run_to_end(run, within=HOUR + 1) == 1


# --- cost


@on_every_store
async def test_receiving_and_consuming_are_one_commit(h):
    engine = await h.engine(targeted_many, config=LONG)
    run = await engine.start(targeted_many, 2)
    await h.settle()
    await run.send(Paid(1))
    await h.settle()
    turns = [
        write
        for batch in engine.faults.committed
        for write in batch
        if isinstance(write, CommitTurn)
        and (write.consumed or any(each.kind == "receive" and each.seq for each in write.entries))
    ]
    assert [(turn.consumed, [each.status for each in turn.entries if each.seq]) for turn in turns] == [
        ((1,), ["succeeded"])
    ]


@on_every_store
async def test_unawaited_message_costs_one_turn(h):
    engine = await h.engine(targeted_ends, config=LONG)
    run = await engine.start(targeted_ends)
    await h.settle()
    before = engine.faults.commits
    await run.send(Paid(1))
    await h.settle()
    assert engine.faults.commits - before == 2  # the message, and the turn that received it
    assert await run.status() is RunStatus.SUSPENDED
    after = engine.faults.commits
    await h.clock.advance(900.0)
    assert engine.faults.commits == after
    (row,) = await h.store.records([run.id])
    assert (row.owner, row.wake_at) == (None, None)


@on_every_store
async def test_run_executing_a_step_ignores_messages_that_it_does_not_await(h):
    go = asyncio.Event()

    @step
    async def targeted_long_step() -> None:
        await go.wait()

    @workflow
    async def targeted_busy(ctx: Context) -> int:
        await targeted_long_step()
        return (await ctx.receive(Paid)).cents

    engine = await h.engine(targeted_busy, config=LONG)
    run = await engine.start(targeted_busy)
    await h.clock.advance(2)
    before = engine.faults.commits
    await run.send(Paid(4))
    await h.settle()
    assert engine.faults.commits - before <= 2
    go.set()
    assert await h.run_to_end(run, within=1) == 4
