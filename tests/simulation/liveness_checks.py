"""What must hold while runs are open and all is calm: liveness (guarantee 5) and read-only replay (7).

Then each of them gets what it waits for (`nudge`).
"""

import asyncio
from typing import Any

from perdure import Client, RunNotFound, RunStatus, RunTerminated, StoreError
from perdure.admin.health_check import check_health
from perdure.codec import JSON
from perdure.execution.run_loader import build_run_start
from perdure.model.records import Hold, RunRecord
from perdure.runner.attempt_tracker import EXHAUSTED
from perdure.runner.runner import Runner
from perdure.stores.results import Snapshot
from perdure.testing.simulation.simulation import Simulation
from tests.simulation.event_types import ALL, BY_NAME, MAY_EXPIRE
from tests.simulation.external_state import Stage
from tests.simulation.random_clients import all_records
from tests.simulation.workflows import MAX_SUSPEND, code_of


def on_its_way(record: RunRecord) -> bool:
    """Whether time alone will move this run on."""
    return not record.status.terminal and (record.owner is not None or record.wake_at is not None)


async def check_quiet(world: Simulation, client: Client) -> list[RunRecord]:
    """Nothing is on its way any more: who is open waits for something that is not there. Gives the open runs."""
    store, breaks = world.store, world.witness.breaks
    for finding in (await check_health(client)).findings:
        if finding.severity == "error":
            breaks(f"doctor: {finding.text}")
    if owing := await store.unfinalized():
        breaks(f"runs that have ended and still owe something: {[each.record.id for each in owing]}")
    if unfinished := await store.unfinished_broadcasts():
        breaks(f"events that are not assigned to all who stood: {[each.id for each in unfinished]}")
    open_runs = [record for record in await all_records(client) if not record.status.terminal]
    topics = {kind.__name__: await store.topic(f"sim.{kind.__name__.lower()}") for kind in ALL}
    for record in open_runs:
        _check_waits(world, record, await store.inbox(record.id), topics)
        _check_overdue(world, record)
        if record.status is RunStatus.SUSPENDED and record.held is None:
            await _check_replay(world, record)
    return open_runs


def _check_waits(world: Simulation, record: RunRecord, inbox: list[Any], topics: dict[str, Any]) -> None:
    now, breaks, run = world.loop.moment, world.witness.breaks, world.witness.models[record.id]
    if record.owner is not None:
        busy = any(body.run_id == record.id for body in world.bodies[-50:])
        if not busy and record.updated_at < now - 30.0:
            breaks(f"run {record.id} has an owner, and nothing happens to it")
        return
    if record.wake_at is not None and record.wake_at < now - 5.0:
        breaks(f"run {record.id} was due {now - record.wake_at:g} s ago")
    waits = {wait.name for wait in record.waits if wait.kind == "event" and record.held is None}
    names = {name for each in waits if each is not None for name in each.split(",")} - set(MAY_EXPIRE)
    for message in inbox:
        if message.kind == "event" and message.name in names and record.wake_at is None:
            breaks(f"run {record.id} waits for {message.name}, and {message.id} is in its mailbox")
    for kind in ("Shared",):
        if f"sim.{kind.lower()}" in names and topics[kind] and record.wake_at is None:
            breaks(f"run {record.id} waits for {kind}, and there is one in the topic")
    if not record.waits and record.held is None and record.wake_at is None:
        breaks(f"run {record.id} is {record.status} and waits for nothing ({run.status})")


def _check_overdue(world: Simulation, record: RunRecord) -> None:
    """A run that has exceeded a limit of its own has been told so."""
    now, run = world.loop.moment, world.witness.models[record.id]
    if record.held is not None or "~cancel" in run.entries or any("~rollback" in each for each in run.entries):
        return
    if record.deadline_at is not None and record.deadline_at < now - 30.0:
        world.witness.breaks(f"run {record.id} goes on {now - record.deadline_at:g} s after its timeout")
    waits = record.status is RunStatus.SUSPENDED and record.updated_at < now - MAX_SUSPEND - 30.0
    if waits and record.workflow == "sim.restless":
        world.witness.breaks(f"run {record.id} is suspended for {now - record.updated_at:g} s, which is too long")


async def _check_replay(world: Simulation, record: RunRecord) -> None:
    """A suspended run, replayed without news, writes nothing and does nothing."""
    snapshot = (await world.store.load([record.id]))[0]
    if snapshot is None or any(True for _ in snapshot.inbox):
        return
    turn: Any = await _outside_of_a_task(world, lambda: _replay(snapshot, record.updated_at))
    if turn is None or (turn.wake_at is not None and turn.wake_at <= record.updated_at):
        return
    steps = [effect for effect in turn.effects if type(effect).__name__ == "RunStep"]
    if turn.entries or turn.consumed or steps or turn.outcome is not None or turn.held is not None:
        world.witness.breaks(f"run {record.id}: a replay without news came to {turn}")


def _replay(snapshot: Snapshot, now: float) -> Any:
    record = snapshot.record
    runner = Runner(build_run_start(snapshot, code_of(record.workflow, record.version), JSON, keys=()))
    try:
        return runner.advance(now, [])
    finally:
        runner.close()


async def _outside_of_a_task(world: Simulation, work: Any) -> Any:
    done = world.loop.create_future()

    def carry_out() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    world.loop.call_soon(carry_out)
    return await done


async def nudge(world: Simulation, stage: Stage, client: Client, open_runs: list[RunRecord], round: int) -> None:
    """Give runs what they wait for, so that all of them can end."""
    for record in open_runs:
        for wait in record.waits:
            try:
                if wait.kind == "event" and wait.name is not None:
                    name = wait.name.split(",")[0]
                    await client.send(record.id, BY_NAME[name](f"nudge/{record.id}/{round}"))
                elif wait.kind == "deferred" and wait.name is not None:
                    await client.complete(await client.deferred_token(record.id, wait.name), round)
            except (RunTerminated, RunNotFound, StoreError):
                continue
        if record.held is not None:
            await _release(world, stage, client, record, record.held)
    await asyncio.sleep(0)


async def _release(world: Simulation, stage: Stage, client: Client, record: RunRecord, held: Hold) -> None:
    """A run that a failed step holds goes on once that is mended; nothing else may hold a run."""
    entry = world.witness.models[record.id].entries.get(held.location or "")
    failed = held.kind == "step_failed" and entry is not None and entry.detail == EXHAUSTED
    # Since a rewind it may be one that is done again in its old place: what comes after it depends on its success.
    again = entry is not None and entry.seq is not None
    if not failed or not (record.workflow == "sim.patient" or again):
        world.witness.breaks(f"run {record.id} is held: {held}")
        await client.terminate(record.id)
    else:
        stage.mended.add(record.id)
        await client.resume(record.id)
