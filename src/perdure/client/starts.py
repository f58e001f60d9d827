"""StartClient: start runs, and wait for the result of a run that it starts."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from perdure.client.queries import QueryClient
from perdure.client.restarts import RunRestarter
from perdure.client.session import ClientSession
from perdure.errors import RunConflict, RunNotFound, RunTerminated, StoreError
from perdure.execution.queue_arrivals import raise_for_place
from perdure.execution.queue_declarations import create_queue
from perdure.execution.store_writes import raise_for_delivery
from perdure.execution.waiters import ChangeFuture
from perdure.model.queue_records import QueueSettings
from perdure.model.records import RunRecord
from perdure.model.validation import check_public_name
from perdure.stores.results import AlreadyEnded, Created, IdTaken, Joined, QueueMissing, WriteResult
from perdure.stores.writes import CreateRun, DeliverMessage
from perdure.workflows.definition import BoundWorkflow
from perdure.workflows.publications import KIND, UNPUBLISHED, PublishedWorkflow, decode_publication, document_id
from perdure.workflows.queue_placement import Placement, check_partition_given
from perdure.workflows.start_options import NO_OPTIONS, split_keywords
from perdure.workflows.start_request import (
    StartRequest,
    build_start_request,
    build_start_request_by_name,
    check_same_run,
    claimed_at_creation,
    find_executed,
)
from perdure.workflows.work_queues import IMPLICIT


class StartClient:
    """The calls `start` and `execute` of a client; `Client` documents them."""

    def __init__(self, session: ClientSession, queries: QueryClient) -> None:
        self._session = session
        self._queries = queries
        self._restarter = RunRestarter(session)

    async def start(self, wf: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[StartRequest, str, bool]:
        """Start a run. Return its request, the id of the run, and whether this call created the run."""
        request = await self.build_request(wf, args, given)
        creating = self._create_owned(request) or self._create_unowned(request)
        return (request, *await self._on_result(request, await creating))

    async def execute(self, wf: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Start a run and return its value.

        If the local worker executes the run, the caller is woken at its end only. A wake-up at creation as well would
        delay the commit of the first step by 4 us.
        """
        request = await self.build_request(wf, args, given)
        session, waiters, run_id = self._session, self._session.waiters, request.record.id
        ended = waiters.wait(run_id, end=True)
        try:
            creating = self._create_owned(request)
            if creating is None:
                found, _ = await self._on_result(request, await self._create_unowned(request))
                record = await self._queries.wait_for_end(found)
            else:
                creating.add_done_callback(partial(_wake_unless_created, ended))
                last = await session.wait_for_end(run_id, ended, None)
                if last is None or last.created_by != request.record.created_by:  # only a hint, or another run's end
                    await self._on_result(request, await creating)
                    last = await self._queries.wait_for_end(run_id)
                record = last
            return self._queries.value_or_error(record, request.workflow)
        finally:
            waiters.remove(run_id, ended, end=True)

    async def build_request(self, wf: Any, args: tuple[Any, ...], given: dict[str, Any]) -> StartRequest:
        """Validate a start and return the request. Nothing is stored."""
        session = self._session
        codec, config = session.codec, session.config
        options, kwargs = NO_OPTIONS, given
        if given and not isinstance(wf, BoundWorkflow):
            options, kwargs = split_keywords(given)
        if isinstance(wf, str):
            wf = check_public_name("a workflow's name", wf)
            found = session.known_types.latest(wf)
            wf = wf if found is None else found
        if isinstance(wf, str):
            executed = find_executed(wf, await session.read(session.store.workers), session.clock.now())
            published = await self._read_publication(wf, executed[0])
            now = session.clock.now()
            request = build_start_request_by_name(
                wf, args, kwargs, options, executed, published, codec=codec, config=config, now=now
            )
        else:
            now = session.clock.now()
            request = build_start_request(wf, args, kwargs, options, codec=codec, config=config, now=now)
        if request.placement is not None:
            await self._check_partition(request.placement)
        return request

    async def _read_publication(self, name: str, version: int) -> PublishedWorkflow:
        """Return what the workers of a workflow have published about it. Older workers have published nothing."""
        session, id = self._session, document_id(name, version)
        document = await session.read(lambda: session.store.document(KIND, id))
        return UNPUBLISHED if document is None else decode_publication(document.body)

    async def _check_partition(self, placement: Placement) -> None:
        """Refuse a missing partition of a queue that this process has not imported."""
        name = placement.place.queue
        if placement.queue is not None or name.startswith(IMPLICIT):
            return
        session = self._session
        settings = session.queue_settings.get(name)
        if settings is None:
            session.queue_settings = {each.name: each.declared for each in await session.read(session.store.queues)}
            settings = session.queue_settings.get(name)
        if settings is not None:  # an unknown queue is refused by the store
            check_partition_given(name, given=placement.is_partition_given, partitioned=settings.partitioned)

    def _create_owned(self, request: StartRequest) -> asyncio.Future[WriteResult] | None:
        """Create the run with the local worker as its owner, so that it need not be claimed.

        Returns None if the local worker cannot execute the run now.
        """
        record, workflow, worker = request.record, request.workflow, self._session.local_worker
        if workflow is None or record.wake_at != record.created_at or request.messages or request.placement:
            return None
        owner = worker.owner_for_new_run(workflow)
        if owner is None:
            return None
        owned = claimed_at_creation(record, owner)
        return self._session.committer.submit_future(
            CreateRun(owned), worker.on_created_callback(owned, workflow), wait_for_store=False
        )

    def _create_unowned(self, request: StartRequest) -> asyncio.Future[WriteResult]:
        """Create the run for the first worker that claims it."""
        record = request.record
        notify = self._ignore_result if request.place is not None else partial(self._on_created_unowned, record.id)
        return self._session.committer.submit_future(
            CreateRun(record, inbox=request.messages, place=request.place), notify, wait_for_store=False
        )

    def _on_created_unowned(self, run_id: str, result: WriteResult | StoreError) -> None:
        if not isinstance(result, StoreError):
            self._session.local_worker.run_has_messages(run_id)

    def _ignore_result(self, result: WriteResult | StoreError) -> None:
        """A run that waits in a queue is not due: the change hint of its queue causes an admission."""

    async def _on_result(self, request: StartRequest, result: WriteResult) -> tuple[str, bool]:
        """Return the id of the run and whether this call created it. If the id is taken, do what `if_exists` says.

        `RunConflict` if the existing run is not what the caller starts. `QueueFull` if its queue takes no more runs.
        """
        run_id = request.record.id
        while True:
            if isinstance(result, QueueMissing) and await self._declare_queue(request.placement):
                result = await self._create_unowned(request)
            elif isinstance(result, Joined):
                if await self._join(request, result):
                    return result.run_id, False
                result = await self._create_unowned(request)
            elif not isinstance(result, IdTaken):
                if request.place is not None:
                    raise_for_place(request.place, result)
                return run_id, isinstance(result, Created)
            else:
                existing = await self._restart_existing(request, result.record)
                if existing is None:
                    return run_id, True
                check_same_run(request, existing, self._session.codec)
                if await self._deliver(request, run_id):
                    return run_id, False
                result = await self._create_unowned(request)

    async def _restart_existing(self, request: StartRequest, existing: RunRecord) -> RunRecord | None:
        """Do what `if_exists` says. Return the run that has the id; None if it was restarted."""
        if request.if_exists == "reject":
            remedy = "use another id, or if_exists='observe' for a handle on that run"
            raise RunConflict(request.record.id, "", remedy)
        if request.if_exists == "observe":
            return existing
        return await self._restarter.restart(request, existing)

    async def _join(self, request: StartRequest, joined: Joined) -> bool:
        """Return the run with the dedupe key to the caller; False if it has ended and no longer has the key."""
        place = request.place
        assert place is not None
        if place.on_duplicate == "refuse":
            reason = f"the dedupe key {place.dedupe!r} in queue {place.queue!r}"
            raise RunConflict(joined.run_id, reason, "use another key, or on_duplicate='existing'")
        try:
            return await self._deliver(request, joined.run_id)
        except (RunTerminated, RunNotFound):
            return False

    async def _declare_queue(self, placement: Placement | None) -> bool:
        """Create the queue of a start if it is implicit, or imported after the engine opened; return whether it was."""
        if placement is None:
            return False
        session, name, queue = self._session, placement.place.queue, placement.queue
        if name.startswith(IMPLICIT):
            await create_queue(session.store_session, name, QueueSettings())
        elif queue is not None and session.declares_queue(queue):
            await create_queue(session.store_session, name, queue.settings)
        else:
            return False
        return True

    async def _deliver(self, request: StartRequest, run_id: str) -> bool:
        """Send the messages of the request to the existing run.

        Returns False if the run has ended meanwhile and `restart_ended` restarts it. Raises what `send` raises.
        """
        session, limit = self._session, self._session.config.max_pending_events
        if not request.messages:
            return True
        now = session.clock.now()
        results = await session.committer.write_all(
            [DeliverMessage(run_id=run_id, message=message, now=now, limit=limit) for message in request.messages]
        )
        session.local_worker.run_has_messages(run_id)
        if request.if_exists == "restart_ended" and all(isinstance(result, AlreadyEnded) for result in results):
            return False
        for result in results:
            if isinstance(result, StoreError):
                raise result
            raise_for_delivery(run_id, result)
        return True


def _wake_unless_created(waiter: ChangeFuture, creating: asyncio.Future[WriteResult]) -> None:
    """Wake the caller that waits for the run's end if the local worker does not execute the run."""
    if creating.cancelled():
        return
    owned = creating.exception() is None and isinstance(created := creating.result(), Created) and created.owned
    if not owned and not waiter.done():
        waiter.set_result(None)
