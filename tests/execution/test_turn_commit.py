"""The write that commits a turn, and how the coordinator continues after special turns."""

import asyncio
from typing import Any
from unittest.mock import patch

from perdure import Context, EngineConfig, RunStatus, workflow
from perdure.execution import run_loader
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


def test_turn_with_only_extras_is_written():
    assert commit(Turn(busy=True)) is None
    write = commit(Turn(busy=True, extras=EXTRAS))
    assert write.extras == EXTRAS
    assert write.patch is None


def test_run_that_can_continue_keeps_its_owner():
    assert commit(Turn(more=True)) is None
    assert commit(Turn(entries=(entry(),), more=True)).patch is None
    assert commit(Turn(outcome=Succeeded(b"1"), more=True)).patch.status is RunStatus.SUCCEEDED


def test_hold_may_carry_entries_and_consumed_messages():
    held = Hold("step_failed", "exhausted")
    write = commit(Turn(entries=(entry(),), consumed=(4,), held=held, busy=True))
    assert (write.entries, write.consumed) == ((entry(),), (4,))
    assert (write.patch.status, write.patch.held) == (RunStatus.SUSPENDED, held)


def test_carried_entries_start_the_next_generation():
    carried = (entry("~compensation/a"),)
    write = commit(Turn(outcome=Continued("other", 2, b"[]", pool="gpu", carried=carried)))
    assert (write.continue_as.workflow, write.continue_as.pool, write.continue_as.entries) == ("other", "gpu", carried)


def test_poison_run_is_held_and_added_to_the_dead_letters():
    write = build_hold_commit("r", 3, 5, Hold("poison", "died"), "w", 10.0)
    assert write.extras is not None
    (dead_letter,) = write.extras.dead_letters
    assert isinstance(dead_letter, DeadLetter)
    assert (dead_letter.kind, dead_letter.original_target) == ("poison", "r")
    assert build_hold_commit("r", 3, 5, Hold("internal_error", "bug"), "w", 10.0).extras is None


# --- the coordinator


class ScriptedRunner:
    """A runner that returns given turns and records its inputs."""

    def __init__(self, *turns: Turn) -> None:
        self.turns = list(turns)
        self.inputs: list[list[Any]] = []

    def advance(self, now, inputs):
        self.inputs.append(list(inputs))
        return self.turns.pop(0)

    def close(self) -> None:
        pass


async def run_turns(h, *turns):
    engine = await h.engine(turn_maker)
    runner = ScriptedRunner(*turns)
    with patch.object(run_loader, "Runner", lambda start: runner):
        run = await engine.start(turn_maker, id="r")
        await h.settle()
    return engine, runner, run


@on_every_store
async def test_turn_with_more_work_is_followed_by_another_turn_at_once(h):
    _, runner, run = await run_turns(
        h,
        Turn(busy=True, more=True),
        Turn(entries=(entry(),), busy=True, more=True),
        Turn(outcome=Succeeded(b"7"), extras=EXTRAS),
    )
    assert runner.inputs == [[], [], []]
    assert await run.status() is RunStatus.SUCCEEDED
    assert (await run.describe()).published == {"k": 1}


@on_every_store
async def test_external_effect_is_executed_after_the_commit_and_returns_as_input(h):
    stage = Stage(h)
    await stage.run("other")
    message = Message(id="m", kind="event", name="hello", body=b"1")
    requested = entry("send", value=None)
    effect = ExternalEffect("send", 1, SendEvent("other", message))
    engine, runner, run = await run_turns(
        h, Turn(entries=(requested,), effects=(effect,), busy=True), Turn(outcome=Succeeded(b"7"))
    )
    assert runner.inputs == [[], [StepDone("send", 1, value=b"null")]]
    assert await run.status() is RunStatus.SUCCEEDED
    assert await stage.inbox("other") == [("event", "hello", b"1")]
    kinds = [type(write).__name__ for batch in engine.faults.committed for write in batch]
    assert kinds == ["CreateRun", "CommitTurn", "DeliverMessage", "CommitTurn"]


@on_every_store
async def test_shutdown_waits_for_external_effects_and_starts_no_new_ones(h):
    stage = Stage(h)
    await stage.run("other")
    effects = [
        ExternalEffect(f"s-{n}", 1, SendEvent("other", Message(id=f"m-{n}", kind="event", name="e"))) for n in range(2)
    ]
    turns = [Turn(entries=(entry(each.location),), effects=(each,), busy=True) for each in effects]
    engine = await h.engine(turn_maker)
    runner = ScriptedRunner(*turns)
    external_effects = engine._runtime.coordinator.external_effects
    with patch.object(run_loader, "Runner", lambda start: runner):
        run = await engine.start(turn_maker, id="r")
        while not external_effects.busy:
            await asyncio.sleep(0)
        await h.drive(engine.shutdown())
    assert runner.inputs == [[], [StepDone("s-0", 1, value=b"null")]]
    assert [each.id for each in await h.store.inbox("other")] == ["m-0"]
    assert (await stage.row(run.id)).owner is None
