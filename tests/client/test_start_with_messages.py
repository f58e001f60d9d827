"""`start(..., send=[...])`: a run and its first messages are stored in one commit."""

import pytest

from perdure import (
    Context,
    EngineConfig,
    InvalidPayload,
    QueueFull,
    RunConflict,
    RunStatus,
    RunTerminated,
    event,
    workflow,
)
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.stores.writes import CreateRun
from tests.engine.store_matrix import on_every_store


@event
class Item:
    name: str


@event
class Note:
    text: str


@workflow(name="first_messages.basket")
async def basket(ctx: Context, size: int) -> list[str]:
    return [(await ctx.receive(Item)).name for _ in range(size)]


@workflow(name="first_messages.named")
async def named(ctx: Context) -> list[object]:
    return [await ctx.receive("orders.paid"), (await ctx.receive(Note)).text]


@on_every_store
async def test_a_run_receives_the_messages_that_it_is_started_with_in_order(h):
    engine = await h.engine()
    run = await engine.start(basket, 3, id="b", send=[Item("a"), Item("b"), Item("c")])
    assert run.created
    assert await h.run_to_end(run) == ["a", "b", "c"]
    assert await h.drive(engine.execute(basket, 1, send=(Item("x"),))) == ["x"]


@on_every_store
async def test_run_and_messages_are_one_write(h):
    engine = await h.engine()
    before = len(engine.faults.committed)
    await engine.start(basket, 2, id="b", send=[Item("a"), Item("b")])
    first = engine.faults.committed[before]
    (write,) = [write for write in first if isinstance(write, CreateRun)]
    assert [message.number for message in write.inbox] == [1, 2]


@pytest.mark.parametrize("side", ["before", "after"])
@on_every_store
async def test_a_crash_shows_the_run_with_its_messages_or_neither(h, side):
    client = await h.client()
    client._session.store.crash(1, side)
    h.background(client.start(basket, 2, id="b", send=[Item("a"), Item("b")]))
    await h.settle()
    engine = await h.engine()
    if side == "before":
        assert await engine.status("b") is None
    else:
        assert await h.drive(engine.result("b")) == ["a", "b"]


@on_every_store
async def test_messages_after_a_lost_response_are_stored_once(h):
    client = await h.client()
    client._session.store.lose_responses(1)
    await h.drive(client.start(basket, 3, id="b", send=[Item("a"), Item("b")]))
    engine = await h.engine()
    await engine.send("b", Item("c"))
    assert await h.drive(engine.result("b")) == ["a", "b", "c"]


@on_every_store
async def test_names_with_payloads_and_event_ids(h):
    engine = await h.engine()
    events = [
        {"event": "orders.paid", "payload": {"cents": 5}, "event_id": "paid-1"},
        {"event": "orders.paid", "payload": {"cents": 6}, "event_id": "paid-1"},
        Note("thanks"),
    ]
    run = await engine.start(named, id="n", delay=60, send=events)
    await engine.send("n", "orders.paid", {"cents": 7}, event_id="paid-1")
    assert await h.run_to_end(run) == [{"cents": 5}, "thanks"]
    assert await h.drive(engine.execute(named, send=[("orders.paid", 1), Note("x")])) == [1, "x"]


@on_every_store
async def test_messages_do_not_shorten_the_delay(h):
    engine = await h.engine()
    started = h.clock.now()
    run = await engine.start(basket, 1, delay=60, send=[Item("a")])
    await h.run_to_end(run)
    assert h.clock.now() >= started + 60


@on_every_store
async def test_an_observed_open_run_gets_the_messages(h):
    engine = await h.engine()
    run = await engine.start(basket, 3, id="b", send=[Item("a")])
    await h.settle()
    assert not (await engine.start(basket, 3, id="b", send=[Item("b"), Item("c")])).created
    assert await h.run_to_end(run) == ["a", "b", "c"]


@on_every_store
async def test_an_observed_ended_run_refuses_messages(h):
    engine = await h.engine()
    await h.drive(engine.execute(basket, 1, id="b", send=[Item("a")]))
    with pytest.raises(RunTerminated, match="succeeded"):
        await engine.start(basket, 1, id="b", send=[Item("b")])
    assert not (await engine.start(basket, 1, id="b")).created


@on_every_store
async def test_a_conflict_delivers_nothing(h):
    engine = await h.engine()
    await engine.start(basket, 2, id="b")
    await h.settle()
    with pytest.raises(RunConflict):
        await engine.start(basket, 1, id="b", send=[Item("b")])
    with pytest.raises(RunConflict):
        await engine.start(basket, 2, id="b", send=[Item("b")], if_exists="reject")
    assert await h.store.inbox("b") == []


@pytest.mark.parametrize("if_exists", ["restart", "restart_ended"])
@on_every_store
async def test_a_restart_starts_with_its_messages(h, if_exists):
    engine = await h.engine()
    await h.drive(engine.execute(basket, 1, id="b", send=[Item("old")]))
    run = await h.drive(engine.start(basket, 2, id="b", send=[Item("a"), Item("b")], if_exists=if_exists))
    assert run.created
    assert await h.run_to_end(run) == ["a", "b"]


@on_every_store
async def test_a_message_to_a_run_that_ends_meanwhile_restarts_it(h, monkeypatch):
    """The run is open when the caller reads it, and has ended when the message arrives."""
    engine = await h.engine()
    await engine.start(basket, 1, id="b")
    await h.settle()
    client = await h.client()
    restarter = client._starts._restarter
    restart, found_open = restarter.restart, []

    async def end_after_reading(request, existing):
        found = await restart(request, existing)
        if found is not None:
            found_open.append(found.generation)
            await engine.send("b", Item("first"))
            assert await engine.result("b") == ["first"]
        return found

    monkeypatch.setattr(restarter, "restart", end_after_reading)
    run = await h.drive(client.start(basket, 1, id="b", send=[Item("late")], if_exists="restart_ended"))
    assert (found_open, run.created) == ([0], True)
    assert await h.drive(engine.result("b")) == ["late"]


@on_every_store
async def test_invalid_messages_are_refused_before_anything_is_stored(h):
    engine = await h.engine(config=EngineConfig(max_pending_events=3))
    before = engine.faults.commits
    for wrong, error in (
        ([object()], WorkflowMisuse),
        ([Item], WorkflowMisuse),
        ([Item("a"), 5], WorkflowMisuse),
        ([Item(5)], InvalidPayload),  # type: ignore[arg-type]
        ([("orders.paid", object())], InvalidPayload),
        ([("", 1)], InvalidArgument),
        ([{"event": Item("a"), "event_id": ""}], InvalidArgument),
        ([{"event": Item("a"), "id": "x"}], WorkflowMisuse),
        (Item("a"), InvalidArgument),
        ("orders.paid", InvalidArgument),
        (None, InvalidArgument),
        ([Item("a")] * 4, QueueFull),
    ):
        with pytest.raises(error):
            await engine.start(basket, 1, id="b", send=wrong)
    assert engine.faults.commits == before
    assert await engine.status("b") is None


@on_every_store
async def test_the_limit_of_a_mailbox_counts_per_event_name(h):
    engine = await h.engine(config=EngineConfig(max_pending_events=2))
    run = await engine.start(basket, 2, id="b", delay=60, send=[Item("a"), Item("b"), Note("c"), Note("d")])
    assert await h.run_to_end(run) == ["a", "b"]


@on_every_store
async def test_a_run_that_is_started_by_name_gets_messages(h):
    engine = await h.engine()
    run = await engine.start("first_messages.basket", 1, send=[Item("a")])
    assert await h.run_to_end(run) == ["a"]
    assert await run.status() is RunStatus.SUCCEEDED
