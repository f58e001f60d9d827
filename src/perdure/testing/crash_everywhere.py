"""`crash_everywhere`: run a workflow again and again, each time with the process dying at another commit.

After each crash a second engine goes on with what the store holds, and what must hold is checked, of the run and of all
others that it led to:

- the outcome is that of a run without a crash;
- a step that was on record at the crash is not executed again, and its record has not changed (a loop may have pruned
  it);
- the effects of steps on the world are the same, if the caller says how to see them (`effects`);
- an attempt is repeated only if it was under way at the crash; of an at-most-once step, none is;
- no step is left out, and no run;
- no replay asked for a step with other arguments than are on record.
"""

from __future__ import annotations

import asyncio
import operator
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.clock import sleep_on
from perdure.config import EngineConfig
from perdure.engine import Engine
from perdure.errors import RunCancelled, RunFailed
from perdure.model.queries import RunQuery
from perdure.model.records import Entry, EntryStatus
from perdure.runner.blocking_guard import blocking_refused
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.results import Snapshot
from perdure.stores.writes import Write
from perdure.testing.clock import VirtualClock
from perdure.testing.commit_summary import said
from perdure.testing.faults import Side
from perdure.testing.harness import Execution, Harness
from perdure.testing.time_skipping import HORIZON
from perdure.workflows.definition import Workflow

DAY = 86_400.0
A_WHILE = 1.0  # seconds, virtual ones, between two looks at what is still owed
SIDES: tuple[Side, ...] = ("before", "after")
MANY = 1_000  # runs that one course may lead to, and looks at what is still owed

MakeStore = Callable[[VirtualClock], Store]
WithEngine = Callable[[Engine], Awaitable[object]]
Outcome = tuple[Any, ...]
"""("returned", value), ("failed", type, message) or ("cancelled",)."""


@dataclass(frozen=True, slots=True)
class Crash:
    """Where the process died: at the n-th call of this name, before or after it reached the store.

    `what` says in words what that commit was to record.
    """

    n: int
    side: Side
    call: str = "commit"
    what: str = ""

    def __str__(self) -> str:
        return f"a crash {self.side} {self.call} {self.n}" + (f" ({self.what})" if self.what else "")


@dataclass(frozen=True, slots=True)
class CrashReport:
    """What was tried: the outcome without a crash, how many commits that took, and the crashes that happened.

    `repeated` are the steps that some crash cut short after they had begun, so that they were executed once more: by
    location, each with the first such crash. These are the ones that have to be idempotent.
    """

    outcome: Outcome
    commits: int
    crashes: tuple[Crash, ...]
    repeated: Mapping[str, Crash]


@dataclass(frozen=True, slots=True)
class _Case:
    """What is to be run, again and again."""

    workflow: Workflow[Any, Any]
    args: tuple[Any, ...]
    id: str
    also: tuple[Workflow[Any, Any], ...]
    drive: WithEngine | None
    check: WithEngine | None
    effects: Callable[[], object]
    within: float


@dataclass(frozen=True, slots=True)
class _Trace:
    """How it went once. `at_crash` and `at_end` are all runs by id."""

    outcome: Outcome
    calls: Counter[str]
    crashed: bool
    at_crash: Mapping[str, Snapshot]
    at_end: Mapping[str, Snapshot]
    before: tuple[Execution, ...]
    after: tuple[Execution, ...]
    effects: object
    committed: tuple[tuple[Write, ...], ...]

    @property
    def repeated(self) -> list[Execution]:
        """Attempts that were under way at the crash, and were executed once more after it."""
        begun = {(execution.key, execution.attempt) for execution in self.before}
        return [execution for execution in self.after if (execution.key, execution.attempt) in begun]


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
    also: Sequence[Workflow[Any, Any]] = (),
    drive: WithEngine | None = None,
    check: WithEngine | None = None,
    effects: Callable[[], object] = lambda: None,
    within: float | None = None,
) -> CrashReport:
    """Crash before and after every commit; an AssertionError says where which promise was broken, and by which steps.

    `make_store` gives an empty store for each run, `reopen` the way in which a second process would open it (the same
    object, unless given). `begin` is called before each run, to reset what steps keep outside of it. `same` compares
    the outcome after a crash with the one without. `also` are other workflows that it starts: all runs must come to an
    end. `drive` plays the world outside: it is called once the run is started, and with the second engine again.
    `check` is called when all has ended. `effects` shows what the steps have done to the world, as a new value each
    time; that must be the same as without a crash.
    """
    skips = make_store is MemoryStore
    limit = within if within is not None else HORIZON if skips else DAY
    case = _Case(workflow, args, id, tuple(also), drive, check, effects, limit)

    async def course(crash: Crash | None) -> _Trace:
        if begin is not None:
            begin()
        clock = VirtualClock()
        store = make_store(clock)
        async with Harness(store, clock=clock, config=config, skips=skips) as harness:
            again = (lambda: store) if reopen is None else (lambda: reopen(store, clock))
            try:
                return await _course(harness, case, crash, again)
            except Exception as error:
                error.add_note("this was without a crash" if crash is None else f"this was after {crash}")
                raise

    with blocking_refused():
        clean = await course(None)
        crashes: list[Crash] = []
        repeated: dict[str, Crash] = {}
        for crash in _everywhere(clean, calls):
            crashed = await course(crash)
            faults = _faults(clean, crashed, same)
            if faults:
                raise AssertionError(f"after {crash}:\n" + "\n".join(f"- {fault}" for fault in faults))
            if crashed.crashed:
                crashes.append(crash)
            for execution in crashed.repeated:
                repeated.setdefault(execution.location, crash)
    return CrashReport(clean.outcome, clean.calls["commit"], tuple(crashes), repeated)


def _everywhere(clean: _Trace, calls: Sequence[str]) -> Iterator[Crash]:
    for call in calls:
        for n in range(1, clean.calls[call] + 1):
            # Up to the crash the other course is the same: what is committed there is what was committed here.
            what = said(clean.committed[n - 1]) if call == "commit" and n <= len(clean.committed) else ""
            for side in SIDES:
                yield Crash(n, side, call, what)


async def _course(harness: Harness, case: _Case, crash: Crash | None, again: Callable[[], Store]) -> _Trace:
    last = first = await harness.engine(case.workflow, *case.also)
    if crash is not None:
        first.faults.crash(crash.n, crash.side, call=crash.call)
    outcome = await harness.drive_until_crash(first, _everything(harness, first, case), case.within)
    calls = Counter(first.faults.calls)
    at_crash: Mapping[str, Snapshot] = {}
    executed = len(harness.executions)
    if outcome is None:
        await harness.crash(first)
        executed = len(harness.executions)
        at_crash = await _all_runs(harness.store)
        last = await harness.engine(case.workflow, *case.also, store=again())
        outcome = await harness.drive(_everything(harness, last, case), case.within)
    if case.check is not None:
        await harness.drive(case.check(last), case.within)
    return _Trace(
        outcome=outcome,
        calls=calls,
        crashed=first.faults.crashed.is_set(),
        at_crash=at_crash,
        at_end=await _all_runs(harness.store),
        before=tuple(harness.executions[:executed]),
        after=tuple(harness.executions[executed:]),
        effects=case.effects(),
        committed=tuple(first.faults.committed),
    )


async def _everything(harness: Harness, engine: Engine, case: _Case) -> Outcome:
    """Start the run and wait until it and all that it led to have ended, and nobody is owed anything."""
    run: Any = await engine.start(case.workflow.options(id=case.id), *case.args)
    if case.drive is None:
        outcome = await _outcome(run)
    else:
        outcome, _ = await asyncio.gather(_outcome(run), case.drive(engine))
    for _ in range(MANY):
        open_runs = await _open_runs(harness.store)
        if not open_runs and not await harness.store.unfinalized(1):
            return outcome
        for run_id in open_runs:
            await _outcome(engine.get(run_id))
        await sleep_on(harness.clock, A_WHILE)
    raise AssertionError("all runs have ended, and some still owe something to others")


async def _outcome(run: Any) -> Outcome:
    try:
        return ("returned", await run.result())
    except RunFailed as failed:
        return ("failed", failed.type, failed.message)
    except RunCancelled:
        return ("cancelled",)


async def _open_runs(store: Store) -> list[str]:
    page = await store.runs(RunQuery(limit=MANY))
    return [record.id for record in page.runs if not record.status.terminal]


async def _all_runs(store: Store) -> Mapping[str, Snapshot]:
    page = await store.runs(RunQuery(limit=MANY))
    snapshots = await store.load([record.id for record in page.runs])
    return {snapshot.record.id: snapshot for snapshot in snapshots if snapshot is not None}


# --- what must hold ------------------------------------------------------------------------------------------------


def _faults(clean: _Trace, crashed: _Trace, same: Callable[[Outcome, Outcome], bool]) -> list[str]:
    faults = []
    if not same(clean.outcome, crashed.outcome):
        faults.append(f"the run came to {crashed.outcome!r}, and without a crash to {clean.outcome!r}")
    if clean.effects != crashed.effects:
        faults.append(f"the effects are {crashed.effects!r}, and without a crash {clean.effects!r}")
    if faults:
        faults += _not_idempotent(crashed)
    for engine, executions in (("the first engine", crashed.before), ("the second engine", crashed.after)):
        for execution, times in Counter(executions).items():
            if times > 1:
                where = f"{execution.location} in run {execution.run_id}"
                faults.append(f"{engine} executed attempt {execution.attempt} of {where} {times} times")
    faults += _repeated(crashed)
    for run_id, snapshot in crashed.at_crash.items():
        faults += _changed(snapshot, crashed.at_end[run_id])
    done = {execution.key for execution in crashed.before + crashed.after}
    left_out = [each for each in clean.before if not each.at_most_once and each.key not in done]
    faults += sorted({f"run {each.run_id}: step {each.location} was never executed" for each in left_out})
    missing = clean.at_end.keys() - crashed.at_end.keys()
    faults += [f"run {run_id} was never started" for run_id in sorted(missing)]
    for run_id, snapshot in crashed.at_end.items():
        faults += [
            f"run {run_id}: the replay asked for {where} with other arguments" for where in snapshot.record.drift
        ]
    return faults


def _not_idempotent(crashed: _Trace) -> list[str]:
    """Who is to blame for it, most likely: the steps that did their work twice."""
    return [
        f"run {each.run_id}: step {each.location} is not idempotent: attempt {each.attempt} was under way at the crash "
        "and was executed once more (current_step().idempotency_key is the same both times)"
        for each in crashed.repeated
    ]


def _repeated(crashed: _Trace) -> list[str]:
    faults = []
    recorded = {
        f"{run_id}/{entry.generation}/{entry.location}": entry
        for run_id, snapshot in crashed.at_crash.items()
        for entry in snapshot.entries
    }
    begun = {(execution.key, execution.attempt) for execution in crashed.before}
    for execution in crashed.after:
        run, where, entry = f"run {execution.run_id}", execution.location, recorded.get(execution.key)
        if entry is not None and entry.status is not EntryStatus.PENDING:
            faults.append(f"{run}: step {where} was on record ({entry.status}) and was executed again")
        elif entry is not None and entry.due_at is not None and execution.attempt <= entry.attempts:
            faults.append(
                f"{run}: attempt {execution.attempt} of {where} was on record as failed and was executed again"
            )
        elif execution.at_most_once and (execution.key, execution.attempt) in begun:
            faults.append(f"{run}: attempt {execution.attempt} of the at-most-once step {where} was executed again")
    return faults


def _changed(at_crash: Snapshot, at_end: Snapshot) -> list[str]:
    if at_crash.record.generation != at_end.record.generation:
        return []
    now = _latest(at_end)
    loops = tuple(f"{entry.location}/~" for entry in at_crash.entries if entry.kind == "loop")
    return [
        f"run {at_end.record.id}: the record of {location} was {entry} and is {now.get(location)}"
        for location, entry in _latest(at_crash).items()
        if entry.seq is not None and now.get(location) != entry
        if location in now or not location.startswith(loops)
    ]


def _latest(snapshot: Snapshot) -> dict[str, Entry]:
    return {entry.location: entry for entry in snapshot.entries}
