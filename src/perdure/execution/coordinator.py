"""Coordinator: the state machine of the runs in this process, one transition at a time per run.

    event                 cause                                                transition
    on_run_created        a caller here created a run that this worker owns    attach, advance
    on_runs_claimed       the claimer claimed due runs                         activate the cached run, or load
    on_runs_found         the store names this worker as owner of runs         load those that are not in memory
    on_run_loaded         the loader read a run that this worker owns          attach; or release, hold, quarantine
    on_run_not_owned      the loader read a run that this worker does not own  free its slot
    on_load_failed        a run cannot be read or attached                     hold it (`RunFaults`)
    on_run_failed         handling a run raised outside of its own code        evict, hold it
    on_run_ready          a run was attached, or its messages were read        advance
    on_step_completed     an attempt of a step ended                           advance
    on_effects_completed  external effects of the run were executed            advance
    on_slow_steps         steps have been running for long                     advance, to record them as running
    on_step_progress      a running step has sent a heartbeat                  advance, to record it
    on_messages           a run has messages                                   fetch them, advance
    on_change_hint        the store reports a change, best effort              fetch messages now or after the commit
    _advance_if_active    a timer of an active run is due                      advance
    _continue_turn        the next time slice has started                      continue a paused turn
    _on_commit_result     the store returned the result of a turn              start effects; or evict and load again
    on_run_terminated     a caller ended or rewound the run                    evict
    discard_all           the store fenced the worker, or the engine stops     evict all

To advance a run is to run its workflow as far as its inputs allow (the runner decides), to submit the turn, and to
start the effects of the turn after it is committed. A turn that takes long is computed in several time slices. Inputs
that arrive meanwhile or during the commit wait for the next turn. Every transition is a plain callback of the event
loop, never inside a task, because the runner drives tasks of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from perdure.errors import StoreError
from perdure.execution.admission import NotAdmitted, RunAdmission
from perdure.execution.effect_runner import EffectRunner
from perdure.execution.external_effects import EffectOutcome, ExternalEffects
from perdure.execution.hold_fingerprints import HoldFingerprints
from perdure.execution.local_worker import LocalWorker
from perdure.execution.quarantine import Quarantine
from perdure.execution.run_cache import CachedRun, RunCache
from perdure.execution.run_faults import RunFaults
from perdure.execution.run_loader import RunLoader, inputs_to_retry, is_first_execution
from perdure.execution.run_log import log_dead_letters, log_extra, log_failed, log_held
from perdure.execution.step_executor import StepExecutor
from perdure.execution.store_session import StoreSession
from perdure.execution.stream_writer import StreamWriter
from perdure.execution.time_slices import TimeSlices
from perdure.execution.turn_commit import build_hold_commit, build_turn_commit, ended_record, next_turn
from perdure.model.records import Hold, RunRecord, RunStatus, SigningKey
from perdure.model.tags import merge_tags
from perdure.model.turns import Failed, Input, RecordProgress, RecordRunningSteps, StepDone, Turn
from perdure.stores.results import ClaimedRun, Committed, Snapshot, WriteResult
from perdure.stores.writes import CommitTurn, ReleaseRun
from perdure.workflows.definition import Workflow, WorkflowLookup

LOGGER = logging.getLogger("perdure.execution")


class Coordinator:
    """Holds the runs of one worker.

    `on_due_at` receives the time at which a suspended run is due, `on_slot_freed` is called when the worker can claim
    more, `on_run_ended` receives an ended run and whether it had messages, `may_act` says whether the lease is valid.
    """

    def __init__(
        self,
        session: StoreSession,
        local_worker: LocalWorker,
        *,
        workflows: WorkflowLookup,
        on_due_at: Callable[[float | None], None],
        on_slot_freed: Callable[[], None],
        on_run_ended: Callable[[RunRecord, bool], None],
        on_ended_unread: Callable[[str], None],
        may_act: Callable[[float], bool],
        concurrency: int | None = None,
    ) -> None:
        self.worker = ""
        self.keys: tuple[SigningKey, ...] = ()  # sign the tokens of deferreds
        self.workflows = workflows
        self.rejected_turns = 0  # turns that the store rejected because this worker no longer owned the run
        self.cache = RunCache(session.config.resident_runs)
        self.fingerprints = HoldFingerprints()
        self._clock = session.clock
        self._codec = session.codec
        self._config = session.config
        self._committer = session.committer
        self._waiters = session.waiters
        self._on_due_at = on_due_at
        self._on_run_ended = on_run_ended
        self._on_ended_unread = on_ended_unread
        self._may_act = may_act
        self._loop = asyncio.get_running_loop()
        self.slices = TimeSlices(session.clock)
        self.should_pause = self.slices.is_used_up
        # Claims of runs whose suspending turn is committed, but whose commit result has not arrived here yet.
        self._claimed_early: dict[str, tuple[ClaimedRun, float | None]] = {}
        self._faults = RunFaults(session, lambda: self.worker, lambda run_id: self.on_runs_found([run_id]))
        steps, stream_writer = session.config.max_concurrent_steps, StreamWriter(session, lambda: self.worker)
        self.executor = StepExecutor(
            session.clock, session.codec, steps, self.on_step_completed, self.on_step_progress, stream_writer
        )
        self.external_effects = ExternalEffects(session, local_worker, self.on_effects_completed)
        self._effects = EffectRunner(self.executor, self.external_effects)
        self.loader = RunLoader(session, self.cache, self._effects, self)
        self._admission = RunAdmission(
            session.config,
            self.cache,
            self.loader,
            Quarantine(session.clock, self._on_suspect_start, on_slot_freed),
            find_workflow=workflows.find,
            on_slot_freed=on_slot_freed,
            concurrency=concurrency,
        )

    # --- runs of this worker

    def on_run_created(self, record: RunRecord, definition: Workflow[Any, Any]) -> None:
        """Attach a run that was created here, without loading what was just written."""
        cached = self.cache.get(record.id)
        if cached is None:
            if self.loader.is_loading(record.id):
                self._effects.cancel_all(record.id)  # of an earlier run with this id
            self._attach(Snapshot(record, 0, (), ()), definition, never_executed=True)
        elif not cached.active:
            self.on_runs_found((record.id,))  # the cached run was pruned, and its id is used again

    def on_runs_claimed(self, runs: Sequence[ClaimedRun], at: float | None = None) -> None:
        """Activate cached runs that are up to date; load the other runs in one store call.

        May be called from a task: all transitions that follow are plain callbacks.
        """
        now, retention = self._clock.now(), self._config.seconds("run_retention")
        missing: list[str] = []
        for run in runs:
            cached = self.cache.get(run.id)
            if cached is not None and not cached.active and not cached.is_current(run.position, now, retention):
                self._evict(cached)  # another worker has executed the run: this copy would repeat its steps
                cached = None
            if cached is None:
                missing.append(run.id)
            elif not cached.active:
                self.cache.activate(cached)
                if run.last_message_no > cached.seen:
                    self.loader.fetch_messages(cached)
                else:
                    self._loop.call_soon(self._advance_if_active, cached)
            elif cached.committing:
                # The turn that suspends the run is committed and the run is due again, but the commit result is still
                # on its way. The claim takes effect when that result arrives.
                self._claimed_early[run.id] = (run, at)
        self.on_runs_found(missing, at, {run.id: run.position for run in runs})

    def on_runs_found(
        self, run_ids: Sequence[str], claimed_at: float | None = None, positions: Mapping[str, int] | None = None
    ) -> None:
        """Load runs that this worker owns in the store and that are not active in memory."""
        for run_id in run_ids:
            cached = self.cache.get(run_id)
            if cached is not None and not cached.active:
                self._evict(cached)  # the result of the claim was lost: nothing else would activate this copy
        self.loader.load([run_id for run_id in run_ids if self.cache.get(run_id) is None], claimed_at, positions)

    def on_run_loaded(self, snapshot: Snapshot, claimed_at: float | None) -> None:
        """Attach a loaded run; or release it, hold it as poison, or keep it in quarantine."""
        record = snapshot.record
        match self._admission.decide(record):
            case Workflow() as definition:
                never_executed = claimed_at is not None and is_first_execution(snapshot, claimed_at)
                self._attach(snapshot, definition, never_executed=never_executed)
            case Hold() as hold:
                self._hold(record, snapshot.position, record.last_message_no, hold)
            case NotAdmitted.RELEASE:
                self._release(record.id)
            case NotAdmitted.WAIT:
                pass  # `_on_suspect_start` loads it again

    def _on_suspect_start(self, run_id: str) -> None:
        """Load the suspect again and execute it: a caller may have ended it while it waited."""
        self.on_runs_found([run_id])

    def on_run_not_owned(self, run_id: str) -> None:
        self._admission.on_run_stopped(run_id)

    def on_load_failed(self, run_id: str, cause: Exception | str, position: int | None) -> None:
        """Hold a run that cannot be read or attached.

        The hold needs the position of the run. If it is unknown, the run is released: the next claim returns it.
        """
        if position is None:
            self._release(run_id)
        else:
            self._faults.hold(run_id, position, cause)
        if (cached := self.cache.get(run_id)) is not None:
            self._evict(cached)
        else:
            self._admission.on_run_stopped(run_id)

    def on_run_failed(self, cached: CachedRun, error: Exception) -> None:
        """Hold a run of this worker that raised outside of its own code."""
        workflow = cached.record.workflow
        self._faults.hold(cached.id, cached.position, error, seen=cached.seen, workflow=workflow)
        self._evict(cached)

    def _attach(self, snapshot: Snapshot, definition: Workflow[Any, Any], *, never_executed: bool) -> None:
        try:
            self.loader.attach(snapshot, definition, never_executed=never_executed)
        except Exception as error:
            self.on_load_failed(snapshot.record.id, error, snapshot.position)

    def on_run_ready(self, cached: CachedRun) -> None:
        self._advance(cached)

    # --- inputs

    def on_step_completed(self, run_id: str, done: StepDone) -> None:
        if done.notes is None:
            self._add_input(run_id, done)
        else:
            self._add_progress(run_id, done)

    def on_effects_completed(self, run_id: str, outcomes: Sequence[EffectOutcome]) -> None:
        cached = self.cache.active(run_id)
        if cached is not None:
            (cached.deferred_inputs if cached.more_messages else cached.inputs).extend(outcomes)
            self._advance(cached)

    def on_slow_steps(self, run_id: str, locations: tuple[str, ...]) -> None:
        """Record these steps as running. May be called from a task."""
        self._loop.call_soon(self._add_input, run_id, RecordRunningSteps(locations))

    def on_step_progress(self, run_id: str, progress: RecordProgress) -> None:
        """Record the progress of a running step. May be called from a task."""
        self._loop.call_soon(self._add_progress, run_id, progress)

    def _add_progress(self, run_id: str, given: StepDone | RecordProgress) -> None:
        """Add an input after which the row of a pending step may have notes."""
        cached = self.cache.active(run_id)
        if cached is not None and cached.progress_rows is None:
            cached.progress_rows = {}
        self._add_input(run_id, given)

    def _add_input(self, run_id: str, given: Input) -> None:
        cached = self.cache.active(run_id)
        if cached is not None:
            (cached.deferred_inputs if cached.more_messages else cached.inputs).append(given)
            self._advance(cached)

    def on_messages(self, run_ids: Iterable[str]) -> None:
        """Fetch the messages of those runs that are active here."""
        for run_id in run_ids:
            cached = self.cache.active(run_id)
            if cached is not None and cached.turn_paused:
                cached.fetch_after_turn = True  # the commit of the turn must not name messages that it has not seen
            elif cached is not None:
                self.loader.fetch_messages(cached)

    def on_change_hint(self, run_ids: Iterable[str]) -> None:
        """Fetch the messages of changed runs, unless the change may be a turn of this worker.

        A change hint during a commit is most often about that turn. It may also be about a message that arrived
        right after the turn and that the commit result does not report: `_on_commit_result` checks for one.
        """
        for run_id in run_ids:
            cached = self.cache.active(run_id)
            if cached is not None and cached.committing:
                cached.changed_while_committing = True
            elif cached is not None and cached.turn_paused:
                cached.fetch_after_turn = True
            elif cached is not None:
                self.loader.fetch_messages(cached)

    def on_run_terminated(self, run_id: str) -> None:
        """Evict a run that a caller ended or rewound, and cancel its steps."""
        cached = self.cache.get(run_id)
        if cached is not None:
            self._evict(cached)

    # --- capacity and shutdown

    @property
    def draining(self) -> bool:
        """Whether the worker shuts down: it claims no runs, starts no steps, and releases runs that execute none."""
        return self._admission.draining

    @property
    def free_slots(self) -> int:
        """The number of further runs that this worker may claim."""
        return self._admission.free_slots

    @property
    def is_busy(self) -> bool:
        """Whether a read, a turn, a step or an external effect is in progress."""
        return self.loader.is_busy or self._effects.is_busy or self.slices.is_busy

    def is_committing(self, run_id: str) -> bool:
        """Return whether a turn of this run is being committed."""
        cached = self.cache.active(run_id)
        return cached is not None and cached.committing

    def has_run(self, run_id: str) -> bool:
        """Return whether this run is active here, is being loaded, or waits in quarantine."""
        return self.cache.active(run_id) is not None or self.loader.is_loading(run_id) or self._admission.keeps(run_id)

    def discard_all(self) -> None:
        """Evict all runs and cancel all steps, without a write to the store."""
        self._claimed_early.clear()
        self._admission.clear()
        for cached in self.cache:
            self._effects.cancel_all(cached.id)
            self.cache.evict(cached)

    def drain(self) -> bool:
        """Start no more steps and release the runs that execute none; return True when no run is active."""
        self._admission.draining = True
        for cached in self.cache.all_active():
            in_turn = cached.committing or cached.turn_paused or cached.turn_queued
            if not in_turn and not self._effects.running_locations(cached.id):
                self._evict_and_release(cached)
        return not self.cache.all_active()

    def release_all(self) -> None:
        """Release all active runs, also those whose steps still execute."""
        for cached in self.cache.all_active():
            self._evict_and_release(cached)

    # --- turns

    def _advance(self, cached: CachedRun) -> None:
        if cached.committing or cached.fetching or cached.turn_paused or cached.turn_queued:
            return
        now = self._clock.now()
        if not self.slices.admits(now):
            cached.turn_queued = True
            self.slices.queue(partial(self._start_queued_turn, cached))
            return
        cached.single_input_mode = cached.single_input_mode and len(cached.inputs) > 0
        taken = cached.inputs[:1] if cached.single_input_mode else cached.inputs
        cached.inputs = cached.inputs[1:] if cached.single_input_mode else []
        self._compute_turn(cached, now, taken)

    def _start_queued_turn(self, cached: CachedRun) -> None:
        cached.turn_queued = False
        self._advance_if_active(cached)

    def _continue_turn(self, cached: CachedRun, now: float, taken: Sequence[Input]) -> None:
        """Continue a turn that was paused, unless the run was evicted meanwhile."""
        cached.turn_paused = False
        if self.cache.active(cached.id) is cached:
            self._compute_turn(cached, now, taken, paused_before=True)

    def _compute_turn(
        self, cached: CachedRun, now: float, taken: Sequence[Input], *, paused_before: bool = False
    ) -> None:
        """Compute a turn that started at `now`, or its next part. Submit it when it is complete."""
        try:
            turn = next_turn(cached, now, taken, self.worker, paused_before=paused_before)
            if turn is None:
                cached.turn_paused = True
                self.slices.queue(partial(self._continue_turn, cached, now, taken))
                return
            if turn.held is not None:
                turn = replace(turn, held=self.fingerprints.add_to(turn.held, cached))
            commit = build_turn_commit(cached, turn, self.worker, now, self._config)
            if commit is None:
                self._after_commit(cached, turn)
            else:
                cached.committing, cached.changed_while_committing = True, False
                self._committer.submit(commit, partial(self._on_commit_result, cached, turn, commit, tuple(taken)))
            if cached.fetch_after_turn:
                cached.fetch_after_turn = False
                self.loader.fetch_messages(cached)
        except Exception as error:
            self.on_run_failed(cached, error)
        except BaseException:  # KeyboardInterrupt: drop the turn and release the run, so that it can be claimed again
            self._evict_and_release(cached)
            raise

    def _advance_if_active(self, cached: CachedRun) -> None:
        if self.cache.active(cached.id) is cached:
            self._advance(cached)

    def _on_commit_result(
        self,
        cached: CachedRun,
        turn: Turn,
        commit: CommitTurn,
        taken: tuple[Input, ...],
        result: WriteResult | StoreError,
    ) -> None:
        try:
            self._handle_commit_result(cached, turn, commit, taken, result)
        except Exception as error:
            if isinstance(result, Committed):
                cached.position = max(cached.position, commit.base + (len(commit.entries) or 1))
            self.on_run_failed(cached, error)

    def _handle_commit_result(
        self,
        cached: CachedRun,
        turn: Turn,
        commit: CommitTurn,
        taken: tuple[Input, ...],
        result: WriteResult | StoreError,
    ) -> None:
        cached.committing = False
        if self._claimed_early and (early := self._claimed_early.pop(cached.id, None)) is not None:
            self._loop.call_soon(self.on_runs_claimed, [early[0]], early[1])
        if not isinstance(result, (Committed, StoreError)):
            self.rejected_turns += 1
        if self.cache.get(cached.id) is not cached:
            return  # evicted during the commit
        if isinstance(result, Committed):
            cached.position += len(commit.entries) or 1  # a turn without entries takes a position too
            if self._waiters.change_waiters:
                self._waiters.notify((cached.id,), ended=False)
            if commit.extras is not None:
                if commit.extras.released_assignments:
                    self._on_due_at(self._clock.now())  # the released event is assigned to the next subscriber, now due
                log_dead_letters(cached.record, commit.extras.dead_letters, self.worker)
                if commit.extras.tags:
                    cached.record = replace(cached.record, tags=merge_tags(cached.record.tags, commit.extras.tags))
            self._on_committed(cached, turn, commit, result)
            if cached.changed_while_committing and turn.outcome is None:
                # Most often the change hint was about the turn itself, so the claimer checks after a short delay.
                self._waiters.notify((cached.id,))
                self._on_due_at(self._clock.now() + self._config.seconds("timer_resolution"))
        elif isinstance(result, StoreError):
            self._on_unstorable_turn(cached, taken, result)
        else:  # another worker has advanced the run, a caller has ended it, or the store has fenced this worker
            extra = log_extra(cached.record, self.worker)
            LOGGER.info("Run %s: turn rejected (%s); reloading", cached.id, type(result).__name__, extra=extra)
            self._evict(cached)
            self._waiters.notify((cached.id,))
            self.loader.load([cached.id])

    def _on_committed(self, cached: CachedRun, turn: Turn, commit: CommitTurn, result: Committed) -> None:
        """Continue after a committed turn: the run ended or is held, continues, or suspends."""
        if turn.outcome is not None or turn.held is not None:
            self._evict(cached)
            self._log_stop(cached.record, turn, commit)
            if commit.continue_as is not None and commit.patch is not None:
                self._on_due_at(commit.patch.wake_at)
            elif turn.outcome is not None and commit.patch is not None:
                record = ended_record(cached.record, commit.patch)
                self._waiters.notify_ended(record)
                self._on_run_ended(record, result.has_messages or cached.seen > 0)
                if result.has_messages:
                    self._on_ended_unread(record.id)
            else:
                self._waiters.notify((cached.id,))
                self._on_due_at(self._clock.now() if result.has_messages else None)
        elif commit.patch is None:  # the run continues
            if result.has_messages:  # a timeout that is due must not fire before these messages are read
                self.loader.fetch_messages(cached)
            self._after_commit(cached, turn)
        else:
            self._effects.start(cached, turn, self._clock.now(), draining=self._admission.draining)
            cached.record = replace(cached.record, status=RunStatus.SUSPENDED, recoveries=0)
            cached.set_timer(self._clock, None, self._advance_if_active)  # the timer is `wake_at` in the store now
            cached.suspended_at = self._clock.now()
            self.cache.suspend(cached)
            self._admission.on_run_stopped(cached.id)
            self._on_due_at(self._clock.now() if result.has_messages else turn.wake_at)

    def _log_stop(self, record: RunRecord, turn: Turn, commit: CommitTurn) -> None:
        """Log a turn that holds the run or that ends a generation of it as failed."""
        if turn.held is not None:
            log_held(record, turn.held, self.worker)
        elif isinstance(turn.outcome, Failed):
            wake_at = commit.patch.wake_at if commit.patch is not None else None
            log_failed(record, turn.outcome.error, self.worker, None if wake_at is None else wake_at - commit.now)

    def _after_commit(self, cached: CachedRun, turn: Turn) -> None:
        """Start the effects of a turn that is durable or needed no write, and continue with inputs that arrived."""
        now = self._clock.now() if turn.effects else 0.0
        if turn.effects and not self._may_act(now):
            self._evict(cached)  # the lease has expired: another worker may own the run by now
            return
        self._effects.start(cached, turn, now, draining=self._admission.draining)
        if turn.wake_at is not None or cached.wake_timer is not None:
            cached.set_timer(self._clock, turn.wake_at, self._advance_if_active)
        if cached.inputs or turn.more:
            self._loop.call_soon(self._advance_if_active, cached)

    # --- failures and release

    def _on_unstorable_turn(self, cached: CachedRun, taken: tuple[Input, ...], error: StoreError) -> None:
        """Find the input whose turn the store can never store, and fail the step that it belongs to.

        The run is replayed and takes the inputs one per turn. When a turn with one step result fails again, that
        result is replaced by a failure of the step. A turn without such a result holds the run.
        """
        extra = log_extra(cached.record, self.worker)
        LOGGER.warning("Run %s: turn cannot be stored: %s", cached.id, error, extra=extra)
        retried = inputs_to_retry(cached, taken, error, self._codec)
        if retried is None:
            self._evict(cached)
            hold = Hold("unstorable", f"the store cannot store a turn of the run: {error}")
            self._hold(cached.record, cached.position, cached.seen, hold)
            return
        waiting = retried + cached.inputs + cached.deferred_inputs
        self.cache.evict(cached)  # its steps continue: the replay expects their results
        self._admission.on_run_stopped(cached.id)
        self.loader.reload_with_inputs(cached.id, cached.definition, waiting)

    def _hold(self, record: RunRecord, position: int, seen: int, hold: Hold) -> None:
        log_held(record, hold, self.worker)
        write = build_hold_commit(record.id, position, seen, hold, self.worker, self._clock.now())
        if write.extras is not None:
            log_dead_letters(record, write.extras.dead_letters, self.worker)
        self._committer.submit(write, lambda result: self._waiters.notify((record.id,)))

    def _evict(self, cached: CachedRun) -> None:
        """Remove a run from memory and cancel its steps. The store is not written."""
        self._effects.cancel_all(cached.id)
        self.cache.evict(cached)
        self._admission.on_run_stopped(cached.id)

    def _evict_and_release(self, cached: CachedRun) -> None:
        self._evict(cached)
        self._release(cached.id)

    def _release(self, run_id: str) -> None:
        """Give up ownership in the store, so that a worker can claim the run."""
        write = ReleaseRun(run_id=run_id, worker=self.worker, now=self._clock.now())
        self._committer.submit(write, lambda result: None)
