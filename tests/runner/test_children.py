"""Children: started once under a deterministic id, awaited through messages, and stopped with their parent."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from perdure import ChildFailed, Context, RunConflict, workflow
from perdure.codec import JSON
from perdure.model.records import EntryStatus, RunResult, RunStatus
from perdure.model.turns import (
    AwaitingResult,
    ExternalEffect,
    MessageReceived,
    ObserveRun,
    StartChild,
    StepDone,
    StopChildren,
    StopRun,
)
from perdure.model.validation import MAX_NAME
from tests.runner.crash_after_every_turn import check_replay, crashed, run_with_crashes
from tests.runner.turn_driver import CLOCK, Play, note
from tests.runner.workflows import fetch

SEEDS = range(12)


@workflow(name="runner_children_kid")
async def kid(ctx: Context, name: str) -> tuple[str, int]:
    return name, 1


@workflow(name="runner_children_lad")
async def lad(ctx: Context, name: str) -> Any:
    return name


@workflow(name="runner_children_keyed", idempotency_key=lambda name: f"key-{name}")
async def keyed(ctx: Context, name: str) -> str:
    return name


async def awaiting(ctx: Context) -> Any:
    got = await ctx.run_child(kid, "ada")
    return [type(got).__name__, *got]


KID = "runner_children_kid"


def work_of(play: Play) -> dict[str, Any]:
    return {location: effect.work for location, effect in play.effects.items()}


def start_of(effect: ExternalEffect) -> tuple[str, str]:
    """Return the run that an external effect starts, and the target of its end."""
    assert isinstance(effect.work, StartChild)
    assert effect.work.target is not None
    return effect.work.run_id, effect.work.target


def undo() -> None:
    note("compensated")


# --- starting


def test_child_is_recorded_before_it_is_started_under_a_deterministic_id():
    play = Play(awaiting).begin()
    [row] = play.turn.entries
    assert (row.location, row.kind, row.status) == (KID, "child", EntryStatus.PENDING)
    assert msgspec.json.decode(row.detail or b"") == {"id": f"run-1/{KID}", "attached": True}
    work = work_of(play)[KID]
    assert isinstance(work, StartChild)
    assert (work.run_id, work.workflow, work.version, work.attached) == (f"run-1/{KID}", KID, 1, True)
    assert (work.input, work.target, work.definition) == (b'{"name":"ada"}', f"0/{KID}", kid)
    assert work.created_by == f"child/run-1/0/{KID}"
    assert play.turn.busy


def test_child_ids_depend_on_location_and_generation():
    async def many(ctx):
        await ctx.start_child(kid, "a")
        await ctx.start_child(kid, "b")
        await ctx.join(x=ctx.start_child(kid, "c"))

    def ids(**options: Any) -> list[str]:
        play = Play(many, **options).begin()
        found = []
        while play.effects:
            found += [work.run_id for work in work_of(play).values()]
            play.apply_effect(next(iter(play.effects)))
        return found

    assert ids() == [f"run-1/{KID}", f"run-1/{KID}#1", f"run-1/join/x/{KID}"]
    assert ids(generation=2) == [f"run-1/{KID}@2", f"run-1/{KID}#1@2", f"run-1/join/x/{KID}@2"]
    assert ids() == ids()
    long = ids(run_id="x" * MAX_NAME)
    assert len(set(long)) == 3
    assert max(map(len, long)) <= MAX_NAME


@pytest.mark.parametrize(
    ("order", "id"),
    [
        (lambda ctx: ctx.run_child(kid, "a", id="mine"), "mine"),
        (lambda ctx: ctx.run_child(kid.options(id="mine"), "a"), "mine"),
        (lambda ctx: ctx.run_child(KID, "a", id="mine"), "mine"),
        (lambda ctx: ctx.run_child(keyed, "a"), "key-a"),
    ],
)
def test_workflow_can_choose_the_id_of_a_child(order, id):
    async def given(ctx):
        await order(ctx)

    play = Play(given).begin()
    [work] = work_of(play).values()
    assert work.run_id.endswith(id)


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (lambda ctx: ctx.run_child(kid, 5), "InvalidPayload"),
        (lambda ctx: ctx.run_child(kid), "InvalidPayload"),
        (lambda ctx: ctx.run_child("no such workflow"), "WorkflowMisuse"),
        (lambda ctx: ctx.run_child(print), "WorkflowMisuse"),
        (lambda ctx: ctx.run_child(kid, "a", id=""), "InvalidArgument"),
        (lambda ctx: ctx.run_child(kid.options(id="a"), "a", id="b"), "InvalidArgument"),
        (lambda ctx: ctx.start_child(kid.options(tags={"a": "b"}), "a"), "InvalidArgument"),
    ],
)
def test_invalid_child_start_is_rejected_before_anything_is_written(order, error):
    async def wrong(ctx):
        await order(ctx)

    play = Play(wrong).begin()
    assert play.failure.type == error
    assert play.rows == []


@pytest.mark.parametrize("seed", SEEDS)
def test_message_completes_wait_for_child_with_its_typed_result(seed):
    play = Play(awaiting, seed=seed).begin()
    play.apply_effect(KID)
    assert not play.turn.busy
    assert [(wait.kind, wait.location, wait.name) for wait in play.turn.waits] == [("child", KID, f"run-1/{KID}")]
    check_replay(play)
    cold = crashed(play)
    assert cold.effects == {}, "it knows that it waits"
    turn = cold.child_ends(f"0/{KID}", ["ada", 1])
    assert cold.value == ["tuple", "ada", 1]
    assert turn.consumed == (1,)
    assert cold.replayed_by(awaiting).begin().value == cold.value


def test_external_effect_is_repeated_identically_after_a_crash():
    play = Play(awaiting).begin()
    cold = crashed(play)
    assert work_of(cold) == work_of(play)
    assert cold.turn.entries == ()


def test_child_that_has_already_ended_completes_the_effect():
    play = Play(awaiting).begin()
    ending = RunResult(RunStatus.SUCCEEDED, JSON.encode(["bob", 2]))
    play.advance(StepDone(KID, 1, value=msgspec.json.encode(ending)))
    assert play.value == ["tuple", "bob", 2]


def test_message_may_arrive_before_the_result_of_the_effect():
    play = Play(awaiting).begin()
    effect = play.effects.pop(KID)
    play.waiting_for.append(start_of(effect))
    play.child_ends(f"0/{KID}", ["ada", 1])
    assert play.value == ["tuple", "ada", 1]


@pytest.mark.parametrize("seed", range(20))
def test_children_in_joins_races_and_loops_are_started_once(seed):
    async def family(ctx):
        pair = await ctx.join(a=ctx.run_child(lad, "a"), b=fetch("b"), c=ctx.start_child(lad, "c"))
        winner, _ = await ctx.race(ctx.run_child(lad, "d"), pair["c"].result(), ctx.sleep(2))
        await fetch(winner)
        return pair["a"]

    play = run_with_crashes(family, seed=seed)
    assert play.value == "done"


def test_results_of_a_thousand_children_are_applied_in_few_turns():
    async def crowd(ctx):
        return len(await ctx.map(lambda n: ctx.run_child(kid, str(n)), range(1_000), concurrency=1_000))

    play = Play(crowd).begin()
    assert len(play.effects) == 1_000
    standing = [AwaitingResult(each, (start_of(effect)[0],)) for each, effect in play.effects.items()]
    play.advance(*standing)
    assert len(play.turn.waits) == 1_000
    ended = [
        MessageReceived(
            play.add_message(
                "child",
                run_id,
                target=target,
                body=msgspec.json.encode({"status": "succeeded", "result": "WyJhIiwxXQ=="}),
            )
        )
        for run_id, target in map(start_of, play.effects.values())
    ]
    turns = 0
    for start in range(0, 1_000, 500):
        play.advance(*ended[start : start + 500])
        turns += 1
    while play.alive:
        assert play.turn.more
        play.advance()
        turns += 1
    assert play.value == 1_000
    assert turns <= 4


# --- failing


@pytest.mark.parametrize("seed", SEEDS)
def test_failed_child_raises_with_type_message_and_cause(seed):
    async def parent(ctx):
        try:
            await ctx.run_child(kid, "a")
        except ChildFailed as error:
            await fetch("caught")
            return [error.run_id, error.type, error.message, type(error.__cause__).__name__, str(error.__cause__)]

    play = Play(parent, seed=seed).begin()
    play.apply_effect(KID)
    play.child_ends(f"0/{KID}", error=KeyError("gone"))
    check_replay(play)
    play = crashed(play)
    play.complete()
    assert play.value == [f"run-1/{KID}", "KeyError", "'gone'", "KeyError", "\"'gone'\""]


def test_cancelled_child_raises_child_failed():
    async def parent(ctx):
        try:
            await ctx.run_child(kid, "a")
        except ChildFailed as error:
            return [error.type, error.__cause__]

    play = Play(parent).begin()
    play.apply_effect(KID)
    play.child_ends(f"0/{KID}", None, status=RunStatus.CANCELLED)
    assert play.value == ["RunCancelled", None]
    assert crashed(play).value == play.value


@pytest.mark.parametrize("how", ["run_child", "start_child"])
def test_run_conflict_of_a_child_is_raised_unchanged(how):
    async def parent(ctx):
        try:
            await getattr(ctx, how)(kid, "a", id="taken")
        except RunConflict as error:
            await fetch("caught")
            return str(error)

    play = Play(parent).begin()
    play.apply_effect(KID, error=RunConflict("taken", "another payload"))
    check_replay(play)
    play.complete()
    assert "taken" in play.value


def test_unhandled_failure_of_a_child_fails_the_parent():
    play = Play(awaiting).begin()
    play.apply_effect(KID)
    play.child_ends(f"0/{KID}", error=ValueError("bad"))
    # The child has ended, but others may be open: the parent requests their stop.
    assert isinstance(work_of(play)["~children"], StopChildren)
    play.apply_effect("~children")
    assert play.failure.type == "ChildFailed"
    assert "bad" in play.failure.message


# --- handles


async def with_handle(ctx: Context) -> Any:
    child = await ctx.start_child(kid, "a")
    note([child.id, child.created])
    await fetch("beside")
    how = await child.outcome()
    return [how.status, how.value, None if how.error is None else how.error.type]


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ({"value": ["a", 1]}, ["succeeded", ["a", 1], None]),
        ({"error": ValueError("x")}, ["failed", None, "ValueError"]),
        ({"value": None, "status": RunStatus.CANCELLED}, ["cancelled", None, "RunCancelled"]),
    ],
)
def test_outcome_does_not_raise_for_a_failed_child(ending, expected):
    play = Play(with_handle).begin()
    assert work_of(play)[KID].target is None, "no wait yet"
    play.apply_effect(KID)
    assert play.notes == [[f"run-1/{KID}", True]]
    check_replay(play)
    play.complete()
    outcome = f"{KID}:outcome"
    location = next(iter(play.effects))
    assert work_of(play)[location] == ObserveRun(f"run-1/{KID}", f"0/{location}")
    assert play.entries[location].name == outcome
    play.apply_effect(location)
    check_replay(play)
    play = crashed(play)
    play.child_ends(f"0/{location}", **{"value": None, **ending})
    assert play.value == expected
    assert crashed(play).value == expected


def test_result_of_a_handle_can_be_awaited_several_times():
    async def twice(ctx):
        child = await ctx.start_child(kid, "a")
        both = await ctx.join(child.result(), child.result())
        return [*both, await child.result()]

    play = Play(twice).begin()
    play.apply_effect(KID)
    for location in list(play.effects):
        play.apply_effect(location)
    for _, target in list(play.waiting_for):
        play.child_ends(target, ["a", 1])
    [location] = play.effects
    play.apply_effect(location)
    play.child_ends(f"0/{location}", ["a", 1])
    assert play.value == [["a", 1]] * 3


def test_child_that_existed_already_is_not_attached():
    play = Play(with_handle).begin()
    play.effects.pop(KID)
    play.advance(StepDone(KID, 1, value=JSON.encode({"id": "x", "created": False})))
    assert play.notes == [["x", False]]


def test_detached_child_is_not_attached():
    async def detaching(ctx):
        await ctx.start_child(kid, "a", detached=True)

    play = Play(detaching).begin()
    assert work_of(play)[KID].attached is False
    assert msgspec.json.decode(play.entries[KID].detail or b"")["attached"] is False


# --- cancelling


async def impatient(ctx: Context) -> Any:
    winner, _ = await ctx.race(work=ctx.run_child(kid, "a"), limit=ctx.sleep(5))
    await ctx.sleep(100)
    return winner


CHILD = f"race/work/{KID}"


def test_cancelling_run_child_durably_stops_the_child():
    play = Play(impatient).begin()
    play.apply_effect(CHILD)
    turn = play.advance(now=1_005.0)
    [effect] = turn.effects
    assert effect == ExternalEffect(f"{CHILD}/~stop", 1, StopRun(f"run-1/{CHILD}"))
    assert play.entries[f"{CHILD}/~stop"].status is EntryStatus.PENDING
    assert play.entries[CHILD].status is EntryStatus.CANCELLED
    cold = crashed(play)
    assert work_of(cold) == {f"{CHILD}/~stop": StopRun(f"run-1/{CHILD}")}
    cold.apply_effect(f"{CHILD}/~stop")
    assert cold.entries[f"{CHILD}/~stop"].status is EntryStatus.SUCCEEDED
    assert not cold.turn.busy
    check_replay(cold)
    assert crashed(cold).effects == {}


def test_run_does_not_end_before_its_cancelled_child_was_stopped():
    async def at_once(ctx):
        winner, _ = await ctx.race(work=ctx.run_child(kid, "a"), limit=ctx.sleep(5))
        return winner

    play = Play(at_once).begin()
    play.apply_effect(CHILD)
    play.advance(now=1_005.0)
    assert play.alive
    assert play.turn.busy
    play = crashed(play)
    play.apply_effect(f"{CHILD}/~stop")
    assert play.value == "limit"


def test_child_cancelled_in_the_turn_that_requests_it_is_never_started():
    async def at_once(ctx):
        task = asyncio.create_task(ctx.run_child(kid, "a"))
        await asyncio.sleep(0)
        task.cancel()
        await ctx.sleep(1)

    play = Play(at_once).begin()
    assert play.effects == {}
    assert play.entries[KID].status is EntryStatus.CANCELLED
    assert f"{KID}/~stop" not in play.entries
    check_replay(play)
    play.advance(now=1_001.0)
    assert play.value is None


def test_child_is_stopped_even_if_the_result_of_its_start_is_unknown():
    play = Play(impatient).begin()
    play = crashed(play)
    play.advance(now=1_005.0)
    assert work_of(play)[f"{CHILD}/~stop"] == StopRun(f"run-1/{CHILD}")


def test_cancelling_result_of_a_handle_does_not_stop_the_child():
    async def impatient_twice(ctx):
        child = await ctx.start_child(kid, "a")
        winner, _ = await ctx.race(work=child.result(), limit=ctx.sleep(5))
        await ctx.sleep(100)
        return winner

    play = Play(impatient_twice).begin()
    play.apply_effect(KID)
    [wait] = play.effects
    play.apply_effect(wait)
    turn = play.advance(now=1_005.0)
    assert turn.effects == ()
    assert not any(row.kind == "stop" for row in play.rows)
    check_replay(play)


def test_message_for_a_wait_that_no_longer_exists_is_ignored():
    play = Play(impatient).begin()
    play.apply_effect(CHILD)
    play.advance(now=1_005.0)
    play.apply_effect(f"{CHILD}/~stop")
    turn = play.child_ends(f"0/{CHILD}")
    assert (turn.entries, turn.consumed) == ((), (1,))
    play.advance(now=1_105.0)
    assert play.value == "limit"


def test_message_for_another_generation_is_ignored():
    play = Play(awaiting, generation=1).begin()
    play.apply_effect(KID)
    turn = play.post("child", "other-run", target=f"0/{KID}", body=b'{"status":"succeeded"}')
    assert (turn.entries, turn.consumed) == ((), (1,))
    assert play.alive


# --- the end of the parent


async def with_two(ctx: Context) -> Any:
    ctx.on_rollback(undo)
    await ctx.start_child(kid, "a")
    await ctx.start_child(kid, "b")
    return await ctx.receive("continue")


def started(**options: Any) -> Play:
    play = Play(with_two, **options).begin()
    play.apply_effect(KID)
    play.apply_effect(f"{KID}#1")
    return play


def test_attached_children_keep_running_when_the_parent_succeeds():
    play = started()
    turn = play.send("continue", 1)
    assert play.value == 1
    assert turn.effects == ()
    assert not any(row.kind == "children" for row in play.rows)


@pytest.mark.parametrize("open_children", [[], ["x"], ["x", "y"]])
def test_children_of_a_cancelled_parent_end_before_its_rollback(open_children):
    play = started()
    play.cancel()
    assert work_of(play) == {"~children": StopChildren("0/~children")}
    assert play.entries["~children"].status is EntryStatus.PENDING
    assert play.running == {}, "nothing is rolled back yet"
    play.waiting_for = [(name, "") for name in open_children]
    play = crashed(play)
    play.apply_effect("~children")
    while play.waiting_for:
        assert play.running == {}
        assert [(wait.kind, wait.location) for wait in play.turn.waits] == [("child", "~children")] * len(
            play.waiting_for
        )
        check_replay(play)
        play = crashed(play)
        play.child_ends("0/~children")
    assert list(play.attempts) == ["~rollback/undo"]
    play = crashed(play)
    play.complete()
    assert play.was_cancelled


def test_message_of_a_child_may_arrive_before_the_list_of_open_children():
    play = started()
    play.cancel()
    play.post("child", "x", target="0/~children", body=b'{"status":"cancelled"}')
    assert play.running == {}
    play.effects.clear()
    play.advance(AwaitingResult("~children", ("x", "y")))
    assert play.running == {}
    play.post("child", "y", target="0/~children", body=b'{"status":"cancelled"}')
    assert list(play.attempts) == ["~rollback/undo"]


def test_run_continues_at_once_if_all_messages_arrived_before_the_list_of_children():
    play = started()
    play.cancel()
    play.post("child", "x", target="0/~children", body=b'{"status":"cancelled"}')
    play.effects.clear()
    play.advance(AwaitingResult("~children", ("x",)))
    assert list(play.attempts) == ["~rollback/undo"]


def test_parent_without_children_requests_no_stop():
    async def alone(ctx):
        ctx.on_rollback(undo)
        await ctx.sleep(5)

    play = Play(alone).begin()
    play.cancel()
    assert play.effects == {}
    assert list(play.attempts) == ["~rollback/undo"]


def test_continued_parent_stops_children_of_earlier_generations():
    async def alone(ctx):
        raise ValueError("no")

    play = Play(alone, epoch=1, generation=1).begin()
    assert work_of(play) == {"~children": StopChildren("1/~children")}
    play.apply_effect("~children")
    assert play.failure.message == "no"


@pytest.mark.parametrize("seed", range(20))
def test_failing_parent_replays_identically_at_every_point(seed):
    async def failing(ctx):
        ctx.on_rollback(undo)
        child = await ctx.start_child(lad, "a")
        task = asyncio.create_task(child.result())
        await ctx.race(ctx.run_child(lad, "b"), ctx.sleep(1))
        await fetch("x")
        task.cancel()
        raise ValueError("no")

    play = run_with_crashes(failing, seed=seed)
    assert play.failure.message == "no"
    assert play.entries["~rollback/undo"].status is EntryStatus.SUCCEEDED


# --- runs that existed before


async def loses_it(ctx: Context) -> Any:
    return await ctx.race(child=ctx.run_child(kid, "a", id="theirs"), limit=ctx.sleep(5))


@pytest.mark.parametrize("cold", [False, True])
def test_cancelling_wait_for_a_child_that_existed_already_does_not_stop_it(cold: bool) -> None:
    play = Play(loses_it).begin()
    location = next(iter(play.effects))
    del play.effects[location]
    play.advance(AwaitingResult(location, ("theirs",), created=False))
    if cold:
        play = play.crash().begin()
    play.move(CLOCK)
    assert play.value == ["limit", None]
    assert not any(isinstance(effect.work, StopRun) for effect in play.effects.values())


def test_started_child_that_existed_already_is_recorded_as_not_attached() -> None:
    async def starts(ctx: Context) -> str:
        return (await ctx.start_child(kid, "a", id="theirs")).id

    play = Play(starts).begin()
    location, effect = next(iter(play.effects.items()))
    play.advance(StepDone(location, effect.attempt, value=JSON.encode({"id": "theirs", "created": False})))
    assert msgspec.json.decode(play.entries[location].detail or b"") == {"id": "theirs", "attached": False}
