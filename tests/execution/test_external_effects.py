"""External effects of a run on other runs and topics happen once, and the run gets their results."""

import asyncio

import msgspec

from perdure import (
    Context,
    EngineConfig,
    QueueFull,
    RunConflict,
    RunNotFound,
    RunStatus,
    RunTerminated,
    StoreError,
    workflow,
)
from perdure.codec import JSON
from perdure.codec.failures import step_error_from_record
from perdure.model.records import Message, RunResult, TopicEvent
from perdure.model.turns import (
    AwaitingResult,
    BroadcastEvent,
    ExternalEffect,
    ObserveRun,
    SendEvent,
    StartChild,
    StepDone,
    StopChildren,
    StopRun,
)
from perdure.stores.writes import CommitTurn, CreateRun, DeliverMessage
from tests.engine.store_matrix import on_every_store
from tests.engine.store_setup import SUCCEEDED, Stage


@workflow
async def effect_child(ctx: Context, n: int) -> int:
    await ctx.sleep(10)
    return n


class EffectsProbe:
    """The external effects of an engine, for a run that it does not execute. Keeps what they report."""

    def __init__(self, engine, stage: Stage) -> None:
        self.engine = engine
        self.stage = stage
        self.reports: list[StepDone | AwaitingResult] = []
        self.external = engine._runtime.coordinator.external_effects
        self.external._on_completed = lambda run_id, outcomes: self.reports.extend(outcomes)

    async def start(self, work, location="effect", of="caller"):
        self.external.start(await self.stage.row(of), ExternalEffect(location, 1, work))

    async def run(self, harness, work):
        """Execute an effect and return its outcome."""
        await self.start(work)
        await harness.settle()
        return self.reports.pop()

    async def value(self, harness, work):
        done = await self.run(harness, work)
        assert isinstance(done, StepDone)
        assert done.value is not None
        return JSON.decode(done.value)

    async def failure(self, harness, work):
        done = await self.run(harness, work)
        assert isinstance(done, StepDone)
        assert done.error is not None
        return step_error_from_record(done.error, JSON, location="effect", attempts=1, raises=(Exception,))


async def set_up(h, **config):
    stage = Stage(h)
    engine = await h.engine(effect_child, config=EngineConfig(**config))
    await stage.run("caller")
    return stage, EffectsProbe(engine, stage)


def paid(id="e-1", **fields):
    return Message(id=id, kind="event", name="paid", body=b"7", **fields)


def child(run_id="child", *, n=1, target=None, by="call", attached=True):
    payload = effect_child.parameters.encode(JSON, (n,), {}, what="payload")
    return StartChild(
        run_id=run_id,
        workflow=effect_child.name,
        version=1,
        input=payload,
        attached=attached,
        created_by=by,
        target=target,
        definition=effect_child,
    )


# --- events


@on_every_store
async def test_send_is_delivered_once_when_executed_twice(h):
    stage, effects = await set_up(h)
    await stage.run("other")
    for _ in range(2):
        assert await effects.value(h, SendEvent("other", paid())) is None
    assert await stage.inbox("other") == [("event", "paid", b"7")]


@on_every_store
async def test_send_fails_with_the_errors_of_the_client(h):
    stage, effects = await set_up(h, max_pending_events=1)
    await stage.run("ended")
    await stage.end("ended")
    await stage.run("full")
    await stage.deliver("full", paid("before"))
    assert isinstance(await effects.failure(h, SendEvent("missing", paid())), RunNotFound)
    error = await effects.failure(h, SendEvent("ended", paid()))
    assert isinstance(error, RunTerminated)
    assert (error.run_id, error.status) == ("ended", "succeeded")
    assert isinstance(await effects.failure(h, SendEvent("full", paid())), QueueFull)


@on_every_store
async def test_broadcast_reaches_all_waiting_runs_in_pages_and_returns_their_number(h):
    stage, effects = await set_up(h)
    for n in range(501):
        await stage.waiting(f"w-{n}", "paid")
    event = TopicEvent(topic="paid", id="e", body=b"7", sent_at=h.clock.now(), consume=False)
    assert await effects.value(h, BroadcastEvent(event)) == 501
    assert await h.store.unfinished_broadcasts() == []
    assert [kind for kind, _, _ in await stage.inbox("w-500")] == ["assignment"]


@on_every_store
async def test_broadcast_limits_expiry_to_the_event_retention(h):
    _, effects = await set_up(h, event_retention=50.0)
    now = h.clock.now()
    for id, expires_at in (("a", None), ("b", now + 1000.0), ("c", now + 5.0)):
        event = TopicEvent(topic="paid", id=id, body=b"7", sent_at=now, expires_at=expires_at)
        await effects.run(h, BroadcastEvent(event))
    assert [event.expires_at for event in await h.store.topic("paid")] == [now + 50.0, now + 50.0, now + 5.0]


@on_every_store
async def test_broadcast_to_a_full_topic_fails_the_entry(h):
    _, effects = await set_up(h, max_pending_events=1)
    event = TopicEvent(topic="paid", id="e", body=b"7", sent_at=h.clock.now())
    assert await effects.value(h, BroadcastEvent(event)) == 0
    other = TopicEvent(topic="paid", id="f", body=b"7", sent_at=h.clock.now())
    assert isinstance(await effects.failure(h, BroadcastEvent(other)), QueueFull)


# --- children


@on_every_store
async def test_child_is_started_once_and_executed_by_this_worker(h):
    stage, effects = await set_up(h)
    for _ in range(2):
        assert await effects.value(h, child()) == {"id": "child", "created": True}
    row = await stage.row("child")
    assert (row.parent, row.attached, row.workflow) == ("caller", True, "effect_child")
    assert row.status is RunStatus.SUSPENDED  # it sleeps
    assert "child" in effects.engine.loaded_runs
    assert await h.drive(effects.engine.result("child")) == 1


@on_every_store
async def test_existing_run_is_used_as_child_if_it_is_the_same_and_stays_unattached(h):
    stage, effects = await set_up(h)
    await effects.engine.start(effect_child, 1, id="child")
    assert await effects.value(h, child()) == {"id": "child", "created": False}
    row = await stage.row("child")
    assert (row.parent, row.attached) == (None, False)
    assert isinstance(await effects.failure(h, child(n=2)), RunConflict)


@on_every_store
async def test_end_of_an_awaited_child_arrives_as_a_message(h):
    stage, effects = await set_up(h)
    assert await effects.run(h, child(target="0/run_child")) == AwaitingResult("effect", ("child",))
    await h.drive(effects.engine.result("child"))
    await h.settle()
    ((kind, name, body),) = await stage.inbox("caller")
    assert (kind, name) == ("child", "child")
    assert msgspec.json.decode(body, type=RunResult) == RunResult(RunStatus.SUCCEEDED, b"1")
    (message,) = await h.store.inbox("caller")
    assert (message.id, message.target) == ("child/child/0/0/run_child", "0/run_child")


@on_every_store
async def test_start_of_an_awaited_child_is_one_write(h):
    _, effects = await set_up(h)
    faults = effects.engine.faults
    faults.committed.clear()
    for n in range(200):
        await effects.start(child(f"child-{n}", target="0/run_child"), location=f"effect-{n}")
    await h.settle()
    assert len(effects.reports) == 200
    writes = [write for batch in faults.committed for write in batch if not isinstance(write, CommitTurn)]
    assert {type(write) for write in writes} == {CreateRun}
    assert len(writes) == 200


@on_every_store
async def test_children_are_submitted_in_chunks(h):
    _, effects = await set_up(h)
    faults = effects.engine.faults
    faults.committed.clear()
    for n in range(200):
        await effects.start(child(f"child-{n}"), location=f"effect-{n}")
    await h.settle()
    created = [sum(isinstance(write, CreateRun) for write in batch) for batch in faults.committed]
    assert sum(created) == 200
    assert max(created) < 200


@on_every_store
async def test_repeated_child_start_observes_the_child_again_or_returns_its_result(h):
    stage, effects = await set_up(h)
    start = child(target="0/run_child")
    for _ in range(2):
        assert await effects.run(h, start) == AwaitingResult("effect", ("child",))
    await h.drive(effects.engine.result("child"))
    await h.settle()
    done = await effects.run(h, start)
    assert isinstance(done, StepDone)
    assert done.value is not None
    assert msgspec.json.decode(done.value, type=RunResult) == RunResult(RunStatus.SUCCEEDED, b"1")
    assert [kind for kind, _, _ in await stage.inbox("caller")] == ["child"]


@on_every_store
async def test_child_that_another_caller_started_reports_its_end(h):
    stage, effects = await set_up(h)
    await effects.engine.start(effect_child, 1, id="child")
    start = child(target="0/run_child")
    assert await effects.run(h, start) == AwaitingResult("effect", ("child",), created=False)
    await h.drive(effects.engine.result("child"))
    await h.settle()
    assert [kind for kind, _, _ in await stage.inbox("caller")] == ["child"]
    done = await effects.run(h, start)
    assert isinstance(done, StepDone)
    assert done.value is not None
    assert msgspec.json.decode(done.value, type=RunResult) == RunResult(RunStatus.SUCCEEDED, b"1")


@on_every_store
async def test_queued_child_is_not_started_after_its_parent_is_evicted(h):
    _, effects = await set_up(h)
    await effects.start(child("started"), location="a")
    effects.external.cancel_all("caller")
    assert effects.external.busy == 0
    await h.settle()
    assert effects.reports == []
    assert await h.store.records(["started"]) == [None]


@on_every_store
async def test_observing_an_ended_run_returns_its_result_at_once(h):
    stage, effects = await set_up(h)
    await stage.run("ended")
    await stage.end("ended")
    done = await effects.run(h, ObserveRun("ended", "0/child"))
    assert msgspec.json.decode(done.value, type=RunResult) == SUCCEEDED
    assert isinstance(await effects.failure(h, ObserveRun("missing", "0/child")), RunNotFound)


@on_every_store
async def test_stop_ends_a_run_that_has_not_started_and_sends_a_cancel_to_others(h):
    stage, effects = await set_up(h)
    await stage.run(
        "started",
        has_executed=False,
        owner=effects.engine.worker,
        status=RunStatus.RUNNING,
        first_executed_at=h.clock.now(),
    )
    await stage.run("new", has_executed=False, pool="nowhere")
    results = [await effects.value(h, StopRun(run_id)) for run_id in ("started", "started", "new", "new", "missing")]
    assert results == [True, True, True, True, False], "whether it was requested; a repeated call has the same result"
    assert await stage.inbox("started") == [("cancel", "", None)]
    assert (await stage.row("new")).status is RunStatus.CANCELLED


@on_every_store
async def test_children_are_stopped_in_pages_and_started_ones_report_their_end(h, monkeypatch):
    monkeypatch.setattr("perdure.execution.open_children.PAGE", 2)
    stage, effects = await set_up(h)
    family = {"parent": "caller", "attached": True, "pool": "nowhere"}
    for n in range(3):
        await stage.run(f"started-{n}", **family)
    await stage.run("new", has_executed=False, **family)
    await stage.run("ended", **family)
    await stage.end("ended")
    await stage.run("detached", parent="caller", pool="nowhere")
    awaited = await effects.run(h, StopChildren("0/~children"))
    assert awaited == AwaitingResult("effect", ("started-0", "started-1", "started-2"))
    assert await effects.run(h, StopChildren("0/~children")) == awaited
    assert [await stage.inbox(f"started-{n}") for n in range(3)] == [[("cancel", "", None)]] * 3
    assert (await stage.row("new")).status is RunStatus.CANCELLED
    assert await stage.inbox("detached") == []
    for n in range(3):
        await stage.end(f"started-{n}", RunStatus.CANCELLED)
    await h.clock.advance(10)
    assert sorted(name for _, name, _ in await stage.inbox("caller")) == ["started-0", "started-1", "started-2"]


@on_every_store
async def test_stopping_no_children_completes_at_once(h):
    _, effects = await set_up(h)
    assert await effects.value(h, StopChildren("0/~children")) is None


# --- failures


@on_every_store
async def test_unavailable_store_delays_an_effect(h):
    stage, effects = await set_up(h)
    await stage.run("other")
    effects.engine.faults.fail_calls(40, calls=("commit",))
    await effects.start(SendEvent("other", paid()))
    await h.settle()
    assert effects.reports == []
    assert not effects.engine._runtime.is_idle
    await h.clock.advance(600)
    assert [type(report) for report in effects.reports] == [StepDone]
    assert await stage.inbox("other") == [("event", "paid", b"7")]


@on_every_store
async def test_write_that_the_store_rejects_fails_the_entry(h):
    stage, effects = await set_up(h)
    await stage.run("other")
    effects.engine.faults.refuse(lambda write: isinstance(write, DeliverMessage))
    error = await effects.failure(h, SendEvent("other", paid()))
    assert isinstance(error, StoreError)


@on_every_store
async def test_effects_of_an_evicted_run_report_nothing(h):
    stage, effects = await set_up(h)
    await stage.run("other")
    await effects.start(SendEvent("other", paid()))
    await asyncio.sleep(0)  # submitted
    effects.external.cancel_all("caller")
    await h.settle()
    assert effects.reports == []
    assert await stage.inbox("other") == [("event", "paid", b"7")]
    assert effects.external.busy == 0


@on_every_store
async def test_effect_that_is_started_again_reports_once(h):
    stage, effects = await set_up(h)
    await stage.run("other")
    caller = await stage.row("caller")  # read before: an await between the two starts would let the first effect end
    for target in ("missing", "other"):
        effects.external.start(caller, ExternalEffect("effect", 1, SendEvent(target, paid())))
    assert effects.external.running_locations("caller") == {"effect"}
    await h.settle()
    assert effects.reports == [StepDone("effect", 1, value=b"null")]  # of the second start
    assert effects.external.running_locations("caller") == frozenset()
