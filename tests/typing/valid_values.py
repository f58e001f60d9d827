"""Static types of values follow the `type=` that a caller passes. Never executed: `test_typed_values` runs mypy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_type

from perdure import Client, Complete, RunStatus, Suspended, event
from perdure.client.views import DeadLetterView, StreamItemView


@dataclass
class Progress:
    done: int


@event
class Paid:
    cents: int


async def of_dead_letters(client: Client) -> None:
    found = await client.dead_letters(Paid, limit=3)
    assert_type(found, list[DeadLetterView[Paid]])
    assert_type(found[0].value, Paid)
    assert_type(found[0].value.cents, int)
    assert_type(found[0].target_status, RunStatus | None)
    assert_type(await client.dead_letters(), list[DeadLetterView[Any]])
    assert_type(await client.dead_letters("Paid", kind="event"), list[DeadLetterView[Any]])


async def of_results(client: Client) -> None:
    assert_type(await client.result("r"), Any)
    assert_type(await client.result("r", 3, type=Progress), Progress)
    assert_type(await client.result("r", type=list[Progress]), list[Progress])
    assert_type(await client.poll("r"), Complete[Any] | Suspended | None)
    assert_type(await client.poll("r", type=Progress), Complete[Progress] | Suspended | None)
    assert_type(await client.request("r", Paid(1), 3), Any)
    assert_type(await client.request("r", Paid(1), 3, type=Progress), Progress)


async def of_published_values(client: Client) -> None:
    assert_type(await client.published("r"), dict[str, Any])
    assert_type(await client.published("r", "progress"), Any)
    assert_type(await client.published("r", "progress", Progress), Progress | None)
    assert_type(await client.published("r", "progress", type=Progress), Progress | None)
    assert_type(await client.published("r", type=Progress), dict[str, Progress])


async def of_streams(client: Client) -> None:
    async for plain in client.read_stream("r", "lines"):
        assert_type(plain, Any)
    async for item in client.read_stream("r", "lines", type=Progress):
        assert_type(item, Progress)
    async for detailed in client.read_stream("r", "lines", 3, type=Progress, details=True):
        assert_type(detailed, StreamItemView[Progress])


async def of_invalid_uses(client: Client) -> None:
    wrong: list[DeadLetterView[Progress]] = await client.dead_letters(Paid)  # type: ignore[arg-type]
    await client.dead_letters(3)  # type: ignore[call-overload]
    assert wrong
