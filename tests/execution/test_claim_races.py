"""A run may be due again, and be claimed, before the result of its suspending turn reaches the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import pytest
from msgspec.structs import replace

from perdure import Client, Context, Engine, EngineConfig, Retry, RunStatus, workflow
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Claim
from perdure.stores.results import ClaimedRun, WriteResult
from perdure.stores.writes import CommitTurn, Write
from perdure.testing import VirtualClock

T = TypeVar("T")


class LateResults(MemoryStore):
    """Returns the result of a turn that suspends a run after the run was claimed again."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.claimed_again = asyncio.Event()
        self.late = 0

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        results = await super().commit(batch)
        if any(_suspends(write) for write in batch):
            await self.claimed_again.wait()
            for _ in range(10):
                await asyncio.sleep(0)
            self.late += 1
        return results

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        found = await super().claim(claim)
        if found:
            self.claimed_again.set()
        return found


class SkippingClaims(MemoryStore):
    """Returns one run per claim, as if other transactions had locked the rest: fewer than requested and due."""

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        return await super().claim(replace(claim, limit=1))


def _suspends(write: Write) -> bool:
    return isinstance(write, CommitTurn) and write.patch is not None and write.patch.status is RunStatus.SUSPENDED


@workflow
async def naps(ctx: Context) -> str:
    await ctx.sleep(0.01)
    return "rested"


@workflow(retry=Retry(initial=0.01))
async def fails_once(ctx: Context) -> int:
    if ctx.generation == 0:
        raise ConnectionError("once")
    return ctx.generation


async def drive(clock: VirtualClock, work: Awaitable[T]) -> T:
    """Return the result of `work`, and move virtual time from timer to timer meanwhile."""
    task = asyncio.ensure_future(work)
    await clock.settle()
    while not task.done():
        assert await clock.move_to_next(clock.now() + 60.0), "the work does not end"
    return task.result()


@pytest.mark.parametrize(("definition", "result"), [(naps, "rested"), (fails_once, 1)])
def test_run_claimed_before_the_result_of_its_suspending_turn_arrives_continues(definition, result) -> None:
    async def main() -> None:
        clock = VirtualClock()
        store = LateResults(clock)
        async with Engine(store, [definition], EngineConfig(sweep_interval=0.05), clock=clock) as engine:
            run = await engine.start(definition)
            assert await drive(clock, run.result(timeout=3600)) == result
        assert store.late == 1

    asyncio.run(main())


def test_run_that_a_claim_skipped_is_claimed_without_waiting_for_a_sweep() -> None:
    async def main() -> None:
        clock = VirtualClock()
        store = SkippingClaims(clock)
        async with Client(store, clock=clock) as client:
            runs = [await client.start(naps) for _ in range(5)]
            async with Engine(store, [naps], EngineConfig(sweep_interval=1000.0, lease=5000.0), clock=clock):
                results = asyncio.gather(*(run.result(timeout=3600) for run in runs))
                assert await drive(clock, results) == ["rested"] * 5

    asyncio.run(main())
