"""Mending: carrying out what an examination of a store found to be left undone. Each deed is safe to repeat."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from perdure.admin.health_check import Finding
from perdure.client.client import Client
from perdure.errors import PerdureError
from perdure.execution.finalizer import FinalizerCallbacks, RunFinalizer
from perdure.execution.maintenance import BroadcastResumer

PAGE = 500


async def repair(client: Client, findings: Iterable[Finding]) -> list[str]:
    """Do what can be done about these, and say what was done."""
    actions: list[str] = []
    repaired_in_bulk: set[str] = set()
    for finding in findings:
        if finding.repair is None or finding.subject is None or finding.repair in repaired_in_bulk:
            continue
        if finding.repair in ("settle", "fan_out"):
            repaired_in_bulk.add(finding.repair)  # one go does it for all
        try:
            actions.append(await _repair_one(client, finding.repair, finding.subject))
        except PerdureError as error:
            actions.append(f"could not {finding.repair.replace('_', ' ')} {finding.subject}: {error}")
    return actions


async def _repair_one(client: Client, what: str, subject: str) -> str:
    match what:
        case "bury":
            return await _remove_dead_worker(client, subject)
        case "release":
            return f"released {_runs(await _release(client, subject))} of {subject}, which is not there"
        case "resume":
            await client.resume(subject)
            return f"resumed run {subject}"
        case "cancel":
            await client.cancel(subject)
            return f"asked run {subject} to stop, as its parent has ended"
        case "settle":
            return await _settle(client)
        case _:
            return await _fan_out(client)


async def _remove_dead_worker(client: Client, worker_id: str) -> str:
    """Only a worker that has not renewed meanwhile: one that is back is left alone."""
    link = client._session
    workers = {worker.id: worker for worker in await link.read(link.store.workers)}
    worker = workers.get(worker_id)
    if worker is None:
        return f"worker {worker_id} was forgotten meanwhile"
    if not worker.fenced:
        gone = partial(link.store.fence_worker, worker_id, unless_renewed_after=worker.lease_until)
        if worker.lease_until >= link.clock.now() or not await link.read(gone):
            return f"worker {worker_id} is back, and was left alone"
    runs = await _release(client, worker_id)
    await link.read(partial(link.store.remove_worker, worker_id))
    return f"declared worker {worker_id} gone and released {_runs(runs)}"


async def _release(client: Client, worker_id: str) -> int:
    link, released = client._session, 0
    release = partial(link.store.release_runs, worker_id, link.clock.now(), recovered=True, limit=PAGE)
    while page := await link.read(release):
        released += len(page)
    return released


async def _settle(client: Client) -> str:
    link = client._session
    before = len(await link.read(partial(link.store.unfinalized, PAGE)))
    finalizer = RunFinalizer(link.store_session, FinalizerCallbacks(_ignore, _nothing, _nothing, _ignore))
    await finalizer.tick(link.clock.now())
    left = len(await link.read(partial(link.store.unfinalized, PAGE)))
    return f"settled {_runs(before - left)} that had ended" + (f", {left} are left" if left else "")


async def _fan_out(client: Client) -> str:
    link = client._session
    before = len(await link.read(partial(link.store.unfinished_broadcasts, PAGE)))
    await BroadcastResumer(link.store_session, _nothing).tick(link.clock.now())
    left = len(await link.read(partial(link.store.unfinished_broadcasts, PAGE)))
    return f"gave {before - left} event{'' if before - left == 1 else 's'} to the rest of those who waited" + (
        f", {left} are left" if left else ""
    )


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _ignore(run_id: str) -> None:
    """Workers find out by themselves."""


def _nothing() -> None:
    """Likewise."""


async def prune(client: Client, limit: int) -> int:
    """Delete a page of finished runs whose retention is over, and what has expired. How many runs."""
    link = client._session
    remember = client._session.config.seconds("event_retention")
    return await link.read(partial(link.store.prune, link.clock.now(), limit, keep_ids_for=remember))
