"""Stores that record their batches. The SQLite store also counts its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import apsw

from perdure.model.records import WorkerRecord
from perdure.stores.results import Snapshot, UnreadableRun, WriteResult
from perdure.stores.sqlite.store import SqliteStore
from perdure.stores.writes import Write

T = TypeVar("T")


@dataclass
class Recording:
    """The committed batches of writes, and the worker that committed them."""

    worker: WorkerRecord | None = None
    batches: list[tuple[Write, ...]] = field(default_factory=list)


class RecordingMixin:
    """Mixin for a store: records its batches."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.recording = Recording()

    def clear(self) -> None:
        """Delete what was recorded during a warm-up."""
        self.recording.batches.clear()

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        self.recording.batches.append(tuple(batch))
        results: list[WriteResult] = await super().commit(batch)  # type: ignore[misc]  # the store's
        return results


class CountingSqliteStore(SqliteStore):
    """A SQLite store that counts calls and can record batches.

    The overhead is a few additions per call, so per batch and not per step: it does not distort a measurement.
    """

    def __init__(self, path: str, *, synchronous: str = "full", record: bool = False) -> None:
        super().__init__(path, synchronous=synchronous)
        self.recording = Recording() if record else None
        self.calls: Counter[str] = Counter()
        self.writes = 0

    def clear(self) -> None:
        """Delete what was recorded during a warm-up."""
        self.calls.clear()
        self.writes = 0
        if self.recording is not None:
            self.recording.batches.clear()

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        self.calls["commit"] += 1
        self.calls["all"] += 1
        self.writes += len(batch)
        if self.recording is not None:
            self.recording.batches.append(tuple(batch))
        return await super().commit(batch)

    async def load(self, ids: Sequence[str]) -> list[Snapshot | UnreadableRun | None]:
        self.calls["load"] += 1
        return await super().load(ids)

    async def join(self, worker: WorkerRecord) -> bool:
        if self.recording is not None:
            self.recording.worker = worker
        return await super().join(worker)

    # All other calls use one of these two methods.

    async def _write(self, work: Callable[[apsw.Connection], T]) -> T:
        self.calls["all"] += 1
        return await super()._write(work)

    async def _read(self, work: Callable[[apsw.Connection], T]) -> T:
        self.calls["all"] += 1
        return await super()._read(work)
