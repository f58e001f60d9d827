"""RunFinalizer: completes what remains to be done after the end of a run. Any worker can do it for any run.

    observers of the run                               each gets a message with the result of the run
    unread events                                      by their policy: discarded, published to their topic, or
                                                       added to the dead letters
    unread assignments of topic events                 returned to their topics
    attached children of a terminated run              terminated, because the workflow cannot cancel them any more

Nothing is missed. A delivery and the end of a run are writes to the same run and therefore ordered: an event that
arrives before the end is an unread message that the end leaves for finalization; the store refuses a later one.

Runs are finalized in pages: first one commit that delivers the results to observers, then commits that move the
messages and mark the runs as finalized. After a crash in between another worker repeats the page; the repeated
deliveries are idempotent. A run that is rewound in between keeps its messages, because only the last write moves them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from perdure.config import EngineConfig
from perdure.errors import StoreError
from perdure.execution.local_worker import LocalWorker
from perdure.execution.open_children import open_children
from perdure.execution.queue_expiry import EXPIRED_WAIT
from perdure.execution.queue_expiry import MESSAGE_NAME as EXPIRED_MESSAGE
from perdure.execution.run_log import log_dead_letters
from perdure.execution.store_session import StoreSession
from perdure.execution.store_writes import build_end_run, build_publish
from perdure.model.records import DeadLetter, Message, RunRecord, RunResult, RunStatus, TopicEvent
from perdure.stores.results import Committed, UnfinalizedRun, WriteResult
from perdure.stores.writes import DeliverMessage, FinalizeRun, Observer, RedirectedEvent, Write
from perdure.workflows.events import EventOptions, message_key, parse_policy

LOGGER = logging.getLogger("perdure.execution")
PAGE = 1_000  # runs; a parent of many children takes a turn per page
# Runs that one commit marks as finalized. Nothing waits for these commits, but turns would wait behind a larger one.
FINALIZE_CHUNK = 200
UNREAD = "the run ended without receiving it"


class RunFinalizer:
    """The periodic task that finalizes ended runs.

    It notifies the worker of this process of its writes; other workers find them in the store.
    `on_broadcast_unfinished` is called when an event was published whose fan-out is not complete.
    """

    def __init__(
        self, session: StoreSession, local_worker: LocalWorker, on_broadcast_unfinished: Callable[[], None]
    ) -> None:
        self._session = session
        self._local_worker = local_worker
        self._on_broadcast_unfinished = on_broadcast_unfinished

    async def tick(self, now: float) -> float | None:
        """Finalize pages of runs until none is left, or until a page makes no progress."""
        before: list[UnfinalizedRun] = []
        while (page := await self._session.store.unfinalized(PAGE)) and page != before:
            before = page
            await self._finalize(page, now)
        return now + self._session.config.seconds("sweep_interval")

    async def _finalize(self, page: list[UnfinalizedRun], now: float) -> None:
        plans = [plan for pending in page if (plan := await self._plan(pending, now)) is not None]
        write_all = self._session.committer.write_all
        results = await write_all([write for plan in plans for write in plan.deliveries])
        first = 0
        for plan in plans:
            plan.on_delivered(results[first : first + len(plan.deliveries)])
            first += len(plan.deliveries)
        # Notify before the runs are marked: an observer continues while the rest of the page is written.
        for run_id in {observer.run_id: None for plan in plans for observer in plan.notified}:
            self._local_worker.run_has_messages(run_id)
        for first in range(0, len(plans), FINALIZE_CHUNK):
            chunk = plans[first : first + FINALIZE_CHUNK]
            results = await write_all([plan.build_finalize_run() for plan in chunk])
            for plan, result in zip(chunk, results, strict=True):
                if isinstance(result, Committed):
                    log_dead_letters(plan.record, plan.dead_letters)
        self._notify_of_events(plans)

    async def _plan(self, pending: UnfinalizedRun, now: float) -> FinalizationPlan | None:
        """End the children of a terminated run and plan the rest; return None if that fails, for this run only."""
        try:
            if pending.orphaned_children:
                await self._end_children(pending.record, now)
            return FinalizationPlan(pending, now, self._session.config)
        except Exception as error:
            run_id, workflow = pending.record.id, pending.record.workflow
            extra = {"run_id": run_id, "workflow": workflow}
            LOGGER.warning("Run %s: finalization failed and will be retried: %r", run_id, error, extra=extra)
            return None

    def _notify_of_events(self, plans: list[FinalizationPlan]) -> None:
        if any(plan.returned or plan.redirected for plan in plans):
            self._local_worker.runs_may_be_due()
        if any(plan.redirected for plan in plans):  # its fan-out may wait for an earlier event of the topic
            self._on_broadcast_unfinished()

    async def _end_children(self, record: RunRecord, now: float) -> None:
        """Terminate the attached children of a terminated run. Each child is then finalized in the same way."""
        turn_id = f"orphan/{record.id}/{record.generation}"
        async for children in open_children(self._session.store, record, lambda call: call()):
            writes: list[Write] = [
                build_end_run(
                    child.id,
                    turn_id,
                    now,
                    self._session.config,
                    retention=child.retention,
                    only_if_not_started=False,
                )
                for child in children
            ]
            results = await self._session.committer.write_all(writes)
            for child, result in zip(children, results, strict=True):
                if isinstance(result, StoreError):
                    raise result
                if isinstance(result, Committed):
                    self._local_worker.run_ended_externally(child.id)
                    self._session.waiters.notify((child.id,))


class FinalizationPlan:
    """The writes that finalize one run, and which of them are done. No I/O.

    `deliveries` come first: the messages to observers. `build_finalize_run` then returns the write that moves the
    unread messages and marks everything that is done; what could not be delivered stays pending in the store.
    """

    def __init__(self, pending: UnfinalizedRun, now: float, config: EngineConfig) -> None:
        self.record = pending.record
        self.notified: list[Observer] = []
        self.dead_letters: list[DeadLetter] = []
        self.returned: list[int] = []  # numbers of assignments that return to their topics
        self.redirected: list[RedirectedEvent] = []  # events that move to their topics
        self._now = now
        self._orphans = pending.orphaned_children
        self._observers = pending.observers
        self._consumed: list[int] = []
        self.deliveries: list[Write] = [self._build_delivery(observer) for observer in pending.observers]
        for message in pending.messages:
            self._plan_message(message, config)

    def on_delivered(self, results: list[WriteResult | StoreError]) -> None:
        """Note which observers were notified, given the results of `deliveries`."""
        for observer, result in zip(self._observers, results, strict=True):
            if isinstance(result, StoreError):
                LOGGER.warning(
                    "Run %s: finalization failed and will be retried: %s",
                    self.record.id,
                    result,
                    extra={"run_id": self.record.id, "workflow": self.record.workflow},
                )
            else:
                self.notified.append(observer)  # an observer that is missing or has ended needs no notification

    def build_finalize_run(self) -> FinalizeRun:
        """Return the write that moves the unread messages and marks what is done."""
        return FinalizeRun(
            run_id=self.record.id,
            now=self._now,
            notified=tuple(self.notified),
            consumed=tuple(self._consumed),
            returned=tuple(self.returned),
            redirected=tuple(self.redirected),
            dead_letters=tuple(self.dead_letters),
            orphaned_children=self._orphans,
        )

    def _build_delivery(self, observer: Observer) -> DeliverMessage:
        record = self.record
        ending = RunResult(record.status, record.result, record.error)
        message = Message(
            id=f"child/{record.id}/{record.generation}/{observer.target}",
            kind="child",
            name=record.id,
            body=msgspec.json.encode(ending),
            sender=record.id,
            sent_at=self._now,
            target=observer.target,
        )
        return DeliverMessage(run_id=observer.run_id, message=message, now=self._now)

    def _plan_message(self, message: Message, config: EngineConfig) -> None:
        expired = message.expires_at is not None and message.expires_at <= self._now
        options = parse_policy(message.name, message.policy)
        if message.name == EXPIRED_MESSAGE and message.kind == "event":
            self._consumed.append(message.number)
            if self.record.status is RunStatus.CANCELLED and self.record.first_executed_at is None:
                self.dead_letters.append(self._build_expired_wait(message))
        elif message.kind == "assignment":
            self.returned.append(message.number)
        elif message.kind != "event" or expired or message.policy == "discard":
            self._consumed.append(message.number)
        elif options is not None and options.on_target_terminated == "broadcast":
            if_full = self._build_dead_letter(message, f"{UNREAD}, and its topic {message.name!r} is full")
            publish = build_publish(self._build_topic_event(message, options), config, self._now)
            self.redirected.append(RedirectedEvent(message.number, publish, if_full))
        else:
            self._consumed.append(message.number)
            self.dead_letters.append(self._build_dead_letter(message, UNREAD))

    def _build_topic_event(self, message: Message, options: EventOptions) -> TopicEvent:
        return TopicEvent(
            topic=message.name,
            id=self._undelivered_id(message),
            event_id=message.event_id,
            body=message.body,
            sent_at=self._now,
            delivery=options.delivery,
            consume=options.consume,
            expires_at=message.expires_at,
            sender=message.sender,
        )

    def _build_dead_letter(self, message: Message, reason: str) -> DeadLetter:
        record = self.record
        return DeadLetter(
            id=self._undelivered_id(message),
            kind="event",
            at=self._now,
            reason=reason,
            event_id=message.event_id,
            event_name=message.name,
            value=message.body,
            original_target=record.id,
            target_status=record.status,
            target_ended_at=record.ended_at,
            sent_at=message.sent_at,
        )

    def _build_expired_wait(self, message: Message) -> DeadLetter:
        """Return the dead letter of a run that was not admitted in time; its value is the payload of the run."""
        record = self.record
        return DeadLetter(
            id=self._undelivered_id(message),
            kind=EXPIRED_WAIT,
            at=self._now,
            reason=f"the run of workflow {record.workflow!r} was not admitted to queue {record.queue!r} in time",
            value=record.input,
            original_target=record.id,
            target_status=record.status,
            target_ended_at=record.ended_at,
            sent_at=record.created_at,
        )

    def _undelivered_id(self, message: Message) -> str:
        """Return an id that is the same when the finalization is repeated."""
        return f"undelivered/{self.record.id}/{message_key(message)}"
