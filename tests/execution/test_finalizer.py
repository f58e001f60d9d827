"""Any worker finalizes an ended run, once: observers, unread events, children."""

import msgspec

from perdure import Context, EngineConfig, RunStatus, workflow
from perdure.execution.finalizer import RunFinalizer
from perdure.execution.local_worker import NullLocalWorker
from perdure.model.records import ErrorRecord, Message, RunResult, TopicEvent
from perdure.stores.writes import DeliverMessage, FinalizeRun, Observer, PublishEvent
from tests.engine.store_matrix import on_every_store
from tests.engine.store_setup import Stage


@workflow
async def finalized_sleeper(ctx: Context, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "done"


def event(id="e", name="paid", **fields):
    return Message(id=f"event/{id}", event_id=id, kind="event", name=name, body=b"7", **fields)


async def wait_until_finalized(h):
    """Wait for the next sweep of the finalizer."""
    await h.clock.advance(6)
    assert await h.store.unfinalized() == []


# --- observers


@on_every_store
async def test_all_observers_of_a_run_get_its_result(h):
    stage = Stage(h)
    await h.engine(finalized_sleeper)
    await stage.run("parent")
    await stage.run("other")
    await stage.run("failing")
    await stage.observe("failing", "parent", "0/a")
    await stage.observe("failing", "parent", "0/b")
    await stage.observe("failing", "other")
    error = ErrorRecord("ValueError", "no")
    await stage.end("failing", RunStatus.FAILED, error=error)
    await wait_until_finalized(h)
    for run_id, targets in (("parent", ["0/a", "0/b"]), ("other", ["0/child"])):
        messages = await h.store.inbox(run_id)
        assert [(each.kind, each.name, each.target) for each in messages] == [("child", "failing", t) for t in targets]
        assert msgspec.json.decode(messages[0].body, type=RunResult) == RunResult(RunStatus.FAILED, error=error)


@on_every_store
async def test_observer_that_ended_or_is_missing_does_not_block_finalization(h):
    stage = Stage(h)
    await h.engine(finalized_sleeper)
    await stage.run("ended")
    await stage.end("ended")
    await stage.run("child")
    await stage.observe("child", "ended")
    await stage.observe("child", "missing")
    await stage.end("child")
    await wait_until_finalized(h)


@on_every_store
async def test_observer_of_a_run_that_ends_here_is_notified_without_a_sweep(h):
    stage = Stage(h)
    engine = await h.engine(finalized_sleeper, config=EngineConfig(sweep_interval=1000.0, lease=5000.0))
    await stage.run("parent")
    run = await engine.start(finalized_sleeper, 1.0, id="child")
    await h.settle()
    await stage.observe("child", "parent")
    engine._runtime.run_is_observed("child")
    await h.clock.advance(1.0)
    assert await run.status() is RunStatus.SUCCEEDED
    assert [kind for kind, _, _ in await stage.inbox("parent")] == ["child"]


@on_every_store
async def test_observer_of_a_run_that_is_terminated_here_is_notified_without_a_sweep(h):
    stage = Stage(h)
    engine = await h.engine(finalized_sleeper, config=EngineConfig(sweep_interval=1000.0, lease=5000.0))
    await stage.run("parent")
    await stage.run("child")
    await stage.observe("child", "parent")
    assert await engine.terminate("child")
    await h.settle()
    ((_, _, body),) = await stage.inbox("parent")
    assert body is not None
    assert msgspec.json.decode(body, type=RunResult) == RunResult(RunStatus.CANCELLED)


@on_every_store
async def test_run_that_a_client_terminated_is_finalized_after_a_short_delay(h):
    stage = Stage(h)
    await h.engine(finalized_sleeper, config=EngineConfig(sweep_interval=1000.0, lease=5000.0))
    client = await h.client()
    await stage.run("parent")
    await stage.run("child")
    await stage.observe("child", "parent")
    await client.terminate("child")
    await h.clock.advance(1.0)
    assert [kind for kind, _, _ in await stage.inbox("parent")] == ["child"]


@on_every_store
async def test_run_without_observers_and_messages_needs_no_read_for_finalization(h):
    engine = await h.engine(finalized_sleeper, config=EngineConfig(sweep_interval=1000.0, lease=5000.0))
    before = engine.faults.calls["unfinalized"]
    await h.run_to_end(await engine.start(finalized_sleeper, 1.0))
    await h.settle()
    assert engine.faults.calls["unfinalized"] == before


@on_every_store
async def test_observer_of_many_runs_is_notified_once_before_they_are_marked_finalized(h):
    stage = Stage(h)
    engine = await h.engine(finalized_sleeper, config=EngineConfig(sweep_interval=1000.0, lease=5000.0))
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
async def test_runs_are_marked_finalized_in_chunks_so_that_turns_do_not_wait(h, monkeypatch):
    monkeypatch.setattr("perdure.execution.finalizer.FINALIZE_CHUNK", 2)
    stage = Stage(h)
    engine = await h.engine(finalized_sleeper)
    await stage.run("parent")
    for n in range(5):
        await stage.run(f"child-{n}")
        await stage.observe(f"child-{n}", "parent", f"0/{n}")
        await stage.end(f"child-{n}")
    engine.faults.committed.clear()
    await wait_until_finalized(h)
    marked = [sum(isinstance(write, FinalizeRun) for write in batch) for batch in engine.faults.committed]
    assert [number for number in marked if number] == [2, 2, 1]
    assert len(await h.store.inbox("parent")) == 5


# --- unread events


@on_every_store
async def test_unread_events_are_moved_by_their_policy(h):
    stage = Stage(h)
    engine = await h.engine(finalized_sleeper)
    await stage.run("target")
    await stage.waiting("waiter", "moved")
    sent_at = h.clock.now()
    await stage.deliver("target", event("d", "dropped"))
    await stage.deliver("target", event("b", "moved", policy="broadcast"))
    await stage.deliver("target", event("l", "kept", policy="dead_letter", sent_at=sent_at))
    await stage.end("target")
    await wait_until_finalized(h)
    assert await h.store.inbox("target") == []
    assert await stage.inbox("waiter") == [("assignment", "moved", b"7")]
    assert await h.store.topic("dropped") == []
    (dead_letter,) = await engine.dead_letters()
    assert (dead_letter.kind, dead_letter.event_id, dead_letter.event_name, dead_letter.value) == (
        "event",
        "l",
        "kept",
        7,
    )
    assert (dead_letter.original_target, dead_letter.target_status) == ("target", "succeeded")
    assert dead_letter.target_ended_at.timestamp() == dead_letter.sent_at.timestamp() == sent_at
    assert "without receiving" in dead_letter.reason


@on_every_store
async def test_event_that_moves_to_its_topic_keeps_its_expiry(h):
    stage = Stage(h)
    await h.engine(finalized_sleeper, config=EngineConfig(event_retention=100.0))
    now = h.clock.now()
    await stage.run("target")
    await stage.deliver("target", event("a", policy="broadcast", expires_at=now + 50.0))
    await stage.deliver("target", event("b", policy="broadcast", expires_at=now + 5000.0))
    await stage.deliver("target", event("c", policy="broadcast"))
    await stage.end("target")
    await wait_until_finalized(h)
    moved = {each.event_id: each.expires_at for each in await h.store.topic("paid")}
    assert moved["a"] == now + 50.0
    assert now + 100.0 <= moved["b"] == moved["c"] <= now + 106.0


@on_every_store
async def test_expired_event_is_discarded_whatever_its_policy(h):
    stage = Stage(h)
    engine = await h.engine(finalized_sleeper)
    await stage.run("target")
    for policy in ("broadcast", "dead_letter"):
        await stage.deliver("target", event(policy, policy=policy, expires_at=h.clock.now() + 1.0))
    await h.clock.advance(2)
    await stage.end("target")
    await wait_until_finalized(h)
    assert await h.store.topic("paid") == []
    assert await engine.dead_letters() == []


@on_every_store
async def test_unread_assignment_goes_to_the_next_waiting_run(h):
    stage = Stage(h)
    engine = await h.engine(finalized_sleeper)
    await stage.waiting("first", "paid")
    await stage.waiting("second", "paid")
    assert await engine.emit("paid", 7) == 1
    await stage.turn("first", patch=None)  # the run has read the assignment, and ends without consuming it
    await stage.end("first")
    await wait_until_finalized(h)
    assert await stage.inbox("second") == [("assignment", "paid", b"7")]


# --- children


@on_every_store
async def test_attached_descendants_of_a_terminated_run_are_terminated(h, monkeypatch):
    monkeypatch.setattr("perdure.execution.open_children.PAGE", 2)
    stage = Stage(h)
    engine = await h.engine(finalized_sleeper)
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
async def test_children_continue_when_their_parent_succeeds(h):
    stage = Stage(h)
    await h.engine(finalized_sleeper)
    await stage.run("top")
    await stage.run("child", parent="top", attached=True)
    await stage.end("top")
    await wait_until_finalized(h)
    assert (await stage.row("child")).status is RunStatus.SUSPENDED


# --- pages and failures


@on_every_store
async def test_page_of_runs_takes_two_commits(h):
    stage = Stage(h)
    await stage.run("parent")
    for n in range(20):
        await stage.run(f"child-{n}")
        await stage.observe(f"child-{n}", "parent")
        await stage.end(f"child-{n}")
    engine = await h.engine(finalized_sleeper)
    await wait_until_finalized(h)
    batches = [{type(write) for write in batch} for batch in engine.faults.committed]
    assert batches == [{DeliverMessage}, {FinalizeRun}]
    assert len(await h.store.inbox("parent")) == 20


@on_every_store
async def test_crash_before_a_run_is_marked_finalized_repeats_nothing(h):
    stage = Stage(h)
    await stage.run("parent")
    await stage.run("child")
    await stage.observe("child", "parent")
    await stage.deliver("child", event("b", policy="broadcast"))
    await stage.deliver("child", event("l", policy="dead_letter"))
    dying = await h.engine(finalized_sleeper)
    dying.faults.crash(2, "before")
    await stage.end("child")
    await h.clock.advance(6)
    assert dying.faults.crashed.is_set()
    await h.crash(dying)
    engine = await h.engine(finalized_sleeper)
    await wait_until_finalized(h)
    assert [kind for kind, _, _ in await stage.inbox("parent")] == ["child"]
    assert [each.event_id for each in await h.store.topic("paid")] == ["b"]
    assert len(await engine.dead_letters()) == 1


@on_every_store
async def test_delivery_that_the_store_rejects_does_not_delay_other_runs(h):
    stage = Stage(h)
    await stage.run("parent")
    engine = await h.engine(finalized_sleeper)
    engine.faults.refuse(lambda write: isinstance(write, DeliverMessage) and write.message.name == "bad")
    for run_id in ("bad", "good"):
        await stage.run(run_id)
        await stage.observe(run_id, "parent")
        await stage.end(run_id)
    await h.clock.advance(6)
    (pending,) = await h.store.unfinalized()
    assert (pending.record.id, pending.observers) == ("bad", (Observer("parent", "0/child"),))
    assert [name for _, name, _ in await stage.inbox("parent")] == ["good"]
    engine.faults.refuse(None)
    await wait_until_finalized(h)


@on_every_store
async def test_event_whose_topic_is_full_becomes_a_dead_letter(h):
    stage = Stage(h)
    engine = await h.engine(finalized_sleeper, config=EngineConfig(max_pending_events=1))
    await engine.emit("paid", 1)
    await stage.run("target")
    await stage.deliver("target", event("b", policy="broadcast"))
    await stage.end("target")
    await wait_until_finalized(h)
    (dead_letter,) = await engine.dead_letters("paid")
    assert dead_letter.event_id == "b"
    assert "full" in dead_letter.reason


@on_every_store
async def test_broadcast_of_a_crashed_publisher_is_completed_by_another_worker(h):
    stage = Stage(h)
    for n in range(5):
        await stage.waiting(f"w-{n}", "paid")
    event = TopicEvent(topic="paid", id="e", body=b"7", sent_at=h.clock.now(), consume=False)
    await h.store.commit([PublishEvent(event=event, now=h.clock.now(), page=2)])
    assert len(await h.store.unfinished_broadcasts()) == 1
    await h.engine(finalized_sleeper)
    await h.clock.advance(6)
    assert await h.store.unfinished_broadcasts() == []
    assert [len(await stage.inbox(f"w-{n}")) for n in range(5)] == [1] * 5
