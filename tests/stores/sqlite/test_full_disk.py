"""A disk that is nearly full: runs whose writes fit continue, and the others continue when there is space again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from perdure import Context, RunStatus, step, workflow
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing import Harness, VirtualClock

BIG_BYTES = 4_000_000
FREE_PAGES = 200  # of 4 KiB, for all runs that fit


@step
async def produce(size: int) -> str:
    return "x" * size


@workflow
async def production(ctx: Context, size: int) -> int:
    await ctx.sleep(1)
    return len(await produce(size))


def test_write_that_does_not_fit_on_the_disk_blocks_no_other_write(tmp_path: Path) -> None:
    async def test() -> None:
        clock = VirtualClock()
        store = SqliteStore(str(tmp_path / "runs.db"), clock=clock, synchronous="off")
        async with Harness(store, clock=clock) as h:
            engine = await h.engine(production)
            sizes = {"big": BIG_BYTES, **{f"r{n}": n for n in range(10)}}
            await asyncio.gather(*(engine.start(production, size, id=id) for id, size in sizes.items()))
            await limit_pages(store, free=FREE_PAGES)
            await h.clock.advance(30)
            assert [await engine.status(f"r{n}") for n in range(10)] == [RunStatus.SUCCEEDED] * 10
            assert await engine.status("big") is RunStatus.RUNNING
            assert await h.drive(engine.execute(production, 7), within=10) == 7
            await limit_pages(store, free=10 * BIG_BYTES // 4096)
            assert await h.run_to_end(engine.get("big")) == BIG_BYTES
            assert h.executed("big") == [("produce", 1)]

    asyncio.run(test())


async def limit_pages(store: SqliteStore, free: int) -> None:
    """Limit the size of the file to its current pages and `free` more; SQLite then reports a full disk."""
    await store._write(lambda connection: connection.pragma("max_page_count", connection.pragma("page_count") + free))
