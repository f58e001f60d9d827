"""RunCache: the runs in the memory of this process, active ones and a bounded number of suspended ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from perdure.clock import Clock, Timer
from perdure.model.records import RunRecord
from perdure.model.turns import Input
from perdure.runner.runner import Runner
from perdure.workflows.definition import Workflow


class CachedRun:
    """One run in memory. An active run is owned by this worker; a suspended one is a copy, kept to save a replay.

    A copy may be out of date, because another worker may have executed the run meanwhile. The coordinator compares
    positions when it claims the run again, and the store rejects a turn from a wrong position.
    """

    __slots__ = (
        "active",
        "changed_while_committing",
        "committing",
        "deferred_inputs",
        "definition",
        "fetch_after_turn",
        "fetching",
        "id",
        "inputs",
        "more_messages",
        "never_executed_elsewhere",
        "position",
        "progress_rows",
        "record",
        "runner",
        "seen",
        "single_input_mode",
        "suspended_at",
        "turn_paused",
        "turn_queued",
        "turns",
        "wake_timer",
    )

    def __init__(self, record: RunRecord, definition: Workflow[Any, Any], runner: Runner, position: int) -> None:
        self.id = record.id
        self.record = record
        self.definition = definition
        self.runner = runner
        self.position = position  # of the last committed turn in the history
        # Positions of the rows of pending steps that have notes, by location; None if no step has made any.
        self.progress_rows: dict[str, int] | None = None
        self.seen = 0  # number of the last message that was read
        self.active = True
        self.committing = False  # a turn is submitted and its result has not arrived
        self.turn_queued = False  # its next turn starts in the next time slice
        self.turn_paused = False  # its turn is computed in part and continues in the next time slice
        self.fetch_after_turn = False  # messages arrived while the turn was paused
        # Set after a turn that the store cannot store: one input per turn finds the input that causes it.
        self.single_input_mode = False
        self.never_executed_elsewhere = False  # no other process has executed any part of the run
        self.fetching = False  # its messages are being read
        self.more_messages = False  # messages arrived after that read started
        self.deferred_inputs: list[Input] = []  # inputs that arrived after `more_messages` was set
        self.changed_while_committing = False  # a change hint arrived during the commit: the turn itself, or a message
        self.turns = 0  # turns since the run was loaded
        self.inputs: list[Input] = []  # for the next turn
        self.wake_timer: Timer | None = None  # of an active run; a suspended one has `wake_at` in the store
        self.suspended_at = 0.0

    def may_have_run(self, attempt: int) -> bool:
        """Return whether another process may have executed this attempt of a step before."""
        return not self.never_executed_elsewhere and (attempt > 1 or self.turns == 0)

    def is_current(self, position: int, now: float, default_retention: float) -> bool:
        """Return whether this suspended copy is the run that the store has at this position.

        The position is not enough after the retention time: the run may have been pruned and its id used again.
        """
        retention = default_retention if self.record.retention is None else self.record.retention
        return self.position == position and now - self.suspended_at < retention

    def set_timer(self, clock: Clock, at: float | None, callback: Callable[[CachedRun], None]) -> None:
        """Replace the timer of the run; None removes it."""
        if self.wake_timer is not None:
            self.wake_timer.cancel()
        self.wake_timer = None if at is None else clock.call_at(at, lambda: callback(self))


class RunCache:
    """Cached runs by id. When the limit is exceeded, the least recently used suspended runs are evicted."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._active: dict[str, CachedRun] = {}
        self._suspended: OrderedDict[str, CachedRun] = OrderedDict()

    def get(self, run_id: str) -> CachedRun | None:
        return self._active.get(run_id) or self._suspended.get(run_id)

    def active(self, run_id: str) -> CachedRun | None:
        return self._active.get(run_id)

    def add(self, cached: CachedRun) -> None:
        self._active[cached.id] = cached
        self._evict_excess()

    def suspend(self, cached: CachedRun) -> None:
        cached.active = False
        self._active.pop(cached.id, None)
        self._suspended[cached.id] = cached
        self._evict_excess()

    def activate(self, cached: CachedRun) -> None:
        cached.active = True
        self._suspended.pop(cached.id, None)
        self._active[cached.id] = cached

    def evict(self, cached: CachedRun) -> None:
        """Close the run and remove it from memory."""
        if self._active.get(cached.id) is cached:
            del self._active[cached.id]
        if self._suspended.get(cached.id) is cached:
            del self._suspended[cached.id]
        if cached.wake_timer is not None:
            cached.wake_timer.cancel()
        cached.runner.close()

    @property
    def free_slots(self) -> int:
        """The number of further active runs that fit."""
        return max(0, self._limit - len(self._active))

    def all_active(self) -> list[CachedRun]:
        return list(self._active.values())

    def __iter__(self) -> Iterator[CachedRun]:
        yield from list(self._active.values())
        yield from list(self._suspended.values())

    def __len__(self) -> int:
        return len(self._active) + len(self._suspended)

    def _evict_excess(self) -> None:
        while len(self) > self._limit and self._suspended:
            self.evict(next(iter(self._suspended.values())))
