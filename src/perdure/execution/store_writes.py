"""Sending, for callers and workflows alike: an event into its topic, and what the store answers to the sender."""

from __future__ import annotations

from perdure.config import EngineConfig
from perdure.errors import QueueFull, RunNotFound, RunTerminated
from perdure.execution.store_session import StoreSession
from perdure.model.records import Message, TopicEvent
from perdure.stores.results import AlreadyEnded, EventPublished, LimitReached, MessageDelivered, RunMissing, WriteResult
from perdure.stores.writes import EndRun, FanOut, PublishEvent
from perdure.workflows.events import with_retention_limit


def raise_for_delivery(run_id: str, answer: WriteResult) -> MessageDelivered:
    """The errors of `send`: no such run, a run that has ended, a mailbox that is full."""
    if isinstance(answer, RunMissing):
        raise RunNotFound(run_id)
    if isinstance(answer, AlreadyEnded):
        raise RunTerminated(run_id, answer.status)
    if isinstance(answer, LimitReached):
        raise QueueFull(f"the mailbox of run {run_id!r} holds {answer.pending} unread events and takes no more")
    assert isinstance(answer, MessageDelivered)
    return answer


async def publish_event(event: TopicEvent, link: StoreSession, *, patient: bool) -> int:
    """Put an event into its topic and assign it to all who wait; how many they are. `QueueFull` if there is no room."""
    link.active_broadcasts.add((event.topic, event.id))
    try:
        answer = await link.committer.submit_future(
            build_publish(event, link.config, link.clock.now()), wait_for_store=patient
        )
        return await fan_out_all(event.topic, answer, link, patient=patient)
    finally:
        link.active_broadcasts.discard((event.topic, event.id))


def build_publish(event: TopicEvent, config: EngineConfig, now: float) -> PublishEvent:
    """The write that puts an event into its topic, which keeps it for so long and holds so many."""
    return PublishEvent(
        event=with_retention_limit(event, config.seconds("event_retention")), now=now, limit=config.max_pending_events
    )


async def fan_out_all(topic: str, answer: WriteResult, link: StoreSession, *, patient: bool) -> int:
    """Go on until an event that was put into its topic is assigned to all who wait; how many they are."""
    published = raise_for_publish(topic, answer)
    woken = published.woken
    while published.more:
        write = FanOut(topic=topic, offset=published.offset, now=link.clock.now())
        published = raise_for_publish(topic, await link.committer.submit_future(write, wait_for_store=patient))
        woken += published.woken
    return woken


def raise_for_publish(topic: str, answer: WriteResult) -> EventPublished:
    if isinstance(answer, LimitReached):
        raise QueueFull(f"topic {topic!r} holds {answer.pending} events that nobody has read, and takes no more")
    assert isinstance(answer, EventPublished)
    return answer


def build_end_run(run_id: str, turn_id: str, now: float, config: EngineConfig, *, only_if_not_started: bool) -> EndRun:
    """End a run; with `only_if_not_started` only one that never executed, which need not be asked."""
    return EndRun(
        run_id=run_id,
        turn_id=turn_id,
        now=now,
        only_if_not_started=only_if_not_started,
        prune_after=config.seconds("run_retention"),
    )


def cancel_message(message_id: str, now: float) -> Message:
    """Raises cancellation in the workflow, once per generation: a second message finds it raised."""
    return Message(id=message_id, kind="cancel", sent_at=now)
