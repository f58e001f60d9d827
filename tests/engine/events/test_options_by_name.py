"""Options belong to the event's name: sends by name, broadcasts by name, reroutes and replays keep them."""

from typing import Any

import pytest

from perdure import Context, WorkflowMisuse, event, workflow
from perdure.workflows.events import (
    POLICIES,
    EventOptions,
    event_class,
    event_name,
    options_of_name,
    parse_policy,
    policy_text,
)
from tests.engine.store_matrix import on_every_store


@event(name="named.kept", on_target_terminated="dead_letter", delivery="after_create", consume=False)
class Kept:
    n: int


@event(name="named.moved", on_target_terminated="broadcast", consume=False)
class Moved:
    n: int


@event(name="named.moved-to-waiters", on_target_terminated="broadcast", delivery="after_wait")
class MovedToWaiters:
    n: int


@event(name="named.short", expire_after=10, on_target_terminated="dead_letter")
class Short:
    n: int


@event(name="named.shared", consume=False, delivery="after_create")
class Shared:
    n: int


@workflow
async def named_waiting(ctx: Context) -> None:
    await ctx.receive("named.end")


@workflow
async def named_reader(ctx: Context, name: str, timeout: float = 5.0, pause: float = 0.0) -> Any:
    if pause:
        await ctx.sleep(pause)
    try:
        return (await ctx.receive(name, timeout=timeout))["n"]
    except TimeoutError:
        return None


@workflow
async def named_sender(ctx: Context, target: str) -> int:
    await ctx.send(target, "named.kept", {"n": 1})
    return await ctx.broadcast("named.shared", {"n": 2})


async def start_and_end(h, engine, *sends, id="target"):
    """Send events by name to a run, and end it without receiving them."""
    run = await engine.start(named_waiting, id=id)
    for name, value in sends:
        await engine.send(id, name, value)
    await run.send("named.end")
    await h.settle()


@on_every_store
async def test_send_by_name_has_policy_and_expiry_of_the_class(h):
    engine = await h.engine(named_waiting, named_reader)
    await engine.start(named_waiting, id="target")
    await engine.send("target", "named.kept", {"n": 1})
    await engine.send("target", "named.short", {"n": 2})
    await engine.send("target", "named.unknown", {"n": 3})
    kept, short, unknown = await h.store.inbox("target")
    now = h.clock.now()
    assert (kept.policy, kept.expires_at) == ("dead_letter", None)
    assert (short.policy, short.expires_at) == ("dead_letter", now + 10)
    assert (unknown.policy, unknown.expires_at) == ("discard", None)
    await h.clock.advance(11.0)
    await engine.send("target", "named.end")
    await h.settle()
    (dead_letter,) = await engine.dead_letters()
    assert (dead_letter.event_name, dead_letter.value) == ("named.kept", {"n": 1})


@on_every_store
async def test_emit_by_name_has_delivery_and_consume_of_the_class(h):
    engine = await h.engine(named_reader)
    readers = [await engine.start(named_reader, "named.shared", 5.0, 1.0) for _ in range(2)]
    await h.settle()
    await h.clock.advance(0.5)
    assert await engine.emit("named.shared", {"n": 7}) == 0
    await h.clock.advance(0.1)
    late = await engine.start(named_reader, "named.shared")
    assert [await h.run_to_end(each) for each in (*readers, late)] == [7, 7, None]
    assert await engine.emit("named.short", {"n": 8}) == 0
    await h.clock.advance(11.0)
    assert await h.run_to_end(await engine.start(named_reader, "named.short")) is None


@on_every_store
async def test_workflow_sends_by_name_with_the_options_of_the_class(h):
    engine = await h.engine(named_waiting, named_reader, named_sender)
    target = await engine.start(named_waiting, id="target")
    readers = [await engine.start(named_reader, "named.shared") for _ in range(2)]
    await h.settle()
    assert await h.drive(engine.execute(named_sender, "target")) == 2
    await target.send("named.end")
    await h.settle()
    assert [each.event_name for each in await engine.dead_letters()] == ["named.kept"]
    assert [await h.run_to_end(each) for each in readers] == [2, 2]


@pytest.mark.parametrize("by_name", [True, False])
@on_every_store
async def test_rerouted_event_keeps_delivery_and_consume(h, by_name):
    engine = await h.engine(named_waiting, named_reader)
    waiting = [await engine.start(named_reader, name) for name in ("named.moved", "named.moved-to-waiters")]
    run = await engine.start(named_waiting, id="target")
    await h.settle()
    for kind in (Moved, MovedToWaiters):
        await (engine.send("target", event_name(kind), {"n": 1}) if by_name else engine.send("target", kind(1)))
    await run.send("named.end")
    await h.settle()
    assert [await h.run_to_end(each) for each in waiting] == [1, 1]
    later = [await engine.start(named_reader, name) for name in ("named.moved", "named.moved-to-waiters")]
    assert [await h.run_to_end(each) for each in later] == [1, None]  # not consumed; not queued


@on_every_store
async def test_rerouted_event_keeps_its_options_on_a_worker_without_its_class(h, monkeypatch):
    engine = await h.engine(named_waiting, named_reader)
    run = await engine.start(named_waiting, id="target")
    await engine.send("target", Moved(1))
    monkeypatch.setattr("perdure.workflows.events._REGISTERED", {})
    await run.send("named.end")
    await h.settle()
    (moved,) = await h.store.topic("named.moved")
    assert (moved.delivery, moved.consume) == ("all", False)


@on_every_store
async def test_replay_to_the_topic_keeps_delivery_consume_and_expiry(h):
    engine = await h.engine(named_waiting, named_reader)
    early = await engine.start(named_reader, "named.kept", 100.0, 50.0)
    await h.clock.advance(1.0)
    await start_and_end(h, engine, ("named.kept", {"n": 1}), ("named.short", {"n": 2}))
    kept, short = await engine.dead_letters()
    readers = [await engine.start(named_reader, "named.kept") for _ in range(2)]
    await h.settle()
    await h.clock.advance(1.0)
    assert await engine.replay_dead_letter(kept.id)
    await h.settle()
    assert [await h.run_to_end(each) for each in readers] == [1, 1]
    await h.clock.advance(1.0)
    assert await h.run_to_end(await engine.start(named_reader, "named.kept")) is None  # created after the event
    assert await engine.replay_dead_letter(short.id)
    (event,) = await h.store.topic("named.short")
    assert event.expires_at == h.clock.now() + 10  # from the replay on
    assert await h.run_to_end(early) == 1
    assert await engine.dead_letters() == []


@on_every_store
async def test_replay_to_a_run_keeps_policy_and_expiry(h):
    engine = await h.engine(named_waiting, named_reader)
    await start_and_end(h, engine, ("named.kept", {"n": 1}), ("named.short", {"n": 2}))
    await engine.start(named_waiting, id="next")
    for dead_letter in await engine.dead_letters():
        assert await engine.replay_dead_letter(dead_letter.id, to="next")
    kept, short = await h.store.inbox("next")
    assert (kept.policy, kept.expires_at) == ("dead_letter", None)
    assert (short.policy, short.expires_at) == ("dead_letter", h.clock.now() + 10)
    await engine.send("next", "named.end")
    await h.settle()
    assert {each.event_name for each in await engine.dead_letters()} == {"named.kept", "named.short"}


@on_every_store
async def test_name_with_different_options_in_two_modules_is_refused(h):
    define("named.twice", "first", consume=True)
    define("named.twice", "second", consume=True)
    engine = await h.engine(named_waiting)
    await engine.start(named_waiting, id="target")
    await engine.send("target", "named.twice", 1)  # equal options
    second = define("named.twice", "second", consume=False)
    assert event_class("named.twice") is None
    for call in (lambda: engine.send("target", "named.twice", 2), lambda: engine.emit("named.twice", 2)):
        with pytest.raises(WorkflowMisuse, match=r"different options in first\.Twice and second\.Twice; give one"):
            await call()
    await engine.send("target", second(3))
    assert [each.body for each in await h.store.inbox("target")] == [b"1", b'{"n":3}']


def define(name: str, module: str, **options: Any) -> Any:
    namespace = {"__module__": module, "__qualname__": "Twice", "__annotations__": {"n": int}}
    return event(name=name, **options)(type("Twice", (), namespace))


def test_class_that_is_defined_again_replaces_the_earlier_one():
    def define_locally(consume: bool) -> Any:
        @event(name="named.local", consume=consume)
        class Local:
            n: int

        return Local

    for consume in (True, False):
        latest = define_locally(consume)
        assert options_of_name("named.local") == EventOptions("named.local", consume=consume)
        assert event_class("named.local") is latest
    define("named.again", "module", consume=True)
    again = define("named.again", "module", consume=False)
    assert event_class("named.again") is again
    options = options_of_name("named.again")
    assert options is not None
    assert options.consume is False
    assert options_of_name("named.unknown") is None


def test_policy_text_contains_the_options_that_a_reroute_needs():
    for policy in POLICIES:
        for delivery in ("after_wait", "after_create", "all", "first"):
            for consume in (True, False):
                given = EventOptions("e", delivery, consume, on_target_terminated=policy)
                parsed = parse_policy("e", policy_text(given))
                assert parsed is not None
                assert parsed.on_target_terminated == policy
                if policy == "broadcast":
                    first = delivery == "first"
                    assert parsed.delivery == ("all" if first else delivery)
                    assert parsed.consume == (first or consume)
                else:
                    assert policy_text(given) == policy
    assert policy_text(EventOptions("e", on_target_terminated="broadcast")) == "broadcast"  # as it was stored before
    for invalid in ("", "other", "discard:all:keep", "broadcast:all", "broadcast:first:keep", "broadcast:all:keep:x"):
        assert parse_policy("e", invalid) is None
