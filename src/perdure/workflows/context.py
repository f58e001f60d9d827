"""Context: what workflow code sees of the run that it is part of.

Everything here is deterministic: the same on every replay. The context decides nothing; it asks the run (`Asks`, which
the runner implements) and hands back what the run answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, cast, overload

from msgspec import Struct

from perdure.clock import to_datetime
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.validation import check_count, check_name, check_seconds
from perdure.retry import Retry
from perdure.workflows.branches import BranchHost, branches_of, join, map_items, race
from perdure.workflows.children import Child, ChildHost, run_child, start_child
from perdure.workflows.deferreds import Deferred, DeferredHost
from perdure.workflows.durable_call import CommandCall
from perdure.workflows.loops import Break, Continue, LoopHost, loop
from perdure.workflows.messages import ReceiveHost, Request, broadcast, receive, receive_batch, receive_request, send
from perdure.workflows.rollback import RollbackHost, RollbackScope
from perdure.workflows.steps import UNSET, Step, StepOptions, Unset, body_of, checked_options
from perdure.workflows.streams import Stream, publish

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
Body = Coroutine[Any, Any, R]
U = TypeVar("U")
V = TypeVar("V")

LOGGER = logging.getLogger("perdure.workflow")


class RunInfo(Struct, frozen=True):
    """What is fixed about a run while one of its generations executes."""

    id: str
    workflow: str
    version: int
    generation: int
    tags: Mapping[str, str]
    parent: str | None


class RunApi(BranchHost, ReceiveHost, ChildHost, DeferredHost, LoopHost, RollbackHost, Protocol):
    """What a context asks of the run behind it."""

    facts: RunInfo

    @property
    def replaying(self) -> bool: ...

    def scope_random(self, purpose: str) -> random.Random: ...

    def current_location(self) -> str: ...

    def sleep_until(self, due_at: float) -> Any: ...

    def continue_as(self, workflow: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...

    def register(self, kind: str, fn: Any, args: tuple[Any, ...]) -> None: ...

    def pin_version(self, gate: str, latest: int) -> int: ...

    def skip_removed_entry(self, name: str, kind: str) -> None: ...


class Context:
    """The first parameter of every workflow."""

    def __init__(self, run: RunApi) -> None:
        self._run = run

    @cached_property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that knows the run and the place in it, and is silent on replay."""
        return _RunLog(self._run)

    # --- who and when

    @property
    def run_id(self) -> str:
        return self._run.facts.id

    @property
    def workflow(self) -> str:
        return self._run.facts.workflow

    @property
    def tags(self) -> Mapping[str, str]:
        return self._run.facts.tags

    @property
    def parent(self) -> str | None:
        return self._run.facts.parent

    @property
    def generation(self) -> int:
        return self._run.facts.generation

    @property
    def replaying(self) -> bool:
        """True while recorded history is being applied. For logging: a branch on it would be a divergence."""
        return self._run.replaying

    def now(self) -> datetime:
        """The time of the last thing that happened to the run: never decreasing, and the same on every replay."""
        return to_datetime(self._run.now())

    @property
    def random(self) -> random.Random:
        """Random numbers that are the same on every replay; each task has its own."""
        return self._run.scope_random("random")

    def uuid(self) -> uuid.UUID:
        """A random UUID that is the same on every replay."""
        return uuid.UUID(int=self._run.scope_random("uuid").getrandbits(128), version=4)

    # --- waiting

    def sleep(self, duration: float | timedelta) -> Coroutine[None, None, None]:
        """Sleep durably. The deadline is fixed when the call is first reached; zero returns at once."""
        seconds = check_seconds("a sleep", duration)
        return CommandCall("sleep", lambda: self._run.sleep_until(self._run.now() + seconds), self._run.next_number())

    def sleep_until(self, when: datetime) -> Coroutine[None, None, None]:
        """Sleep durably until an aware datetime; one that has passed returns at once."""
        if not isinstance(when, datetime) or when.tzinfo is None:
            raise InvalidArgument(f"sleep_until takes an aware datetime (with a timezone), not {when!r}")
        return CommandCall("sleep", lambda: self._run.sleep_until(when.timestamp()), self._run.next_number())

    # --- events and deferreds

    @overload
    def receive(self, first: type[T], /, *, timeout: float | timedelta | None = None) -> Coroutine[None, None, T]: ...
    @overload
    def receive(
        self, first: type[T], second: type[U], /, *, timeout: float | timedelta | None = None
    ) -> Coroutine[None, None, T | U]: ...
    @overload
    def receive(
        self, first: type[T], second: type[U], third: type[V], /, *, timeout: float | timedelta | None = None
    ) -> Coroutine[None, None, T | U | V]: ...
    @overload
    def receive(
        self, first: type[Any] | str, /, *more: type[Any] | str, timeout: float | timedelta | None = None
    ) -> Coroutine[None, None, Any]: ...
    def receive(self, *kinds: Any, timeout: float | timedelta | None = None) -> Any:
        """The next event of any of these types or names. `TimeoutError` if none comes in time."""
        return receive(self._run, kinds, timeout)

    @overload
    def receive_batch(
        self, first: type[T], /, *, max: int = 10, timeout: float | timedelta | None = None
    ) -> Coroutine[None, None, list[T]]: ...
    @overload
    def receive_batch(
        self, first: type[T], second: type[U], /, *, max: int = 10, timeout: float | timedelta | None = None
    ) -> Coroutine[None, None, list[T | U]]: ...
    @overload
    def receive_batch(
        self,
        first: type[T],
        second: type[U],
        third: type[V],
        /,
        *,
        max: int = 10,
        timeout: float | timedelta | None = None,
    ) -> Coroutine[None, None, list[T | U | V]]: ...
    @overload
    def receive_batch(
        self, first: type[Any] | str, /, *more: type[Any] | str, max: int = 10, timeout: float | timedelta | None = None
    ) -> Coroutine[None, None, list[Any]]: ...
    def receive_batch(self, *kinds: Any, max: int = 10, timeout: float | timedelta | None = None) -> Any:
        """The events that are there, waiting for the first: 1 to `max` of them, or [] if none comes in time."""
        return receive_batch(self._run, kinds, max, timeout)

    @overload
    def receive_request(
        self, first: type[T], /, *, timeout: float | timedelta | None = None
    ) -> Coroutine[None, None, Request[T]]: ...
    @overload
    def receive_request(
        self, first: type[T], second: type[U], /, *, timeout: float | timedelta | None = None
    ) -> Coroutine[None, None, Request[T | U]]: ...
    @overload
    def receive_request(
        self, first: type[T], second: type[U], third: type[V], /, *, timeout: float | timedelta | None = None
    ) -> Coroutine[None, None, Request[T | U | V]]: ...
    @overload
    def receive_request(
        self, first: type[Any] | str, /, *more: type[Any] | str, timeout: float | timedelta | None = None
    ) -> Coroutine[None, None, Request[Any]]: ...
    def receive_request(self, *kinds: Any, timeout: float | timedelta | None = None) -> Any:
        """The next event as a request: its `.value`, and `await .reply(value)` to answer who asked."""
        return receive_request(self._run, kinds, timeout)

    def send(
        self, run_id: str, event: Any, payload: Any = None, *, event_id: str | None = None
    ) -> Coroutine[None, None, None]:
        """Send an event to a run, once, whatever crashes. `RunNotFound`, `RunTerminated` and `QueueFull` are raised."""
        return send(self._run, run_id, event, payload, event_id)

    def broadcast(self, event: Any, payload: Any = None, *, event_id: str | None = None) -> Coroutine[None, None, int]:
        """Send an event to its topic, once, whatever crashes; how many runs it woke."""
        return broadcast(self._run, event, payload, event_id)

    @overload
    def deferred(self, name: str, kind: type[T], *, raises: Any = ()) -> Deferred[T]: ...
    @overload
    def deferred(self, name: str, kind: Any = Any, *, raises: Any = ()) -> Deferred[Any]: ...
    def deferred(self, name: str, kind: Any = Any, *, raises: Any = ()) -> Any:
        """A value that is completed from outside with its `.token`; `await` it. Errors in `raises` come as such."""
        return Deferred(self._run, name, kind, raises)

    # --- steps

    @overload
    def step(
        self,
        name: str,
        fn: Callable[..., Coroutine[Any, Any, R]],
        /,
        *args: Any,
        retry: Retry | Unset | None = ...,
        timeout: float | timedelta | None = None,
        compensate: Callable[..., Any] | None = None,
    ) -> Coroutine[None, None, R]: ...
    @overload
    def step(
        self,
        name: str,
        fn: Callable[..., R],
        /,
        *args: Any,
        retry: Retry | Unset | None = ...,
        timeout: float | timedelta | None = None,
        compensate: Callable[..., Any] | None = None,
    ) -> Coroutine[None, None, R]: ...
    def step(
        self,
        name: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        retry: Retry | Unset | None = UNSET,
        timeout: float | timedelta | None = None,
        compensate: Callable[..., Any] | None = None,
    ) -> Any:
        """Call a function that is not decorated as a durable step."""
        if not callable(fn):
            raise WorkflowMisuse(f"ctx.step({name!r}, ...) takes a function to call, not {fn!r}")
        body = fn.fn if isinstance(fn, Step) else fn
        policy = Retry() if isinstance(retry, Unset) else retry
        options = StepOptions(retry=policy, timeout=cast("float | None", timeout), compensate=compensate)
        return Step(body_of(body), check_name("a step's name", name), checked_options(options))(*args)

    # --- branches

    @overload
    async def join(self, first: Awaitable[Any], /, *more: Awaitable[Any], name: str = "join") -> tuple[Any, ...]: ...
    @overload
    async def join(self, branches: Mapping[str, Awaitable[R]], /, *, name: str = "join") -> dict[str, R]: ...
    @overload
    async def join(self, *, name: str = "join", **branches: Awaitable[Any]) -> dict[str, Any]: ...
    async def join(self, *args: Any, name: str = "join", **branches: Awaitable[Any]) -> Any:
        """Run branches side by side and wait for all of them, failed ones too: those are in `JoinError.errors`."""
        work = branches_of(args, branches)
        results = await join(self._run, work, name)
        return tuple(results.values()) if args and not isinstance(args[0], Mapping) else results

    @overload
    async def race(self, *branches: Awaitable[R], name: str = "race") -> tuple[int, R]: ...
    @overload
    async def race(self, branches: Mapping[str, Awaitable[R]], /, *, name: str = "race") -> tuple[str, R]: ...
    @overload
    async def race(self, *, name: str = "race", **branches: Awaitable[R]) -> tuple[str, R]: ...
    async def race(self, *args: Any, name: str = "race", **branches: Awaitable[Any]) -> Any:
        """The first branch that succeeds, and its value. The others are cancelled at once and not waited for."""
        return await race(self._run, branches_of(args, branches), name)

    async def map(
        self, fn: Callable[[T], Awaitable[R]], items: Iterable[T], *, concurrency: int = 20, name: str = "map"
    ) -> list[R]:
        """The results of a step (or any async function) over items, in their order, so many at a time."""
        return await map_items(self._run, fn, items, concurrency, name)

    @overload
    async def loop(
        self,
        name: str,
        body: Callable[[Context, S], Awaitable[Continue[S] | Break[T] | None]],
        state: S,
        *,
        commit_every: int = 1,
        prune_every: int = 20,
        keep: int = 20,
    ) -> T: ...
    @overload
    async def loop(
        self,
        name: str,
        body: Callable[..., Awaitable[Continue[Any] | Break[T] | None]],
        state: None = None,
        *,
        commit_every: int = 1,
        prune_every: int = 20,
        keep: int = 20,
    ) -> T: ...
    async def loop(
        self,
        name: str,
        body: Callable[..., Any],
        state: Any = None,
        *,
        commit_every: int = 1,
        prune_every: int = 20,
        keep: int = 20,
    ) -> Any:
        """Call `body(ctx, state)` until it returns `Break(value)`; `Continue(state)` goes on, durably.

        The state is recorded every `commit_every` iterations, and what older ones recorded is pruned, all but the last
        `keep`: a loop of a million iterations has a bounded history and resumes in constant time.
        """
        return await loop(
            self._run, self, name, body, state, commit_every=commit_every, prune_every=prune_every, keep=keep
        )

    # --- children

    @overload
    def run_child(self, wf: Callable[[Context], Body[R]], /, *, id: str | None = None) -> Coroutine[None, None, R]: ...
    @overload
    def run_child(
        self, wf: Callable[[Context, A], Body[R]], a: A, /, *, id: str | None = None
    ) -> Coroutine[None, None, R]: ...
    @overload
    def run_child(
        self, wf: Callable[[Context, A, B], Body[R]], a: A, b: B, /, *, id: str | None = None
    ) -> Coroutine[None, None, R]: ...
    @overload
    def run_child(
        self, wf: Callable[[Context, A, B, C], Body[R]], a: A, b: B, c: C, /, *, id: str | None = None
    ) -> Coroutine[None, None, R]: ...
    @overload
    def run_child(
        self, wf: Callable[[Context, A, B, C, D], Body[R]], a: A, b: B, c: C, d: D, /, *, id: str | None = None
    ) -> Coroutine[None, None, R]: ...
    @overload
    def run_child(self, wf: str, /, *args: Any, id: str | None = None, **kwargs: Any) -> Coroutine[None, None, Any]: ...
    def run_child(self, wf: Any, /, *args: Any, id: str | None = None, **kwargs: Any) -> Any:
        """Start a child run and wait for its result; `ChildFailed` if it fails. Giving up the wait cancels it."""
        return run_child(self._run, wf, args, kwargs, id)

    @overload
    def start_child(
        self, wf: Callable[[Context], Body[R]], /, *, id: str | None = None, detached: bool = False
    ) -> Coroutine[None, None, Child[R]]: ...
    @overload
    def start_child(
        self, wf: Callable[[Context, A], Body[R]], a: A, /, *, id: str | None = None, detached: bool = False
    ) -> Coroutine[None, None, Child[R]]: ...
    @overload
    def start_child(
        self, wf: Callable[[Context, A, B], Body[R]], a: A, b: B, /, *, id: str | None = None, detached: bool = False
    ) -> Coroutine[None, None, Child[R]]: ...
    @overload
    def start_child(
        self,
        wf: Callable[[Context, A, B, C], Body[R]],
        a: A,
        b: B,
        c: C,
        /,
        *,
        id: str | None = None,
        detached: bool = False,
    ) -> Coroutine[None, None, Child[R]]: ...
    @overload
    def start_child(
        self,
        wf: Callable[[Context, A, B, C, D], Body[R]],
        a: A,
        b: B,
        c: C,
        d: D,
        /,
        *,
        id: str | None = None,
        detached: bool = False,
    ) -> Coroutine[None, None, Child[R]]: ...
    @overload
    def start_child(
        self, wf: str, /, *args: Any, id: str | None = None, detached: bool = False, **kwargs: Any
    ) -> Coroutine[None, None, Child[Any]]: ...
    def start_child(self, wf: Any, /, *args: Any, id: str | None = None, detached: bool = False, **kwargs: Any) -> Any:
        """Start a child run; gives a handle whose `result()` and `outcome()` wait for it."""
        return start_child(self._run, wf, args, kwargs, id, detached)

    # --- undoing

    def on_rollback(self, fn: Callable[..., Any], /, *args: Any) -> None:
        """Call `fn(*args)` as a durable step if the run fails or is cancelled; the last registered goes first."""
        self._run.register("rollback", fn, args)

    def on_exit(self, fn: Callable[..., Any], /, *args: Any) -> None:
        """Call `fn(*args)` as a durable step when the run ends, however it ends, short of being terminated."""
        self._run.register("exit", fn, args)

    def rollback_scope(self) -> RollbackScope:
        """`async with` it: if the block raises, what was registered inside is undone before the error goes on."""
        return RollbackScope(self._run)

    # --- showing

    def publish(self, key: str, value: Any) -> Coroutine[None, None, None]:
        """Show a value under a key: `engine.published(id)` gives the last one of each."""
        return publish(self._run, key, value)

    def stream(self, name: str) -> Stream:
        """An append-only stream of this run: `await ctx.stream("log").write(item)`."""
        return Stream(self._run, name)

    async def continue_as(self, *args: Any, workflow: Any = None, **kwargs: Any) -> NoReturn:
        """Begin anew with this payload: same id, fresh history, in one commit. Does not return.

        Without `workflow` it is the newest version of the run's own. The mailbox stays, and who waits for the run waits
        on; steps that are under way are cancelled.
        """
        await self._run.continue_as(workflow, args, kwargs)
        raise AssertionError("a run that continues as another does not come back")

    # --- changing code under running workflows

    def version(self, gate: str, *, latest: int) -> int:
        """Which version of a changed piece of code this run takes: pinned for the run when the gate is first reached.

        Reached while committed history is replayed it gives 1 (the code before the gate was there), else `latest`.
        """
        return self._run.pin_version(check_name("a gate's name", gate), check_count("latest", latest))

    def patched(self, gate: str) -> bool:
        """`version` with two sides: True for the new code."""
        return self.version(gate, latest=2) >= 2

    def removed(self, name: str, kind: str = "step") -> None:
        """Account for an entry that older code made here and this code no longer makes."""
        self._run.skip_removed_entry(check_name("a removed entry's name", name), check_name("a kind", kind))


def current_context() -> Context:
    """The context of the workflow that is executing, for helpers to which it was not passed."""
    run = getattr(asyncio._get_running_loop(), "perdure_run", None)
    if run is None:
        raise WorkflowMisuse("current_context() was called outside of a workflow")
    return cast("Context", run.context)


class _RunLog(logging.LoggerAdapter[logging.Logger]):
    """Logs with the run's id and the place in it, and is silent on replay."""

    def __init__(self, run: RunApi) -> None:
        super().__init__(LOGGER, {})
        self._run = run

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  # logging's own name
        return not self._run.replaying and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        facts = self._run.facts
        extra = {"run_id": facts.id, "workflow": facts.workflow, "location": self._run.current_location()}
        kwargs["extra"] = {**extra, **(kwargs.get("extra") or {})}
        return msg, kwargs
