"""Committer: commits the writes of many runs in one store transaction.

One store call is in flight; the next batch is what was submitted meanwhile. There are no timers and nothing to tune: an
idle engine commits at once, a busy one in large batches. The committer knows neither runs nor the meaning of writes.

Results are delivered in chunks, one chunk per iteration of the event loop. If all results of a large batch were
delivered at once, all next turns would be submitted at once, and engine and store would wait for each other in turn.
With chunks the store commits one part while the engine works on another: a third more steps per second on PostgreSQL
and Redis (ADR 5).

If the store is unavailable (`StoreError.retryable`), the writes are retried (`retry_queue`), and new writes are tried
meanwhile: a caller gets its error after its own attempts, whatever else waits. The store recognizes a write that it has
committed before. On any other error the batch is bisected, so that only the write that the store rejects gets it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from functools import partial

from perdure.clock import Clock, Timer
from perdure.errors import StoreError
from perdure.execution.periodic import is_cancelled_from_outside
from perdure.execution.retry_queue import QueuedWrite, RetryQueue, WriteCallback
from perdure.retry import Retry
from perdure.stores.protocol import Store
from perdure.stores.results import WriteResult
from perdure.stores.writes import Write

LOGGER = logging.getLogger("perdure.execution")
MAX_BATCH = 2_000
# Results per iteration of the event loop. Smaller chunks make the fixed cost of a commit dominate (ADR 5).
RESULT_CHUNK = 64

_Completed = tuple[QueuedWrite, WriteResult | StoreError]


class Committer:
    """The queue of writes of one process. Callbacks run in the event loop, never inside a task."""

    def __init__(self, store: Store, clock: Clock, retry: Retry) -> None:
        self._store = store
        self._clock = clock
        self._max_attempts = retry.max_attempts
        self._queue: list[QueuedWrite] = []
        self._retries = RetryQueue(retry, MAX_BATCH)
        self._retry_timer: Timer | None = None
        self._retry_at = 0.0
        self._retry_due = False
        self._in_flight: list[QueuedWrite] = []
        self._pending = 0
        self._wakeup: asyncio.Future[None] | None = None  # while the queue is empty
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="perdure-committer")

    def submit(
        self, write: Write, on_result: WriteCallback, *, wait_for_store: bool = True, once: bool = False
    ) -> None:
        """Queue a write; `on_result` is called with its result.

        With `wait_for_store` the write is retried until the store is available; otherwise it fails after the attempts
        of the retry policy, and with `once` after the first one: an admission must not be repeated.
        """
        attempts = 1 if once else None if wait_for_store else self._max_attempts
        self._queue.append((write, on_result, attempts))
        self._pending += 1
        if len(self._queue) == 1:
            self._idle.clear()
            if self._wakeup is not None and not self._wakeup.done():
                self._wakeup.set_result(None)

    @property
    def is_retrying(self) -> bool:
        """Whether the store has rejected writes that wait for another attempt."""
        return self._retries.attempts > 0

    async def write(self, write: Write, on_result: WriteCallback | None = None) -> WriteResult:
        """Submit a write for a caller and return its result; raise `StoreError` if the store stays unavailable."""
        return await self.submit_future(write, on_result, wait_for_store=False)

    def submit_future(
        self, write: Write, on_result: WriteCallback | None = None, *, wait_for_store: bool, once: bool = False
    ) -> asyncio.Future[WriteResult]:
        """Submit a write at once and return a future for its result.

        `on_result` is called with the result in any case, also if the future was cancelled.
        """
        done: asyncio.Future[WriteResult] = asyncio.get_running_loop().create_future()

        def complete(result: WriteResult | StoreError) -> None:
            try:
                if on_result is not None:
                    on_result(result)
            finally:  # a callback that raises must not leave the caller waiting
                if done.done():
                    pass
                elif isinstance(result, StoreError):
                    done.set_exception(result)
                else:
                    done.set_result(result)

        self.submit(write, complete, wait_for_store=wait_for_store, once=once)
        return done

    async def write_all(self, writes: Sequence[Write]) -> list[WriteResult | StoreError]:
        """Submit writes for a caller and return all results in order. A write that fails does not affect the others."""
        results: list[WriteResult | StoreError | None] = [None] * len(writes)
        done = asyncio.Event()
        left = len(writes)

        def store_result(index: int, result: WriteResult | StoreError) -> None:
            nonlocal left
            results[index] = result
            left -= 1
            if not left:
                done.set()

        for index, write in enumerate(writes):
            self.submit(write, partial(store_result, index), wait_for_store=False)
        if left:
            await done.wait()
        return [result for result in results if result is not None]

    async def wait_idle(self, within: float) -> bool:
        """Wait until no write is pending; return False if that takes longer than `within` seconds."""
        waiting = asyncio.ensure_future(self._idle.wait())
        timer = self._clock.call_at(self._clock.now() + within, waiting.cancel)
        await asyncio.wait((waiting,))
        timer.cancel()
        return not waiting.cancelled()

    def reject_callers(self, error: StoreError) -> None:
        """Give the error to all callers whose writes have no result. Writes of runs are not affected."""
        for _, on_result, attempts_left in (*self._in_flight, *self._queue, *self._retries):
            if attempts_left is not None:
                on_result(error)

    async def stop(self) -> None:
        """Stop at once: queued writes are not committed."""
        self._stopped = True  # a database driver may lose a cancellation that arrives together with a result
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopped:
            if not self._queue and not self._retry_due:
                self._wakeup = loop.create_future()  # an Event costs 3 us more per single write (ADR 5)
                await self._wakeup
            if self._retry_due:
                completed = await self._commit_retries()
            else:
                batch, self._queue = self._queue[:MAX_BATCH], self._queue[MAX_BATCH:]
                completed = await self._commit_new(batch)
            self._in_flight = []
            if completed:
                loop.call_soon(self._deliver_results, loop, completed)
                await asyncio.sleep(0)  # the first chunk runs now: the writes that it submits join the next batch

    def _deliver_results(self, loop: asyncio.AbstractEventLoop, completed: Sequence[_Completed]) -> None:
        chunk = -(-len(completed) // -(-len(completed) // RESULT_CHUNK))  # fewest chunks, all of about the same size
        for (write, on_result, _), result in completed[:chunk]:
            try:
                on_result(result)
            except Exception:
                extra = {"run_id": getattr(write, "run_id", None)}
                LOGGER.exception("Callback for %s result raised", type(write).__name__, extra=extra)
        if len(completed) > chunk:
            loop.call_soon(self._deliver_results, loop, completed[chunk:])
        self._pending -= chunk
        if not self._pending:
            self._idle.set()

    async def _commit_new(self, batch: list[QueuedWrite]) -> list[_Completed]:
        """Commit new writes. Return those that have a result; the others wait in the retry queue."""
        if self._retries:
            batch = self._retries.hold_back(batch)
        self._in_flight = batch
        try:
            return await self._commit(batch) if batch else []
        except StoreError as error:
            given_up = self._retries.add(batch)
            self._on_unavailable(error)
            return [(queued, error) for queued in given_up]

    async def _commit_retries(self) -> list[_Completed]:
        """Commit the next batch of the retry queue. Return the writes that have a result."""
        self._retry_due = False
        if not self._retries:
            return []  # their callers have given up
        batch = self._in_flight = self._retries.take()
        try:
            completed = await self._commit(batch)
        except StoreError as error:
            given_up = self._retries.on_failed(batch)
            self._on_unavailable(error)
            return [(queued, error) for queued in given_up]
        self._retries.on_committed()
        self._retry_due = len(self._retries) > 0
        return completed

    def _on_unavailable(self, error: StoreError) -> None:
        """Plan the next attempt of the writes that wait for one, unless an earlier one is planned."""
        waiting = len(self._retries)
        LOGGER.warning("Store unavailable, retrying %d writes (attempt %d): %s", waiting, self._retries.attempts, error)
        retry_at = self._clock.now() + self._retries.delay(random.random())
        if not waiting or self._retry_due or (self._retry_timer is not None and self._retry_at <= retry_at):
            return
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._retry_at = retry_at
        self._retry_timer = self._clock.call_at(retry_at, self._on_retry_due)

    def _on_retry_due(self) -> None:
        self._retry_timer = None
        self._retry_due = True
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    async def _commit(self, batch: list[QueuedWrite]) -> list[_Completed]:
        """Return all writes with their results. Raises a `StoreError` if the store may accept the batch later."""
        try:
            results = await self._store.commit([write for write, _, _ in batch])
            if len(results) != len(batch):  # the committer must not end with an error
                raise StoreError(f"the store returned {len(results)} results for {len(batch)} writes", retryable=True)
            return list(zip(batch, results, strict=True))
        except StoreError as error:
            refused = error
        except Exception as error:
            refused = StoreError(f"the store raised {type(error).__name__}: {error}")
        except asyncio.CancelledError as error:
            if is_cancelled_from_outside(error):
                raise
            refused = StoreError("the store cancelled the call; it may have been executed", retryable=True)
        if refused.retryable:
            raise refused
        if len(batch) == 1:
            return [(batch[0], refused)]
        middle = len(batch) // 2
        return [*await self._commit(batch[:middle]), *await self._commit(batch[middle:])]
