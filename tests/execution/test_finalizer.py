"""What a run still owes when it has ended is done, by whoever is there, once."""

import msgspec

from perdure import Context, EngineConfig, RunStatus, workflow
from perdure.execution.finalizer import RunFinalizer
from perdure.execution.local_worker import NullLocalWorker
from perdure.model.records import ErrorRecord, Message, RunResult, TopicEvent
from perdure.stores.writes import DeliverMessage, FinalizeRun, Observer, PublishEvent
from tests.engine.store_matrix import on_every_store
from tests.engine.store_setup import Stage


@workflow
async def settling_sleeper(ctx: Context, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "done"


def event(id="e", name="paid", **fields):
    return Message(id=f"event/{id}", event_id=id, kind="event", name=name, body=b"7", **fields)


async def settled(h):
    """Let the next sweep of the duty go by."""
    await h.clock.advance(6)
    assert await h.store.unfinalized() == []


# --- observers


@on_every_store
async def test_all_who_wait_for_a_run_are_told_how_it_ended(h):
    stage = Stage(h)
    await h.engine(settling_sleeper)
    await stage.run("parent")
    await stage.run("other")
    await stage.run("failing")
    await stage.observe("failing", "parent", "0/a")
    await stage.observe("failing", "parent", "0/b")
    await stage.observe("failing", "other")
    error = ErrorRecord("ValueError", "no")
    await stage.end("failing", RunStatus.FAILED, error=error)
    await settled(h)
    for run_id, targets in (("parent", ["0/a", "0/b"]), ("other", ["0/child"])):
        messages = await h.store.inbox(run_id)
        assert [(each.kind, each.name, each.target) for each in messages] == [("child", "failing", t) for t in targets]
        assert msgspec.json.decode(messages[0].body, type=RunResult) == RunResult(RunStatus.FAILED, error=error)


@on_every_store
async def test_an_observer_that_has_gone_keeps_nobody(h):
    stage = Stage(h)
    await h.engine(settling_sleeper)
    await stage.run("ended")
    await stage.end("ended")
    await stage.run("child")
    await stage.observe("child", "ended")
    await stage.observe("child", "nobody")
    await stage.end("child")
    await settled(h)


@on_every_store
async def test_who_waits_for_a_run_that_ends_here_is_told_without_a_sweep(h):
    stage = Stage(h)
    engine = await h.engine(settling_sleeper, config=EngineConfig(sweep_interval=1000.0, lease=5000.0))
    await stage.run("parent")
    run = await engine.start(settling_sleeper, 1.0, id="child")
    await h.settle()
    await stage.observe("child", "parent")
    engine._runtime.run_is_observed("child")
    await h.clock.advance(1.0)
    assert await run.status() is RunStatus.SUCCEEDED
    assert [kind for kind, _, _ in await stage.inbox("parent")] == ["child"]


@on_every_store
async def test_who_waits_for_a_run_that_is_terminated_here_is_told_without_a_sweep(h):
    stage = Stage(h)
    engine = await h.engine(settling_sleeper, config=EngineConfig(sweep_interval=1000.0, lease=5000.0))
    await stage.run("parent")
    await stage.run("child")
    await stage.observe("child", "parent")
    assert await engine.terminate("child")
    await h.settle()
    ((_, _, body),) = await stage.inbox("parent")
    assert body is not None
    assert msgspec.json.decode(body, type=RunResult) == RunResult(RunStatus.CANCELLED)


@on_every_store
async def test_a_run_that_a_mere_client_ended_is_settled_soon(h):
    stage = Stage(h)
    await h.engine(settling_sleeper, config=EngineConfig(sweep_interval=1000.0, lease=5000.0))
    client = await h.client()
    await stage.run("parent")
    await stage.run("child")
    await stage.observe("child", "parent")
    await client.terminate("child")
    await h.clock.advance(1.0)
    assert [kind for kind, _, _ in await stage.inbox("parent")] == ["child"]


@on_every_store
async def test_a_plain_run_owes_nothing_and_costs_no_question(h):
    engine = await h.engine(settling_sleeper, config=EngineConfig(sweep_interval=1000.0, lease=5000.0))
    before = engine.faults.calls["unfinalized"]
    await h.run_to_end(await engine.start(settling_sleeper, 1.0))
    await h.settle()
    assert engine.faults.calls["unfinalized"] == before


@on_every_store
async def test_who_waits_for_many_runs_is_told_once_and_before_they_are_ticked_off(h):
    stage = Stage(h)
    engine = await h.engine(settling_sleeper, config=EngineConfig(sweep_interval=1000.0, lease=5000.0))
    await stage.run("parent")
    for n in range(3):
        await stage.run(f"child-{n}")
        await stage.observe(f"child-{n}", "parent", f"0/{n}")
        await stage.end(f"child-{n}")
    notified: list[tuple[str, set[type]]] = []

    class RecordingWorker(NullLocalWorker):
        def run_has_messages(self, run_id: str) -> None:
            notified.append((run_id, {type(write) for batch in engine.faults.committed for write in batch}))

    engine.faults.committed.clear()
    await h.drive(RunFinalizer(engine._session.store_session, RecordingWorker(), lambda: None).tick(h.clock.now()))
    assert notified == [("parent", {DeliverMessage})]
    assert await h.store.unfinalized() == []


@on_every_store
async def test_a_turn_need_not_wait_until_many_runs_are_ticked_off(h, monkeypatch):
    monkeypatch.setattr("perdure.execution.finalizer.FINALIZE_CHUNK", 2)
    stage = Stage(h)
    engine = await h.engine(settling_sleeper)
    await stage.run("parent")
    for n in range(5):
        await stage.run(f"child-{n}")
        await stage.observe(f"child-{n}", "parent", f"0/{n}")
        await stage.end(f"child-{n}")
    engine.faults.committed.clear()
    await settled(h)
    ticked_off = [sum(isinstance(write, FinalizeRun) for write in batch) for batch in engine.faults.committed]
    assert [number for number in ticked_off if number] == [2, 2, 1]
    assert len(await h.store.inbox("parent")) == 5


# --- unread events


@on_every_store
async def test_unread_events_go_where_their_policy_says(h):
    stage = Stage(h)
    engine = await h.engine(settling_sleeper)
    await stage.run("target")
    await stage.waiting("waiter", "moved")
    sent_at = h.clock.now()
    await stage.mail("target", event("d", "dropped"))
    await stage.mail("target", event("b", "moved", policy="broadcast"))
    await stage.mail("target", event("l", "kept", policy="dead_letter", sent_at=sent_at))
    await stage.end("target")
    await settled(h)
    assert await h.store.inbox("target") == []
    assert await stage.inbox("waiter") == [("assignment", "moved", b"7")]
    assert await h.store.topic("dropped") == []
    (letter,) = await engine.dead_letters()
    assert (letter.kind, letter.event_id, letter.event_name, letter.value) == ("event", "l", "kept", 7)
    assert (letter.original_target, letter.target_status) == ("target", "succeeded")
    assert letter.target_ended_at.timestamp() == letter.sent_at.timestamp() == sent_at
    assert "without receiving" in letter.reason


@on_every_store
async def test_an_event_that_moves_to_its_topic_keeps_its_expiry(h):
    stage = Stage(h)
    await h.engine(settling_sleeper, config=EngineConfig(event_retention=100.0))
    now = h.clock.now()
    await stage.run("target")
    await stage.mail("target", event("a", policy="broadcast", expires_at=now + 50.0))
    await stage.mail("target", event("b", policy="broadcast", expires_at=now + 5000.0))
    await stage.mail("target", event("c", policy="broadcast"))
    await stage.end("target")
    await settled(h)
    moved = {each.event_id: each.expires_at for each in await h.store.topic("paid")}
    assert moved["a"] == now + 50.0
    assert now + 100.0 <= moved["b"] == moved["c"] <= now + 106.0


@on_every_store
async def test_an_event_that_has_expired_is_dropped_whatever_its_policy(h):
    stage = Stage(h)
    engine = await h.engine(settling_sleeper)
    await stage.run("target")
    for policy in ("broadcast", "dead_letter"):
        await stage.mail("target", event(policy, policy=policy, expires_at=h.clock.now() + 1.0))
    await h.clock.advance(2)
    await stage.end("target")
    await settled(h)
    assert await h.store.topic("paid") == []
    assert await engine.dead_letters() == []


@on_every_store
async def test_an_unread_assignment_goes_to_the_next_who_waits(h):
    stage = Stage(h)
    engine = await h.engine(settling_sleeper)
    await stage.waiting("first", "paid")
    await stage.waiting("second", "paid")
    assert await engine.emit("paid", 7) == 1
    await stage.turn("first", patch=None)  # it has seen the assignment, and ends without a receive that takes it
    await stage.end("first")
    await settled(h)
    assert await stage.inbox("second") == [("assignment", "paid", b"7")]


# --- families


@on_every_store
async def test_attached_children_of_a_terminated_run_end_with_it_down_the_line(h, monkeypatch):
    monkeypatch.setattr("perdure.execution.finalizer.CHILDREN_PAGE", 2)
    stage = Stage(h)
    engine = await h.engine(settling_sleeper)
    await stage.run("top")
    for n in range(3):
        await stage.run(f"child-{n}", parent="top", attached=True)
    await stage.run("grandchild", parent="child-1", attached=True)
    await stage.run("detached", parent="top")
    await engine.terminate("top")
    await h.settle()
    ended = [(await stage.row(f"child-{n}")).status for n in range(3)]
    assert [*ended, (await stage.row("grandchild")).status] == [RunStatus.CANCELLED] * 4
    assert (await stage.row("detached")).status is RunStatus.SUSPENDED
    assert await h.store.unfinalized() == []


@on_every_store
async def test_children_go_on_when_their_parent_succeeds(h):
    stage = Stage(h)
    await h.engine(settling_sleeper)
    await stage.run("top")
    await stage.run("child", parent="top", attached=True)
    await stage.end("top")
    await settled(h)
    assert (await stage.row("child")).status is RunStatus.SUSPENDED


# --- in bulk, and when things go wrong


@on_every_store
async def test_a_page_of_runs_is_two_commits(h):
    stage = Stage(h)
    await stage.run("parent")
    for n in range(20):
        await stage.run(f"child-{n}")
        await stage.observe(f"child-{n}", "parent")
        await stage.end(f"child-{n}")
    engine = await h.engine(settling_sleeper)
    await settled(h)
    batches = [{type(write) for write in batch} for batch in engine.faults.committed]
    assert batches == [{DeliverMessage}, {FinalizeRun}]
    assert len(await h.store.inbox("parent")) == 20


@on_every_store
async def test_a_crash_before_it_is_ticked_off_repeats_nothing(h):
    stage = Stage(h)
    await stage.run("parent")
    await stage.run("child")
    await stage.observe("child", "parent")
    await stage.mail("child", event("b", policy="broadcast"))
    await stage.mail("child", event("l", policy="dead_letter"))
    dying = await h.engine(settling_sleeper)
    dying.faults.crash(2, "before")
    await stage.end("child")
    await h.clock.advance(6)
    assert dying.faults.crashed.is_set()
    await h.crash(dying)
    engine = await h.engine(settling_sleeper)
    await settled(h)
    assert [kind for kind, _, _ in await stage.inbox("parent")] == ["child"]
    assert [each.event_id for each in await h.store.topic("paid")] == ["b"]
    assert len(await engine.dead_letters()) == 1


@on_every_store
async def test_what_the_store_cannot_take_keeps_nobody_else_waiting(h):
    stage = Stage(h)
    await stage.run("parent")
    engine = await h.engine(settling_sleeper)
    engine.faults.refuse(lambda write: isinstance(write, DeliverMessage) and write.message.name == "bad")
    for run_id in ("bad", "good"):
        await stage.run(run_id)
        await stage.observe(run_id, "parent")
        await stage.end(run_id)
    await h.clock.advance(6)
    (owing,) = await h.store.unfinalized()
    assert (owing.record.id, owing.observers) == ("bad", (Observer("parent", "0/child"),))
    assert [name for _, name, _ in await stage.inbox("parent")] == ["good"]
    engine.faults.refuse(None)
    await settled(h)


@on_every_store
async def test_an_event_whose_topic_is_full_becomes_a_dead_letter(h):
    stage = Stage(h)
    engine = await h.engine(settling_sleeper, config=EngineConfig(max_pending_events=1))
    await engine.emit("paid", 1)
    await stage.run("target")
    await stage.mail("target", event("b", policy="broadcast"))
    await stage.end("target")
    await settled(h)
    (letter,) = await engine.dead_letters("paid")
    assert letter.event_id == "b"
    assert "full" in letter.reason


@on_every_store
async def test_a_publisher_that_crashed_midway_is_finished_by_another(h):
    stage = Stage(h)
    for n in range(5):
        await stage.waiting(f"w-{n}", "paid")
    event = TopicEvent(topic="paid", id="e", body=b"7", sent_at=h.clock.now(), consume=False)
    await h.store.commit([PublishEvent(event=event, now=h.clock.now(), page=2)])
    assert len(await h.store.unfinished_broadcasts()) == 1
    await h.engine(settling_sleeper)
    await h.clock.advance(6)
    assert await h.store.unfinished_broadcasts() == []
    assert [len(await stage.inbox(f"w-{n}")) for n in range(5)] == [1] * 5
