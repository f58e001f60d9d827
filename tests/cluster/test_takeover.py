"""Takeover from a dead worker: in pages, one recovery per run, and continued by another worker after a crash."""

from __future__ import annotations

import asyncio

import pytest

from perdure import Context, RunStatus, step, workflow
from perdure.cluster import membership
from tests.engine.store_matrix import on_every_store

RUNS = [f"t{n}" for n in range(5)]
LEASE = 15.0


class BlockedRuns:
    """A workflow whose step blocks until the gate opens, and a worker that crashes with five runs of it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        runs = self

        @step
        async def block() -> int:
            await runs.gate.wait()
            return 1

        @workflow
        async def taken_over(ctx: Context) -> int:
            return await block()

        self.workflow = taken_over

    async def crash_worker(self, h) -> None:
        engine = await h.engine(self.workflow)
        for id in RUNS:
            await engine.start(self.workflow, id=id)
        await h.settle()
        await h.crash(engine)


@on_every_store
async def test_runs_are_taken_over_in_pages_and_each_counts_one_recovery(h, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(membership, "RELEASE_PAGE", 2)
    blocked = BlockedRuns()
    await blocked.crash_worker(h)
    second = await h.engine(blocked.workflow)
    await h.clock.advance(LEASE + 1)
    assert second.faults.calls["release_runs"] == 4, "two, two, one, and none"
    assert await h.store.owned(second.worker) == RUNS
    assert [worker.id for worker in await h.store.workers()] == [second.worker]
    blocked.gate.set()
    await h.clock.advance(1)
    for id in RUNS:
        seen = await second.describe(id)
        assert (seen.status, seen.recoveries) == (RunStatus.SUCCEEDED, 1)


@on_every_store
async def test_takeover_is_continued_by_another_worker_after_a_crash(h, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(membership, "RELEASE_PAGE", 2)
    blocked = BlockedRuns()
    await blocked.crash_worker(h)
    second = await h.engine(blocked.workflow)
    second.faults.crash(2, "before", call="release_runs")
    second.faults.pause()  # so that it claims no run of the first page before it crashes
    h.clock._now += LEASE + 1
    second.faults.unblock()
    await h.drive_until_crash(second, second.recover())
    assert second.faults.crashed.is_set()
    await h.crash(second)
    third = await h.engine(blocked.workflow)
    await h.clock.advance(LEASE + 1)
    assert await h.store.owned(third.worker) == RUNS
    assert [worker.id for worker in await h.store.workers()] == [third.worker]
    blocked.gate.set()
    await h.clock.advance(1)
    for id in RUNS:
        seen = await third.describe(id)
        assert seen.status is RunStatus.SUCCEEDED
        assert seen.recoveries >= 1, "a run that the second worker had claimed counts one more"
