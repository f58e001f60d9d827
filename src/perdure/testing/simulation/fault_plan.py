"""Fault plans: data that is derived from the seed before the simulation starts, so that single faults can be removed.

A fault at a call names the process and the number of its call. A fault in time names its time, in seconds from the
start.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

FAULT_PHASE_SECONDS = 12.0  # seconds of the fault phase
AT_COMMITS = ("dies before", "dies after", "dies within", "result lost", "half done, result lost")
AT_CALLS = ("error", "result lost at a call", "slow")
AT_CLAIMS = ("claim lost",)
IN_TIME = (
    *("paused", "clock jumps", "clock drifts", "clock stands still"),
    *("hints lost", "hints doubled", "hints late", "leaves"),
)
ROW_UNREADABLE = "row unreadable"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one process: at its n-th commit or call, or at a time, for `amount` seconds or calls."""

    kind: str
    process: str
    n: int = 0
    at: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        if self.kind in AT_COMMITS:
            return f"{self.process}: {self.kind} at its commit {self.n}"
        if self.kind in AT_CLAIMS:
            return f"{self.process}: result lost at its claim {self.n} of those that returned runs"
        if self.kind in AT_CALLS:
            return f"{self.process}: {self.kind} at its call {self.n} ({self.amount:g})"
        return f"{self.process}: {self.kind} at {self.at:.3f} ({self.amount:g})"


@dataclass(frozen=True, slots=True)
class Plan:
    """The faults of one simulation."""

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
        removed = set(faults)
        return Plan(tuple(fault for fault in self.faults if fault not in removed))

    def _first(self, process: str, n: int, kinds: Sequence[str]) -> Fault | None:
        return next(
            (each for each in self.faults if (each.process, each.n) == (process, n) and each.kind in kinds), None
        )


def draw_plan(rng: random.Random, workers: Sequence[str], clients: Sequence[str], runs: Sequence[str]) -> Plan:
    """Return a random plan of 0 to 12 faults. Clients get only faults of calls and commits.

    In half of the plans the row of one of these runs cannot be read for a while.
    """
    faults = [_draw(rng, workers, clients) for _ in range(rng.choice((0, 1, 2, 3, 4, 6, 8, 12)))]
    if rng.random() < 0.5:
        at = round(rng.uniform(0.0, FAULT_PHASE_SECONDS), 3)
        faults.append(Fault(ROW_UNREADABLE, rng.choice(runs), at=at))
    return Plan(tuple(dict.fromkeys(faults)))


def _draw(rng: random.Random, workers: Sequence[str], clients: Sequence[str]) -> Fault:
    draw = rng.random()
    if draw < 0.45:
        n = min(rng.randrange(1, 60), rng.randrange(1, 60))
        return Fault(rng.choice(AT_COMMITS), rng.choice(workers), n)
    if draw < 0.6:
        process, n = rng.choice([*workers, *clients]), rng.randrange(1, 120)
        return Fault(rng.choice(AT_CALLS), process, n, amount=float(rng.choice((1, 2, 5))))
    if draw < 0.65:
        return Fault(rng.choice(AT_CLAIMS), rng.choice(workers), rng.randrange(1, 15))
    if draw < 0.7:
        return Fault(rng.choice(("result lost", "half done, result lost")), rng.choice(clients), rng.randrange(1, 15))
    return _draw_in_time(rng, rng.choice(workers))


def _draw_in_time(rng: random.Random, worker: str) -> Fault:
    kind, at = rng.choice(IN_TIME), round(rng.uniform(0.0, FAULT_PHASE_SECONDS), 3)
    amounts = {
        "paused": (0.5, 4.0, 8.0),
        "clock jumps": (-20.0, -2.0, 2.0, 20.0),
        "clock drifts": (0.5, 0.9, 1.1, 1.5),  # the rate, until the end of the fault phase
        "leaves": (0.0, 1.0),
    }
    return Fault(kind, worker, at=at, amount=rng.choice(amounts.get(kind, (1.0, 5.0))))


def shrink(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Return the smallest plan found that still fails, by removing one fault at a time."""
    smaller = True
    while smaller:
        smaller = False
        for fault in plan.faults:
            without = plan.without((fault,))
            if fails(without):
                plan, smaller = without, True
    return plan
