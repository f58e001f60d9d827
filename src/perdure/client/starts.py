"""StartClient: start runs, and wait for the result of a run that it starts."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from perdure.client.queries import QueryClient
from perdure.client.session import ClientSession
from perdure.errors import StoreError
from perdure.execution.waiters import ChangeFuture
from perdure.model.validation import check_name
from perdure.stores.results import Created, IdTaken, WriteResult
from perdure.stores.writes import CreateRun
from perdure.workflows.definition import BoundWorkflow, StartOptions
from perdure.workflows.start_request import (
    StartRequest,
    build_start_request,
    build_start_request_by_name,
    check_same_run,
    claimed_at_creation,
    start_options,
)


class StartClient:
    """The calls `start` and `execute` of a client; `Client` documents them."""

    def __init__(self, session: ClientSession, queries: QueryClient) -> None:
        self._session = session
        self._queries = queries

    async def start(self, wf: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[StartRequest, bool]:
        """Start a run. Return its request, and whether this call created the run."""
        request = await self._build_request(wf, args, given)
        creating = self._create_owned(request) or self._create_unowned(request)
        return request, self._check_created(request, await creating)

    async def execute(self, wf: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Start a run and return its value.

        If the local worker executes the run, the caller is woken at its end only. A wake-up at creation as well would
        delay the commit of the first step by 4 us.
        """
        request = await self._build_request(wf, args, given)
        session, waiters, run_id = self._session, self._session.waiters, request.record.id
        ended = waiters.wait(run_id, end=True)
        try:
            creating = self._create_owned(request)
            if creating is None:
                self._check_created(request, await self._create_unowned(request))
                record = await self._queries.wait_for_end(run_id)
            else:
                creating.add_done_callback(partial(_wake_unless_created, ended))
                last = await session.wait_for_end(run_id, ended, None)
                if last is None or last.created_by != request.record.created_by:  # only a hint, or another run's end
                    self._check_created(request, await creating)
                    last = await self._queries.wait_for_end(run_id)
                record = last
            return self._queries.value_or_error(record, request.workflow)
        finally:
            waiters.remove(run_id, ended, end=True)

    async def _build_request(self, wf: Any, args: tuple[Any, ...], given: dict[str, Any]) -> StartRequest:
        session = self._session
        codec, config = session.codec, session.config
        if isinstance(wf, str):
            wf = check_name("a workflow's name", wf)
            found = session.known_types.latest(wf)
            wf = wf if found is None else found
        if isinstance(wf, str):
            options, workers = start_options(given), await session.read(session.store.workers)
            now = session.clock.now()
            return build_start_request_by_name(wf, args, options, workers, codec=codec, config=config, now=now)
        bound = isinstance(wf, BoundWorkflow)
        return build_start_request(
            wf,
            args,
            given if bound else {},
            StartOptions() if bound else start_options(given),
            codec=codec,
            config=config,
            now=session.clock.now(),
        )

    def _create_owned(self, request: StartRequest) -> asyncio.Future[WriteResult] | None:
        """Create the run with the local worker as its owner, so that it need not be claimed.

        Returns None if the local worker cannot execute the run now.
        """
        record, workflow, worker = request.record, request.workflow, self._session.local_worker
        if workflow is None or record.wake_at != record.created_at:
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
        notify = partial(self._on_created_unowned, record.id)
        return self._session.committer.submit_future(CreateRun(record), notify, wait_for_store=False)

    def _on_created_unowned(self, run_id: str, result: WriteResult | StoreError) -> None:
        if not isinstance(result, StoreError):
            self._session.local_worker.run_has_messages(run_id)

    def _check_created(self, request: StartRequest, result: WriteResult) -> bool:
        """Return whether the run was created. `RunConflict` if another run has its id."""
        if isinstance(result, IdTaken):
            check_same_run(request, result.record, self._session.codec)
        return isinstance(result, Created)


def _wake_unless_created(waiter: ChangeFuture, creating: asyncio.Future[WriteResult]) -> None:
    """Wake the caller that waits for the run's end if the local worker does not execute the run."""
    if creating.cancelled():
        return
    owned = creating.exception() is None and isinstance(created := creating.result(), Created) and created.owned
    if not owned and not waiter.done():
        waiter.set_result(None)
