"""The stores of the simulation: memory, and SQLite without threads, so that a seed determines the trace."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from perdure.clock import Clock
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.sqlite import store as sqlite_store
from perdure.stores.sqlite.connection import ConnectionThread
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing.simulation.simulation import MakeStore


def memory(clock: Clock) -> Store:
    return MemoryStore(clock)


class InlineConnection(ConnectionThread):
    """A connection that executes its calls in the calling thread."""

    def start(self) -> None:
        return

    async def call(self, work: Callable[[Any], Any]) -> Any:
        job = _Job(work)
        self._carry_out(job)()  # type: ignore[arg-type]
        if job.error is not None:
            raise job.error
        return job.result

    async def stop(self) -> None:
        if self._connection is not None:
            self._connection.close(force=True)
            self._connection = None


class _Job:
    """Implements the interface of a job of the thread, its future and its loop."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.future = self
        self.loop = self

    def done(self) -> bool:
        return False

    def call_soon_threadsafe(self, complete: Callable[[], None]) -> None:
        complete()

    def set_result(self, result: Any) -> None:
        self.result = result

    def set_exception(self, error: BaseException) -> None:
        self.error = error


@contextmanager
def sqlite() -> Iterator[MakeStore]:
    """Yield a function that creates a store in a new file. The files are deleted at the end."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sqlite_store, "ConnectionThread", InlineConnection):
        names = iter(range(1_000_000))

        def make(clock: Clock) -> Store:
            return SqliteStore(str(Path(folder) / f"{next(names)}.db"), clock=clock, synchronous="off")

        yield make
