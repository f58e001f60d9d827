"""Sends, broadcasts, published values and streams: each is an entry and happens once, also after crashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from perdure import Context, RunNotFound, RunTerminated, event
from perdure.codec import JSON
from perdure.model.records import EntryStatus, PublishedValue
from perdure.model.turns import BroadcastEvent, Effect, ExternalEffect, SendEvent
from tests.runner.crash_after_every_turn import check_replay, crashed, run_with_crashes
from tests.runner.turn_driver import Play
from tests.runner.workflows import fetch

SEEDS = range(12)
W = TypeVar("W")


@event(expire_after=60, on_target_terminated="dead_letter", delivery="first", consume=False)
class Greeting:
    text: str


@dataclass
class Progress:
    done: int


def work_of(effect: Effect, kind: type[W]) -> W:
    assert isinstance(effect, ExternalEffect)
    assert isinstance(effect.work, kind)
    return effect.work


def published(play: Play) -> list[Any]:
    return [(each.key, JSON.decode(each.value)) for extras in play.extras for each in extras.published]


def streamed(play: Play) -> list[Any]:
    return [(each.stream, JSON.decode(each.value)) for extras in play.extras for each in extras.streamed]


# --- publish


def test_published_value_is_part_of_the_commit_that_records_it():
    async def publishing(ctx):
        await ctx.publish("progress", Progress(1))
        await ctx.sleep(5)

    play = Play(publishing).begin()
    assert play.turn.extras is not None
    assert play.turn.extras.published == (PublishedValue("progress", b'{"done":1}'),)
    [row] = [row for row in play.turn.entries if row.kind == "publish"]
    assert (row.location, row.status, row.value) == ("progress", EntryStatus.SUCCEEDED, b'{"done":1}')
    assert crashed(play).turn.extras is None


def test_last_published_value_of_a_turn_counts():
    async def publishing(ctx):
        for number in range(5):
            await ctx.publish("progress", number)
        await ctx.publish("other", "x")

    play = Play(publishing).run()
    assert published(play) == [("progress", 4), ("other", "x")]
    assert len(play.entries) == 6


@pytest.mark.parametrize("key", ["~reply/x", "~", "", 5])
def test_reserved_key_is_rejected(key):
    async def publishing(ctx):
        await ctx.publish(key, 1)

    play = Play(publishing).run()
    assert play.failure.type == "InvalidArgument"
    assert play.rows == []


def test_unsupported_value_is_rejected_at_the_call():
    async def publishing(ctx):
        await ctx.publish("x", object())

    async def writing(ctx):
        await ctx.stream("x").write(object())

    assert Play(publishing).run().failure.type == "InvalidPayload"
    assert Play(writing).run().failure.type == "InvalidPayload"


def test_value_is_encoded_at_the_call():
    async def publishing(ctx):
        mine = [1]
        call = ctx.publish("x", mine)
        mine.append(2)
        await call

    assert published(Play(publishing).run()) == [("x", [1])]


@pytest.mark.parametrize("seed", SEEDS)
def test_values_and_items_are_published_once_after_crashes(seed):
    async def showing(ctx):
        for number in range(4):
            await ctx.join(
                ctx.publish("n", number), ctx.stream("log").write(["began", number]), fetch(number), ctx.sleep(1)
            )
            await ctx.stream("log").write(["ended", number])

    play = run_with_crashes(showing, seed=seed)
    assert published(play) == [("n", number) for number in range(4)]
    assert streamed(play) == [("log", [what, number]) for number in range(4) for what in ("began", "ended")]


# --- streams


def test_stream_item_has_its_location_and_time():
    async def writing(ctx):
        log = ctx.stream("log")
        await log.write(1)
        await ctx.sleep(5)
        await ctx.join(a=log.write(2), b=ctx.stream("other").write(3))

    play = Play(writing).run()
    items = [item for extras in play.extras for item in extras.streamed]
    assert [(item.stream, item.location, item.at) for item in items] == [
        ("log", "log", 1_000.0),
        ("log", "join/a/log", 1_005.0),
        ("other", "join/b/other", 1_005.0),
    ]


@pytest.mark.parametrize("name", ["", None])
def test_invalid_name_is_rejected(name):
    async def writing(ctx):
        ctx.stream(name)

    assert Play(writing).run().failure.type == "InvalidArgument"


def test_cancelled_publish_has_no_effect():
    async def raced(ctx):
        await ctx.race(_nothing(), ctx.publish("x", 1), ctx.stream("s").write(1))
        await ctx.sleep(1)

    async def _nothing():
        return None

    play = run_with_crashes(raced)
    assert (published(play), streamed(play)) == ([], [])
    assert {play.entries[each].status for each in ("race/~1/x", "race/~2/s")} == {EntryStatus.CANCELLED}


# --- send and broadcast


async def sending(ctx: Context) -> Any:
    await ctx.send("other", Greeting("hello"))
    return await ctx.broadcast("news", {"n": 1})


def test_send_is_recorded_before_it_happens_under_a_deterministic_id():
    play = Play(sending).begin()
    assert play.entries["Greeting"].status is EntryStatus.PENDING
    [effect] = play.turn.effects
    work = work_of(effect, SendEvent)
    message = work.message
    assert (message.id, message.event_id) == ("sent/run-1/0/Greeting", "run-1/0/Greeting")
    assert (work.run_id, message.name, message.sender) == ("other", "Greeting", "run-1")
    assert (message.body, message.expires_at, message.policy) == (b'{"text":"hello"}', 1_060.0, "dead_letter")
    assert play.turn.busy
    check_replay(play)


def test_send_is_repeated_identically_after_a_crash_until_it_completes():
    play = Play(sending).begin()
    play.now = 1_030.0
    cold = crashed(play)
    assert [work_of(effect, SendEvent).message.id for effect in cold.turn.effects] == ["sent/run-1/0/Greeting"]
    cold.apply_effect("Greeting")
    [effect] = cold.turn.effects
    work_of(effect, BroadcastEvent)
    again = crashed(cold)
    assert [effect.location for effect in again.turn.effects] == ["news"]


def test_broadcast_returns_how_many_runs_it_woke():
    play = Play(sending).begin()
    play.apply_effect("Greeting")
    sent = work_of(play.effects["news"], BroadcastEvent).event
    assert (sent.topic, sent.id, sent.body) == ("news", "sent/run-1/0/news", b'{"n":1}')
    assert sent.event_id == "run-1/0/news"
    play.apply_effect("news", 3)
    assert play.value == 3
    assert play.replayed_by(sending).begin().value == 3


def test_broadcast_event_has_the_delivery_options_of_its_type():
    async def greeting(ctx):
        await ctx.broadcast(Greeting("all"))

    play = Play(greeting).begin()
    sent = work_of(play.effects["Greeting"], BroadcastEvent).event
    assert (sent.delivery, sent.consume, sent.expires_at) == ("all", True, 1_060.0)


def test_workflow_can_choose_the_event_id():
    async def named(ctx):
        await ctx.send("other", "a", 1, event_id="mine")
        await ctx.broadcast("a", 1, event_id="ours")

    play = Play(named, generation=3).begin()
    message = work_of(play.effects["a"], SendEvent).message
    assert (message.id, message.event_id) == ("event/mine", "mine")
    play.apply_effect("a")
    event = work_of(play.effects["a#1"], BroadcastEvent).event
    assert (event.id, event.event_id) == ("event/ours", "ours")


@pytest.mark.parametrize("error", [RunNotFound("other"), RunTerminated("other", "succeeded")])
def test_error_of_a_send_is_raised_unchanged(error):
    async def careful(ctx):
        try:
            await ctx.send("other", "a")
        except type(error) as caught:
            await fetch("caught")
            return str(caught)

    play = Play(careful).begin()
    play.apply_effect("a", error=error)
    check_replay(play)
    play = crashed(play)
    play.complete()
    assert play.value == str(error)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda ctx: ctx.send("other", 5), "WorkflowMisuse"),
        (lambda ctx: ctx.send("other", Greeting), "WorkflowMisuse"),
        (lambda ctx: ctx.send("", "a"), "InvalidArgument"),
        (lambda ctx: ctx.send("other", Greeting("x"), 5), "InvalidArgument"),
        (lambda ctx: ctx.send("other", "a", object()), "InvalidPayload"),
        (lambda ctx: ctx.broadcast("a", 1, event_id=""), "InvalidArgument"),
    ],
)
def test_value_that_is_not_an_event_is_rejected_before_anything_is_written(call, error):
    async def wrong(ctx):
        await call(ctx)

    play = Play(wrong).run()
    assert play.failure.type == error
    assert play.rows == []


@pytest.mark.parametrize("seed", SEEDS)
def test_concurrent_sends_happen_once(seed):
    async def busy(ctx):
        await ctx.join(ctx.send("x", "a", 1), fetch(1), ctx.send("y", "a", 2), ctx.broadcast("b"))
        winner, _ = await ctx.race(ctx.send("z", "a", 3), ctx.sleep(3))
        await fetch(winner)
        return "fine"

    play = run_with_crashes(busy, seed=seed)
    assert play.value == "fine"


def test_send_cancelled_in_the_turn_of_its_request_never_happens():
    async def raced(ctx):
        async def at_once():
            return None

        await ctx.race(at_once(), ctx.send("x", "a", 1))
        await ctx.sleep(1)

    play = Play(raced).begin()
    assert play.effects == {}
    check_replay(play)
