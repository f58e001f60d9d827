"""Heartbeats: the progress that running steps report, recorded at a bounded rate, and attempts that report none.

A heartbeat is kept in memory. The first one of an attempt is written at once; of later ones the last is written, at
most one per second and attempt. A write is an input of the run: its turn commits by compare-and-set like every other,
so the heartbeat of a fenced worker changes nothing. The failure of an attempt carries its last heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from perdure.clock import Clock, Timer
from perdure.codec import Codec
from perdure.codec.attempt_notes import AttemptNotes, encode_notes
from perdure.model.turns import RecordProgress

LOGGER = logging.getLogger("perdure.execution")
WRITE_INTERVAL_SECONDS = 1.0

ProgressCallback = Callable[[str, RecordProgress], None]  # receives the run id and the progress to record


class HeartbeatState:
    """The heartbeats of one attempt: the last one, and the timers that write it and that wait for the next."""

    __slots__ = ("last_at", "last_write_at", "notes", "scheduled", "timeout_timer", "write_timer")

    def __init__(self, started_at: float) -> None:
        self.last_at = started_at
        self.notes: bytes | None = None
        self.scheduled = False  # a write is planned: it writes the heartbeat that is the last one by then
        self.last_write_at = float("-inf")
        self.write_timer: Timer | None = None
        self.timeout_timer: Timer | None = None


class BeatingAttempt(Protocol):
    """What this module needs of an attempt of a step."""

    run_id: str
    location: str
    attempt: int
    started_at: float
    since: float | None
    ended: bool
    beats: HeartbeatState | None


class Heartbeats:
    """The heartbeats of all attempts in this process. `on_progress` is called from the event loop, outside of tasks."""

    def __init__(self, clock: Clock, codec: Codec, on_progress: ProgressCallback) -> None:
        self._clock = clock
        self.codec = codec
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def record(self, attempt: BeatingAttempt, details: Any) -> None:
        """Note a heartbeat, from any thread. Raises `InvalidPayload` if the details cannot be encoded."""
        now = self._clock.now()
        notes = encode_notes(
            self.codec, AttemptNotes(details, now, attempt.since), f"heartbeat of step {attempt.location}"
        )
        beats = self._state_of(attempt)
        # The value first, then the flag; `_write` reads them in the other order. So no heartbeat is left unwritten.
        beats.notes, beats.last_at = notes, now
        if beats.scheduled:
            return
        beats.scheduled = True
        if threading.get_ident() == self._thread:
            self._loop.call_soon(self._schedule_write, attempt, beats)
            return
        try:
            self._loop.call_soon_threadsafe(self._schedule_write, attempt, beats)
        except RuntimeError:
            LOGGER.debug(
                "Event loop closed before step %s finished", attempt.location, extra={"run_id": attempt.run_id}
            )

    def watch(self, attempt: BeatingAttempt, timeout: float, on_timeout: Callable[[], None]) -> None:
        """Call `on_timeout` when the attempt has sent no heartbeat for `timeout` seconds, from its start on."""
        beats = self._state_of(attempt)

        def check() -> None:
            if attempt.ended:
                return
            due_at = beats.last_at + timeout
            if due_at <= self._clock.now():
                on_timeout()
            else:  # heartbeats do not move the timer, because a body may send thousands of them
                beats.timeout_timer = self._clock.call_at(due_at, check)

        beats.timeout_timer = self._clock.call_at(beats.last_at + timeout, check)

    def stop(self, beats: HeartbeatState) -> None:
        """Cancel the timers of an attempt that has ended."""
        for timer in (beats.write_timer, beats.timeout_timer):
            if timer is not None:
                timer.cancel()

    def _state_of(self, attempt: BeatingAttempt) -> HeartbeatState:
        if attempt.beats is None:
            attempt.beats = HeartbeatState(attempt.started_at)
        return attempt.beats

    def _schedule_write(self, attempt: BeatingAttempt, beats: HeartbeatState) -> None:
        due_at = beats.last_write_at + WRITE_INTERVAL_SECONDS
        if due_at <= self._clock.now():
            self._write(attempt, beats)
        elif not attempt.ended:
            beats.write_timer = self._clock.call_at(due_at, lambda: self._write(attempt, beats))

    def _write(self, attempt: BeatingAttempt, beats: HeartbeatState) -> None:
        if attempt.ended:
            return
        beats.scheduled = False
        beats.last_write_at = self._clock.now()
        assert beats.notes is not None
        self._on_progress(attempt.run_id, RecordProgress(attempt.location, attempt.attempt, beats.notes))
