"""From a turn to the write that commits it, and what the coordinator does with turns that only some runs have."""

import asyncio
from typing import Any
from unittest.mock import patch

from perdure import Context, EngineConfig, RunStatus, workflow
from perdure.execution import run_loader as reviving
from perdure.execution.run_cache import CachedRun
from perdure.execution.turn_commit import build_hold_commit, build_turn_commit
from perdure.model.records import DeadLetter, Entry, EntryStatus, Hold, Message, PublishedValue, RunRecord
from perdure.model.turns import Continued, ExternalEffect, SendEvent, StepDone, Succeeded, Turn, TurnExtras
from tests.engine.store_matrix import on_every_store
from tests.engine.store_setup import Stage

EXTRAS = TurnExtras(published=(PublishedValue("k", b"1"),))


@workflow
async def turn_maker(ctx: Context) -> None:
    await ctx.sleep(1)


def entry(location="a", **fields):
    return Entry(location=location, kind="step", name=location, status=EntryStatus.SUCCEEDED, call_seq=1, **fields)


def commit(turn):
    record = RunRecord(
        id="r", workflow="turn_maker", version=1, input=b"{}", created_at=1.0, created_by="c", seed=1, pool="p"
    )
    runner: Any = None
    return build_turn_commit(CachedRun(record, turn_maker, runner, 3), turn, "w", 10.0, EngineConfig())


# --- writes


def test_a_turn_that_has_only_extras_is_written():
    assert commit(Turn(busy=True)) is None
    write = commit(Turn(busy=True, extras=EXTRAS))
    assert write.extras == EXTRAS
    assert write.patch is None


def test_a_run_that_could_go_on_keeps_its_owner():
    assert commit(Turn(more=True)) is None
    assert commit(Turn(entries=(entry(),), more=True)).patch is None
    assert commit(Turn(outcome=Succeeded(b"1"), more=True)).patch.status is RunStatus.SUCCEEDED


def test_a_hold_may_carry_entries_and_mail():
    held = Hold("step_failed", "exhausted")
    write = commit(Turn(entries=(entry(),), consumed=(4,), held=held, busy=True))
    assert (write.entries, write.consumed) == ((entry(),), (4,))
    assert (write.patch.status, write.patch.held) == (RunStatus.SUSPENDED, held)


def test_what_outlives_a_generation_begins_the_next():
    carried = (entry("~compensation/a"),)
    write = commit(Turn(outcome=Continued("other", 2, b"[]", pool="gpu", carried=carried)))
    assert (write.continue_as.workflow, write.continue_as.pool, write.continue_as.entries) == ("other", "gpu", carried)


def test_a_poison_run_is_held_and_shown_as_a_dead_letter():
    write = build_hold_commit("r", 3, 5, Hold("poison", "died"), "w", 10.0)
    assert write.extras is not None
    (letter,) = write.extras.dead_letters
    assert isinstance(letter, DeadLetter)
    assert (letter.kind, letter.original_target) == ("poison", "r")
    assert build_hold_commit("r", 3, 5, Hold("internal_error", "bug"), "w", 10.0).extras is None


# --- the coordinator


class Scripted:
    """A runner that gives the turns it was told to, and remembers what it was advanced with."""

    def __init__(self, *turns: Turn) -> None:
        self.turns = list(turns)
        self.inputs: list[list[Any]] = []

    def advance(self, now, inputs):
        self.inputs.append(list(inputs))
        return self.turns.pop(0)

    def close(self) -> None:
        pass


async def play(h, *turns):
    engine = await h.engine(turn_maker)
    runner = Scripted(*turns)
    with patch.object(reviving, "Runner", lambda start: runner):
        run = await engine.start(turn_maker, id="r")
        await h.settle()
    return engine, runner, run


@on_every_store
async def test_a_turn_with_more_to_come_is_followed_by_another_at_once(h):
    _, runner, run = await play(
        h,
        Turn(busy=True, more=True),
        Turn(entries=(entry(),), busy=True, more=True),
        Turn(outcome=Succeeded(b"7"), extras=EXTRAS),
    )
    assert runner.inputs == [[], [], []]
    assert await run.status() is RunStatus.SUCCEEDED
    assert (await run.describe()).published == {"k": 1}


@on_every_store
async def test_an_errand_is_run_after_the_commit_and_comes_back_as_input(h):
    stage = Stage(h)
    await stage.run("other")
    message = Message(id="m", kind="event", name="hello", body=b"1")
    asked = entry("send", value=None)
    errand = ExternalEffect("send", 1, SendEvent("other", message))
    engine, runner, run = await play(
        h, Turn(entries=(asked,), effects=(errand,), busy=True), Turn(outcome=Succeeded(b"7"))
    )
    assert runner.inputs == [[], [StepDone("send", 1, value=b"null")]]
    assert await run.status() is RunStatus.SUCCEEDED
    assert await stage.inbox("other") == [("event", "hello", b"1")]
    kinds = [type(write).__name__ for batch in engine.faults.committed for write in batch]
    assert kinds == ["CreateRun", "CommitTurn", "DeliverMessage", "CommitTurn"]


@on_every_store
async def test_shutdown_waits_for_errands_and_begins_no_new_ones(h):
    stage = Stage(h)
    await stage.run("other")
    errands = [
        ExternalEffect(f"s-{n}", 1, SendEvent("other", Message(id=f"m-{n}", kind="event", name="e"))) for n in range(2)
    ]
    turns = [Turn(entries=(entry(each.location),), effects=(each,), busy=True) for each in errands]
    engine = await h.engine(turn_maker)
    runner = Scripted(*turns)
    errands_room = engine._core.coordinator.errands
    with patch.object(reviving, "Runner", lambda start: runner):
        run = await engine.start(turn_maker, id="r")
        while not errands_room.busy:
            await asyncio.sleep(0)
        await h.drive(engine.shutdown())
    assert runner.inputs == [[], [StepDone("s-0", 1, value=b"null")]]
    assert [each.id for each in await h.store.inbox("other")] == ["m-0"]
    assert (await stage.row(run.id)).owner is None
