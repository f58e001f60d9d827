"""Limits of a run: its deadline, its longest suspension, and the delay before a step's next attempt."""

from __future__ import annotations

import contextlib
import zlib

from perdure.model.records import ErrorRecord
from perdure.retry import Retry
from perdure.runner.state import RunnerState


def next_limit(state: RunnerState) -> tuple[float, str] | None:
    """Return when the run reaches its next limit, and which one ("timeout" or "max_suspend").

    None if the function was cancelled or has ended: the cleanup that remains cannot be cancelled.
    """
    start = state.start
    deadline_at, max_suspend = start.deadline_at, start.definition.settings.max_suspend
    if deadline_at is None and max_suspend is None:
        return None
    if state.stop_reason is not None or state.function_outcome is not None:
        return None
    limits: list[tuple[float, str]] = []
    if deadline_at is not None:
        limits.append((deadline_at, "timeout"))
    if max_suspend is not None and not state.entries.attempts.is_busy:
        limits.append((_last_progress_at(state) + max_suspend, "max_suspend"))
    return min(limits, default=None)


def retry_delay(seed: int, retry: Retry, location: str, attempt: int, error: ErrorRecord | None) -> float:
    """Return the seconds to wait after an attempt. The jitter is the same for every replay of the run."""
    if error is not None and error.retry_after is not None:
        return error.retry_after
    jitter = zlib.crc32(f"{seed}/{location}/{attempt}".encode()) / 2**32
    return retry.delay_after(attempt, jitter)


def _last_progress_at(state: RunnerState) -> float:
    """Return the time of the last completion or failed attempt.

    The time of a failed attempt is not recorded. It follows from the due time of the next one, minus the delay.
    """
    times = [state.loop.now]
    for location, pending in state.entries.pending.items():
        retry = pending.call.step.settings.retry if pending.call is not None else None
        if retry is not None and pending.due_at is not None:
            with contextlib.suppress(Exception):  # the user's delay function may raise
                delay = retry_delay(state.start.seed, retry, location, pending.attempts, pending.error)
                times.append(pending.due_at - delay)
    return max(times)
