"""Dead letters are stored until a caller replays or removes them, once."""

import asyncio

import pytest

from perdure import EngineConfig, QueueFull, RunNotFound, RunTerminated, WorkflowMisuse, event
from perdure.model.records import DeadLetter
from perdure.model.turns import TurnExtras
from tests.engine.store_matrix import on_every_store
from tests.engine.store_setup import Stage


@event
class Lost:
    n: int


def dead_letter(id, name="Lost", kind="event", value: bytes | None = b'{"n":1}'):
    return DeadLetter(id=id, kind=kind, at=1.0, reason="why", event_id=f"e-{id}", event_name=name, value=value)


async def setup(h, *dead_letters):
    stage, client = Stage(h), await h.client()
    await stage.run("r")
    await stage.turn("r", extras=TurnExtras(dead_letters=dead_letters))
    return stage, client


@on_every_store
async def test_dead_letters_are_filtered_by_event_and_kind_in_pages(h):
    poison = DeadLetter(id="p", kind="poison", at=1.0, reason="died")
    _, client = await setup(h, dead_letter("a"), dead_letter("b", "other"), poison, dead_letter("c"))
    assert [each.id for each in await client.dead_letters()] == ["a", "b", "p", "c"]
    assert [each.id for each in await client.dead_letters(Lost)] == ["a", "c"]
    assert [each.id for each in await client.dead_letters("other")] == ["b"]
    assert [each.id for each in await client.dead_letters(kind="poison")] == ["p"]
    assert [each.id for each in await client.dead_letters(limit=2, after="a")] == ["b", "p"]
    assert (await client.dead_letters())[0].value == {"n": 1}
    with pytest.raises(WorkflowMisuse):
        await client.dead_letters(7)


@on_every_store
async def test_dead_letter_is_replayed_to_its_topic_once(h):
    stage, client = await setup(h, dead_letter("a"))
    await stage.waiting("w", "Lost")
    results = await h.drive(asyncio.gather(*(client.replay_dead_letter("a") for _ in range(3))))
    assert sorted(results) == [False, False, True]
    assert await stage.inbox("w") == [("assignment", "Lost", b'{"n":1}')]
    assert await h.store.topic("Lost") != []  # it stays until it is received
    assert len(await h.store.topic("Lost")) == 1
    assert await client.dead_letters() == []
    assert await client.replay_dead_letter("a") is False


@on_every_store
async def test_replay_to_a_run_raises_what_send_raises(h):
    stage, client = await setup(h, dead_letter("a"), dead_letter("b"))
    await stage.run("ended")
    await stage.end("ended")
    with pytest.raises(RunTerminated):
        await client.replay_dead_letter("a", to="ended")
    with pytest.raises(RunNotFound):
        await client.replay_dead_letter("a", to="unknown")
    assert [each.id for each in await client.dead_letters()] == ["a", "b"]
    assert await client.replay_dead_letter("a", to="r") is True
    (message,) = await h.store.inbox("r")
    assert (message.event_id, message.name, message.policy) == ("e-a", "Lost", "dead_letter")
    with pytest.raises(WorkflowMisuse):
        await client.replay_dead_letter("b", to="")
    assert [each.id for each in await client.dead_letters()] == ["b"]


@on_every_store
async def test_dead_letter_stays_if_its_topic_is_full(h):
    await setup(h, dead_letter("a"))
    client = await h.client(config=EngineConfig(max_pending_events=1))
    await client.broadcast(Lost(0))
    with pytest.raises(QueueFull):
        await client.replay_dead_letter("a")
    assert len(await client.dead_letters()) == 1


@on_every_store
async def test_dead_letter_without_an_event_cannot_be_replayed(h):
    poison = DeadLetter(id="p", kind="poison", at=1.0, reason="died")
    _, client = await setup(h, poison)
    with pytest.raises(WorkflowMisuse, match="remove"):
        await client.replay_dead_letter("p")
    assert await client.remove_dead_letter("p") is True
    assert await client.remove_dead_letter("p") is False
