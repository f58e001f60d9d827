"""StreamWriter: stores what step bodies write to the streams of their runs, in order and in batches.

Items belong to one execution of a step (`writer`). An execution that replaces another marks the items of the earlier
one as superseded. Items of a cancelled body are discarded. Called from the event loop and from the threads of bodies.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from msgspec.structs import replace

from perdure.errors import StoreError
from perdure.execution.store_session import StoreSession
from perdure.model.records import StreamItem
from perdure.model.validation import check_name
from perdure.stores.results import Committed, WriteResult
from perdure.stores.writes import AppendStream, SupersedeStream

LOGGER = logging.getLogger("perdure.execution")


class StreamBuffer:
    """The items of one execution: the number submitted, and those that wait while a batch is being stored."""

    __slots__ = ("appending", "items", "submitted", "writer")

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self.items: list[StreamItem] = []
        self.submitted = 0
        self.appending = False


class StreamingAttempt(Protocol):
    """What this module needs of an attempt of a step."""

    run_id: str
    location: str
    attempt: int
    ended: bool
    page: StreamBuffer | None


class StreamWriter:
    """The streams of all runs in this process. `worker` returns the id of this worker, the owner of the runs."""

    def __init__(self, session: StoreSession, worker: Callable[[], str]) -> None:
        self._session = session
        self._worker = worker
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.written: dict[str, set[str]] = {}  # locations whose steps have written, by run

    def write(self, attempt: StreamingAttempt, stream: str, value: Any) -> None:
        """Append a value to a stream. Raises `InvalidPayload` if it cannot be encoded; a late item is discarded."""
        item = StreamItem(
            stream=check_name("a stream's name", stream),
            value=self._session.codec.encode(value, what=f"item of stream {stream!r}"),
            location=attempt.location,
            at=self._session.clock.now(),
            attempt=attempt.attempt,
        )
        if threading.get_ident() == self._thread:
            self._add(attempt, item)
            return
        try:
            self._loop.call_soon_threadsafe(self._add, attempt, item)
        except RuntimeError:
            LOGGER.debug(
                "Event loop closed before step %s finished", attempt.location, extra={"run_id": attempt.run_id}
            )

    def on_attempt_started(self, attempt: StreamingAttempt, *, may_have_run_elsewhere: bool) -> None:
        """Mark the items of earlier executions of this step as superseded, if there may be any."""
        if may_have_run_elsewhere or attempt.location in self.written.get(attempt.run_id, ()):
            write = SupersedeStream(run_id=attempt.run_id, location=attempt.location, writer=self._page(attempt).writer)
            self._session.committer.submit(write, lambda result: None)

    def flush(self, attempt: StreamingAttempt) -> None:
        """Submit the waiting items, without waiting for earlier batches."""
        page = attempt.page
        if page is None or not page.items:
            return
        items = tuple(replace(item, writer=page.writer) for item in page.items)
        write = AppendStream(run_id=attempt.run_id, worker=self._worker(), items=items, first=page.submitted)
        page.submitted += len(items)
        page.items = []
        page.appending = True
        self._session.committer.submit(write, lambda result: self._on_stored(attempt, page, result))

    def discard_run(self, run_id: str) -> None:
        """Drop the state of a run that no longer executes here."""
        self.written.pop(run_id, None)

    def _page(self, attempt: StreamingAttempt) -> StreamBuffer:
        if attempt.page is None:
            attempt.page = StreamBuffer(f"{self._worker()}/{next(self._numbers)}")
        return attempt.page

    def _add(self, attempt: StreamingAttempt, item: StreamItem) -> None:
        if attempt.ended:
            LOGGER.info(
                "Run %s: step %s has finished; later stream items are discarded",
                attempt.run_id,
                attempt.location,
                extra={"run_id": attempt.run_id, "worker": self._worker()},
            )
            return
        page = self._page(attempt)
        page.items.append(item)
        self.written.setdefault(attempt.run_id, set()).add(attempt.location)
        if not page.appending:
            page.appending = True
            self._loop.call_soon(self.flush, attempt)  # items written in one iteration form one batch

    def _on_stored(self, attempt: StreamingAttempt, page: StreamBuffer, result: WriteResult | StoreError) -> None:
        page.appending = False
        if isinstance(result, Committed):
            self._session.waiters.notify((attempt.run_id,), ended=False)
        else:
            cause = str(result) if isinstance(result, StoreError) else type(result).__name__
            LOGGER.warning(
                "Run %s: stream items of step %s were not stored: %s",
                attempt.run_id,
                attempt.location,
                cause,
                extra={"run_id": attempt.run_id, "worker": self._worker()},
            )
        self.flush(attempt)
