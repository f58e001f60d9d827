"""A run may be due again, and claimed, before its worker has heard that the turn which suspended it is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from perdure import Context, Engine, EngineConfig, Retry, RunStatus, workflow
from perdure.store.base import Answer, Claim, ClaimedRun, CommitTurn, Write
from perdure.store.memory import MemoryStore


class LateAnswers(MemoryStore):
    """Answers a turn that suspends a run only once the run has been claimed again."""

    def __init__(self) -> None:
        super().__init__()
        self.claimed_again = asyncio.Event()
        self.late = 0

    async def commit(self, batch: Sequence[Write]) -> list[Answer]:
        answers = await super().commit(batch)
        if any(_suspends(write) for write in batch):
            await asyncio.wait_for(self.claimed_again.wait(), 30)
            for _ in range(10):
                await asyncio.sleep(0)
            self.late += 1
        return answers

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        found = await super().claim(claim)
        if found:
            self.claimed_again.set()
        return found


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


@pytest.mark.parametrize(("definition", "result"), [(naps, "rested"), (fails_once, 1)])
def test_a_run_that_is_claimed_before_its_suspension_is_answered_goes_on(definition, result) -> None:
    async def main() -> None:
        store = LateAnswers()
        async with Engine(store, [definition], EngineConfig(sweep_interval=0.05)) as engine:
            run = await engine.start(definition)
            assert await run.result(timeout=30) == result
        assert store.late == 1

    asyncio.run(main())
