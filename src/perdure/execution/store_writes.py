"""Sending, for callers and workflows alike: an event into its topic, and what the store answers to the sender."""

from __future__ import annotations

from perdure.config import EngineConfig
from perdure.errors import QueueFull, RunNotFound, RunTerminated
from perdure.execution.store_session import Link
from perdure.model.records import Message, TopicEvent
from perdure.stores.results import Answer, Delivered, Ended, Full, Missing, Published
from perdure.stores.writes import EndRun, FanOut, Publish
from perdure.workflows.events import bounded


def check_delivered(run_id: str, answer: Answer) -> Delivered:
    """The errors of `send`: no such run, a run that has ended, a mailbox that is full."""
    if isinstance(answer, Missing):
        raise RunNotFound(run_id)
    if isinstance(answer, Ended):
        raise RunTerminated(run_id, answer.status)
    if isinstance(answer, Full):
        raise QueueFull(f"the mailbox of run {run_id!r} holds {answer.pending} unread events and takes no more")
    assert isinstance(answer, Delivered)
    return answer


async def publish(event: TopicEvent, link: Link, *, patient: bool) -> int:
    """Put an event into its topic and assign it to all who wait; how many they are. `QueueFull` if there is no room."""
    link.fanning.add((event.topic, event.id))
    try:
        answer = await link.committer.ask(publishing(event, link.config, link.clock.now()), patient=patient)
        return await assign_all(event.topic, answer, link, patient=patient)
    finally:
        link.fanning.discard((event.topic, event.id))


def publishing(event: TopicEvent, config: EngineConfig, now: float) -> Publish:
    """The write that puts an event into its topic, which keeps it for so long and holds so many."""
    return Publish(event=bounded(event, config.seconds("event_retention")), now=now, limit=config.max_pending_events)


async def assign_all(topic: str, answer: Answer, link: Link, *, patient: bool) -> int:
    """Go on until an event that was put into its topic is assigned to all who wait; how many they are."""
    published = check_published(topic, answer)
    woken = published.woken
    while published.more:
        write = FanOut(topic=topic, place=published.place, now=link.clock.now())
        published = check_published(topic, await link.committer.ask(write, patient=patient))
        woken += published.woken
    return woken


def check_published(topic: str, answer: Answer) -> Published:
    if isinstance(answer, Full):
        raise QueueFull(f"topic {topic!r} holds {answer.pending} events that nobody has read, and takes no more")
    assert isinstance(answer, Published)
    return answer


def end_of(run_id: str, turn_id: str, now: float, config: EngineConfig, *, unless_begun: bool) -> EndRun:
    """End a run; with `unless_begun` only one that never executed, which need not be asked."""
    return EndRun(
        run_id=run_id,
        turn_id=turn_id,
        now=now,
        unless_begun=unless_begun,
        prune_after=config.seconds("run_retention"),
    )


def cancel_message(message_id: str, now: float) -> Message:
    """Raises cancellation in the workflow, once per generation: a second message finds it raised."""
    return Message(id=message_id, kind="cancel", sent_at=now)
