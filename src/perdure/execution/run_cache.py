"""The runs that are in this process's memory: active ones, and a bounded cache of suspended ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from perdure.model.records import RunRecord
from perdure.model.turns import Input
from perdure.runner.runner import Runner
from perdure.workflows.definition import Workflow


class CachedRun:
    """One run in memory. Active: this worker owns it. Otherwise it is a copy of a suspended run, kept to save a replay.

    A copy may be out of date; whoever has moved the run on meanwhile is noticed when its next turn commits.
    """

    __slots__ = (
        "active",
        "changed_while_committing",
        "committing",
        "deferred_inputs",
        "definition",
        "fetching",
        "id",
        "inputs",
        "never_executed_elsewhere",
        "position",
        "record",
        "runner",
        "seen",
        "single_input_mode",
        "slept_at",
        "turns",
        "unread",
        "wake_timer",
    )

    def __init__(self, record: RunRecord, definition: Workflow[Any, Any], runner: Runner, position: int) -> None:
        self.id = record.id
        self.record = record
        self.definition = definition
        self.runner = runner
        self.position = position
        self.seen = 0
        self.active = True
        self.committing = False
        self.single_input_mode = (
            False  # after a turn that the store could not take, to find the input that it came from
        )
        self.never_executed_elsewhere = False  # nobody else has executed any of it
        self.fetching = False  # its mail is being read
        self.unread = False  # mail came after reading began; what happened since waits in `later`
        self.deferred_inputs: list[Input] = []
        self.changed_while_committing = (
            False  # somebody changed the run while a turn of it was being committed: that turn, or mail
        )
        self.turns = 0
        self.inputs: list[Input] = []
        self.wake_timer: Any = None
        self.slept_at = 0.0  # when it was last suspended

    def may_have_run(self, attempt: int) -> bool:
        """Whether another process may have executed a step before that is to be executed now."""
        return not self.never_executed_elsewhere and (attempt > 1 or self.turns == 0)


class RunCache:
    """By id. When there are too many, the copies of suspended runs go first, the least recently used of them first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._active: dict[str, CachedRun] = {}
        self._asleep: OrderedDict[str, CachedRun] = OrderedDict()

    def get(self, run_id: str) -> CachedRun | None:
        return self._active.get(run_id) or self._asleep.get(run_id)

    def active(self, run_id: str) -> CachedRun | None:
        return self._active.get(run_id)

    def add(self, resident: CachedRun) -> None:
        self._active[resident.id] = resident
        self._make_room()

    def suspend(self, resident: CachedRun) -> None:
        resident.active = False
        self._active.pop(resident.id, None)
        self._asleep[resident.id] = resident
        self._make_room()

    def activate(self, resident: CachedRun) -> None:
        resident.active = True
        self._asleep.pop(resident.id, None)
        self._active[resident.id] = resident

    def evict(self, resident: CachedRun) -> None:
        """Close the run and forget it."""
        if self._active.get(resident.id) is resident:
            del self._active[resident.id]
        if self._asleep.get(resident.id) is resident:
            del self._asleep[resident.id]
        if resident.wake_timer is not None:
            resident.wake_timer.cancel()
        resident.runner.close()

    @property
    def room(self) -> int:
        """How many more active runs there may be."""
        return max(0, self._limit - len(self._active))

    def all_active(self) -> list[CachedRun]:
        return list(self._active.values())

    def __iter__(self) -> Iterator[CachedRun]:
        yield from list(self._active.values())
        yield from list(self._asleep.values())

    def __len__(self) -> int:
        return len(self._active) + len(self._asleep)

    def _make_room(self) -> None:
        while len(self) > self._limit and self._asleep:
            self.evict(next(iter(self._asleep.values())))
