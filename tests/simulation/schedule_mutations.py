"""Mutations of schedules: each loses a time slot, or fires one twice."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

from msgspec.structs import replace

from perdure.execution import schedule_trigger
from perdure.schedules.slot_rule import slot_run_id

Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def store_no_pending_slots() -> Any:
    """Store the plan of a schedule without its pending slots, which a crash before their starts then loses."""
    put = schedule_trigger.put_schedule

    def put_without(read: Any, schedule: Any, *rest: Any) -> Any:
        return put(read, replace(schedule, pending=()), *rest)

    return mock.patch.object(schedule_trigger, "put_schedule", put_without)


def name_runs_by_attempt() -> Any:
    """Give every attempt to start the run of a slot an id of its own."""
    numbers = itertools.count()

    def name(schedule: str, slot: float) -> str:
        return f"{slot_run_id(schedule, slot)}-{next(numbers)}"

    return mock.patch("perdure.execution.slot_starts.slot_run_id", name)


SCHEDULE_MUTANTS: dict[str, Mutant] = {
    mutant.__name__: mutant for mutant in (store_no_pending_slots, name_runs_by_attempt)
}
