"""Repair what a health check found, and prune finished runs. Every action is safe to repeat."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from perdure.admin.findings import Finding
from perdure.client.client import Client
from perdure.errors import PerdureError
from perdure.execution.finalizer import RunFinalizer
from perdure.execution.local_worker import NullLocalWorker
from perdure.execution.maintenance import BroadcastResumer
from perdure.stores.results import Committed
from perdure.stores.writes import LeaveQueue, ReleaseRun, RewindRun

PAGE = 500
BULK_ACTIONS = ("finalize", "fan_out")  # one execution repairs all findings of the kind


async def repair(client: Client, findings: Iterable[Finding]) -> list[str]:
    """Repair the findings that can be repaired. Return a text for each action."""
    actions: list[str] = []
    repaired_in_bulk: set[str] = set()
    for finding in findings:
        if finding.repair is None or finding.subject is None or finding.repair in repaired_in_bulk:
            continue
        if finding.repair in BULK_ACTIONS:
            repaired_in_bulk.add(finding.repair)
        try:
            actions.append(await _repair_one(client, finding.repair, finding.subject))
        except PerdureError as error:
            actions.append(f"could not {finding.repair.replace('_', ' ')} {finding.subject}: {error}")
    return actions


async def prune(client: Client, limit: int) -> int:
    """Delete up to `limit` finished runs whose retention is over, and expired events. Return the number of runs."""
    session = client._session
    keep_ids_for = session.config.seconds("event_retention")
    pruned = await session.read(partial(session.store.prune, session.clock.now(), limit, keep_ids_for=keep_ids_for))
    return len(pruned)


async def _repair_one(client: Client, action: str, subject: str) -> str:
    match action:
        case "remove_worker":
            return await _remove_dead_worker(client, subject)
        case "release_runs":
            return f"released {_runs(await _release_runs(client, subject))} of unknown worker {subject}"
        case "resume":
            await client.resume(subject)
            return f"resumed run {subject}"
        case "cancel":
            await client.cancel(subject)
            return f"requested cancellation of run {subject}, because its parent has ended"
        case "subscribe":
            return await _subscribe(client, subject)
        case "release_run":
            return await _release_run(client, subject)
        case "return_slot":
            return await _return_slot(client, subject)
        case "finalize":
            return await _finalize_runs(client)
        case _:
            return await _resume_broadcasts(client)


async def _remove_dead_worker(client: Client, worker_id: str) -> str:
    """Fence and remove a worker, unless it has renewed its lease since the health check."""
    session = client._session
    workers = {worker.id: worker for worker in await session.read(session.store.workers)}
    worker = workers.get(worker_id)
    if worker is None:
        return f"worker {worker_id} was already removed"
    if not worker.fenced:
        fence = partial(session.store.fence_worker, worker_id, unless_renewed_after=worker.lease_until)
        if worker.lease_until >= session.clock.now() or not await session.read(fence):
            return f"worker {worker_id} has renewed its lease and was not changed"
    runs = await _release_runs(client, worker_id)
    await session.read(partial(session.store.remove_worker, worker_id))
    return f"removed dead worker {worker_id} and released {_runs(runs)}"


async def _release_runs(client: Client, worker_id: str) -> int:
    session, released = client._session, 0
    release = partial(session.store.release_runs, worker_id, session.clock.now(), recovered=True, limit=PAGE)
    while page := await session.read(release):
        released += len(page)
    return released


async def _subscribe(client: Client, run_id: str) -> str:
    """Rewind the run without dropping an entry: its open receives subscribe again in the next generation."""
    session = client._session
    snapshot = await session.load_snapshot(run_id)
    base, now = snapshot.position, session.clock.now()
    deadline_at = snapshot.record.deadline_at
    write = RewindRun(
        run_id=run_id, base=base, turn_id=f"subscribe/{run_id}/{base}", now=now, dropped=(), deadline_at=deadline_at
    )
    if not isinstance(await session.committer.write(write), Committed):
        return f"run {run_id} has continued and was not changed"
    return f"run {run_id} will subscribe again"


async def _release_run(client: Client, run_id: str) -> str:
    """Release a run that its worker does not execute. If the worker does, the store rejects its next turn."""
    session = client._session
    record = await session.get_run(run_id)
    if record.owner is None:
        return f"run {run_id} was already released"
    write = ReleaseRun(run_id=run_id, worker=record.owner, now=session.clock.now())
    released = isinstance(await session.committer.write(write), Committed)
    return f"released run {run_id} of worker {record.owner}" if released else f"run {run_id} was not changed"


async def _return_slot(client: Client, run_id: str) -> str:
    """Return the slot of a run that has ended."""
    session = client._session
    record, place = await session.get_run(run_id), await session.read(partial(session.store.place, run_id))
    if place is None or not record.status.terminal:
        return f"run {run_id} was not changed"
    await session.committer.write(LeaveQueue(run_id=run_id, queue=place.queue, now=session.clock.now()))
    return f"returned the slot of run {run_id} to queue {place.queue}"


async def _finalize_runs(client: Client) -> str:
    session = client._session
    before = len(await session.read(partial(session.store.unfinalized, PAGE)))
    worker = NullLocalWorker()
    await RunFinalizer(session.store_session, worker, worker.runs_may_be_due).tick(session.clock.now())
    left = len(await session.read(partial(session.store.unfinalized, PAGE)))
    return f"finalized {_runs(before - left)}" + _remaining(left)


async def _resume_broadcasts(client: Client) -> str:
    session = client._session
    before = len(await session.read(partial(session.store.unfinished_broadcasts, PAGE)))
    await BroadcastResumer(session.store_session, NullLocalWorker().runs_may_be_due).tick(session.clock.now())
    left = len(await session.read(partial(session.store.unfinished_broadcasts, PAGE)))
    finished = before - left
    return f"finished {finished} broadcast{'' if finished == 1 else 's'}" + _remaining(left)


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _remaining(count: int) -> str:
    return f", {count} remaining" if count else ""
