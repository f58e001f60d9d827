"""Checks in the quiescent phase, while runs are open: liveness (guarantee 5) and read-only replay (7).

Then each run receives what it waits for (`nudge`).
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
from tests.simulation.external_state import ExternalState
from tests.simulation.random_clients import all_records
from tests.simulation.random_programs import IMPORTS
from tests.simulation.workflows import MAX_SUSPEND, code_of, new_code

SWEEP_SECONDS = 1.0  # as configured in `run_seed`
LATENCY_SECONDS = 0.5  # of commits and notifications


def on_its_way(record: RunRecord) -> bool:
    """Return whether the run progresses without external input."""
    return not record.status.terminal and (record.owner is not None or record.wake_at is not None)


async def check_quiet(simulation: Simulation, client: Client) -> list[RunRecord]:
    """Check that every open run waits for external input that does not exist yet. Return the open runs."""
    store, report = simulation.store, simulation.checker.report
    for finding in (await check_health(client)).findings:
        if finding.severity == "error" and finding.kind not in ("held", "stalled_queue"):  # runs are held on purpose
            report(f"doctor: {finding.text}")
    if unfinalized := await store.unfinalized():
        report(f"ended runs that are not finalized: {[each.record.id for each in unfinalized]}")
    if unfinished := await store.unfinished_broadcasts():
        report(f"events that are not assigned to all subscriptions: {[each.id for each in unfinished]}")
    open_runs = [record for record in await all_records(client) if not record.status.terminal]
    topics = {kind.__name__: await store.topic(f"sim.{kind.__name__.lower()}") for kind in ALL}
    for record in open_runs:
        _check_waits(simulation, record, await store.inbox(record.id), topics)
        _check_overdue(simulation, record)
        if record.status is RunStatus.SUSPENDED and record.held is None:
            await _check_replay(simulation, record)
    await _check_queues(simulation)
    return open_runs


async def _check_queues(simulation: Simulation) -> None:
    """A waiting run of a queue with free slots, served and not paused, is admitted within two sweeps."""
    model, now = simulation.checker.queue_model, simulation.loop.current_time
    serves = frozenset((flow.name, flow.version, "default") for flow in new_code())
    for name in model.queues:
        view = await simulation.store.queue_view(name, now)
        since = model.unserved_since(name, serves, 0 if view is None else view.active)
        if since is not None and since < now - 2 * SWEEP_SECONDS - LATENCY_SECONDS:
            simulation.checker.report(f"queue {name} has a free slot, but a run waits for {now - since:g} s: {view}")
        if model.expired(name, now - 2 * SWEEP_SECONDS - LATENCY_SECONDS):
            simulation.checker.report(f"queue {name} has a place that expired, but its run has not ended")


def _check_waits(simulation: Simulation, record: RunRecord, inbox: list[Any], topics: dict[str, Any]) -> None:
    now, report, run = simulation.loop.current_time, simulation.checker.report, simulation.checker.models[record.id]
    if record.waiting:
        return  # `_check_queues`
    if record.owner is not None:
        busy = any(body.run_id == record.id for body in simulation.bodies[-50:])
        if not busy and record.updated_at < now - 30.0:
            report(f"run {record.id} has an owner, but makes no progress")
        return
    if record.wake_at is not None and record.wake_at < now - 5.0:
        report(f"run {record.id} was due {now - record.wake_at:g} s ago")
    waits = {wait.name for wait in record.waits if wait.kind == "event" and record.held is None}
    names = {name for each in waits if each is not None for name in each.split(",")} - set(MAY_EXPIRE)
    for message in inbox:
        if message.kind == "event" and message.name in names and record.wake_at is None:
            report(f"run {record.id} waits for {message.name}, but {message.id} is in its mailbox")
    for kind in ("Shared",):
        if f"sim.{kind.lower()}" in names and topics[kind] and record.wake_at is None:
            report(f"run {record.id} waits for {kind}, but the topic contains one")
    if not record.waits and record.held is None and record.wake_at is None:
        report(f"run {record.id} is {record.status}, but waits for nothing ({run.status})")


def _check_overdue(simulation: Simulation, record: RunRecord) -> None:
    """A run that has exceeded its timeout or max_suspend has been stopped."""
    now, run = simulation.loop.current_time, simulation.checker.models[record.id]
    if record.held is not None or "~cancel" in run.entries or any("~rollback" in each for each in run.entries):
        return
    if record.deadline_at is not None and record.deadline_at < now - 30.0:
        simulation.checker.report(f"run {record.id} continues {now - record.deadline_at:g} s after its timeout")
    waits = record.status is RunStatus.SUSPENDED and record.updated_at < now - MAX_SUSPEND - 30.0
    if waits and record.workflow == "sim.restless":
        simulation.checker.report(
            f"run {record.id} is suspended for {now - record.updated_at:g} s, longer than max_suspend"
        )


async def _check_replay(simulation: Simulation, record: RunRecord) -> None:
    """The replay of a suspended run without new input has no writes and no effects."""
    snapshot = (await simulation.store.load([record.id]))[0]
    if not isinstance(snapshot, Snapshot) or any(True for _ in snapshot.inbox):
        return
    turn: Any = await _run_outside_task(simulation, lambda: _replay(snapshot, record.updated_at))
    if turn is None or (turn.wake_at is not None and turn.wake_at <= record.updated_at):
        return
    steps = [effect for effect in turn.effects if type(effect).__name__ == "RunStep"]
    if turn.entries or turn.consumed or steps or turn.outcome is not None or turn.held is not None:
        simulation.checker.report(f"run {record.id}: a replay without new input produced {turn}")


def _replay(snapshot: Snapshot, now: float) -> Any:
    record = snapshot.record
    runner = Runner(build_run_start(snapshot, code_of(record.workflow, record.version), JSON, keys=()))
    try:
        return runner.advance(now, [])
    finally:
        runner.close()


async def _run_outside_task(simulation: Simulation, work: Any) -> Any:
    done = simulation.loop.create_future()

    def execute() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    simulation.loop.call_soon(execute)
    return await done


async def nudge(
    simulation: Simulation, state: ExternalState, client: Client, open_runs: list[RunRecord], round: int
) -> None:
    """Send runs the events and values that they wait for, so that all of them can end."""
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
            await _release(simulation, state, client, record, record.held)
    await asyncio.sleep(0)


async def _release(simulation: Simulation, state: ExternalState, client: Client, record: RunRecord, held: Hold) -> None:
    """Resume a run that was imported, or that a failed step holds, after a repair. Nothing else may hold a run."""
    imported = held.kind == "imported" and record.id in IMPORTS
    damaged = held.kind == "internal_error" and record.id in simulation.damaged
    if imported or damaged or held.kind == "paused":
        await client.resume(record.id)
        return
    entry = simulation.checker.models[record.id].entries.get(held.location or "")
    failed = held.kind == "step_failed" and entry is not None and entry.detail == EXHAUSTED
    # After a rewind a step may run again at its old location; later entries depend on its success.
    again = entry is not None and entry.seq is not None
    if not failed or not (record.workflow == "sim.holding" or again):
        simulation.checker.report(f"run {record.id} is held: {held}")
        await client.terminate(record.id)
    else:
        state.repaired.add(record.id)
        await client.resume(record.id)
