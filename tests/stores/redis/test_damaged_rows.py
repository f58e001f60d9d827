"""A missing or damaged row of one run blocks neither claims nor a takeover of the other runs."""

import asyncio
from pathlib import Path

import pytest
import redis.asyncio

from perdure import Context, step, workflow
from perdure.testing import Harness, VirtualClock
from tests.engine.store_matrix import make_store
from tests.servers.redis import shared_url


@step
async def blocked_step() -> int:
    return 1


@workflow(name="blocked")
async def blocked(ctx: Context) -> int:
    await ctx.sleep(10)
    return await blocked_step()


DAMAGES = {
    "missing row": ("DEL", "run:bad"),
    "owner": ("HSET", "run:bad", "owner", "unknown"),
    "last_message_no": ("HSET", "run:bad", "last_message_no", "garbage"),
    "skipped": ("HSET", "run:bad", "skipped", "garbage"),
    "created_at": ("HSET", "run:bad", "created_at", "garbage"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("state", ["suspended", "owned"])
def test_damaged_row_does_not_block_other_runs(damage: str, state: str, tmp_path: Path):
    async def main() -> None:
        clock = VirtualClock()
        store = make_store("redis", tmp_path, clock)
        async with Harness(store, clock=clock) as h:
            first = await h.engine(blocked, concurrency=None)
            for run_id in ("bad", "good"):
                await h.drive(first.start(blocked.options(id=run_id)))
            await h.clock.advance(1)
            if state == "owned":
                first.faults.crash(1, "after", call="claim")
                await h.clock.advance(10)
            await h.crash(first)
            command, key, *values = DAMAGES[damage]
            async with redis.asyncio.Redis.from_url(shared_url()) as client:
                await client.execute_command(command, f"{store._partitions.tag(0)}:{key}", *values)  # type: ignore[attr-defined]
            second = await h.engine(blocked)
            assert await h.drive(second.result("good"), within=200) == 1

    asyncio.run(main())
