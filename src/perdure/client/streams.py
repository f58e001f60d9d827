"""Streams: reading what a run writes, from any place and as it is written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from perdure.client.dead_letters import DeadLetterClient
from perdure.client.views import stream_item_view
from perdure.model.validation import check_count, check_name

PAGE = 500


class StreamClient(DeadLetterClient):
    """The calls of those who follow a run."""

    async def read_stream(self, run_id: str, name: str, start: int = 0, *, details: bool = False) -> AsyncIterator[Any]:
        """The values of a stream from this offset on, and those to come; ends once the run has ended and all is read.

        With `details` each comes with its offset, when and where it was written, and whether the attempt that wrote it
        was superseded since. `RunNotFound` if there is no run.
        """
        check_name("a stream's name", name)
        offset = check_count("start", start, minimum=0)
        link = self._open
        since = link.clock.now()
        while True:
            news = link.hub.wait(run_id, end=False)
            try:
                record = await self._record(run_id, retry_forever=True)
                while page := await link.read(partial(link.store.stream, run_id, name, offset, PAGE), for_ever=True):
                    for item in page:
                        offset = item.offset + 1
                        view = stream_item_view(item, link.codec)
                        yield view if details else view.value
                        since = link.clock.now()
                if record.status.terminal:
                    return
                await self._wait_for_change_or_poll(run_id, news, since)
            finally:
                link.hub.remove(run_id, news, end=False)
