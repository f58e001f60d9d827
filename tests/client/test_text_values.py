"""Subclasses of str and enum members are accepted as their text, and any text can be a payload, on every store."""

from enum import Enum, StrEnum
from typing import Any

import pytest

from perdure import Context, RunFailed, RunQuery, current_step, step, workflow
from perdure.errors import InvalidPayload
from tests.engine.store_matrix import on_every_store


class Name(str):
    """A subclass of str whose own text is another one."""

    def __str__(self) -> str:
        return "another text"

    def __format__(self, spec: str) -> str:
        return "another text"


class Mixed(str, Enum):  # noqa: UP042 - its str() is `Mixed.RED`
    RED = "red"


class Modern(StrEnum):
    RED = "red"


class Plain(Enum):
    RED = "red"


KINDS = [pytest.param(each, id=type(each).__name__) for each in (Name("red"), Mixed.RED, Modern.RED, Plain.RED)]
ODD_TEXT = "nul \0, newline \n, quotes '\", emoji 🙂, percent %00, backslash \\u0000, \x7f"


@workflow(name="texts.echoes")
async def echoes(ctx: Context) -> Any:
    await ctx.publish(Name("key"), 1)
    await ctx.stream(Name("log")).write(1)
    return await ctx.receive("red")


@workflow(name="texts.keyed", idempotency_key=lambda key: Mixed.RED)
async def keyed(ctx: Context, key: int) -> str:
    return ctx.run_id


@pytest.mark.parametrize("text", KINDS)
@on_every_store
async def test_strings_and_enums_are_ids_and_tags_as_their_text(h, text):
    engine = await h.engine(echoes)
    run = await engine.start(echoes, id=text, tags={text: text})
    await h.settle()
    described = await engine.describe(text)
    assert (described.id, described.tags) == ("red", {"red": "red"})
    assert type(run.id) is type(described.id) is str
    assert {type(each) for pair in described.tags.items() for each in pair} == {str}
    for query in (
        RunQuery(tags={text: text}),
        RunQuery(id_prefix=text),
        RunQuery(workflow=Name("texts.echoes")),
        RunQuery(status=Name("suspended")),
    ):
        assert [each.id for each in await engine.runs(query)] == ["red"]
    assert await engine.get(text).status() == "suspended"
    assert (await engine.published(text)) == {"key": 1}
    assert await anext(engine.read_stream(text, Name("log"))) == 1
    await engine.send(text, "red", 7, event_id=text)
    await engine.send("red", "red", 8, event_id="red")  # the same event
    assert await h.drive(engine.result(text)) == 7
    assert await engine.cancel(text) is False
    forked = await engine.fork(text, Name("red"), id=Name("fork"))
    assert (forked.id, type(forked.id)) == ("fork", str)


@on_every_store
async def test_enum_as_idempotency_key_and_topic_is_its_text(h):
    engine = await h.engine(echoes, keyed)
    assert await h.drive(engine.execute(keyed, 1)) == "texts.keyed:red"
    await engine.start(Name("texts.echoes"), id="waiting")
    await h.settle()
    assert await engine.emit(Mixed.RED, 9) == 1
    assert await h.drive(engine.result("waiting")) == 9


@step(retry=None)
async def fails(text: str) -> None:
    current_step().write("log", text)
    raise ValueError(text)


@workflow(name="texts.odd")
async def odd(ctx: Context, text: str) -> list[Any]:
    await ctx.publish("key", text)
    await ctx.stream("log").write({text: [text]})
    received = await ctx.receive("topic")
    try:
        await fails(text)
    except Exception as error:
        return [received, text, str(error)]
    return []


@step(retry=None)
async def cannot_undo(value: str) -> None:
    raise ValueError(value)


@step(compensate=cannot_undo)
async def compensated(value: str) -> str:
    return value


@workflow(name="texts.rolls_back")
async def rolls_back(ctx: Context, text: str) -> None:
    await compensated(text)
    raise ValueError(text)


@on_every_store
async def test_any_text_is_stored_and_read_again(h):
    engine = await h.engine(odd)
    await engine.start(odd, ODD_TEXT, id="odd")
    await h.settle()
    await engine.send("odd", "topic", {ODD_TEXT: ODD_TEXT})
    received, text, message = await h.drive(engine.result("odd"))
    assert (received, text) == ({ODD_TEXT: ODD_TEXT}, ODD_TEXT)
    assert ODD_TEXT in message
    assert await engine.published("odd") == {"key": ODD_TEXT}
    assert [each async for each in engine.read_stream("odd", "log")] == [{ODD_TEXT: [ODD_TEXT]}, ODD_TEXT]
    assert (await engine.describe("odd")).input == {"text": ODD_TEXT}


@on_every_store
async def test_any_text_in_an_error_and_in_a_dead_letter_is_stored(h):
    engine = await h.engine(rolls_back)
    run = await engine.start(rolls_back, ODD_TEXT, id="odd")
    with pytest.raises(RunFailed) as caught:
        await h.drive(run.result())
    assert caught.value.message == ODD_TEXT
    (letter,) = await engine.dead_letters()
    assert letter.kind == "compensation"
    assert ODD_TEXT.replace("\0", "") in letter.reason.replace("\0", "").replace("\ufffd", "")


@on_every_store
async def test_error_for_nan_names_a_way_that_exists(h):
    engine = await h.engine(odd)
    with pytest.raises(InvalidPayload, match="use None, or text such as 'nan'"):
        await engine.send("x", "topic", [float("nan")])
    assert not engine.faults.committed
