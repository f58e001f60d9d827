"""While the store is unavailable, every call ends with `StoreError` after its attempts, whatever else is retried."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from perdure import Client, Context, EngineConfig, Retry, RunStatus, StoreError, WorkflowMisuse, event, step, workflow
from perdure.stores.writes import CommitTurn, CreateRun
from tests.engine.store_matrix import on_every_store

FEW = EngineConfig(store_retry=Retry(max_attempts=4, initial=0.1, jitter=0))
LIMIT_SECONDS = 60.0  # of virtual time; without the error a call would wait for an hour and more


@event
class Ping:
    n: int


@step
async def add_one(n: int) -> int:
    return n + 1


@workflow
async def counting(ctx: Context, times: int) -> int:
    n = 0
    for _ in range(times):
        await ctx.sleep(1)
        n = await add_one(n)
    return n


@workflow
async def waits_for_ping(ctx: Context) -> int:
    found = await ctx.receive(Ping)
    return found.n


async def outage_during_a_turn(h: Any) -> Any:
    """An engine that retries the turn of run "c", because the store has become unavailable, and has a run "w"."""
    gate = asyncio.Event()

    @step
    async def pass_gate() -> int:
        await gate.wait()
        return 1

    @workflow
    async def gated(ctx: Context) -> int:
        return await pass_gate()

    engine = await h.engine(counting, waits_for_ping, gated, config=FEW)
    await engine.start(waits_for_ping, id="w")
    await engine.start(gated, id="c")
    await h.settle()
    engine.faults.fail_calls(10**9)
    gate.set()
    await h.clock.advance(30)
    return engine


async def read_all(items: AsyncIterator[Any]) -> None:
    async for _ in items:
        pass


CALLS: dict[str, Callable[[Client], Awaitable[object]]] = {
    "start": lambda client: client.start(counting, 1),
    "start by name": lambda client: client.start("outage.unknown", 1),
    "execute": lambda client: client.execute(counting, 1),
    "status": lambda client: client.status("w"),
    "poll": lambda client: client.poll("w"),
    "result": lambda client: client.result("w"),
    "result with timeout": lambda client: client.result("w", timeout=3000),
    "result of a run that executes here": lambda client: client.result("c"),
    "handle": lambda client: client.get("w").result(),
    "describe": lambda client: client.describe("w"),
    "published": lambda client: client.published("w"),
    "history": lambda client: client.history("w"),
    "export_history": lambda client: client.export_history("w"),
    "watch": lambda client: read_all(client.watch("w")),
    "read_stream": lambda client: read_all(client.read_stream("w", "tokens")),
    "runs": lambda client: client.runs(),
    "send": lambda client: client.send("w", Ping(1)),
    "request": lambda client: client.request("w", Ping(1)),
    "broadcast": lambda client: client.broadcast(Ping(1)),
    "emit": lambda client: client.emit("news", 1),
    "cancel": lambda client: client.cancel("w"),
    "terminate": lambda client: client.terminate("w"),
    "resume": lambda client: client.resume("w"),
    "rewind": lambda client: client.rewind("w", "receive"),
    "fork": lambda client: client.fork("w", "receive"),
    "deferred_token": lambda client: client.deferred_token("w", "review"),
    "rotate_keys": lambda client: client.rotate_keys(),
    "dead_letters": lambda client: client.dead_letters(),
    "replay_dead_letter": lambda client: client.replay_dead_letter("d"),
    "remove_dead_letter": lambda client: client.remove_dead_letter("d"),
    "recover": lambda client: client.recover(),  # type: ignore[attr-defined]
}


@on_every_store
async def test_every_call_ends_with_a_store_error_while_turns_are_retried(h):
    engine = await outage_during_a_turn(h)
    for name, call in CALLS.items():
        with pytest.raises(StoreError, match="unavailable") as raised:
            await h.drive(call(engine), within=LIMIT_SECONDS)
        assert raised.value.retryable, name
    engine.faults.fail_calls(0)
    await engine.send("w", Ping(7))
    assert await h.run_to_end(engine.get("w")) == 7
    assert await h.run_to_end(engine.get("c")) == 1


@on_every_store
async def test_concurrent_calls_all_end_with_a_store_error(h):
    engine = await outage_during_a_turn(h)
    calls = [engine.send("w", Ping(n)) for n in range(50)] + [engine.start(counting, n) for n in range(50)]
    outcomes = await h.drive(asyncio.gather(*calls, return_exceptions=True), within=LIMIT_SECONDS)
    assert {type(outcome) for outcome in outcomes} == {StoreError}


@on_every_store
async def test_execute_ends_with_a_store_error_when_the_store_fails_meanwhile(h):
    engine = await h.engine(counting, config=FEW)
    result = h.background(engine.execute(counting, 30, id="c"))
    await h.clock.advance(3.5)
    engine.faults.fail_calls(10**9)
    with pytest.raises(StoreError, match="unavailable"):
        await h.drive(result, within=LIMIT_SECONDS)
    engine.faults.fail_calls(0)
    assert await h.drive(engine.result("c")) == 30, "the run continues"


@on_every_store
async def test_opening_ends_with_a_store_error_when_the_store_fails_meanwhile(h):
    for last_call in ("join", "workers", "keys", "retry_held"):
        faulty = h.faulty()
        faulty.fail_calls(10**9, calls=[last_call])
        with pytest.raises(StoreError, match="unavailable"):
            await h.engine(counting, config=FEW, store=faulty)


# --- writes that do not fit


def rejects_big_writes(commit: Callable[..., Any], rejected: list[int]) -> Callable[..., Any]:
    """A store whose disk is nearly full: a batch with a write of the run "big" fails with a retryable error."""

    async def commit_small(batch: Any) -> Any:
        if any(isinstance(write, CommitTurn) and write.run_id == "big" for write in batch) or any(
            isinstance(write, CreateRun) and write.record.id == "big one" for write in batch
        ):
            rejected.append(len(batch))
            raise StoreError("the disk is full", retryable=True)
        return await commit(batch)

    return commit_small


@on_every_store
async def test_runs_whose_writes_fit_continue_beside_one_whose_write_does_not(h):
    engine = await h.engine(counting)
    rejected: list[int] = []
    commit, engine.faults.commit = engine.faults.commit, rejects_big_writes(engine.faults.commit, rejected)
    ids = ["big", *(f"r{n}" for n in range(20))]
    await asyncio.gather(*(engine.start(counting, 3, id=id) for id in ids))
    await h.clock.advance(30)
    assert [await engine.status(id) for id in ids[1:]] == [RunStatus.SUCCEEDED] * 20
    assert await engine.status("big") is RunStatus.RUNNING
    assert rejected[0] == 21
    assert rejected[-1] == 1, "the write that does not fit is tried alone at last"
    later = await engine.start(counting, 3)
    assert await h.drive(later.result(), within=3.5) == 3, "a new run does not wait for the retries of another one"
    engine.faults.commit = commit
    assert await h.run_to_end(engine.get("big")) == 3
    assert len(h.executed()) == 3 * 22


@on_every_store
async def test_caller_whose_write_fits_gets_its_result_beside_one_whose_write_does_not(h):
    engine = await h.engine(counting, config=dataclasses.replace(FEW, store_retry=Retry(max_attempts=8, initial=0.1)))
    engine.faults.commit = rejects_big_writes(engine.faults.commit, [])
    calls = [engine.start(counting, 1, id="big one"), *(engine.start(counting, 1, id=f"r{n}") for n in range(20))]
    first, *others = await h.drive(asyncio.gather(*calls, return_exceptions=True), within=LIMIT_SECONDS)
    assert isinstance(first, StoreError)
    assert [run.created for run in others] == [True] * 20


@on_every_store
async def test_messages_to_one_run_stay_in_order_while_they_are_retried(h):
    @workflow
    async def collects(ctx: Context, count: int) -> list[int]:
        return [(await ctx.receive(Ping)).n for _ in range(count)]

    engine = await h.engine(collects)
    run = await engine.start(collects, 30)
    await h.settle()
    sending = []
    for n in range(30):
        if n % 5 == 0:
            engine.faults.fail_calls(3, calls=["commit"])
        sending.append(h.background(engine.send(run.id, Ping(n))))
        await h.clock.advance(0.01)
    await h.drive(asyncio.gather(*sending))
    assert await h.run_to_end(run) == list(range(30))


# --- shutdown


@on_every_store
async def test_shutdown_takes_the_grace_and_five_seconds_at_most_when_the_store_does_not_respond(h):
    @step
    async def endless() -> None:
        await asyncio.get_running_loop().create_future()

    @workflow
    async def never_ends(ctx: Context) -> None:
        await endless()

    engine = await h.engine(never_ends, counting)
    for n in range(3):
        await engine.start(never_ends, id=f"e{n}")
        await engine.start(counting, 100, id=f"c{n}")
    await h.clock.advance(2.5)
    engine.faults.pause()
    await h.clock.advance(2)
    started = h.clock.now()
    await h.drive(engine.shutdown(grace=3))
    assert h.clock.now() - started <= 3 + 5


@on_every_store
async def test_callers_that_wait_get_an_error_when_the_engine_is_closed(h):
    engine = await h.engine(counting, waits_for_ping)
    await engine.start(waits_for_ping, id="w")
    waiting = h.background(engine.result("w"))
    watching = h.background(read_all(engine.watch("w")))
    await h.settle()
    engine.faults.fail_calls(10**9, calls=["commit"])
    sending = h.background(engine.send("w", Ping(1)))
    await h.settle()
    await h.drive(engine.shutdown(grace=0))
    with pytest.raises(StoreError, match="closed before"):
        await h.drive(sending, within=1)
    for call in (waiting, watching):
        with pytest.raises(WorkflowMisuse, match="not open"):
            await h.drive(call, within=1)
