"""A step that declares no result type must not return an object: the workflow would get a dict."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from pydantic import BaseModel

from perdure import Context, Retry, StepFailed, current_step, step, workflow
from perdure.codec.annotation_advice import advise_annotation, contains_object
from tests.engine.store_matrix import on_every_store

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForCheckers


@dataclass
class Receipt:
    number: int


class Item(msgspec.Struct):
    name: str


class Quote(BaseModel):
    price: int


class Pair(NamedTuple):
    first: Any
    second: Any


RESULTS: dict[str, Any] = {
    "Receipt": Receipt(1),
    "Item": Item("a"),
    "Quote": Quote(price=1),
    "list[Receipt]": [Receipt(1), Receipt(2)],
    "list[Receipt | None]": [Receipt(1), None],
    "dict[str, list[Item]]": {"a": [Item("x")]},
    "tuple[Receipt, int]": (Receipt(1), 2),
    "tuple[Receipt, ...]": (Receipt(1),) * 5,
    "dict[str, int | Quote]": {"a": 1, "b": Quote(price=1)},
    "Pair": Pair(1, Receipt(1)),
}
PLAIN: list[Any] = [None, 1, "a", b"a", [1, "a"], {"a": [1, None]}, (1, 2), {1, 2}, [], {}, Pair(1, 2), [{"a": (1,)}]]
ATTEMPTS: list[str] = []


@step(retry=Retry(max_attempts=3, initial=0.1))
async def unannotated(name):
    ATTEMPTS.append(current_step().run_id)
    return RESULTS[name]


@step
def unannotated_sync(name):
    return RESULTS[name]


@step
async def explicit_any(name) -> Any:
    return RESULTS[name]


@step
async def for_checkers(name) -> "OnlyForCheckers":
    return RESULTS[name]


@step
async def annotated() -> Receipt:
    return Receipt(1)


@step
async def unannotated_plain(index):
    return PLAIN[index]


@workflow
async def calls_unannotated(ctx: Context, name: str, body: str = "") -> str:
    bodies: dict[str, Any] = {"": unannotated, "sync": unannotated_sync, "for_checkers": for_checkers}
    try:
        await bodies[body](name)
    except StepFailed as error:
        return f"{error.type}: {error.message}"
    return "recorded"


@workflow
async def calls_others(ctx: Context) -> list[Any]:
    found = [await explicit_any("Receipt"), await annotated(), await ctx.step("part", functools.partial(make, 2))]
    try:
        await ctx.step("inline", lambda: Receipt(3))
    except StepFailed as error:
        found.append(error.message)
    plain = [await unannotated_plain(index) for index in range(len(PLAIN))]
    return [type(each).__name__ for each in found[:3]] + [found[3], len(plain)]


def make(number: int) -> Receipt:
    return Receipt(number)


def undo(number: int):
    return Receipt(number)


@workflow
async def compensates(ctx: Context) -> None:
    ctx.on_rollback(undo, 1)
    ctx.on_exit(undo, 2)
    raise ValueError("no")


@on_every_store
async def test_object_of_an_unannotated_step_is_refused_at_the_first_call(h):
    engine = await h.engine(calls_unannotated)
    for annotation in RESULTS:
        message = await h.drive(engine.execute(calls_unannotated, annotation, id=annotation))
        assert message == (
            "InvalidPayload: result of step unannotated: unannotated has no return annotation, "
            "so the workflow would get a dict; "
            f"write `async def unannotated(...) -> {annotation}`, or `-> Any` for plain data"
        )
        assert ATTEMPTS.count(annotation) >= 1
    ATTEMPTS.clear()
    await h.drive(engine.execute(calls_unannotated, "Item", id="once"))
    assert ATTEMPTS == ["once"]  # not retried


@on_every_store
async def test_error_names_sync_functions_and_annotations_that_cannot_be_resolved(h):
    engine = await h.engine(calls_unannotated)
    message = await h.drive(engine.execute(calls_unannotated, "Receipt", "sync"))
    assert "write `def unannotated_sync(...) -> Receipt`" in message
    message = await h.drive(engine.execute(calls_unannotated, "Receipt", "for_checkers"))
    assert "for_checkers has the return annotation `OnlyForCheckers`, which cannot be resolved" in message


@on_every_store
async def test_annotated_and_plain_results_are_recorded(h):
    engine = await h.engine(calls_others)
    *kinds, inline, count = await h.drive(engine.execute(calls_others))
    assert kinds == ["dict", "Receipt", "Receipt"]
    assert "write `def inline(...) -> Receipt`" in inline
    assert count == len(PLAIN)


@on_every_store
async def test_results_of_compensations_are_not_checked(h):
    engine = await h.engine(compensates)
    run = await engine.start(compensates)
    with pytest.raises(Exception, match="no"):
        await h.run_to_end(run)
    assert await engine.dead_letters() == []
    assert [name for name, _ in h.executed(run.id)] == ["~rollback/undo", "~exit/undo"]


@pytest.mark.parametrize("annotation", RESULTS)
def test_advice_is_the_annotation_of_the_value(annotation):
    assert contains_object(RESULTS[annotation])
    assert advise_annotation(RESULTS[annotation]) == annotation


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_plain_values_contain_no_object(value):
    assert not contains_object(value)
