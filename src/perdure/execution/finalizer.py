"""Settling: what a run that has ended still owes, done by any worker; the code of its workflow is not needed.

    its end is told to those who wait for it           a message each
    unread events go where their policy says           dropped, into their topic, or among the dead letters
    unread assignments                                 back to their places in the topics
    attached children of a run that was terminated     are terminated too, as its own workflow cannot cancel them

Nothing is overlooked: mail and the end of a run are writes to one run, so that an event either comes before the end,
and is unread mail that the end leaves to be settled, or after it, and is refused.

A page of runs at a time: one commit of the news that others get, then some that deal with the mail and tick all off.
A crash in between repeats only what changes nothing the second time; if the run is rewound in between it keeps its
mail, for where that goes is decided by the write that takes it out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
from msgspec import Struct

from perdure.config import EngineConfig
from perdure.errors import StoreError
from perdure.execution.store_session import StoreSession
from perdure.execution.store_writes import build_end_run, build_publish
from perdure.model.records import DeadLetter, Message, RunRecord, RunResult, TopicEvent
from perdure.stores.results import Committed, UnfinalizedRun, WriteResult
from perdure.stores.writes import DeliverMessage, FinalizeRun, Observer, RedirectedEvent, Write
from perdure.workflows.events import message_key

LOGGER = logging.getLogger("perdure.execution")
PAGE = 1_000  # each costs a parent of many a turn
FINALIZE_CHUNK = 200  # are ticked off: nobody waits for that, but turns would wait for more
CHILDREN_PAGE = 500
UNREAD = "the run ended without receiving it"


class FinalizerCallbacks(Struct, frozen=True):
    """Whom a process tells at once of what its settling has done; others find out by themselves."""

    look: Callable[[str], None]  # this run has mail
    woken: Callable[[], None]  # some runs have
    unfinished: Callable[[], None]  # an event is still to be assigned to more runs
    ended: Callable[[str], None]  # this run was terminated


class RunFinalizer:
    """The duty; `tick` goes on until nobody owes anything, or nothing more can be done now."""

    def __init__(self, link: StoreSession, news: FinalizerCallbacks) -> None:
        self._link = link
        self._news = news

    async def tick(self, now: float) -> float | None:
        before: list[UnfinalizedRun] = []
        while (page := await self._link.store.unfinalized(PAGE)) and page != before:
            before = page
            await self._settle(page, now)
        return now + self._link.config.seconds("sweep_interval")

    async def _settle(self, page: list[UnfinalizedRun], now: float) -> None:
        for owing in page:
            if owing.orphans:
                await self._end_children(owing.record, now)
        plans = [FinalizationPlan(owing, now, self._link.config) for owing in page]
        answers = await self._link.committer.write_all([write for plan in plans for write in plan.writes])
        at = 0
        for plan in plans:
            plan.take(answers[at : at + len(plan.writes)])
            at += len(plan.writes)
        for run_id in {observer.run_id: None for plan in plans for observer in plan.told}:
            self._news.look(run_id)  # it goes on while the others are ticked off
        for first in range(0, len(plans), FINALIZE_CHUNK):
            await self._link.committer.write_all([plan.settle() for plan in plans[first : first + FINALIZE_CHUNK]])
        self._tell_of_events(plans)

    def _tell_of_events(self, plans: list[FinalizationPlan]) -> None:
        if any(plan.returned or plan.moved for plan in plans):
            self._news.woken()
        if any(plan.moved for plan in plans):  # perhaps behind another event of its topic
            self._news.unfinished()

    async def _end_children(self, record: RunRecord, now: float) -> None:
        """Terminate the attached children; each then owes the same to its own."""
        name = f"orphan/{record.id}/{record.generation}"
        after: str | None = None
        while children := await self._link.store.open_children(record.id, CHILDREN_PAGE, after):
            after = children[-1]
            writes: list[Write] = [
                build_end_run(child, name, now, self._link.config, only_if_not_started=False) for child in children
            ]
            answers = await self._link.committer.write_all(writes)
            for child, answer in zip(children, answers, strict=True):
                if isinstance(answer, StoreError):
                    raise answer
                if isinstance(answer, Committed):
                    self._news.ended(child)
                    self._link.hub.changed((child,))


class FinalizationPlan:
    """What is to be done for one run, and what of it has been done. Pure."""

    def __init__(self, pending: UnfinalizedRun, now: float, config: EngineConfig) -> None:
        self.record = pending.record
        self.told: list[Observer] = []
        self.returned: list[int] = []
        self.moved: list[RedirectedEvent] = []
        self._now = now
        self._orphans = pending.orphans
        self._observers = pending.observers
        self._consumed: list[int] = []
        self._letters: list[DeadLetter] = []
        self.writes: list[Write] = [self._ending_for(observer) for observer in pending.observers]
        for message in pending.messages:
            self._sort(message, config)

    def take(self, answers: list[WriteResult | StoreError]) -> None:
        """What became of the writes: what the store could not take now stays owed."""
        for observer, answer in zip(self._observers, answers, strict=True):
            if isinstance(answer, StoreError):
                LOGGER.warning("run %s has ended, and this could not be settled: %s", self.record.id, answer)
            else:
                self.told.append(observer)  # or there is no such run any more, or it has ended: nobody waits

    def settle(self) -> FinalizeRun:
        return FinalizeRun(
            run_id=self.record.id,
            now=self._now,
            notified=tuple(self.told),
            consumed=tuple(self._consumed),
            returned=tuple(self.returned),
            moved=tuple(self.moved),
            dead_letters=tuple(self._letters),
            orphans=self._orphans,
        )

    def _ending_for(self, observer: Observer) -> DeliverMessage:
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

    def _sort(self, message: Message, config: EngineConfig) -> None:
        expired = message.expires_at is not None and message.expires_at <= self._now
        if message.kind == "assignment":
            self.returned.append(message.number)
        elif message.kind != "event" or expired or message.policy == "discard":
            self._consumed.append(message.number)
        elif message.policy == "broadcast":
            full = self._letter(message, f"{UNREAD}, and its topic {message.name!r} is full")
            self.moved.append(
                RedirectedEvent(message.number, build_publish(self._moved(message), config, self._now), full)
            )
        else:
            self._consumed.append(message.number)
            self._letters.append(self._letter(message, UNREAD))

    def _moved(self, message: Message) -> TopicEvent:
        return TopicEvent(
            topic=message.name,
            id=self._name_of(message),
            event_id=message.event_id,
            body=message.body,
            sent_at=self._now,
            expires_at=message.expires_at,
            sender=message.sender,
        )

    def _letter(self, message: Message, reason: str) -> DeadLetter:
        record = self.record
        return DeadLetter(
            id=self._name_of(message),
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

    def _name_of(self, message: Message) -> str:
        return f"undelivered/{self.record.id}/{message_key(message)}"
