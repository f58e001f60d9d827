"""Process 10,000 items with a sliding window: `python batch.py`.

At any time `WINDOW` items are being processed. When one is done, the next one starts: a slow item delays no other. Each
item is a durable step: after a crash, completed items are not processed again.

The history is bounded: after `ITEMS_PER_GENERATION` items the run continues as new, with the offset and the totals as
its input. Without that, a run of a million items would load a million entries after a crash.
"""

import asyncio
import sys
from dataclasses import dataclass

from perdure import Context, Engine, step, workflow

WINDOW = 100
ITEMS_PER_GENERATION = 1_000


@dataclass
class Progress:
    offset: int = 0
    accepted: int = 0


@step
async def process(number: int) -> bool:
    """Process one item; return whether it was accepted. A real one would call a service."""
    return number % 10 != 0


@workflow
async def process_all(ctx: Context, items: int, progress: Progress) -> int:
    end = min(progress.offset + ITEMS_PER_GENERATION, items)
    results = await ctx.map(process, range(progress.offset, end), concurrency=WINDOW)
    progress = Progress(end, progress.accepted + sum(results))
    await ctx.publish("progress", f"{progress.offset} of {items}")
    if progress.offset < items:
        await ctx.continue_as(items, progress)
    return progress.accepted


async def main(items: int) -> None:
    async with Engine("sqlite:///batch.db") as engine:
        run = await engine.start(process_all, items, Progress(), id=f"batch-{items}")
        print(f"{await run.result()} items accepted, {(await engine.published(run.id))['progress']}")
        print(f"{(await run.describe()).generation + 1} generations")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
