"""Hub: tells those who wait in this process that a run has changed or ended.

A hint only: the store has the truth. Where the run ended in this very process, the hint is its record, which saves a
question to the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from perdure.model.records import RunRecord

ChangeFuture = asyncio.Future[RunRecord | None]


class RunWaiters:
    """Waiters by run id. Those who wait for the end are not woken by every step."""

    def __init__(self) -> None:
        self.change_waiters: dict[str, set[ChangeFuture]] = {}  # who waits for more than the end of a run, by its id
        self._end_waiters: dict[str, set[ChangeFuture]] = {}
        self.expects: Callable[[str], bool] = lambda run_id: False  # whether more will be known of a run in a moment

    def wait(self, run_id: str, *, end: bool) -> ChangeFuture:
        """A future that is set at the run's next change, or end. Make it before reading, so that none is missed."""
        waiting = self._end_waiters if end else self.change_waiters
        waiter: ChangeFuture = asyncio.get_running_loop().create_future()
        waiting.setdefault(run_id, set()).add(waiter)
        return waiter

    def remove(self, run_id: str, waiter: ChangeFuture, *, end: bool) -> None:
        """Stop waiting; whoever waits does so in the end, news or no news."""
        waiting = self._end_waiters if end else self.change_waiters
        waiters = waiting.get(run_id)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del waiting[run_id]

    def changed(self, run_ids: Iterable[str] | None, *, ended: bool = True) -> None:
        """These runs have changed, and may have ended; None: any of them."""
        if not ended and not self.change_waiters:
            return
        for waiting in (self.change_waiters, self._end_waiters) if ended else (self.change_waiters,):
            for run_id in list(waiting) if run_ids is None else run_ids:
                for waiter in list(waiting.get(run_id, ())):
                    if not waiter.done():
                        waiter.set_result(None)

    def on_store_hint(self, run_ids: Iterable[str] | None) -> None:
        """The store says that these runs have changed. A turn that is being committed here most often is the reason:
        the answer to it tells more, so that those who wait for the end need not ask the store."""
        unexpected = None if run_ids is None else [run_id for run_id in run_ids if not self.expects(run_id)]
        if unexpected != []:
            self.changed(unexpected)

    def finished(self, record: RunRecord) -> None:
        """This run has ended, here and like this."""
        for waiter in list(self._end_waiters.get(record.id, ())):
            if not waiter.done():
                waiter.set_result(record)
        self.changed((record.id,), ended=False)
