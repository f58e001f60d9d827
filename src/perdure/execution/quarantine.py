"""Seclusion: a run whose workers have died again and again executes alone, so that it takes no others down with it.

From its third recovery on a run is a suspect. A worker takes one suspect at a time: it takes no other work, lets the
runs that are executing come to a stop, and then begins. It is over when the suspect has stopped, or has lived for a
while: then it was not that. Nobody waits for ever: a neighbour with a long step keeps the suspect waiting for a bounded
time only.

Suspects beyond the first are given back at once. To keep them waiting here would be to blame them for the death that
the first one may cause.
"""

from __future__ import annotations

from collections.abc import Callable

from perdure.clock import Clock, Timer

QUARANTINE_AFTER_RECOVERIES = 3  # recoveries
DRAIN_TIMEOUT_SECONDS = 10.0  # seconds until the suspect begins in spite of them
PROBATION_SECONDS = 5.0  # seconds until others may come


class Quarantine:
    """Which suspect this worker has, if any. `begin` is called when it may execute, `over` when others may again."""

    def __init__(self, clock: Clock, begin: Callable[[str], None], over: Callable[[], None]) -> None:
        self._clock = clock
        self._begin = begin
        self._over = over
        self._begun = False
        self._timer: Timer | None = None
        self.suspect: str | None = None
        self.one_by_one = False  # there are more suspects about: take runs singly until one comes that is none

    @property
    def room(self) -> int | None:
        """How many runs may be taken because of this; None: as many as there is room for."""
        if self.suspect is not None:
            return 0
        return 1 if self.one_by_one else None

    def take(self, run_id: str) -> bool:
        """A suspect has come; False if it cannot be kept, because there is one already."""
        if self.suspect is not None:
            self.one_by_one = True
            return False
        self.suspect, self._begun = run_id, False
        self._set_timer(DRAIN_TIMEOUT_SECONDS, self._start)
        return True

    def has_begun(self, run_id: str) -> bool:
        return run_id == self.suspect and self._begun

    def on_no_other_runs(self) -> None:
        """No other run executes here."""
        if self.suspect is not None and not self._begun:
            self._start()

    def stopped(self) -> None:
        """The suspect executes no longer, or not here."""
        if self.suspect is not None:
            self._end()

    def on_healthy_run(self) -> None:
        """A run has come that is no suspect."""
        if self.one_by_one:
            self.one_by_one = False
            self._over()

    def forget(self) -> None:
        """Nothing in memory counts any longer."""
        self.suspect, self.one_by_one = None, False
        self._set_timer(None, self._end)

    def _start(self) -> None:
        assert self.suspect is not None
        self._begun = True
        self._set_timer(PROBATION_SECONDS, self._end)
        self._begin(self.suspect)

    def _end(self) -> None:
        self.suspect = None
        self._set_timer(None, self._end)
        self._over()

    def _set_timer(self, seconds: float | None, then: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._clock.call_at(self._clock.now() + seconds, then)
