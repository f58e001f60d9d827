"""A run whose workers died again and again executes alone, and takes nobody down with it."""

from __future__ import annotations

import asyncio

from perdure import Context, EngineConfig, RunStatus, step, workflow
from perdure.model.records import WorkerRecord
from perdure.stores.protocol import Claim
from tests.engine.store_matrix import on_every_store

CONFIG = EngineConfig(max_recoveries=5)


class Stage:
    """Steps that stand still until they are let go, and who stands at the moment."""

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.standing: set[str] = set()
        stage = self

        @step
        async def stand(name: str) -> None:
            stage.standing.add(name)
            try:
                await stage.gates.setdefault(name, asyncio.Event()).wait()
            finally:
                stage.standing.discard(name)

        @workflow
        async def standing_run(ctx: Context, name: str) -> str:
            await stand(name)
            return name

        self.workflow = standing_run

    def let_go(self, name: str) -> None:
        self.gates.setdefault(name, asyncio.Event()).set()


async def with_suspects(h, stage: Stage, *names: str) -> None:
    """Start these runs, and let three workers die that have claimed them."""
    client = await h.client()
    for name in names:
        await client.start(stage.workflow, name, id=name)
    now, pairs = h.clock.now(), ((stage.workflow.name, 1),)
    for n in range(3):
        dead = f"dead-{n}"
        row = WorkerRecord(id=dead, pool="default", workflows=pairs, lease_until=now + 1, started_at=now)
        assert await h.store.join(row)
        taken = await h.store.claim(Claim(worker=dead, now=now, workflows=pairs))
        assert len(taken) == len(names)
        await h.store.fence_worker(dead)
        await h.store.release_runs(dead, now, recovered=True)
        await h.store.remove_worker(dead)


@on_every_store
async def test_a_suspect_begins_when_its_neighbours_have_stopped_and_then_executes_alone(h):
    stage = Stage()
    await with_suspects(h, stage, "suspect")
    engine = await h.engine(stage.workflow, config=CONFIG, concurrency=10)
    await h.settle()
    assert stage.standing == {"suspect"}, "nobody else is there"
    client = await h.client()
    await client.start(stage.workflow, "later", id="later")
    await engine.start(stage.workflow, "own", id="own")
    await h.clock.advance(1)
    assert stage.standing == {"suspect"}, "nobody joins it"
    stage.let_go("suspect")
    await h.clock.advance(1)
    assert stage.standing == {"later", "own"}
    assert await client.status("suspect") is RunStatus.SUCCEEDED


@on_every_store
async def test_a_suspect_waits_for_those_who_execute_already_but_not_for_ever(h):
    stage = Stage()
    engine = await h.engine(stage.workflow, config=CONFIG)
    for name in ("short", "long"):
        await engine.start(stage.workflow, name, id=name)
    await h.settle()
    engine.faults.pause()
    await with_suspects(h, stage, "suspect")
    engine.faults.go_on()
    await h.clock.advance(6)
    assert stage.standing == {"short", "long"}
    stage.let_go("short")
    await h.clock.advance(1)
    assert stage.standing == {"long"}
    await h.clock.advance(10)
    assert stage.standing == {"long", "suspect"}, "a neighbour with a long step does not keep it waiting for ever"


@on_every_store
async def test_suspects_execute_one_after_the_other_and_wait_unowned(h):
    stage = Stage()
    names = {f"s{n}" for n in range(4)}
    await with_suspects(h, stage, *names)
    client = await h.client()
    engine = await h.engine(stage.workflow, config=CONFIG)
    for left in (3, 2, 1, 0):
        await h.clock.advance(0.5)
        [one] = stage.standing
        owners = [(await client.describe(name)).owner for name in names - {one}]
        assert engine.worker not in owners, "who waits is not to be blamed for the death of the one who executes"
        stage.let_go(one)
        await h.clock.advance(0.5)
        assert len([name for name in names if not (await client.status(name)).terminal]) == left


@on_every_store
async def test_a_suspect_that_lives_for_a_while_is_joined_by_others(h):
    stage = Stage()
    await with_suspects(h, stage, "suspect")
    await h.engine(stage.workflow, config=CONFIG)
    client = await h.client()
    await client.start(stage.workflow, "other", id="other")
    await h.clock.advance(4)
    assert stage.standing == {"suspect"}
    await h.clock.advance(2)
    assert stage.standing == {"suspect", "other"}


@on_every_store
async def test_a_suspect_that_is_terminated_while_it_waits_frees_the_worker(h):
    stage = Stage()
    await with_suspects(h, stage, "suspect")
    await h.engine(stage.workflow, config=CONFIG)
    client = await h.client()
    await h.settle()
    await client.terminate("suspect")
    await client.start(stage.workflow, "other", id="other")
    await h.clock.advance(6)
    assert stage.standing == {"other"}
