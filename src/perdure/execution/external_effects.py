"""Errands: what a run asks to be done to other runs and to topics, after the turn that asked for it is committed.

Each is a short conversation with the store, through the committer, and ends with a `StepDone` or, if mail is to bring
the result, with `Standing`. Its ids are determined by the entry that it is for: after a crash it is derived again by
replay and done again, which changes nothing. A store that is away delays it; one that cannot take it fails the entry.
It decides nothing about runs and records nothing of its own.

A run may start thousands of children at once. To start one is one write and no task, and they are begun in handfuls,
so that the first are being stored while the next are thought about.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from perdure.codec import Codec
from perdure.codec.failures import error_to_record
from perdure.errors import InvalidPayload, QueueFull, RunConflict, RunNotFound, RunTerminated, StoreError
from perdure.execution.store_session import StoreSession
from perdure.execution.store_writes import build_end_run, cancel_message, publish_event, raise_for_delivery
from perdure.model.records import ErrorRecord, RunRecord, RunResult
from perdure.model.turns import (
    AwaitingResult,
    BroadcastEvent,
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
    AlreadyStarted,
    Committed,
    Created,
    IdTaken,
    ObserverAdded,
    RunMissing,
    WriteResult,
)
from perdure.stores.writes import CreateRun, DeliverMessage, Observer, ObserveRunEnd, Write
from perdure.workflows.definition import Workflow
from perdure.workflows.start_request import StartRequest, build_child_start_request, check_same_run, claimed_at_creation

LOGGER = logging.getLogger("perdure.execution")
CHILDREN_PAGE = 500
CHILD_CHUNK = 64  # children

Then = Callable[[WriteResult | StoreError], None]
Outcome = StepDone | AwaitingResult
Report = Callable[[str, list[Outcome]], None]
Result = bytes | tuple[str, ...] | AwaitingResult  # a value, or the runs whose ends are to be waited for


class LocalWorker(Protocol):
    """What can be done at once because it concerns this very process; everything else is found by its duties."""

    def owner_for_new_run(self, workflow: Workflow[Any, Any]) -> str | None:
        """The worker that a run which is started here belongs to, if it can execute it at once."""

    def on_created_callback(self, record: RunRecord, workflow: Workflow[Any, Any]) -> Then:
        """Takes the answer to the creation of a run that is to be ours."""

    def run_has_messages(self, run_id: str) -> None:
        """The run has mail or is due."""

    def runs_may_be_due(self) -> None:
        """Some runs have mail or are due."""

    def run_ended_externally(self, run_id: str) -> None:
        """The run was ended from outside."""

    def run_is_observed(self, run_id: str) -> None:
        """Somebody waits for the end of this run."""


class ChildStart:
    """A child that is to be started."""

    __slots__ = ("cancelled", "errand", "parent", "work")

    def __init__(self, parent: RunRecord, errand: ExternalEffect, work: StartChild) -> None:
        self.parent = parent
        self.errand = errand
        self.work = work
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


UnderWay = asyncio.Task[None] | ChildStart


class ExternalEffects:
    """See the module's docstring. `report` is called from the event loop itself, never from inside a task."""

    def __init__(self, link: StoreSession, here: LocalWorker, report: Report) -> None:
        self._link = link
        self._here = here
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[str, dict[str, UnderWay]] = {}  # by run and location
        self._queued_child_starts: list[ChildStart] = []
        self._ended: list[tuple[str, Outcome, UnderWay | None]] = []  # to be reported

    def start(self, record: RunRecord, errand: ExternalEffect) -> None:
        """Run an errand for a run; one for the same entry that is still under way no longer reports."""
        of_run = self._under_way.setdefault(record.id, {})
        if not isinstance(errand.work, StartChild):
            of_run[errand.location] = self._loop.create_task(self._run(record, errand, self._carry_out(record, errand)))
            return
        of_run[errand.location] = birth = ChildStart(record, errand, errand.work)
        self._queued_child_starts.append(birth)
        if len(self._queued_child_starts) == 1:
            self._loop.call_soon(self._start_children_chunk)

    def under_way(self, run_id: str) -> frozenset[str]:
        """The locations of a run's entries that errands are being run for."""
        return frozenset(self._under_way.get(run_id, ()))

    def forget_all(self, run_id: str) -> None:
        """Report nothing of this run's errands any more. What they have submitted stays submitted: it is safe."""
        for each in self._under_way.pop(run_id, {}).values():
            each.cancel()

    @property
    def busy(self) -> int:
        return sum(len(of_run) for of_run in self._under_way.values())

    async def _run(self, record: RunRecord, errand: ExternalEffect, carrying_out: Coroutine[Any, Any, Result]) -> None:
        try:
            outcome = _outcome(errand, await carrying_out)
        except Exception as error:
            outcome = self._failure(record, errand, error)
        self._done(record.id, outcome, asyncio.current_task())

    def _failure(self, record: RunRecord, errand: ExternalEffect, error: Exception) -> StepDone:
        if not isinstance(error, RunNotFound | RunTerminated | RunConflict | QueueFull):
            LOGGER.error("run %s: the errand at %s failed", record.id, errand.location, exc_info=error)
        return StepDone(
            errand.location, errand.attempt, error=error_to_record_lossy(error, self._link.codec, errand.location)
        )

    def _done(self, run_id: str, outcome: Outcome, by: UnderWay | None) -> None:
        self._ended.append((run_id, outcome, by))
        if len(self._ended) == 1:
            self._loop.call_soon(self._report_all)

    def _report_all(self) -> None:
        ended, self._ended = self._ended, []
        outcomes: dict[str, list[Outcome]] = {}
        for run_id, outcome, by in ended:
            of_run = self._under_way.get(run_id, {})
            if of_run.get(outcome.location) is not by:
                continue  # forgotten, or begun again meanwhile
            del of_run[outcome.location]
            if not of_run:
                del self._under_way[run_id]
            outcomes.setdefault(run_id, []).append(outcome)
        for run_id, of_run_ended in outcomes.items():
            self._report(run_id, of_run_ended)

    async def _carry_out(self, record: RunRecord, errand: ExternalEffect) -> Result:
        match errand.work:
            case SendEvent():
                return await self._send(errand.work)
            case BroadcastEvent():
                return await self._broadcast(errand.work)
            case ObserveRun(run_id, target):
                write = ObserveRunEnd(run_id=run_id, observer=record.id, target=target)
                return self._ending_of(run_id, await self._put(write))
            case StopRun(run_id):
                await self._stop(run_id, f"cancel/{record.id}/{record.generation}/{errand.location}")
                return self._link.codec.encode(None)
            case StopChildren(target):
                return await self._stop_children(record, target)
            case StartChild():
                raise AssertionError("the start of a child is no task")

    # --- events

    async def _send(self, work: SendEvent) -> bytes:
        limit = self._link.config.max_pending_events
        write = DeliverMessage(run_id=work.run_id, message=work.message, now=self._link.clock.now(), limit=limit)
        raise_for_delivery(work.run_id, await self._put(write))
        self._here.run_has_messages(work.run_id)
        return self._link.codec.encode(None)

    async def _broadcast(self, work: BroadcastEvent) -> bytes:
        woken = await publish_event(work.event, self._link, patient=True)
        if woken:
            self._here.runs_may_be_due()
        return self._link.codec.encode(woken)

    # --- children and other runs

    def _start_children_chunk(self) -> None:
        some, self._queued_child_starts = (
            self._queued_child_starts[:CHILD_CHUNK],
            self._queued_child_starts[CHILD_CHUNK:],
        )
        if self._queued_child_starts:
            self._loop.call_soon(self._start_children_chunk)
        for birth in some:
            if birth.cancelled:
                continue
            try:
                self._begin(birth)
            except Exception as error:
                self._done(birth.parent.id, self._failure(birth.parent, birth.errand, error), birth)

    def _begin(self, birth: ChildStart) -> None:
        """Submit the child, observed from its birth: it cannot end unobserved."""
        work, here = birth.work, self._here
        order = build_child_start_request(
            work, work.definition, birth.parent.id, self._link.config, self._link.clock.now()
        )
        observer = None if work.target is None else Observer(birth.parent.id, work.target)
        owner = here.owner_for_new_run(work.definition)
        adopt: Then
        if owner is None:
            record, adopt = order.record, partial(_look, here, order.record.id)
        else:
            record = claimed_at_creation(order.record, owner)
            adopt = here.on_created_callback(record, work.definition)
        answered = partial(self._on_child_created, birth, order, adopt)
        self._link.committer.submit(CreateRun(record, observer=observer), answered, wait_for_store=True)

    def _on_child_created(
        self, birth: ChildStart, order: StartRequest, adopt: Then, answer: WriteResult | StoreError
    ) -> None:
        adopt(answer)
        if birth.cancelled:
            return
        parent, errand = birth.parent, birth.errand
        if isinstance(answer, Created):
            self._done(parent.id, _outcome(errand, self._started(birth, answer, new=True)), birth)
            return
        of_run = self._under_way.get(parent.id, {})
        if of_run.get(errand.location) is birth:
            asking = self._run(parent, errand, self._resolve_existing_child(birth, order, answer))
            of_run[errand.location] = self._loop.create_task(asking)

    async def _resolve_existing_child(
        self, birth: ChildStart, order: StartRequest, answer: WriteResult | StoreError
    ) -> Result:
        """The child was not made now: one that was there before is observed, if it is the same."""
        if isinstance(answer, StoreError):
            raise answer
        if isinstance(answer, IdTaken):
            check_same_run(order, answer.record, self._link.codec)
            if birth.work.target is not None:
                write = ObserveRunEnd(run_id=order.record.id, observer=birth.parent.id, target=birth.work.target)
                answer = await self._put(write)
        return self._started(birth, answer, new=False)

    def _started(self, birth: ChildStart, answer: WriteResult, *, new: bool) -> Result:
        work = birth.work
        if work.target is None:
            return self._link.codec.encode({"id": work.run_id, "created": new})
        ending = self._ending_of(work.run_id, answer)
        return AwaitingResult(birth.errand.location, ending, created=new) if isinstance(ending, tuple) else ending

    def _ending_of(self, run_id: str, answer: WriteResult) -> Result:
        if isinstance(answer, RunMissing):
            raise RunNotFound(run_id)
        if isinstance(answer, AlreadyEnded):
            return msgspec.json.encode(answer.result or RunResult(answer.status))
        self._here.run_is_observed(run_id)
        return (run_id,)

    async def _stop(self, run_id: str, message_id: str) -> None:
        """Ask a run to stop, as a caller would; one that has ended or never was needs no asking."""
        now = self._link.clock.now()
        answer = await self._put(
            build_end_run(run_id, f"end/{message_id}", now, self._link.config, only_if_not_started=True)
        )
        if isinstance(answer, AlreadyStarted):
            await self._put(DeliverMessage(run_id=run_id, message=cancel_message(message_id, now), now=now))
            self._here.run_has_messages(run_id)
        elif isinstance(answer, Committed):
            self._ended_unbegun(run_id)

    async def _stop_children(self, record: RunRecord, target: str) -> Result:
        """A page at a time: end those that never began, and ask the others to stop. Those will report their end."""
        standing: list[str] = []
        after: str | None = None
        while page := await self._page(record.id, after):
            standing += await self._stop_page(record, target, page)
            after = page[-1]
        return tuple(standing) or self._link.codec.encode(None)

    async def _page(self, run_id: str, after: str | None) -> list[str]:
        read = self._link.read
        return await read(lambda: self._link.store.open_children(run_id, CHILDREN_PAGE, after), for_ever=True)

    async def _stop_page(self, record: RunRecord, target: str, children: Sequence[str]) -> list[str]:
        now, config = self._link.clock.now(), self._link.config
        name = f"cancel/{record.id}/{target}"
        ends = [
            self._put(build_end_run(child, f"end/{name}", now, config, only_if_not_started=True)) for child in children
        ]
        observing = [self._put(ObserveRunEnd(run_id=child, observer=record.id, target=target)) for child in children]
        answers = await asyncio.gather(*ends, *observing)
        for child, answer in zip(children, answers, strict=False):
            if isinstance(answer, Committed):
                self._ended_unbegun(child)
        observed = zip(children, answers[len(children) :], strict=True)
        standing = [child for child, answer in observed if isinstance(answer, ObserverAdded)]
        message = cancel_message(name, now)
        await asyncio.gather(*(self._put(DeliverMessage(run_id=each, message=message, now=now)) for each in standing))
        for child in standing:
            self._here.run_is_observed(child)
            self._here.run_has_messages(child)
        return standing

    def _ended_unbegun(self, run_id: str) -> None:
        self._here.run_ended_externally(run_id)
        self._link.hub.changed((run_id,))

    # --- through the committer

    def _put(self, write: Write, then: Then | None = None) -> asyncio.Future[WriteResult]:
        """Submit at once; whatever the errand's fate, `then` gets the answer."""
        return self._link.committer.submit_future(write, then, wait_for_store=True)


def _outcome(errand: ExternalEffect, result: Result) -> Outcome:
    if isinstance(result, AwaitingResult):
        return result
    if isinstance(result, tuple):
        return AwaitingResult(errand.location, result)
    return StepDone(errand.location, errand.attempt, value=result)


def _look(here: LocalWorker, run_id: str, answer: WriteResult | StoreError) -> None:
    here.run_has_messages(run_id)


def error_to_record_lossy(error: BaseException, codec: Codec, location: str | None = None) -> ErrorRecord:
    """The record of an error that is to come back as itself, or at least in words if its fields cannot be encoded."""
    try:
        return error_to_record(error, codec, raises=(type(error),), location=location)
    except InvalidPayload:
        return error_to_record(error, codec, location=location)
