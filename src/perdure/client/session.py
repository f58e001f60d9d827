"""Connection: an open store, and what every call about runs stands on. `Client` is this with the calls."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType
from typing import Self

from perdure.client.store_urls import open_store
from perdure.clock import SYSTEM_CLOCK, Clock
from perdure.config import EngineConfig
from perdure.errors import InvalidArgument, RunNotFound, WorkflowMisuse
from perdure.execution.store_session import StoreSession
from perdure.execution.waiters import ChangeFuture
from perdure.model.records import Message, RunRecord
from perdure.model.validation import check_name
from perdure.stores.protocol import Store
from perdure.stores.results import WriteResult
from perdure.stores.writes import DeliverMessage

MIN_POLL_INTERVAL = 0.02  # seconds
POLL_BACKOFF = 0.25  # of the time that one has waited already


class ClientSession:
    """Opened and closed by `async with`; used from one event loop."""

    _wait_for_store = False  # whether opening waits for a store that is away however long it takes

    def __init__(self, url: str | Store, *, config: EngineConfig | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise InvalidArgument(f"config must be an EngineConfig, not {config!r}")
        self._config = config or EngineConfig()
        self._clock = clock
        self._store = open_store(url, clock)
        self._link: StoreSession | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def open(self) -> None:
        """Open the store; `async with` does it. `StoreError` if it stays away for all tries of `store_retry`."""
        if self._link is None:
            link = StoreSession(self._store, self._clock, self._config)
            await link.open(retry_forever=self._wait_for_store)
            self._link = link

    async def shutdown(self, grace: float | timedelta | None = None) -> None:
        """Close the store; `async with` does it."""
        if self._link is not None:
            link, self._link = self._link, None
            await link.close()

    @property
    def _open(self) -> StoreSession:
        if self._link is None:
            raise WorkflowMisuse(f"this {type(self).__name__} is not open: use `async with {type(self).__name__}(...)`")
        return self._link

    # --- one run

    async def _find(self, run_id: str, *, retry_forever: bool = False) -> RunRecord | None:
        check_name("a run's id", run_id)
        return (await self._open.read(lambda: self._open.store.records([run_id]), retry_forever=retry_forever))[0]

    async def _record(self, run_id: str, *, retry_forever: bool = False) -> RunRecord:
        record = await self._find(run_id, retry_forever=retry_forever)
        if record is None:
            raise RunNotFound(run_id)
        return record

    async def _deliver(self, run_id: str, message: Message, limit: int | None = None) -> WriteResult:
        check_name("a run's id", run_id)
        write = DeliverMessage(run_id=run_id, message=message, now=self._open.clock.now(), limit=limit)
        return await self._open.committer.write(write, on_result=lambda answer: self._mailed(run_id))

    async def _wait_for_change(self, news: ChangeFuture, deadline: float | None) -> RunRecord | None:
        """Wait for a hint; one comes with every sweep at least. Gives the run's last record if the hint is that."""
        if deadline is None:
            return await news
        timer = self._open.clock.call_at(deadline, lambda: None if news.done() else news.set_result(None))
        try:
            return await news
        finally:
            timer.cancel()

    async def _wait_for_change_or_poll(
        self, run_id: str, news: ChangeFuture, since: float, deadline: float | None = None
    ) -> None:
        """Wait for a hint, or until it is time to look again at a run that may be executed elsewhere.

        Nobody is told of each step and of what runs show, or every worker would hear of things that concern only those
        who follow the run. These look again after a quarter of the time that has passed `since` they last saw anything.
        """
        now = self._open.clock.now()
        if self._must_poll(run_id):
            look_at = now + max(MIN_POLL_INTERVAL, POLL_BACKOFF * (now - since))
            deadline = look_at if deadline is None else min(deadline, look_at)
        await self._wait_for_change(news, deadline)

    def _must_poll(self, run_id: str) -> bool:
        """Whether the run may change without a word to this process."""
        return not self._executes(run_id)

    def _executes(self, run_id: str) -> bool:
        """Whether this process executes the run, so that it knows of every change and of the end by itself."""
        return False

    # --- what a worker in the same process wants to know at once; others find out by themselves

    def _mailed(self, run_id: str) -> None:
        """This run has mail, or is due."""

    def _woken(self) -> None:
        """Some runs have mail, or are due."""

    def _cut_off(self, run_id: str) -> None:
        """This run was ended or rewound from outside."""
