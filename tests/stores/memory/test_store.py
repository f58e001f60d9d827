"""The memory store passes the contract, and its data outlives the engines that open it."""

from __future__ import annotations

import asyncio

from perdure.stores.memory.due_queue import DueQueue
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.results import Committed
from perdure.testing.contract.builders import claim, claim_ids, deliver, entry, load, run, suspended, turn, worker
from perdure.testing.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    async def make_store(self) -> Store:
        return MemoryStore()

    async def again(self, store: Store) -> Store:
        return store


def test_memory_store_implements_the_protocol() -> None:
    assert isinstance(MemoryStore(), Store)


def test_data_survives_closing() -> None:
    store = MemoryStore()

    async def write_and_close() -> None:
        await store.open(shards=1)
        await store.join(worker("a"))
        await store.commit([run(owner="a"), turn(0, entry())])
        await store.close()
        await store.close()

    async def reopen_and_write() -> None:
        await store.open(shards=1)
        assert (await load(store)).position == 1
        assert await store.commit([turn(1, entry("b", 1))]) == [Committed()]

    asyncio.run(write_and_close())
    asyncio.run(reopen_and_write())


def test_a_listener_whose_loop_is_closed_is_skipped() -> None:
    store = MemoryStore()
    notified: list[frozenset[str] | None] = []

    async def listen() -> None:
        await store.open(shards=1)
        store.on_change(notified.append)

    async def change() -> None:
        await store.commit([run()])

    asyncio.run(listen())
    asyncio.run(change())
    assert notified == []


def test_a_listener_outside_any_loop_is_called_at_once() -> None:
    store = MemoryStore()
    notified: list[frozenset[str] | None] = []
    store.on_change(notified.append)
    asyncio.run(store.commit([run()]))
    assert notified == [frozenset(("r",))]


def test_repeated_suspensions_of_a_run_do_not_grow_the_due_queue() -> None:
    async def suspend_repeatedly() -> None:
        store = MemoryStore()
        await store.open(shards=1)
        await store.join(worker("a"))
        await store.commit([run(owner="a"), turn(0, patch=suspended(1e9))])
        for n in range(1, 1000):
            await store.commit(
                [deliver(f"m{n}"), turn(n, owned=False, seen=n, consumed=(n,), patch=suspended(1e9 + n))]
            )
        (queue,) = store._runs._due.values()
        assert len(queue) == 1
        assert len(queue._heap) < 100
        assert await claim_ids(store, claim(now=1e9)) == []
        assert await claim_ids(store, claim(now=2e9)) == ["r"]

    asyncio.run(suspend_repeatedly())


def test_due_queue_orders_times_and_drops_replaced_ones() -> None:
    due = DueQueue()
    for id, at in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("a", 0.5), ("b", None), ("d", 2.0)):
        due.put(id, at)
    assert due.head() == (0.5, "a")
    due.put("a", 9.0)
    order = []
    while (head := due.head()) is not None:
        order.append(head)
        due.put(head[1], None)
    assert order == [(2.0, "c"), (2.0, "d"), (9.0, "a")]
    assert len(due) == 0
