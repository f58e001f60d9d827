"""RunWaiters: futures of callers in this process that wait for the change or the end of a run.

A notification is best effort; the store has the truth, and a waiter reads it there. If the run ended in this process,
the notification carries its record, which saves the read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from perdure.model.records import RunRecord

ChangeFuture = asyncio.Future[RunRecord | None]


class RunWaiters:
    """Waiters by run id. A waiter for the end of a run is not woken by every step of the run."""

    def __init__(self) -> None:
        self.change_waiters: dict[str, set[ChangeFuture]] = {}  # waiters for any change, by run id
        self._end_waiters: dict[str, set[ChangeFuture]] = {}
        # Whether this process is committing a turn of the run; the worker sets it.
        self.is_committing: Callable[[str], bool] = lambda run_id: False

    def wait(self, run_id: str, *, end: bool) -> ChangeFuture:
        """Return a future that is set at the next change, or at the end, of the run.

        Create the future before reading the run: a change between the read and the wait would be missed otherwise.
        """
        waiters = self._end_waiters if end else self.change_waiters
        waiter: ChangeFuture = asyncio.get_running_loop().create_future()
        waiters.setdefault(run_id, set()).add(waiter)
        return waiter

    def remove(self, run_id: str, waiter: ChangeFuture, *, end: bool) -> None:
        """Remove a waiter. Every caller of `wait` does so, whether or not the future was set."""
        waiters = self._end_waiters if end else self.change_waiters
        of_run = waiters.get(run_id)
        if of_run is not None:
            of_run.discard(waiter)
            if not of_run:
                del waiters[run_id]

    def notify(self, run_ids: Iterable[str] | None, *, ended: bool = True) -> None:
        """Wake the waiters of runs that have changed; None means any run. `ended`: the runs may have ended."""
        if not ended and not self.change_waiters:
            return
        for waiters in (self.change_waiters, self._end_waiters) if ended else (self.change_waiters,):
            for run_id in list(waiters) if run_ids is None else run_ids:
                for waiter in list(waiters.get(run_id, ())):
                    if not waiter.done():
                        waiter.set_result(None)

    def notify_ended(self, record: RunRecord) -> None:
        """Give the record of a run that ended in this process to its waiters."""
        for waiter in list(self._end_waiters.get(record.id, ())):
            if not waiter.done():
                waiter.set_result(record)
        self.notify((record.id,), ended=False)

    def on_change_hint(self, run_ids: Iterable[str] | None) -> None:
        """Wake the waiters of runs that the store reports as changed.

        A hint about a run whose turn is being committed here is ignored: the commit result follows and says more, so
        that waiters for the end need not read the store.
        """
        unexpected = None if run_ids is None else [run_id for run_id in run_ids if not self.is_committing(run_id)]
        if unexpected != []:
            self.notify(unexpected)
