"""Quarantine: execute a suspected poison run alone, so that a crash takes no other run down.

A run that was recovered three times is a suspect: its code may be what kills its workers. A worker keeps one suspect at
a time, in three phases:

    drain       the worker claims no other run and waits until its active runs stop, at most `DRAIN_TIMEOUT_SECONDS`
    probation   the suspect executes alone, at most `PROBATION_SECONDS`
    over        the suspect stopped, or survived its probation: the worker claims other runs again

Both limits exist so that a healthy run with a long step does not block the suspect, and a healthy suspect with a long
step does not block the worker.

Only one suspect is kept per worker. Others are released at once; otherwise a crash of the first would count as a
recovery of theirs.
"""

from __future__ import annotations

from collections.abc import Callable

from perdure.clock import Clock, Timer

QUARANTINE_AFTER_RECOVERIES = 3
DRAIN_TIMEOUT_SECONDS = 10.0
PROBATION_SECONDS = 5.0


class Quarantine:
    """The suspect of this worker, if there is one.

    `on_start` is called when the suspect may execute, `on_over` when the worker may claim more runs.
    """

    def __init__(self, clock: Clock, on_start: Callable[[str], None], on_over: Callable[[], None]) -> None:
        self._clock = clock
        self._on_start = on_start
        self._on_over = on_over
        self._started = False  # in probation
        self._timer: Timer | None = None
        self.suspect: str | None = None
        # Set when a second suspect arrived: the worker claims runs singly until it gets one that is no suspect.
        # A larger page could contain several suspects, and a crash would count as a recovery of each.
        self._claim_singly = False

    @property
    def claim_limit(self) -> int | None:
        """The number of runs that the worker may claim under quarantine; None if quarantine sets no limit."""
        if self.suspect is not None:
            return 0
        return 1 if self._claim_singly else None

    def admit(self, run_id: str) -> bool:
        """Keep this run as the suspect; return False if there is one already and this run must be released."""
        if self.suspect is not None:
            self._claim_singly = True
            return False
        self.suspect, self._started = run_id, False
        self._set_timer(DRAIN_TIMEOUT_SECONDS, self._start)
        return True

    def has_started(self, run_id: str) -> bool:
        """Return whether this run is the suspect and may execute."""
        return run_id == self.suspect and self._started

    def on_no_other_runs(self) -> None:
        """Start the suspect, because no other run executes here."""
        if self.suspect is not None and not self._started:
            self._start()

    def on_suspect_stopped(self) -> None:
        """End the quarantine, because the suspect no longer executes here."""
        if self.suspect is not None:
            self._end()

    def on_healthy_run(self) -> None:
        """Stop claiming runs singly, because the worker got a run that is no suspect."""
        if self._claim_singly:
            self._claim_singly = False
            self._on_over()

    def clear(self) -> None:
        """Drop the suspect without a callback, because all runs in memory are discarded."""
        self.suspect, self._claim_singly = None, False
        self._set_timer(None, self._end)

    def _start(self) -> None:
        assert self.suspect is not None
        self._started = True
        self._set_timer(PROBATION_SECONDS, self._end)
        self._on_start(self.suspect)

    def _end(self) -> None:
        self.suspect = None
        self._set_timer(None, self._end)
        self._on_over()

    def _set_timer(self, seconds: float | None, callback: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._clock.call_at(self._clock.now() + seconds, callback)
