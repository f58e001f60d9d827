"""Errands: what a run asks to be done to other runs and to topics, after the turn that asked for it is committed.

Each is a short conversation with the store, through the committer, and ends with a `StepDone` or, if mail is to bring
the result, with `Standing`. Its ids are determined by the entry that it is for: after a crash it is derived again by
replay and done again, which changes nothing. A store that is away delays it; one that cannot take it fails the entry.
It decides nothing about runs and records nothing of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from perdure.codec import Codec
from perdure.definition import Workflow
from perdure.engine.link import Link
from perdure.engine.sending import check_delivered, publish
from perdure.engine.stopping import cancel_message, end_of
from perdure.errors import InvalidPayload, QueueFull, RunConflict, RunNotFound, RunTerminated, StoreError
from perdure.failures import describe
from perdure.records import (
    BroadcastEvent,
    Ending,
    Errand,
    ErrorRecord,
    ObserveRun,
    RunRecord,
    SendEvent,
    Standing,
    StartChild,
    StepDone,
    StopChildren,
    StopRun,
)
from perdure.starting import Order, born_here, check_same_run, child_of
from perdure.store.base import (
    Answer,
    Begun,
    Committed,
    Created,
    CreateRun,
    Deliver,
    Ended,
    Exists,
    Missing,
    Observe,
    Observing,
    Write,
)

LOGGER = logging.getLogger("perdure.engine")
CHILDREN_PAGE = 500

Then = Callable[[Answer | StoreError], None]
Report = Callable[[str, StepDone | Standing], None]
Result = bytes | tuple[str, ...] | Standing  # a value, or the runs whose ends are to be waited for


class Here(Protocol):
    """What can be done at once because it concerns this very process; everything else is found by its duties."""

    def owner_for(self, workflow: Workflow[Any, Any]) -> str | None:
        """The worker that a run which is started here belongs to, if it can execute it at once."""

    def adopting(self, record: RunRecord, workflow: Workflow[Any, Any]) -> Then:
        """Takes the answer to the creation of a run that is to be ours."""

    def look(self, run_id: str) -> None:
        """The run has mail or is due."""

    def woken(self) -> None:
        """Some runs have mail or are due."""

    def ended(self, run_id: str) -> None:
        """The run was ended from outside."""

    def observed(self, run_id: str) -> None:
        """Somebody waits for the end of this run."""


class Errands:
    """See the module's docstring. `report` is called from the event loop itself, never from inside a task."""

    def __init__(self, link: Link, here: Here, report: Report) -> None:
        self._link = link
        self._here = here
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[str, dict[str, asyncio.Task[None]]] = {}  # by run and location

    def start(self, record: RunRecord, errand: Errand) -> None:
        """Run an errand for a run; one for the same entry that is still under way no longer reports."""
        task = self._loop.create_task(self._run(record, errand))
        self._under_way.setdefault(record.id, {})[errand.location] = task

    def under_way(self, run_id: str) -> frozenset[str]:
        """The locations of a run's entries that errands are being run for."""
        return frozenset(self._under_way.get(run_id, ()))

    def forget_all(self, run_id: str) -> None:
        """Report nothing of this run's errands any more. What they have submitted stays submitted: it is safe."""
        for task in self._under_way.pop(run_id, {}).values():
            task.cancel()

    @property
    def busy(self) -> int:
        return sum(len(of_run) for of_run in self._under_way.values())

    async def _run(self, record: RunRecord, errand: Errand) -> None:
        location, attempt = errand.location, errand.attempt
        outcome: StepDone | Standing
        try:
            result = await self._carry_out(record, errand)
        except Exception as error:
            if not isinstance(error, RunNotFound | RunTerminated | RunConflict | QueueFull):
                LOGGER.exception("run %s: the errand at %s failed", record.id, location)
            outcome = StepDone(location, attempt, error=recorded(error, self._link.codec, location))
        else:
            if isinstance(result, Standing):
                outcome = result
            elif isinstance(result, tuple):
                outcome = Standing(location, result)
            else:
                outcome = StepDone(location, attempt, value=result)
        self._loop.call_soon(self._done, record.id, outcome, asyncio.current_task())

    def _done(self, run_id: str, outcome: StepDone | Standing, task: asyncio.Task[None] | None) -> None:
        of_run = self._under_way.get(run_id, {})
        if of_run.get(outcome.location) is not task:
            return  # forgotten, or begun again meanwhile
        del of_run[outcome.location]
        if not of_run:
            del self._under_way[run_id]
        self._report(run_id, outcome)

    async def _carry_out(self, record: RunRecord, errand: Errand) -> Result:
        match errand.work:
            case SendEvent():
                return await self._send(errand.work)
            case BroadcastEvent():
                return await self._broadcast(errand.work)
            case StartChild():
                return await self._start_child(record, errand.location, errand.work)
            case ObserveRun(run_id, target):
                write = Observe(run_id=run_id, observer=record.id, target=target)
                return self._ending_of(run_id, await self._put(write))
            case StopRun(run_id):
                await self._stop(run_id, f"cancel/{record.id}/{record.generation}/{errand.location}")
                return self._link.codec.encode(None)
            case StopChildren(target):
                return await self._stop_children(record, target)

    # --- events

    async def _send(self, work: SendEvent) -> bytes:
        limit = self._link.config.max_pending_events
        write = Deliver(run_id=work.run_id, message=work.message, now=self._link.clock.now(), limit=limit)
        check_delivered(work.run_id, await self._put(write))
        self._here.look(work.run_id)
        return self._link.codec.encode(None)

    async def _broadcast(self, work: BroadcastEvent) -> bytes:
        woken = await publish(work.event, self._link, patient=True)
        if woken:
            self._here.woken()
        return self._link.codec.encode(woken)

    # --- children and other runs

    async def _start_child(self, record: RunRecord, location: str, work: StartChild) -> Result:
        order = child_of(work, work.definition, record.id, self._link.config, self._link.clock.now())
        creating = self._submit_child(order, work.definition)
        if work.target is None:
            return self._link.codec.encode({"id": work.run_id, "created": self._is_new(order, await creating)})
        # Submitted together, so that they are one commit: the child cannot end in between.
        observing = self._put(Observe(run_id=work.run_id, observer=record.id, target=work.target))
        answers = await asyncio.gather(creating, observing)
        new = self._is_new(order, answers[0])
        ending = self._ending_of(work.run_id, answers[1])
        return Standing(location, ending, ours=new) if isinstance(ending, tuple) else ending

    def _submit_child(self, order: Order, definition: Workflow[Any, Any]) -> asyncio.Future[Answer]:
        owner = self._here.owner_for(definition)
        if owner is None:
            return self._put(CreateRun(order.record), lambda answer: self._here.look(order.record.id))
        ours = born_here(order.record, owner)
        return self._put(CreateRun(ours), self._here.adopting(ours, definition))

    def _is_new(self, order: Order, answer: Answer) -> bool:
        """Whether this errand made the run; one that was there before is observed, if it is the same."""
        if isinstance(answer, Exists):
            check_same_run(order, answer.record, self._link.codec)
        return isinstance(answer, Created)

    def _ending_of(self, run_id: str, answer: Answer) -> Result:
        if isinstance(answer, Missing):
            raise RunNotFound(run_id)
        if isinstance(answer, Ended):
            return msgspec.json.encode(answer.ending or Ending(answer.status))
        self._here.observed(run_id)
        return (run_id,)

    async def _stop(self, run_id: str, message_id: str) -> None:
        """Ask a run to stop, as a caller would; one that has ended or never was needs no asking."""
        now = self._link.clock.now()
        answer = await self._put(end_of(run_id, f"end/{message_id}", now, self._link.config, unless_begun=True))
        if isinstance(answer, Begun):
            await self._put(Deliver(run_id=run_id, message=cancel_message(message_id, now), now=now))
            self._here.look(run_id)
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
        ends = [self._put(end_of(child, f"end/{name}", now, config, unless_begun=True)) for child in children]
        observing = [self._put(Observe(run_id=child, observer=record.id, target=target)) for child in children]
        answers = await asyncio.gather(*ends, *observing)
        for child, answer in zip(children, answers, strict=False):
            if isinstance(answer, Committed):
                self._ended_unbegun(child)
        observed = zip(children, answers[len(children) :], strict=True)
        standing = [child for child, answer in observed if isinstance(answer, Observing)]
        message = cancel_message(name, now)
        await asyncio.gather(*(self._put(Deliver(run_id=each, message=message, now=now)) for each in standing))
        for child in standing:
            self._here.observed(child)
            self._here.look(child)
        return standing

    def _ended_unbegun(self, run_id: str) -> None:
        self._here.ended(run_id)
        self._link.hub.changed((run_id,))

    # --- through the committer

    def _put(self, write: Write, then: Then | None = None) -> asyncio.Future[Answer]:
        """Submit at once; whatever the errand's fate, `then` gets the answer."""
        return self._link.committer.ask(write, then, patient=True)


def recorded(error: BaseException, codec: Codec, location: str | None = None) -> ErrorRecord:
    """The record of an error that is to come back as itself, or at least in words if its fields cannot be encoded."""
    try:
        return describe(error, codec, raises=(type(error),), location=location)
    except InvalidPayload:
        return describe(error, codec, location=location)
