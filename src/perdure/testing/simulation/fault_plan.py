"""A plan of faults: data, drawn from the seed before anything happens, so that single faults can be left out.

Faults at calls name the process and the number of its call; those in time name a moment, in seconds from the start.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

STORM = 12.0  # seconds in which faults happen
AT_COMMITS = ("dies before", "dies after", "dies within", "answer lost", "half done, answer lost")
AT_CALLS = ("error", "answer lost to a call", "slow")
AT_CLAIMS = ("claim lost",)
IN_TIME = ("paused", "clock jumps", "hints lost", "hints doubled", "hints late", "leaves")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong in one process: at its n-th commit or call, or at a moment for a while."""

    kind: str
    process: str
    n: int = 0
    at: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        if self.kind in AT_COMMITS:
            return f"{self.process}: {self.kind} at its commit {self.n}"
        if self.kind in AT_CLAIMS:
            return f"{self.process}: the answer is lost to its claim {self.n} of those that gave it runs"
        if self.kind in AT_CALLS:
            return f"{self.process}: {self.kind} at its call {self.n} ({self.amount:g})"
        return f"{self.process}: {self.kind} at {self.at:.3f} ({self.amount:g})"


@dataclass(frozen=True, slots=True)
class Plan:
    """The faults of one course."""

    faults: tuple[Fault, ...] = ()

    def at_commit(self, process: str, n: int) -> Fault | None:
        return self._first(process, n, AT_COMMITS)

    def at_call(self, process: str, n: int) -> Fault | None:
        return self._first(process, n, AT_CALLS)

    def at_claim(self, process: str, n: int) -> Fault | None:
        return self._first(process, n, AT_CLAIMS)

    def in_time(self, *processes: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.kind in IN_TIME and fault.process in processes]

    def without(self, faults: Iterable[Fault]) -> Plan:
        gone = set(faults)
        return Plan(tuple(fault for fault in self.faults if fault not in gone))

    def _first(self, process: str, n: int, kinds: Sequence[str]) -> Fault | None:
        return next(
            (each for each in self.faults if (each.process, each.n) == (process, n) and each.kind in kinds), None
        )


def draw_plan(chance: random.Random, workers: Sequence[str], clients: Sequence[str]) -> Plan:
    """Between none and a dozen faults; clients are spared those that only a worker can have."""
    faults = [_draw(chance, workers, clients) for _ in range(chance.choice((0, 1, 2, 3, 4, 6, 8, 12)))]
    return Plan(tuple(dict.fromkeys(faults)))


def _draw(chance: random.Random, workers: Sequence[str], clients: Sequence[str]) -> Fault:
    way = chance.random()
    if way < 0.45:
        n = min(chance.randrange(1, 60), chance.randrange(1, 60))
        return Fault(chance.choice(AT_COMMITS), chance.choice(workers), n)
    if way < 0.6:
        who, n = chance.choice([*workers, *clients]), chance.randrange(1, 120)
        return Fault(chance.choice(AT_CALLS), who, n, amount=float(chance.choice((1, 2, 5))))
    if way < 0.65:
        return Fault(chance.choice(AT_CLAIMS), chance.choice(workers), chance.randrange(1, 15))
    if way < 0.7:
        return Fault(
            chance.choice(("answer lost", "half done, answer lost")), chance.choice(clients), chance.randrange(1, 15)
        )
    return _draw_in_time(chance, chance.choice(workers))


def _draw_in_time(chance: random.Random, worker: str) -> Fault:
    kind, at = chance.choice(IN_TIME), round(chance.uniform(0.0, STORM), 3)
    amounts = {"paused": (0.5, 4.0, 8.0), "clock jumps": (-20.0, -2.0, 2.0, 20.0), "leaves": (0.0, 1.0)}
    return Fault(kind, worker, at=at, amount=chance.choice(amounts.get(kind, (1.0, 5.0))))


def shrink(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Leave out faults, one by one and again, as long as the course still fails."""
    smaller = True
    while smaller:
        smaller = False
        for fault in plan.faults:
            without = plan.without((fault,))
            if fails(without):
                plan, smaller = without, True
    return plan
