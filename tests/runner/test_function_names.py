"""Registered names: which functions a recorded compensation can call, whatever the record says."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
import pytest

from perdure import Break, Context, Continue, step, workflow
from perdure.model.records import Entry, EntryStatus
from perdure.model.turns import Continued
from perdure.runner.compensations import CompensationRecord
from perdure.workflows.definition import REGISTRY
from tests.runner import other_module
from tests.runner.other_module import CALLED, fails_elsewhere, refund_elsewhere, undo_elsewhere
from tests.runner.turn_driver import Play

IMPORTED = os.system  # in the namespace of this module, but not defined by it


@pytest.fixture(autouse=True)
def fresh() -> None:
    CALLED.clear()


@step(name="refund.card")
async def refund(what: Any) -> None:
    CALLED.append(["refund", what])


def undo(what: Any) -> None:
    CALLED.append(["undo", what])


class Undo:
    @staticmethod
    def static(what: Any) -> None:
        CALLED.append(["static", what])

    @classmethod
    def bound(cls, what: Any) -> None:
        CALLED.append(["bound", what])


async def looping(ctx: Context, fn: Any) -> None:
    async def body(ctx: Context, n: int) -> Continue[int] | Break[None]:
        ctx.on_rollback(fn, n)
        return Break() if n == 2 else Continue(n + 1)

    await ctx.loop("pages", body, 0)
    await ctx.receive("never")


def cancelled_after_crash(fn: Any) -> Play:
    """Register a function in a loop, lose the memory of the run, and roll it back."""

    async def trip(ctx: Context) -> None:
        await looping(ctx, fn)

    play = Play(trip).run().crash().begin()
    play.cancel()
    while play.alive and play.choices():
        play.move(play.choices()[0])
    return play


def names_in(play: Play) -> set[str]:
    rows = [row for row in play.entries.values() if row.kind == "compensation"]
    return {msgspec.json.decode(row.detail or b"", type=CompensationRecord).fn for row in rows}


def local_step() -> Any:
    @step(name="local.refund")
    async def inner(what: Any) -> None:
        CALLED.append(["refund", what])

    return inner


# --- what is recorded


@pytest.mark.parametrize(
    ("fn", "name", "called"),
    [
        (undo, "function:undo", "undo"),
        (Undo.static, "function:Undo.static", "static"),
        (refund, "step:refund", "refund"),
        (refund.options(name="renamed"), "step:refund", "refund"),
        (refund_elsewhere, "step:tests.runner.other_module:refund_elsewhere", "refund"),
        (local_step(), "step:local_step.<locals>.inner", "refund"),
    ],
)
def test_function_in_a_loop_is_recorded_by_name_and_found_after_a_crash(fn, name, called):
    play = cancelled_after_crash(fn)
    assert play.was_cancelled
    assert names_in(play) == {name}
    assert [[called, 2], [called, 1], [called, 0]] == CALLED
    if hasattr(fn, "options"):
        assert {row.name for row in play.entries.values() if row.location.startswith("~rollback/")} == {fn.name}


@pytest.mark.parametrize(
    "fn",
    [IMPORTED, undo_elsewhere, print, Undo, Undo.bound, lambda what: None],
    ids=["imported builtin", "imported function", "builtin", "class", "classmethod", "lambda"],
)
def test_anything_but_a_step_or_a_function_of_the_module_is_refused_in_a_loop(fn):
    async def trip(ctx: Context) -> None:
        await looping(ctx, fn)

    play = Play(trip).run()
    assert (play.failure.type, names_in(play)) == ("WorkflowMisuse", set())


def test_earlier_definition_of_a_step_is_refused_in_a_loop():
    first = local_step()
    local_step()

    async def trip(ctx: Context) -> None:
        await looping(ctx, first)

    assert Play(trip).run().failure.type == "WorkflowMisuse"


def test_any_callable_can_be_used_where_the_replay_supplies_it():
    async def trip(ctx: Context) -> None:
        ctx.on_rollback(undo_elsewhere, 1)
        ctx.on_exit(lambda: CALLED.append("exit"))
        await ctx.receive("never")

    play = Play(trip).run().crash().begin()
    play.cancel()
    while play.alive and play.choices():
        play.move(play.choices()[0])
    assert CALLED == [["undo", 1], "exit"]
    assert names_in(play) == set()


# --- what is called


def record(fn: str, *args: str, **fields: Any) -> Entry:
    detail = CompensationRecord("rollback", fn, args, (-1, 1), **fields)
    return Entry(
        "~compensation/~before/1", "compensation", "x", EntryStatus.SUCCEEDED, 1, detail=msgspec.json.encode(detail)
    )


def rolled_back(row: Entry) -> Play:
    async def trip(ctx: Context) -> None:
        raise ValueError("no")

    return Play(trip, rows=[row], epoch=1, generation=1).run()


ENCODED = "InRvdWNoIC90bXAvcGVyZHVyZS1leHBsb2l0ZWQi"  # "touch /tmp/perdure-exploited"
HOSTILE = [
    "os:system",
    "posix:system",
    "subprocess:run",
    "builtins:exec",
    "step:os:system",
    "step:builtins:eval",
    "function:os:system",
    "function:os.system",
    "function:IMPORTED",
    "function:system",
    "function:undo_elsewhere",
    "function:other_module.undo_elsewhere",
    "function:undo.__call__",
    "function:undo.__globals__",
    "function:undo.__init_subclass__",
    "function:__builtins__.exec",
    "function:__loader__.exec_module",
    "function:Undo.bound",
    "function:Undo",
    "function:",
    "function:.",
    "step:",
    "step::",
    "",
    ":",
    "tests.runner.other_module:undo_elsewhere",
    "antigravity:fly",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_name_is_neither_imported_nor_called_and_holds_the_run(name):
    modules = set(sys.modules)
    play = rolled_back(record(name, ENCODED))
    assert play.held.kind == "diverged"
    assert "registered" in play.held.reason
    assert play.held.location == "~compensation/~before/1"
    assert (CALLED, play.running, set(sys.modules) - modules) == ([], {}, set())


def test_module_attribute_that_executes_code_is_not_read(monkeypatch):
    def find_lazily(name: str) -> Any:
        CALLED.append(name)
        return undo

    monkeypatch.setattr(sys.modules[__name__], "__getattr__", find_lazily, raising=False)
    assert rolled_back(record("function:lazy", "MQ==")).held.kind == "diverged"
    assert CALLED == []


@pytest.mark.parametrize("name", [f"{__name__}:undo", f"{__name__}:Undo.static", f"{__name__}:refund"])
def test_import_path_of_an_earlier_version_is_found_among_registered_functions_only(name):
    play = rolled_back(record(name, "MQ=="))
    assert play.failure.message == "no"
    assert [args for _, args in CALLED] == [1]


@pytest.mark.parametrize("argument", ["not base64!", "ew==", "/////w=="])
def test_arguments_that_cannot_be_read_hold_the_run(argument):
    play = rolled_back(record("function:undo", argument))
    assert (play.held.kind, CALLED) == ("diverged", [])


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 600])
def test_name_of_a_step_that_is_invalid_holds_the_run(name):
    row = msgspec.structs.replace(record("step:refund", "MQ=="), name=name)
    assert rolled_back(row).held.kind == "diverged"


# --- in a run that continues


def test_function_of_the_first_module_is_called_by_a_workflow_of_another_module():
    @workflow(name="runner_names_first")
    async def first(ctx: Context) -> None:
        ctx.on_rollback(undo, 1)
        ctx.on_exit(refund, 2)
        await ctx.continue_as(workflow=fails_elsewhere)

    play = Play(first).run()
    assert isinstance(play.outcome, Continued)
    records = [msgspec.json.decode(row.detail or b"", type=CompensationRecord) for row in play.outcome.carried]
    assert [each.registered_by for each in records] == [("runner_names_first", 1)] * 2
    then = Play(fails_elsewhere, rows=play.outcome.carried, epoch=1, generation=1).run()
    assert then.failure.message == "no"
    assert CALLED == [["undo", 1], ["refund", 2]]


def test_run_is_held_if_the_workflow_that_registered_a_function_is_unknown():
    row = record("function:undo", "MQ==", registered_by=("nowhere", 1))
    assert rolled_back(row).held.kind == "diverged"
    assert REGISTRY.find("nowhere", 1) is None
    assert CALLED == []


def test_undecorated_function_of_another_module_prevents_continue_as():
    async def trip(ctx: Context) -> None:
        ctx.on_rollback(other_module.undo_elsewhere, 1)
        await ctx.continue_as()

    play = Play(trip).run()
    assert play.failure.type == "WorkflowMisuse"
    assert "decorate it with @step" in play.failure.message
    assert CALLED == [["undo", 1]], "the run that fails is rolled back by the function that it has in memory"
