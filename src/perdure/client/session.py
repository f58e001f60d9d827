"""ClientSession: the open store of one client, and the calls that its components share.

It finds runs, delivers messages and waits for changes. It knows no workflow, no event and no public view of a run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, Protocol, TypeVar

from perdure.client.store_urls import open_store
from perdure.clock import Clock
from perdure.codec import Codec
from perdure.config import EngineConfig
from perdure.errors import InvalidArgument, RunNotFound, StoreError, WorkflowMisuse
from perdure.execution.committer import Committer
from perdure.execution.local_worker import LocalWorker, NullLocalWorker
from perdure.execution.store_session import StoreSession
from perdure.execution.waiters import ChangeFuture, RunWaiters
from perdure.model.records import Message, RunRecord
from perdure.model.validation import check_name
from perdure.stores.protocol import Store
from perdure.stores.results import Snapshot, UnreadableRun, WriteResult
from perdure.stores.writes import DeliverMessage

MIN_POLL_INTERVAL_SECONDS = 0.02
POLL_BACKOFF = 0.25  # fraction of the time since the last change that passes before the next poll

T = TypeVar("T")
Awaited = Literal["end", "reply", "change"]  # what a caller waits for
Change = Coroutine[Any, Any, RunRecord | None]  # completes at a change hint; returns the run's last record if known


class WaitStrategy(Protocol):
    """How a session waits for changes. `perdure.testing` replaces it, to skip time while a caller waits."""

    polls: bool  # whether a run that another process may execute is read again without a change hint

    def wait(self, run_id: str, awaited: Awaited, change: Change) -> Change:
        """Return a coroutine that waits for `change` on behalf of a caller."""


class DirectWait:
    """The `WaitStrategy` outside of tests: a caller waits until the change happens."""

    def __init__(self, *, polls: bool = True) -> None:
        self.polls = polls

    def wait(self, run_id: str, awaited: Awaited, change: Change) -> Change:
        return change


class ClientSession:
    """Open store, clock, committer and waiters of one client, used from one event loop.

    `local_worker` is the worker in the same process, or a null object. `config` is that of the client. Everything that
    needs the open store raises `WorkflowMisuse` while the session is closed, unless `open_on_use` opens it.
    """

    def __init__(self, url: str | Store, config: EngineConfig | None, clock: Clock, *, client_name: str) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise InvalidArgument(f"config must be an EngineConfig, not {config!r}")
        self.config = config or EngineConfig()
        self.process_clock = clock  # `clock` is the store's time
        self.wait_for_store = False  # whether `open` retries forever
        self.local_worker: LocalWorker = NullLocalWorker()
        self.wait_strategy: WaitStrategy = DirectWait()
        self.open_on_use: Callable[[], None] | None = None
        self._client_name = client_name
        self._closed_store = open_store(url, clock)
        self._store_session: StoreSession | None = None

    async def open(self) -> None:
        """Open the store if it is not open. `StoreError` after the attempts of `store_retry`."""
        if self._store_session is None:
            store_session = StoreSession(self._closed_store, self.process_clock, self.config)
            await store_session.open(retry_forever=self.wait_for_store)
            self._store_session = store_session

    async def close(self) -> None:
        """Wait until submitted writes have their results, then close the store."""
        if self._store_session is not None:
            store_session, self._store_session = self._store_session, None
            await store_session.close()

    async def abandon(self) -> None:
        """Stop without closing the store, as a crash would: queued writes are lost."""
        if self._store_session is not None:
            store_session, self._store_session = self._store_session, None
            await store_session.abandon()

    def discard(self) -> None:
        """Drop the open store without waiting, when no event loop is left to close it."""
        self._store_session = None

    # --- parts of the open store

    @property
    def store_session(self) -> StoreSession:
        if self._store_session is None and self.open_on_use is not None:
            self.open_on_use()
        if self._store_session is None:
            name = self._client_name
            raise WorkflowMisuse(f"this {name} is not open: use `async with {name}(...)`")
        return self._store_session

    @property
    def store(self) -> Store:
        return self.store_session.store

    @property
    def clock(self) -> Clock:
        return self.store_session.clock

    @property
    def codec(self) -> Codec:
        return self.store_session.codec

    @property
    def committer(self) -> Committer:
        return self.store_session.committer

    @property
    def waiters(self) -> RunWaiters:
        return self.store_session.waiters

    async def read(self, call: Callable[[], Awaitable[T]], *, retry_forever: bool = False) -> T:
        """Call the store for a caller. While it is unavailable, retry for the attempts of `store_retry`, or forever."""
        return await self.store_session.read(call, retry_forever=retry_forever)

    # --- one run

    async def find_run(self, run_id: str, *, retry_forever: bool = False) -> RunRecord | None:
        """Return the record of a run; None if there is no such run."""
        check_name("a run's id", run_id)
        found = (await self.read(lambda: self.store.records([run_id]), retry_forever=retry_forever))[0]
        if isinstance(found, UnreadableRun):
            raise StoreError(str(found))
        return found

    async def get_run(self, run_id: str, *, retry_forever: bool = False) -> RunRecord:
        """Return the record of a run; `RunNotFound` if there is no such run."""
        record = await self.find_run(run_id, retry_forever=retry_forever)
        if record is None:
            raise RunNotFound(run_id)
        return record

    async def load_snapshot(self, run_id: str) -> Snapshot:
        """Return a run with its history and inbox; `RunNotFound` if there is no such run."""
        check_name("a run's id", run_id)
        snapshot = (await self.read(lambda: self.store.load([run_id])))[0]
        if snapshot is None:
            raise RunNotFound(run_id)
        if isinstance(snapshot, UnreadableRun):
            raise StoreError(str(snapshot))
        return snapshot

    async def deliver(self, run_id: str, message: Message, limit: int | None = None) -> WriteResult:
        """Put a message into a run's inbox and notify the local worker."""
        check_name("a run's id", run_id)
        write = DeliverMessage(run_id=run_id, message=message, now=self.clock.now(), limit=limit)
        return await self.committer.write(write, on_result=lambda result: self.local_worker.run_has_messages(run_id))

    # --- waiting

    def wait_for_end(self, run_id: str, change: ChangeFuture, deadline: float | None) -> Change:
        """Wait for a change hint, at most until the deadline; every sweep sets one.

        Returns the run's last record if the run ended in this process.
        """
        return self.wait_strategy.wait(run_id, "end", _wait_until(change, self.clock, deadline))

    def wait_for_change(
        self, run_id: str, awaited: Awaited, change: ChangeFuture, since: float, deadline: float | None = None
    ) -> Change:
        """Wait for a change hint, or until it is time to poll a run that another process may execute.

        Stores send no hint for each step and each published value: hints go to every process, and few of them follow
        the run. So the poll interval grows with the time `since` the caller last saw a change.
        """
        clock = self.clock
        if self.wait_strategy.polls and not self.local_worker.is_executing(run_id):
            now = clock.now()
            poll_at = now + max(MIN_POLL_INTERVAL_SECONDS, POLL_BACKOFF * (now - since))
            deadline = poll_at if deadline is None else min(deadline, poll_at)
        return self.wait_strategy.wait(run_id, awaited, _wait_until(change, clock, deadline))


async def _wait_until(change: ChangeFuture, clock: Clock, deadline: float | None) -> RunRecord | None:
    if deadline is None:
        return await change
    timer = clock.call_at(deadline, lambda: None if change.done() else change.set_result(None))
    try:
        return await change
    finally:
        timer.cancel()
