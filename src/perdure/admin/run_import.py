"""Import an exported run (see `perdure.client.run_export`) into a store."""

from __future__ import annotations

from msgspec.structs import replace

from perdure.admin.import_checks import MAX_TIME, check_snapshot, last_message_no
from perdure.client.client import Client
from perdure.client.rewind import CHILD_REQUESTS, as_detached_child, as_targeted
from perdure.client.run_export import check_payloads, parse_snapshot
from perdure.errors import RunConflict, StoreError
from perdure.model.ids import incarnation_of, new_token, shard_of, with_incarnation
from perdure.model.records import Hold, RunRecord, RunStatus, Wait, WorkerRecord
from perdure.model.validation import check_name
from perdure.stores.results import Committed, IdTaken, Snapshot
from perdure.stores.writes import CommitTurn, CreateRun, RunPatch

LEASE_SECONDS = 600.0  # of the worker that owns the run during the import; longer than any retry of its commit


async def import_run(client: Client, data: object, *, run_id: str | None = None) -> str:
    """Create a run from an export, under its own id or `run_id`. Return its id.

    An ended run stays ended. An open run is held until you resume it, so that no step is executed twice by accident.
    The imported run has no parent and no children. It is created in this state by one commit. Raises `InvalidArgument`
    if the data is not a run that a worker could load, `RunConflict` if the id is taken.
    """
    exported = parse_snapshot(data)
    session = client._session
    new_id = check_name("a run's id", exported.record.id if run_id is None else run_id)
    snapshot = _detach(exported)
    check_snapshot(snapshot, session.codec)
    config, now = session.config, session.clock.now()
    check_payloads(snapshot, config.max_payload_bytes)
    worker = WorkerRecord(
        id=f"import-{new_token()}", pool="import", workflows=(), lease_until=now + LEASE_SECONDS, started_at=now
    )
    record = _imported_record(snapshot.record, new_id, worker.id, shard_of(new_id, config.shards))
    create = CreateRun(record, snapshot.entries, snapshot.inbox, received=last_message_no(snapshot))
    finish = _import_commit(create, snapshot, worker.id, now, config.seconds("run_retention"))
    await session.read(lambda: session.store.join(worker))
    try:
        # Not through the committer, which may split its batches: killed in between, the run would be executed.
        created, finished = await session.read(lambda: session.store.commit([create, finish]))
    finally:
        await session.read(lambda: session.store.remove_worker(worker.id))
    if isinstance(created, IdTaken):
        raise RunConflict(new_id, "a history of its own")
    if not isinstance(finished, Committed):
        raise StoreError(f"run {new_id!r} was not imported, because its worker was fenced meanwhile; use another id")
    return new_id


def _detach(snapshot: Snapshot) -> Snapshot:
    """Return the part of an export that is independent of other runs and topics, which are not those of this store."""
    entries = tuple(as_detached_child(entry) for entry in snapshot.entries if entry.kind not in CHILD_REQUESTS)
    # An ended run needs none: unread messages would be published or dead-lettered in this store.
    unread = () if snapshot.record.status.terminal else snapshot.inbox
    own = (as_targeted(message) for message in unread if message.kind not in ("child", "resume"))
    inbox = tuple(replace(message, target=None, offset=0) for message in own)
    return Snapshot(snapshot.record, len(entries), entries, inbox)


def _imported_record(record: RunRecord, run_id: str, owner: str, shard: int) -> RunRecord:
    """Return the record of the new run.

    The import's own worker owns it, so that no other worker executes it. The store takes `created_at` as the time of
    the first execution. `wake_at` counts only if the worker was fenced: then no worker claims the run either.
    """
    return replace(
        record,
        id=run_id,
        created_at=record.created_at if record.first_executed_at is None else record.first_executed_at,
        created_by=with_incarnation(new_token(), incarnation_of(record.created_by)),  # its tokens stay valid
        owner=owner,
        wake_at=MAX_TIME,
        shard=shard,
        parent=None,
        attached=False,
        # As for a fork: its subscriptions are in another store, and its later effects need ids of their own.
        generation=record.generation + (not record.status.terminal),
    )


def _import_commit(create: CreateRun, snapshot: Snapshot, worker: str, now: float, retention: float) -> CommitTurn:
    run_id, record = create.record.id, snapshot.record
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
        seen=create.received + len(create.inbox),
    )
