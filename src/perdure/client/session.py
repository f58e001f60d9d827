"""ClientSession: the open store of one client, and the calls that its components share.

It finds runs, delivers messages and waits for changes. It knows no workflow, no event and no public view of a run.
"""

from __future__ import annotations

import os
import threading
from asyncio import _get_running_loop  # None if no event loop runs in this thread, also after a fork
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Literal, Protocol, Self, TypeVar

from perdure.client.known_types import KnownTypes
from perdure.client.store_urls import open_store
from perdure.clock import Clock
from perdure.codec import Codec
from perdure.config import EngineConfig
from perdure.errors import InvalidArgument, RunNotFound, StoreError, WorkflowMisuse
from perdure.execution.committer import Committer
from perdure.execution.local_worker import LocalWorker, NullLocalWorker
from perdure.execution.store_session import WRITES_TIMEOUT_SECONDS, StoreSession
from perdure.execution.waiters import ChangeFuture, RunWaiters
from perdure.model.queue_records import QueueSettings
from perdure.model.records import Message, RunRecord
from perdure.model.validation import check_name, describe_value
from perdure.runner.event_loop import WorkflowLoop
from perdure.stores.protocol import Store
from perdure.stores.results import Snapshot, UnreadableRun, WriteResult
from perdure.stores.writes import DeliverMessage
from perdure.workflows.work_queues import WorkQueue

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


class RunFollower:
    """Follows a run for one caller while another process executes it. A context manager.

    The store then notifies the session's waiters after every commit to the run, best effort. A run that this process
    executes needs no follower: its worker notifies the waiters.
    """

    def __init__(self, store_session: StoreSession, run_id: str, is_executing: Callable[[str], bool]) -> None:
        self._store_session = store_session
        self._run_id = check_name("a run's id", run_id)
        self._is_executing = is_executing
        self._unfollow: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._unfollow is not None:
            self._unfollow()

    def follow_if_remote(self) -> None:
        """Follow the run from now on if it does not execute here. Call it before each read of the run."""
        if self._unfollow is None and not self._is_executing(self._run_id):
            notify = partial(self._store_session.waiters.notify, (self._run_id,), ended=False)
            self._unfollow = self._store_session.store.follow(self._run_id, notify)


class ClientSession:
    """Open store, clock, committer and waiters of one client, used from one event loop.

    `local_worker` is the worker in the same process, or a null object. `config` is that of the client. Everything that
    needs the open store raises `WorkflowMisuse` while the session is closed, unless `open_on_use` opens it.
    """

    def __init__(self, url: str | Store, config: EngineConfig | None, clock: Clock, *, client_name: str) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise InvalidArgument(f"config must be an EngineConfig, not {describe_value(config)}")
        self.config = config or EngineConfig()
        self.process_clock = clock  # `clock` is the store's time
        self.wait_for_store = False  # whether `open` retries forever
        self.local_worker: LocalWorker = NullLocalWorker()
        self.wait_strategy: WaitStrategy = DirectWait()
        self.open_on_use: Callable[[], None] | None = None
        self.known_types = KnownTypes()
        self.queue_settings: dict[str, QueueSettings] = {}  # of queues that this process has not imported
        self.declares_queue: Callable[[WorkQueue], bool] = lambda queue: False  # an engine may create its queues
        self.client_name = client_name  # as its user knows it, for error messages
        self._closed_store = open_store(url, clock)
        self._store_session: StoreSession | None = None
        self._is_opening = False

    async def open(self) -> None:
        """Open the store. `StoreError` after the attempts of `store_retry`; `WorkflowMisuse` if it is open."""
        self.check_caller()
        if self._store_session is not None or self._is_opening:
            name = self.client_name
            raise WorkflowMisuse(f"this {name} is open already: use it as it is, or create another {name}")
        self._is_opening = True
        try:
            store_session = StoreSession(self._closed_store, self.process_clock, self.config)
            await store_session.open(retry_forever=self.wait_for_store)
            self._store_session = store_session
        finally:
            self._is_opening = False

    async def close(self, writes_timeout: float = WRITES_TIMEOUT_SECONDS) -> None:
        """Wait until submitted writes have their results, then close the store. Callers that wait get an error."""
        self.check_caller()
        if self._store_session is not None:
            store_session, self._store_session = self._store_session, None
            store_session.waiters.notify(None)
            await store_session.close(writes_timeout)

    def check_caller(self) -> None:
        """Raise `WorkflowMisuse` if the caller uses an open session from another loop, thread or process.

        It would wait forever: nothing there completes its futures.
        """
        if self._store_session is not None and _get_running_loop() is not self._store_session.loop:
            raise WorkflowMisuse(describe_wrong_caller(self.client_name, self._store_session))

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
        session = self._store_session
        if session is None:
            raise WorkflowMisuse(f"this {self.client_name} is not open: use `async with {self.client_name}(...)`")
        if _get_running_loop() is not session.loop:
            self.check_caller()
        return session

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

    async def read(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call the store for a caller. While it is unavailable, retry for the attempts of `store_retry`."""
        return await self.store_session.read(call)

    # --- one run

    async def find_run(self, run_id: str) -> RunRecord | None:
        """Return the record of a run; None if there is no such run."""
        name = check_name("a run's id", run_id)
        found = (await self.read(lambda: self.store.records([name])))[0]
        if isinstance(found, UnreadableRun):
            raise StoreError(str(found))
        return found

    async def get_run(self, run_id: str) -> RunRecord:
        """Return the record of a run; `RunNotFound` if there is no such run."""
        record = await self.find_run(run_id)
        if record is None:
            raise RunNotFound(run_id)
        return record

    async def load_snapshot(self, run_id: str) -> Snapshot:
        """Return a run with its history and inbox; `RunNotFound` if there is no such run."""
        name = check_name("a run's id", run_id)
        snapshot = (await self.read(lambda: self.store.load([name])))[0]
        if snapshot is None:
            raise RunNotFound(name)
        if isinstance(snapshot, UnreadableRun):
            raise StoreError(str(snapshot))
        return snapshot

    async def deliver(self, run_id: str, message: Message, limit: int | None = None) -> WriteResult:
        """Put a message into a run's inbox and notify the local worker."""
        name = check_name("a run's id", run_id)
        write = DeliverMessage(run_id=name, message=message, now=self.clock.now(), limit=limit)
        return await self.committer.write(write, on_result=lambda result: self.local_worker.run_has_messages(name))

    # --- waiting

    def follow(self, run_id: str) -> RunFollower:
        """Return a follower of the run for one caller, as a context manager."""
        return RunFollower(self.store_session, run_id, lambda run_id: self.local_worker.is_executing(run_id))

    def wait_for_end(self, run_id: str, change: ChangeFuture, deadline: float | None) -> Change:
        """Wait for a change hint, at most until the deadline; every sweep sets one.

        Returns the run's last record if the run ended in this process.
        """
        return self.wait_strategy.wait(run_id, "end", _wait_until(change, self.clock, deadline))

    def wait_for_change(
        self, run_id: str, awaited: Awaited, change: ChangeFuture, since: float, deadline: float | None = None
    ) -> Change:
        """Wait for a change hint, or until it is time to poll a run that another process may execute.

        The caller's `RunFollower` gets a notification of each commit, which may be lost. So the caller polls too, at an
        interval that grows with the time `since` it last saw a change.
        """
        clock = self.clock
        if self.wait_strategy.polls and not self.local_worker.is_executing(run_id):
            now = clock.now()
            poll_at = now + max(MIN_POLL_INTERVAL_SECONDS, POLL_BACKOFF * (now - since))
            deadline = poll_at if deadline is None else min(deadline, poll_at)
        return self.wait_strategy.wait(run_id, awaited, _wait_until(change, clock, deadline))


def describe_wrong_caller(name: str, session: StoreSession) -> str:
    """Return from where an open client is used instead of the event loop that opened it, and what to do."""
    if os.getpid() != session.process:
        return (
            f"this {name} was opened in process {session.process}, before a fork; "
            f"create and open another {name} in the child process {os.getpid()}"
        )
    if isinstance(_get_running_loop(), WorkflowLoop):
        return f"this {name} is used in a workflow: move the call into a step, or use the methods of `ctx`"
    if threading.get_ident() != session.thread:
        return (
            f"this {name} was opened in another thread: use asyncio.run_coroutine_threadsafe(call, loop) with the "
            f"event loop that opened it, or create and open another {name} in this thread"
        )
    return (
        f"this {name} was opened on another event loop: create and open another {name} on this one, "
        "or make all calls in one asyncio.run(...)"
    )


async def _wait_until(change: ChangeFuture, clock: Clock, deadline: float | None) -> RunRecord | None:
    if deadline is None:
        return await change
    timer = clock.call_at(deadline, lambda: None if change.done() else change.set_result(None))
    try:
        return await change
    finally:
        timer.cancel()
