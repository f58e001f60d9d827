"""Transfer: an exported run (see `exported`) put into a store, as it was or held until somebody resumes it."""

from __future__ import annotations

from msgspec.structs import replace

from perdure.client.client import Client
from perdure.client.run_export import parse_snapshot
from perdure.errors import RunConflict
from perdure.model.ids import new_token, shard_of
from perdure.model.records import Hold, RunRecord, RunStatus, Wait, WorkerRecord
from perdure.model.validation import check_name
from perdure.stores.results import Committed, IdTaken, Snapshot
from perdure.stores.writes import CommitTurn, CreateRun, RunPatch

LEASE = 60.0


async def import_run(client: Client, data: object, *, run_id: str | None = None) -> str:
    """Put an exported run into the store, under its own id or another one; its id.

    One that had ended has ended here too. One that was open is held until it is resumed, so that nothing is done twice
    by accident. Its parent stays behind. `RunConflict` if the id is taken.
    """
    snapshot = parse_snapshot(data)
    link, config, now = client._session, client._session.config, client._session.clock.now()
    new_id = snapshot.record.id if run_id is None else check_name("a run's id", run_id)
    worker = WorkerRecord(
        id=f"import-{new_token()}", pool="import", workflows=(), lease_until=now + LEASE, started_at=now
    )
    await link.read(lambda: link.store.join(worker))
    try:
        record = _imported_record(snapshot.record, new_id, worker.id, shard_of(new_id, config.shards))
        if isinstance(await link.committer.write(CreateRun(record, snapshot.entries, snapshot.inbox)), IdTaken):
            raise RunConflict(new_id, "a history of its own")
        settled = await link.committer.write(
            _import_commit(snapshot, new_id, worker.id, now, config.seconds("run_retention"))
        )
        assert isinstance(settled, Committed), settled
    finally:
        await link.read(lambda: link.store.remove_worker(worker.id))
    return new_id


def _imported_record(record: RunRecord, run_id: str, owner: str, shard: int) -> RunRecord:
    """Born claimed by whoever imports it, so that nobody executes it. A run begins when it is created: so did this."""
    return replace(
        record,
        id=run_id,
        created_at=record.created_at if record.first_executed_at is None else record.first_executed_at,
        created_by=new_token(),
        owner=owner,
        shard=shard,
        parent=None,
        attached=False,
        # As for a fork: what it had subscribed to is in another store, and effects still to come get ids of their own.
        generation=record.generation + (not record.status.terminal),
    )


def _import_commit(snapshot: Snapshot, run_id: str, worker: str, now: float, retention: float) -> CommitTurn:
    record = snapshot.record
    if record.status.terminal:
        kept = retention if record.retention is None else record.retention
        patch = RunPatch(
            status=record.status,
            result=record.result,
            error=record.error,
            ended_at=record.ended_at,
            recoveries=record.recoveries,
            drift=record.drift,
            prune_at=now + kept,
        )
    else:
        held = Hold("imported", f"imported from another store; perdure resume {run_id} lets it go on")
        patch = RunPatch(status=RunStatus.SUSPENDED, held=held, waits=(Wait("held", name=held.reason),))
    return CommitTurn(
        run_id=run_id,
        base=len(snapshot.entries),
        turn_id=new_token(),
        worker=worker,
        owned=True,
        now=now,
        patch=patch,
        seen=len(snapshot.inbox),
    )
