"""The stores that are simulated: in memory, and SQLite without its threads, so that one seed is one course."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from perdure.clock import Clock
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.sqlite import store as sqlite_room
from perdure.stores.sqlite.connection import ConnectionThread
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing.simulation.simulation import MakeStore


def memory(clock: Clock) -> Store:
    return MemoryStore(clock)


class InPlace(ConnectionThread):
    """A connection whose work is done where it is asked for."""

    def start(self) -> None:
        return

    async def call(self, work: Callable[[Any], Any]) -> Any:
        job = _Job(work)
        self._carry_out(job)()  # type: ignore[arg-type]
        if job.error is not None:
            raise job.error
        return job.answer

    async def stop(self) -> None:
        if self._connection is not None:
            self._connection.close(force=True)
            self._connection = None


class _Job:
    """Looks like a job of the thread to those who settle it."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work
        self.answer: Any = None
        self.error: BaseException | None = None
        self.future = self
        self.loop = self

    def done(self) -> bool:
        return False

    def call_soon_threadsafe(self, settle: Callable[[], None]) -> None:
        settle()

    def set_result(self, answer: Any) -> None:
        self.answer = answer

    def set_exception(self, error: BaseException) -> None:
        self.error = error


@contextmanager
def sqlite() -> Iterator[MakeStore]:
    """A way to make a store in a new file; the files go at the end."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sqlite_room, "ConnectionThread", InPlace):
        names = iter(range(1_000_000))

        def make(clock: Clock) -> Store:
            return SqliteStore(str(Path(folder) / f"{next(names)}.db"), clock=clock, synchronous="off")

        yield make
