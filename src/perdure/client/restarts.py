"""RunRestarter: replace a run by a new generation with a new payload, for `start` with `if_exists`.

A restart is up to three writes: an open run is terminated, the ended run is finalized as every ended run (observers,
unread messages, attached children), and one `CreateRun` replaces it. The last write compares the generation that it
replaces. Of two callers, the second finds the generation of the first and decides again. If the caller dies in between,
the run has ended and the id is not restarted; the caller has no handle then.
"""

from __future__ import annotations

from msgspec.structs import replace

from perdure.client.session import ClientSession
from perdure.errors import RunConflict, StoreError
from perdure.execution.finalizer import RunFinalizer
from perdure.execution.queue_arrivals import raise_for_place
from perdure.execution.store_writes import build_end_run
from perdure.model.ids import incarnation_of, new_token, with_incarnation
from perdure.model.records import RunRecord
from perdure.stores.results import IdTaken, Joined, WriteResult
from perdure.stores.writes import CreateRun, Predecessor
from perdure.workflows.start_request import StartRequest, check_same_workflow

MAX_RESTART_ATTEMPTS = 20  # another caller may restart the run between the read and the write of a restart


class RunRestarter:
    """Replaces ended and open runs by new generations."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def restart(self, request: StartRequest, existing: RunRecord) -> RunRecord | None:
        """Replace the existing run by a new generation with the payload of the request, and return None.

        With `if_exists="restart_ended"` an open run is not replaced; it is returned. Raises `RunConflict` if the
        existing run was started as another workflow.
        """
        found: RunRecord | None = existing
        for _ in range(MAX_RESTART_ATTEMPTS):
            if found is not None:
                check_same_workflow(request, found)
                if not found.status.terminal:
                    if request.if_exists == "restart_ended":
                        return found
                    await self._terminate(found)
                    found = await self._session.find_run(found.id)
            result = await self._create(request, found)
            if not isinstance(result, IdTaken):
                return None
            found = result.record
            if found.status.terminal:
                await self._finalize()
        raise StoreError(
            f"run {existing.id!r} was changed during each of {MAX_RESTART_ATTEMPTS} attempts to restart it; try again",
            retryable=True,
        )

    async def _create(self, request: StartRequest, before: RunRecord | None) -> WriteResult:
        """Create the new generation without an owner: the worker that claims it loads it and so knows its position."""
        session, record, inbox, predecessor = self._session, request.record, request.messages, None
        if before is not None:
            predecessor = Predecessor(before.created_by, before.generation)
            # The same incarnation: a token of an earlier generation is outdated, not invalid.
            created_by = with_incarnation(record.created_by, incarnation_of(before.created_by))
            record = replace(record, created_by=created_by, generation=before.generation + 1, epoch=before.epoch + 1)
            numbered = enumerate(inbox, before.last_message_no + 1)
            inbox = tuple(replace(message, number=number) for number, message in numbered)
        write = CreateRun(record, inbox=inbox, replaces=predecessor, place=request.place)
        result = await session.committer.write(write)
        if request.place is not None:
            raise_for_place(request.place, result)
        if isinstance(result, Joined):
            reason = f"the dedupe key of the start of run {record.id!r}"
            raise RunConflict(result.run_id, reason, "use another key, or wait for the end of that run")
        if not isinstance(result, IdTaken):
            session.local_worker.run_has_messages(record.id)
        return result

    async def _terminate(self, run: RunRecord) -> None:
        session, now = self._session, self._session.clock.now()
        end = build_end_run(
            run.id, new_token(), now, session.config, retention=run.retention, only_if_not_started=False
        )
        await session.committer.write(end)
        session.waiters.notify((run.id,))
        session.local_worker.run_ended_externally(run.id)
        await self._finalize()

    async def _finalize(self) -> None:
        """Finalize ended runs now, as a worker does: there may be no worker."""
        session = self._session
        finalizer = RunFinalizer(
            session.store_session, session.local_worker, lambda: session.local_worker.runs_may_be_due()
        )
        await session.read(lambda: finalizer.tick(session.clock.now()))
