"""HeldRunRetrier: executes held runs again when the live workers of this pool have changed.

A hold that the code of a workflow caused names the fingerprint of that code. A worker with other code claims such a run
for itself. If it merely became due, a worker with the code that caused the hold could claim it first, and would hold it
again. A run that an internal error holds becomes due for any worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from perdure.execution.admission import FindWorkflow
from perdure.execution.coordinator import Coordinator
from perdure.execution.store_session import StoreSession
from perdure.model.ids import new_token
from perdure.model.queries import RunQuery
from perdure.model.records import CODE_HOLD_KINDS, RunRecord, RunStatus
from perdure.model.shards import WorkflowVersions
from perdure.stores.results import Committed, Snapshot, UnreadableRun
from perdure.stores.writes import CommitTurn, RunPatch, Write

PAGE = 100


class HeldRunRetrier:
    """Retries held runs for one worker. `workflows` returns what this process can execute now."""

    def __init__(
        self,
        session: StoreSession,
        coordinator: Coordinator,
        pool: str,
        workflows: Callable[[], WorkflowVersions],
        find_workflow: FindWorkflow,
    ) -> None:
        self._session = session
        self._coordinator = coordinator
        self._pool = pool
        self._workflows = workflows
        self._find_workflow = find_workflow
        self._pending = False
        self.at_capacity = False  # the last tick stopped for lack of slots

    def on_members_changed(self) -> None:
        """Note that the live workers have changed: the next tick retries held runs."""
        self._pending = True

    async def tick(self, now: float) -> float | None:
        """Retry held runs if the live workers have changed since the last time, as far as there are free slots.

        Raises `StoreError` if the store is unavailable: the next tick continues.
        """
        if not self._pending or self._coordinator.draining:
            return None
        self._pending = self.at_capacity = False  # a change from here on causes another pass
        try:
            await self._session.store.retry_held(self._workflows(), "internal_error", now)
            for kind in CODE_HOLD_KINDS:
                await self._retry_kind(kind, now)
        except BaseException:
            self._pending = True
            raise
        self._pending = self._pending or self.at_capacity
        return now + self._session.config.seconds("sweep_interval") if self._pending else None

    async def _retry_kind(self, kind: str, now: float) -> None:
        after: str | None = None
        while not self.at_capacity:
            query = RunQuery(held=kind, limit=PAGE, after=after, internal=True)
            page = await self._session.store.runs(query)
            found = [record.id for record in page.runs if self._can_try(record)]
            free_slots = self._coordinator.free_slots
            self.at_capacity = len(found) > free_slots
            await self._claim(found[:free_slots], now)
            after = page.next
            if after is None:
                return

    def _can_try(self, record: RunRecord) -> bool:
        """Return whether the code of this process may be able to continue the run."""
        pair = (record.workflow, record.version)
        is_ours = record.pool == self._pool and pair in self._workflows()
        if not is_ours or record.owner is not None or record.held is None:
            return False
        definition = self._find_workflow(*pair)
        return definition is not None and self._coordinator.fingerprints.may_continue(definition, record.held)

    async def _claim(self, run_ids: list[str], now: float) -> None:
        """Make this worker the owner of held runs and load them. A run that has changed meanwhile is left alone."""
        if not run_ids:
            return
        snapshots = await self._session.store.load(run_ids)
        writes = list(self._build_claims(snapshots, now))
        results = await self._session.committer.write_all(writes)
        claimed = [
            write.run_id
            for write, result in zip(writes, results, strict=True)
            if isinstance(write, CommitTurn) and isinstance(result, Committed)
        ]
        self._coordinator.on_runs_found(claimed)

    def _build_claims(self, snapshots: Iterable[Snapshot | UnreadableRun | None], now: float) -> Iterable[Write]:
        """Yield a turn for each run that is still held. It changes nothing but the owner."""
        for snapshot in snapshots:
            if not isinstance(snapshot, Snapshot):
                continue
            if (held := snapshot.record.current_hold) is None or snapshot.record.owner is not None:
                continue
            record = snapshot.record
            yield CommitTurn(
                run_id=record.id,
                base=snapshot.position,
                turn_id=new_token(),
                worker=self._coordinator.worker,
                owned=False,
                now=now,
                patch=RunPatch(
                    status=RunStatus.RUNNING,
                    owner=self._coordinator.worker,
                    waits=record.waits,
                    held=held,
                    drift=record.drift,
                    recoveries=record.recoveries,
                ),
                seen=record.last_message_no,
            )
