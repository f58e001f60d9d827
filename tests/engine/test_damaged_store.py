"""After any small damage to a living store, every run ends, or `perdure doctor` names it.

A run that does neither is stranded: it would wait for ever without a word.
"""

import asyncio
import random
from pathlib import Path

import pytest

from perdure import Client, Context, PerdureError, RunStatus, WorkQueue, step, workflow
from perdure.admin.health_check import check_health
from perdure.admin.repair import repair
from perdure.testing import Harness, VirtualClock
from tests.engine.store_matrix import make_store
from tests.repetitions import repetitions
from tests.stores.damage import choose_damage

RUNS = ("ended", "sleeps", "receives", "parent", "child", "deferred", "timeout")
QUEUED = ("slot", "place", "delayed")
ONE_AT_A_TIME = WorkQueue("damaged.queue", concurrency=1, worker_concurrency=1)


@step
async def damaged_step(number: int) -> int:
    return number + 1


@workflow(name="damaged.ended")
async def ended(ctx: Context) -> int:
    return await damaged_step(1)


@workflow(name="damaged.sleeps")
async def sleeps(ctx: Context) -> int:
    first = await damaged_step(1)
    await ctx.sleep(300)
    return await damaged_step(first)


@workflow(name="damaged.receives")
async def receives(ctx: Context) -> str:
    await damaged_step(1)
    return str(await ctx.receive("go"))


@workflow(name="damaged.parent")
async def parent(ctx: Context) -> str:
    await damaged_step(1)
    return await ctx.run_child(receives, id="child")


@workflow(name="damaged.deferred")
async def deferred(ctx: Context) -> str:
    return await ctx.deferred("verdict", str)


@workflow(name="damaged.timeout")
async def timeout(ctx: Context) -> str:
    try:
        async with asyncio.timeout(200):
            return str(await ctx.receive("never"))
    except TimeoutError:
        return "late"


@workflow(name="damaged.queued", queue=ONE_AT_A_TIME)
async def queued(ctx: Context) -> int:
    await ctx.sleep(100)
    return await damaged_step(1)


WORKFLOWS = (queued, ended, sleeps, receives, parent, deferred, timeout)


async def start_all(h: Harness) -> None:
    engine = await h.engine(*WORKFLOWS)
    for definition in (ended, sleeps, receives, parent, deferred, timeout):
        await h.drive(engine.start(definition.options(id=definition.name.removeprefix("damaged."))))
    for id, delay in zip(QUEUED, (0, 0, 50), strict=True):
        await h.drive(engine.start(queued, id=id, delay=delay, tags={"tenant": "acme", "amount": 5}))
        await h.clock.advance(1)


async def continue_all(h: Harness, client: Client) -> set[str]:
    """Send each run what it waits for; return the runs whose callers got an error."""
    refused: set[str] = set()
    for run_id in ("receives", "child"):
        try:
            await h.drive(client.send(run_id, "go", "now"))
        except PerdureError:
            refused.add(run_id)
    try:
        await h.drive(client.complete(await client.deferred_token("deferred", "verdict"), "yes"))
    except PerdureError:
        refused.add("deferred")
    return refused


async def stranded_runs(h: Harness, client: Client, refused: set[str]) -> tuple[set[str], str]:
    """Return the open runs that the doctor does not name, and what it says."""
    open_runs: set[str] = set()
    for run_id in (*RUNS, *QUEUED):
        try:
            status = await h.drive(client.status(run_id))
        except PerdureError:
            status = RunStatus.RUNNING
        if status is not None and not status.terminal:
            open_runs.add(run_id)
    report = await h.drive(check_health(client, deep=True))
    named = " ".join(each.text for each in report.findings if each.severity == "error" or each.kind == "no_worker")
    if "child" in open_runs:
        open_runs.discard("parent")  # it waits for the child
    queued = open_runs & set(QUEUED)
    if any(run_id in named for run_id in QUEUED):
        open_runs -= queued  # they wait for the slot of that one
    return {run_id for run_id in open_runs - refused if run_id not in named}, named


async def check_repair(h: Harness, client: Client) -> None:
    """Repair whatever the doctor can repair: no call raises, and no run is changed for the worse."""
    for _ in range(2):
        report = await h.drive(check_health(client, deep=True))
        await h.drive(repair(client, report.findings))
        await h.clock.advance(60)


async def check(seed: int, store_kind: str, folder: Path) -> str | None:
    """Damage a store with this seed; return what is wrong afterwards."""
    choice, clock = random.Random(seed), VirtualClock()
    async with Harness(make_store(store_kind, folder, clock, f"s{seed}"), clock=clock) as h:
        await start_all(h)
        damage = await choose_damage(h.store, choice)
        if not await damage.apply():
            return None
        client = await h.client()
        refused = await continue_all(h, client)
        await h.clock.advance(600)
        stranded, named = await stranded_runs(h, client, refused)
        await check_repair(h, client)
        return f"seed {seed}: {damage.text}: {stranded} are stranded; doctor: {named}" if stranded else None


@pytest.mark.long
@pytest.mark.parametrize("store_kind", ["sqlite", "postgres", "redis"])
def test_damage_is_named_by_the_doctor_or_does_not_matter(store_kind, tmp_path):
    faults = []
    for seed in range(repetitions(12, 600)):
        fault = asyncio.run(check(seed, store_kind, tmp_path))
        if fault is not None:
            faults.append(fault)
    assert not faults, "\n".join(faults)
