"""Receiving: which message completes which receive, and what happens to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from perdure import Context, event
from perdure.codec import JSON
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.records import EntryStatus, Subscription
from perdure.model.turns import MessageReceived
from perdure.workflows.messages import received_messages
from tests.runner.crash_after_every_turn import crashed, run_with_crashes
from tests.runner.turn_driver import CLOCK, Play, note
from tests.runner.workflows import fetch

SEEDS = range(12)


@event
class Paid:
    cents: int


@event(name="orders.shipped")
@dataclass
class Shipped:
    by: str


async def one_of_two(ctx: Context) -> Any:
    got = await ctx.receive(Paid, Shipped)
    return [type(got).__name__, got]


async def three_in_a_row(ctx: Context) -> Any:
    return [await ctx.receive("a", "b") for _ in range(3)]


def subscribed(play: Play) -> list[Subscription]:
    return list(play.turn.extras.subscribe) if play.turn.extras else []


def unsubscribed(play: Play) -> list[str]:
    return list(play.turn.extras.unsubscribe) if play.turn.extras else []


def returned(play: Play) -> list[int]:
    return list(play.turn.extras.released_assignments) if play.turn.extras else []


def letters(play: Play) -> list[Any]:
    return [letter for extras in play.extras for letter in extras.dead_letters]


# --- one receive


@pytest.mark.parametrize(
    ("sent", "value", "got"),
    [("Paid", {"cents": 5}, ["Paid", {"cents": 5}]), ("orders.shipped", {"by": "sea"}, ["Shipped", {"by": "sea"}])],
)
def test_receive_returns_an_instance_of_any_of_its_event_types(sent, value, got):
    play = Play(one_of_two).begin()
    assert [(wait.kind, wait.name) for wait in play.turn.waits] == [("event", "Paid,orders.shipped")]
    play.send(sent, value)
    assert play.value == got


def test_receive_by_name_returns_the_json_value():
    async def plain(ctx):
        return await ctx.receive("orders.paid")

    play = Play(plain).begin()
    play.send("orders.paid", {"cents": [1, 2]})
    assert play.value == {"cents": [1, 2]}


def test_message_is_received_and_consumed_in_one_turn():
    async def two(ctx):
        got = await ctx.receive("a")
        await ctx.receive("b")
        return got

    play = Play(two).begin()
    turn = play.send("a", 1)
    assert turn.consumed == (1,)
    assert [(row.location, row.status, row.value) for row in turn.entries] == [
        ("a", EntryStatus.SUCCEEDED, b"1"),
        ("b", EntryStatus.PENDING, None),
    ]
    assert [message.number for message in received_messages(play.entries["a"])] == [1]
    assert play.entries["a"].seq == 1


def test_event_without_a_receive_stays_in_the_mailbox_and_writes_nothing():
    async def other(ctx):
        await ctx.receive("b")

    play = Play(other).begin()
    turn = play.send("a", 1)
    assert (turn.entries, turn.consumed, turn.extras) == ((), (), None)
    assert play.inbox.keys() == {1}


def test_receive_subscribes_in_the_turn_that_suspends_and_unsubscribes_in_the_turn_that_completes_it():
    play = Play(three_in_a_row).begin()
    assert subscribed(play) == [Subscription("0/a,b", ("a", "b"))]
    play.send("a", 1)
    assert (unsubscribed(play), subscribed(play)) == (["0/a,b"], [Subscription("0/a,b#1", ("a", "b"))])
    play.send("b", 2)
    play.send("a", 3)
    assert (unsubscribed(play), subscribed(play)) == (["0/a,b#2"], [])
    assert play.value == [1, 2, 3]


def test_receive_completed_in_the_turn_of_its_request_never_subscribes():
    play = Play(three_in_a_row)
    play.add_message("event", "b", 1)
    play.add_message("event", "a", 2)
    play.begin()
    assert play.turn.consumed == (1, 2)
    assert [each.target for each in subscribed(play)] == ["0/a,b#2"]
    assert unsubscribed(play) == []


def test_receive_requested_and_completed_in_one_turn_has_no_other_effects():
    async def both(ctx):
        got = await ctx.receive("a")
        await ctx.sleep(5)
        return got

    play = Play(both)
    play.add_message("event", "a", 1)
    assert play.begin().turn.extras is None


def test_replay_does_not_subscribe_again():
    play = Play(three_in_a_row).begin()
    play.send("a", 1)
    cold = play.crash().begin()
    assert cold.turn.extras is None


@pytest.mark.parametrize("seed", SEEDS)
def test_messages_are_received_in_the_order_of_sending_across_names(seed):
    events = [("b", 1), ("a", 2), ("c", 9), ("a", 3)]
    play = run_with_crashes(three_in_a_row, seed=seed, events=events)
    assert play.value == [1, 2, 3]
    assert [message.name for message in play.inbox.values()] in (["c"], [])


def test_oldest_open_receive_of_a_name_gets_the_message():
    async def open_three(ctx):
        async def waiting(number):
            note([number, await ctx.receive("a")])

        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(waiting(number))

    play = Play(open_three).begin()
    play.send("a", "first")
    play = crashed(play)
    play.advance(
        MessageReceived(play.add_message("event", "a", "second")),
        MessageReceived(play.add_message("event", "a", "third")),
    )
    assert play.notes == [[0, "first"], [1, "second"], [2, "third"]]


def test_receive_of_other_names_does_not_take_a_message_for_another_receive():
    async def two(ctx):
        return await ctx.join(a=ctx.receive("a"), b=ctx.receive("b"), any=ctx.receive("a", "b"))

    play = Play(two).begin()
    play.send("b", 1)
    play.send("b", 2)
    play.send("a", 3)
    assert play.value == {"a": 3, "b": 1, "any": 2}


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_race_of_two_receives_is_won_by_the_event_sent_first(when):
    async def raced(ctx):
        await fetch("work")
        return await ctx.race(a=ctx.receive("a"), b=ctx.receive("b"))

    play = Play(raced).begin()
    if when == "meanwhile":
        play.complete()
    first, second = play.add_message("event", "b", 1), play.add_message("event", "a", 2)
    play.advance(MessageReceived(first), MessageReceived(second))
    if when == "before":
        play.complete()
    assert play.value == ["b", 1]
    assert play.inbox.keys() == {2}


def test_each_receive_returns_a_new_object():
    async def same(ctx):
        first, second = await ctx.receive("a"), await ctx.receive("a")
        first.append("mine")
        return second

    play = Play(same).begin()
    play.send("a", [])
    play.send("a", [])
    assert play.value == []


def test_receive_rejects_types_that_are_not_events():
    async def wrong(ctx):
        await ctx.receive(int)

    async def nothing(ctx):
        await ctx.receive()

    assert Play(wrong).begin().failure.type == WorkflowMisuse.__name__
    assert Play(nothing).begin().failure.type == InvalidArgument.__name__


# --- timeouts


async def in_time(ctx: Context, seconds: float) -> Any:
    try:
        return await ctx.receive("a", timeout=seconds)
    except TimeoutError as error:
        return str(error)


def test_receive_times_out_at_a_durable_deadline():
    play = Play(in_time, 30.0).begin()
    assert play.turn.wake_at == 1_030.0
    assert [(wait.kind, wait.name, wait.until) for wait in play.turn.waits] == [("event", "a", 1_030.0)]
    cold = crashed(play)
    assert cold.turn.wake_at == 1_030.0
    cold.advance(now=1_030.0)
    assert cold.value == "no a arrived within 30.0 seconds"
    assert unsubscribed(cold) == ["0/a"]
    assert cold.replayed_by(in_time, 30.0).begin().value == cold.value


@pytest.mark.parametrize("seed", SEEDS)
def test_message_after_the_timeout_stays_in_the_mailbox(seed):
    async def twice(ctx):
        try:
            first = await ctx.receive("a", timeout=5)
        except TimeoutError:
            first = "nothing"
        return [first, await ctx.receive("a")]

    play = run_with_crashes(twice, seed=seed, events=[("a", 1), ("a", 2)])
    assert play.value in (["nothing", 1], [1, 2])


def test_receive_with_zero_timeout_returns_a_pending_message():
    play = Play(in_time, 0.0)
    play.add_message("event", "a", 1)
    assert play.begin().value == 1


def test_receive_with_zero_timeout_times_out_after_its_topics_were_read():
    play = Play(in_time, 0.0).begin()
    assert play.alive
    assert play.turn.wake_at == play.now
    assert (subscribed(play), unsubscribed(play)) == ([Subscription("0/a", ("a",))], [])
    play.move(CLOCK)
    assert play.value == "no a arrived within 0.0 seconds"
    assert unsubscribed(play) == ["0/a"]


def test_message_in_the_turn_of_the_timeout_is_received():
    play = Play(in_time, 30.0).begin()
    play.send("a", 1, now=1_030.0)
    assert play.value == 1


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon"])
def test_invalid_timeout_is_rejected(timeout):
    async def bad(ctx):
        await ctx.receive("a", timeout=timeout)

    assert Play(bad).begin().failure.type == InvalidArgument.__name__


# --- topics


def test_assignment_completes_its_target_receive():
    play = Play(three_in_a_row).begin()
    turn = play.post("assignment", "b", "from the topic", target="0/a,b", offset=4)
    assert turn.consumed == (1,)
    assert returned(play) == []
    assert unsubscribed(play) == ["0/a,b"]
    assert received_messages(play.entries["a,b"])[0].offset == 4
    assert crashed(play).waits == [("a,b#1", None)]


def test_mailbox_has_priority_over_topics():
    play = Play(three_in_a_row).begin()
    topic = play.add_message("assignment", "a", "topic", target="0/a,b")
    direct = play.add_message("event", "a", "mail")
    turn = play.advance(MessageReceived(topic), MessageReceived(direct))
    assert (turn.consumed, returned(play)) == ((2,), [1]), "the mailbox completed the receive"
    assert subscribed(play) == [Subscription("0/a,b#1", ("a", "b"))]


@pytest.mark.parametrize("how", ["given up", "timed out", "completed", "another generation", "nothing there"])
def test_assignment_without_an_open_receive_is_released(how):
    async def giving_up(ctx):
        try:
            await ctx.race(event=ctx.receive("a", timeout=5), stop=ctx.receive("stop"))
        except Exception as error:
            note(type(error).__name__)
        await ctx.receive("end")

    play = Play(giving_up).begin()
    if how == "given up":
        play.send("stop")
    if how == "completed":
        play.send("a")
    if how == "timed out":
        play.advance(now=1_005.0)
    target = {"another generation": "3/race/event/a", "nothing there": "0/b"}.get(how, "0/race/event/a")
    number = play.message_count + 1
    turn = play.post("assignment", "a", 1, target=target)
    assert (turn.consumed, returned(play)) == ((), [number])
    assert play.inbox == {}


def test_assignment_in_the_turn_that_cancels_the_receive_is_released_in_that_turn():
    async def giving_up(ctx):
        await ctx.race(event=ctx.receive("a"), stop=ctx.receive("stop"))
        await ctx.receive("end")

    play = Play(giving_up).begin()
    stop, late = play.add_message("event", "stop"), play.add_message("assignment", "a", 1, target="0/race/event/a")
    turn = play.advance(MessageReceived(stop), MessageReceived(late))
    assert (turn.consumed, returned(play)) == ((1,), [2])


def test_assignment_in_the_last_turn_of_the_run_is_released():
    async def ends(ctx):
        async def other():
            await ctx.receive("a")

        asyncio.create_task(other())  # noqa: RUF006 - left open on purpose
        return await ctx.receive("stop")

    play = Play(ends).begin()
    stop, late = play.add_message("event", "stop", 1), play.add_message("assignment", "a", 1, target="0/other/a")
    play.advance(MessageReceived(stop), MessageReceived(late))
    assert play.value == 1
    assert (play.turn.consumed, returned(play)) == ((1,), [2])
    assert unsubscribed(play) == ["0/stop", "0/other/a"]


def test_assignment_for_a_crashed_run_completes_the_receive_after_loading():
    play = Play(three_in_a_row).begin()
    play.add_message("assignment", "a", "topic", target="0/a,b")
    cold = crashed(play)
    assert cold.turn.consumed == (1,)


# --- messages that cannot be received


def test_expired_message_is_consumed_without_effect():
    play = Play(three_in_a_row).begin()
    play.advance(now=1_010.0)
    turn = play.send("a", "old", expires_at=1_010.0)
    assert (turn.consumed, turn.entries) == ((1,), ())
    turn = play.send("a", "fresh", expires_at=1_010.5)
    assert turn.consumed == (2,)
    assert play.entries["a,b"].value == b'"fresh"'
    assert letters(play) == []


def test_expired_assignment_is_consumed_and_the_receive_subscribes_again():
    play = Play(three_in_a_row).begin()
    turn = play.post("assignment", "a", "old", target="0/a,b", expires_at=999.0)
    assert (turn.consumed, returned(play)) == ((1,), [])
    assert subscribed(play) == [Subscription("0/a,b", ("a", "b"))]
    assert play.waits == [("a,b", None)]


def test_payload_of_the_wrong_type_becomes_a_dead_letter_and_the_run_keeps_waiting():
    play = Play(one_of_two).begin()
    turn = play.send("Paid", {"cents": "many"}, id="e-1", sent_at=990.0)
    assert (turn.consumed, turn.entries) == ((1,), ())
    [letter] = letters(play)
    assert (letter.kind, letter.event_id, letter.event_name, letter.sent_at) == ("event", "e-1", "Paid", 990.0)
    assert (letter.original_target, letter.value) == ("run-1", JSON.encode({"cents": "many"}))
    assert "cents" in letter.reason
    assert subscribed(play) == [], "its subscription stands"
    play = crashed(play)
    play.send("Paid", {"cents": 1})
    assert play.value == ["Paid", {"cents": 1}]
    assert len(letters(play)) == 1


def test_assignment_of_the_wrong_type_becomes_a_dead_letter_and_the_receive_subscribes_again():
    play = Play(one_of_two).begin()
    turn = play.post("assignment", "Paid", "nonsense", target="0/Paid,orders.shipped")
    assert (turn.consumed, returned(play)) == ((1,), [])
    assert [letter.event_name for letter in letters(play)] == ["Paid"]
    assert subscribed(play) == [Subscription("0/Paid,orders.shipped", ("Paid", "orders.shipped"))]


def test_message_of_the_wrong_type_is_skipped_for_a_matching_one():
    play = Play(one_of_two)
    for value in ({"cents": None}, {"cents": 7}):
        play.add_message("event", "Paid", value)
    play.begin()
    assert play.value == ["Paid", {"cents": 7}]
    assert play.turn.consumed == (1, 2)
    assert len(letters(play)) == 1


# --- races


@pytest.mark.parametrize("seed", SEEDS)
def test_losing_receive_of_a_race_consumes_no_message(seed):
    async def raced(ctx):
        winner, value = await ctx.race(event=ctx.receive("a"), other=ctx.receive("b"), limit=ctx.sleep(5))
        return [winner, value, await ctx.receive_batch("a", "b", timeout=0)]

    play = run_with_crashes(raced, seed=seed, events=[("a", 1), ("b", 2)])
    winner, value, rest = play.value
    got = ([value] if winner != "limit" else []) + rest
    assert sorted(got + [JSON.decode(message.body or b"") for message in play.inbox.values()]) == sorted(
        [1, 2][: play.message_count]
    )


def test_receive_in_wait_for_that_timed_out_consumes_no_message():
    async def waited(ctx):
        try:
            await asyncio.wait_for(ctx.receive("a"), 5)
        except TimeoutError:
            note("too late")
        return await ctx.receive("a")

    play = Play(waited).begin()
    play.advance(now=1_005.0)
    assert unsubscribed(play) == ["0/a"]
    play = crashed(play)
    play.send("a", 1)
    assert (play.notes, play.value) == (["too late"], 1)


def test_cancelled_receive_is_unsubscribed():
    async def waiting(ctx):
        await ctx.receive("a")

    play = Play(waiting).begin()
    play.cancel()
    assert unsubscribed(play) == ["0/a"]
    assert play.entries["a"].status is EntryStatus.CANCELLED


# --- batches


async def batch_of_three(ctx: Context) -> Any:
    await fetch("work")
    return await ctx.receive_batch("a", "b", max=3, timeout=60)


def test_batch_returns_pending_messages_in_order_up_to_max():
    play = Play(batch_of_three).begin()
    for number, name in enumerate("abaab"):
        play.send(name, number)
    turn = play.complete("fetch")
    assert play.value == [0, 1, 2]
    assert turn.consumed == (1, 2, 3)
    assert [message.number for message in received_messages(play.entries["a,b"])] == [1, 2, 3]


def test_batch_waits_for_the_first_message_and_is_empty_on_timeout():
    play = Play(batch_of_three).begin()
    play.complete("fetch")
    assert subscribed(play) == [Subscription("0/a,b", ("a", "b"))]
    late = play.replayed_by(batch_of_three).begin()
    play.send("b", 1)
    assert play.value == [1]
    late.advance(now=late.turn.wake_at)
    assert late.value == []
    assert late.replayed_by(batch_of_three).begin().value == []


def test_batch_takes_topic_events_if_the_mailbox_is_empty():
    play = Play(batch_of_three).begin()
    play.complete("fetch")
    play.post("assignment", "b", "topic", target="0/a,b")
    assert play.value == ["topic"]


def test_batch_skips_messages_of_the_wrong_type():
    async def typed(ctx):
        return [each.cents for each in await ctx.receive_batch(Paid)]

    play = Play(typed)
    for value in ({"cents": 1}, {"cents": "x"}, {"cents": 3}):
        play.add_message("event", "Paid", value)
    play.begin()
    assert (play.value, sorted(play.turn.consumed), len(letters(play))) == ([1, 3], [1, 2, 3], 1)


def test_batch_with_max_zero_is_rejected():
    async def none(ctx):
        await ctx.receive_batch("a", max=0)

    assert Play(none).begin().failure.type == InvalidArgument.__name__


@pytest.mark.parametrize("seed", SEEDS)
def test_batches_neither_lose_nor_repeat_messages(seed):
    async def batches(ctx):
        got: list[Any] = []
        while len(got) < 7:
            got += await ctx.receive_batch("a", max=3, timeout=2)
        return got

    play = run_with_crashes(batches, seed=seed, events=[("a", number) for number in range(7)])
    if play.turn.outcome is not None:
        assert play.value == list(range(7))


# --- requests


async def replying(ctx: Context) -> Any:
    request = await ctx.receive_request(Paid, timeout=10)
    note(request.event_id)
    await request.reply({"thanks": request.value.cents})
    return repr(request)


def test_reply_to_a_request_is_published_for_its_sender():
    play = Play(replying).begin()
    turn = play.send("Paid", {"cents": 3}, id="r-1", wants_reply=True)
    assert play.value == "<request Paid r-1>"
    assert turn.extras is not None
    [shown] = turn.extras.published
    assert (shown.key, JSON.decode(shown.value)) == ("~reply/r-1", {"thanks": 3})
    assert shown.expires_at == 1_000.0 + 7 * 86_400
    assert [(row.location, row.kind) for row in play.entries.values()] == [
        ("Paid", "receive_request"),
        ("Paid:reply", "reply"),
    ]


def test_reply_to_an_event_without_a_waiting_sender_is_not_published():
    play = Play(replying).begin()
    play.send("Paid", {"cents": 3})
    assert play.turn.extras is not None
    assert play.turn.extras.published == ()


def test_receive_request_times_out():
    play = Play(replying).begin()
    play.advance(now=1_010.0)
    assert play.failure.type == "TimeoutError"


@pytest.mark.parametrize("seed", SEEDS)
def test_reply_is_published_once_after_crashes(seed):
    async def serving(ctx):
        for _ in range(2):
            request = await ctx.receive_request("request")
            await fetch(request.value)
            await request.reply(request.value)
            await fetch("after")

    def request_event(number: int) -> Callable[[Play], Any]:
        return lambda play: play.send("request", number, wants_reply=True)

    play = run_with_crashes(serving, seed=seed, events=[request_event(number) for number in range(2)])
    shown = [(each.key, each.value) for extras in play.extras for each in extras.published]
    assert shown == [("~reply/m1", b"0"), ("~reply/m2", b"1")]


# --- mixed


@pytest.mark.parametrize("seed", range(30))
def test_every_event_is_received_once_or_still_in_the_mailbox(seed):
    async def mixture(ctx):
        got = []

        async def single(name):
            try:
                got.append(await ctx.receive(name, timeout=3))
            except TimeoutError:
                note("nothing")
            await fetch(name)

        for _ in range(2):
            await ctx.join(single("a"), single("b"), single("a"))
            winner, value = await ctx.race(ctx.receive("a", "b"), ctx.sleep(2))
            got += [value] if winner == 0 else await ctx.receive_batch("a", "b", max=2, timeout=0)
        return got

    events = [("ab"[number % 2], number) for number in range(6)]
    play = run_with_crashes(mixture, seed=seed, events=events)
    left = [JSON.decode(message.body or b"") for message in play.inbox.values()]
    assert sorted(play.value + left) == list(range(play.message_count))
