"""Coordinator: the runs in this process and their transitions, one at a time per run.

    created   a caller started a run and this worker got it        -> advance
    claimed   runs were due and are ours now                       -> load, advance
    settled   an attempt of a step ended                           -> advance
    reported  errands were run                                     -> advance
    mailed    the inbox of an active run has news                  -> fetch, advance
    woken     a timer of an active run is due                      -> advance
    answered  the store answered a turn                            -> act, or drop and load again
    dropped   the worker was declared gone, or the engine stops

`advance` runs the workflow (the runner decides), submits the turn, and only once it is committed carries out its
effects. While a turn is being committed the run's inputs gather, and the next turn takes them all. Every transition is
a plain call-back of the event loop, never inside a task: the runner drives tasks of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from perdure.errors import InvalidPayload, StoreError
from perdure.execution.external_effects import ExternalEffects, LocalWorker
from perdure.execution.quarantine import QUARANTINE_AFTER_RECOVERIES, Quarantine
from perdure.execution.run_cache import CachedRun, RunCache
from perdure.execution.run_loader import (
    as_failure,
    build_cached_run,
    build_run_start,
    feed_inputs_singly,
    is_first_execution,
)
from perdure.execution.step_executor import StepExecutor
from perdure.execution.store_session import StoreSession, retry_store_call
from perdure.execution.stream_writer import StreamWriter
from perdure.execution.turn_commit import build_hold_commit, build_turn_commit, ended_record
from perdure.model.records import Hold, Message, RunRecord, RunStatus
from perdure.model.turns import (
    AwaitingResult,
    CancelStep,
    ExternalEffect,
    Input,
    MessageReceived,
    RecordRunningSteps,
    RunStep,
    StepDone,
    Turn,
)
from perdure.stores.results import ClaimedRun, Committed, SigningKey, Snapshot, WriteResult
from perdure.stores.writes import CommitTurn, ReleaseRun
from perdure.workflows.definition import Workflow

LOGGER = logging.getLogger("perdure.execution")

Definitions = Callable[[str, int], Workflow[Any, Any] | None]


class Coordinator:
    """See the module's docstring."""

    def __init__(
        self,
        link: StoreSession,
        here: LocalWorker,
        *,
        definitions: Definitions,
        suspended: Callable[[float | None], None],
        freed: Callable[[], None],
        finished: Callable[[RunRecord, bool], None],
        may_act: Callable[[float], bool],
        concurrency: int | None = None,
    ) -> None:
        self.worker = ""
        self.keys: tuple[SigningKey, ...] = ()  # sign the tokens of deferreds
        self.refused = 0  # turns that the store did not take, because the run was not ours any more
        self.draining = False  # no new steps; runs are given back once none of theirs is under way
        self.residents = RunCache(link.config.resident_runs)
        self._store = link.store
        self._clock = link.clock
        self._codec = link.codec
        self._config = link.config
        self._committer = link.committer
        self._hub = link.hub
        self._definitions = definitions
        self._suspended = suspended
        self._freed = freed
        self._finished = finished
        self._may_act = may_act
        self._concurrency = concurrency
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading: set[str] = set()
        # Runs that are ours again, and since when, while the turn that gave them up is being answered.
        self._claimed_early: dict[str, tuple[ClaimedRun, float | None]] = {}
        self._seclusion = Quarantine(link.clock, self._let_suspect_begin, freed)
        self._load_again: set[str] = set()  # became ours while being loaded: what is read may be from before
        steps = link.config.max_concurrent_steps
        writing = StreamWriter(link, lambda: self.worker)
        self.executor = StepExecutor(link.clock, link.codec, steps, self.on_step_completed, writing)
        self.errands = ExternalEffects(link, here, self.on_effects_completed)

    # --- transitions

    def on_run_created(self, record: RunRecord, definition: Workflow[Any, Any]) -> None:
        """A run was started here and is ours: no need to load what was just written."""
        resident = self.residents.get(record.id)
        if resident is None:
            self._adopt(Snapshot(record, 0, (), ()), definition, fresh=True)
        elif not resident.active:
            self.on_runs_found((record.id,))  # the copy is of a run that was pruned, and whose id is used again

    def on_runs_claimed(self, runs: Sequence[ClaimedRun], at: float | None = None) -> None:
        """These runs are ours now. Copies in memory that still are the run go on; the others are loaded together.

        May be called by a task: what follows comes as plain call-backs.
        """
        unknown: list[str] = []
        for run in runs:
            resident = self.residents.get(run.id)
            if resident is not None and not resident.active and not self._is_still(resident, run):
                self._forget(resident)  # another worker has moved the run on: the copy would do again what it did
                resident = None
            if resident is None:
                unknown.append(run.id)
            elif not resident.active:
                self.residents.activate(resident)
                if run.last_message_no > resident.seen:
                    self._fetch_mail(resident)
                else:
                    self._loop.call_soon(self._advance_again, resident)
            elif resident.committing:  # it was due again before we have heard that the turn is committed
                self._claimed_early[run.id] = (run, at)
        self.on_runs_found(unknown, at)

    def _is_still(self, resident: CachedRun, run: ClaimedRun) -> bool:
        """Whether a copy that sleeps is the run: nobody has moved it on, or has ended and pruned it and used its id."""
        kept = resident.record.retention
        kept = self._config.seconds("run_retention") if kept is None else kept
        return resident.position == run.position and self._clock.now() - resident.slept_at < kept

    def on_runs_found(self, run_ids: Sequence[str], claimed_at: float | None = None) -> None:
        """These runs are ours in the store; load those that are not in memory, or there only as a copy that sleeps."""
        for run_id in run_ids:
            resident = self.residents.get(run_id)
            if resident is not None and not resident.active:
                self._forget(resident)  # we have not heard of the claim: it would sleep on
        missing = [run_id for run_id in run_ids if not self.residents.get(run_id)]
        self._load_again.update(run_id for run_id in missing if run_id in self._loading)
        unknown = [run_id for run_id in missing if run_id not in self._loading]
        if unknown:
            self._load(unknown, claimed_at)

    def on_step_completed(self, run_id: str, done: StepDone) -> None:
        resident = self.residents.active(run_id)
        if resident is not None:
            (resident.deferred_inputs if resident.unread else resident.inputs).append(done)
            self._advance(resident)

    def on_effects_completed(self, run_id: str, outcomes: Sequence[StepDone | AwaitingResult]) -> None:
        resident = self.residents.active(run_id)
        if resident is not None:
            (resident.deferred_inputs if resident.unread else resident.inputs).extend(outcomes)
            self._advance(resident)

    def on_run_terminated(self, run_id: str) -> None:
        """The run was ended from outside: its steps need not go on."""
        resident = self.residents.get(run_id)
        if resident is not None:
            self._forget(resident)

    def on_messages(self, run_ids: Iterable[str]) -> None:
        for run_id in run_ids:
            resident = self.residents.active(run_id)
            if resident is not None:
                self._fetch_mail(resident)

    def on_change_hint(self, run_ids: Iterable[str]) -> None:
        """Somebody changed these runs. While a turn of one is being committed that may be the change, or mail that
        came right after it and that the answer to it knows nothing of: then there is time to look once it is there."""
        for run_id in run_ids:
            resident = self.residents.active(run_id)
            if resident is not None and resident.committing:
                resident.changed_while_committing = True
            elif resident is not None:
                self._fetch_mail(resident)

    def is_committing(self, run_id: str) -> bool:
        """Whether a turn of this run is being committed."""
        resident = self.residents.active(run_id)
        return resident is not None and resident.committing

    def record_running_steps(self, run_id: str, locations: tuple[str, ...]) -> None:
        """These steps take long: let people see that they are running."""
        self._loop.call_soon(self._exposed, run_id, locations)

    def _exposed(self, run_id: str, locations: tuple[str, ...]) -> None:
        resident = self.residents.active(run_id)
        if resident is not None:
            resident.inputs.append(RecordRunningSteps(locations))
            self._advance(resident)

    def discard_all(self) -> None:
        """Nothing in memory counts any longer: close all runs and cancel all steps, without a word to the store."""
        self._claimed_early.clear()
        self._seclusion.forget()
        for resident in self.residents:
            self._drop(resident)

    def drain(self) -> bool:
        """Give back the runs that have nothing under way; True once no run is active any more."""
        self.draining = True
        for resident in self.residents.all_active():
            if not resident.committing and not self._under_way(resident.id):
                self._release_cached(resident)
        return not self.residents.all_active()

    def release_all(self) -> None:
        """Hand all active runs to whoever is next, steps under way or not."""
        for resident in self.residents.all_active():
            self._release_cached(resident)

    @property
    def free_slots(self) -> int:
        """How many more runs this worker may take."""
        free_slots = self.residents.room - len(self._loading)
        if self._concurrency is not None:
            free_slots = min(free_slots, self._concurrency - len(self.residents.all_active()) - len(self._loading))
        if (allowed := self._seclusion.room) is not None:
            free_slots = min(free_slots, allowed - len(self._loading))
        return max(0, free_slots)

    @property
    def loading(self) -> bool:
        return bool(self._tasks)

    # --- loading

    def _load(self, run_ids: list[str], claimed_at: float | None = None) -> None:
        self._loading.update(run_ids)
        self._spawn(self._load_and_adopt(run_ids, claimed_at))

    async def _load_and_adopt(self, run_ids: list[str], claimed_at: float | None) -> None:
        try:
            snapshots = await self._retry_read(lambda: self._store.load(run_ids))
        except StoreError as error:
            self._loading.difference_update(run_ids)
            if len(run_ids) > 1:  # one of them cannot be read: the others can
                for run_id in run_ids:
                    self._load([run_id], claimed_at)
            else:
                LOGGER.error("run %s cannot be read and stays where it is: %s", run_ids[0], error)
            return
        for run_id, snapshot in zip(run_ids, snapshots, strict=True):
            self._loop.call_soon(self._loaded, run_id, snapshot, claimed_at)

    def _loaded(self, run_id: str, snapshot: Snapshot | None, claimed_at: float | None) -> None:
        again = run_id in self._load_again
        self._loading.discard(run_id)
        self._load_again.discard(run_id)
        if self.residents.get(run_id) is not None:
            return
        if snapshot is None or snapshot.record.owner != self.worker:
            if again:
                self._load([run_id])
            self._stopped(run_id)
            return
        record = snapshot.record
        definition = self._definitions(record.workflow, record.version)
        if definition is None or self.draining:
            self._release(run_id)
        elif record.recoveries > self._config.max_recoveries:
            self._hold_poison_run(snapshot)
        elif record.recoveries >= QUARANTINE_AFTER_RECOVERIES and not self._seclusion.has_begun(run_id):
            self._quarantine_run(run_id)
        else:
            if record.recoveries < QUARANTINE_AFTER_RECOVERIES:
                self._seclusion.on_healthy_run()
            self._adopt(snapshot, definition, fresh=claimed_at is not None and is_first_execution(snapshot, claimed_at))

    def _quarantine_run(self, run_id: str) -> None:
        """A suspect is to execute alone: at once if nobody else does, later if others do, elsewhere if there is one."""
        if not self._seclusion.take(run_id):
            self._release(run_id)
        elif not self.residents.all_active():
            self._seclusion.on_no_other_runs()

    def _let_suspect_begin(self, run_id: str) -> None:
        self.on_runs_found([run_id])  # read again: it may have been ended meanwhile

    def _stopped(self, run_id: str) -> None:
        """The run executes no longer, or not here."""
        if self._seclusion.suspect == run_id and run_id not in self._loading:
            self._seclusion.stopped()
        elif self._seclusion.suspect is not None and not self.residents.all_active():
            self._seclusion.on_no_other_runs()
        self._freed()

    def _adopt(self, snapshot: Snapshot, definition: Workflow[Any, Any], *, fresh: bool) -> None:
        resident = build_cached_run(snapshot, build_run_start(snapshot, definition, self._codec, self.keys))
        resident.never_executed_elsewhere = fresh
        self._add_mail(resident, snapshot.inbox)
        self.residents.add(resident)
        self._advance(resident)

    def _fetch_mail(self, resident: CachedRun) -> None:
        """There is mail. The run goes on once it is read, so that what a step sent to it comes before the step's end.

        What happens after mail came that is not being read yet waits for the next reading; a turn lies between two
        readings, so that a flood of mail stops no run.
        """
        if resident.fetching:
            resident.unread = True
            return
        resident.fetching, resident.unread = True, False
        resident.inputs += resident.deferred_inputs
        resident.deferred_inputs = []
        self._spawn(self._fetch_and_advance(resident))

    async def _fetch_and_advance(self, resident: CachedRun) -> None:
        try:
            messages = await self._retry_read(lambda: self._store.inbox(resident.id, resident.seen))
        except StoreError as error:
            LOGGER.error("run %s: its mail cannot be read: %s", resident.id, error)
            messages = ()
        self._loop.call_soon(self._mail_fetched, resident, messages)

    def _mail_fetched(self, resident: CachedRun, messages: Sequence[Message]) -> None:
        resident.fetching = False
        if self.residents.active(resident.id) is resident:
            self._add_mail(resident, messages)
            self._advance(resident)
        if resident.unread and resident.active:
            self._fetch_mail(resident)
        resident.unread = resident.unread and resident.fetching

    def _add_mail(self, resident: CachedRun, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.number > resident.seen:
                resident.seen = message.number
                resident.inputs.append(MessageReceived(message))

    # --- advancing

    def _advance(self, resident: CachedRun) -> None:
        if resident.committing or resident.fetching:
            return
        resident.single_input_mode = resident.single_input_mode and len(resident.inputs) > 0
        taken = resident.inputs[:1] if resident.single_input_mode else resident.inputs
        resident.inputs = resident.inputs[1:] if resident.single_input_mode else []
        now = self._clock.now()
        try:
            turn = self._next_turn(resident, now, taken)
        except BaseException:  # KeyboardInterrupt: the turn is abandoned, the run is whoever's is next
            self._release_cached(resident)
            raise
        self._submit(resident, turn, now, taken)

    def _next_turn(self, resident: CachedRun, now: float, taken: Sequence[Input]) -> Turn:
        try:
            return resident.runner.advance(now, taken)
        except InvalidPayload as misfit:  # the payload no longer fits the code's annotations
            return Turn(held=Hold("diverged", str(misfit), recorded="the payload", asked="one of another type"))
        except Exception as error:
            LOGGER.exception("run %s: advancing it failed", resident.id)
            return Turn(held=Hold("internal_error", f"{type(error).__name__}: {error}"))

    def _submit(self, resident: CachedRun, turn: Turn, now: float, taken: Sequence[Input]) -> None:
        commit = build_turn_commit(resident, turn, self.worker, now, self._config)
        if commit is None:
            self._after_commit(resident, turn)
        else:
            resident.committing, resident.changed_while_committing = True, False
            self._committer.submit(commit, partial(self._on_commit_result, resident, turn, commit, tuple(taken)))

    def _on_commit_result(
        self,
        resident: CachedRun,
        turn: Turn,
        commit: CommitTurn,
        taken: tuple[Input, ...],
        answer: WriteResult | StoreError,
    ) -> None:
        resident.committing = False
        if self._claimed_early and (early := self._claimed_early.pop(resident.id, None)) is not None:
            self._loop.call_soon(self.on_runs_claimed, [early[0]], early[1])
        if not isinstance(answer, (Committed, StoreError)):
            self.refused += 1
        if self.residents.get(resident.id) is not resident:
            return  # dropped meanwhile
        if isinstance(answer, Committed):
            resident.position += len(commit.entries) or 1  # one without entries takes a position too
            if self._hub.change_waiters:
                self._hub.changed((resident.id,), ended=False)
            if commit.extras is not None and commit.extras.released_assignments:
                self._suspended(self._clock.now())  # an event that it gives back wakes the next in line
            self._committed(resident, turn, commit, answer)
            if resident.changed_while_committing and turn.outcome is None:  # most often by its own turn: no hurry
                self._hub.changed((resident.id,))
                self._suspended(self._clock.now() + self._config.seconds("timer_resolution"))
        elif isinstance(answer, StoreError):
            self._on_unstorable_turn(resident, taken, answer)
        else:  # superseded, ended or gone: what is in memory counts for nothing
            LOGGER.info("run %s: a turn was refused (%s)", resident.id, type(answer).__name__)
            self._forget(resident)
            self._hub.changed((resident.id,))
            self._load([resident.id])

    def _committed(self, resident: CachedRun, turn: Turn, commit: CommitTurn, answer: Committed) -> None:
        if turn.outcome is not None or turn.held is not None:
            self._forget(resident)
            if commit.continue_as is not None and commit.patch is not None:
                self._suspended(commit.patch.wake_at)
            elif turn.outcome is not None and commit.patch is not None:
                record = ended_record(resident.record, commit.patch)
                self._hub.finished(record)
                self._finished(record, answer.has_messages or resident.seen > 0)
            elif answer.has_messages:
                self._suspended(self._clock.now())
            return
        if commit.patch is None:  # it goes on
            if answer.has_messages:  # and a time-out that is due waits until it is read
                self._fetch_mail(resident)
            self._after_commit(resident, turn)
            return
        self._start_effects(resident, turn, self._clock.now())
        resident.record = replace(resident.record, status=RunStatus.SUSPENDED, recoveries=0)
        if resident.wake_timer is not None:
            resident.wake_timer.cancel()
        resident.slept_at = self._clock.now()
        self.residents.suspend(resident)
        self._stopped(resident.id)
        self._suspended(self._clock.now() if answer.has_messages else turn.wake_at)

    def _after_commit(self, resident: CachedRun, turn: Turn) -> None:
        """The turn is durable, or needed no write: carry out its effects, and go on with what came meanwhile."""
        now = self._clock.now() if turn.effects else 0.0
        if turn.effects and not self._may_act(now):  # it may have been taken over since: that the store knows
            self._forget(resident)
            return
        self._start_effects(resident, turn, now)
        if turn.wake_at is not None or resident.wake_timer is not None:
            self._set_timer(resident, turn.wake_at)
        if resident.inputs or turn.more:
            self._loop.call_soon(self._advance_again, resident)

    def _advance_again(self, resident: CachedRun) -> None:
        if self.residents.active(resident.id) is resident:
            self._advance(resident)

    def _start_effects(self, resident: CachedRun, turn: Turn, now: float) -> None:
        for effect in turn.effects:
            match effect:
                case RunStep():
                    # An at-most-once attempt is on record as begun by now: not to begin it would be to interrupt it.
                    if not self.draining or effect.call.step.settings.at_most_once:
                        others = not resident.never_executed_elsewhere and resident.may_have_run(effect.attempt)
                        self.executor.start(resident.id, resident.record.workflow, effect, now, others)
                case CancelStep(location):
                    self.executor.cancel(resident.id, location)
                case ExternalEffect():
                    if not self.draining:  # else whoever is next derives it again
                        self.errands.start(resident.record, effect)
        resident.turns += 1

    def _set_timer(self, resident: CachedRun, wake_at: float | None) -> None:
        """Timers of an active run live in memory only; a suspended one is woken through the store."""
        if resident.wake_timer is not None:
            resident.wake_timer.cancel()
            resident.wake_timer = None
        if wake_at is not None:
            resident.wake_timer = self._clock.call_at(wake_at, lambda: self._advance_again(resident))

    # --- what goes wrong

    def _on_unstorable_turn(self, resident: CachedRun, taken: tuple[Input, ...], error: StoreError) -> None:
        """The store cannot take this turn, ever. Find the input that it came from and let that entry alone fail."""
        LOGGER.error("run %s: the store cannot take a turn: %s", resident.id, error)
        again: list[Input] = list(taken)
        if resident.single_input_mode or len(taken) <= 1:
            again = [as_failure(given, error, self._codec) for given in taken]
            if again == list(taken):
                self._forget(resident)
                held = Hold("unstorable", f"the store cannot take what the run came to: {error}")
                self._hold(resident.id, resident.position, resident.seen, held)
                return
        waiting = again + resident.inputs + resident.deferred_inputs
        definition = resident.definition
        self._forget(resident, keep_steps=True)
        self._spawn(self._replay_with(resident.id, definition, waiting))

    async def _replay_with(self, run_id: str, definition: Workflow[Any, Any], inputs: list[Input]) -> None:
        snapshot = (await self._retry_read(lambda: self._store.load([run_id])))[0]
        self._loop.call_soon(self._adopt_again, run_id, snapshot, definition, inputs)

    def _adopt_again(
        self, run_id: str, snapshot: Snapshot | None, definition: Workflow[Any, Any], inputs: list[Input]
    ) -> None:
        """Begin from the history, then give it the same inputs one by one: its steps are still under way here."""
        if snapshot is None or snapshot.record.owner != self.worker or self.residents.get(run_id) is not None:
            self.executor.cancel_all(run_id)
            self.errands.forget_all(run_id)
            return
        on_run_terminated = {given.location for given in inputs if isinstance(given, StepDone | AwaitingResult)}
        under_way = self._under_way(run_id) | on_run_terminated
        start = build_run_start(snapshot, definition, self._codec, self.keys, under_way=under_way)
        resident = build_cached_run(snapshot, start)
        feed_inputs_singly(resident, inputs)
        self.residents.add(resident)
        self._advance(resident)

    def _hold_poison_run(self, snapshot: Snapshot) -> None:
        record = snapshot.record
        reason = f"its worker died {record.recoveries} times while executing it; find out why, then resume it"
        self._hold(record.id, snapshot.position, record.last_message_no, Hold("poison", reason))

    def _hold(self, run_id: str, position: int, seen: int, held: Hold) -> None:
        LOGGER.error("run %s is held: %s", run_id, held.reason)
        write = build_hold_commit(run_id, position, seen, held, self.worker, self._clock.now())
        self._committer.submit(write, lambda answer: self._hub.changed((run_id,)))

    def _forget(self, resident: CachedRun, *, keep_steps: bool = False) -> None:
        if keep_steps:
            self.residents.evict(resident)
        else:
            self._drop(resident)
        self._stopped(resident.id)

    def _drop(self, resident: CachedRun) -> None:
        self.executor.cancel_all(resident.id)
        self.errands.forget_all(resident.id)
        self.residents.evict(resident)

    def _under_way(self, run_id: str) -> frozenset[str]:
        """The locations for which something is being done in this process."""
        return self.executor.running_locations(run_id) | self.errands.under_way(run_id)

    def _release_cached(self, resident: CachedRun) -> None:
        self._forget(resident)
        self._release(resident.id)

    def _release(self, run_id: str) -> None:
        write = ReleaseRun(run_id=run_id, worker=self.worker, now=self._clock.now())
        self._committer.submit(write, lambda answer: None)

    # --- tasks that read the store

    async def _retry_read(self, read: Callable[[], Any]) -> Any:
        """Read, however long the store is away."""
        return await retry_store_call(read, self._clock, self._config.store_retry)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
