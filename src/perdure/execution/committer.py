"""Committer: many turns, one transaction.

One store call is in flight; the next batch is whatever has gathered meanwhile. No timers and no tuning: an idle engine
commits at once, a busy one in large batches. It knows neither runs nor what the writes mean.

Answers are handed back in handfuls, one per round of the event loop. Were all of a large batch handed back at once, all
of them would come back at once as the next one, and the engine and the store would wait for each other in turn. So one
part is committed while the other is worked on: a third more steps a second on PostgreSQL and Redis.

While the store is away (`retryable`) the batch waits and is tried again: a retry after a lost answer is recognised by
the store. On any other error the batch is bisected, so that only the write that the store cannot take gets the error.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial

from perdure.clock import Clock, sleep_on
from perdure.errors import StoreError
from perdure.retry import Retry
from perdure.stores.protocol import Store
from perdure.stores.results import WriteResult
from perdure.stores.writes import Write

LOGGER = logging.getLogger("perdure.execution")
MAX_BATCH = 2_000
RESULT_CHUNK = 64  # writes: fewer would make the store's fixed cost of a commit matter


Answered = Callable[[WriteResult | StoreError], None]
_Queued = tuple[Write, Answered, bool]  # a plain tuple: one is made per turn. The flag says whether it is patient
_Answered = tuple[_Queued, WriteResult | StoreError]


class Committer:
    """See the module's docstring. Answers are called from the event loop itself, never from inside a task."""

    def __init__(self, store: Store, clock: Clock, retry: Retry) -> None:
        self._store = store
        self._clock = clock
        self._retry = retry
        self._queue: list[_Queued] = []
        self._unanswered = 0
        self._wakeup: asyncio.Future[None] | None = None  # while there is nothing to do
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="perdure-committer")

    def submit(self, write: Write, answered: Answered, *, wait_for_store: bool = True) -> None:
        """Queue a write. A patient one waits for the store for ever, another gets the error after some attempts."""
        self._queue.append((write, answered, wait_for_store))
        self._unanswered += 1
        if len(self._queue) == 1:
            self._idle.clear()
            if self._wakeup is not None and not self._wakeup.done():
                self._wakeup.set_result(None)

    async def write(self, write: Write, then: Answered | None = None) -> WriteResult:
        """Submit a write on behalf of a caller, who gets an error if the store stays away, and wait for its answer."""
        return await self.submit_future(write, then, wait_for_store=False)

    def submit_future(
        self, write: Write, then: Answered | None = None, *, wait_for_store: bool
    ) -> asyncio.Future[WriteResult]:
        """Submit a write at once; its answer can be awaited.

        `then` is called with the answer in any case, also if nobody waits for it any more.
        """
        done: asyncio.Future[WriteResult] = asyncio.get_running_loop().create_future()

        def answered(answer: WriteResult | StoreError) -> None:
            if then is not None:
                then(answer)
            if done.done():
                return
            if isinstance(answer, StoreError):
                done.set_exception(answer)
            else:
                done.set_result(answer)

        self.submit(write, answered, wait_for_store=wait_for_store)
        return done

    async def write_all(self, writes: Sequence[Write]) -> list[WriteResult | StoreError]:
        """Submit writes on behalf of a caller and wait for all answers. One that fails keeps no other from its own."""
        answers: list[WriteResult | StoreError | None] = [None] * len(writes)
        done = asyncio.Event()
        left = len(writes)

        def answered(at: int, answer: WriteResult | StoreError) -> None:
            nonlocal left
            answers[at] = answer
            left -= 1
            if not left:
                done.set()

        for at, write in enumerate(writes):
            self.submit(write, partial(answered, at), wait_for_store=False)
        if left:
            await done.wait()
        return [answer for answer in answers if answer is not None]

    async def wait_idle(self, within: float) -> bool:
        """Wait until everything submitted so far has been answered; False if the store takes longer than that."""
        waiting = asyncio.ensure_future(self._idle.wait())
        timer = self._clock.call_at(self._clock.now() + within, waiting.cancel)
        await asyncio.wait((waiting,))
        timer.cancel()
        return not waiting.cancelled()

    async def stop(self) -> None:
        """Stop at once: what is queued stays uncommitted."""
        self._stopped = True  # a driver may lose a cancel that meets its answer
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopped:
            if not self._queue:
                self._wakeup = loop.create_future()  # an Event would take 3 us more of each write that is alone
                await self._wakeup
            batch, self._queue = self._queue[:MAX_BATCH], self._queue[MAX_BATCH:]
            answers = await self._commit(batch)
            loop.call_soon(self._deliver_results, loop, list(zip(batch, answers, strict=True)))
            await asyncio.sleep(0)  # so that what the answers lead to can join the next batch

    def _deliver_results(self, loop: asyncio.AbstractEventLoop, answered: Sequence[_Answered]) -> None:
        few = -(-len(answered) // -(-len(answered) // RESULT_CHUNK))  # as few parts as may be, of about the same size
        for (write, tell, _), answer in answered[:few]:
            try:
                tell(answer)
            except Exception:
                LOGGER.exception("handling the answer to %s failed", type(write).__name__)
        if len(answered) > few:
            loop.call_soon(self._deliver_results, loop, answered[few:])
        self._unanswered -= few
        if not self._unanswered:
            self._idle.set()

    async def _commit(self, batch: Sequence[_Queued]) -> list[WriteResult | StoreError]:
        tries = 0
        while True:
            try:
                return list(await self._store.commit([write for write, _, _ in batch]))
            except StoreError as error:
                refused = error
            except Exception as error:
                refused = StoreError(f"the store raised {type(error).__name__}: {error}")
            if not refused.retryable:
                return await self._bisect(batch, refused)
            tries += 1
            LOGGER.warning("the store is away, %d writes wait (try %d): %s", len(batch), tries, refused)
            if tries >= self._retry.max_attempts and not all(patient for _, _, patient in batch):
                return await self._fail_callers(batch, refused)
            await sleep_on(self._clock, self._retry.delay_after(min(tries, 32), random.random()))

    async def _bisect(self, batch: Sequence[_Queued], refused: StoreError) -> list[WriteResult | StoreError]:
        if len(batch) == 1:
            return [refused]
        middle = len(batch) // 2
        return await self._commit(batch[:middle]) + await self._commit(batch[middle:])

    async def _fail_callers(self, batch: Sequence[_Queued], refused: StoreError) -> list[WriteResult | StoreError]:
        """Callers get the error; turns of runs go on waiting."""
        turns = [queued for queued in batch if queued[2]]
        answers = iter(await self._commit(turns) if turns else ())
        return [next(answers) if patient else refused for _, _, patient in batch]
