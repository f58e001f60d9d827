"""All that a memory store keeps, in one place for those who change it."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.errors import StoreError
from perdure.model.records import DeadLetter, WorkerRecord
from perdure.stores.memory.runs import MemoryRuns
from perdure.stores.memory.topics import Topics
from perdure.stores.paging import check_limit


class MemoryState:
    """Runs, topics, workers and dead letters."""

    def __init__(self) -> None:
        self.runs = MemoryRuns()
        self.topics = Topics(self.runs)
        self.workers: dict[str, WorkerRecord] = {}
        self.letters: dict[str, DeadLetter] = {}

    def alive(self, worker_id: str | None) -> bool:
        worker = self.workers.get(worker_id) if worker_id is not None else None
        return worker is not None and not worker.fenced

    def keep_letters(self, letters: Iterable[DeadLetter]) -> None:
        for letter in letters:
            self.letters.setdefault(letter.id, letter)

    def letters_after(self, after: str | None, limit: int, kind: str | None, event: str | None) -> list[DeadLetter]:
        check_limit(limit)
        if after is not None and after not in self.letters:
            raise StoreError(f"dead letter {after!r}, where the page before ended, is gone; begin with the first page")
        ids = list(self.letters)
        rest = (self.letters[id] for id in ids[0 if after is None else ids.index(after) + 1 :])
        found = [each for each in rest if kind in (None, each.kind) and event in (None, each.event_name)]
        return found[:limit]
