"""WorkerRuntime: one worker. Assembles coordinator, periodic tasks and membership over a store session."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from perdure.clock import sleep_on, wait_within
from perdure.errors import StoreError
from perdure.execution.admitter import HINT_PREFIX, Admitter
from perdure.execution.ambiguous_workflows import AmbiguousWorkflows
from perdure.execution.backfill import InternalServices
from perdure.execution.catalog import Catalog
from perdure.execution.claimer import Claimer
from perdure.execution.coordinator import Coordinator
from perdure.execution.finalizer import RunFinalizer
from perdure.execution.held_run_retrier import HeldRunRetrier
from perdure.execution.internal_claimer import InternalClaimer
from perdure.execution.late_tags import LateTags
from perdure.execution.maintenance import BroadcastResumer, RetentionPruner, SlowStepRecorder
from perdure.execution.membership import MembershipProtocol
from perdure.execution.periodic import PeriodicTask
from perdure.execution.queue_gates import QueueGates
from perdure.execution.retry_queue import WriteCallback
from perdure.execution.schedule_trigger import ScheduleTrigger
from perdure.execution.slot_starts import SlotStarter
from perdure.execution.store_session import StoreSession, retry_store_call
from perdure.execution.stray_runs import StrayRunFinder
from perdure.execution.workflow_publisher import WorkflowPublisher
from perdure.model.records import RunRecord, Takeover, document_hint
from perdure.model.schedule_records import KIND
from perdure.stores.results import Created, WriteResult
from perdure.workflows.definition import Workflow
from perdure.workflows.internal import INTERNAL, is_internal_name
from perdure.workflows.remote_steps import is_step_workflow
from perdure.workflows.tokens import KEY_REFRESH_SECONDS, KEYS

LOGGER = logging.getLogger("perdure.execution")
DRAIN_POLL_SECONDS = 0.02
# Time for the parts of a shutdown after the grace period. With the closing of the store they are less than 5 seconds.
RELEASE_TIMEOUT_SECONDS = 1.5
STOP_TIMEOUT_SECONDS = 0.5
LEAVE_TIMEOUT_SECONDS = 1.5
FINALIZE_DELAY_SECONDS = 0.1
MAX_OBSERVED = 10_000
SCHEDULES_HINT = document_hint(KIND)


class WorkerRuntime:
    """One worker, the `LocalWorker` of its process. `start` joins the cluster; `stop` releases all runs and leaves."""

    publishes_at_start = True  # False: only the periodic task publishes workflows

    def __init__(
        self, session: StoreSession, catalog: Catalog, pool: str, member: MembershipProtocol, concurrency: int | None
    ) -> None:
        self._session = session
        self._catalog = catalog
        self._member = member
        self._pool = pool
        self.coordinator = Coordinator(
            session,
            self,
            workflows=catalog,
            on_due_at=self._on_due_at,
            on_slot_freed=self._on_slot_freed,
            on_run_ended=self._on_run_ended,
            on_ended_unread=self._on_ended_unread,
            may_act=self._may_act,
            concurrency=concurrency,
        )
        self._admitter = Admitter(
            session, member, on_admitted=self._on_admitted, draining=lambda: self.coordinator.draining
        )
        self._ambiguous = AmbiguousWorkflows(session.store, catalog, pool)
        self._claimer = self._build_claimer()
        self._held_retrier = HeldRunRetrier(session, self.coordinator, pool, catalog.workflow_versions, catalog.find)
        self._observed: set[str] = set()  # runs that a run in this process observes
        self._periodic_tasks = self._build_periodic_tasks()
        self._rejoin_task: asyncio.Task[None] | None = None
        self._unsubscribe = session.on_change(self._on_change_hint)
        session.waiters.is_committing = self.coordinator.is_committing
        member.subscribe(
            on_fenced=self._on_fenced,
            on_runs_available=self._claim_task.trigger,
            on_members_changed=self._on_members_changed,
            on_workers_changed=self._on_workers_changed,
        )

    def _build_claimer(self) -> Claimer:
        return Claimer(
            self._session.store,
            self.coordinator,
            self._member,
            self._session.config,
            self._pool,
            self._catalog.workflow_versions,
            on_unclaimed=self._ambiguous.report,
            gates=QueueGates(
                limits=lambda: self._admitter.worker_limits,
                former=lambda: self._admitter.queues_with_holders,
                active=self.coordinator.cache.all_active,
                is_loading=self.coordinator.loader.is_loading,
            ),
        )

    def _build_periodic_tasks(self) -> list[PeriodicTask]:
        """Return all periodic tasks. Those that notifications trigger are attributes too."""
        session, member, clock, config = self._session, self._member, self._session.clock, self._session.config
        interval, lease = config.seconds("sweep_interval"), config.seconds("lease")
        self._claim_task = PeriodicTask("claim", self._claimer.tick, clock, interval)
        self._broadcast_task = PeriodicTask(
            "broadcast", BroadcastResumer(session, self.runs_may_be_due).tick, clock, interval
        )
        finalizer = RunFinalizer(session, self, self._broadcast_task.trigger)
        self._finalize_task = PeriodicTask("finalize", finalizer.tick, clock, interval)
        self._late_tags = LateTags(session)
        self._publisher = WorkflowPublisher(session, self._catalog)
        self._late_tags_task = PeriodicTask("late_tags", self._late_tags.tick, clock, interval)
        self._renew_task = PeriodicTask("lease", member.renew, clock, lease / 10)
        self._held_task = PeriodicTask("held", self._held_retrier.tick, clock, interval)
        self._schedule_task, self._internal_task = self._build_schedule_tasks(interval)
        self._admission_task = PeriodicTask("admission", self._admitter.tick, clock, interval)
        return [
            self._admission_task,
            self._claim_task,
            self._finalize_task,
            self._broadcast_task,
            self._renew_task,
            self._held_task,
            self._late_tags_task,
            PeriodicTask("takeover", member.take_over_expired, clock, min(interval, lease / 3)),
            PeriodicTask("slow_steps", SlowStepRecorder(self.coordinator).tick, clock, interval),
            PeriodicTask("retention", RetentionPruner(session.store, config).tick, clock, interval),
            PeriodicTask("keys", self._read_keys, clock, interval),
            PeriodicTask("publications", self._publisher.tick, clock, interval),
            self._schedule_task,
            self._internal_task,
            PeriodicTask("stray_runs", StrayRunFinder(session.store, self.coordinator).tick, clock, interval),
        ]

    def _build_schedule_tasks(self, interval: float) -> tuple[PeriodicTask, PeriodicTask]:
        """Return the tasks that fire schedules and claim internal runs."""
        session, clock = self._session, self._session.clock
        starter = SlotStarter(session, lambda: self, lambda: self.coordinator.worker)
        trigger = ScheduleTrigger(session, self._member, starter, lambda: self.coordinator.draining)
        self.coordinator.executor.internal = InternalServices(session, starter)
        internal_claimer = InternalClaimer(session.store, self.coordinator, interval)
        return (
            PeriodicTask("schedules", trigger.tick, clock, interval),
            PeriodicTask("internal", internal_claimer.tick, clock, interval),
        )

    # --- start and stop

    async def start(self, *, retry_forever: bool = False) -> None:
        """Join as a worker and start to claim runs. With `retry_forever`, wait for an unavailable store.

        Raises `WorkflowMisuse` if a run needs one of two definitions of a workflow.
        """
        session = self._session
        await session.read(self._ambiguous.refuse, retry_forever=retry_forever)
        if self.publishes_at_start:
            await session.read(lambda: self._publisher.tick(session.clock.now()), retry_forever=retry_forever)
        await self._join(retry_forever=retry_forever)
        await session.read(lambda: self._held_retrier.tick(session.clock.now()), retry_forever=retry_forever)
        for task in self._periodic_tasks:
            task.start()
            task.trigger()

    async def recover(self) -> tuple[Takeover, int]:
        """Take over from dead workers, retry held runs with this code, and claim due runs.

        Returns the takeover and the number of runs claimed meanwhile, by this call or by the periodic task.
        """
        session, before = self._session, self._claimer.claimed
        now = await session.read(session.clock.synchronize)
        takeover = await session.read(lambda: self._member.take_over(now))
        self._held_retrier.on_members_changed()
        await session.read(lambda: self._held_retrier.tick(now))
        await session.read(lambda: self._claimer.tick(now))
        return takeover, self._claimer.claimed - before

    async def stop(self, grace: float, *, wait_for_bodies: bool = False) -> None:
        """Claim no more runs, wait up to `grace` seconds for executing steps, release all runs, and leave.

        With `wait_for_bodies`, async bodies that were cancelled get time to end, because they use shared resources.

        Takes no longer than the grace and the timeouts above, also if the store does not respond. Time that the steps
        do not need is available for the release.
        """
        clock = self._session.clock
        self._unsubscribe()
        deadline = clock.now() + grace
        announcing = asyncio.ensure_future(self._stop_accepting())
        while not self.coordinator.drain() and clock.now() < deadline:
            await sleep_on(clock, DRAIN_POLL_SECONDS)
        self.coordinator.release_all()
        left = max(0.0, deadline - clock.now())
        await self._session.committer.wait_idle(left + RELEASE_TIMEOUT_SECONDS)
        await wait_within(clock, STOP_TIMEOUT_SECONDS, self._stop_tasks())
        self.coordinator.discard_all()
        self.coordinator.executor.close()
        left = max(0.0, deadline - clock.now())
        await self._leave(announcing, left + LEAVE_TIMEOUT_SECONDS)
        if wait_for_bodies:
            await wait_within(clock, STOP_TIMEOUT_SECONDS, self.coordinator.executor.wait_cancelled())

    async def abort(self) -> None:
        """Stop as in a crash: without a write to the store."""
        self._unsubscribe()
        await self._stop_tasks()
        self.coordinator.discard_all()
        self.coordinator.executor.close()

    @property
    def task_failures(self) -> dict[str, int]:
        """The number of failed ticks per periodic task."""
        return {task.name: task.failures for task in self._periodic_tasks}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in progress: only time or a call from outside can change anything."""
        return (
            not self.coordinator.is_busy
            and self._rejoin_task is None
            and not any(task.pending for task in self._periodic_tasks)
        )

    # --- LocalWorker: notifications by callers in this process

    def owner_for_new_run(self, workflow: Workflow[Any, Any]) -> str | None:
        """Return the id of this worker if it can execute a new run of this workflow at once; otherwise None."""
        can_execute = self._catalog.add_started(workflow) and workflow.settings.pool == self._pool
        has_capacity = not self.coordinator.draining and self._rejoin_task is None and self.coordinator.free_slots > 0
        return self.coordinator.worker if can_execute and has_capacity else None

    def on_created_callback(self, record: RunRecord, workflow: Workflow[Any, Any]) -> WriteCallback:
        """Return the callback for the `CreateRun` write of a run that names this worker as its owner."""

        def on_created(result: WriteResult | StoreError) -> None:
            if isinstance(result, Created) and result.owned:
                self.coordinator.on_run_created(record, workflow)
            elif isinstance(result, StoreError) and result.retryable:
                # The caller gave up, but the store may have created the run: then this worker owns it.
                self._claimer.needs_reconcile = True
                self._claim_task.trigger()

        return on_created

    def run_has_messages(self, run_id: str) -> None:
        """Handle a local notification that a run has messages or is due."""
        self.coordinator.on_messages([run_id])
        self._claim_task.trigger()
        if is_internal_name(run_id):
            self._internal_task.trigger()

    def runs_may_be_due(self) -> None:
        """Handle a local notification that some runs have messages or are due."""
        self._claim_task.trigger()

    def run_ended_externally(self, run_id: str) -> None:
        """Evict a run that a caller ended or rewound, and finalize it if needed."""
        self.coordinator.on_run_terminated(run_id)
        self._finalize_task.trigger()

    def run_is_observed(self, run_id: str) -> None:
        """Note that a run waits for the end of this run, so that it is finalized without delay.

        The set is bounded: an observer that is dropped from it is notified by the next sweep.
        """
        if len(self._observed) >= MAX_OBSERVED:
            self._observed.clear()
        self._observed.add(run_id)

    def is_executing(self, run_id: str) -> bool:
        return self.coordinator.cache.active(run_id) is not None

    # --- notifications by the store and the coordinator

    def can_execute(self, record: RunRecord) -> bool:
        if is_internal_name(record.workflow) and not is_step_workflow(record.workflow):
            return INTERNAL.find(record.workflow, record.version) is not None
        return record.pool == self._pool and (record.workflow, record.version) in self._catalog.workflow_versions()

    def _on_change_hint(self, run_ids: frozenset[str] | None) -> None:
        """Check for due runs and messages, unless the change hint is about runs that are active here."""
        if run_ids is not None and SCHEDULES_HINT in run_ids:
            self._schedule_task.trigger()
        if run_ids is not None and any(map(is_internal_name, run_ids)):
            self._internal_task.trigger()
        run_ids = self._handle_queue_hints(run_ids)
        if run_ids is not None and not run_ids:
            return
        if run_ids is None or not all(self.is_executing(run_id) for run_id in run_ids):
            self._claim_task.trigger()
            # A worker finalizes the runs that it ends. A client cannot, so check for its runs after a short delay.
            self._finalize_task.trigger(self._session.clock.now() + FINALIZE_DELAY_SECONDS)
        if run_ids is not None:
            self.coordinator.on_change_hint(run_ids)

    def _handle_queue_hints(self, names: frozenset[str] | None) -> frozenset[str] | None:
        """Admit runs of the queues that a change hint names; return the other names."""
        if names is None:
            self._admission_task.trigger(self._admitter.on_change())
            return None
        hints = [name for name in names if name.startswith(HINT_PREFIX)]
        for hint in hints:
            self._admission_task.trigger(self._admitter.on_hint(hint.removeprefix(HINT_PREFIX)))
        return names.difference(hints) if hints else names

    def _on_admitted(self) -> None:
        self._claim_task.trigger()

    def _on_workers_changed(self) -> None:
        self._admission_task.trigger(self._admitter.on_members_changed())

    def _on_due_at(self, wake_at: float | None) -> None:
        if wake_at is not None:
            self._claim_task.trigger(wake_at)

    def _on_run_ended(self, record: RunRecord, had_messages: bool) -> None:
        """Finalize the run at once if anything may be pending. Most runs need no finalization."""
        if had_messages or record.parent is not None or record.id in self._observed:
            self._observed.discard(record.id)
            self._finalize_task.trigger()

    def _on_ended_unread(self, run_id: str) -> None:
        """Handle a run that ended with messages which its last turn has not seen."""
        self._late_tags.add(run_id)
        self._late_tags_task.trigger()

    def _on_slot_freed(self) -> None:
        if self._claimer.awaits_slot:
            self._claim_task.trigger()
        if self._held_retrier.at_capacity:
            self._held_task.trigger()

    # --- membership

    async def _join(self, *, retry_forever: bool) -> None:
        session = self._session
        await session.read(self._member.join, retry_forever=retry_forever)
        self.coordinator.worker = self._member.id
        await session.read(lambda: self._read_keys(session.clock.now()), retry_forever=retry_forever)
        self._on_members_changed()

    def _may_act(self, now: float) -> bool:
        """Return whether the lease is valid, so that effects of a committed turn may start.

        A commit result alone is not enough. It may be the result of a retry, after the first one was lost and another
        worker took the run over. With an expired lease the worker first renews it, and reconciles what it owns.
        """
        if self._member.lease_until >= now:
            return True
        self._claimer.needs_reconcile = True
        self._renew_task.trigger()
        return False

    async def _leave(self, announcing: asyncio.Future[None], seconds: float) -> None:
        """Deregister this worker, after its announcement; give up after `seconds`."""

        async def leave() -> None:
            await announcing
            await self._member.leave()

        try:
            cause = None if await wait_within(self._session.clock, seconds, leave()) else "the store does not respond"
        except StoreError as error:
            cause = str(error)
        if cause is not None:
            LOGGER.warning(
                "Could not deregister worker %s; its runs will be taken over when the lease expires: %s",
                self._member.id,
                cause,
                extra={"worker": self._member.id},
            )

    async def _stop_accepting(self) -> None:
        try:
            await self._member.stop_accepting()
        except StoreError as error:
            LOGGER.warning(
                "Could not announce shutdown of worker %s: %s",
                self._member.id,
                error,
                extra={"worker": self._member.id},
            )

    def _on_members_changed(self) -> None:
        """Retry held runs: the code of this process, or of a worker that has joined, may be able to continue them."""
        self._held_retrier.on_members_changed()
        self._held_task.trigger()
        self._schedule_task.trigger()  # this worker may be the one that fires schedules now

    async def _read_keys(self, now: float) -> float | None:
        """Read the keys that sign the tokens of deferreds. A new key signs after all workers had time to read it."""
        self.coordinator.keys = tuple(await self._session.store.keys(KEYS, now))
        return now + KEY_REFRESH_SECONDS

    def _on_fenced(self) -> None:
        """Discard all runs and join again with a new id: other workers own the runs now."""
        if self._rejoin_task is None:
            self.coordinator.discard_all()
            self._rejoin_task = asyncio.get_running_loop().create_task(self._rejoin())

    async def _rejoin(self) -> None:
        fenced_id = self._member.id
        try:
            await self._join(retry_forever=True)
        except Exception:
            LOGGER.exception("Worker %s could not rejoin, will retry", fenced_id, extra={"worker": fenced_id})
            self._renew_task.trigger(self._session.clock.now() + self._session.config.seconds("lease") / 10)
            return
        finally:
            self._rejoin_task = None
        self._claim_task.trigger()
        await self._release_runs_of(fenced_id)

    async def _release_runs_of(self, fenced_id: str) -> None:
        """Release runs under the fenced id of this worker: no takeover finds them if its row is missing."""
        session = self._session
        release = partial(session.store.release_runs, fenced_id, session.clock.now(), recovered=True)
        while await retry_store_call(release, session.clock, session.config.store_retry):
            self._claim_task.trigger()

    async def _stop_tasks(self) -> None:
        if self._rejoin_task is not None:
            self._rejoin_task.cancel()
        await asyncio.gather(*(task.stop() for task in self._periodic_tasks))
        await self.coordinator.loader.stop()
