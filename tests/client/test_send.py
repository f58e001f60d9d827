"""Clients send events and requests and complete deferreds."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import pytest

from perdure import (
    Context,
    EngineConfig,
    InvalidPayload,
    InvalidToken,
    QueueFull,
    RunNotFound,
    RunStatus,
    RunTerminated,
    WorkflowMisuse,
    event,
    workflow,
)
from perdure.codec import JSON
from perdure.model.records import PublishedValue, RunResult, Subscription
from perdure.model.turns import TurnExtras
from perdure.stores.writes import ContinueAs, RunPatch
from perdure.workflows.events import build_message, build_topic_event, encode_event
from tests.engine.store_matrix import on_every_store
from tests.engine.store_setup import Stage


@event
class Approved:
    by: str


@event(name="paid.out", delivery="first", expire_after=30.0, on_target_terminated="dead_letter")
class PaidOut:
    cents: int


@event(delivery="after_wait", consume=False)
class Noticed:
    what: str


@dataclass
class NoEvent:
    by: str


@workflow
async def sending_sleeper(ctx: Context) -> None:
    await ctx.sleep(100_000)


# --- one run


@on_every_store
async def test_event_is_delivered_with_its_name_and_options(h):
    stage, client = Stage(h), await h.client()
    await stage.run("r")
    now = h.clock.now()
    await client.send("r", Approved("ada"))
    await client.get("r").send(PaidOut(7), event_id="p")
    await client.send("r", "orders.paid", {"cents": 7})
    first, second, third = await h.store.inbox("r")
    assert (first.kind, first.name, first.body, first.policy) == ("event", "Approved", b'{"by":"ada"}', "discard")
    assert (first.sent_at, first.expires_at, first.wants_reply) == (now, None, False)
    assert (second.id, second.event_id, second.name) == ("event/p", "p", "paid.out")
    assert (second.policy, second.expires_at) == ("dead_letter", now + 30.0)
    assert (third.name, third.body) == ("orders.paid", b'{"cents":7}')


@on_every_store
async def test_event_id_makes_send_idempotent(h):
    stage, client = Stage(h), await h.client()
    await stage.run("r")
    for _ in range(2):
        await client.send("r", Approved("ada"), event_id="once")
    await client.send("r", Approved("ada"))
    await client.send("r", Approved("ada"))
    assert len(await stage.inbox("r")) == 3


@on_every_store
async def test_send_to_an_unknown_ended_or_full_run_is_refused(h):
    stage, client = Stage(h), await h.client(config=EngineConfig(max_pending_events=1))
    await stage.run("ended")
    await stage.end("ended")
    await stage.run("r")
    with pytest.raises(RunNotFound):
        await client.send("unknown", Approved("ada"))
    with pytest.raises(RunTerminated):
        await client.send("ended", Approved("ada"))
    await client.send("r", Approved("ada"))
    with pytest.raises(QueueFull, match="1 unread"):
        await client.send("r", Approved("bob"))
    await client.resume("r")  # not an event, so the limit does not apply


@on_every_store
async def test_invalid_event_is_refused_with_an_error_message(h):
    stage, client = Stage(h), await h.client()
    await stage.run("r")
    for wrong in (NoEvent("ada"), {"by": "ada"}, 7, None):
        with pytest.raises(WorkflowMisuse, match="@event"):
            await client.send("r", wrong)
    with pytest.raises(WorkflowMisuse, match=r"Approved\(\.\.\.\)"):
        await client.send("r", Approved)
    with pytest.raises(WorkflowMisuse, match="payload"):
        await client.send("r", Approved("ada"), {"by": "bob"})
    with pytest.raises(WorkflowMisuse, match="512"):
        await client.send("r", "n" * 513, 1)
    with pytest.raises(WorkflowMisuse):
        await client.send("r", "n", 1, event_id="")
    with pytest.raises(WorkflowMisuse, match="emit"):
        await client.broadcast("paid")
    with pytest.raises(InvalidPayload):
        await client.send("r", Approved(7))  # type: ignore[arg-type]
    with pytest.raises(InvalidPayload):
        await client.send("r", "topic", object())
    assert await stage.inbox("r") == []


@on_every_store
async def test_event_reaches_a_local_run_without_a_sweep(h):
    engine = await h.engine(sending_sleeper, config=EngineConfig(sweep_interval=1000.0, lease=5000.0))
    run = await engine.start(sending_sleeper)
    await h.settle()
    position = (await h.store.load([run.id]))[0].position
    await run.send(Approved("ada"))
    await h.settle()
    (snapshot,) = await h.store.load([run.id])
    assert snapshot.record.last_message_no == 1
    assert snapshot.position >= position
    assert snapshot.record.wake_at > h.clock.now()  # the worker has read the message and keeps sleeping


# --- requests


@on_every_store
async def test_request_waits_for_the_reply_of_the_run(h):
    stage, client = Stage(h), await h.client()
    await stage.run("r")
    request = h.background(client.request("r", Approved("ada"), timeout=timedelta(hours=1)))
    await h.settle()
    (message,) = await h.store.inbox("r")
    assert message.wants_reply
    await h.clock.advance(10)
    assert not request.done()
    reply = PublishedValue(f"~reply/{message.event_id}", b'{"ok":true}', None)
    await stage.turn("r", consumed=(1,), extras=TurnExtras(published=(reply,)))
    await h.clock.advance(6)
    assert request.result() == {"ok": True}
    assert await client.published("r") == {}


@on_every_store
async def test_reply_in_the_commit_that_ends_the_run_is_not_missed(h):
    stage, client = Stage(h), await h.client()
    await stage.run("r")
    request = h.background(client.request("r", "ask", 60, payload=1))
    await h.settle()
    (message,) = await h.store.inbox("r")
    reply = PublishedValue(f"~reply/{message.event_id}", b"1", None)
    patch = RunPatch(status=RunStatus.SUCCEEDED, result=b"null", ended_at=h.clock.now())
    await stage.turn("r", patch=patch, extras=TurnExtras(published=(reply,)))
    await h.clock.advance(6)
    assert request.result() == 1


@on_every_store
async def test_request_without_a_reply_ends(h):
    stage, client = Stage(h), await h.client()
    await stage.run("slow")
    await stage.run("ending")
    slow = h.background(client.request("slow", Approved("ada"), 3.0))
    ending = h.background(client.request("ending", Approved("ada"), 60.0))
    await h.settle()
    await stage.end("ending")
    await h.clock.advance(10)
    with pytest.raises(TimeoutError, match="slow"):
        await slow
    with pytest.raises(RunTerminated):
        await ending
    with pytest.raises(RunNotFound):
        await client.request("unknown", Approved("ada"), 1.0)


# --- topics


@on_every_store
async def test_broadcast_returns_the_number_of_woken_runs(h):
    stage, client = Stage(h), await h.client()
    assert await client.broadcast(Noticed("no reader")) == 0
    for n in range(3):
        await stage.waiting(f"w-{n}", "Noticed", "Approved")
    assert await client.broadcast(Noticed("all"), event_id="n") == 3
    assert await client.broadcast(Noticed("all"), event_id="n") == 0
    assert await stage.inbox("w-1") == [("assignment", "Noticed", b'{"what":"all"}')]


@on_every_store
async def test_emitted_value_waits_in_its_topic_for_one_reader(h):
    stage, client = Stage(h), await h.client(config=EngineConfig(event_retention=100.0, max_pending_events=1))
    assert await client.emit("orders.paid", {"cents": 7}, event_id="a") == 0
    (queued,) = await h.store.topic("orders.paid")
    assert (queued.delivery, queued.consume, queued.body) == ("all", True, b'{"cents":7}')
    assert queued.expires_at == h.clock.now() + 100.0
    with pytest.raises(QueueFull, match="topic"):
        await client.emit("orders.paid", 8)
    await stage.waiting("w", "orders.paid")
    assert await stage.inbox("w") == [("assignment", "orders.paid", b'{"cents":7}')]


@on_every_store
async def test_broadcast_reaches_a_local_run_without_a_sweep(h):
    engine = await h.engine(sending_sleeper, config=EngineConfig(sweep_interval=1000.0, lease=5000.0))
    stage = Stage(h)
    await stage.waiting("w", "Noticed")
    sleeper = ContinueAs(workflow="sending_sleeper", version=1, input=b"{}", first_executed_at=h.clock.now())
    await stage.turn("w", patch=RunPatch(status=RunStatus.SUSPENDED), continue_as=sleeper)
    await stage.turn("w", patch=RunPatch(status=RunStatus.SUSPENDED), extras=NOTICED)
    await h.settle()
    assert await engine.broadcast(Noticed("x")) == 1
    await h.settle()
    assert "w" in engine.loaded_runs


def test_delivery_options_of_an_event_become_those_of_its_topic_event():
    options, body = encode_event(PaidOut(7), None, JSON)
    sent = build_topic_event(options, body, event_id="e", sent_at=10.0)
    assert (sent.topic, sent.delivery, sent.consume, sent.expires_at) == ("paid.out", "all", True, 40.0)
    options, body = encode_event(Noticed("x"), None, JSON)
    sent = build_topic_event(options, body, event_id="e", sent_at=10.0, sender="r")
    assert (sent.delivery, sent.consume, sent.expires_at, sent.sender) == ("after_wait", False, None, "r")
    assert build_message(options, body, event_id="m", sent_at=1.0, sender="r").sender == "r"


NOTICED = TurnExtras(subscribe=(Subscription("1/receive", ("Noticed",)),))


# --- deferreds


def ending_of(message) -> RunResult:
    return msgspec.json.decode(message.body, type=RunResult)


@on_every_store
async def test_first_completion_of_a_deferred_wins(h):
    stage, client = Stage(h), await h.client()
    await stage.run("r", has_executed=False)
    token = await client.deferred_token("r", "review")
    results = await h.drive(asyncio.gather(client.complete(token, {"ok": True}), client.fail(token, "no")))
    assert sorted(results) == [False, True]
    assert await client.complete(token, None) is False
    message, *later = await h.store.inbox("r")
    # The run has not checked the first one: if its value does not fit, the next one that fits counts.
    assert all(each.id.startswith("fallback/0/") for each in later)
    assert (message.id, message.kind, message.name) == ("deferred/0/review", "deferred", "review")
    assert ending_of(message) == RunResult(result=b'{"ok":true}')


@on_every_store
async def test_deferred_fails_with_an_exception_or_a_text(h):
    stage, client = Stage(h), await h.client()
    await stage.run("r")
    await client.fail(await client.deferred_token("r", "a"), KeyError("lost"))
    await client.fail(await client.deferred_token("r", "b"), "not today")
    one, other = (ending_of(message) for message in await h.store.inbox("r"))
    assert one.error is not None
    assert other.error is not None
    assert (one.status, one.error.type, one.error.fields is not None) == (RunStatus.FAILED, "KeyError", True)
    assert (other.error.type, other.error.message) == ("Exception", "not today")
    with pytest.raises(WorkflowMisuse):
        await client.fail(await client.deferred_token("r", "c"), 7)


@on_every_store
async def test_deferred_of_an_ended_run_or_an_earlier_epoch_is_not_completed(h):
    stage, client = Stage(h), await h.client()
    await stage.run("ended")
    await stage.run("continued")
    tokens = [await client.deferred_token(run_id, "d") for run_id in ("ended", "continued")]
    await stage.end("ended")
    continue_as = ContinueAs(workflow="staged", version=1, input=b"{}", first_executed_at=None)
    await stage.turn("continued", patch=RunPatch(status=RunStatus.SUSPENDED), continue_as=continue_as)
    assert [await client.complete(token, 1) for token in tokens] == [False, False]
    assert await client.complete(await client.deferred_token("continued", "d"), 1) is True


@on_every_store
async def test_forged_tokens_are_refused(h):
    stage, client = Stage(h), await h.client()
    await stage.run("r")
    token = await client.deferred_token("r", "d")
    for wrong in ("", "x", token[:-2] + ("AA" if not token.endswith("AA") else "BB"), token + "A"):
        with pytest.raises(InvalidToken):
            await client.complete(wrong, 1)
    with pytest.raises(RunNotFound):
        await client.deferred_token("unknown", "d")
    await stage.end("r", prune_at=h.clock.now())
    await h.store.prune(h.clock.now() + 1.0)
    with pytest.raises(InvalidToken, match="pruned"):
        await client.complete(token, 1)


@on_every_store
async def test_tokens_stay_valid_after_a_key_rotation(h):
    stage, client = Stage(h), await h.client()
    await stage.run("old")
    token = await client.deferred_token("old", "d")
    await client.rotate_keys()
    assert await client.deferred_token("old", "d") == token
    await h.clock.advance(600)
    await stage.run("new")
    newer = await client.deferred_token("new", "d")
    assert await client.complete(token, 1)
    assert await client.complete(newer, 1)
    assert len(await h.store.keys("deferred", h.clock.now())) == 2


@on_every_store
async def test_workers_read_new_keys_before_they_sign(h):
    engine, client = await h.engine(sending_sleeper), await h.client()
    assert len(engine._runtime.coordinator.keys) == 1
    await client.rotate_keys()
    await h.clock.advance(119)
    old, new = engine._runtime.coordinator.keys
    assert old.created_at < h.clock.now() < new.created_at
