"""The fast path leaves the same keys, results and hints as the general path, and declines read_all_keys else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from perdure.errors import StoreError
from perdure.stores.protocol import Claim
from perdure.stores.redis import fast_path
from perdure.stores.redis.store import RedisStore
from perdure.stores.results import WriteResult
from perdure.stores.writes import CreateRun, Write
from perdure.testing.contract.builders import entry, run, turn, worker
from tests.servers.redis import prefix_of_its_own
from tests.stores.fast_path_cases import ELIGIBLE, INELIGIBLE, SCENARIOS, prepare

CHILD = "a new child"  # also in the indexes of its parent: no fast path here

READ = {
    b"hash": ("HGETALL",),
    b"set": ("SMEMBERS",),
    b"zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    b"list": ("LRANGE", 0, -1),
    b"string": ("GET",),
}


async def read_all_keys(store: RedisStore) -> dict[bytes, Any]:
    """Return all keys and values without the prefix, except when workers were fenced, which is real time."""
    command, tag, found = store._server.command, store._partitions.tag(0), {}
    for key in set(await command("KEYS", f"{tag}:*")) - {f"{tag}:fenced:".encode()}:
        kind = await command("TYPE", key)
        name, *more = READ[kind]
        value = await command(name, key, *more)
        if kind == b"hash":
            value = value if isinstance(value, dict) else dict(zip(value[::2], value[1::2], strict=True))
        found[key.removeprefix(tag.encode())] = sorted(value) if kind == b"set" else value
    return found


def apply(before: Sequence[Write | Claim], write: Write) -> tuple[list[WriteResult], list[Any], list[str]]:
    """Return the result of a write, the keys and hints that it caused, and the scripts that it called."""

    async def scenario(url: str) -> tuple[list[WriteResult], list[Any], list[str]]:
        store, other = RedisStore(url), RedisStore(url)
        await store.open(shards=16)
        await other.open(shards=16)
        hints: list[Any] = []
        received: asyncio.Queue[Any] = asyncio.Queue()
        other.on_change(received.put_nowait)

        async def read_hints_until(last: str) -> list[Any]:
            """Return the hints of the other store up to the one for this run, which is created on the general path."""
            await store.commit([run(last), run(last)])
            return [hint async for hint in until(frozenset([last]), received)]

        try:
            await prepare(store, before)
            await read_hints_until("before")
            unsubscribe = store.on_change(hints.append)
            called = record_scripts(store)
            results = await store.commit([write])
            called = called[:]
            left = await read_all_keys(store)
            unsubscribe()
            return results, [left, hints, await read_hints_until("after")], called
        finally:
            await store.close()
            await other.close()

    with prefix_of_its_own() as url:
        return asyncio.run(scenario(url))


async def until(last: Any, queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (each := await asyncio.wait_for(queue.get(), 60)) != last:
        yield each


def record_scripts(store: RedisStore) -> list[str]:
    """Return a list to which the names of all scripts are added that the store calls from now on."""
    called: list[str] = []
    call = store._server.call

    async def record_and_call(name: str, tag: str, *arguments: bytes | str | int) -> Any:
        called.append(name)
        return await call(name, tag, *arguments)

    store._server.call = record_and_call  # type: ignore[method-assign]
    return called


@pytest.mark.parametrize("what", SCENARIOS)
def test_fast_path_leaves_the_same_results_and_keys_as_the_general_path(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, write = SCENARIOS[what]
    fast = apply(before, write)
    monkeypatch.setattr(fast_path, "build_call", lambda *_: None)
    general = apply(before, write)
    assert fast[:2] == general[:2]


@pytest.mark.parametrize("what", [each for each in ELIGIBLE if each != CHILD])
def test_eligible_write_is_one_fast_path_call(what: str) -> None:
    _, _, called = apply((), ELIGIBLE[what])
    assert called == ["fast_create" if isinstance(ELIGIBLE[what], CreateRun) else "fast_turn"]


def test_turn_after_dropped_entries_takes_the_fast_path() -> None:
    """Workflows with loops drop entries often."""
    _, _, called = apply(*SCENARIOS["a turn after entries were dropped"])
    assert called == ["fast_turn"]


@pytest.mark.parametrize("what", [*INELIGIBLE, CHILD])
def test_ineligible_write_does_not_try_the_fast_path(what: str) -> None:
    _, _, called = apply((), {**INELIGIBLE, **ELIGIBLE}[what])
    assert called == ["commit"]


@pytest.mark.parametrize(
    "write", [run("r\ud800", owner="a"), turn(0, entry("charge\ud800"))], ids=["a new run", "a step"]
)
def test_invalid_text_is_refused_before_anything_is_sent(write: Write) -> None:
    async def scenario(url: str) -> None:
        store = RedisStore(url)
        await store.open(shards=16)
        try:
            await store.join(worker("a"))
            await store.commit([run(owner="a")])
            before = await read_all_keys(store)
            with pytest.raises(StoreError, match="cannot be stored"):
                await store.commit([write])
            assert await read_all_keys(store) == before
        finally:
            await store.close()

    with prefix_of_its_own() as url:
        asyncio.run(scenario(url))
