"""Acceptance in the runner: what a turn with rejected messages contains, and how responses are replayed."""

import asyncio
from typing import Any

import msgspec
import pytest

from perdure import Context, WorkflowMisuse
from perdure.codec import JSON
from perdure.model.records import EntryStatus
from perdure.runner.completions import MAX_IMMEDIATE_PER_TURN
from tests.runner.turn_driver import Play, note


def even(value: int) -> bool:
    note(("accept", value))
    return value % 2 == 0


async def accepting(ctx: Context) -> Any:
    request = await ctx.receive_request("number", accept=even, timeout=10)
    await request.reply(request.value)
    return request.value


def test_rejecting_turn_consumes_the_message_and_records_no_entry():
    play = Play(accepting).begin()
    turn = play.send("number", 1, id="n-1", wants_reply=True)
    assert (turn.entries, turn.consumed, turn.outcome) == ((), (1,), None)
    assert turn.extras is not None
    [published] = turn.extras.published
    assert published.key == "~rejected/n-1"
    assert msgspec.json.decode(published.value) == {
        "event": "number",
        "at": 1_000.0,
        "error": {"type": "RequestRejected", "message": "rejected by even"},
    }
    assert turn.extras.dead_letters == ()
    assert turn.waits[0].until == 1_010.0


def test_replay_does_not_call_accept():
    play = Play(accepting).begin()
    play.send("number", 1, wants_reply=True)
    assert play.notes == [("accept", 1)]
    play = play.crash().begin()
    play.send("number", 2, wants_reply=True)
    assert play.value == 2
    assert play.notes == [("accept", 2)]
    replayed = Play(accepting, rows=play.rows).begin()
    assert replayed.value == 2
    assert replayed.notes == []


def test_turn_with_many_rejected_messages_is_bounded():
    play = Play(accepting)
    for _ in range(2 * MAX_IMMEDIATE_PER_TURN):
        play.add_message("event", "number", 1, wants_reply=True)
    play.begin()
    assert len(play.turn.consumed) == MAX_IMMEDIATE_PER_TURN
    assert play.turn.more


def test_cancelled_response_does_not_count():
    async def cancelled(ctx: Context) -> str:
        request = await ctx.receive_request("number")
        first = asyncio.create_task(request.reply("first"))
        await asyncio.sleep(0)
        first.cancel()
        await request.fail("second")
        with pytest.raises(WorkflowMisuse):
            await request.reply("third")
        return "done"

    play = Play(cancelled).begin()
    turn = play.send("number", 1, id="n-1", wants_reply=True)
    assert play.value == "done"
    assert turn.extras is not None
    assert [each.key for each in turn.extras.published] == ["~rejected/n-1"]
    assert Play(cancelled, rows=play.rows).begin().value == "done"


def test_second_reply_that_an_earlier_version_recorded_is_replayed():
    async def replying_twice(ctx: Context) -> str:
        request = await ctx.receive_request("number")
        await request.reply("first")
        await request.reply("second")
        await ctx.sleep(5)
        return "done"

    async def replying_once(ctx: Context) -> None:
        request = await ctx.receive_request("number")
        await request.reply("first")
        await ctx.sleep(5)

    recorded = Play(replying_once).begin()
    recorded.send("number", 1)
    receive, reply = (each for each in recorded.entries.values() if each.seq is not None)
    first = msgspec.structs.replace(reply, detail=None)
    second = msgspec.structs.replace(
        first,
        location=f"{first.location}#1",
        call_seq=3,
        ordinal=2,
        seq=3,
        value=JSON.encode("second"),
        status=EntryStatus.SUCCEEDED,
    )
    play = Play(replying_twice, rows=[receive, first, second], now=1_000.0).begin()
    assert play.turn.held is None
    play.advance(now=1_005.0)
    assert play.value == "done"
