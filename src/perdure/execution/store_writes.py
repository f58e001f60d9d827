"""Writes that clients and workflows share: sends, publishes, terminations, and the errors of their results."""

from __future__ import annotations

from perdure.config import EngineConfig
from perdure.errors import QueueFull, RunNotFound, RunTerminated
from perdure.execution.store_session import StoreSession
from perdure.model.ids import new_token
from perdure.model.records import Message, TopicEvent
from perdure.model.tags import TagChanges, encode_tag_changes
from perdure.stores.results import AlreadyEnded, EventPublished, LimitReached, MessageDelivered, RunMissing, WriteResult
from perdure.stores.writes import EndRun, FanOut, PublishEvent
from perdure.workflows.events import with_retention_limit


def raise_for_delivery(run_id: str, result: WriteResult, event: str = "") -> MessageDelivered:
    """Return the result of a delivery; `event` is the name of a delivered event.

    Raises `RunNotFound`, `RunTerminated` if the run has ended, or `QueueFull` if its mailbox is full of such events.
    """
    if isinstance(result, RunMissing):
        raise RunNotFound(run_id)
    if isinstance(result, AlreadyEnded):
        raise RunTerminated(run_id, result.status)
    if isinstance(result, LimitReached):
        held = f"{result.pending} unread events of the name {event!r}"
        raise QueueFull(f"the mailbox of run {run_id!r} holds {held} and takes no more of them")
    assert isinstance(result, MessageDelivered)
    return result


async def publish_event(event: TopicEvent, session: StoreSession, *, wait_for_store: bool) -> int:
    """Publish an event to its topic, assign it to all waiting runs, and return their number.

    Raises `QueueFull` if the topic is full.
    """
    session.active_broadcasts.add((event.topic, event.id))
    try:
        result = await session.committer.submit_future(
            build_publish(event, session.config, session.clock.now()), wait_for_store=wait_for_store
        )
        return await fan_out_all(event.topic, result, session, wait_for_store=wait_for_store)
    finally:
        session.active_broadcasts.discard((event.topic, event.id))


def build_publish(event: TopicEvent, config: EngineConfig, now: float) -> PublishEvent:
    """Return the write that publishes an event, with the retention and the size limit of its topic."""
    return PublishEvent(
        event=with_retention_limit(event, config.seconds("event_retention")), now=now, limit=config.max_pending_events
    )


async def fan_out_all(topic: str, result: WriteResult, session: StoreSession, *, wait_for_store: bool) -> int:
    """Assign a published event to all waiting runs, one page per write, and return their number."""
    published = raise_for_publish(topic, result)
    woken = published.woken
    while published.more:
        write = FanOut(topic=topic, offset=published.offset, now=session.clock.now())
        result = await session.committer.submit_future(write, wait_for_store=wait_for_store)
        published = raise_for_publish(topic, result)
        woken += published.woken
    return woken


def raise_for_publish(topic: str, result: WriteResult) -> EventPublished:
    """Return the result of a publish or a fan-out; raise `QueueFull` if the topic is full."""
    if isinstance(result, LimitReached):
        raise QueueFull(f"topic {topic!r} holds {result.pending} unread events and takes no more")
    assert isinstance(result, EventPublished)
    return result


def build_end_run(
    run_id: str,
    turn_id: str,
    now: float,
    config: EngineConfig,
    *,
    retention: float | None,
    only_if_not_started: bool,
) -> EndRun:
    """Return the write that terminates a run; with `only_if_not_started` only a run that has never executed.

    `retention` is that of the run; None is the default of the store's processes.
    """
    return EndRun(
        run_id=run_id,
        turn_id=turn_id,
        now=now,
        only_if_not_started=only_if_not_started,
        prune_after=config.seconds("run_retention") if retention is None else retention,
    )


def tag_message(changes: TagChanges, now: float) -> Message:
    """Return the message by which the next turn of a run changes its tags."""
    return Message(id=f"tag/{new_token()}", kind="tag", body=encode_tag_changes(changes), sent_at=now)


def cancel_message(message_id: str, now: float, reason: bytes | None = None) -> Message:
    """Return the message that raises cancellation in a workflow. A second one in the same generation has no effect."""
    return Message(id=message_id, kind="cancel", body=reason, sent_at=now)
