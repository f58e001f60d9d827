"""Runs, tags and documents that come and go leave nothing behind: memory and files stop growing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.model.queries import RunQuery
from perdure.model.tags import TagValue
from perdure.model.turns import TurnExtras
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.results import Committed
from perdure.stores.sqlite.store import SqliteStore
from perdure.stores.writes import PutDocument, TagRun
from perdure.testing.contract.builders import deliver, run, succeeded, turn, waiting, worker

RUNS = 200  # of one wave
SETTLED = 4  # waves until free pages and spare capacity suffice
WAVES = 12


async def churn(store: Store, wave: int) -> None:
    """Create runs with tags, children, topics and documents, change them, end them and prune everything."""
    now = 1000.0 * wave
    ids = [f"w{wave}-{n}" for n in range(RUNS)]
    for n, id in enumerate(ids):
        tags: dict[str, TagValue] = {"tenant": f"t{n}", "wave": wave, "n": n}
        await store.commit([run(id, owner="a", parent=f"p-{id}", attached=True, tags=tags, created_at=now)])
    for n, id in enumerate(ids):
        extras = TurnExtras(tags={"n": n + 1, "more": f"{wave}/{n}", "tenant": None})
        await store.commit([turn(0, id=id, extras=extras, now=now), deliver(f"m{id}", id=id, now=now)])
        ended = turn(1, id=id, seen=1, consumed=(1,), patch=succeeded(now, prune_at=now + 5), now=now)
        await store.commit([ended, TagRun(run_id=id, tags={"after": True})])
    await store.commit(waiting(f"r{wave}", f"topic{wave % 3}", created_at=now))
    ended = replace(turn(1, id=f"r{wave}", patch=succeeded(now, prune_at=now + 5), now=now), owned=False)
    await store.commit([ended])
    await store.commit([put(f"d{wave}-{n}", 0, expires_at=now + 5, due_at=now) for n in range(RUNS)])
    version = 0
    for n in range(RUNS):
        (result,) = await store.commit(
            [put("changing", version, body=b"x" * n, write_id=f"{wave}/{n}", due_at=now + n)]
        )
        assert isinstance(result, Committed)
        version = result.version
    deletion = put("changing", version, body=None, write_id=f"{wave}/deleted")
    await store.commit([deletion])
    pruned: list[str] = []
    while page := await store.prune(now + 10, 150, keep_ids_for=1.0):
        pruned += page
    await store.prune(now + 100)
    assert sorted(pruned) == sorted([*ids, f"r{wave}"])
    assert (await store.runs(RunQuery())).runs == ()
    assert await store.documents("k") == []


def put(id: str, base: int, *, body: bytes | None = b"{}", write_id: str = "w", **fields: Any) -> PutDocument:
    return PutDocument(kind="k", id=id, base=base, body=body, write_id=write_id, **fields)


def test_a_memory_store_does_not_grow() -> None:
    async def main() -> list[int]:
        store = MemoryStore()
        await store.open(shards=4)
        await store.join(worker("a"))
        sizes = []
        for wave in range(1, WAVES + 1):
            await churn(store, wave)
            sizes.append(sum(1 for _ in reachable(vars(store), set())))
        return sizes

    sizes = asyncio.run(main())
    assert max(sizes[SETTLED:]) <= sizes[SETTLED - 1] + 20, sizes


def reachable(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield every value that belongs to the store."""
    if id(value) in seen or (callable(value) and not hasattr(value, "__dict__")):
        return
    seen.add(id(value))
    yield value
    inside: list[Any] = []
    if isinstance(value, dict):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inside = list(value)
    elif isinstance(value, msgspec.Struct):
        inside = [getattr(value, name) for name in value.__struct_fields__]
    if type(value).__module__.startswith("perdure.stores.memory"):
        inside += vars(value).values() if hasattr(value, "__dict__") else []
    for each in inside:
        yield from reachable(each, seen)


def test_a_sqlite_file_does_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "store.db"

    async def main() -> list[int]:
        sizes = []
        for wave in range(1, WAVES + 1):
            store = SqliteStore(str(path), synchronous="off")
            await store.open(shards=4)
            await store.join(worker("a"))
            await churn(store, wave)
            await store.close()
            sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
        return sizes

    sizes = asyncio.run(main())
    assert max(sizes[SETTLED:]) <= sizes[SETTLED - 1] * 1.1, sizes
