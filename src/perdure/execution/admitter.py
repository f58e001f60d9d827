"""Admitter: the periodic task that admits waiting runs of work queues.

One worker admits the runs of a queue, chosen by the queue's name. The others only check, a little later and more and
more rarely, that the queue's version moves while runs could be admitted. It needs no user code: the rules are in
`perdure.queues`, and the store applies a plan only to the version of the queue that the plan was made from.

Change hints, times (`next_at`) and the sweep cause an admission. A store without queues is not read, except once a
minute: a process without a worker may have created the first queue, and its hint may be lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from perdure.errors import StoreError
from perdure.execution.membership import MembershipProtocol
from perdure.execution.queue_expiry import end_expired
from perdure.execution.store_session import StoreSession
from perdure.model.queue_records import COUNT_CAP, QueueSettings, QueueSummary, QueueView
from perdure.model.records import RunRecord, WorkerRecord
from perdure.queues.admission_plan import MAX_SLACK_SECONDS, AdmissionPlan, default_slack, plan
from perdure.queues.admitter_choice import choose_admitter
from perdure.queues.effective_settings import effective_settings
from perdure.stores.results import Admitted, QueueMissing, Superseded, WriteResult

LOGGER = logging.getLogger("perdure.execution")
HINT_PREFIX = "queue:"
QUEUES_PER_PASS = 32
FIRST_RETRY_SECONDS = 0.01
# Another worker admits the runs of a queue: how long it gets before this worker checks. Twice the latency of a hint
# (20 ms) and 100 ms.
FIRST_CHECK_SECONDS = 0.14
DISCOVERY_SECONDS = 60.0
SERVING_SAMPLE = 20  # first places of a queue, whose workflows say which workers serve it


class KnownQueue:
    """What this worker remembers of one queue between admissions. `due_at` is when it looks at the queue again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.due_at: float | None = None
        self.version: int | None = None  # at the last look
        self.settings = QueueSettings()
        self.waiting = 0  # as counted by the last sweep
        self.held = 0
        self.full = False
        self.check_seconds = FIRST_CHECK_SECONDS
        self.retry_seconds = FIRST_RETRY_SECONDS
        self.slack: float | None = None
        self.refused_base: int | None = None  # the version that an admission was refused for
        self.serving: int | None = None  # workers that execute runs of the queue
        self.serving_until = 0.0

    def look_at(self, at: float) -> None:
        """Look at the queue at this time or earlier."""
        self.due_at = at if self.due_at is None else min(self.due_at, at)


class Admitter:
    """Admits runs for one worker. `on_admitted` is called when runs became due, `draining` while the worker stops."""

    def __init__(
        self,
        session: StoreSession,
        member: MembershipProtocol,
        *,
        on_admitted: Callable[[], None],
        draining: Callable[[], bool],
    ) -> None:
        self._session = session
        self._store = session.store
        self._member = member
        self._on_admitted = on_admitted
        self._draining = draining
        self._sweep = session.config.seconds("sweep_interval")
        self._queues: dict[str, KnownQueue] = {}
        self._sweep_at = 0.0  # when to read the list of all queues
        self.look_ups = 0  # reads of the list, for tests

    # --- notifications; the caller triggers the periodic task at the returned time

    def on_hint(self, name: str) -> float:
        """Note that a queue may admit runs; return when this worker looks at it."""
        now = self._session.clock.now()
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = KnownQueue(name)
            self._sweep_at = min(self._sweep_at, now)  # read its settings
        queue.look_at(now if self._is_own(name) else now + queue.check_seconds)
        assert queue.due_at is not None
        return queue.due_at

    def on_change(self) -> float:
        """Note that anything may have changed; return when this worker reads the list of queues."""
        now = self._session.clock.now()
        if self._queues:
            self._sweep_at = min(self._sweep_at, now)
        else:
            self._sweep_at = min(self._sweep_at, now + self._sweep)
        return self._sweep_at

    def on_members_changed(self) -> float:
        """Note that workers have joined or left: they may serve other runs, and may have declared queues."""
        self._sweep_at = self._session.clock.now()
        for queue in self._queues.values():
            queue.serving_until = 0.0
        return self._sweep_at

    @property
    def worker_limits(self) -> dict[str, int]:
        """The limits per worker, by queue."""
        limits = ((name, queue.settings.worker_concurrency) for name, queue in self._queues.items())
        return {name: limit for name, limit in limits if limit is not None}

    @property
    def queues_with_holders(self) -> list[str]:
        """The queues in which runs held slots at the last sweep."""
        return [name for name, queue in self._queues.items() if queue.held]

    # --- the periodic task

    async def tick(self, now: float) -> float | None:
        """Admit runs of the queues that are due, and return when to look again."""
        if self._draining():
            return None
        if now >= self._sweep_at:
            await self._read_queues(now)
        due = sorted(
            (each for each in self._queues.values() if each.due_at is not None and each.due_at <= now), key=_due_at
        )
        for first in range(0, len(due), QUEUES_PER_PASS):
            await self._admit_all(due[first : first + QUEUES_PER_PASS])
        return min((self._sweep_at, *(each.due_at for each in self._queues.values() if each.due_at is not None)))

    async def _read_queues(self, now: float) -> None:
        self.look_ups += 1
        limits_before = self.worker_limits
        summaries = await self._store.queues()
        self._queues = {each.name: self._queues.get(each.name) or KnownQueue(each.name) for each in summaries}
        for summary in summaries:
            self._on_summary(self._queues[summary.name], summary, now)
        self._sweep_at = now + (self._sweep if summaries else max(DISCOVERY_SECONDS, self._sweep))
        if self.worker_limits != limits_before:
            self._on_admitted()  # runs may be due that are claimed by their gates only

    def _on_summary(self, queue: KnownQueue, summary: QueueSummary, now: float) -> None:
        settings = effective_settings(summary.declared, summary.override)
        if settings != queue.settings:
            queue.slack = None
        queue.settings, queue.waiting, queue.held, queue.full = settings, summary.waiting, summary.held, summary.full
        if queue.version is None:
            queue.version = summary.version
        is_full = settings.max_waiting is not None and summary.waiting >= settings.max_waiting
        delay = 0.0 if self._is_own(queue.name) else queue.check_seconds
        if summary.needs_admission or is_full != summary.full:
            queue.look_at(now + delay)
        if summary.next_at is not None:
            queue.look_at(max(now, summary.next_at) + delay)

    def _is_own(self, name: str) -> bool:
        accepting = (each.id for each in self._member.live_workers() if each.workflows)
        return choose_admitter(name, accepting) in (None, self._member.id)

    async def _admit_all(self, queues: Sequence[KnownQueue]) -> None:
        """Plan these queues one after the other, and commit their admissions together."""
        pending: list[tuple[KnownQueue, AdmissionPlan, asyncio.Future[WriteResult]]] = []
        for queue in queues:
            queue.due_at = None
            try:
                planned = await self._plan(queue)
            except StoreError:
                queue.look_at(self._session.clock.now() + self._sweep)
                raise
            except Exception:
                LOGGER.exception("Admission of queue %s failed, will retry", queue.name, extra={"queue": queue.name})
                queue.look_at(self._session.clock.now() + self._sweep)
                continue
            if planned is not None and planned.admit is not None:
                committing = self._session.committer.submit_future(planned.admit, wait_for_store=False, once=True)
                pending.append((queue, planned, committing))
        results = await asyncio.gather(*(each for _, _, each in pending), return_exceptions=True)
        for (queue, planned, _), result in zip(pending, results, strict=True):
            self._on_result(queue, planned, result)

    async def _plan(self, queue: KnownQueue) -> AdmissionPlan | None:
        """Return the plan of a queue; None if it is unknown or another worker admits its runs."""
        view = await self._store.queue_view(queue.name, self._session.clock.now())
        if view is None:
            self._queues.pop(queue.name, None)
            return None
        if view.expired:
            await end_expired(self._session, view.expired)
        settings = effective_settings(view.declared, view.override)
        if settings.worker_concurrency is not None:
            await self._count_serving(queue)
        queue.settings = settings
        now = self._session.clock.now()
        planned = plan(
            view,
            self._member.live_workers(),
            now,
            serving=queue.serving if settings.worker_concurrency is not None else None,
            waiting=queue.waiting if queue.waiting >= COUNT_CAP else 0,
            was_full=queue.full,
            slack=self._slack(queue, view),
        )
        if planned.next_at is not None and planned.next_at > now:
            queue.look_at(planned.next_at)
        if planned.admit is not None and not self._is_own(queue.name) and self._is_admitted_elsewhere(queue, view, now):
            return None
        queue.version = view.version
        return planned

    def _is_admitted_elsewhere(self, queue: KnownQueue, view: QueueView, now: float) -> bool:
        """Return whether another worker has changed the queue since the last look; if so, look again later."""
        if view.version == queue.version:
            queue.check_seconds = FIRST_CHECK_SECONDS
            return False
        queue.version = view.version
        queue.look_at(now + queue.check_seconds)
        queue.check_seconds = min(2 * queue.check_seconds, self._sweep)
        return True

    def _slack(self, queue: KnownQueue, view: QueueView) -> float:
        """Return how much the clocks may differ. It doubles when the store refuses an admission for no other reason."""
        if queue.slack is None:
            queue.slack = default_slack(view)
        if queue.refused_base == view.version:
            queue.slack = min(MAX_SLACK_SECONDS, 2 * queue.slack)
        queue.refused_base = None
        return queue.slack

    async def _count_serving(self, queue: KnownQueue) -> None:
        """Count the live workers that execute the runs at the head of the queue."""
        now = self._session.clock.now()
        if now < queue.serving_until:
            return
        places = await self._store.places(queue.name, limit=SERVING_SAMPLE)
        records = await self._store.records([each.run_id for each in places])
        found = [each for each in records if isinstance(each, RunRecord)]
        wanted = {(each.workflow, each.version, each.pool) for each in found}
        queue.serving = None if not wanted else sum(1 for each in self._member.live_workers() if _serves(each, wanted))
        queue.serving_until = now + self._sweep

    def _on_result(self, queue: KnownQueue, planned: AdmissionPlan, result: WriteResult | BaseException) -> None:
        now = self._session.clock.now()
        assert planned.admit is not None
        match result:
            case Admitted(runs=runs):
                queue.version, queue.full = result.version, planned.admit.full
                if runs:
                    queue.waiting = max(0, queue.waiting - len(runs))
                    self._on_admitted()
                if len(runs) < planned.planned:
                    self._retry_later(queue, now)
                else:
                    queue.retry_seconds = FIRST_RETRY_SECONDS
                    if planned.may_continue:
                        queue.look_at(now)
            case Superseded():
                queue.refused_base = planned.admit.base
                self._retry_later(queue, now)
            case QueueMissing():
                self._queues.pop(queue.name, None)
            case _:  # the store is unavailable; the admission may have been applied, and is not repeated
                LOGGER.warning("Admission of queue %s failed, will plan again: %s", queue.name, result)
                self._retry_later(queue, now)

    def _retry_later(self, queue: KnownQueue, now: float) -> None:
        """Plan again after a pause that doubles, up to one sweep."""
        queue.look_at(now + queue.retry_seconds)
        queue.retry_seconds = min(2 * queue.retry_seconds, self._sweep)


def _due_at(queue: KnownQueue) -> float:
    return queue.due_at or 0.0


def _serves(worker: WorkerRecord, wanted: set[tuple[str, int, str]]) -> bool:
    return any((workflow, version, worker.pool) in wanted for workflow, version in worker.workflows)
