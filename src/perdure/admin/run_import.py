"""Import an exported run (see `perdure.client.run_export`) into a store."""

from __future__ import annotations

from msgspec.structs import replace

from perdure.client.client import Client
from perdure.client.run_export import check_payloads, parse_snapshot
from perdure.errors import RunConflict
from perdure.model.ids import new_token, shard_of
from perdure.model.records import Hold, RunRecord, RunStatus, Wait, WorkerRecord
from perdure.model.validation import check_name
from perdure.stores.results import Committed, IdTaken, Snapshot
from perdure.stores.writes import CommitTurn, CreateRun, RunPatch

LEASE_SECONDS = 60.0  # of the worker that owns the run during the import


async def import_run(client: Client, data: object, *, run_id: str | None = None) -> str:
    """Create a run from an export, under its own id or `run_id`. Return its id.

    An ended run stays ended. An open run is held until you resume it, so that no step is executed twice by accident.
    The imported run has no parent. Raises `RunConflict` if the id is taken.
    """
    snapshot = parse_snapshot(data)
    session = client._session
    config, now = session.config, session.clock.now()
    check_payloads(snapshot, config.max_payload_bytes)
    new_id = snapshot.record.id if run_id is None else check_name("a run's id", run_id)
    worker = WorkerRecord(
        id=f"import-{new_token()}", pool="import", workflows=(), lease_until=now + LEASE_SECONDS, started_at=now
    )
    await session.read(lambda: session.store.join(worker))
    try:
        record = _imported_record(snapshot.record, new_id, worker.id, shard_of(new_id, config.shards))
        if isinstance(await session.committer.write(CreateRun(record, snapshot.entries, snapshot.inbox)), IdTaken):
            raise RunConflict(new_id, "a history of its own")
        result = await session.committer.write(
            _import_commit(snapshot, new_id, worker.id, now, config.seconds("run_retention"))
        )
        assert isinstance(result, Committed), result
    finally:
        await session.read(lambda: session.store.remove_worker(worker.id))
    return new_id


def _imported_record(record: RunRecord, run_id: str, owner: str, shard: int) -> RunRecord:
    """Return the record of the new run.

    The import's own worker owns it, so that no other worker executes it. The store takes `created_at` as the time of
    the first execution.
    """
    return replace(
        record,
        id=run_id,
        created_at=record.created_at if record.first_executed_at is None else record.first_executed_at,
        created_by=new_token(),
        owner=owner,
        shard=shard,
        parent=None,
        attached=False,
        # As for a fork: its subscriptions are in another store, and its later effects need ids of their own.
        generation=record.generation + (not record.status.terminal),
    )


def _import_commit(snapshot: Snapshot, run_id: str, worker: str, now: float, retention: float) -> CommitTurn:
    record = snapshot.record
    if record.status.terminal:
        kept_for = retention if record.retention is None else record.retention
        patch = RunPatch(
            status=record.status,
            result=record.result,
            error=record.error,
            ended_at=record.ended_at,
            recoveries=record.recoveries,
            drift=record.drift,
            prune_at=now + kept_for,
        )
    else:
        held = Hold("imported", f"imported from another store; run `perdure resume {run_id}` to continue it")
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
