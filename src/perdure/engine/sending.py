"""Sending, for callers and workflows alike: an event into its topic, and what the store answers to the sender."""

from __future__ import annotations

from perdure.engine.link import Link
from perdure.errors import QueueFull, RunNotFound, RunTerminated
from perdure.events import bounded
from perdure.records import TopicEvent
from perdure.store.base import Answer, Delivered, Ended, FanOut, Full, Missing, Publish, Published, Write


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
    event = bounded(event, link.config.seconds("event_retention"))
    write: Write = Publish(event=event, now=link.clock.now(), limit=link.config.max_pending_events)
    woken, more = 0, True
    while more:
        answer = check_published(event.topic, await link.committer.ask(write, patient=patient))
        woken, more = woken + answer.woken, answer.more
        write = FanOut(topic=event.topic, place=answer.place, now=link.clock.now())
    return woken


def check_published(topic: str, answer: Answer) -> Published:
    if isinstance(answer, Full):
        raise QueueFull(f"topic {topic!r} holds {answer.pending} events that nobody has read, and takes no more")
    assert isinstance(answer, Published)
    return answer
