"""`crash_everywhere`: run a workflow again and again, each time with the process dying at another commit.

After each crash a second engine goes on with what the store holds, and what must hold is checked:

- the outcome is that of a run without a crash;
- a step that was on record at the crash is not executed again, and its record has not changed;
- an attempt is repeated only if it was under way at the crash; of an at-most-once step, none is;
- no step is left out;
- no replay asked for a step with other arguments than are on record.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.config import EngineConfig
from perdure.definition import Workflow
from perdure.embedded import Engine
from perdure.errors import RunCancelled, RunFailed
from perdure.records import Entry, EntryStatus
from perdure.store.base import Snapshot, Store
from perdure.store.memory import MemoryStore
from perdure.testing.clock import VirtualClock
from perdure.testing.faults import Side
from perdure.testing.harness import Execution, Harness

DAY = 86_400.0

MakeStore = Callable[[VirtualClock], Store]
Outcome = tuple[Any, ...]
"""("returned", value), ("failed", type, message) or ("cancelled",)."""


@dataclass(frozen=True, slots=True)
class Crash:
    """Where the process died: at the n-th call of this name, before or after it reached the store."""

    n: int
    side: Side
    call: str = "commit"

    def __str__(self) -> str:
        return f"a crash {self.side} {self.call} {self.n}"


@dataclass(frozen=True, slots=True)
class CrashReport:
    """What was tried: the outcome without a crash, how many commits that took, and the crashes that happened."""

    outcome: Outcome
    commits: int
    crashes: tuple[Crash, ...]


@dataclass(frozen=True, slots=True)
class _Course:
    """How one run went."""

    outcome: Outcome
    calls: Counter[str]
    crashed: bool
    at_crash: Snapshot | None
    at_end: Snapshot
    before: tuple[Execution, ...]
    after: tuple[Execution, ...]


async def crash_everywhere(
    workflow: Workflow[Any, Any],
    *args: Any,
    make_store: MakeStore = MemoryStore,
    reopen: Callable[[Store, VirtualClock], Store] | None = None,
    id: str = "crash-everywhere",
    config: EngineConfig | None = None,
    same: Callable[[Outcome, Outcome], bool] = operator.eq,
    calls: Sequence[str] = ("commit",),
    begin: Callable[[], object] | None = None,
    within: float = DAY,
) -> CrashReport:
    """Crash before and after every commit; an AssertionError says where which promise was broken.

    `make_store` gives an empty store for each run, `reopen` the way in which a second process would open it (the same
    object, unless given). `begin` is called before each run, to reset what steps keep outside of it. `same` compares
    the outcome after a crash with the one without.
    """

    async def course(crash: Crash | None) -> _Course:
        if begin is not None:
            begin()
        clock = VirtualClock()
        store = make_store(clock)
        async with Harness(store, clock=clock, config=config) as harness:
            again = (lambda: store) if reopen is None else (lambda: reopen(store, clock))
            return await _course(harness, workflow, args, id, crash, again, within)

    clean = await course(None)
    crashes: list[Crash] = []
    for call in calls:
        for n in range(1, clean.calls[call] + 1):
            for side in ("before", "after"):
                crash = Crash(n, side, call)
                crashed = await course(crash)
                faults = _faults(clean, crashed, same)
                if faults:
                    raise AssertionError(f"after {crash}:\n" + "\n".join(f"- {fault}" for fault in faults))
                if crashed.crashed:
                    crashes.append(crash)
    return CrashReport(clean.outcome, clean.calls["commit"], tuple(crashes))


async def _course(
    harness: Harness,
    workflow: Workflow[Any, Any],
    args: tuple[Any, ...],
    id: str,
    crash: Crash | None,
    again: Callable[[], Store],
    within: float,
) -> _Course:
    first = await harness.engine(workflow)
    if crash is not None:
        first.faults.crash(crash.n, crash.side, call=crash.call)
    outcome = await harness.drive_until_crash(first, _outcome(first, workflow, args, id), within)
    calls = Counter(first.faults.calls)
    at_crash: Snapshot | None = None
    executed = len(harness.executions)
    if outcome is None:
        await harness.crash(first)
        executed = len(harness.executions)
        at_crash = (await harness.store.load([id]))[0]
        second = await harness.engine(workflow, store=again())
        outcome = await harness.drive(_outcome(second, workflow, args, id), within)
    at_end = (await harness.store.load([id]))[0]
    assert at_end is not None
    return _Course(
        outcome=outcome,
        calls=calls,
        crashed=first.faults.crashed.is_set(),
        at_crash=at_crash,
        at_end=at_end,
        before=tuple(harness.executions[:executed]),
        after=tuple(harness.executions[executed:]),
    )


async def _outcome(engine: Engine, workflow: Workflow[Any, Any], args: tuple[Any, ...], id: str) -> Outcome:
    run: Any = await engine.start(workflow.options(id=id), *args)
    try:
        return ("returned", await run.result())
    except RunFailed as failed:
        return ("failed", failed.type, failed.message)
    except RunCancelled:
        return ("cancelled",)


# --- what must hold ------------------------------------------------------------------------------------------------


def _faults(clean: _Course, crashed: _Course, same: Callable[[Outcome, Outcome], bool]) -> list[str]:
    faults = []
    if not same(clean.outcome, crashed.outcome):
        faults.append(f"the run came to {crashed.outcome!r}, and without a crash to {clean.outcome!r}")
    for engine, executions in (("the first engine", crashed.before), ("the second engine", crashed.after)):
        for execution, times in Counter(executions).items():
            if times > 1:
                faults.append(f"{engine} executed attempt {execution.attempt} of {execution.location} {times} times")
    if crashed.at_crash is not None:
        faults += _repeated(crashed.at_crash, crashed.before, crashed.after)
        faults += _changed(crashed.at_crash, crashed.at_end)
    done = {execution.location for execution in crashed.before + crashed.after}
    left_out = {execution.location for execution in clean.before if not execution.at_most_once} - done
    faults += [f"step {location} was never executed" for location in sorted(left_out)]
    faults += [f"the replay asked for {location} with other arguments" for location in crashed.at_end.record.drift]
    return faults


def _repeated(at_crash: Snapshot, before: Sequence[Execution], after: Sequence[Execution]) -> list[str]:
    faults = []
    recorded = _latest(at_crash)
    begun = {(execution.location, execution.attempt) for execution in before}
    for execution in after:
        where, entry = execution.location, recorded.get(execution.location)
        if entry is not None and entry.status is not EntryStatus.PENDING:
            faults.append(f"step {where} was on record ({entry.status}) and was executed again")
        elif entry is not None and entry.due_at is not None and execution.attempt <= entry.attempts:
            faults.append(f"attempt {execution.attempt} of {where} was on record as failed and was executed again")
        elif execution.at_most_once and (where, execution.attempt) in begun:
            faults.append(f"attempt {execution.attempt} of the at-most-once step {where} was executed again")
    return faults


def _changed(at_crash: Snapshot, at_end: Snapshot) -> list[str]:
    if at_crash.record.generation != at_end.record.generation:
        return []
    now = _latest(at_end)
    return [
        f"the record of {location} was {entry} and is {now.get(location)}"
        for location, entry in _latest(at_crash).items()
        if entry.seq is not None and now.get(location) != entry
    ]


def _latest(snapshot: Snapshot) -> dict[str, Entry]:
    return {entry.location: entry for entry in snapshot.entries}
