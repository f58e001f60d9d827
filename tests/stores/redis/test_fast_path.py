"""The short way of plain writes: it leaves what the long way leaves, and leaves to that whatever is not plain."""

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
from tests.stores.fast_path_cases import NOT_PLAIN, PLAIN, SITUATIONS, set_scene

CHILD = "a new child"  # is in its parent's indexes, too: not plain here

READ = {
    b"hash": ("HGETALL",),
    b"set": ("SMEMBERS",),
    b"zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    b"list": ("LRANGE", 0, -1),
    b"string": ("GET",),
}


async def everything(store: RedisStore) -> dict[bytes, Any]:
    """All keys of the store with what is in them, without the prefix; but for when workers went, which is real time."""
    ask, tag, found = store._server.command, store._partitions.tag(0), {}
    for key in set(await ask("KEYS", f"{tag}:*")) - {f"{tag}:fenced:".encode()}:
        kind = await ask("TYPE", key)
        command, *more = READ[kind]
        value = await ask(command, key, *more)
        if kind == b"hash":
            value = value if isinstance(value, dict) else dict(zip(value[::2], value[1::2], strict=True))
        found[key.removeprefix(tag.encode())] = sorted(value) if kind == b"set" else value
    return found


def play(before: Sequence[Write | Claim], write: Write) -> tuple[list[WriteResult], list[Any], list[str]]:
    """The answer to a write, what it has left and told, and the scripts that it called."""

    async def life(url: str) -> tuple[list[WriteResult], list[Any], list[str]]:
        store, other = RedisStore(url), RedisStore(url)
        await store.open(shards=16)
        await other.open(shards=16)
        told: list[Any] = []
        heard: asyncio.Queue[Any] = asyncio.Queue()
        other.on_change(heard.put_nowait)

        async def news_until(last: str) -> list[Any]:
            """What the other one hears before this run is made, which it is told like everybody."""
            await store.commit([run(last), run(last)])
            return [news async for news in until(frozenset([last]), heard)]

        try:
            await set_scene(store, before)
            await news_until("before")
            leave = store.on_change(told.append)
            called = called_by(store)
            answers = await store.commit([write])
            called = called[:]
            left = await everything(store)
            leave()
            return answers, [left, told, await news_until("after")], called
        finally:
            await store.close()
            await other.close()

    with prefix_of_its_own() as url:
        return asyncio.run(life(url))


async def until(last: Any, queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (each := await asyncio.wait_for(queue.get(), 10)) != last:
        yield each


def called_by(store: RedisStore) -> list[str]:
    """The names of the scripts that it calls from now on."""
    called: list[str] = []
    call = store._server.call

    async def noted(name: str, tag: str, *arguments: bytes | str | int) -> Any:
        called.append(name)
        return await call(name, tag, *arguments)

    store._server.call = noted  # type: ignore[method-assign]
    return called


@pytest.mark.parametrize("what", SITUATIONS)
def test_answers_and_keys_are_those_of_the_long_way(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = SITUATIONS[what]
    plainly = play(before, write)
    monkeypatch.setattr(fast_path, "build_call", lambda *_: None)
    at_length = play(before, write)
    assert plainly[:2] == at_length[:2]


@pytest.mark.parametrize("what", [each for each in PLAIN if each != CHILD])
def test_what_is_plain_is_one_small_script(what: str) -> None:
    _, _, called = play((), PLAIN[what])
    assert called == ["fast_create" if isinstance(PLAIN[what], CreateRun) else "fast_turn"]


def test_a_turn_after_entries_were_dropped_is_still_plain() -> None:
    """A loop drops entries all the time."""
    _, _, called = play(*SITUATIONS["a turn after entries were dropped"])
    assert called == ["fast_turn"]


@pytest.mark.parametrize("what", [*NOT_PLAIN, CHILD])
def test_what_is_not_is_not_tried(what: str) -> None:
    _, _, called = play((), {**NOT_PLAIN, **PLAIN}[what])
    assert called == ["commit"]


@pytest.mark.parametrize(
    "write", [run("r\ud800", owner="a"), turn(0, entry("charge\ud800"))], ids=["a new run", "a step"]
)
def test_what_is_no_text_is_refused_with_nothing_sent(write: Write) -> None:
    async def life(url: str) -> None:
        store = RedisStore(url)
        await store.open(shards=16)
        try:
            await store.join(worker("a"))
            await store.commit([run(owner="a")])
            before = await everything(store)
            with pytest.raises(StoreError, match="cannot be stored"):
                await store.commit([write])
            assert await everything(store) == before
        finally:
            await store.close()

    with prefix_of_its_own() as url:
        asyncio.run(life(url))
