"""`crash_everywhere`: run a workflow once per commit, and crash the process at another commit each time.

After each crash a second engine continues with the contents of the store. Then these guarantees are checked, for the
run and for all runs that it started:

- the outcome equals that of a run without a crash;
- a step that was recorded at the crash is not executed again, and its record has not changed (a loop may prune it);
- the external effects of steps are the same, if the caller provides `effects` to read them;
- an attempt is repeated only if it was running at the crash; an at-most-once attempt is never repeated;
- every step and every run is executed;
- no replay requested a step with arguments that differ from the recorded ones.
"""

from __future__ import annotations

import asyncio
import operator
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from perdure.clock import sleep_on
from perdure.config import EngineConfig
from perdure.engine import Engine
from perdure.errors import RunCancelled, RunFailed
from perdure.execution.lifespan import LifespanOption
from perdure.model.queries import RunQuery
from perdure.model.records import Entry, EntryStatus
from perdure.runner.blocking_guard import blocking_refused
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.results import Snapshot
from perdure.stores.writes import Write
from perdure.testing.clock import VirtualClock
from perdure.testing.commit_summary import summarize_batch
from perdure.testing.faults import Side
from perdure.testing.harness import Execution, Harness
from perdure.testing.time_skipping import HORIZON
from perdure.workflows.definition import Workflow

DAY = 86_400.0
A_WHILE = 1.0  # virtual seconds between two checks for pending finalization
SIDES: tuple[Side, ...] = ("before", "after")
MANY = 1_000  # limit of runs per execution, and of checks for pending finalization

MakeStore = Callable[[VirtualClock], Store]
WithEngine = Callable[[Engine], Awaitable[object]]
Outcome = tuple[Any, ...]
"""("returned", value), ("failed", type, message) or ("cancelled",)."""


@dataclass(frozen=True, slots=True)
class Crash:
    """Where the process died: at the n-th call of this name, before or after the call reached the store.

    `what` is a summary of the changes that the commit contained.
    """

    n: int
    side: Side
    call: str = "commit"
    what: str = ""

    def __str__(self) -> str:
        return f"a crash {self.side} {self.call} {self.n}" + (f" ({self.what})" if self.what else "")


@dataclass(frozen=True, slots=True)
class CrashReport:
    """The outcome without a crash, the number of commits that it took, and the crashes that were injected.

    `repeated` maps the location of each step that was executed again after a crash interrupted it to the first such
    crash. These steps must be idempotent.
    """

    outcome: Outcome
    commits: int
    crashes: tuple[Crash, ...]
    repeated: Mapping[str, Crash]


@dataclass(frozen=True, slots=True)
class _Case:
    """The workflow and options that every execution uses."""

    workflow: Workflow[Any, Any]
    args: tuple[Any, ...]
    id: str
    also: tuple[Workflow[Any, Any], ...]
    drive: WithEngine | None
    check: WithEngine | None
    effects: Callable[[], object]
    within: float
    lifespan: LifespanOption | None


@dataclass(frozen=True, slots=True)
class _Trace:
    """What happened in one execution. `at_crash` and `at_end` contain all runs by id."""

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
        """Attempts that were running at the crash and were executed again after it."""
        started = {(execution.key, execution.attempt) for execution in self.before}
        return [execution for execution in self.after if (execution.key, execution.attempt) in started]


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
    every: int = 1,
    lifespan: LifespanOption | None = None,
) -> CrashReport:
    """Run a workflow with a crash before and after every commit, and return a report of the crashes.

    `make_store` returns an empty store for each execution. `reopen` returns the store as a second process would open
    it; by default the same object. `begin` is called before each execution, to reset external state of steps. `same`
    compares the outcome after a crash with the outcome without one. `also` lists other workflows that the workflow
    starts; all runs must end. `drive` simulates external callers: it is called after the run has started, and again
    with the second engine. `check` is called when all runs have ended. `effects` returns the external effects of the
    steps as a new value; the value must be the same as without a crash. `every` takes a sample of a long workflow: 5
    crashes at every fifth of these points. An odd number covers both sides of commits. `lifespan` is that of every
    engine; it opens new resources for each. A step body that waits for real I/O gets real time, up to five seconds.

    Raises AssertionError with the crash, the broken guarantees and the steps that broke them.
    """
    skips = make_store is MemoryStore
    limit = within if within is not None else HORIZON if skips else DAY
    case = _Case(workflow, args, id, tuple(also), drive, check, effects, limit, lifespan)
    given_up: set[tuple[str, int]] = set()  # shared, so that a body without end costs real time only once

    async def execute(crash: Crash | None) -> _Trace:
        if begin is not None:
            begin()
        clock = VirtualClock()
        store = make_store(clock)
        async with Harness(store, clock=clock, config=config, skips=skips, given_up=given_up) as harness:
            again = (lambda: store) if reopen is None else (lambda: reopen(store, clock))
            try:
                return await _execute(harness, case, crash, again)
            except Exception as error:
                error.add_note("raised without a crash" if crash is None else f"raised after {crash}")
                raise

    with blocking_refused():
        clean = await execute(None)
        crashes: list[Crash] = []
        repeated: dict[str, Crash] = {}
        for crash in islice(_everywhere(clean, calls), 0, None, every):
            crashed = await execute(crash)
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
            # Executions are identical up to the crash, so the clean one shows which commit the crash hits.
            what = summarize_batch(clean.committed[n - 1]) if call == "commit" and n <= len(clean.committed) else ""
            for side in SIDES:
                yield Crash(n, side, call, what)


async def _execute(harness: Harness, case: _Case, crash: Crash | None, again: Callable[[], Store]) -> _Trace:
    last = first = await harness.engine(case.workflow, *case.also, lifespan=case.lifespan)
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
        last = await harness.engine(case.workflow, *case.also, store=again(), lifespan=case.lifespan)
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
    """Start the run, and wait until it and all runs that it started have ended and are finalized."""
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
    raise AssertionError("all runs have ended, but some are not finalized")


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
    return {snapshot.record.id: snapshot for snapshot in snapshots if isinstance(snapshot, Snapshot)}


# --- guarantees -----------------------------------------------------------------------------------------------------


def _faults(clean: _Trace, crashed: _Trace, same: Callable[[Outcome, Outcome], bool]) -> list[str]:
    faults = []
    if not same(clean.outcome, crashed.outcome):
        faults.append(f"the outcome is {crashed.outcome!r}, and without a crash {clean.outcome!r}")
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
            f"run {run_id}: the replay requested {where} with other arguments" for where in snapshot.record.drift
        ]
    return faults


def _not_idempotent(crashed: _Trace) -> list[str]:
    """Return a fault for each step that was executed twice, the most likely cause of a different outcome."""
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
    started = {(execution.key, execution.attempt) for execution in crashed.before}
    for execution in crashed.after:
        run, where, entry = f"run {execution.run_id}", execution.location, recorded.get(execution.key)
        if entry is not None and entry.status is not EntryStatus.PENDING:
            faults.append(f"{run}: step {where} was recorded ({entry.status}) and was executed again")
        elif entry is not None and entry.due_at is not None and execution.attempt <= entry.attempts:
            faults.append(
                f"{run}: attempt {execution.attempt} of {where} was recorded as failed and was executed again"
            )
        elif execution.at_most_once and (execution.key, execution.attempt) in started:
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
