"""The runs in golden stores, and their results once they are continued.

The code of these workflows is frozen: stores that were recorded with them are continued by every later version.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from perdure import (
    Break,
    Client,
    Context,
    Continue,
    Retry,
    RunFailed,
    StepFailed,
    WorkQueue,
    current_step,
    event,
    step,
    workflow,
)
from perdure.stores.writes import PutDocument
from perdure.workflows.definition import Workflow

BROKEN: set[str] = set()  # steps that fail


@event(name="golden.Approved")
class Approved:
    by: str


@event(name="golden.Unread", on_target_terminated="dead_letter")
class Unread:
    n: int


@event(name="golden.Notice", delivery="all", consume=False)
class Notice:
    n: int


@step(name="golden.work", retry=Retry(max_attempts=3, initial=200, max_delay=1_000, jitter=0))
async def work(what: str) -> str:
    if what in BROKEN:
        raise ConnectionError(f"{what} is broken")
    return f"{what} done"


@step(name="golden.cancel_work")
async def cancel_work(what: str) -> str:
    return f"{what} cancelled"


@step(name="golden.reserve", compensate=cancel_work)
async def reserve(what: str) -> str:
    return f"{what} reserved"


@workflow(name="golden.sleeper")
async def sleeper(ctx: Context) -> str:
    first = await work("first")
    await ctx.sleep(1_000)
    return f"{first}, {await work('second')}"


@workflow(name="golden.receiver")
async def receiver(ctx: Context) -> list[str]:
    approvals = []
    for _ in range(3):
        approvals.append((await ctx.receive(Approved)).by)
        await work(f"approval {len(approvals)}")
    return approvals


@workflow(name="golden.parent")
async def parent(ctx: Context) -> list[Any]:
    child = await ctx.start_child(waits_for_value, id="child")
    both = await ctx.join(child=child.result(), local=work("beside"))
    return [both["child"], both["local"]]


@workflow(name="golden.waits_for_value")
async def waits_for_value(ctx: Context) -> int:
    return await ctx.deferred("value", int)


@workflow(name="golden.loop")
async def loop(ctx: Context) -> int:
    async def body(ctx: Context, total: int) -> Continue[int] | Break[int]:
        await work(f"round {total}")
        total += (await ctx.receive(Notice)).n
        return Break(total) if total >= 6 else Continue(total)

    return await ctx.loop("rounds", body, 0, prune_every=1, keep=0)


@workflow(name="golden.retrying")
async def retrying(ctx: Context) -> str:
    return await work("flaky")


@workflow(name="golden.held", suspend_on_failure=True)
async def held(ctx: Context) -> str:
    return await work.options(retry=None)("held")


@workflow(name="golden.compensating")
async def compensating(ctx: Context) -> str:
    reserved = await reserve("flight")
    await ctx.publish("state", reserved)
    await ctx.receive(Approved)
    await work.options(retry=None)("payment")
    return "paid"


@workflow(name="golden.ended")
async def ended(ctx: Context) -> dict[str, int]:
    await ctx.stream("log").write("one")
    await ctx.stream("log").write("two")
    await ctx.publish("progress", 100)
    return {"answer": 42}


@workflow(name="golden.failed")
async def failed(ctx: Context) -> None:
    try:
        await work.options(retry=None)("failed")
    except StepFailed as error:
        raise LookupError(error.type) from error


@workflow(name="golden.generations")
async def generations(ctx: Context, n: int) -> int:
    if n < 2:
        await ctx.continue_as(n + 1)
    await ctx.receive(Approved)
    return n


class DeclinedError(Exception):
    """Raised by a workflow; it has a field."""

    def __init__(self, code: int) -> None:
        super().__init__(f"declined with {code}")
        self.code = code


@step(name="golden.beats", retry=Retry(max_attempts=3, initial=200, max_delay=1_000, jitter=0, max_elapsed=86_400))
async def beats() -> int:
    attempt = current_step()
    if attempt.last_heartbeat is None:
        attempt.heartbeat(21)
        raise ConnectionError("no heartbeat yet")
    return int(attempt.last_heartbeat)


@workflow(name="golden.declined", raises=DeclinedError)
async def declined(ctx: Context) -> int:
    """Stored with the heartbeat of an attempt, an open deferred with a timeout, and a scope."""
    verdict = ctx.deferred("verdict", int, timeout=3_600)
    with ctx.scope("named"):
        code = await beats()
    try:
        return await verdict
    except TimeoutError:
        raise DeclinedError(code) from None


@workflow(name="golden.restarted")
async def restarted(ctx: Context, n: int) -> list[Any]:
    """Stored in its second generation, which has an unread message."""
    await ctx.sleep(1_000)
    return [n, (await ctx.receive(Approved)).by]


ONE_AT_A_TIME = WorkQueue("golden.queue", concurrency=1, worker_concurrency=1)


@workflow(name="golden.queued", queue=ONE_AT_A_TIME)
async def queued(ctx: Context, n: int) -> list[Any]:
    """Stored four times: it holds the slot, waits, is delayed, and waits in a partition of another queue."""
    await ctx.sleep(1_000)
    return [n, await work("queued")]


PARTITIONED = WorkQueue("golden.partitioned", partition_concurrency=1, partition_key=lambda n: f"tenant {n % 2}")
QUEUED: dict[str, dict[str, Any]] = {
    "golden.slot": {"priority": -5},
    "golden.place": {"dedupe": "key", "max_wait": 80_000},
    "golden.delayed": {"delay": 600},
    "golden.partition": {"queue": PARTITIONED},
}
TAGS: dict[str, Any] = {"tenant": "acme", "amount": 500, "urgent": True, "due": datetime(2026, 12, 24, tzinfo=UTC)}
DOCUMENT = PutDocument(kind="golden", id="settings", base=0, body=b'{"a":1}', write_id="first", due_at=1.0)

FIRST: tuple[Workflow[Any, Any], ...] = (
    sleeper, receiver, parent, waits_for_value, loop, retrying, held, compensating, ended, failed, generations,
)  # fmt: skip
LATER: tuple[Workflow[Any, Any], ...] = (declined, restarted)  # not in the first stores
ALL = (*FIRST, *LATER, queued)


async def start_all(engine: Client) -> None:
    """Start one run of each workflow and bring it into the state that the store is recorded in."""
    BROKEN.update(("flaky", "held", "failed"))
    for each in (sleeper, receiver, parent, loop, retrying, held, compensating, ended, failed):
        await engine.start(each, id=each.name, tags={"golden": "yes"})
    await engine.start(generations, 0, id=generations.name)
    await engine.start(declined, id=declined.name)
    await engine.start(restarted, 1, id=restarted.name)
    await engine.start(restarted, 2, id=restarted.name, if_exists="restart", send=[Approved("barbara")])
    await engine.send(receiver.name, Approved("ada"), event_id="ada")
    await engine.send(receiver.name, Unread(1), event_id="unread")
    await engine.broadcast(Notice(1), event_id="notice-1")
    await engine.broadcast(Notice(2), event_id="notice-2")
    for n, (id, options) in enumerate(QUEUED.items()):
        await engine.start(queued, n, id=id, tags=TAGS, **options)
    await engine._session.store.commit([DOCUMENT])


async def continue_all(engine: Client) -> dict[str, Any]:
    """Give all runs what they wait for; return their results."""
    BROKEN.clear()
    BROKEN.add("payment")
    for number, by in enumerate(("grace", "edsger")):
        await engine.send(receiver.name, Approved(by), event_id=f"approval-{number}")
    for id in (compensating.name, generations.name):
        await engine.send(id, Approved("barbara"))
    await engine.broadcast(Notice(3), event_id="notice-3")
    await engine.complete(await engine.deferred_token("child", "value"), 7)
    await engine.resume(held.name)
    names = [each.name for each in FIRST if each is not waits_for_value]
    names += [each.name for each in LATER if await engine.status(each.name) is not None]
    names += [name for name in QUEUED if await engine.status(name) is not None]
    return {name: await _outcome(engine, name) for name in names}


async def _outcome(engine: Client, id: str) -> Any:
    try:
        return await engine.result(id)
    except RunFailed as error:
        if isinstance(error.__cause__, DeclinedError):
            return error.__cause__.code
        return f"failed: {error.type}"


RESULTS = {
    "golden.sleeper": "first done, second done",
    "golden.receiver": ["ada", "grace", "edsger"],
    "golden.parent": [7, "beside done"],
    "golden.loop": 6,
    "golden.retrying": "flaky done",
    "golden.held": "held done",
    "golden.compensating": "failed: StepFailed",
    "golden.ended": {"answer": 42},
    "golden.failed": "failed: LookupError",
    "golden.generations": 2,
}
QUEUED_RESULTS = {name: [n, "queued done"] for n, name in enumerate(QUEUED)}
LATER_RESULTS = {"golden.declined": 21, "golden.restarted": [2, "barbara"]}
