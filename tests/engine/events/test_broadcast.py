"""Topic events: receivers, order, exactly-once delivery, and retention of unread events."""

import asyncio
from typing import Any

import pytest

from perdure import Context, EngineConfig, QueueFull, RunStatus, event, workflow
from perdure.model.records import Subscription
from perdure.model.turns import TurnExtras
from perdure.stores.writes import CommitTurn, CreateRun, RunPatch
from tests.engine.store_matrix import on_every_store
from tests.engine.store_setup import ELSEWHERE, Stage

LONG = EngineConfig(sweep_interval=1000.0, lease=5000.0)  # nothing in these tests is found by a sweep
HOUR = 3600.0
PAGE = 500  # waiting runs of an event, per commit


@event
class Job:
    """`all`, and the first reader takes it away."""

    n: int


@event(consume=False)
class Notice:
    """`all`, and every reader sees it."""

    n: int


@event(delivery="first", consume=False)
class Ticket:
    n: int


@event(delivery="after_wait")
class Call:
    n: int


@event(delivery="after_wait", consume=False)
class Alarm:
    n: int


@event(delivery="after_create")
class Task:
    n: int


@event(delivery="after_create", consume=False)
class Memo:
    n: int


@event(expire_after=30.0)
class Fleeting:
    n: int


KINDS: dict[str, Any] = {cls.__name__: cls for cls in (Job, Notice, Ticket, Call, Alarm, Task, Memo, Fleeting)}


@workflow
async def broadcast_reader(ctx: Context, kind: str, count: int = 1, pause: float = 0.0, timeout: float = 600.0) -> Any:
    """Receive `count` events after a pause; return their numbers, with None for a timeout."""
    await ctx.sleep(pause)
    found: list[int | None] = []
    for _ in range(count):
        try:
            found.append((await ctx.receive(KINDS[kind], timeout=timeout)).n)
        except TimeoutError:
            found.append(None)
    return found


@workflow
async def broadcast_ender(ctx: Context) -> None:
    await ctx.receive("end")


async def readers(h, engine, kind, how_many, **options):
    """Start this many runs that wait; the first has waited longest."""
    runs = []
    for _ in range(how_many):
        runs.append(await engine.start(broadcast_reader.options(), kind, **options))
        await h.settle()
    return runs


async def results(h, runs, within=HOUR):
    return [await h.run_to_end(run, within) for run in runs]


async def received(runs):
    """Return the results of ended runs, with None for each run that waits."""
    return [await run.result() if await run.status() is RunStatus.SUCCEEDED else None for run in runs]


# --- delivery and consume


@on_every_store
async def test_event_for_one_reader_goes_to_the_oldest_subscription(h):
    engine = await h.engine(broadcast_reader, config=LONG)
    runs = await readers(h, engine, "Job", 3)
    for n in range(3):
        assert await engine.broadcast(Job(n)) == 1
        await h.settle()
        assert [each is not None for each in await received(runs)] == [m <= n for m in range(3)]
    assert await results(h, runs) == [[0], [1], [2]]
    assert await h.store.topic("Job") == []


@on_every_store
async def test_all_event_reaches_waiting_and_later_runs(h):
    engine = await h.engine(broadcast_reader, config=LONG)
    runs = await readers(h, engine, "Notice", 3)
    assert await engine.broadcast(Notice(1)) == 3
    runs += await readers(h, engine, "Notice", 2)
    assert await results(h, runs) == [[1]] * 5


@on_every_store
async def test_no_run_sees_an_event_for_all_twice(h):
    engine = await h.engine(broadcast_reader, config=LONG)
    waiting = await readers(h, engine, "Notice", 1, count=3, timeout=50.0)
    for n in (1, 2):
        await engine.broadcast(Notice(n))
        await h.settle()
    later = await readers(h, engine, "Notice", 1, count=3, timeout=50.0)
    assert await results(h, waiting + later) == [[1, 2, None]] * 2


@on_every_store
async def test_first_event_goes_to_one_reader_regardless_of_consume(h):
    engine = await h.engine(broadcast_reader, config=LONG)
    runs = await readers(h, engine, "Ticket", 2, timeout=20.0)
    assert await engine.broadcast(Ticket(1)) == 1
    assert await results(h, runs) == [[1], [None]]
    await engine.broadcast(Ticket(2))
    assert await results(h, await readers(h, engine, "Ticket", 2, timeout=20.0)) == [[2], [None]]


@on_every_store
async def test_after_wait_event_reaches_only_waiting_runs(h):
    engine = await h.engine(broadcast_reader, config=LONG)
    for cls in (Call, Alarm):
        name = cls.__name__
        assert await engine.broadcast(cls(0)) == 0
        assert await h.store.topic(name) == []
        runs = await readers(h, engine, name, 2, timeout=20.0)
        woken = await engine.broadcast(cls(1))
        assert woken == (1 if cls is Call else 2)
        late = await readers(h, engine, name, 1, timeout=20.0)
        assert await results(h, runs + late) == [[1], [1] if cls is Alarm else [None], [None]]
        assert await h.store.topic(name) == []


@on_every_store
async def test_after_create_event_reaches_runs_created_before_it(h):
    engine = await h.engine(broadcast_reader, config=LONG)
    before = await readers(h, engine, "Memo", 2, pause=100.0, timeout=20.0)  # they sleep when it is sent
    assert await engine.broadcast(Memo(1)) == 0
    at_once = await readers(h, engine, "Memo", 1, timeout=20.0)  # at the same time: counts as before
    await h.clock.advance(1.0)
    after = await readers(h, engine, "Memo", 1, timeout=20.0)
    assert await results(h, before + at_once + after) == [[1], [1], [1], [None]]


@on_every_store
async def test_consumed_after_create_event_skips_later_runs(h):
    engine = await h.engine(broadcast_reader, config=LONG)
    old = await readers(h, engine, "Task", 1, pause=50.0, timeout=100.0)
    await h.clock.advance(1.0)
    assert await engine.broadcast(Task(1)) == 0
    await h.clock.advance(1.0)
    young = await readers(h, engine, "Task", 1, timeout=100.0)
    assert await results(h, old + young) == [[1], [None]]


@on_every_store
async def test_all_event_reaches_runs_created_later(h):
    engine = await h.engine(broadcast_reader, config=LONG)
    assert await engine.broadcast(Job(1)) == 0
    await h.clock.advance(100.0)
    runs = await readers(h, engine, "Job", 2, timeout=20.0)
    assert await results(h, runs) == [[1], [None]]


# --- order


@on_every_store
async def test_events_of_a_topic_are_read_in_the_order_of_sending(h):
    engine = await h.engine(broadcast_reader, config=LONG)
    for n in range(5):
        await engine.broadcast(Job(n))
        await engine.broadcast(Notice(n))
    runs = await readers(h, engine, "Job", 1, count=5) + await readers(h, engine, "Notice", 2, count=5)
    assert await results(h, runs) == [[0, 1, 2, 3, 4]] * 3


@on_every_store
async def test_earliest_event_of_several_topics_is_received_first(h):
    @workflow
    async def broadcast_any_of(ctx: Context) -> list[int]:
        return [(await ctx.receive(Notice, Job)).n for _ in range(4)]

    engine = await h.engine(broadcast_any_of, config=LONG)
    for n, cls in enumerate((Job, Notice, Notice, Job)):
        await engine.broadcast(cls(n))
        await h.clock.advance(1.0)
    assert await h.run_to_end(await engine.start(broadcast_any_of)) == [0, 1, 2, 3]


@on_every_store
async def test_the_mailbox_comes_before_the_topics(h):
    client = await h.client()
    await client.broadcast(Job(1))
    await h.clock.advance(1.0)
    run = await client.start(broadcast_reader, "Job", 2)
    await run.send(Job(2))
    await h.engine(broadcast_reader)
    assert await h.run_to_end(run) == [2, 1]


@on_every_store
async def test_mailbox_comes_first_although_the_topic_event_is_older(h):
    engine = await h.engine(broadcast_reader)
    (run,) = await readers(h, engine, "Job", 1, count=2)
    await h.crash(engine)  # so that both events exist when a worker claims the run
    client = await h.client()
    assert await client.broadcast(Job(1)) == 1
    await client.send(run.id, Job(2))
    await h.engine(broadcast_reader)
    assert await h.drive(client.result(run.id)) == [2, 1]


@on_every_store
async def test_run_waiting_for_several_topics_gets_one_event(h):
    @workflow
    async def broadcast_any_once(ctx: Context) -> int:
        return (await ctx.receive(Job, Ticket, "plain")).n

    engine = await h.engine(broadcast_any_once, broadcast_reader, config=LONG)
    run = await engine.start(broadcast_any_once)
    await h.settle()
    assert await engine.broadcast(Ticket(1)) == 1
    assert await engine.broadcast(Job(2)) == 0  # its subscription is used up
    assert await engine.emit("plain", 3) == 0
    assert await h.run_to_end(run) == 1
    assert await results(h, await readers(h, engine, "Job", 1)) == [[2]]


@on_every_store
async def test_receive_batch_takes_mailbox_first_then_one_topic_event_at_a_time(h):
    @workflow
    async def broadcast_batch(ctx: Context) -> list[list[int]]:
        return [[each.n for each in await ctx.receive_batch(Job, max=5, timeout=10)] for _ in range(4)]

    client = await h.client()
    for n in (1, 2):
        await client.broadcast(Job(n))
    run = await client.start(broadcast_batch)
    for n in (3, 4):
        await run.send(Job(n))
    await h.engine(broadcast_batch)
    batches = await h.run_to_end(run)
    assert batches[0] == [3, 4]
    assert [n for batch in batches[1:] for n in batch] == [1, 2]


# --- once per event id


@on_every_store
async def test_broadcast_is_idempotent_per_event_id_also_after_consumption(h):
    engine = await h.engine(broadcast_reader, config=LONG)
    (run,) = await readers(h, engine, "Job", 1, count=2, timeout=50.0)
    assert await engine.broadcast(Job(1), event_id="once") == 1
    for _ in range(2):
        assert await engine.broadcast(Job(1), event_id="once") == 0
        await h.settle()
    assert await h.run_to_end(run) == [1, None]


@on_every_store
async def test_the_id_of_a_broadcast_is_forgotten_after_the_retention(h):
    config = EngineConfig(event_retention=1000.0, sweep_interval=100.0, lease=500.0)
    engine = await h.engine(broadcast_reader, config=config)
    (run,) = await readers(h, engine, "Job", 1, count=2, timeout=HOUR)
    await engine.broadcast(Job(1), event_id="e")
    await h.clock.advance(900.0)
    assert await engine.broadcast(Job(2), event_id="e") == 0
    await h.clock.advance(200.0)
    assert await engine.broadcast(Job(3), event_id="e") == 1
    assert await h.run_to_end(run) == [1, 3]


# --- how long they are kept, and how many


@on_every_store
async def test_expired_event_is_not_delivered(h):
    engine = await h.engine(broadcast_reader, config=LONG)
    await engine.broadcast(Fleeting(1))
    await h.clock.advance(29.0)
    assert await results(h, await readers(h, engine, "Fleeting", 1, timeout=0.5)) == [[1]]
    await engine.broadcast(Fleeting(2))
    await h.clock.advance(30.0)
    assert await results(h, await readers(h, engine, "Fleeting", 1, timeout=0.5)) == [[None]]
    await h.clock.advance(120.0)
    assert await h.store.topic("Fleeting") == []


@on_every_store
async def test_topic_events_expire_after_the_retention(h):
    config = EngineConfig(event_retention=200.0, sweep_interval=100.0, lease=500.0)
    engine = await h.engine(broadcast_reader, config=config)
    await engine.broadcast(Job(1))
    await h.clock.advance(199.0)
    await engine.broadcast(Job(2))
    await h.clock.advance(2.0)
    assert await results(h, await readers(h, engine, "Job", 1, count=2, timeout=1.0)) == [[2, None]]
    await engine.broadcast(Job(3))
    await h.clock.advance(400.0)
    assert await h.store.topic("Job") == []


@on_every_store
async def test_a_full_topic_refuses_and_stores_nothing(h):
    engine = await h.engine(broadcast_reader, config=EngineConfig(max_pending_events=2))
    for n in range(2):
        await engine.broadcast(Job(n), event_id=f"e-{n}")
    before = await h.store.topic("Job")
    with pytest.raises(QueueFull):
        await engine.broadcast(Job(2), event_id="e-2")
    with pytest.raises(QueueFull):
        await engine.emit("Job", {"n": 3})
    assert await engine.broadcast(Job(1), event_id="e-1") == 0  # it is in there already
    assert await h.store.topic("Job") == before
    (run,) = await readers(h, engine, "Job", 1, count=3)
    assert await engine.broadcast(Job(2), event_id="e-2") == 1  # the refusal was not remembered
    assert await h.run_to_end(run) == [0, 1, 2]


@on_every_store
async def test_full_topic_accepts_an_event_that_a_run_waits_for(h):
    engine = await h.engine(broadcast_reader, config=EngineConfig(max_pending_events=1))
    await engine.broadcast(Task(1))
    await h.clock.advance(1.0)
    (young,) = await readers(h, engine, "Task", 1)  # created after it: may not have it
    assert await engine.broadcast(Task(2)) == 1
    with pytest.raises(QueueFull):
        await engine.broadcast(Task(3))
    assert await h.run_to_end(young) == [2]


@on_every_store
async def test_queue_full_is_raised_in_a_workflow_that_can_continue(h):
    @workflow
    async def broadcast_too_much(ctx: Context) -> list[Any]:
        said: list[Any] = []
        for n in range(3):
            try:
                said.append(await ctx.broadcast(Job(n)))
            except QueueFull as error:
                said.append(type(error).__name__)
        return said

    engine = await h.engine(broadcast_too_much, config=EngineConfig(max_pending_events=2))
    assert await h.run_to_end(await engine.start(broadcast_too_much)) == [0, 0, "QueueFull"]


# --- receives that are given up


@on_every_store
async def test_event_assigned_to_a_cancelled_run_goes_to_the_next_waiter(h):
    engine = await h.engine(broadcast_reader)
    first, second = await readers(h, engine, "Job", 2)
    await h.crash(engine)  # so that no worker processes the assignment
    client = await h.client()
    assert await client.broadcast(Job(1)) == 1
    assert [each.kind for each in await h.store.inbox(first.id)] == ["assignment"]
    await client.terminate(first.id)
    await h.engine(broadcast_reader)
    await h.clock.advance(30.0)
    assert await client.status(first.id) is RunStatus.CANCELLED
    assert await client.result(second.id) == [1]


@on_every_store
async def test_event_that_meets_a_cancelled_receive_goes_to_the_next_waiter(h):
    engine = await h.engine(broadcast_reader)
    first, second = await readers(h, engine, "Job", 2)
    await h.crash(engine)
    client = await h.client()
    await client.cancel(first.id)
    assert await client.broadcast(Job(1)) == 1
    await h.engine(broadcast_reader)
    await h.clock.advance(30.0)
    assert await client.status(first.id) is RunStatus.CANCELLED
    assert await client.result(second.id) == [1]


@on_every_store
async def test_event_of_a_losing_receive_returns_to_its_position(h):
    @workflow
    async def broadcast_racer(ctx: Context) -> list[Any]:
        """Return what wins a race against a topic event of the same turn, and then what the topic contains."""
        winner, value = await ctx.race(mail=ctx.receive("word"), topic=ctx.receive(Job))
        return [winner, value if winner == "mail" else value.n]

    engine = await h.engine(broadcast_racer, broadcast_reader)
    run = await engine.start(broadcast_racer)
    await h.settle()
    await h.crash(engine)
    client = await h.client()
    await client.send(run.id, "word", "w")
    assert await client.broadcast(Job(1)) == 1
    await client.broadcast(Job(2))
    engine = await h.engine(broadcast_racer, broadcast_reader)
    await h.clock.advance(30.0)
    assert await client.result(run.id) == ["mail", "w"]
    assert await results(h, await readers(h, engine, "Job", 1, count=2)) == [[1, 2]]


@on_every_store
async def test_running_run_releases_the_assignment_of_an_abandoned_receive_at_once(h):
    @workflow
    async def broadcast_goes_on(ctx: Context, timeout: float) -> str:
        """Abandons a receive, because of another event or a timeout, and then stays busy."""
        try:
            await ctx.race(word=ctx.receive("word"), topic=ctx.receive(Job, timeout=timeout))
        finally:
            await ctx.sleep(10_000)
        return "done"

    for timeout in (10_000.0, 20.0):
        engine = await h.engine(broadcast_goes_on, broadcast_reader)
        first = await engine.start(broadcast_goes_on, timeout)
        await h.settle()
        (second,) = await readers(h, engine, "Job", 1, timeout=5_000.0)
        await h.crash(engine)
        client = await h.client()
        await client.send(first.id, "word")
        await h.clock.advance(30.0)
        assert await client.broadcast(Job(1)) == 1
        assert [each.kind for each in await h.store.inbox(first.id)] == ["event", "assignment"]
        engine = await h.engine(broadcast_goes_on, broadcast_reader)
        assert await h.drive(engine.result(second.id), within=30) == [1]
        assert await engine.status(first.id) is RunStatus.SUSPENDED
        assert await h.store.topic("Job") == []
        await engine.terminate(first.id)
        await h.drive(engine.shutdown())


@on_every_store
async def test_event_that_misses_a_timeout_goes_to_the_next_waiter(h):
    engine = await h.engine(broadcast_reader, config=LONG)
    first, second = [await engine.start(broadcast_reader, "Job", 1, 0.0, timeout) for timeout in (50.0, 10_000.0)]
    await h.settle()
    await h.clock.advance(49.0)
    await h.clock.advance(1.5)
    assert await engine.broadcast(Job(1)) == 1
    assert await results(h, [first, second]) == [[None], [1]]


# --- paging


@on_every_store
async def test_all_waiters_get_an_event_once_although_its_publisher_dies(h):
    many = 1_200
    engine = await h.engine(broadcast_reader, config=LONG)
    runs = await asyncio.gather(*(engine.start(broadcast_reader, "Notice", 3, 0.0, 60.0) for _ in range(many)))
    await h.settle()
    publisher = await h.engine(broadcast_ender, config=LONG)
    publisher.faults.crash(2, "after")  # after the second page
    assert await h.drive_until_crash(publisher, publisher.broadcast(Notice(1))) is None
    await h.crash(publisher)
    assert len(await h.store.unfinished_broadcasts()) == 1
    waits = [(await h.store.load([run.id]))[0].record.last_message_no for run in runs]
    assert sorted(set(waits)) == [0, 1]
    other = await h.engine(broadcast_ender)
    await h.drive(other.broadcast(Notice(2)))  # no run gets it before the earlier one
    await h.clock.advance(10.0)
    assert await h.store.unfinished_broadcasts() == []
    found = [await h.run_to_end(run) for run in runs]
    assert [each for each in found if each != [1, 2, None]] == []


@on_every_store
async def test_broadcast_to_ten_thousand_runs_is_paged_and_any_worker_finishes_it(h):
    stage, ids = Stage(h), [f"w-{n:05}" for n in range(10_000)]
    await stage.run("any")
    now, subscribed = h.clock.now(), TurnExtras(subscribe=(Subscription("0/receive", ("Notice",)),))
    for first in range(0, len(ids), PAGE):
        page = ids[first : first + PAGE]
        await h.store.commit([CreateRun(stage.record(id, owner=ELSEWHERE)) for id in page])
        turn = {"base": 0, "worker": ELSEWHERE, "owned": True, "now": now, "extras": subscribed}
        patch = RunPatch(status=RunStatus.SUSPENDED)
        await h.store.commit([CommitTurn(run_id=id, turn_id=id, patch=patch, **turn) for id in page])
    publisher = await h.engine(broadcast_ender, config=LONG)
    publisher.faults.crash(4, "after")
    assert await h.drive_until_crash(publisher, publisher.broadcast(Notice(1))) is None
    await h.crash(publisher)
    assert await assigned_to(h, ids) == [1] * 4 * PAGE + [0] * (len(ids) - 4 * PAGE)
    await h.engine(broadcast_ender)
    await h.clock.advance(10.0)
    assert await h.store.unfinished_broadcasts() == []
    assert await assigned_to(h, ids) == [1] * len(ids)


async def assigned_to(h, ids) -> list[int]:
    """Return how many events were assigned to each of these runs, which read none."""
    records = [each for first in range(0, len(ids), PAGE) for each in await h.store.records(ids[first : first + PAGE])]
    return [record.last_message_no for record in records]


@on_every_store
async def test_broadcast_counts_all_woken_runs_although_a_periodic_task_finishes_others(h, monkeypatch):
    many = 600
    engine = await h.engine(broadcast_reader, config=LONG)
    await asyncio.gather(*(engine.start(broadcast_reader, "Notice", 1, 0.0, 60.0) for _ in range(many)))
    await h.settle()
    commit = engine.faults.commit

    async def while_duties_look(batch):
        engine._runtime._broadcast_task.trigger()
        return await commit(batch)

    monkeypatch.setattr(engine.faults, "commit", while_duties_look)
    assert await h.drive(engine.broadcast(Notice(1))) == many
