"""ExternalEffects: what a run does to other runs and to topics: send, broadcast, start, observe and stop.

An effect starts after the turn that requests it is committed. It consists of a few writes through the committer and
ends with a `StepDone` or, if a message will bring the result, with `AwaitingResult`. All ids derive from the entry, so
effects are idempotent: after a crash a replay requests them again, and the second execution changes nothing. An
unavailable store delays an effect; an error that is not retryable fails the entry. This module decides nothing about
runs and writes no history.

A run may start thousands of children at once. The start of a child is one write and needs no task; children are
submitted in chunks, so that the store writes the first ones while the next are prepared.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from perdure.codec import JSON
from perdure.codec.failures import error_to_record_lossy
from perdure.errors import QueueFull, RunConflict, RunNotFound, RunTerminated, StoreError, WorkflowMisuse
from perdure.execution.local_worker import LocalWorker
from perdure.execution.open_children import OpenChild, is_of_earlier_run, open_children
from perdure.execution.periodic import is_cancelled_from_outside
from perdure.execution.queue_arrivals import raise_for_place, refuse_cycle
from perdure.execution.retry_queue import WriteCallback
from perdure.execution.store_session import StoreSession
from perdure.execution.store_writes import build_end_run, cancel_message, publish_event, raise_for_delivery
from perdure.model.ids import incarnation_of, origin_of
from perdure.model.records import RunRecord, RunResult
from perdure.model.turns import (
    AwaitingResult,
    BroadcastEvent,
    ChildIdTaken,
    ExternalEffect,
    ObserveRun,
    SendEvent,
    StartChild,
    StepDone,
    StopChildren,
    StopRun,
)
from perdure.stores.results import (
    AlreadyEnded,
    Committed,
    Created,
    IdTaken,
    MessageDelivered,
    ObserverAdded,
    RunMissing,
    WriteResult,
)
from perdure.stores.writes import CreateRun, DeliverMessage, Observer, ObserveRunEnd, Write
from perdure.workflows.start_request import StartRequest, build_child_start_request, check_same_run, claimed_at_creation

LOGGER = logging.getLogger("perdure.execution")
T = TypeVar("T")
EXPECTED_ERRORS = (RunNotFound, RunTerminated, RunConflict, QueueFull, WorkflowMisuse)  # by the workflow
CHILD_CHUNK = 64  # children per iteration of the event loop

EffectOutcome = StepDone | AwaitingResult | ChildIdTaken
EffectsCallback = Callable[[str, list[EffectOutcome]], None]  # receives the run id and the outcomes
EffectValue = bytes | tuple[str, ...] | AwaitingResult | ChildIdTaken  # encoded, or the runs whose ends it awaits


class ChildStart:
    """The start of a child that is queued or being written."""

    __slots__ = ("cancelled", "effect", "parent", "work")

    def __init__(self, parent: RunRecord, effect: ExternalEffect, work: StartChild) -> None:
        self.parent = parent
        self.effect = effect
        self.work = work
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


RunningEffect = asyncio.Task[None] | ChildStart


class ExternalEffects:
    """The external effects of all runs in this process.

    `on_completed` is called from the event loop, never from inside a task. Outcomes of one iteration of the loop are
    reported together.
    """

    def __init__(self, session: StoreSession, local_worker: LocalWorker, on_completed: EffectsCallback) -> None:
        self._session = session
        self._local_worker = local_worker
        self._on_completed = on_completed
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, dict[str, RunningEffect]] = {}  # by run and location
        self._queued_child_starts: list[ChildStart] = []
        self._completed: list[tuple[str, EffectOutcome, RunningEffect | None]] = []  # not reported yet

    def start(self, record: RunRecord, effect: ExternalEffect) -> None:
        """Execute an effect of a run. It replaces an earlier execution for the same entry, which reports nothing."""
        of_run = self._running.setdefault(record.id, {})
        if not isinstance(effect.work, StartChild):
            of_run[effect.location] = self._loop.create_task(self._run(record, effect, self._execute(record, effect)))
            return
        of_run[effect.location] = child_start = ChildStart(record, effect, effect.work)
        self._queued_child_starts.append(child_start)
        if len(self._queued_child_starts) == 1:
            self._loop.call_soon(self._start_children_chunk)

    def running_locations(self, run_id: str) -> frozenset[str]:
        """Return the locations of the run's entries whose effects are executing."""
        return frozenset(self._running.get(run_id, ()))

    def cancel_all(self, run_id: str) -> None:
        """Report nothing more of the run's effects. Writes that are submitted stay submitted; they are idempotent."""
        for running in self._running.pop(run_id, {}).values():
            running.cancel()

    @property
    def busy(self) -> int:
        """The number of effects that are executing."""
        return sum(len(of_run) for of_run in self._running.values())

    async def _run(
        self, record: RunRecord, effect: ExternalEffect, execution: Coroutine[Any, Any, EffectValue]
    ) -> None:
        try:
            outcome = _build_outcome(effect, await execution)
        except (Exception, asyncio.CancelledError) as error:
            if is_cancelled_from_outside(error):
                raise
            outcome = self._failure(record, effect, error)
        self._complete(record.id, outcome, asyncio.current_task())

    async def _execute(self, record: RunRecord, effect: ExternalEffect) -> EffectValue:
        match effect.work:
            case SendEvent():
                return await self._send(effect.work)
            case BroadcastEvent():
                return await self._broadcast(effect.work)
            case ObserveRun(run_id, target):
                write = ObserveRunEnd(run_id=run_id, observer=record.id, target=target)
                return self._observed_end(run_id, await self._write(write))
            case StopRun():
                return await self._stop(record, effect.location, effect.work)
            case StopChildren(target):
                return await self._stop_children(record, target)
            case StartChild():
                raise AssertionError("the start of a child runs without a task")

    # --- completion

    def _failure(self, record: RunRecord, effect: ExternalEffect, error: BaseException) -> StepDone:
        if not isinstance(error, EXPECTED_ERRORS):
            extra = {"run_id": record.id, "workflow": record.workflow}
            LOGGER.error(
                "Run %s: external effect at %s failed", record.id, effect.location, exc_info=error, extra=extra
            )
        return StepDone(
            effect.location, effect.attempt, error=error_to_record_lossy(error, self._session.codec, effect.location)
        )

    def _complete(self, run_id: str, outcome: EffectOutcome, execution: RunningEffect | None) -> None:
        self._completed.append((run_id, outcome, execution))
        if len(self._completed) == 1:
            self._loop.call_soon(self._report_completed)

    def _report_completed(self) -> None:
        completed, self._completed = self._completed, []
        outcomes: dict[str, list[EffectOutcome]] = {}
        for run_id, outcome, execution in completed:
            of_run = self._running.get(run_id, {})
            if of_run.get(outcome.location) is not execution:
                continue  # cancelled or replaced meanwhile
            del of_run[outcome.location]
            if not of_run:
                del self._running[run_id]
            outcomes.setdefault(run_id, []).append(outcome)
        for run_id, outcomes_of_run in outcomes.items():
            self._on_completed(run_id, outcomes_of_run)

    # --- events

    async def _send(self, work: SendEvent) -> bytes:
        limit = self._session.config.max_pending_events
        write = DeliverMessage(run_id=work.run_id, message=work.message, now=self._session.clock.now(), limit=limit)
        raise_for_delivery(work.run_id, await self._write(write), work.message.name)
        self._local_worker.run_has_messages(work.run_id)
        return self._session.codec.encode(None)

    async def _broadcast(self, work: BroadcastEvent) -> bytes:
        woken = await publish_event(work.event, self._session, wait_for_store=True)
        if woken:
            self._local_worker.runs_may_be_due()
        return self._session.codec.encode(woken)

    # --- starting children

    def _start_children_chunk(self) -> None:
        queued = self._queued_child_starts
        chunk, self._queued_child_starts = queued[:CHILD_CHUNK], queued[CHILD_CHUNK:]
        if self._queued_child_starts:
            self._loop.call_soon(self._start_children_chunk)
        for child_start in chunk:
            if child_start.cancelled:
                continue
            try:
                self._submit_child(child_start)
            except Exception as error:
                outcome = self._failure(child_start.parent, child_start.effect, error)
                self._complete(child_start.parent.id, outcome, child_start)

    def _submit_child(self, child_start: ChildStart) -> None:
        """Submit the creation of the child together with its observer, so that it cannot end unobserved."""
        work, parent, local_worker = child_start.work, child_start.parent, self._local_worker
        request = build_child_start_request(
            work, work.definition, parent, self._session.config, self._session.clock.now()
        )
        observer = None if work.target is None else Observer(parent.id, work.target)
        if request.place is not None and request.place.queue in request.record.ancestor_queues:
            of_run = self._running[parent.id]
            execution = self._run(parent, child_start.effect, self._start_in_own_queue(child_start, request, observer))
            of_run[child_start.effect.location] = self._loop.create_task(execution)
            return
        owner = None if request.place is not None else local_worker.owner_for_new_run(work.definition)
        notify_worker: WriteCallback
        if owner is None:
            record, notify_worker = request.record, partial(_notify_of_child, local_worker, request.record.id)
        else:
            record = claimed_at_creation(request.record, owner)
            notify_worker = local_worker.on_created_callback(record, work.definition)
        on_result = partial(self._on_child_created, child_start, request, notify_worker)
        write = CreateRun(record, observer=observer, place=request.place)
        self._session.committer.submit(write, on_result, wait_for_store=True)

    async def _start_in_own_queue(
        self, child_start: ChildStart, request: StartRequest, observer: Observer | None
    ) -> EffectValue:
        """Start a child in a queue in which its parent, or an ancestor of that, may hold a slot."""
        assert request.place is not None
        await refuse_cycle(self._session.store, child_start.parent, request.place, self._read)
        result = await self._write(CreateRun(request.record, observer=observer, place=request.place))
        if isinstance(result, Created):
            return self._build_start_value(child_start, result, created=True)
        return await self._use_existing_child(child_start, request, result)

    def _on_child_created(
        self,
        child_start: ChildStart,
        request: StartRequest,
        notify_worker: WriteCallback,
        result: WriteResult | StoreError,
    ) -> None:
        try:
            self._continue_child_start(child_start, request, notify_worker, result)
        except Exception as error:
            outcome = self._failure(child_start.parent, child_start.effect, error)
            self._complete(child_start.parent.id, outcome, child_start)

    def _continue_child_start(
        self,
        child_start: ChildStart,
        request: StartRequest,
        notify_worker: WriteCallback,
        result: WriteResult | StoreError,
    ) -> None:
        notify_worker(result)
        if child_start.cancelled:
            return
        parent, effect = child_start.parent, child_start.effect
        if isinstance(result, Created):
            value = self._build_start_value(child_start, result, created=True)
            self._complete(parent.id, _build_outcome(effect, value), child_start)
            return
        of_run = self._running.get(parent.id, {})
        if of_run.get(effect.location) is child_start:
            execution = self._run(parent, effect, self._use_existing_child(child_start, request, result))
            of_run[effect.location] = self._loop.create_task(execution)

    async def _use_existing_child(
        self, child_start: ChildStart, request: StartRequest, result: WriteResult | StoreError
    ) -> EffectValue:
        """Observe the run that has the id of the child already; raise `RunConflict` if it is a different run."""
        if isinstance(result, StoreError):
            raise result
        if request.place is not None:
            raise_for_place(request.place, result)
        if isinstance(result, IdTaken):
            existing, parent = result.record, child_start.parent
            is_child = child_start.work.fallback_id is not None and existing.parent == parent.id
            if is_child and is_of_earlier_run(existing, parent):
                return ChildIdTaken(child_start.effect.location)
            check_same_run(request, result.record, self._session.codec)
            target = child_start.work.target
            if target is not None:
                write = ObserveRunEnd(run_id=request.record.id, observer=child_start.parent.id, target=target)
                result = await self._write(write)
        return self._build_start_value(child_start, result, created=False)

    def _build_start_value(self, child_start: ChildStart, result: WriteResult, *, created: bool) -> EffectValue:
        work = child_start.work
        if work.target is None:
            return JSON.encode({"id": work.run_id, "created": created})  # no value of a user: it has no limit
        end = self._observed_end(work.run_id, result)
        return AwaitingResult(child_start.effect.location, end, created=created) if isinstance(end, tuple) else end

    def _observed_end(self, run_id: str, result: WriteResult) -> EffectValue:
        """Return the encoded result of a run that has ended, or its id if a message will bring the result."""
        if isinstance(result, RunMissing):
            raise RunNotFound(run_id)
        if isinstance(result, AlreadyEnded):
            return msgspec.json.encode(result.result or RunResult(result.status))
        self._local_worker.run_is_observed(run_id)
        return (run_id,)

    # --- stopping runs

    async def _stop(self, record: RunRecord, location: str, work: StopRun) -> bytes:
        """Cancel a run as a caller would; return whether it was requested. An ended or missing run is ignored."""
        run_id, now, config = work.run_id, self._session.clock.now(), self._session.config
        message_id = f"cancel/{_origin(record)}/{record.generation}/{location}"
        found = (await self._read(lambda: self._session.store.records([run_id])))[0]
        retention = found.retention if isinstance(found, RunRecord) else None
        end = build_end_run(run_id, f"end/{message_id}", now, config, retention=retention, only_if_not_started=True)
        delivery = DeliverMessage(run_id=run_id, message=cancel_message(message_id, now, work.reason), now=now)
        # The message keeps the reason. Both writes are in one batch: no worker executes the run in between.
        delivered = None if work.reason is None else self._write(delivery)
        ended = await self._write(end)
        if isinstance(ended, Committed):
            self._notify_of_end(run_id)
        elif delivered is None:  # to an ended run too: a repeated call finds the message of the first one
            delivered = self._write(delivery)
        requested = isinstance(ended, Committed)
        if delivered is not None and isinstance(await delivered, MessageDelivered):
            requested = True
            self._local_worker.run_has_messages(run_id)
        return self._session.codec.encode(requested)

    async def _stop_children(self, record: RunRecord, target: str) -> EffectValue:
        """Cancel all open children, a page at a time; return those that have started and will report their end."""
        awaited: list[str] = []
        async for page in open_children(self._session.store, record, self._read):
            awaited += await self._stop_page(record, target, page)
        return tuple(awaited) or self._session.codec.encode(None)

    async def _read(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._session.read(call, retry_forever=True)

    async def _stop_page(self, record: RunRecord, target: str, page: Sequence[OpenChild]) -> list[str]:
        now, config = self._session.clock.now(), self._session.config
        name = f"cancel/{_origin(record)}/{target}"
        children = [child.id for child in page]
        ends = [
            self._write(
                build_end_run(child.id, f"end/{name}", now, config, retention=child.retention, only_if_not_started=True)
            )
            for child in page
        ]
        # Observe before the cancellation is delivered: the end of the child must not be missed.
        observations = [
            self._write(ObserveRunEnd(run_id=child, observer=record.id, target=target)) for child in children
        ]
        results = await asyncio.gather(*ends, *observations)
        for child, result in zip(children, results, strict=False):
            if isinstance(result, Committed):
                self._notify_of_end(child)
        observed = zip(children, results[len(children) :], strict=True)
        awaited = [child for child, result in observed if isinstance(result, ObserverAdded)]
        message = cancel_message(name, now)
        await asyncio.gather(
            *(self._write(DeliverMessage(run_id=child, message=message, now=now)) for child in awaited)
        )
        for child in awaited:
            self._local_worker.run_is_observed(child)
            self._local_worker.run_has_messages(child)
        return awaited

    def _notify_of_end(self, run_id: str) -> None:
        """Notify worker and waiters that a run which had not started was ended."""
        self._local_worker.run_ended_externally(run_id)
        self._session.waiters.notify((run_id,))

    def _write(self, write: Write) -> asyncio.Future[WriteResult]:
        """Submit a write at once and return a future for its result."""
        return self._session.committer.submit_future(write, wait_for_store=True)


def _build_outcome(effect: ExternalEffect, value: EffectValue) -> EffectOutcome:
    if isinstance(value, AwaitingResult | ChildIdTaken):
        return value
    if isinstance(value, tuple):
        return AwaitingResult(effect.location, value)
    return StepDone(effect.location, effect.attempt, value=value)


def _origin(record: RunRecord) -> str:
    return origin_of(record.id, incarnation_of(record.created_by))


def _notify_of_child(local_worker: LocalWorker, run_id: str, result: WriteResult | StoreError) -> None:
    local_worker.run_has_messages(run_id)
