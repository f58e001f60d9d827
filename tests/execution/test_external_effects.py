"""What a run asks to be done to other runs and topics is done once, and it learns what came of it."""

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
async def errand_child(ctx: Context, n: int) -> int:
    await ctx.sleep(10)
    return n


class Errands:
    """The errands of an engine, for a run that is not executed there: what they report is kept."""

    def __init__(self, engine, stage: Stage) -> None:
        self.engine = engine
        self.stage = stage
        self.reports: list[StepDone | AwaitingResult] = []
        self.room = engine._runtime.coordinator.external_effects
        self.room._on_completed = lambda run_id, outcomes: self.reports.extend(outcomes)

    async def start(self, work, location="errand", of="asker"):
        self.room.start(await self.stage.row(of), ExternalEffect(location, 1, work))

    async def run(self, harness, work):
        """What comes of an errand."""
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
        return step_error_from_record(done.error, JSON, location="errand", attempts=1, raises=(Exception,))


async def scene(h, **config):
    stage = Stage(h)
    engine = await h.engine(errand_child, config=EngineConfig(**config))
    await stage.run("asker")
    return stage, Errands(engine, stage)


def paid(id="e-1", **fields):
    return Message(id=id, kind="event", name="paid", body=b"7", **fields)


def child(run_id="child", *, n=1, target=None, by="call", attached=True):
    payload = errand_child.parameters.encode(JSON, (n,), {}, what="payload")
    return StartChild(
        run_id=run_id,
        workflow=errand_child.name,
        version=1,
        input=payload,
        attached=attached,
        created_by=by,
        target=target,
        definition=errand_child,
    )


# --- events


@on_every_store
async def test_a_send_is_delivered_once_however_often_it_is_done(h):
    stage, errands = await scene(h)
    await stage.run("other")
    for _ in range(2):
        assert await errands.value(h, SendEvent("other", paid())) is None
    assert await stage.inbox("other") == [("event", "paid", b"7")]


@on_every_store
async def test_a_send_fails_with_the_errors_of_send(h):
    stage, errands = await scene(h, max_pending_events=1)
    await stage.run("ended")
    await stage.end("ended")
    await stage.run("full")
    await stage.mail("full", paid("before"))
    assert isinstance(await errands.failure(h, SendEvent("nobody", paid())), RunNotFound)
    error = await errands.failure(h, SendEvent("ended", paid()))
    assert isinstance(error, RunTerminated)
    assert (error.run_id, error.status) == ("ended", "succeeded")
    assert isinstance(await errands.failure(h, SendEvent("full", paid())), QueueFull)


@on_every_store
async def test_a_broadcast_reaches_all_who_wait_in_pages_and_says_how_many(h):
    stage, errands = await scene(h)
    for n in range(501):
        await stage.waiting(f"w-{n}", "paid")
    event = TopicEvent(topic="paid", id="e", body=b"7", sent_at=h.clock.now(), consume=False)
    assert await errands.value(h, BroadcastEvent(event)) == 501
    assert await h.store.unfinished_broadcasts() == []
    assert [kind for kind, _, _ in await stage.inbox("w-500")] == ["assignment"]


@on_every_store
async def test_no_topic_keeps_an_event_for_longer_than_the_retention(h):
    _, errands = await scene(h, event_retention=50.0)
    now = h.clock.now()
    for id, expires_at in (("a", None), ("b", now + 1000.0), ("c", now + 5.0)):
        event = TopicEvent(topic="paid", id=id, body=b"7", sent_at=now, expires_at=expires_at)
        await errands.run(h, BroadcastEvent(event))
    assert [event.expires_at for event in await h.store.topic("paid")] == [now + 50.0, now + 50.0, now + 5.0]


@on_every_store
async def test_a_full_topic_fails_the_entry(h):
    _, errands = await scene(h, max_pending_events=1)
    event = TopicEvent(topic="paid", id="e", body=b"7", sent_at=h.clock.now())
    assert await errands.value(h, BroadcastEvent(event)) == 0
    other = TopicEvent(topic="paid", id="f", body=b"7", sent_at=h.clock.now())
    assert isinstance(await errands.failure(h, BroadcastEvent(other)), QueueFull)


# --- children


@on_every_store
async def test_a_child_is_started_once_and_executed_here_at_once(h):
    stage, errands = await scene(h)
    for _ in range(2):
        assert await errands.value(h, child()) == {"id": "child", "created": True}
    row = await stage.row("child")
    assert (row.parent, row.attached, row.workflow) == ("asker", True, "errand_child")
    assert row.status is RunStatus.SUSPENDED  # it sleeps
    assert "child" in errands.engine.resident
    assert await h.drive(errands.engine.result("child")) == 1


@on_every_store
async def test_an_existing_run_is_observed_if_it_is_the_same_and_stays_unattached(h):
    stage, errands = await scene(h)
    await errands.engine.start(errand_child, 1, id="child")
    assert await errands.value(h, child()) == {"id": "child", "created": False}
    row = await stage.row("child")
    assert (row.parent, row.attached) == (None, False)
    assert isinstance(await errands.failure(h, child(n=2)), RunConflict)


@on_every_store
async def test_the_end_of_a_child_that_is_waited_for_comes_as_mail(h):
    stage, errands = await scene(h)
    assert await errands.run(h, child(target="0/run_child")) == AwaitingResult("errand", ("child",))
    await h.drive(errands.engine.result("child"))
    await h.settle()
    ((kind, name, body),) = await stage.inbox("asker")
    assert (kind, name) == ("child", "child")
    assert msgspec.json.decode(body, type=RunResult) == RunResult(RunStatus.SUCCEEDED, b"1")
    (message,) = await h.store.inbox("asker")
    assert (message.id, message.target) == ("child/child/0/0/run_child", "0/run_child")


@on_every_store
async def test_a_child_that_is_waited_for_is_one_write(h):
    _, errands = await scene(h)
    faults = errands.engine.faults
    faults.committed.clear()
    for n in range(200):
        await errands.start(child(f"child-{n}", target="0/run_child"), location=f"errand-{n}")
    await h.settle()
    assert len(errands.reports) == 200
    births = [write for batch in faults.committed for write in batch if not isinstance(write, CommitTurn)]
    assert {type(write) for write in births} == {CreateRun}
    assert len(births) == 200


@on_every_store
async def test_children_are_stored_in_handfuls_while_the_next_are_thought_about(h):
    _, errands = await scene(h)
    faults = errands.engine.faults
    faults.committed.clear()
    for n in range(200):
        await errands.start(child(f"child-{n}"), location=f"errand-{n}")
    await h.settle()
    born = [sum(isinstance(write, CreateRun) for write in batch) for batch in faults.committed]
    assert sum(born) == 200
    assert max(born) < 200


@on_every_store
async def test_a_child_whose_start_is_done_again_is_observed_again_or_its_end_comes_at_once(h):
    stage, errands = await scene(h)
    asked = child(target="0/run_child")
    for _ in range(2):
        assert await errands.run(h, asked) == AwaitingResult("errand", ("child",))
    await h.drive(errands.engine.result("child"))
    await h.settle()
    done = await errands.run(h, asked)
    assert isinstance(done, StepDone)
    assert done.value is not None
    assert msgspec.json.decode(done.value, type=RunResult) == RunResult(RunStatus.SUCCEEDED, b"1")
    assert [kind for kind, _, _ in await stage.inbox("asker")] == ["child"]


@on_every_store
async def test_the_end_of_a_child_that_somebody_else_started_comes_too(h):
    stage, errands = await scene(h)
    await errands.engine.start(errand_child, 1, id="child")
    asked = child(target="0/run_child")
    assert await errands.run(h, asked) == AwaitingResult("errand", ("child",), created=False)
    await h.drive(errands.engine.result("child"))
    await h.settle()
    assert [kind for kind, _, _ in await stage.inbox("asker")] == ["child"]
    done = await errands.run(h, asked)
    assert isinstance(done, StepDone)
    assert done.value is not None
    assert msgspec.json.decode(done.value, type=RunResult) == RunResult(RunStatus.SUCCEEDED, b"1")


@on_every_store
async def test_a_child_of_a_run_that_is_forgotten_before_is_not_started(h):
    _, errands = await scene(h)
    await errands.start(child("begun"), location="a")
    errands.room.cancel_all("asker")
    assert errands.room.busy == 0
    await h.settle()
    assert errands.reports == []
    assert await h.store.records(["begun"]) == [None]


@on_every_store
async def test_the_end_of_a_run_that_has_ended_comes_at_once(h):
    stage, errands = await scene(h)
    await stage.run("ended")
    await stage.end("ended")
    done = await errands.run(h, ObserveRun("ended", "0/child"))
    assert msgspec.json.decode(done.value, type=RunResult) == SUCCEEDED
    assert isinstance(await errands.failure(h, ObserveRun("nobody", "0/child")), RunNotFound)


@on_every_store
async def test_a_run_that_is_stopped_ends_at_once_or_is_asked_to(h):
    stage, errands = await scene(h)
    await stage.run(
        "begun", begun=False, owner=errands.engine.worker, status=RunStatus.RUNNING, first_executed_at=h.clock.now()
    )
    await stage.run("new", begun=False, pool="nowhere")
    for run_id in ("begun", "begun", "new", "new", "nobody"):
        assert await errands.value(h, StopRun(run_id)) is None
    assert await stage.inbox("begun") == [("cancel", "", None)]
    assert (await stage.row("new")).status is RunStatus.CANCELLED


@on_every_store
async def test_children_are_stopped_in_pages_and_those_still_open_report(h, monkeypatch):
    monkeypatch.setattr("perdure.execution.external_effects.CHILDREN_PAGE", 2)
    stage, errands = await scene(h)
    family = {"parent": "asker", "attached": True, "pool": "nowhere"}
    for n in range(3):
        await stage.run(f"begun-{n}", **family)
    await stage.run("new", begun=False, **family)
    await stage.run("ended", **family)
    await stage.end("ended")
    await stage.run("detached", parent="asker", pool="nowhere")
    standing = await errands.run(h, StopChildren("0/~children"))
    assert standing == AwaitingResult("errand", ("begun-0", "begun-1", "begun-2"))
    assert await errands.run(h, StopChildren("0/~children")) == standing
    assert [await stage.inbox(f"begun-{n}") for n in range(3)] == [[("cancel", "", None)]] * 3
    assert (await stage.row("new")).status is RunStatus.CANCELLED
    assert await stage.inbox("detached") == []
    for n in range(3):
        await stage.end(f"begun-{n}", RunStatus.CANCELLED)
    await h.clock.advance(10)
    assert sorted(name for _, name, _ in await stage.inbox("asker")) == ["begun-0", "begun-1", "begun-2"]


@on_every_store
async def test_no_open_children_are_stopped_at_once(h):
    _, errands = await scene(h)
    assert await errands.value(h, StopChildren("0/~children")) is None


# --- when things go wrong


@on_every_store
async def test_a_store_that_is_away_delays_an_errand(h):
    stage, errands = await scene(h)
    await stage.run("other")
    errands.engine.faults.away(40, calls=("commit",))
    await errands.start(SendEvent("other", paid()))
    await h.settle()
    assert errands.reports == []
    assert not errands.engine._runtime.is_idle
    await h.clock.advance(600)
    assert [type(report) for report in errands.reports] == [StepDone]
    assert await stage.inbox("other") == [("event", "paid", b"7")]


@on_every_store
async def test_what_the_store_cannot_take_fails_the_entry(h):
    stage, errands = await scene(h)
    await stage.run("other")
    errands.engine.faults.refuse(lambda write: isinstance(write, DeliverMessage))
    error = await errands.failure(h, SendEvent("other", paid()))
    assert isinstance(error, StoreError)


@on_every_store
async def test_errands_of_a_forgotten_run_report_nothing(h):
    stage, errands = await scene(h)
    await stage.run("other")
    await errands.start(SendEvent("other", paid()))
    await asyncio.sleep(0)  # submitted
    errands.room.cancel_all("asker")
    await h.settle()
    assert errands.reports == []
    assert await stage.inbox("other") == [("event", "paid", b"7")]
    assert errands.room.busy == 0


@on_every_store
async def test_an_errand_that_is_run_again_reports_once(h):
    stage, errands = await scene(h)
    await stage.run("other")
    asker = await stage.row("asker")  # before both: between them nothing may be waited for, or the first one ends
    for target in ("nobody", "other"):
        errands.room.start(asker, ExternalEffect("errand", 1, SendEvent(target, paid())))
    assert errands.room.running_locations("asker") == {"errand"}
    await h.settle()
    assert errands.reports == [StepDone("errand", 1, value=b"null")]  # of the second one
    assert errands.room.running_locations("asker") == frozenset()
