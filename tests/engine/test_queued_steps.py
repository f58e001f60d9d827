"""Steps with a queue: each attempt waits for a slot and holds it for the attempt only."""

import asyncio

import pytest

from perdure import Context, Retry, RunStatus, WorkQueue, current_step, step, workflow
from perdure.errors import InvalidArgument
from tests.engine.store_matrix import on_every_store

CALLS = WorkQueue("steps.calls", concurrency=2)
FAIR = WorkQueue("steps.fair", concurrency=1, partition_key=lambda tenant, n: tenant)
AT_WORK: set[str] = set()
MOST: list[int] = []
ORDER: list[str] = []
GATE: list[asyncio.Event] = []


@step(queue=CALLS)
async def call(n: int) -> int:
    key = current_step().idempotency_key
    AT_WORK.add(key)
    MOST.append(len(AT_WORK))
    await GATE[0].wait()
    AT_WORK.discard(key)
    return n


@step(queue=FAIR)
async def serve(tenant: str, n: int) -> None:
    ORDER.append(f"{tenant}{n}")


@step(name="queued_flaky", queue=CALLS, retry=Retry(max_attempts=2, initial=100, jitter=0))
async def flaky() -> int:
    ORDER.append(f"attempt {current_step().attempt}")
    if current_step().attempt == 1:
        raise ValueError("no")
    return 1


@step(queue=CALLS)
async def quick() -> int:
    ORDER.append("quick")
    return 2


@pytest.fixture(autouse=True)
def _clear():
    for each in (AT_WORK, MOST, ORDER, GATE):
        each.clear()


@workflow
async def calls(ctx: Context, count: int) -> list[int]:
    return await ctx.map(call, range(count), concurrency=100)


@on_every_store
async def test_no_more_bodies_than_slots_execute(h):
    GATE.append(asyncio.Event())
    engine = await h.engine(calls, queues=[CALLS, FAIR])
    run = await engine.start(calls, 8, id="r")
    await h.clock.advance(10)
    assert len(AT_WORK) == 2
    GATE[0].set()
    assert await h.run_to_end(run) == list(range(8))
    assert max(MOST) == 2
    described = await h.drive(engine.queue("steps.calls").describe())
    assert (described.waiting, described.held) == (0, 0)


@on_every_store
async def test_the_calling_run_says_what_limits_its_step(h):
    GATE.append(asyncio.Event())
    engine = await h.engine(calls, queues=[CALLS, FAIR])
    run = await engine.start(calls, 4, id="r")
    await h.clock.advance(10)
    described = await h.drive(run.describe())
    assert described.status is RunStatus.SUSPENDED
    kinds = [each.kind for each in described.waiting_for]
    assert kinds.count("step") == 4
    assert "queue" in kinds
    assert any("steps.calls: 2 of 2 held" in each.text for each in described.waiting_for)
    GATE[0].set()
    await h.run_to_end(run)


@on_every_store
async def test_partitions_of_a_step_take_turns(h):
    @workflow
    async def tenants(ctx: Context) -> None:
        await ctx.join(*[serve(tenant, n) for tenant in ("a", "b", "c") for n in range(3)])

    engine = await h.engine(tenants, queues=[CALLS, FAIR])
    await h.drive(engine.queue("steps.fair").pause())
    run = await engine.start(tenants, id="r")
    await h.clock.advance(10)
    await h.drive(engine.queue("steps.fair").resume())
    await h.run_to_end(run)
    assert sorted(ORDER[:3]) == ["a0", "b0", "c0"]
    assert sorted(ORDER[3:6]) == ["a1", "b1", "c1"]


@on_every_store
async def test_a_failed_attempt_holds_no_slot_until_its_retry(h):
    @workflow
    async def both(ctx: Context) -> int:
        results = await ctx.join(flaky(), quick(), quick())
        return sum(results)

    engine = await h.engine(both, queues=[CALLS, FAIR])
    run = await engine.start(both, id="r")
    await h.clock.advance(20)
    assert ORDER == ["attempt 1", "quick", "quick"]
    assert await h.run_to_end(run) == 5
    assert ORDER[-1] == "attempt 2"


@on_every_store
async def test_a_step_that_waits_for_a_slot_can_be_cancelled(h):
    GATE.append(asyncio.Event())
    engine = await h.engine(calls, queues=[CALLS, FAIR])
    run = await engine.start(calls, 4, id="r")
    await h.clock.advance(10)
    await h.drive(run.cancel())
    await h.clock.advance(60)
    assert await h.drive(run.status()) is RunStatus.CANCELLED
    described = await h.drive(engine.queue("steps.calls").describe())
    assert (described.waiting, described.held) == (0, 0)
    assert len(MOST) == 2


def test_a_queue_that_is_none_is_refused():
    with pytest.raises(InvalidArgument, match="queue of a step must be a WorkQueue or its name"):
        step(queue=5)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="~reserved"):
        step(queue="~reserved")
