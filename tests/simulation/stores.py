"""The stores of the simulation: memory, and SQLite without threads, so that a seed determines the trace."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from perdure.clock import Clock
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.sqlite import store as store_module
from perdure.stores.sqlite.connection import ConnectionThread, _transact
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing.simulation.simulation import MakeStore


def memory(clock: Clock) -> Store:
    return MemoryStore(clock)


class InPlace(ConnectionThread):
    """A connection without a thread: the caller executes its jobs and commits its transactions."""

    def start(self) -> None:
        return

    async def call(self, job: Callable[[Any], Any]) -> Any:
        pending = _Pending(job)
        self._execute(pending)()  # type: ignore[arg-type]
        if pending.error is not None:
            raise pending.error
        return pending.result

    async def transact(self, job: Callable[[Any], Any], *, size: int) -> Any:
        return await self.call(partial(_transact, job))

    async def stop(self) -> None:
        if self._connection is not None:
            self._connection.close(force=True)
            self._connection = None


class _Pending:
    """A pending job that is its own future and event loop."""

    def __init__(self, job: Callable[[Any], Any]) -> None:
        self.job = job
        self.result: Any = None
        self.error: BaseException | None = None
        self.future = self
        self.loop = self

    def done(self) -> bool:
        return False

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        callback()

    def set_result(self, result: Any) -> None:
        self.result = result

    def set_exception(self, error: BaseException) -> None:
        self.error = error


@contextmanager
def sqlite() -> Iterator[MakeStore]:
    """A way to make a store in a new file; the files go at the end."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(store_module, "ConnectionThread", InPlace):
        names = iter(range(1_000_000))

        def make(clock: Clock) -> Store:
            return SqliteStore(str(Path(folder) / f"{next(names)}.db"), clock=clock, synchronous="off")

        yield make
