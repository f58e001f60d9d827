"""StreamClient: read a run's streams and follow them while the run writes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from perdure.client.session import ClientSession
from perdure.client.views import stream_item_view
from perdure.model.validation import check_count, check_name

PAGE = 500


class StreamClient:
    """The call `read_stream` of a client; `Client` documents it."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def read_stream(self, run_id: str, name: str, start: int, type: Any, *, details: bool) -> AsyncIterator[Any]:
        run_id, name = check_name("a run's id", run_id), check_name("a stream's name", name)
        offset = check_count("start", start, minimum=0)
        session, kind = self._session, Any if type is None else type
        clock, waiters = session.clock, session.waiters
        since = clock.now()
        with session.follow(run_id) as follower:
            while True:
                change = waiters.wait(run_id, end=False)
                try:
                    follower.follow_if_remote()
                    record = await session.get_run(run_id)
                    while page := await session.read(partial(session.store.stream, run_id, name, offset, PAGE)):
                        for item in page:
                            offset = item.offset + 1
                            view = stream_item_view(item, session.codec, kind, f" of run {run_id!r}")
                            yield view if details else view.value
                            since = clock.now()
                    if record.status.terminal:
                        return
                    await session.wait_for_change(run_id, "change", change, since)
                finally:
                    waiters.remove(run_id, change, end=False)
