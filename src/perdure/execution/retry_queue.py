"""RetryQueue: writes that the store could not commit yet: it is unavailable, or one of the writes does not fit.

The two cases look alike, for example when a disk is nearly full. So a batch that fails is split into two, which are
tried one after the other. After a few attempts all writes that fit are committed, and only those that do not fit are
left. While the store is unavailable, the batches shrink to single writes, which are cheap probes; when it is available
again, they are merged.

Pure: this module knows no store and no clock. Writes with the same key, a run or a topic, stay in order: they are in
the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from perdure.errors import StoreError
from perdure.retry import Retry
from perdure.stores.results import WriteResult
from perdure.stores.writes import Write, subject_of

WriteCallback = Callable[[WriteResult | StoreError], None]  # called once with the result of a write
# A write, its callback, and how many more attempts its caller waits for; None for a write that waits for the store. A
# tuple, because there is one per turn.
QueuedWrite = tuple[Write, WriteCallback, int | None]

# After so many failures without a success between them, the store is unavailable, whatever the batches contain.
UNAVAILABLE_AFTER = 3


class RetryQueue:
    """The writes of one process that wait for another attempt, in batches of up to `max_batch` writes."""

    def __init__(self, retry: Retry, max_batch: int) -> None:
        self._retry = retry
        self._max_batch = max_batch
        self._batches: list[list[QueuedWrite]] = []
        self.attempts = 0  # failed attempts since the last success; 0 if no write waits

    def __len__(self) -> int:
        return sum(map(len, self._batches))

    def __iter__(self) -> Iterator[QueuedWrite]:
        return (queued for batch in self._batches for queued in batch)

    def hold_back(self, writes: Sequence[QueuedWrite]) -> list[QueuedWrite]:
        """Return the writes that need not wait. Add the others to the batch that has their run or topic."""
        batches = {subject_of(queued[0]): batch for batch in self._batches for queued in batch}
        free: list[QueuedWrite] = []
        for queued in writes:
            batch = batches.get(subject_of(queued[0]))
            (free if batch is None else batch).append(queued)
        return free

    def add(self, batch: Sequence[QueuedWrite]) -> list[QueuedWrite]:
        """Add a new batch, which has failed. Return the writes whose callers have no attempts left."""
        self.attempts = self.attempts or 1
        kept, given_up = _count_attempt(batch)
        self._put(_split(kept))
        return given_up

    def take(self) -> list[QueuedWrite]:
        """Remove and return the batch that waits for the longest time."""
        return self._batches.pop(0)

    def on_committed(self) -> None:
        """Note that the last batch was committed."""
        if self.attempts >= UNAVAILABLE_AFTER:
            self._merge()
        self.attempts = 0

    def on_failed(self, batch: Sequence[QueuedWrite]) -> list[QueuedWrite]:
        """Put the last batch back, split. Return the writes whose callers have no attempts left.

        If the store is unavailable, the attempt counts for all writes, because most of them are not part of it.
        """
        self.attempts += 1
        kept, given_up = _count_attempt(batch)
        if self.attempts >= UNAVAILABLE_AFTER:
            waiting, self._batches = self._batches, []
            for each in waiting:
                others, ended = _count_attempt(each)
                self._put([others])
                given_up += ended
        self._put(_split(kept))
        return given_up

    def delay(self, fraction: float) -> float:
        """Return the seconds until the next attempt: those of the caller with the fewest attempts, if there is one."""
        made = (self._retry.max_attempts - left for _, _, left in self if left is not None)
        return self._retry.delay_after(max(1, min(self.attempts, 32, *made)), fraction)

    def _put(self, batches: Iterable[list[QueuedWrite]]) -> None:
        self._batches += [batch for batch in batches if batch]
        if not self._batches:
            self.attempts = 0

    def _merge(self) -> None:
        merged: list[list[QueuedWrite]] = []
        for batch in self._batches:
            if merged and len(merged[-1]) + len(batch) <= self._max_batch:
                merged[-1] += batch
            else:
                merged.append(batch)
        self._batches = merged


def _count_attempt(batch: Sequence[QueuedWrite]) -> tuple[list[QueuedWrite], list[QueuedWrite]]:
    """Return the writes that get another attempt, and those whose callers have none left."""
    kept = [(write, on_result, left and left - 1) for write, on_result, left in batch if left != 1]
    return kept, [queued for queued in batch if queued[2] == 1]


def _split(batch: Sequence[QueuedWrite]) -> tuple[list[QueuedWrite], list[QueuedWrite]]:
    """Return two halves. All writes with the same key are in the same half."""
    keys = list(dict.fromkeys(subject_of(queued[0]) for queued in batch))
    first = set(keys[: (len(keys) + 1) // 2])
    return (
        [queued for queued in batch if subject_of(queued[0]) in first],
        [queued for queued in batch if subject_of(queued[0]) not in first],
    )
