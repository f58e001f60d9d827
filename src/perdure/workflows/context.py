"""Context: the API that workflow code uses to talk to its run.

All results are deterministic: the same on every replay. The context delegates each call to the run, which it knows
only as a `RunApi`. The runner implements `RunApi`; this module knows neither the runner nor a store.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

from msgspec import Struct

from perdure.clock import to_datetime
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.ids import origin_of
from perdure.model.schedule_records import SLOT_TAG
from perdure.model.tags import Tags, TagValue
from perdure.model.validation import check_count, check_name, check_seconds, describe_value
from perdure.workflows.branches import BranchHost, collect_branches, join, map_items, race
from perdure.workflows.child_calls import ChildCalls
from perdure.workflows.children import ChildHost
from perdure.workflows.deferreds import Deferred, DeferredHost
from perdure.workflows.durable_call import CommandCall
from perdure.workflows.loops import Break, Continue, LoopHost, loop
from perdure.workflows.messages import ReceiveHost, Request, broadcast, receive, receive_batch, receive_request, send
from perdure.workflows.rollback import RollbackHost, RollbackScope
from perdure.workflows.run_tags import TagHost, tag
from perdure.workflows.steps import Raises, StepKeywords, build_step_options, make_step
from perdure.workflows.streams import Stream, publish

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")

LOGGER = logging.getLogger("perdure.workflow")


class RunInfo(Struct, frozen=True):
    """The properties of a run that do not change within a generation."""

    id: str
    workflow: str
    version: int
    generation: int
    tags: Tags
    parent: str | None
    incarnation: str = ""  # distinguishes this run from earlier runs of its id

    @property
    def origin(self) -> str:
        """What ids of the run's effects begin with."""
        return origin_of(self.id, self.incarnation)


class RunApi(BranchHost, ReceiveHost, ChildHost, DeferredHost, LoopHost, RollbackHost, TagHost, Protocol):
    """The run, as the context uses it."""

    info: RunInfo

    @property
    def replaying(self) -> bool: ...

    def scope_random(self, purpose: str) -> random.Random: ...

    def current_location(self) -> str: ...

    def sleep_until(self, due_at: float) -> Any: ...

    def continue_as(self, workflow: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...

    def register(self, kind: str, fn: Any, args: tuple[Any, ...]) -> None: ...

    def pin_version(self, gate: str, latest: int) -> int: ...

    def skip_removed_entry(self, name: str, kind: str) -> None: ...

    def shared_scope(self, name: str) -> AbstractContextManager[None]: ...


class Context(ChildCalls):
    """The first parameter of every workflow."""

    _run: RunApi

    def __init__(self, run: RunApi) -> None:
        self._run = run

    @cached_property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that adds run id, workflow and location to each record and is silent during replay."""
        return _RunLogger(self._run)

    # --- identity and time

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self._run.info.id

    @property
    def workflow(self) -> str:
        """Name of the workflow."""
        return self._run.info.workflow

    @property
    def tags(self) -> Tags:
        """Tags of the run: those of its start, and its own changes by `ctx.tag`.

        A change from outside appears when the run is loaded the next time, so a branch on it may diverge.
        """
        return self._run.tags

    @property
    def schedule_slot(self) -> datetime | None:
        """Time slot of the schedule that started the run, in UTC; None if no schedule did, or it was triggered."""
        slot = self._run.info.tags.get(SLOT_TAG)
        return slot if isinstance(slot, datetime) else None

    @property
    def parent(self) -> str | None:
        """Id of the parent run, or None."""
        return self._run.info.parent

    @property
    def generation(self) -> int:
        """Generation of the run: incremented by `continue_as`, a run-level retry and a rewind."""
        return self._run.info.generation

    @property
    def replaying(self) -> bool:
        """True while recorded history is applied. Use it for logging only: a branch on it diverges."""
        return self._run.replaying

    def now(self) -> datetime:
        """Return the time of the last event of the run. Never decreases, and is the same on every replay."""
        return to_datetime(self._run.now())

    @property
    def random(self) -> random.Random:
        """A random number generator that is the same on every replay. Each task has its own."""
        return self._run.scope_random("random")

    def uuid(self) -> uuid.UUID:
        """Return a random UUID that is the same on every replay."""
        return uuid.UUID(int=self._run.scope_random("uuid").getrandbits(128), version=4)

    # --- waiting

    def sleep(self, duration: float | timedelta) -> Coroutine[None, None, None]:
        """Sleep durably. The deadline is fixed when the call is first awaited; zero returns immediately."""
        seconds = check_seconds("a sleep", duration)
        return CommandCall("sleep", lambda: self._run.sleep_until(self._run.now() + seconds), self._run.next_number())

    def sleep_until(self, when: datetime) -> Coroutine[None, None, None]:
        """Sleep durably until an aware datetime. Returns immediately if the time has passed."""
        if not isinstance(when, datetime) or when.utcoffset() is None:
            raise InvalidArgument(
                f"sleep_until must be given an aware datetime (with a timezone), not {describe_value(when)}"
            )
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
        """Wait for the next event of any of these types or names and return it. Raises `TimeoutError`."""
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
        """Wait for at least one event and return all pending ones, at most `max`. Returns [] on timeout."""
        return receive_batch(self._run, kinds, max, timeout)

    @overload
    def receive_request(
        self,
        first: type[T],
        /,
        *,
        accept: Callable[[T], bool | None] | None = None,
        timeout: float | timedelta | None = None,
    ) -> Coroutine[None, None, Request[T]]: ...
    @overload
    def receive_request(
        self,
        first: type[T],
        second: type[U],
        /,
        *,
        accept: Callable[[T | U], bool | None] | None = None,
        timeout: float | timedelta | None = None,
    ) -> Coroutine[None, None, Request[T | U]]: ...
    @overload
    def receive_request(
        self,
        first: type[T],
        second: type[U],
        third: type[V],
        /,
        *,
        accept: Callable[[T | U | V], bool | None] | None = None,
        timeout: float | timedelta | None = None,
    ) -> Coroutine[None, None, Request[T | U | V]]: ...
    @overload
    def receive_request(
        self,
        first: str,
        /,
        *more: type[Any] | str,
        accept: Callable[[Any], bool | None] | None = None,
        timeout: float | timedelta | None = None,
    ) -> Coroutine[None, None, Request[Any]]: ...
    @overload
    def receive_request(
        self,
        first: type[Any],
        second: str,
        /,
        *more: type[Any] | str,
        accept: Callable[[Any], bool | None] | None = None,
        timeout: float | timedelta | None = None,
    ) -> Coroutine[None, None, Request[Any]]: ...
    @overload
    def receive_request(
        self,
        first: type[Any],
        second: type[Any],
        third: str,
        /,
        *more: type[Any] | str,
        accept: Callable[[Any], bool | None] | None = None,
        timeout: float | timedelta | None = None,
    ) -> Coroutine[None, None, Request[Any]]: ...
    @overload
    def receive_request(
        self,
        first: type[Any],
        second: type[Any],
        third: type[Any],
        fourth: type[Any] | str,
        /,
        *more: type[Any] | str,
        accept: Callable[[Any], bool | None] | None = None,
        timeout: float | timedelta | None = None,
    ) -> Coroutine[None, None, Request[Any]]: ...
    def receive_request(
        self,
        *kinds: Any,
        accept: Callable[[Any], bool | None] | None = None,
        timeout: float | timedelta | None = None,
    ) -> Any:
        """Wait for the next event and return it as a `Request`: `.value`, `await .reply(value)`, `await .fail(error)`.

        `accept(value)` is a plain function without side effects. It rejects an event if it raises or returns False.
        Then the event is consumed, the caller of `request` gets `RequestRejected`, and this call keeps waiting. A
        rejected event without a caller that waits becomes a dead letter.
        """
        return receive_request(self._run, kinds, timeout, accept)

    def send(
        self, run_id: str, event: Any, payload: Any = None, *, event_id: str | None = None
    ) -> Coroutine[None, None, None]:
        """Send an event to a run, exactly once. Raises `RunNotFound`, `RunTerminated` or `QueueFull`."""
        return send(self._run, run_id, event, payload, event_id)

    def broadcast(self, event: Any, payload: Any = None, *, event_id: str | None = None) -> Coroutine[None, None, int]:
        """Send an event to its topic, exactly once. Returns the number of runs that it woke."""
        return broadcast(self._run, event, payload, event_id)

    @overload
    def deferred(
        self,
        name: str,
        kind: type[T],
        *,
        timeout: float | timedelta | None = None,
        raises: type[Exception] | Raises = (),
    ) -> Deferred[T]: ...
    @overload
    def deferred(
        self,
        name: str,
        kind: Any = Any,
        *,
        timeout: float | timedelta | None = None,
        raises: type[Exception] | Raises = (),
    ) -> Deferred[Any]: ...
    def deferred(
        self, name: str, kind: Any = Any, *, timeout: float | timedelta | None = None, raises: Any = ()
    ) -> Any:
        """Return an awaitable value that a caller completes with its `.token`.

        A completion whose value is not a `kind` does not count: the caller gets `InvalidPayload`, or the value becomes
        a dead letter, and the deferred stays open. If no completion is stored within `timeout` after this call, the
        deferred fails with `TimeoutError`, and later completions return False. The deadline is fixed when the run first
        gets here. A failure whose type is in `raises` is raised as that type.
        """
        return Deferred(self._run, name, kind, raises, timeout)

    # --- steps

    @overload
    def step(
        self,
        name: str,
        fn: Callable[..., Coroutine[Any, Any, R]],
        /,
        *args: Any,
        key: object = ...,
        compensate: Callable[..., Any] | None = None,
        **options: Unpack[StepKeywords],
    ) -> Coroutine[None, None, R]: ...
    @overload
    def step(
        self,
        name: str,
        fn: Callable[..., R],
        /,
        *args: Any,
        key: object = ...,
        compensate: Callable[..., Any] | None = None,
        **options: Unpack[StepKeywords],
    ) -> Coroutine[None, None, R]: ...
    def step(self, name: str, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        """Call an undecorated function or method as a durable step, with any option of `@step`, and `key`."""
        if not callable(fn):
            raise WorkflowMisuse(f"ctx.step({name!r}, ...) must be given a function, not {fn!r}")
        if "key" in options:
            options["key"] = str(options["key"])
        settings = build_step_options("ctx.step", options)
        return make_step(fn, check_name("a step's name", name), settings)(*args)

    # --- branches

    @overload
    async def join(self, first: Awaitable[Any], /, *more: Awaitable[Any], name: str = "join") -> tuple[Any, ...]: ...
    @overload
    async def join(self, branches: Mapping[str, Awaitable[R]], /, *, name: str = "join") -> dict[str, R]: ...
    @overload
    async def join(self, *, name: str = "join", **branches: Awaitable[Any]) -> dict[str, Any]: ...
    async def join(self, *args: Any, name: str = "join", **branches: Awaitable[Any]) -> Any:
        """Run branches concurrently, wait for all and return their results.

        If branches fail, raises `JoinError`, whose `errors` maps each failed branch to its error.
        """
        work = collect_branches(args, branches)
        results = await join(self._run, work, name)
        return tuple(results.values()) if args and not isinstance(args[0], Mapping) else results

    @overload
    async def race(self, *branches: Awaitable[R], name: str = "race") -> tuple[int, R]: ...
    @overload
    async def race(self, branches: Mapping[str, Awaitable[R]], /, *, name: str = "race") -> tuple[str, R]: ...
    @overload
    async def race(self, *, name: str = "race", **branches: Awaitable[R]) -> tuple[str, R]: ...
    async def race(self, *args: Any, name: str = "race", **branches: Awaitable[Any]) -> Any:
        """Return the first branch that succeeds and its value. The others are cancelled at once and not awaited."""
        return await race(self._run, collect_branches(args, branches), name)

    async def map(
        self, fn: Callable[[T], Awaitable[R]], items: Iterable[T], *, concurrency: int = 20, name: str = "map"
    ) -> list[R]:
        """Return the results of a step or async function over items, in order, at most `concurrency` at a time."""
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
        """Call `body(ctx, state)` until it returns `Break(value)`, and return the value.

        `Continue(state)` starts the next iteration. The state is recorded every `commit_every` iterations. Entries of
        all but the last `keep` iterations are pruned: a loop of a million iterations has a bounded history and resumes
        in constant time.
        """
        return await loop(
            self._run, self, name, body, state, commit_every=commit_every, prune_every=prune_every, keep=keep
        )

    # --- compensation

    def on_rollback(self, fn: Callable[..., Any], /, *args: Any) -> None:
        """Call `fn(*args)` as a durable step if the run fails or is cancelled; the last registered runs first."""
        self._run.register("rollback", fn, args)

    def on_exit(self, fn: Callable[..., Any], /, *args: Any) -> None:
        """Call `fn(*args)` as a durable step when the run ends in any way except termination."""
        self._run.register("exit", fn, args)

    def rollback_scope(self) -> RollbackScope:
        """Return a scope for `async with`.

        If the block raises, the compensations registered inside run before the error propagates.
        """
        return RollbackScope(self._run)

    # --- tags, published values and streams

    def tag(
        self, tags: Mapping[str, TagValue | None] | None = None, /, **named: TagValue | None
    ) -> Coroutine[None, None, None]:
        """Change tags of the run: `await ctx.tag(amount=999, stage=None)`. None removes a tag.

        A dict takes names that are no identifiers. The change is in the commit of the turn, and searches find it then.
        """
        return tag(self._run, tags, named)

    def publish(self, key: str, value: Any) -> Coroutine[None, None, None]:
        """Publish a value under a key. `engine.published(id)` returns the latest value per key."""
        return publish(self._run, key, value)

    def stream(self, name: str) -> Stream:
        """Return an append-only stream of this run: `await ctx.stream("log").write(item)`."""
        return Stream(self._run, name)

    async def continue_as(self, *args: Any, workflow: Any = None, **kwargs: Any) -> NoReturn:
        """Continue as new with this payload: same id, empty history, in one commit. Does not return.

        `workflow` defaults to the newest version of the current one. The mailbox is preserved, and callers that wait
        for the run keep waiting. Running steps are cancelled.
        """
        await self._run.continue_as(workflow, args, kwargs)
        raise AssertionError("continue_as does not return")

    # --- code changes under running workflows

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Return a block for `with`: all entries that are requested in it are placed below this name.

        This includes the entries of tasks that are opened in the block. Such tasks open no scopes of their own, so that
        names of functions and tasks in the code that is called here, like that of a library, are no part of a location.
        """
        return self._run.shared_scope(check_name("a scope's name", name))

    def version(self, gate: str, *, latest: int) -> int:
        """Return the version of a changed piece of code that this run uses.

        The version is pinned when the run first reaches the gate: 1, the code before the gate existed, if the run
        replays committed history at that point, else `latest`. In the body of a `ctx.loop` it is pinned per iteration:
        an iteration that is under way keeps its version, the next one takes `latest`.
        """
        return self._run.pin_version(check_name("a gate's name", gate), check_count("latest", latest))

    def patched(self, gate: str) -> bool:
        """Return True if this run uses the new code. Equivalent to `version(gate, latest=2) >= 2`."""
        return self.version(gate, latest=2) >= 2

    def removed(self, name: str, kind: str = "step") -> None:
        """Skip an entry that older code recorded here and this code no longer requests.

        `kind` is that of the entry in the history: "step", "sleep", "receive", "child", "loop" and so on. It may also
        be "join", "race", "map" or "scope", with the `name` of that block: then all entries below it are skipped,
        completed or pending.
        """
        self._run.skip_removed_entry(check_name("a removed entry's name", name), check_name("a kind", kind))


def current_context() -> Context:
    """Return the context of the executing workflow. Raises `WorkflowMisuse` outside of a workflow."""
    run = getattr(asyncio._get_running_loop(), "perdure_run", None)
    if run is None:
        raise WorkflowMisuse("current_context() was called outside of a workflow")
    return cast("Context", run.context)


class _RunLogger(logging.LoggerAdapter[logging.Logger]):
    """Logger that adds run id, workflow and location to each record and is silent during replay."""

    def __init__(self, run: RunApi) -> None:
        super().__init__(LOGGER, {})
        self._run = run

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  # Name defined by logging.
        return not self._run.replaying and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        info = self._run.info
        extra = {"run_id": info.id, "workflow": info.workflow, "location": self._run.current_location()}
        kwargs["extra"] = {**extra, **(kwargs.get("extra") or {})}
        return msg, kwargs
