"""Writing: what the bodies of steps write to the streams of their runs, in order and in batches, through the committer.

Items belong to one execution of a step (`writer`). An execution that takes the place of another marks what that one had
written. A body that is no longer wanted writes nothing more. Called from the event loop and from the threads of bodies.
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
    """What one execution has written: how much of it was submitted, and what gathers while that is being stored."""

    __slots__ = ("appending", "items", "submitted", "writer")

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self.items: list[StreamItem] = []
        self.submitted = 0
        self.appending = False


class Writer(Protocol):
    """One execution of a step, as the executor keeps it."""

    run_id: str
    location: str
    attempt: int
    ended: bool
    page: StreamBuffer | None


class StreamWriter:
    """See the module's docstring. `worker` gives the owner on whose behalf is written."""

    def __init__(self, link: StoreSession, worker: Callable[[], str]) -> None:
        self._link = link
        self._worker = worker
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.written: dict[str, set[str]] = {}  # the locations at which bodies have written something, by run

    def write(self, writer: Writer, stream: str, value: Any) -> None:
        """Append a value to a stream; refused at once if it cannot be encoded, and quietly if it comes too late."""
        item = StreamItem(
            stream=check_name("a stream's name", stream),
            value=self._link.codec.encode(value, what=f"item of stream {stream!r}"),
            location=writer.location,
            at=self._link.clock.now(),
            attempt=writer.attempt,
        )
        if threading.get_ident() == self._thread:
            self._add(writer, item)
            return
        try:
            self._loop.call_soon_threadsafe(self._add, writer, item)
        except RuntimeError:
            LOGGER.debug("the loop ended before step %s did", writer.location)

    def on_attempt_started(self, writer: Writer, *, others: bool) -> None:
        """A body begins. If `others` may have executed the step before, or one here has written, that is marked."""
        if others or writer.location in self.written.get(writer.run_id, ()):
            write = SupersedeStream(run_id=writer.run_id, location=writer.location, writer=self._page(writer).writer)
            self._link.committer.submit(write, lambda answer: None)

    def flush(self, writer: Writer) -> None:
        """Submit what has gathered, without waiting for what was submitted before."""
        page = writer.page
        if page is None or not page.items:
            return
        items = tuple(replace(item, writer=page.writer) for item in page.items)
        write = AppendStream(run_id=writer.run_id, worker=self._worker(), items=items, first=page.submitted)
        page.submitted += len(items)
        page.items = []
        page.appending = True
        self._link.committer.submit(write, lambda answer: self._appended(writer, page, answer))

    def forget_all(self, run_id: str) -> None:
        self.written.pop(run_id, None)

    def _page(self, writer: Writer) -> StreamBuffer:
        if writer.page is None:
            writer.page = StreamBuffer(f"{self._worker()}/{next(self._numbers)}")
        return writer.page

    def _add(self, writer: Writer, item: StreamItem) -> None:
        if writer.ended:
            LOGGER.info("run %s: step %s is over, what it writes now is not kept", writer.run_id, writer.location)
            return
        page = self._page(writer)
        page.items.append(item)
        self.written.setdefault(writer.run_id, set()).add(writer.location)
        if not page.appending:
            page.appending = True
            self._loop.call_soon(self.flush, writer)  # soon, so that what is written in one go is stored in one go

    def _appended(self, writer: Writer, page: StreamBuffer, answer: WriteResult | StoreError) -> None:
        page.appending = False
        if isinstance(answer, Committed):
            self._link.hub.changed((writer.run_id,), ended=False)
        else:
            said = str(answer) if isinstance(answer, StoreError) else type(answer).__name__
            LOGGER.warning("run %s: what step %s wrote was not kept: %s", writer.run_id, writer.location, said)
        self.flush(writer)
