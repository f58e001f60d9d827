"""Schedules fire each time slot once: with several workers, crashes, outages, edits, pauses and clocks that jump."""

import asyncio
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from perdure import (
    Context,
    EngineConfig,
    InvalidArgument,
    InvalidPayload,
    RunQuery,
    RunStatus,
    Schedule,
    ScheduleConflict,
    ScheduleNotFound,
    WorkQueue,
    workflow,
)
from perdure.errors import RunInUse, WorkflowMisuse
from perdure.model.records import RunRecord
from perdure.model.schedule_records import KIND, MissedSlots, decode_schedule
from perdure.stores.writes import CreateRun, PutDocument
from perdure.testing import TestEngine, on_virtual_time
from perdure.workflows.definition import REGISTRY

MINUTE = 60.0


@workflow
async def report(ctx: Context, region: str = "eu") -> str:
    return f"{region} {ctx.schedule_slot}"


@workflow
async def long_report(ctx: Context, region: str = "eu") -> str:
    await ctx.sleep(290)
    return region


@workflow
async def broken_report(ctx: Context) -> None:
    raise ValueError("no data")


def virtual(test):
    """Run an async test on virtual time, with a harness."""

    def run() -> None:
        on_virtual_time(test)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def slots_of(client, schedule: str = "s") -> list[str]:
    """Return the slots of the runs of a schedule, from their ids, in order."""
    query = RunQuery(id_prefix=f"{schedule}/", limit=100_000)
    return sorted(record.id.removeprefix(f"{schedule}/") for record in (await client.runs(query)).runs)


def names(start: float, seconds: list[float]) -> list[str]:
    return [datetime.fromtimestamp(start + each, UTC).isoformat().replace("+00:00", "Z") for each in seconds]


def next_minute(clock) -> float:
    """Return the start of the last whole minute."""
    return clock.now() // MINUTE * MINUTE


# --- a slot fires once -------------------------------------------------------------------------------------------


@virtual
async def test_a_slot_starts_a_run_with_the_id_tags_and_time_of_the_slot(h):
    engine = await h.engine(report)
    start = next_minute(h.clock)
    await engine.schedule("s", report, "us", every=MINUTE, overlap="allow", tags={"team": "a"}, retention=5)
    run = engine.get(f"s/{names(start, [MINUTE])[0]}")
    await h.clock.advance(MINUTE)
    assert await h.run_to_end(run) == f"us {datetime.fromtimestamp(start + MINUTE, UTC)}"
    described = await engine.describe(run.id)
    assert described.tags == {
        "team": "a",
        "perdure.schedule": "s",
        "perdure.slot": datetime.fromtimestamp(start + MINUTE, UTC),
    }
    (record,) = await h.store.records([run.id])
    assert record.retention == 10 * 15.0, "ten leases at least"


@virtual
async def test_three_engines_fire_a_thousand_slots_once(h):
    creations: list[str] = []
    for _ in range(3):
        engine = await h.engine(report)
        record_creations(engine, creations)
    start = next_minute(h.clock)
    await engine.schedule("s", report, every=1, overlap="allow", start_at=start + MINUTE, limit=1000)
    await h.clock.advance(MINUTE + 1000)
    await h.settle()
    assert await slots_of(engine) == sorted(names(start, [MINUTE + n for n in range(1000)]))
    assert sorted(creations) == sorted(f"s/{name}" for name in names(start, [MINUTE + n for n in range(1000)]))
    description = await engine.get_schedule("s")
    assert (description.started, description.missed, description.finished) == (1000, 0, True)
    assert description.next_slots == []


def record_creations(engine, creations: list[str]) -> None:
    """Append the id of each run that this engine requests to create."""
    commit = engine._session.store.commit

    async def recorded(batch):
        creations.extend(write.record.id for write in batch if isinstance(write, CreateRun))
        return await commit(batch)

    engine._session.store.commit = recorded


@virtual
async def test_a_worker_that_dies_between_plan_and_start_loses_no_slot(h):
    first = await h.engine(report)
    start = next_minute(h.clock)
    await first.schedule("s", report, every=MINUTE, overlap="allow")
    commit, died = first._session.store.commit, asyncio.Event()

    async def die_before_start(batch):
        if any(isinstance(write, CreateRun) for write in batch):
            died.set()
            await asyncio.get_running_loop().create_future()
        return await commit(batch)

    first._session.store.commit = die_before_start
    await h.clock.advance(MINUTE)
    await h.drive(died.wait())
    document = await h.store.document(KIND, "s")
    assert len(decode_schedule(document.body).pending) == 1
    await h.crash(first)
    second = await h.engine(report)
    await h.clock.advance(15)
    assert await slots_of(second) == names(start, [MINUTE])
    description = await second.get_schedule("s")
    assert (description.started, description.pending) == (1, [])


@virtual
async def test_a_plan_that_another_worker_has_made_starts_nothing(h):
    engine = await h.engine(report)
    await engine.schedule("s", report, every=MINUTE, overlap="allow")
    commit = engine._session.store.commit

    async def change_first(batch):
        for write in batch:
            if isinstance(write, PutDocument) and decode_schedule(write.body or b"").pending:
                engine._session.store.commit = commit
                await engine._session.store.commit([delete_of(write)])
        return await commit(batch)

    engine._session.store.commit = change_first
    await h.clock.advance(2 * MINUTE)
    assert await slots_of(engine) == []


def delete_of(write: PutDocument) -> PutDocument:
    return PutDocument(kind=write.kind, id=write.id, base=write.base, body=None, write_id="deleted by another process")


@virtual
async def test_a_damaged_schedule_does_not_keep_others_from_firing(h):
    engine = await h.engine(report)
    damaged = PutDocument(kind=KIND, id="a", base=0, body=b"{", write_id="w", due_at=h.clock.now())
    await h.store.commit([damaged])
    await engine.schedule("s", report, every=MINUTE, overlap="allow")
    await h.clock.advance(MINUTE)
    assert len(await slots_of(engine)) == 1
    assert (await h.store.document(KIND, "a")).due_at > h.clock.now()


@virtual
async def test_a_taken_run_id_is_a_conflict_with_a_dead_letter(h):
    engine = await h.engine(report)
    (name,) = names(next_minute(h.clock), [MINUTE])
    await h.drive(engine.execute(report, "mine", id=f"s/{name}"))
    await engine.schedule("s", report, every=MINUTE, overlap="allow")
    await h.clock.advance(MINUTE)
    description = await engine.get_schedule("s")
    assert [(each.outcome, each.run_id) for each in description.recent] == [("conflict", f"s/{name}")]
    assert (description.started, description.conflicts, description.pending) == (0, 1, [])
    (letter,) = await engine.dead_letters(kind="schedule")
    assert "its run id is taken" in letter.reason


@virtual
async def test_without_schedules_a_sweep_costs_one_query(h):
    engine = await h.engine(report)
    store, calls = engine._session.store, []
    documents = store.documents

    async def counted(*args, **options):
        calls.append(h.clock.now())
        return await documents(*args, **options)

    store.documents = counted
    await h.clock.advance(50)
    assert 9 <= len(calls) <= 12


# --- missed slots --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("catch_up", "started", "missed"),
    [
        (0, [], (1, 3)),
        (MINUTE, [3], (1, 2)),
        (1000, [1, 2, 3], None),
        ("last", [3], (1, 2)),
        ("all", [1, 2, 3], None),
    ],
)
def test_slots_that_pass_without_a_worker(catch_up, started, missed):
    async def test(h):
        client = await h.client()
        engine = await h.engine(report)
        start = next_minute(h.clock)
        await client.schedule("s", report, every=MINUTE, overlap="allow", catch_up=catch_up, start_at=start + MINUTE)
        await h.crash(engine)
        await h.clock.advance(start + 3 * MINUTE + 50 - h.clock.now())
        engine = await h.engine(report)
        await h.clock.advance(1)
        await h.settle()
        assert await slots_of(engine) == names(start, [MINUTE * n for n in started])
        letters = await engine.dead_letters(kind="schedule")
        if missed is None:
            assert letters == []
            return
        (letter,) = letters
        first, last = (start + MINUTE * n for n in missed)
        count = missed[1] - missed[0] + 1
        assert letter.value == {"schedule": "s", "first": first, "last": last, "count": count}
        assert f"{count} time slots from {names(start, [MINUTE])[0]}" in letter.reason
        assert (await engine.get_schedule("s")).missed == count

    on_virtual_time(test)


# --- changes -------------------------------------------------------------------------------------------------------


@virtual
async def test_schedule_is_idempotent_and_reports_changes(h):
    client = await h.client()
    await h.engine(report)
    start = next_minute(h.clock)

    async def declare(region="eu", **options):
        handle = await client.schedule("s", report, region, **{"every": MINUTE, "overlap": "allow", **options})
        return handle.created, handle.changed

    assert await declare() == (True, False)
    assert await declare() == (False, False)
    assert await declare("us") == (False, True)
    assert await declare("us", jitter=1) == (False, True)
    assert await declare("us", jitter=1, tags={"a": "b"}) == (False, True)
    assert await declare("us", jitter=1, tags={"a": "b"}) == (False, False)
    assert [each.id for each in await client.schedules()] == ["s"]
    await h.clock.advance(2 * MINUTE)
    assert (await client.result(f"s/{names(start, [MINUTE])[0]}")).startswith("us")


@virtual
async def test_an_edit_while_a_slot_is_due_starts_the_old_target_first(h):
    client = await h.client()
    start = next_minute(h.clock)
    await client.schedule("s", report, "old", every=MINUTE, overlap="allow")
    await h.clock.advance(start + MINUTE + 5 - h.clock.now())
    await client.schedule("s", report, "new", every=90.0, overlap="allow", start_at=start)
    assert len((await client.get_schedule("s")).pending) == 1
    engine = await h.engine(report)
    await h.clock.advance(MINUTE)
    old, new = (f"s/{name}" for name in names(start, [MINUTE, 90]))
    assert [(await engine.result(each)).split()[0] for each in (old, new)] == ["old", "new"]


@virtual
async def test_pause_and_resume_across_slots(h):
    engine = await h.engine(report)
    start = next_minute(h.clock)
    handle = await engine.schedule("s", report, every=MINUTE, overlap="allow")
    await h.clock.advance(start + MINUTE + 1 - h.clock.now())
    await handle.pause("holidays")
    await h.clock.advance(3 * MINUTE)
    paused = await handle.describe()
    assert paused.paused is not None
    assert (paused.paused.reason, paused.paused.by.split()[0]) == ("holidays", "WatchedEngine")
    await engine.schedule("s", report, every=MINUTE, overlap="allow", note="a deploy")
    assert (await handle.describe()).paused is not None, "a pause survives a change"
    await handle.resume()
    await h.clock.advance(MINUTE)
    assert await slots_of(engine) == names(start, [MINUTE, 5 * MINUTE])
    assert (await handle.describe()).missed == 0
    await handle.pause()
    await h.clock.advance(2 * MINUTE)
    await handle.resume(catch_up=True)
    await h.settle()
    assert await slots_of(engine) == names(start, [MINUTE * n for n in (1, 5, 6, 7)])


@virtual
async def test_a_schedule_can_be_created_paused(h):
    engine = await h.engine(report)
    handle = await engine.schedule("s", report, every=MINUTE, overlap="allow", paused=True)
    await h.clock.advance(3 * MINUTE)
    assert await slots_of(engine) == []
    assert (await handle.describe()).paused is not None


@virtual
async def test_a_failed_run_pauses_the_schedule(h):
    engine = await h.engine(broken_report)
    await engine.schedule("s", broken_report, every=MINUTE, overlap="allow", pause_on_failure=True)
    await h.clock.advance(4 * MINUTE)
    description = await engine.get_schedule("s")
    assert len(await slots_of(engine)) == 1
    assert description.paused is not None
    assert (description.paused.by, description.paused.reason) == ("perdure", f"run {description.last_run} failed")


@virtual
async def test_delete_starts_pending_slots_first(h):
    client = await h.client()
    start = next_minute(h.clock)
    await client.schedule("s", report, "old", every=MINUTE, overlap="allow")
    await h.clock.advance(start + MINUTE + 5 - h.clock.now())
    await client.schedule("s", report, "new", every=MINUTE, overlap="allow")  # makes the due slot pending
    assert await client.delete_schedule("s")
    assert not await client.delete_schedule("s")
    engine = await h.engine(report)
    await h.clock.advance(5 * MINUTE)
    assert await slots_of(engine) == names(start, [MINUTE])
    with pytest.raises(ScheduleNotFound, match="no schedule of this store has the id 's'"):
        await client.get_schedule("s")


@virtual
async def test_slots_fire_when_no_worker_has_the_workflow(h):
    @workflow(name="removed_report")
    async def removed(ctx: Context) -> None: ...

    client = await h.client()
    await client.schedule("s", removed, every=MINUTE, overlap="allow")
    engine = await h.engine(report)
    await h.clock.advance(2 * MINUTE)
    described = [await engine.describe(f"s/{slot}") for slot in await slots_of(engine)]
    assert [each.status for each in described] == [RunStatus.PENDING] * 2
    assert "no_worker" in {reason.kind for reason in described[0].waiting_for}


@virtual
async def test_a_run_gets_the_highest_version_of_a_live_worker(h):
    @workflow(name="versioned_report", version=1)
    async def old(ctx: Context) -> int:
        return 1

    client = await h.client()
    await client.schedule("s", old, every=MINUTE, overlap="allow")

    @workflow(name="versioned_report", version=2)
    async def new(ctx: Context) -> int:
        return 2

    engine = await h.engine(old, new)
    await h.clock.advance(MINUTE)
    (slot,) = await slots_of(engine)
    assert await engine.result(f"s/{slot}") == 2


# --- overlap -------------------------------------------------------------------------------------------------------


@virtual
async def test_allow_runs_both(h):
    engine = await h.engine(long_report)
    await engine.schedule("s", long_report, every=MINUTE, overlap="allow")
    await h.clock.advance(3 * MINUTE)
    assert (await engine.get_schedule("s")).started == 3
    open_runs = await engine.runs(RunQuery(status=RunStatus.SUSPENDED))
    assert len(open_runs.runs) == 3


@virtual
async def test_terminate_ends_the_run_of_the_slot_before(h):
    engine = await h.engine(long_report)
    await engine.schedule("s", long_report, every=MINUTE, overlap="terminate")
    await h.clock.advance(3 * MINUTE)
    statuses = [(await engine.describe(f"s/{slot}")).status for slot in await slots_of(engine)]
    assert statuses == [RunStatus.CANCELLED, RunStatus.CANCELLED, RunStatus.SUSPENDED]


# --- trigger -------------------------------------------------------------------------------------------------------


@virtual
async def test_trigger_starts_a_run_beside_the_rule(h):
    engine = await h.engine(report)
    await engine.schedule("s", report, "us", cron="0 0 1 1 *", overlap="allow")
    run = await engine.trigger_schedule("s")
    assert run.id.startswith("s/now-")
    assert run.created
    assert await h.run_to_end(run) == "us None"
    description = await engine.get_schedule("s")
    assert (description.triggered, description.started, description.last_run) == (1, 0, run.id)
    with pytest.raises(ScheduleNotFound):
        await engine.trigger_schedule("unknown")
    with pytest.raises(InvalidArgument, match="overlap must be one of 'skip'"):
        await engine.trigger_schedule("s", overlap="wait")


# --- backfill and internal runs ---------------------------------------------------------------------------------


@virtual
async def test_backfill_starts_the_slots_of_a_time_that_have_no_run(h):
    engine = await h.engine(report)
    start = next_minute(h.clock)
    await engine.schedule("s", report, every=MINUTE, overlap="allow")
    await h.clock.advance(2 * MINUTE)
    first = datetime.fromtimestamp(start, UTC)
    run = await engine.backfill_schedule("s", first - timedelta(hours=10), first + timedelta(minutes=2), "allow")
    result = await h.run_to_end(run)
    assert (result.started, result.existing, result.skipped) == (601, 1, 0)
    assert len(await slots_of(engine)) == 603
    again = await engine.backfill_schedule("s", first - timedelta(hours=10), first + timedelta(minutes=2), "allow")
    assert (await h.run_to_end(again)).existing == 602
    described = await engine.describe(f"s/{names(start, [-600 * MINUTE])[0]}")
    assert described.tags["perdure.slot"] == first - timedelta(hours=10)


@virtual
async def test_replaying_the_dead_letter_of_missed_slots_starts_them(h):
    client = await h.client()
    start = next_minute(h.clock)
    await client.schedule("s", report, every=MINUTE, overlap="allow", catch_up=0)
    await h.clock.advance(start + 3 * MINUTE + 50 - h.clock.now())
    engine = await h.engine(report)
    await h.clock.advance(1)
    (letter,) = await engine.dead_letters(kind="schedule")
    with pytest.raises(WorkflowMisuse, match="omit `to`"):
        await engine.replay_dead_letter(letter.id, to="x")
    assert await engine.replay_dead_letter(letter.id)
    assert not await engine.replay_dead_letter(letter.id)
    await h.run_to_end(engine.get(f"~backfill/{letter.id}"))
    assert await slots_of(engine) == names(start, [MINUTE, 2 * MINUTE, 3 * MINUTE])
    assert await engine.dead_letters() == []


@virtual
async def test_internal_runs_are_hidden_and_accept_few_requests(h):
    client = await h.client()
    start = datetime.fromtimestamp(h.clock.now(), UTC) - timedelta(hours=1)
    await client.schedule("s", report, every=MINUTE, overlap="allow")
    run = await client.backfill_schedule("s", start, start + timedelta(minutes=5), "allow")
    assert (await client.runs()).runs == ()
    (shown,) = (await client.runs(RunQuery(internal=True))).runs
    assert (shown.id, shown.workflow) == (run.id, "~backfill")
    for call in (
        client.terminate(run.id),
        client.send(run.id, "topic", 1),
        client.fork(run.id, "start_page"),
        client.rewind(run.id, "start_page"),
        client.delete(run.id),
        client.tag(run.id, {"a": "b"}),
    ):
        with pytest.raises(WorkflowMisuse, match="is perdure's own and cannot be"):
            await call
    with pytest.raises(InvalidArgument, match="must not begin with '~'"):
        await client.start("~backfill", {})
    with pytest.raises(InvalidArgument, match="must not begin with '~'"):
        await client.schedule("s2", "~backfill", {}, every=5)
    await client.pause(run.id)
    engine = await h.engine(report)
    await h.clock.advance(10)
    assert (await engine.describe(run.id)).held is not None
    await engine.resume(run.id)
    assert (await h.run_to_end(engine.get(run.id))).started == 5
    other = await client.backfill_schedule("s", start, start + timedelta(minutes=5), "allow")
    assert await client.cancel(other.id)


@virtual
async def test_a_worker_of_any_pool_serves_internal_runs(h):
    client = await h.client()
    start = datetime.fromtimestamp(h.clock.now(), UTC) - timedelta(hours=1)
    await client.schedule("s", report, every=MINUTE, overlap="allow", paused=True)
    run = await client.backfill_schedule("s", start, start + timedelta(minutes=5), "allow")
    assert [reason.kind for reason in (await client.describe(run.id)).waiting_for] == ["no_worker"]
    await h.engine(pool="elsewhere")
    assert (await h.run_to_end(run)).started == 5


@virtual
async def test_bad_backfills_are_refused(h):
    client = await h.client()
    now = datetime.fromtimestamp(h.clock.now(), UTC)
    await client.schedule("s", report, every=MINUTE, overlap="allow")
    for args, message in [
        ((now, now), "end must be after start"),
        ((now, now + timedelta(hours=1)), "must not be in the future"),
        ((now.replace(tzinfo=None), now), "start must be an aware datetime"),
        ((5, now), "start must be an aware datetime, not 5"),
        ((now - timedelta(hours=1), now, "cancel"), "overlap of a backfill must be one of 'queue', 'skip', 'allow'"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            await client.backfill_schedule("s", *args)
    with pytest.raises(ScheduleNotFound):
        await client.backfill_schedule("unknown", now - timedelta(hours=1), now)


@virtual
async def test_the_run_of_a_pending_slot_is_not_deleted(h):
    client = await h.client()
    start = next_minute(h.clock)
    await client.schedule("s", report, "old", every=MINUTE, overlap="allow")
    await h.clock.advance(start + MINUTE + 5 - h.clock.now())
    await client.schedule("s", report, "new", every=MINUTE, overlap="allow")  # makes the due slot pending
    slot = datetime.fromtimestamp(start + MINUTE, UTC)
    tags: dict[str, Any] = {"perdure.schedule": "s", "perdure.slot": slot}
    record = RunRecord(
        id="s/x", workflow="report", version=1, input=b"{}", created_at=0.0, created_by="", seed=0, tags=tags
    )
    await h.store.commit([CreateRun(record)])
    with pytest.raises(RunInUse, match="its time slot of schedule 's' is being started"):
        await client.delete("s/x")


# --- clocks --------------------------------------------------------------------------------------------------------


@virtual
async def test_a_clock_that_jumps_ahead_and_back_fires_no_slot_twice(h):
    creations: list[str] = []
    engine = await h.engine(report)
    record_creations(engine, creations)
    await engine.schedule("s", report, every=MINUTE, overlap="allow")
    await h.clock.advance(2 * MINUTE)
    for jump in (3600.0, -3600.0, 30.0, -30.0, 600.0, -600.0):
        h.clock._now += jump
        for _ in range(6):
            # The timers of a virtual clock are absolute times: after a step back they would not fire for an hour.
            engine._runtime._schedule_task.trigger()
            await h.settle()
            await h.clock.advance(30)
    for _ in range(180):
        engine._runtime._schedule_task.trigger()
        await h.settle()
        await h.clock.advance(30)
    assert len(creations) == len(set(creations))
    assert sorted(creations) == sorted(f"s/{slot}" for slot in await slots_of(engine))
    description = await engine.get_schedule("s")
    assert description.conflicts == 0
    assert description.started == len(creations) > 90, "slots fire again when the clock has returned"


# --- declared schedules ---------------------------------------------------------------------------------------------


def declared(name: str, **rule):
    @workflow(name=name, schedule=Schedule(**{"every": MINUTE, "overlap": "allow", **rule}))
    async def tick(ctx: Context, n: int = 1) -> int:
        return n

    return tick


@virtual
async def test_a_declared_schedule_is_created_and_changed_when_a_worker_opens_the_store(h):
    first = await h.engine(declared("declared_one"))
    description = await first.get_schedule("declared_one")
    assert description.declared_by.endswith("declared.<locals>.tick")
    await h.clock.advance(MINUTE)
    assert len(await slots_of(first, "declared_one")) == 1
    second = await h.engine(declared("declared_one", every=2 * MINUTE))
    assert (await second.get_schedule("declared_one")).rule == "every 120 s"
    third = await h.engine(report)
    assert (await third.get_schedule("declared_one")).rule == "every 120 s", "code that lacks it deletes nothing"


@virtual
async def test_an_id_that_is_declared_and_created_by_a_call_is_a_conflict(h):
    client = await h.client()
    await client.schedule("declared_two", report, every=MINUTE, overlap="allow")
    with pytest.raises(ScheduleConflict, match="was created by a call of schedule"):
        await h.engine(declared("declared_two"))
    await client.delete_schedule("declared_two")
    engine = await h.engine(declared("declared_two"))
    with pytest.raises(ScheduleConflict, match=r"is declared by .*tick; change it there"):
        await engine.schedule("declared_two", report, every=5, overlap="allow")


def test_a_declared_schedule_needs_a_workflow_without_required_parameters():
    with pytest.raises(InvalidArgument, match="has required parameters: order; give them defaults"):

        @workflow(name="declared_three", schedule=Schedule(every=60))
        async def tick(ctx: Context, order: str) -> None: ...

    with pytest.raises(InvalidArgument, match="a workflow's schedule must be a Schedule, not '@daily'"):

        @workflow(name="declared_three", schedule="@daily")  # type: ignore[call-overload]
        async def tock(ctx: Context) -> None: ...

    assert REGISTRY.latest("declared_three") is None


# --- refused calls ---------------------------------------------------------------------------------------------------


@virtual
async def test_bad_calls_are_refused_and_store_nothing(h):
    client = await h.client()
    past = datetime.fromtimestamp(h.clock.now(), UTC) - timedelta(days=1)
    refused: list[Any] = [
        (InvalidArgument, "end_at is in the past", ("s", report), {"every": 5, "end_at": past}),
        (InvalidArgument, "^at: the schedule never fires", ("s", report), {"at": past}),
        (InvalidArgument, "never fires", ("s", report), {"cron": "0 0 30 2 *"}),
        (InvalidArgument, "exactly one of cron, every and at", ("s", report), {}),
        (InvalidArgument, "tz 'Nowhere'", ("s", report), {"cron": "@daily", "tz": "Nowhere"}),
        (InvalidArgument, "must not begin with '~'", ("~s", report), {"every": 5}),
        (InvalidArgument, "480 is the maximum", ("s" * 481, report), {"every": 5}),
        (InvalidArgument, "a schedule's id is empty", ("", report), {"every": 5}),
        (InvalidArgument, "no option colour", ("s", report), {"every": 5, "colour": "red"}),
        (InvalidArgument, "use the workflow and not", ("s", report.options(id="x")), {"every": 5}),
        (InvalidPayload, "payload of workflow 'report'", ("s", report, 5), {"every": 5}),
        (InvalidPayload, "too many positional arguments", ("s", report, "a", "b"), {"every": 5}),
        (WorkflowMisuse, "no workflow named 'unknown'", ("s", "unknown"), {"every": 5}),
    ]
    for error, message, args, options in refused:
        with pytest.raises(error, match=message):
            await client.schedule(*args, **options)
    with pytest.raises(ScheduleNotFound):
        await client.pause_schedule("s")
    with pytest.raises(ScheduleNotFound):
        await client.resume_schedule("s")
    with pytest.raises(InvalidArgument, match="catch_up must be True or False"):
        await client.resume_schedule("s", catch_up="yes")
    with pytest.raises(InvalidArgument, match="limit must be at least 1"):
        await client.schedules(limit=0)
    assert await client.schedules() == []


@virtual
async def test_an_unchanged_schedule_that_has_ended_is_accepted(h):
    engine = await h.engine(report)
    soon = datetime.fromtimestamp(h.clock.now() + 30, UTC)
    await engine.schedule("s", report, at=soon, overlap="allow")
    await h.clock.advance(MINUTE)
    handle = await engine.schedule("s", report, at=soon, overlap="allow")
    assert (handle.created, handle.changed) == (False, False)
    assert (await handle.describe()).finished


def test_schedules_on_a_test_engine():
    async def main() -> None:
        async with TestEngine(config=EngineConfig()) as engine:
            await engine.schedule("s", report, "eu", cron="0 2 * * *", tz="Europe/Berlin", overlap="allow")
            await engine.advance(timedelta(days=3))
            assert (await engine.get_schedule("s")).started == 3

    asyncio.run(main())


def test_the_value_of_a_dead_letter_can_be_read():
    letter = MissedSlots("s", 1.0, 2.0, 3)
    assert (letter.schedule, letter.count) == ("s", 3)


# --- overlap through the queue of schedules --------------------------------------------------------------------------


async def outcomes_of(engine, schedule: str = "s") -> list[str]:
    return [each.outcome for each in (await engine.get_schedule(schedule)).recent]


async def statuses_of(engine, schedule: str = "s") -> list[str]:
    return [(await engine.describe(f"{schedule}/{slot}")).status.value for slot in await slots_of(engine, schedule)]


@virtual
async def test_skip_starts_no_run_while_the_last_one_is_open(h):
    engine = await h.engine(long_report)
    start = next_minute(h.clock)
    await engine.schedule("s", long_report, every=MINUTE)
    await h.clock.advance(start + 8 * MINUTE - h.clock.now() + 1)
    # Each run takes more than 290 seconds: it is open at the next four slots.
    assert await outcomes_of(engine) == ["started", *["skipped"] * 4, "started", "skipped", "skipped"]
    description = await engine.get_schedule("s")
    assert (description.started, description.skipped) == (2, 6)
    assert {each.run_id for each in description.recent[1:4]} == {f"s/{names(start, [MINUTE])[0]}"}
    assert len(await slots_of(engine)) == 2


@virtual
async def test_a_triggered_run_counts_for_skip(h):
    engine = await h.engine(long_report)
    await engine.schedule("s", long_report, every=MINUTE)
    run = await engine.trigger_schedule("s")
    again = await engine.trigger_schedule("s")
    assert (again.id, again.created) == (run.id, False)
    await h.clock.advance(2 * MINUTE)
    assert await outcomes_of(engine) == ["skipped", "skipped"]
    beside = await engine.trigger_schedule("s", overlap="allow")
    assert beside.created


@virtual
async def test_queue_starts_all_one_after_another(h):
    engine = await h.engine(long_report)
    start = next_minute(h.clock)
    await engine.schedule("s", long_report, every=MINUTE, overlap="queue", limit=3)
    await h.clock.advance(start + 4 * MINUTE - h.clock.now())
    assert await statuses_of(engine) == ["suspended", "pending", "pending"]
    waiting = await engine.describe(f"s/{names(start, [2 * MINUTE])[0]}")
    assert [reason.kind for reason in waiting.waiting_for] == ["queue"]
    await h.clock.advance(15 * MINUTE)
    assert await statuses_of(engine) == ["succeeded"] * 3
    runs = [await engine.describe(f"s/{slot}") for slot in await slots_of(engine)]
    assert all(one.ended_at <= other.ended_at - timedelta(seconds=290) for one, other in pairwise(runs))


@virtual
async def test_latest_keeps_only_the_newest_waiting_run(h):
    engine = await h.engine(long_report)
    start = next_minute(h.clock)
    await engine.schedule("s", long_report, every=MINUTE, overlap="latest")
    await h.clock.advance(start + 4.5 * MINUTE - h.clock.now())
    assert await statuses_of(engine) == ["suspended", "cancelled", "cancelled", "pending"]
    assert await outcomes_of(engine) == ["started", "skipped", "skipped", "started"]
    description = await engine.get_schedule("s")
    assert (description.started, description.skipped) == (2, 2)


@virtual
async def test_cancel_ends_the_old_run_and_the_new_one_waits_for_its_end(h):
    cleaned = []

    @workflow(name="tidy_report")
    async def tidy(ctx: Context) -> None:
        try:
            await ctx.sleep(300)
        except asyncio.CancelledError:
            cleaned.append(ctx.run_id)
            await asyncio.shield(ctx.sleep(0))
            raise

    engine = await h.engine(tidy)
    start = next_minute(h.clock)
    await engine.schedule("s", tidy, every=MINUTE, overlap="cancel")
    await h.clock.advance(start + 3.5 * MINUTE - h.clock.now())
    assert await statuses_of(engine) == ["cancelled", "cancelled", "suspended"]
    assert cleaned == [f"s/{name}" for name in names(start, [MINUTE, 2 * MINUTE])]
    described = await engine.describe(cleaned[0])
    assert described.cancel_reason == "the next time slot of its schedule replaces it"


@virtual
async def test_schedules_do_not_wait_for_each_other(h):
    engine = await h.engine(long_report)
    for n in range(5):
        await engine.schedule(f"s{n}", long_report, every=MINUTE)
    await h.clock.advance(MINUTE)
    assert [await statuses_of(engine, f"s{n}") for n in range(5)] == [["suspended"]] * 5
    own = [queue.name for queue in await h.store.queues() if queue.name.startswith("~")]
    assert own == ["~schedule"]


@virtual
async def test_runs_of_a_schedule_wait_in_the_queue_that_is_given(h):
    reports = WorkQueue("scheduled_reports", concurrency=1)
    engine = await h.engine(long_report, queues=[reports])
    for n in range(2):
        await engine.schedule(f"s{n}", long_report, every=MINUTE, queue=reports, priority=n)
    await h.clock.advance(2 * MINUTE)
    statuses = [await statuses_of(engine, f"s{n}") for n in range(2)]
    assert statuses == [["suspended"], ["pending"]]
    assert [await outcomes_of(engine, f"s{n}") for n in range(2)] == [["started", "skipped"]] * 2
    assert (await engine.get_schedule("s1")).queue == "scheduled_reports"
    with pytest.raises(InvalidArgument, match="overlap='queue' starts runs through the schedule's own queue"):
        await engine.schedule("s2", long_report, every=5, queue=reports, overlap="queue")
    with pytest.raises(InvalidArgument, match="declare WorkQueue"):
        await engine.schedule("s2", long_report, every=5, queue="unknown_queue")


@virtual
async def test_the_queue_of_a_workflow_applies_to_its_schedule(h):
    own = WorkQueue("queue_of_queued_report", concurrency=1)

    @workflow(name="queued_report", queue=own)
    async def queued(ctx: Context) -> None: ...

    engine = await h.engine(queued, queues=[own])
    with pytest.raises(InvalidArgument, match="use queue=None to bypass it"):
        await engine.schedule("s", queued, every=5, overlap="latest")
    await engine.schedule("s", queued, every=5, overlap="latest", queue=None)
    await engine.schedule("t", queued, every=5)
    assert (await engine.get_schedule("t")).queue == "queue_of_queued_report"


@virtual
async def test_backfill_queues_by_default(h):
    engine = await h.engine(long_report)
    now = datetime.fromtimestamp(next_minute(h.clock), UTC)
    await engine.schedule("s", long_report, every=MINUTE, paused=True)
    run = await engine.backfill_schedule("s", now - timedelta(minutes=3), now)
    assert (await h.run_to_end(run)).started == 3
    assert await statuses_of(engine) == ["suspended", "pending", "pending"]
    await h.clock.advance(16 * MINUTE)
    assert await statuses_of(engine) == ["succeeded"] * 3
