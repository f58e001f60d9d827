"""Taking over from a worker that is gone: in pages, each of which counts, and to be carried on with by anyone."""

from __future__ import annotations

import asyncio

import pytest

from perdure import Context, RunStatus, step, workflow
from perdure.cluster import membership
from tests.engine.store_matrix import on_every_store

RUNS = [f"t{n}" for n in range(5)]
LEASE = 15.0


class Scene:
    """A workflow whose step stands still until it is let go, and a worker that dies with five runs of it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        scene = self

        @step
        async def stand_still() -> int:
            await scene.gate.wait()
            return 1

        @workflow
        async def taken_over(ctx: Context) -> int:
            return await stand_still()

        self.workflow = taken_over

    async def leave_runs_behind(self, h) -> None:
        engine = await h.engine(self.workflow)
        for id in RUNS:
            await engine.start(self.workflow, id=id)
        await h.settle()
        await h.crash(engine)


@on_every_store
async def test_runs_are_taken_over_in_pages_and_each_counts_one_recovery(h, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(membership, "RELEASE_PAGE", 2)
    scene = Scene()
    await scene.leave_runs_behind(h)
    heir = await h.engine(scene.workflow)
    await h.clock.advance(LEASE + 1)
    assert heir.faults.calls["release_runs"] == 4, "two, two, one, and none"
    assert await h.store.owned(heir.worker) == RUNS
    assert [worker.id for worker in await h.store.workers()] == [heir.worker]
    scene.gate.set()
    await h.clock.advance(1)
    for id in RUNS:
        seen = await heir.describe(id)
        assert (seen.status, seen.recoveries) == (RunStatus.SUCCEEDED, 1)


@on_every_store
async def test_a_takeover_whose_worker_dies_in_the_middle_is_carried_on_with(h, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(membership, "RELEASE_PAGE", 2)
    scene = Scene()
    await scene.leave_runs_behind(h)
    heir = await h.engine(scene.workflow)
    heir.faults.crash(2, "before", call="release_runs")
    heir.faults.pause()  # so that it takes nothing of the first page before it dies
    h.clock._now += LEASE + 1
    heir.faults.go_on()
    await h.drive_until_crash(heir, heir.recover())
    assert heir.faults.crashed.is_set()
    await h.crash(heir)
    third = await h.engine(scene.workflow)
    await h.clock.advance(LEASE + 1)
    assert await h.store.owned(third.worker) == RUNS
    assert [worker.id for worker in await h.store.workers()] == [third.worker]
    scene.gate.set()
    await h.clock.advance(1)
    for id in RUNS:
        seen = await third.describe(id)
        assert seen.status is RunStatus.SUCCEEDED
        assert seen.recoveries >= 1, "a run that the second had begun counts one more"
