"""Topics: events whose publisher went away before every run that waited for them had been given one."""

from __future__ import annotations

from collections.abc import Callable

from perdure.execution.store_session import Link
from perdure.execution.store_writes import check_published
from perdure.stores.protocol import FanOut


class FanOuts:
    """The duty that finishes them, a page of subscriptions at a time. `woken` is told that runs have mail."""

    def __init__(self, link: Link, woken: Callable[[], None]) -> None:
        self._link = link
        self._woken = woken

    async def tick(self, now: float) -> float | None:
        link = self._link
        for event in await link.store.unfinished():
            more = (event.topic, event.id) not in link.fanning  # else whoever publishes it counts who was woken
            while more:
                write = FanOut(topic=event.topic, place=event.place, now=link.clock.now())
                answer = check_published(event.topic, await link.committer.put(write))
                more = answer.more
                if answer.woken:
                    self._woken()
        return now + link.config.seconds("sweep_interval")
