"""Quarantine: a run whose workers crashed repeatedly executes alone, so that a crash takes no other run down."""

from __future__ import annotations

import asyncio

from perdure import Context, EngineConfig, RunStatus, step, workflow
from perdure.model.records import WorkerRecord
from perdure.stores.protocol import Claim
from tests.engine.store_matrix import on_every_store

CONFIG = EngineConfig(max_recoveries=5)


class BlockedSteps:
    """A workflow whose step blocks until the test releases it; `blocked` names the runs whose steps are blocked."""

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.blocked: set[str] = set()
        steps = self

        @step
        async def block(name: str) -> None:
            steps.blocked.add(name)
            try:
                await steps.gates.setdefault(name, asyncio.Event()).wait()
            finally:
                steps.blocked.discard(name)

        @workflow
        async def blocked_run(ctx: Context, name: str) -> str:
            await block(name)
            return name

        self.workflow = blocked_run

    def release(self, name: str) -> None:
        self.gates.setdefault(name, asyncio.Event()).set()


async def with_suspects(h, steps: BlockedSteps, *names: str) -> None:
    """Start these runs, claim them by three workers in turn, and fence each."""
    client = await h.client()
    for name in names:
        await client.start(steps.workflow, name, id=name)
    now, pairs = h.clock.now(), ((steps.workflow.name, 1),)
    for n in range(3):
        dead = f"dead-{n}"
        row = WorkerRecord(id=dead, pool="default", workflows=pairs, lease_until=now + 1, started_at=now)
        assert await h.store.join(row)
        claimed = await h.store.claim(Claim(worker=dead, now=now, workflows=pairs))
        assert len(claimed) == len(names)
        await h.store.fence_worker(dead)
        await h.store.release_runs(dead, now, recovered=True)
        await h.store.remove_worker(dead)


@on_every_store
async def test_suspect_starts_when_no_other_run_executes_and_then_executes_alone(h):
    steps = BlockedSteps()
    await with_suspects(h, steps, "suspect")
    engine = await h.engine(steps.workflow, config=CONFIG, concurrency=10)
    await h.settle()
    assert steps.blocked == {"suspect"}, "no other run executes"
    client = await h.client()
    await client.start(steps.workflow, "later", id="later")
    await engine.start(steps.workflow, "own", id="own")
    await h.clock.advance(1)
    assert steps.blocked == {"suspect"}, "no other run starts"
    steps.release("suspect")
    await h.clock.advance(1)
    assert steps.blocked == {"later", "own"}
    assert await client.status("suspect") is RunStatus.SUCCEEDED


@on_every_store
async def test_suspect_waits_for_executing_runs_for_a_limited_time(h):
    steps = BlockedSteps()
    engine = await h.engine(steps.workflow, config=CONFIG)
    for name in ("short", "long"):
        await engine.start(steps.workflow, name, id=name)
    await h.settle()
    engine.faults.pause()
    await with_suspects(h, steps, "suspect")
    engine.faults.unblock()
    await h.clock.advance(6)
    assert steps.blocked == {"short", "long"}
    steps.release("short")
    await h.clock.advance(1)
    assert steps.blocked == {"long"}
    await h.clock.advance(10)
    assert steps.blocked == {"long", "suspect"}, "a run with a long step does not block the suspect forever"


@on_every_store
async def test_suspects_execute_one_after_the_other_and_are_unowned_while_they_wait(h):
    steps = BlockedSteps()
    names = {f"s{n}" for n in range(4)}
    await with_suspects(h, steps, *names)
    client = await h.client()
    engine = await h.engine(steps.workflow, config=CONFIG)
    for left in (3, 2, 1, 0):
        await h.clock.advance(0.5)
        [one] = steps.blocked
        owners = [(await client.describe(name)).owner for name in names - {one}]
        assert engine.worker not in owners, "a crash of one suspect must not count as a recovery of the others"
        steps.release(one)
        await h.clock.advance(0.5)
        assert len([name for name in names if not (await client.status(name)).terminal]) == left


@on_every_store
async def test_other_runs_start_after_the_probation_of_a_suspect(h):
    steps = BlockedSteps()
    await with_suspects(h, steps, "suspect")
    await h.engine(steps.workflow, config=CONFIG)
    client = await h.client()
    await client.start(steps.workflow, "other", id="other")
    await h.clock.advance(4)
    assert steps.blocked == {"suspect"}
    await h.clock.advance(2)
    assert steps.blocked == {"suspect", "other"}


@on_every_store
async def test_terminated_suspect_frees_the_worker(h):
    steps = BlockedSteps()
    await with_suspects(h, steps, "suspect")
    await h.engine(steps.workflow, config=CONFIG)
    client = await h.client()
    await h.settle()
    await client.terminate("suspect")
    await client.start(steps.workflow, "other", id="other")
    await h.clock.advance(6)
    assert steps.blocked == {"other"}
