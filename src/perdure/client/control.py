"""ControlClient: cancel, terminate, pause, resume, delete, rewind and fork runs."""

from __future__ import annotations

import asyncio
from datetime import datetime

from perdure.client.rewind import plan_fork, plan_rewind
from perdure.client.session import ClientSession
from perdure.errors import RunConflict, RunInUse, RunNotFound, StoreError
from perdure.execution.finalizer import RunFinalizer
from perdure.execution.store_writes import build_end_run, cancel_message, raise_for_delivery, tag_message
from perdure.model.ids import new_creation_id, new_run_id, new_token, shard_of
from perdure.model.records import Message, RunRecord
from perdure.model.schedule_records import KIND, SCHEDULE_TAG, SLOT_TAG, decode_schedule
from perdure.model.tags import TagChanges
from perdure.model.validation import check_name, check_tag_changes, check_text
from perdure.stores.results import (
    AlreadyEnded,
    AlreadyStarted,
    Committed,
    IdTaken,
    MessageDelivered,
    RunMissing,
    RunRetained,
    Superseded,
    WriteResult,
)
from perdure.stores.writes import TagRun
from perdure.workflows.internal import refuse_internal

MAX_DELETE_ATTEMPTS = 5  # each finalizes all ended runs that need it
MAX_TAG_ATTEMPTS = 20
MAX_REWIND_ATTEMPTS = 20  # a busy run may commit a turn between the read and the write of a rewind

_RETAINED = {
    "open": "it has not ended; terminate it first",
    "parent_open": "its parent has not ended and may read its result; end the parent first",
}


class ControlClient:
    """The calls of a client that stop runs or restart them from a location; `Client` documents them."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def cancel(self, run_id: str, reason: str | None) -> bool:
        run_id = check_name("a run's id", run_id)
        message = cancel_message(f"cancel/{new_token()}", self._session.clock.now(), self._encode_reason(reason))
        retention = await self._read_retention(run_id)
        if reason is not None:
            # The message keeps the reason. Both writes are in one batch: no worker executes the run in between.
            delivery, _ = await asyncio.gather(
                self._session.deliver(run_id, message), self._end(run_id, retention, only_if_not_started=True)
            )
            return isinstance(delivery, MessageDelivered)
        result = await self._end(run_id, retention, only_if_not_started=True)
        if isinstance(result, AlreadyStarted):
            return isinstance(await self._session.deliver(run_id, message), MessageDelivered)
        return isinstance(result, Committed)

    async def pause(self, run_id: str, reason: str | None) -> None:
        run_id = check_name("a run's id", run_id)
        now, body = self._session.clock.now(), self._encode_reason(reason)
        message = Message(id=f"pause/{new_token()}", kind="pause", body=body, sent_at=now)
        raise_for_delivery(run_id, await self._session.deliver(run_id, message))

    def _encode_reason(self, reason: str | None) -> bytes | None:
        return None if reason is None else self._session.codec.encode(check_name("a reason", reason))

    async def terminate(self, run_id: str) -> bool:
        run_id = check_name("a run's id", run_id)
        retention = await self._read_retention(run_id, refused_action="terminated")
        result = await self._end(run_id, retention, only_if_not_started=False)
        return isinstance(result, Committed)

    async def tag(self, run_id: str, given: TagChanges | None, named: TagChanges) -> None:
        session = self._session
        for _ in range(MAX_TAG_ATTEMPTS):
            record = await session.get_run(run_id)
            refuse_internal(record, "tagged")
            changes = check_tag_changes(given, named, tags=record.tags)
            result = await session.committer.write(TagRun(run_id=record.id, tags=changes))
            if isinstance(result, Superseded):  # its worker applies the change, in order with the run's own
                message = tag_message(changes, session.clock.now())
                result = await session.deliver(record.id, message)
            if isinstance(result, RunMissing):
                raise RunNotFound(run_id)
            if not isinstance(result, AlreadyEnded):  # else it has ended meanwhile: the store applies the change
                session.waiters.notify((record.id,), ended=False)
                return
        raise StoreError(f"run {run_id!r} changed during each of {MAX_TAG_ATTEMPTS} attempts to tag it", retryable=True)

    async def delete(self, run_id: str) -> None:
        run_id, session = check_name("a run's id", run_id), self._session
        found = (await session.read(lambda: session.store.records([run_id])))[0]
        if found is None:
            raise RunNotFound(run_id)
        if isinstance(found, RunRecord):
            refuse_internal(found, "deleted")
            await self._refuse_pending_slot(found)
        for _ in range(MAX_DELETE_ATTEMPTS):
            result = await session.read(lambda: session.store.delete_run(run_id))
            if not isinstance(result, RunRetained):  # a missing run: an earlier attempt, or another caller, deleted it
                self._notify_changed(run_id)
                return
            if result.reason != "unfinalized":
                raise RunInUse(run_id, _RETAINED[result.reason])
            await session.read(self._finalize_ended_runs)
        raise StoreError(
            f"run {run_id!r} cannot be deleted yet: its end is still being processed; try again", retryable=True
        )

    async def _refuse_pending_slot(self, record: RunRecord) -> None:
        """Raise `RunInUse` if the run belongs to a pending time slot: a worker may still create it, again."""
        session, schedule_id, slot = self._session, record.tags.get(SCHEDULE_TAG), record.tags.get(SLOT_TAG)
        if not isinstance(schedule_id, str) or not isinstance(slot, datetime):
            return
        document = await session.read(lambda: session.store.document(KIND, schedule_id))
        if document is None:
            return
        if any(each.slot == slot.timestamp() for each in decode_schedule(document.body).pending):
            raise RunInUse(record.id, f"its time slot of schedule {schedule_id!r} is being started; try again later")

    async def _finalize_ended_runs(self) -> None:
        """Do what remains to be done after the end of runs, as a worker does: there may be none."""
        session = self._session
        finalizer = RunFinalizer(session.store_session, session.local_worker, lambda: None)
        await finalizer.tick(session.clock.now())

    async def resume(self, run_id: str) -> None:
        run_id = check_name("a run's id", run_id)
        message = Message(id=f"resume/{new_token()}", kind="resume", sent_at=self._session.clock.now())
        raise_for_delivery(run_id, await self._session.deliver(run_id, message))

    async def rewind(self, run_id: str, location: str) -> None:
        run_id, location = check_name("a run's id", run_id), check_text("a location", location)
        session, turn_id = self._session, new_token()
        for _ in range(MAX_REWIND_ATTEMPTS):
            snapshot = await session.load_snapshot(run_id)
            refuse_internal(snapshot.record, "rewound")
            write = plan_rewind(snapshot, location, now=session.clock.now(), turn_id=turn_id)
            if isinstance(await session.committer.write(write), Committed):
                self._notify_changed(run_id)
                session.local_worker.run_has_messages(run_id)
                return
        raise StoreError(
            f"run {run_id!r} advanced during each of {MAX_REWIND_ATTEMPTS} attempts to rewind it; try again",
            retryable=True,
        )

    async def fork(self, run_id: str, location: str, new_id: str | None) -> str:
        """Return the id of the new run."""
        session, location = self._session, check_text("a location", location)
        chosen_id = None if new_id is None else check_name("a run's id", new_id)
        snapshot, now = await session.load_snapshot(run_id), session.clock.now()
        refuse_internal(snapshot.record, "forked")
        fork_id = chosen_id or new_run_id(now)
        shard = shard_of(fork_id, session.config.shards)
        write = plan_fork(snapshot, location, run_id=fork_id, created_by=new_creation_id(), shard=shard, now=now)
        if isinstance(await session.committer.write(write), IdTaken):
            raise RunConflict(fork_id, "a history of its own")
        session.local_worker.run_has_messages(fork_id)
        return fork_id

    async def _read_retention(self, run_id: str, refused_action: str | None = None) -> float | None:
        """Return how long a run is retained after its end; None if it has no retention of its own.

        Raises `WorkflowMisuse` if the run is internal and does not accept the action.
        """
        session = self._session
        found = (await session.read(lambda: session.store.records([run_id])))[0]
        if refused_action is not None and isinstance(found, RunRecord):
            refuse_internal(found, refused_action)
        return found.retention if isinstance(found, RunRecord) else None

    async def _end(self, run_id: str, retention: float | None, *, only_if_not_started: bool) -> WriteResult:
        session, now, kind = self._session, self._session.clock.now(), only_if_not_started
        write = build_end_run(run_id, new_token(), now, session.config, retention=retention, only_if_not_started=kind)
        result = await session.committer.write(write)
        if not isinstance(result, AlreadyStarted):
            self._notify_changed(run_id)
        return result

    def _notify_changed(self, run_id: str) -> None:
        self._session.waiters.notify((run_id,))
        self._session.local_worker.run_ended_externally(run_id)
