"""Events without a reader: unread messages of an ended run, and payloads that do not match their type."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from perdure import (
    Context,
    Engine,
    EngineConfig,
    InvalidPayload,
    RunNotFound,
    RunStatus,
    RunTerminated,
    WorkflowMisuse,
    event,
    step,
    workflow,
)
from perdure.clock import to_datetime
from tests.engine.store_matrix import everything_in, on_every_store

LONG = EngineConfig(sweep_interval=1000.0, lease=5000.0)  # nothing in these tests is found by a sweep


@event
class Dropped:
    n: int


@event(on_target_terminated="broadcast")
class Moved:
    n: int


@event(on_target_terminated="dead_letter")
class Kept:
    n: int


@event(on_target_terminated="dead_letter", expire_after=20.0)
class KeptBriefly:
    n: int


@dataclass
class Misfit:
    n: str


@workflow
async def letters_target(ctx: Context) -> str:
    await ctx.receive("end")
    return "ended"


@workflow
async def letters_reader(ctx: Context, count: int, timeout: float = 300.0) -> list[Any]:
    """Receive `count` events, with None for a timeout."""
    found: list[Any] = []
    for _ in range(count):
        try:
            found.append((await ctx.receive(Moved, Kept, Dropped, timeout=timeout)).n)
        except TimeoutError:
            found.append(None)
    return found


async def unread(h, engine, *events, id="target"):
    """Start a run with these unread messages."""
    run = await engine.start(letters_target, id=id)
    for number, each in enumerate(events):
        await run.send(each, event_id=f"e-{number}")
    await h.settle()
    return run


# --- on_target_terminated


@on_every_store
async def test_unread_events_follow_the_policy_of_their_type(h):
    engine = await h.engine(letters_target, letters_reader, config=LONG)
    run = await unread(h, engine, Dropped(1), Moved(2), Kept(3), Moved(4))
    reader = await engine.start(letters_reader, 3)
    await h.settle()
    sent_at = h.clock.now()
    await h.clock.advance(10.0)
    await run.send("end")
    await h.settle()
    (letter,) = await engine.dead_letters()
    assert (letter.kind, letter.event_id, letter.event_name, letter.value) == ("event", "e-2", "Kept", {"n": 3})
    assert (letter.original_target, letter.target_status) == ("target", "succeeded")
    assert (letter.target_ended_at, letter.sent_at) == (to_datetime(h.clock.now()), to_datetime(sent_at))
    assert letter.id
    assert letter.reason
    assert await h.run_to_end(reader) == [2, 4, None]
    assert await h.store.unfinalized() == []
    assert await h.store.inbox("target") == []
    assert [each for name in ("Dropped", "Moved", "Kept") for each in await h.store.topic(name)] == []


@pytest.mark.parametrize("how", ["cancel", "terminate"])
@on_every_store
async def test_messages_of_a_terminated_run_are_finalized(h, how):
    engine = await h.engine(letters_target, letters_reader, config=LONG)
    run = await unread(h, engine, Moved(1), Kept(2))
    await getattr(engine, how)(run.id)
    await h.settle()
    (letter,) = await engine.dead_letters(Kept)
    assert letter.target_status == "cancelled"
    assert [each.topic for each in await h.store.topic("Moved")] == ["Moved"]


@on_every_store
async def test_messages_of_a_never_executed_run_are_finalized(h):
    client = await h.client()
    run = await client.start(letters_target)
    await run.send(Kept(1))
    await run.cancel()
    engine = await h.engine(letters_reader)
    await h.clock.advance(6)
    assert [letter.event_name for letter in await engine.dead_letters()] == ["Kept"]


@on_every_store
async def test_an_event_that_moves_to_its_topic_waits_there_for_a_later_reader(h):
    engine = await h.engine(letters_target, letters_reader, config=LONG)
    run = await unread(h, engine, Moved(1))
    await run.send("end")
    await h.settle()
    await h.clock.advance(100.0)
    assert await h.run_to_end(await engine.start(letters_reader, 1)) == [1]


@on_every_store
async def test_expired_unread_event_becomes_no_dead_letter(h):
    engine = await h.engine(letters_target, config=LONG)
    run = await unread(h, engine, KeptBriefly(1))
    await h.clock.advance(21.0)
    await run.send("end")
    await h.settle()
    assert await engine.dead_letters() == []
    assert await h.store.unfinalized() == []


@on_every_store
async def test_messages_survive_a_run_retry(h):
    @workflow
    async def letters_continues(ctx: Context, round: int) -> list[int]:
        if round == 0:
            await ctx.sleep(10)
            await ctx.continue_as(1)
        return [(await ctx.receive(Kept)).n, (await ctx.receive(Kept)).n]

    engine = await h.engine(letters_continues, config=LONG)
    run = await engine.start(letters_continues, 0)
    await run.send(Kept(1))
    await run.send(Kept(2))
    assert await h.run_to_end(run) == [1, 2]
    assert await engine.dead_letters() == []


@on_every_store
async def test_finalization_survives_a_crash_at_every_commit(h):
    async def scenario(engine: Engine, name: str) -> None:
        """The calls of a client, which repeats them under the same ids after a crash."""
        await engine.start(letters_target, id=name)
        for number, each in enumerate((Dropped(1), Moved(2), Kept(3), Moved(4))):
            await engine.send(name, each, event_id=f"e-{number}")
        await engine.send(name, "end", event_id="end")
        await engine.result(name)

    async def check(engine: Engine, name: str) -> None:
        assert await h.store.unfinalized() == []
        letters = await engine.dead_letters()
        assert [(each.original_target, each.value) for each in letters] == [(name, {"n": 3})]
        assert await engine.remove_dead_letter(letters[0].id)
        reader = await engine.start(letters_reader, 3, 5.0)
        assert await h.run_to_end(reader) == [2, 4, None]

    assert await crash_at_every_commit(h, scenario, check) >= 6


async def crash_at_every_commit(
    h: Any, scenario: Callable[[Engine, str], Awaitable[None]], check: Callable[[Engine, str], Awaitable[None]]
) -> int:
    """Run a scenario with a crash before and after each commit, and finalize; return the number of commits."""
    n = 0
    while True:
        n += 1
        for side in ("before", "after"):
            name = f"target-{n}-{side}"
            dying = await h.engine(letters_target, letters_reader)
            dying.faults.crash(n, side)
            await h.drive_until_crash(dying, scenario(dying, name))
            await h.clock.advance(6)
            crashed = dying.faults.crashed.is_set()
            await h.crash(dying)
            engine = await h.engine(letters_target, letters_reader)
            await h.drive(scenario(engine, name))
            await h.clock.advance(6)
            await check(engine, name)
            await h.drive(engine.shutdown())
        if not crashed:
            return n


# --- payloads that do not fit


@on_every_store
async def test_message_of_the_wrong_type_is_dead_lettered_and_the_run_keeps_waiting(h):
    engine = await h.engine(letters_reader, config=LONG)
    run = await engine.start(letters_reader, 1)
    await h.settle()
    sent_at = h.clock.now()
    await run.send("Kept", {"n": "seven"}, event_id="bad")
    await h.settle()
    assert await run.status() is RunStatus.SUSPENDED
    (letter,) = await engine.dead_letters(Kept)
    assert (letter.kind, letter.event_id, letter.event_name, letter.value) == ("event", "bad", "Kept", {"n": "seven"})
    assert (letter.original_target, letter.sent_at) == (run.id, to_datetime(sent_at))
    assert "n" in letter.reason
    assert "int" in letter.reason
    await run.send(Kept(7))
    assert await h.run_to_end(run) == [7]


@on_every_store
async def test_topic_event_of_the_wrong_type_is_dead_lettered_and_the_run_keeps_waiting(h):
    engine = await h.engine(letters_reader, config=LONG)
    run = await engine.start(letters_reader, 2)
    await h.settle()
    await engine.emit("Kept", "no object at all", event_id="bad")
    await engine.emit("Kept", {"n": 1})
    await h.settle()
    (letter,) = await engine.dead_letters(Kept)
    assert (letter.original_target, letter.value) == (run.id, "no object at all")
    assert await engine.broadcast(Kept(2)) == 1  # the receive is subscribed again
    assert await h.run_to_end(run) == [1, 2]
    assert await h.store.topic("Kept") == []


@on_every_store
async def test_receive_batch_skips_an_event_of_the_wrong_type(h):
    @workflow
    async def letters_batch(ctx: Context) -> list[int]:
        return [each.n for each in await ctx.receive_batch(Kept, max=5)]

    client = await h.client()
    run = await client.start(letters_batch)
    for value in ({"n": 1}, {"m": 2}, {"n": 3}):
        await run.send("Kept", value)
    await h.engine(letters_batch)
    assert await h.run_to_end(run) == [1, 3]
    assert [letter.value for letter in await client.dead_letters()] == [{"m": 2}]


@on_every_store
async def test_event_of_the_wrong_type_becomes_one_dead_letter_at_any_crash(h):
    for n in range(1, 4):
        for side in ("before", "after"):
            client = await h.client()
            dying = await h.engine(letters_reader)
            run = await dying.start(letters_reader, 1)
            await h.settle()
            dying.faults.crash(n, side)
            await client.send(run.id, "Kept", {"n": "x"}, event_id="bad")
            await h.settle()
            await client.send(run.id, Kept(5))
            await h.clock.advance(6)
            await h.crash(dying)
            engine = await h.engine(letters_reader)
            assert await h.drive(engine.result(run.id)) == [5]
            (letter,) = await client.dead_letters()
            assert letter.original_target == run.id
            assert await client.remove_dead_letter(letter.id)
            await h.drive(engine.shutdown())


# --- bad input of senders


@on_every_store
async def test_invalid_event_is_refused_by_every_call_and_stores_nothing(h):
    @workflow
    async def letters_misused(ctx: Context) -> list[str]:
        said = []
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: ctx.send("target", Misfit("x")),
            lambda: ctx.send("target", Kept),
            lambda: ctx.send("target", Kept("x")),  # type: ignore[arg-type]
            lambda: ctx.send("target", "n" * 513),
            lambda: ctx.broadcast(7),
            lambda: ctx.receive(Misfit),
            lambda: ctx.receive("n" * 513),
            lambda: ctx.receive(),  # type: ignore[call-overload]
            lambda: ctx.receive_batch(Kept, max=0),
            lambda: ctx.receive(Kept, timeout=-1),
        ]
        for call in calls:
            try:
                await call()
            except (WorkflowMisuse, InvalidPayload) as error:
                said.append(type(error).__name__)
        return said

    engine = await h.engine(letters_target, letters_misused, config=LONG)
    run = await unread(h, engine)
    before = await everything_in(h.store, run.id)
    for call in (
        engine.broadcast,
        lambda wrong: engine.send("target", wrong),
        lambda wrong: engine.request("target", wrong, 1),
    ):
        for wrong in (Misfit("x"), Misfit, Kept, {"n": 1}, 7, None):
            with pytest.raises(WorkflowMisuse):
                await call(wrong)
        with pytest.raises(InvalidPayload):
            await call(Kept("x"))  # type: ignore[arg-type]
    for call in (lambda name: engine.send("target", name, 1), engine.emit, engine.dead_letters):
        for name in ("n" * 513, "", "a\nb"):
            with pytest.raises(WorkflowMisuse):
                await call(name)
    with pytest.raises(WorkflowMisuse):
        await engine.send("target", Kept(1), event_id="i" * 513)
    with pytest.raises(WorkflowMisuse):
        event(name="n" * 513)(Misfit)
    said = await h.run_to_end(await engine.start(letters_misused))
    assert len(said) == 10
    assert await everything_in(h.store, run.id) == before
    assert [each for name in ("Kept", "Misfit") for each in await h.store.topic(name)] == []


@on_every_store
async def test_longest_names_work_in_all_stores(h):
    name = "ü" * 512

    @workflow
    async def letters_long_name(ctx: Context) -> list[Any]:
        return [await ctx.receive(name), await ctx.receive(name)]

    engine = await h.engine(letters_long_name, config=LONG)
    run = await engine.start(letters_long_name)
    await run.send(name, 1, event_id="e" * 512)
    await h.settle()
    assert await engine.emit(name, 2, event_id="e" * 512) == 1
    assert await h.run_to_end(run) == [1, 2]


# --- all kinds of dead letters


@step(retry=None)
async def letters_undo_fails(value: str) -> None:
    raise ValueError("cannot be undone")


@step(compensate=letters_undo_fails)
async def letters_do() -> str:
    return "done"


@step
async def letters_for_ever() -> None:
    await asyncio.Event().wait()


@workflow
async def letters_poison(ctx: Context) -> None:
    await letters_for_ever()


@on_every_store
async def test_dead_letters_of_all_kinds_are_listed_with_their_fields(h):
    @workflow
    async def letters_compensates(ctx: Context) -> None:
        await letters_do()
        raise ValueError("no")

    config = EngineConfig(max_recoveries=1)
    for _ in range(2):  # a run that kills its worker, once more than it may
        dying = await h.engine(letters_poison, config=config)
        await dying.start(letters_poison, id="poison")
        await h.clock.advance(20)
        await h.crash(dying)
    engine = await h.engine(letters_target, letters_compensates, letters_poison, config=config)
    run = await unread(h, engine, Kept(1))
    await run.send("end")
    failing = await engine.start(letters_compensates, id="failing")
    await h.clock.advance(60)
    letters = {letter.kind: letter for letter in await engine.dead_letters()}
    assert set(letters) == {"event", "compensation", "poison"}
    undone, poison = letters["compensation"], letters["poison"]
    assert (undone.original_target, undone.event_name, undone.event_id, undone.sent_at) == (
        failing.id,
        None,
        None,
        None,
    )
    assert "cannot be undone" in undone.reason
    assert (poison.original_target, poison.target_status, poison.target_ended_at) == ("poison", "suspended", None)
    for kind, letter in letters.items():
        assert [each.id for each in await engine.dead_letters(kind=kind)] == [letter.id]
    assert [each.id for each in await engine.dead_letters("Kept")] == [letters["event"].id]
    for letter in (undone, poison):
        with pytest.raises(WorkflowMisuse):
            await engine.replay_dead_letter(letter.id)
        assert await engine.remove_dead_letter(letter.id)
    assert [letter.kind for letter in await engine.dead_letters()] == ["event"]


# --- doing something about them


async def with_letter(h, engine, value=3, id="target"):
    run = await unread(h, engine, Kept(value), id=id)
    await run.send("end")
    await h.settle()
    (letter,) = await engine.dead_letters()
    return letter.id


@on_every_store
async def test_replay_to_a_topic_wakes_a_waiter_and_removes_the_dead_letter(h):
    engine = await h.engine(letters_target, letters_reader, config=LONG)
    letter = await with_letter(h, engine)
    readers = [await engine.start(letters_reader, 1, 20.0) for _ in range(2)]
    await h.settle()
    assert await engine.replay_dead_letter(letter) is True
    assert await engine.replay_dead_letter(letter) is False
    assert await engine.dead_letters() == []
    assert sorted([await h.run_to_end(reader) for reader in readers], key=str) == [[3], [None]]


@on_every_store
async def test_event_replayed_to_a_topic_waits_for_a_reader(h):
    engine = await h.engine(letters_target, letters_reader, config=LONG)
    assert await engine.replay_dead_letter(await with_letter(h, engine)) is True
    assert await h.run_to_end(await engine.start(letters_reader, 1)) == [3]


@on_every_store
async def test_replaying_to_a_run_follows_the_rules_of_send(h):
    engine = await h.engine(letters_target, letters_reader, config=LONG)
    letter = await with_letter(h, engine)
    with pytest.raises(RunNotFound):
        await engine.replay_dead_letter(letter, to="unknown")
    with pytest.raises(RunTerminated):
        await engine.replay_dead_letter(letter, to="target")
    reader, other = [await engine.start(letters_reader, 1, 20.0) for _ in range(2)]
    assert await engine.replay_dead_letter(letter, to=other.id) is True
    assert [await h.run_to_end(each) for each in (reader, other)] == [[None], [3]]


@on_every_store
async def test_replayed_event_that_is_not_received_becomes_a_dead_letter_again(h):
    engine = await h.engine(letters_target, config=LONG)
    letter = await with_letter(h, engine)
    second = await engine.start(letters_target, id="second")
    assert await engine.replay_dead_letter(letter, to="second") is True
    assert await engine.dead_letters() == []
    await second.send("end")
    await h.settle()
    (again,) = await engine.dead_letters(Kept)
    assert (again.original_target, again.value) == ("second", Kept(3))


@on_every_store
async def test_concurrent_replay_or_removal_happens_once(h):
    engine = await h.engine(letters_target, letters_reader, config=LONG)
    clients = [await h.client() for _ in range(2)]
    reader = await engine.start(letters_reader, 2, 20.0)
    letter = await with_letter(h, engine)
    answers = await h.drive(asyncio.gather(*(each.replay_dead_letter(letter) for each in (*clients, engine))))
    assert sorted(answers) == [False, False, True]
    assert await h.run_to_end(reader) == [3, None]
    run = await unread(h, engine, Kept(4), id="again")
    await run.send("end")
    await h.settle()
    (left,) = await engine.dead_letters()
    answers = await h.drive(asyncio.gather(*(each.remove_dead_letter(left.id) for each in clients)))
    assert sorted(answers) == [False, True]


@on_every_store
async def test_dead_letter_replay_is_atomic_at_any_crash(h):
    """Sending and removing are one commit: if it was applied the dead letter is removed, else a retry does both."""
    engine = await h.engine(letters_target, letters_reader, config=LONG)
    for n, (side, to_run) in enumerate((side, to_run) for side in ("before", "after") for to_run in (False, True)):
        run = await unread(h, engine, Kept(n), id=f"target-{n}")
        await run.send("end")
        await h.settle()
        (letter,) = await engine.dead_letters()
        reader = await engine.start(letters_reader, 2, 20.0)
        await h.settle()
        to = reader.id if to_run else None
        dying: Any = await h.client(config=LONG)
        dying._session.store.crash(1, side)
        h.background(dying.replay_dead_letter(letter.id, to))
        await h.settle()
        assert dying._session.store.crashed.is_set()
        assert dying._session.store.commits == 1
        assert await engine.replay_dead_letter(letter.id, to) is (side == "before")
        assert await engine.dead_letters() == []
        await h.clock.advance(6)  # the sweep finds what a dead process left
        assert await h.run_to_end(reader) == [n, None]


@on_every_store
async def test_dead_letter_replay_with_a_lost_response_happens_once(h):
    engine = await h.engine(letters_target, letters_reader, config=LONG)
    for to_run in (False, True):
        letter = await with_letter(h, engine, id=f"target-{to_run}")
        reader = await engine.start(letters_reader, 2, 20.0)
        await h.settle()
        client: Any = await h.client(config=LONG)
        client._session.store.lose_responses(1)
        assert await h.drive(client.replay_dead_letter(letter, reader.id if to_run else None)) is True
        assert await h.run_to_end(reader) == [3, None]
