"""The data of a memory store, shared by the modules that apply writes."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.clock import Clock
from perdure.errors import StoreError
from perdure.model.records import DeadLetter, WorkerRecord
from perdure.stores.memory.documents import MemoryDocuments
from perdure.stores.memory.queues import MemoryQueues
from perdure.stores.memory.runs import MemoryRuns
from perdure.stores.memory.topics import MemoryTopics
from perdure.stores.paging import check_limit


class MemoryState:
    """Runs, topics, queues, documents, workers and dead letters."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.runs = MemoryRuns()
        self.topics = MemoryTopics(self.runs)
        self.queues = MemoryQueues(self.runs)
        self.documents = MemoryDocuments()
        self.workers: dict[str, WorkerRecord] = {}
        self.dead_letters: dict[str, DeadLetter] = {}

    def alive(self, worker_id: str | None) -> bool:
        """Return whether the worker is known and not fenced."""
        worker = self.workers.get(worker_id) if worker_id is not None else None
        return worker is not None and not worker.fenced

    def add_dead_letters(self, dead_letters: Iterable[DeadLetter]) -> None:
        """Store dead letters, once per id."""
        for dead_letter in dead_letters:
            self.dead_letters.setdefault(dead_letter.id, dead_letter)

    def dead_letters_after(
        self, after: str | None, limit: int, kind: str | None, event: str | None
    ) -> list[DeadLetter]:
        """Return a page of dead letters, in the order of their arrival."""
        check_limit(limit)
        if after is not None and after not in self.dead_letters:
            raise StoreError(
                f"dead letter {after!r}, the end of the previous page, is missing; start again with the first page"
            )
        ids = list(self.dead_letters)
        following = (self.dead_letters[id] for id in ids[0 if after is None else ids.index(after) + 1 :])
        found = [each for each in following if kind in (None, each.kind) and event in (None, each.event_name)]
        return found[:limit]
