"""Client: every call about runs, without executing any.

A facade: each public call is one line that delegates to a component. The components share one `ClientSession`. `Engine`
is a client with a worker in the same process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from perdure.client.control import ControlClient
from perdure.client.dead_letters import DeadLetterClient
from perdure.client.deferreds import DeferredClient
from perdure.client.messages import MessageClient
from perdure.client.queries import QueryClient
from perdure.client.queue_reader import QueueReader
from perdure.client.queue_views import QueueDescription
from perdure.client.queues import QueueHandle
from perdure.client.run_handle import Run
from perdure.client.schedule_calls import ScheduleCalls
from perdure.client.schedules import ScheduleClient
from perdure.client.session import ClientSession
from perdure.client.starts import StartClient
from perdure.client.streams import StreamClient
from perdure.client.views import DeadLetterView, HistoryEntry, RunDescription, RunList, StreamItemView, Suspended
from perdure.clock import SYSTEM_CLOCK, Clock
from perdure.config import EngineConfig
from perdure.execution.backfill import BackfillResult
from perdure.model.queries import RunQuery
from perdure.model.records import RunStatus
from perdure.model.tags import TagValue
from perdure.model.validation import check_name, check_seconds
from perdure.stores.protocol import Store
from perdure.workflows.context import Context
from perdure.workflows.definition import BoundWorkflow, Workflow
from perdure.workflows.schedules import Overlap
from perdure.workflows.start_options import StartKeywords
from perdure.workflows.types import Complete

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
G = TypeVar("G")
H = TypeVar("H")
T = TypeVar("T")
Body = Coroutine[Any, Any, R]
Timeout = float | timedelta | None


class Client(ScheduleCalls):
    """Starts, queries and controls runs; workers in other processes execute them.

    Use it as `async with Client(url) as client:`, from one event loop.
    """

    def __init__(self, url: str | Store, *, config: EngineConfig | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._session = session = ClientSession(url, config, clock, client_name=type(self).__name__)
        self._queries = QueryClient(session)
        self._starts = StartClient(session, self._queries)
        self._control = ControlClient(session)
        self._schedules = ScheduleClient(session, self._starts)
        self._messages = MessageClient(session)
        self._deferreds = DeferredClient(session)
        self._dead_letters = DeadLetterClient(session, self._schedules)
        self._streams = StreamClient(session)
        self._queue_reader = QueueReader(session)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def open(self) -> None:
        """Open the store; `async with` calls it. Raises `StoreError` after all attempts of `store_retry`."""
        await self._session.open()

    async def shutdown(self, grace: float | timedelta | None = None) -> None:
        """Close the store; `async with` calls it."""
        if grace is not None:
            check_seconds("grace", grace)
        await self._session.close()

    # --- start

    @overload
    async def start(self, wf: Callable[[Context], Body[R]], /, **options: Unpack[StartKeywords]) -> Run[R]: ...
    @overload
    async def start(self, wf: Callable[[Context, A], Body[R]], a: A, /, **options: Unpack[StartKeywords]) -> Run[R]: ...
    @overload
    async def start(
        self, wf: Callable[[Context, A, B], Body[R]], a: A, b: B, /, **options: Unpack[StartKeywords]
    ) -> Run[R]: ...
    @overload
    async def start(
        self, wf: Callable[[Context, A, B, C], Body[R]], a: A, b: B, c: C, /, **options: Unpack[StartKeywords]
    ) -> Run[R]: ...
    @overload
    async def start(
        self, wf: Callable[[Context, A, B, C, D], Body[R]], a: A, b: B, c: C, d: D, /, **options: Unpack[StartKeywords]
    ) -> Run[R]: ...
    @overload
    async def start(
        self,
        wf: Callable[[Context, A, B, C, D, E], Body[R]],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        /,
        **options: Unpack[StartKeywords],
    ) -> Run[R]: ...
    @overload
    async def start(
        self,
        wf: Callable[[Context, A, B, C, D, E, F], Body[R]],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        f: F,
        /,
        **options: Unpack[StartKeywords],
    ) -> Run[R]: ...
    @overload
    async def start(
        self,
        wf: Callable[[Context, A, B, C, D, E, F, G], Body[R]],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        f: F,
        g: G,
        /,
        **options: Unpack[StartKeywords],
    ) -> Run[R]: ...
    @overload
    async def start(
        self,
        wf: Callable[[Context, A, B, C, D, E, F, G, H], Body[R]],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        f: F,
        g: G,
        h: H,
        /,
        **options: Unpack[StartKeywords],
    ) -> Run[R]: ...
    @overload
    async def start(self, wf: BoundWorkflow[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    async def start(self, wf: Workflow[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    async def start(self, wf: str, /, *args: Any, **options: Unpack[StartKeywords]) -> Run[Any]: ...
    async def start(self, wf: Any, /, *args: Any, **given: Any) -> Run[Any]:
        """Start a run and return its handle when the run is stored.

        Keyword arguments are options (`id`, `tags`, `delay`, `retention`, `timeout`, `if_exists`, `send`, ...) or
        belong to the payload. `timeout` replaces that of the workflow. `send` are first messages, stored with the run.

        If the id is taken by a run of the same workflow with an equal payload, return a handle on that run and send it
        the messages. Otherwise raise `RunConflict`. With `if_exists="reject"` always raise it. With "restart_ended" an
        ended run starts a new generation with this payload; with "restart" an open run is terminated first.
        """
        request, run_id, created = await self._starts.start(wf, args, given)
        return Run(run_id, self, request.workflow, created=created)

    @overload
    async def execute(self, wf: Callable[[Context], Body[R]], /, **options: Unpack[StartKeywords]) -> R: ...
    @overload
    async def execute(self, wf: Callable[[Context, A], Body[R]], a: A, /, **options: Unpack[StartKeywords]) -> R: ...
    @overload
    async def execute(
        self, wf: Callable[[Context, A, B], Body[R]], a: A, b: B, /, **options: Unpack[StartKeywords]
    ) -> R: ...
    @overload
    async def execute(
        self, wf: Callable[[Context, A, B, C], Body[R]], a: A, b: B, c: C, /, **options: Unpack[StartKeywords]
    ) -> R: ...
    @overload
    async def execute(
        self, wf: Callable[[Context, A, B, C, D], Body[R]], a: A, b: B, c: C, d: D, /, **options: Unpack[StartKeywords]
    ) -> R: ...
    @overload
    async def execute(
        self,
        wf: Callable[[Context, A, B, C, D, E], Body[R]],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        /,
        **options: Unpack[StartKeywords],
    ) -> R: ...
    @overload
    async def execute(
        self,
        wf: Callable[[Context, A, B, C, D, E, F], Body[R]],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        f: F,
        /,
        **options: Unpack[StartKeywords],
    ) -> R: ...
    @overload
    async def execute(
        self,
        wf: Callable[[Context, A, B, C, D, E, F, G], Body[R]],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        f: F,
        g: G,
        /,
        **options: Unpack[StartKeywords],
    ) -> R: ...
    @overload
    async def execute(
        self,
        wf: Callable[[Context, A, B, C, D, E, F, G, H], Body[R]],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        f: F,
        g: G,
        h: H,
        /,
        **options: Unpack[StartKeywords],
    ) -> R: ...
    @overload
    async def execute(self, wf: BoundWorkflow[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def execute(self, wf: Workflow[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def execute(self, wf: str, /, *args: Any, **options: Unpack[StartKeywords]) -> Any: ...
    async def execute(self, wf: Any, /, *args: Any, **given: Any) -> Any:
        """Start a run like `start`, wait for its end and return its value.

        Raises what `start` and `result` raise.
        """
        return await self._starts.execute(wf, args, given)

    # --- query

    def get(self, run_id: str) -> Run[Any]:
        """Return a handle on a run. The handle's calls raise `RunNotFound` if the run does not exist."""
        return Run(check_name("a run's id", run_id), self, None, created=False)

    async def status(self, run_id: str) -> RunStatus | None:
        """Return the status of a run; None if there is no such run."""
        return await self._queries.status(run_id)

    @overload
    async def poll(self, run_id: str, type: None = None) -> Complete[Any] | Suspended | None: ...
    @overload
    async def poll(self, run_id: str, type: type[T]) -> Complete[T] | Suspended | None: ...
    @overload
    async def poll(self, run_id: str, type: Any) -> Complete[Any] | Suspended | None: ...
    async def poll(self, run_id: str, type: Any = None) -> Complete[Any] | Suspended | None:
        """Return the latest outcome of a run without waiting; None if the run executes or does not exist.

        A value is typed as by `result`.
        """
        return await self._queries.poll(run_id, type)

    @overload
    async def result(
        self, run_id: str, timeout: Timeout = None, raise_if_held: bool = False, type: None = None
    ) -> Any: ...
    @overload
    async def result(
        self, run_id: str, timeout: Timeout = None, raise_if_held: bool = False, *, type: type[T]
    ) -> T: ...
    @overload
    async def result(self, run_id: str, timeout: Timeout = None, raise_if_held: bool = False, *, type: Any) -> Any: ...
    async def result(self, run_id: str, timeout: Timeout = None, raise_if_held: bool = False, type: Any = None) -> Any:
        """Wait for the end of a run and return its value.

        The value has the given type, else the type that the workflow declares, if this process has imported it (the
        engine's own workflows first), else it is plain data. Raises `InvalidPayload` if the value does not match.

        Raises `RunFailed`, `RunCancelled` or `RunNotFound`, and `TimeoutError` after `timeout`. A held run is waited
        for; with `raise_if_held` the call raises `RunHeld` with the reason.
        """
        return await self._queries.result(run_id, timeout, raise_if_held=raise_if_held, type=type)

    async def describe(self, run_id: str) -> RunDescription:
        """Return everything about a run but its history, with the reasons why it waits. Raises `RunNotFound`."""
        return await self._queries.describe(run_id)

    @overload
    async def published(self, run_id: str, key: None = None, type: None = None) -> dict[str, Any]: ...
    @overload
    async def published(self, run_id: str, key: None = None, *, type: type[T]) -> dict[str, T]: ...
    @overload
    async def published(self, run_id: str, key: str, type: type[T]) -> T | None: ...
    @overload
    async def published(self, run_id: str, key: str | None = None, type: Any = None) -> Any: ...
    async def published(self, run_id: str, key: str | None = None, type: Any = None) -> Any:
        """Return the latest value that a run published under a key, or a dict of all keys.

        The value of a key that the run has not published is None. Values have the given type; without one they are
        plain data. Raises `RunNotFound`, and `InvalidPayload` if a value does not match the type.
        """
        return await self._queries.published(run_id, key, type)

    async def history(self, run_id: str, *, after: int = 0, limit: int | None = None) -> list[HistoryEntry]:
        """Return the entries of a run in the order of the calls that made them. Raises `RunNotFound`.

        With `limit`, return a page: up to `limit` entries in the order in which they were last written. Pass the
        `position` of the last one as `after` to get the next page; an empty page is the end. An entry that changes
        meanwhile is in a later page again.

        Results of steps and children and received events are typed if this process has imported their definitions.
        """
        return await self._queries.history(run_id, after, limit)

    async def export_history(self, run_id: str) -> dict[str, Any]:
        """Return a run with its history as plain data, for `perdure.testing.replay`; `perdure export` writes it."""
        return await self._queries.export_history(run_id)

    def watch(self, run_id: str) -> AsyncIterator[HistoryEntry]:
        """Yield the entries of a run, and each entry again when it changes; end when the run ends."""
        return self._queries.watch(run_id)

    async def runs(self, query: RunQuery | None = None) -> RunList:
        """Return a page of runs, newest first, by status, workflow, tag, parent, time, id prefix, hold, wait or filter.

        The page has no payloads: `input` and `result` are None. `describe` returns them.
        """
        return await self._queries.runs(query)

    async def count(self, query: RunQuery | None = None, *, cap: int = 10_001) -> int:
        """Return the number of runs that match, at most `cap`. `limit` and `after` of the query are ignored."""
        return await self._queries.count(query, cap)

    @overload
    def read_stream(
        self, run_id: str, name: str, start: int = 0, type: None = None, *, details: Literal[False] = False
    ) -> AsyncIterator[Any]: ...
    @overload
    def read_stream(
        self, run_id: str, name: str, start: int = 0, *, type: type[T], details: Literal[False] = False
    ) -> AsyncIterator[T]: ...
    @overload
    def read_stream(
        self, run_id: str, name: str, start: int = 0, *, type: type[T], details: Literal[True]
    ) -> AsyncIterator[StreamItemView[T]]: ...
    @overload
    def read_stream(
        self, run_id: str, name: str, start: int = 0, type: Any = None, *, details: Literal[True]
    ) -> AsyncIterator[StreamItemView[Any]]: ...
    @overload
    def read_stream(
        self, run_id: str, name: str, start: int = 0, type: Any = None, *, details: bool = False
    ) -> AsyncIterator[Any]: ...
    def read_stream(
        self, run_id: str, name: str, start: int = 0, type: Any = None, *, details: bool = False
    ) -> AsyncIterator[Any]:
        """Yield the values of a stream from this offset on; end when the run has ended and all values are read.

        Values have the given type; without one they are plain data. Raises `InvalidPayload` at a value that does not
        match the type.

        With `details`, yield a `StreamItemView`: value, offset, time, location, attempt, and whether another attempt
        superseded the one that wrote it. Raises `RunNotFound`.
        """
        return self._streams.read_stream(run_id, name, start, type, details=details)

    # --- control

    async def cancel(self, run_id: str, reason: str | None = None) -> bool:
        """Request cancellation: it is raised in the run's workflow. False if the run has ended or does not exist.

        The reason is in the history, in `describe` and in the exceptions. A held run processes the request when it is
        resumed; until then `describe` shows it as pending.
        """
        return await self._control.cancel(run_id, reason)

    async def terminate(self, run_id: str) -> bool:
        """End a run at once, without compensations. False if the run has ended or does not exist."""
        return await self._control.terminate(run_id)

    async def pause(self, run_id: str, reason: str | None = None) -> None:
        """Hold a run until `resume`. Steps that execute finish first; no other step starts.

        The run is held when its worker has processed the request. Raises `RunNotFound` or `RunTerminated`.
        """
        await self._control.pause(run_id, reason)

    async def resume(self, run_id: str) -> None:
        """Resume a suspended run now, or retry a held one. Raises `RunNotFound` or `RunTerminated`."""
        await self._control.resume(run_id)

    async def tag(
        self, run_id: str, tags: Mapping[str, TagValue | None] | None = None, /, **named: TagValue | None
    ) -> None:
        """Change tags of a run, also of one that has ended: `tag(id, amount=999, stage=None)`. None removes a tag.

        If a worker executes the run, the run's next turn applies the change; otherwise it is applied at once. A dict
        takes names that are no identifiers. Raises `RunNotFound`.
        """
        await self._control.tag(run_id, tags, named)

    async def delete(self, run_id: str) -> None:
        """Delete an ended run and all that it owns: history, inbox, published values, streams, remembered event ids.

        The id can be used again: a later run meets nothing of this one. Dead letters and children stay. Raises
        `RunNotFound`, or `RunInUse` (a `RunConflict`) if the run, or a parent that may read its result, has not ended.
        """
        await self._control.delete(run_id)

    async def rewind(self, run_id: str, location: str) -> None:
        """Discard a run's history from this location on and execute it again from there. The run may have ended.

        Raises `RunNotFound`, or `WorkflowMisuse` if the history does not contain the location (any more).
        """
        await self._control.rewind(run_id, location)

    async def fork(self, run_id: str, location: str, *, id: str | None = None) -> Run[Any]:
        """Start a new run from a copy of a run's history before this location. The original run does not change.

        Raises what `rewind` raises, and `RunConflict` if the new id is taken.
        """
        return Run(await self._control.fork(run_id, location, id), self, None, created=True)

    async def trigger_schedule(self, id: str, overlap: Overlap | None = None) -> Run[Any]:
        """Start a run of a schedule now, beside its rule. With "skip", an open run is returned instead."""
        run_id, created = await self._schedules.trigger(id, overlap)
        return Run(run_id, self, None, created=created)

    async def backfill_schedule(
        self, id: str, start: datetime, end: datetime, overlap: Overlap = "queue"
    ) -> Run[BackfillResult]:
        """Start the runs of a schedule's time slots in [start, end) that have none. `end` is not in the future.

        Returns an internal run, which does this in pages and returns how many it started. `overlap` is "queue", "skip"
        or "allow". Raises `ScheduleNotFound`.
        """
        return Run(await self._schedules.backfill(id, start, end, overlap), self, None, created=True)

    # --- messages

    async def send(self, run_id: str, event: Any, payload: Any = None, *, event_id: str | None = None) -> None:
        """Put an event into a run's mailbox, once per `event_id`.

        `event` is an instance of an `@event` class, or a topic's name with a `payload`. Raises `RunNotFound`,
        `RunTerminated` or `QueueFull`.
        """
        await self._messages.send(run_id, event, payload, event_id)

    @overload
    async def request(
        self,
        run_id: str,
        event: Any,
        timeout: Timeout = None,
        *,
        payload: Any = None,
        event_id: str | None = None,
        type: type[T],
    ) -> T: ...
    @overload
    async def request(
        self,
        run_id: str,
        event: Any,
        timeout: Timeout = None,
        *,
        payload: Any = None,
        event_id: str | None = None,
        type: Any = None,
    ) -> Any: ...
    async def request(
        self,
        run_id: str,
        event: Any,
        timeout: Timeout = None,
        *,
        payload: Any = None,
        event_id: str | None = None,
        type: Any = None,
    ) -> Any:
        """Send an event to a run, wait for the run's reply and return it.

        The reply has the given type; without one it is plain data. Raises `InvalidPayload` if it does not match.

        Repeating the call with the same `event_id`, for example after a restart, returns the reply to the first call.
        Raises what `send` raises, `RunTerminated` also if the run ends without a reply, `RequestRejected` if the run
        rejects the request, and `TimeoutError`.
        """
        return await self._messages.request(run_id, event, timeout, payload, event_id, type)

    async def broadcast(self, event: Any, *, event_id: str | None = None) -> int:
        """Publish an event to the topic of its name, once per `event_id`. Return the number of runs it woke."""
        return await self._messages.broadcast(event, event_id)

    async def emit(self, topic: str, payload: Any = None, *, event_id: str | None = None) -> int:
        """Publish a value to a topic, once per `event_id`. Return the number of runs it woke."""
        return await self._messages.emit(topic, payload, event_id)

    # --- deferreds

    async def complete(self, token: str, value: Any = None) -> bool:
        """Complete a deferred with a value. The first call wins.

        Raises `InvalidPayload` if the value does not fit the type of the deferred and this process knows the type,
        because it has executed the run. Otherwise the run checks the value. One that does not fit becomes a dead letter
        of kind "misfit", and does not count: the next value that fits wins.

        False if the deferred was completed before, or its run no longer waits for it. Raises `InvalidToken` if the
        token is forged or its run does not exist.
        """
        return await self._deferreds.complete(token, value)

    async def fail(self, token: str, error: BaseException | str) -> bool:
        """Complete a deferred with an error, which its run raises; otherwise like `complete`."""
        return await self._deferreds.fail(token, error)

    async def deferred_token(self, run_id: str, name: str) -> str:
        """Return the token of a run's deferred, also before the run creates it. Raises `RunNotFound`."""
        return await self._deferreds.deferred_token(run_id, name)

    async def rotate_keys(self) -> None:
        """Create a new signing key for the tokens of runs that start two minutes later. Older tokens stay valid."""
        await self._deferreds.rotate_keys()

    # --- work queues

    def queue(self, name: str) -> QueueHandle:
        """Return a handle on a work queue: describe, pause, resume, resize, list, move, release and clear its runs.

        The handle's calls raise `QueueNotFound` if the store has no queue of this name.
        """
        return QueueHandle(self._session, name)

    async def queues(self) -> list[QueueDescription]:
        """Return all work queues in order of name, without the states of the runs that hold their slots."""
        return await self._queue_reader.describe_all()

    # --- dead letters

    @overload
    async def dead_letters(
        self, event: type[T], *, kind: str | None = None, limit: int = 100, after: str | None = None
    ) -> list[DeadLetterView[T]]: ...
    @overload
    async def dead_letters(
        self, event: str | None = None, *, kind: str | None = None, limit: int = 100, after: str | None = None
    ) -> list[DeadLetterView[Any]]: ...
    async def dead_letters(
        self, event: Any = None, *, kind: str | None = None, limit: int = 100, after: str | None = None
    ) -> list[DeadLetterView[Any]]:
        """Return a page of dead letters, oldest first, of one event (class or name) or one kind.

        With an event class, values are its instances; otherwise they are plain data. So is an event that became a dead
        letter because it does not match the class.
        """
        return await self._dead_letters.dead_letters(event, kind, limit, after)

    async def replay_dead_letter(self, dead_letter_id: str, to: str | None = None) -> bool:
        """Send the event of a dead letter again, to its topic or to run `to`, and remove the dead letter.

        For missed time slots of a schedule, start their runs (`backfill_schedule`).

        Both are one write: of concurrent calls one delivers the event, once. False if the dead letter does not exist.
        Raises what `send` raises; then the dead letter stays.
        """
        return await self._dead_letters.replay(dead_letter_id, to)

    async def remove_dead_letter(self, dead_letter_id: str) -> bool:
        """Delete a dead letter. False if it does not exist, for example because another caller removed it."""
        return await self._dead_letters.remove(dead_letter_id)
