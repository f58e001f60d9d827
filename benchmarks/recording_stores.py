"""Stores that remember what they were given; that in SQLite counts what is asked of it as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import apsw

from perdure.model.records import WorkerRecord
from perdure.stores.results import Snapshot, WriteResult
from perdure.stores.sqlite.store import SqliteStore
from perdure.stores.writes import Write

T = TypeVar("T")


@dataclass
class Recording:
    """Writes in the batches in which they were committed, by this worker."""

    worker: WorkerRecord | None = None
    batches: list[tuple[Write, ...]] = field(default_factory=list)


class Remembering:
    """Mixed into a store: its batches are remembered."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.recording = Recording()

    def forget(self) -> None:
        """Begin anew, after a warm-up."""
        self.recording.batches.clear()

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        self.recording.batches.append(tuple(batch))
        answers: list[WriteResult] = await super().commit(batch)  # type: ignore[misc]  # the store's
        return answers


class WatchedStore(SqliteStore):
    """Costs a few additions per call, which is per batch and not per step, so that it may be measured."""

    def __init__(self, path: str, *, synchronous: str = "full", remember: bool = False) -> None:
        super().__init__(path, synchronous=synchronous)
        self.recording = Recording() if remember else None
        self.calls: Counter[str] = Counter()
        self.writes = 0

    def forget(self) -> None:
        """Begin anew, after a warm-up."""
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

    async def load(self, ids: Sequence[str]) -> list[Snapshot | None]:
        self.calls["load"] += 1
        return await super().load(ids)

    async def join(self, worker: WorkerRecord) -> bool:
        if self.recording is not None:
            self.recording.worker = worker
        return await super().join(worker)

    # Every other call goes through one of these two.

    async def _write(self, work: Callable[[apsw.Connection], T]) -> T:
        self.calls["all"] += 1
        return await super()._write(work)

    async def _read(self, work: Callable[[apsw.Connection], T]) -> T:
        self.calls["all"] += 1
        return await super()._read(work)
