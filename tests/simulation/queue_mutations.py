"""Mutations of work queues: each breaks a limit, the order of admissions or their liveness."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from msgspec.structs import replace

from perdure.execution import admitter
from perdure.execution.admitter import Admitter
from perdure.execution.queue_gates import QueueGates
from perdure.queues import admission_plan
from perdure.stores import queue_rules, semantics
from perdure.stores.memory import queue_writes as memory_queues
from perdure.stores.memory import turns, writes
from perdure.stores.memory.queues import MemoryQueues
from perdure.stores.memory.runs import MemoryRuns

Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def plan_without_held_slots() -> Any:
    """Plan an admission as if no slot were held."""
    plan = admission_plan.plan
    return mock.patch.object(admitter, "plan", lambda view, *rest, **more: plan(replace(view, held=0), *rest, **more))


def plan_without_slots_of_partitions() -> Any:
    """Plan an admission as if no partition held a slot."""
    plan = admission_plan.plan

    def plan_more(view: Any, *rest: Any, **more: Any) -> Any:
        free = tuple(replace(each, held=0) for each in view.partitions)
        return plan(replace(view, partitions=free), *rest, **more)

    return mock.patch.object(admitter, "plan", plan_more)


def ignore_the_pause() -> Any:
    """Plan an admission of a paused queue."""
    plan = admission_plan.plan
    return mock.patch.object(
        admitter, "plan", lambda view, *rest, **more: plan(replace(view, paused=None), *rest, **more)
    )


def apply_plans_of_any_version() -> Any:
    """Let the store apply an admission to any version of the queue."""
    admit = memory_queues.admit

    def admit_any(state: Any, write: Any) -> Any:
        queue = state.queues.get(write.queue)
        return admit(state, write if queue is None else replace(write, base=queue.version))

    return mock.patch.object(writes, "admit", admit_any)


def free_the_slots_of_a_dead_worker() -> Any:
    """Free the slot of a run that is released from a dead worker."""
    release = MemoryRuns.release
    slots: dict[int, MemoryQueues] = {}
    create = MemoryQueues.__init__

    def remember(self: MemoryQueues, runs: MemoryRuns) -> None:
        create(self, runs)
        slots[id(runs)] = self

    def release_with_slot(self: MemoryRuns, run: Any, now: float, *, recovered: bool = False) -> None:
        release(self, run, now, recovered=recovered)
        slots[id(self)].remove(run.record.id)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(MemoryQueues, "__init__", remember))
    stack.enter_context(mock.patch.object(MemoryRuns, "release", release_with_slot))
    return stack


def keep_the_slot_of_an_ended_run() -> Any:
    """Do not delete the place of a run that ends by a turn."""
    return mock.patch.object(turns, "depart", return_value=None)


def wake_waiting_runs() -> Any:
    """Let a message make a waiting run due."""
    wakes = semantics.wakes

    def wakes_always(message: Any, run: Any) -> bool:
        run.waiting = False
        return wakes(message, run)

    return mock.patch.object(semantics, "wakes", wakes_always)


def create_runs_with_a_taken_key() -> Any:
    """Create a run although its dedupe key is taken."""
    return mock.patch.object(queue_rules, "find_duplicate", return_value=None)


def take_the_last_places() -> Any:
    """Admit the last runs of a partition instead of the first."""
    first = MemoryQueues.first_places
    return mock.patch.object(MemoryQueues, "first_places", lambda self, *args: first(self, *args)[::-1])


def claim_through_full_gates() -> Any:
    """Claim runs of a queue with a limit per worker without counting those that this worker executes."""

    def count_all(self: QueueGates, free_slots: int, *, sweep: bool) -> Any:
        return tuple((name, free_slots) for name in self._limits())

    return mock.patch.object(QueueGates, "count_free", count_all)


def never_look_at_a_queue_again() -> Any:
    """Read the list of queues without looking at those that need an admission."""
    return mock.patch.object(Admitter, "_on_summary", return_value=None)


def never_end_expired_runs() -> Any:
    """Leave runs whose place has expired in their queue."""

    async def end_none(session: Any, run_ids: Any) -> list[str]:
        return []

    return mock.patch.object(admitter, "end_expired", end_none)


QUEUE_MUTANTS: dict[str, Mutant] = {
    mutant.__name__: mutant
    for mutant in (
        plan_without_held_slots,
        plan_without_slots_of_partitions,
        ignore_the_pause,
        apply_plans_of_any_version,
        free_the_slots_of_a_dead_worker,
        keep_the_slot_of_an_ended_run,
        wake_waiting_runs,
        create_runs_with_a_taken_key,
        take_the_last_places,
        claim_through_full_gates,
        never_look_at_a_queue_again,
        never_end_expired_runs,
    )
}
