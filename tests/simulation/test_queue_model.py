"""The queue model accepts what a correct store does with random queue writes, and finds planted bugs of a store."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from random import Random
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from perdure.model.queue_records import QueueSettings
from perdure.stores import queue_rules, semantics
from perdure.stores.memory import queue_writes, turns, writes
from perdure.stores.memory.queues import MemoryQueues
from perdure.stores.memory.store import MemoryStore
from perdure.stores.writes import ConfigureQueue
from perdure.testing.contract.builders import worker
from perdure.testing.contract.queue_traces import QueueTrace
from perdure.testing.simulation.invariant_checker import InvariantChecker


def violations_of(seed: int, length: int = 200) -> list[str]:
    """Return what the checker reports about a random trace on the memory store."""

    async def run() -> list[str]:
        store = MemoryStore()
        await store.open(shards=16)
        await store.join(worker("a"))
        checker = InvariantChecker(store, lambda line: None, 0.0)
        checker._check_retention = lambda run, patch: None  # type: ignore[method-assign]
        trace = QueueTrace(checker, Random(seed))
        checker.queue_model._now = lambda: trace.now
        for name in QueueTrace.QUEUES:
            await checker.commit([ConfigureQueue(name=name, base=0, declared=QueueSettings(partitioned=True))])
        for _ in range(length):
            write = await trace.next_write()
            if write is not None:
                await checker.commit([write])
        return checker.violations

    return asyncio.run(run())


@pytest.mark.parametrize("seed", range(15))
def test_a_correct_store_has_no_violations(seed: int) -> None:
    assert violations_of(seed) == []


def apply_plans_of_any_version() -> AbstractContextManager[Any]:
    """Apply an admission to any version of the queue."""
    admit = queue_writes.admit

    def admit_any(state: Any, write: Any) -> Any:
        queue = state.queues.get(write.queue)
        return admit(state, write if queue is None else replace(write, base=queue.version))

    return mock.patch.object(writes, "admit", admit_any)


def keep_the_slot_of_an_ended_run() -> AbstractContextManager[Any]:
    """Do not delete the place of a run that ends by a turn."""
    return mock.patch.object(turns, "depart", return_value=None)


def wake_waiting_runs() -> AbstractContextManager[Any]:
    """Let a message make a waiting run due."""
    wakes = semantics.wakes

    def wakes_always(message: Any, run: Any) -> bool:
        run.waiting = False
        return wakes(message, run)

    return mock.patch.object(semantics, "wakes", wakes_always)


def admit_held_runs() -> AbstractContextManager[Any]:
    """Admit runs that were paused while they waited."""
    rule = queue_rules.is_admissible
    return mock.patch.object(
        queue_rules, "is_admissible", lambda record, *rest: rule(replace(record, held=None), *rest)
    )


def admit_expired_runs() -> AbstractContextManager[Any]:
    """Admit runs whose place has expired."""
    rule = queue_rules.is_admissible
    return mock.patch.object(queue_rules, "is_admissible", lambda record, expires_at, write: rule(record, None, write))


def take_the_last_places() -> AbstractContextManager[Any]:
    """Admit the last runs of a partition instead of the first."""
    first = MemoryQueues.first_places
    return mock.patch.object(MemoryQueues, "first_places", lambda self, *args: first(self, *args)[::-1])


def ignore_taken_keys() -> AbstractContextManager[Any]:
    """Create a run although its dedupe key is taken."""
    return mock.patch.object(queue_rules, "find_duplicate", return_value=None)


def make_rewound_waiting_runs_due() -> AbstractContextManager[Any]:
    """Make a waiting run that is rewound due."""
    rewound = semantics.rewound
    return mock.patch.object(semantics, "rewound", lambda record, *rest: rewound(replace(record, waiting=False), *rest))


def promote_without_a_new_number() -> AbstractContextManager[Any]:
    """Keep the number of a delayed place when its time comes."""

    def promote(self: Any, places: Any) -> None:
        for place in places:
            self.move(place, replace(place.row, eligible_at=None))

    return mock.patch.object(MemoryQueues, "promote", promote)


STORE_MUTANTS: list[Callable[[], AbstractContextManager[Any]]] = [
    apply_plans_of_any_version,
    keep_the_slot_of_an_ended_run,
    wake_waiting_runs,
    admit_held_runs,
    admit_expired_runs,
    take_the_last_places,
    ignore_taken_keys,
    make_rewound_waiting_runs_due,
    promote_without_a_new_number,
]


@pytest.mark.parametrize("mutant", STORE_MUTANTS)
def test_a_planted_bug_of_a_store_is_found(mutant: Callable[[], AbstractContextManager[Any]]) -> None:
    with mutant():
        assert any(violations_of(seed) for seed in range(40))
