"""A writer that no process follows sends nothing for steps and outputs, also while other processes are connected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from perdure.model.records import PublishedValue
from perdure.model.turns import TurnExtras
from perdure.stores.followed_runs import FollowedRuns, Kind
from perdure.testing import VirtualClock
from perdure.testing.contract.builders import SHARDS, entry, run, turn, worker
from perdure.testing.contract.streams import append, item
from tests.engine.store_matrix import STORES, another_handle, make_store

PUBLISHED = TurnExtras(published=(PublishedValue("key", b"1"),), streamed=(item(b"2"),))


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[str]]]:
    """The messages to other processes, in order: kind and runs."""
    sent: list[tuple[str, set[str]]] = []
    send: Callable[[FollowedRuns, Kind, Iterable[str]], None] = FollowedRuns._send

    def record(followed: FollowedRuns, kind: Kind, run_ids: Iterable[str]) -> None:
        ids = set(run_ids)
        if ids:
            sent.append((kind, ids))
        send(followed, kind, ids)

    monkeypatch.setattr(FollowedRuns, "_send", record)
    return sent


@pytest.mark.parametrize("kind", STORES)
def test_only_a_followed_run_causes_messages(kind: str, tmp_path: Path, messages: list[tuple[str, set[str]]]) -> None:
    async def main() -> None:
        clock = VirtualClock()
        store = make_store(kind, tmp_path, clock)
        other: Any = another_handle(store, clock)
        for each in (store, other):
            await each.open(shards=SHARDS)
        hints: list[frozenset[str] | None] = []
        try:
            await store.join(worker("a"))
            await store.commit([run("r", owner="a"), run("followed", owner="a")])
            await store.commit([append(item(b"0"), id="followed")])  # connected by now
            other.on_change(hints.append)
            await store.commit([append(item(b"1"))])
            await store.commit([turn(0, entry())])
            await store.commit([turn(1, entry("b", 1), extras=PUBLISHED)])
            assert messages == []
            progressed = asyncio.Event()
            unfollow = other.follow("followed", progressed.set)
            while not progressed.is_set():  # a follower becomes known late
                await store.commit([append(item(b"3"), id="followed"), turn(2 + len(messages), entry("c"))])
                await asyncio.sleep(0.001)
            unfollow()
            sent = {kind: ids for kind, ids in messages if kind == "progress"}
            assert sent == ({} if kind == "memory" else {"progress": {"followed"}})
            assert kind == "memory" or set(hints) <= {None}, "outputs are no change hints; SQLite's poll names no run"
        finally:
            await other.close()
            await store.close()

    asyncio.run(main())
