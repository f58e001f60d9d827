"""Types that only pydantic supports, as payloads, results, events, published values and deferreds of runs."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, HttpUrl, PositiveInt, Tag

from perdure import Context, InvalidPayload, event, step, workflow
from tests.engine.store_matrix import on_every_store


@dataclass
class TextPart:
    text: str
    at: datetime
    kind: Literal["text"] = "text"


@dataclass
class ImagePart:
    data: bytes
    kind: Literal["image"] = "image"


def tag_of(part: Any) -> str:
    if isinstance(part, dict) and "content" in part:
        return "former-text"
    return str(part["kind"] if isinstance(part, dict) else part.kind)


def translate_former(part: Any) -> Any:
    return {"text": part["content"], "at": "2023-01-01T00:00:00Z"} if isinstance(part, dict) else part


Part = Annotated[  # as frameworks define it: one class is a member twice, to read what former versions wrote
    Annotated[TextPart, Tag("text")]
    | Annotated[ImagePart, Tag("image")]
    | Annotated[TextPart, BeforeValidator(translate_former), Tag("former-text")],
    Discriminator(tag_of),
]


@dataclass
class ModelRequest:
    parts: list[Part]
    kind: Literal["request"] = "request"


@dataclass
class ModelResponse:
    parts: list[Part]
    kind: Literal["response"] = "response"


ModelMessage = Annotated[ModelRequest | ModelResponse, Discriminator("kind")]


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


@event(name="pydantic.adopted")
@dataclass
class Chosen:
    pet: Pet
    count: PositiveInt


@step
async def respond(messages: list[ModelMessage]) -> list[ModelMessage]:
    assert [type(each) for each in messages] == [ModelRequest]
    return [*messages, ModelResponse([ImagePart(b"\xff\x00")])]


@step
def locate(url: HttpUrl) -> Path:
    return Path(url.path or "/")


@workflow
async def converse(ctx: Context, messages: list[ModelMessage]) -> list[ModelMessage]:
    return await respond(messages)


@workflow
async def choose(ctx: Context, count: PositiveInt, url: HttpUrl) -> dict[str, Any]:
    await ctx.publish("path", str(await locate(url)))
    chosen = await ctx.receive(Chosen)
    pet = await ctx.deferred("pet", Pet)
    return {"pets": [type(chosen.pet).__name__, type(pet).__name__], "count": chosen.count + count}


HELLO: list[ModelMessage] = [ModelRequest([TextPart("hi", datetime(2024, 1, 1, tzinfo=UTC))])]


@on_every_store
async def test_messages_of_an_agent_are_restored_with_their_classes(h):
    engine = await h.engine(converse)
    run = await engine.start(converse, HELLO, id="chat")
    expected = [*HELLO, ModelResponse([ImagePart(b"\xff\x00")])]
    assert await h.run_to_end(run) == expected
    assert await (await h.client()).result("chat") == expected
    assert not (await engine.start(converse, HELLO, id="chat")).created  # payloads are compared as values
    former: Any = [{"kind": "request", "parts": [{"content": "hi"}]}]
    first, _ = await h.drive(engine.execute(converse, former))
    assert first == ModelRequest([TextPart("hi", datetime(2023, 1, 1, tzinfo=UTC))])


@on_every_store
async def test_rules_of_pydantic_apply_to_payloads_events_and_deferreds(h):
    engine = await h.engine(choose)
    with pytest.raises(InvalidPayload, match="count: Input should be greater than 0"):
        await engine.start(choose, -1, HttpUrl("https://example.org/a"), id="run")
    assert await engine.status("run") is None
    run = await engine.start(choose, 1, HttpUrl("https://example.org/a"), id="run")
    with pytest.raises(InvalidPayload, match="count: Input should be greater than 0"):
        await run.send(Chosen(Dog(), 0))
    await run.send("pydantic.adopted", {"pet": {"kind": "cow"}, "count": 1})  # becomes a dead letter
    await run.send(Chosen(Dog(), 2))
    await h.settle()
    await engine.complete(await engine.deferred_token("run", "pet"), {"kind": "cat"})
    assert await h.run_to_end(run) == {"pets": ["Dog", "Cat"], "count": 3}
    assert await engine.published("run", "path", type=Path) == Path("/a")
    (dead_letter,) = await engine.dead_letters("pydantic.adopted")
    assert "does not match any of the expected tags" in dead_letter.reason
