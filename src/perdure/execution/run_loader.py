"""RunLoader: reads runs and their messages from the store and attaches the runs to the cache.

A load reads the record, the history and the inbox of a run in one store call. The workflow then runs again from the
top: the runner replays the history, so that the run continues where its last committed turn left it.

The loader decides nothing about a run. `LoadHandler`, the coordinator, decides whether an owned run is attached.
All reads run in tasks; all results arrive as plain callbacks of the event loop, because the runner drives tasks of
its own and cannot run inside one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from perdure.codec import Codec
from perdure.codec.failures import error_to_record
from perdure.errors import InvalidPayload, StoreError
from perdure.execution.effect_runner import EffectRunner
from perdure.execution.run_cache import CachedRun, RunCache
from perdure.execution.store_session import StoreSession, retry_store_call
from perdure.model.ids import incarnation_of
from perdure.model.records import Message, SigningKey
from perdure.model.turns import AwaitingResult, ChildIdTaken, Input, MessageReceived, StepDone
from perdure.runner.history import ROWS_PER_PART, History
from perdure.runner.runner import Runner, RunStart
from perdure.stores.results import Snapshot, UnreadableRun
from perdure.workflows.context import RunInfo
from perdure.workflows.definition import REGISTRY, Workflow, WorkflowLookup

T = TypeVar("T")
# Rows of histories that are handled in one iteration of the event loop; about 5 ms. A run counts as some rows itself.
ROWS_PER_ITERATION, ROWS_PER_RUN = 2_000, 20


class LoadHandler(Protocol):
    """What the loader needs of the coordinator. The loader calls it from the event loop, never from inside a task."""

    worker: str  # id of this worker

    def should_pause(self) -> bool:
        """Return whether a turn that is being computed must be paused."""

    @property
    def keys(self) -> tuple[SigningKey, ...]:
        """The keys that sign the tokens of deferreds."""

    @property
    def workflows(self) -> WorkflowLookup:
        """The workflows that this worker can execute."""

    def on_run_loaded(self, snapshot: Snapshot, claimed_at: float | None) -> None:
        """Handle a run that was read and that this worker owns."""

    def on_run_not_owned(self, run_id: str) -> None:
        """Handle a run that was to be loaded and that does not exist, or that another worker owns."""

    def on_run_ready(self, cached: CachedRun) -> None:
        """Handle a run that was attached to the cache, or whose new messages were read."""

    def on_load_failed(self, run_id: str, cause: Exception | str, position: int | None) -> None:
        """Handle a run that cannot be read or attached; `position` is the last one of its history, if known."""

    def on_run_failed(self, cached: CachedRun, error: Exception) -> None:
        """Handle a run of the cache whose messages cannot be read."""


class RunLoader:
    """Loads runs for one coordinator."""

    def __init__(self, session: StoreSession, cache: RunCache, effects: EffectRunner, handler: LoadHandler) -> None:
        self._session = session
        self._cache = cache
        self._effects = effects
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading: set[str] = set()
        self._arranged: dict[str, History] = {}  # long histories of runs that are being loaded
        self._positions: dict[str, int] = {}  # of claimed runs that are being loaded
        self._load_again: set[str] = set()  # claimed while being loaded: the read may be from before the claim

    @property
    def is_busy(self) -> bool:
        """Whether a read is in progress."""
        return bool(self._tasks)

    @property
    def loading_count(self) -> int:
        """The number of runs that are being loaded."""
        return len(self._loading)

    def is_loading(self, run_id: str) -> bool:
        return run_id in self._loading

    async def stop(self) -> None:
        """Cancel all reads."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- runs

    def load(
        self, run_ids: Sequence[str], claimed_at: float | None = None, positions: Mapping[str, int] | None = None
    ) -> None:
        """Load runs in one store call; a run that is being loaded already is loaded again if the first read misses it.

        `claimed_at` is the time of the claim that this load follows, if there was one, and `positions` are the last
        positions of the claimed runs: a run that cannot be read is held there.
        """
        if positions:
            self._positions.update((run_id, positions[run_id]) for run_id in run_ids)
        self._load_again.update(run_id for run_id in run_ids if run_id in self._loading)
        missing = [run_id for run_id in run_ids if run_id not in self._loading]
        if missing:
            self._start_load(missing, claimed_at)

    def attach(self, snapshot: Snapshot, definition: Workflow[Any, Any], *, never_executed: bool) -> None:
        """Build the run from its snapshot and add it to the cache. `never_executed`: no worker has executed it yet."""
        codec, handler = self._session.codec, self._handler
        start = build_run_start(
            snapshot,
            definition,
            codec,
            handler.keys,
            workflows=handler.workflows,
            arranged=self._arranged.pop(snapshot.record.id, None),
            should_pause=handler.should_pause,
        )
        cached = build_cached_run(snapshot, start)
        cached.never_executed_elsewhere = never_executed
        add_messages(cached, snapshot.inbox)
        self._cache.add(cached)
        self._handler.on_run_ready(cached)

    def reload_with_inputs(self, run_id: str, definition: Workflow[Any, Any], inputs: list[Input]) -> None:
        """Replay a run from its history, then give it these inputs one by one. Its steps continue meanwhile.

        The run counts as being loaded, so that no other load attaches it without the inputs.
        """
        self._loading.add(run_id)
        self._spawn(self._reload(run_id, definition, inputs))

    def _start_load(self, run_ids: list[str], claimed_at: float | None) -> None:
        self._loading.update(run_ids)
        self._spawn(self._load(run_ids, claimed_at))

    async def _load(self, run_ids: list[str], claimed_at: float | None) -> None:
        try:
            snapshots = await self._read(lambda: self._session.store.load(run_ids))
        except Exception as error:
            if len(run_ids) > 1:  # one run cannot be read: find it, and load the others
                for run_id in run_ids:
                    self._start_load([run_id], claimed_at)
            else:
                self._loop.call_soon(self._on_load_failed, run_ids[0], error, None)
            return
        rows = 0
        for run_id, snapshot in zip(run_ids, snapshots, strict=True):
            if isinstance(snapshot, Snapshot):
                rows += await self._arrange_if_long(snapshot)
            self._loop.call_soon(self._on_loaded, run_id, snapshot, claimed_at)
            rows += ROWS_PER_RUN
            if rows > ROWS_PER_ITERATION:
                rows = 0
                await asyncio.sleep(0)

    async def _arrange_if_long(self, snapshot: Snapshot) -> int:
        """Arrange a long history, with pauses for other work. Return the number of rows that are left to arrange."""
        entries = snapshot.entries
        if len(entries) <= ROWS_PER_PART:
            return len(entries)
        history = History()
        try:
            for _ in history.arrange(entries):
                await asyncio.sleep(0)
        except Exception:
            return len(entries)  # attaching the run raises the same error and holds the run
        self._arranged[snapshot.record.id] = history
        return 0

    def _on_loaded(self, run_id: str, snapshot: Snapshot | UnreadableRun | None, claimed_at: float | None) -> None:
        try:
            if isinstance(snapshot, UnreadableRun):
                self._on_load_failed(run_id, str(snapshot), snapshot.position)
            else:
                self._handle_loaded(run_id, snapshot, claimed_at)
        finally:
            self._arranged.pop(run_id, None)

    def _handle_loaded(self, run_id: str, snapshot: Snapshot | None, claimed_at: float | None) -> None:
        again = self._end_load(run_id)
        if self._cache.get(run_id) is not None:
            return
        if snapshot is not None and snapshot.record.owner == self._handler.worker:
            try:
                self._handler.on_run_loaded(snapshot, claimed_at)
            except Exception as error:
                self._handler.on_load_failed(run_id, error, snapshot.position)
            return
        if again:  # this worker claimed the run after the read
            self._start_load([run_id], None)
        self._handler.on_run_not_owned(run_id)

    def _on_load_failed(self, run_id: str, cause: Exception | str, position: int | None) -> None:
        position = self._positions.get(run_id) if position is None else position
        self._end_load(run_id)
        if self._cache.get(run_id) is None:
            self._handler.on_load_failed(run_id, cause, position)

    def _end_load(self, run_id: str) -> bool:
        """Mark a run as loaded; return whether it was to be loaded again meanwhile."""
        again = run_id in self._load_again
        self._loading.discard(run_id)
        self._load_again.discard(run_id)
        self._positions.pop(run_id, None)
        return again

    async def _reload(self, run_id: str, definition: Workflow[Any, Any], inputs: list[Input]) -> None:
        try:
            snapshot = (await self._read(lambda: self._session.store.load([run_id])))[0]
        except Exception as error:
            self._loop.call_soon(self._on_reload_failed, run_id, error, None)
            return
        self._loop.call_soon(self._on_reloaded, run_id, snapshot, definition, inputs)

    def _on_reloaded(
        self,
        run_id: str,
        snapshot: Snapshot | UnreadableRun | None,
        definition: Workflow[Any, Any],
        inputs: list[Input],
    ) -> None:
        if isinstance(snapshot, UnreadableRun):
            self._on_reload_failed(run_id, str(snapshot), snapshot.position)
            return
        again = self._end_load(run_id)
        if self._cache.get(run_id) is not None:
            return  # a new run with this id was created here: the steps in this process are its own
        if snapshot is None or snapshot.record.owner != self._handler.worker:
            self._effects.cancel_all(run_id)
            if again:  # this worker claimed the run after the read
                self._start_load([run_id], None)
            self._handler.on_run_not_owned(run_id)
            return
        try:
            self._attach_with_inputs(snapshot, definition, inputs)
        except Exception as error:
            self._effects.cancel_all(run_id)
            self._handler.on_load_failed(run_id, error, snapshot.position)

    def _attach_with_inputs(self, snapshot: Snapshot, definition: Workflow[Any, Any], inputs: list[Input]) -> None:
        # The replay must not start what is executing here, nor what has ended and is among the inputs.
        ended = {given.location for given in inputs if isinstance(given, StepDone | AwaitingResult | ChildIdTaken)}
        under_way = self._effects.running_locations(snapshot.record.id) | ended
        start = build_run_start(
            snapshot,
            definition,
            self._session.codec,
            self._handler.keys,
            workflows=self._handler.workflows,
            under_way=under_way,
            should_pause=self._handler.should_pause,
        )
        cached = build_cached_run(snapshot, start)
        feed_inputs_singly(cached, inputs)
        self._cache.add(cached)
        self._handler.on_run_ready(cached)

    def _on_reload_failed(self, run_id: str, cause: Exception | str, position: int | None) -> None:
        self._effects.cancel_all(run_id)
        self._on_load_failed(run_id, cause, position)

    # --- messages

    def fetch_messages(self, cached: CachedRun) -> None:
        """Read the run's new messages; the run advances when they are read.

        A message that a step sent to its own run is therefore received before the result of the step. Inputs that
        arrive after a further message wait for the next read. A turn lies between two reads, so that a flood of
        messages does not stop the run.
        """
        if cached.fetching:
            cached.more_messages = True
            return
        cached.fetching, cached.more_messages = True, False
        cached.inputs += cached.deferred_inputs
        cached.deferred_inputs = []
        self._spawn(self._fetch_messages(cached))

    async def _fetch_messages(self, cached: CachedRun) -> None:
        try:
            messages = await self._read(lambda: self._session.store.inbox(cached.id, cached.seen))
        except Exception as error:
            self._loop.call_soon(self._on_read_failed, cached, error)
            return
        self._loop.call_soon(self._on_messages_read, cached, messages)

    def _on_read_failed(self, cached: CachedRun, error: Exception) -> None:
        cached.fetching = False
        if self._cache.active(cached.id) is cached:
            self._handler.on_run_failed(cached, error)

    def _on_messages_read(self, cached: CachedRun, messages: Sequence[Message]) -> None:
        cached.fetching = False
        if self._cache.active(cached.id) is cached:
            add_messages(cached, messages)
            self._handler.on_run_ready(cached)
        if cached.more_messages and cached.active:
            self.fetch_messages(cached)
        cached.more_messages = cached.more_messages and cached.fetching

    # --- tasks

    async def _read(self, read: Callable[[], Awaitable[T]]) -> T:
        return await retry_store_call(read, self._session.clock, self._session.config.store_retry)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# --- pure functions: from a snapshot to a run in memory


def build_run_start(
    snapshot: Snapshot,
    definition: Workflow[Any, Any],
    codec: Codec,
    keys: tuple[SigningKey, ...],
    *,
    workflows: WorkflowLookup = REGISTRY,
    strict: bool = False,
    under_way: frozenset[str] = frozenset(),
    arranged: History | None = None,
    should_pause: Callable[[], bool] | None = None,
) -> RunStart:
    """Return everything that a runner replays a run from.

    `workflows`: those that the worker can execute. `arranged`: the history of the snapshot, if it was arranged before.
    `under_way`: locations whose steps or external effects this process executes already; the replay starts none of them
    again.
    """
    record = snapshot.record
    return RunStart(
        definition=definition,
        facts=RunInfo(
            id=record.id,
            workflow=record.workflow,
            version=record.version,
            generation=record.generation,
            tags=record.tags,
            parent=record.parent,
            incarnation=incarnation_of(record.created_by),
            pool=record.pool,
        ),
        input=record.input,
        seed=record.seed,
        first_executed_at=record.first_executed_at if record.first_executed_at is not None else record.created_at,
        history=snapshot.entries,
        deadline_at=record.deadline_at,
        codec=codec,
        strict=strict,
        under_way=under_way,
        arranged=arranged,
        should_pause=should_pause,
        run_attempt=record.run_attempt,
        epoch=record.epoch,
        keys=keys,
        waits=record.waits,
        workflows=workflows,
    )


def build_cached_run(snapshot: Snapshot, start: RunStart) -> CachedRun:
    """Return the run at the position of its snapshot, with a runner that has not advanced yet."""
    return CachedRun(snapshot.record, start.definition, Runner(start), snapshot.position)


def is_first_execution(snapshot: Snapshot, claimed_at: float) -> bool:
    """Return whether no worker executed this generation before the claim of that time.

    The first claim sets `first_executed_at`. Another worker may have claimed the run in the same instant and died:
    then the store has counted a recovery, or the history contains a step.
    """
    record = snapshot.record
    started_now = record.first_executed_at == claimed_at and record.recoveries == 0
    return started_now and not any(entry.kind == "step" for entry in snapshot.entries)


def add_messages(cached: CachedRun, messages: Sequence[Message]) -> None:
    """Add messages that the run has not read yet to its inputs."""
    for message in messages:
        if message.number > cached.seen:
            cached.seen = message.number
            cached.inputs.append(MessageReceived(message))


def feed_inputs_singly(cached: CachedRun, inputs: list[Input]) -> None:
    """Give the run the inputs of a turn that could not be stored, each in a turn of its own."""
    cached.seen = max((given.message.number for given in inputs if isinstance(given, MessageReceived)), default=0)
    cached.inputs = inputs
    cached.single_input_mode = True


def inputs_to_retry(cached: CachedRun, taken: Sequence[Input], error: StoreError, codec: Codec) -> list[Input] | None:
    """Return the inputs for another try of a turn that the store cannot store, or None if no input can be replaced.

    Several inputs are returned unchanged, to be taken one per turn. A single step result is replaced by a failure of
    the step.
    """
    if not cached.single_input_mode and len(taken) > 1:
        return list(taken)
    replaced = [_as_failure(given, error, codec) for given in taken]
    return None if replaced == list(taken) else replaced


def _as_failure(given: Input, error: StoreError, codec: Codec) -> Input:
    if isinstance(given, StepDone) and given.value is not None:
        refused = InvalidPayload(f"result of step {given.location}: the store cannot take it: {error}")
        return StepDone(given.location, given.attempt, error=error_to_record(refused, codec, location=given.location))
    return given
