"""ctx.loop: a loop with durable state, pruned history, and constant-time resumption.

    pages            the loop: pending until its body returns Break, then its value
    pages/~40        the state at the start of iteration 40; a replay starts at the last recorded iteration
    pages/~40/fetch  an entry of the iteration

The start of an iteration is a completion like any other and ordered among all completions. A replay therefore resumes
the loop at the same point relative to the other tasks of the run. This module knows the run only as a `LoopHost`.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from perdure.codec import Codec
from perdure.codec.annotations import enclosing_names, return_type
from perdure.codec.parameters import Parameters
from perdure.errors import WorkflowMisuse
from perdure.model.records import Entry
from perdure.model.validation import check_count, check_name
from perdure.workflows.commands import Command

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Break(Generic[R_co]):
    """Returned by a loop body: end the loop with this value."""

    value: R_co = None  # type: ignore[assignment]  # Default for a loop without state.


@dataclass(frozen=True, slots=True)
class Continue(Generic[R_co]):
    """Returned by a loop body: start the next iteration with this state."""

    state: R_co = None  # type: ignore[assignment]  # Default for a loop without state.


class LoopHost(Protocol):
    """The run, as loops use it."""

    @property
    def codec(self) -> Codec: ...

    def escape(self, name: str) -> str: ...

    def issue(self, command: Command) -> Any: ...

    def last_iteration(self, location: str) -> int: ...

    def first_retained_iteration(self, location: str) -> int: ...

    def loop_ended(self, location: str) -> bool: ...

    def end_loop(self, location: str, value: bytes) -> None: ...

    def fail_loop(self, location: str, error: BaseException | None) -> None: ...

    def iteration(self, path: str) -> AbstractContextManager[None]: ...

    def tasks_in_iteration(self, path: str) -> list[Any]: ...

    def prune(self, location: str, first: int, end: int) -> int: ...


class LoopBody:
    """The body of a loop, with the types of its state and of its value."""

    def __init__(self, fn: Callable[..., Any], state: Any) -> None:
        if not callable(fn):
            raise WorkflowMisuse(f"the body of ctx.loop must be a function, not {fn!r}")
        self._fn = fn
        hints = list(Parameters.of(fn, skip=1).hints.values())
        self._takes_state = bool(hints)
        self.state_type: Any = hints[0] if hints else Any
        if self.state_type is Any and state is not None:
            self.state_type = type(state)
        self.value_type = _break_type(return_type(fn, enclosing_names(fn)))

    async def __call__(self, ctx: Any, state: Any, name: str) -> Continue[Any] | Break[Any]:
        returned = self._fn(ctx, state) if self._takes_state else self._fn(ctx)
        result = await returned if inspect.isawaitable(returned) else returned
        if result is None and state is None:
            return Continue(None)
        if not isinstance(result, Continue | Break):
            raise WorkflowMisuse(f"the body of loop {name!r} returned {result!r}; it must return Continue or Break")
        return result


async def loop(
    run: LoopHost,
    ctx: Any,
    name: str,
    fn: Callable[..., Any],
    state: Any,
    *,
    commit_every: int,
    prune_every: int,
    keep: int,
) -> Any:
    """Run a loop until its body returns `Break`, and return its value. See `Context.loop`."""
    name = check_name("a loop's name", name)
    check_count("commit_every", commit_every)
    check_count("prune_every", prune_every)
    check_count("keep", keep, minimum=0)
    body = LoopBody(fn, state)
    state = _round_trip(run, state, body, name)

    def read(entry: Entry) -> Any:
        return run.codec.decode(entry.value or b"null", body.value_type, what=f"the value of loop {name!r}")

    end = run.issue(Command(kind="loop", name=name, segment=run.escape(name), read=read))
    location = getattr(end, "location", None)
    if location is None or run.loop_ended(location):
        return await end
    try:
        value = await _iterate(run, ctx, location, body, state, commit_every, prune_every, keep)
    except BaseException as error:
        run.fail_loop(location, error)
        raise
    run.end_loop(location, value)
    return await end


async def _iterate(
    run: LoopHost, ctx: Any, location: str, body: LoopBody, state: Any, commit_every: int, prune_every: int, keep: int
) -> bytes:
    """Call the body until it returns `Break`. Return the encoded value."""
    name = location.rpartition("/")[2]
    number, first_retained = run.last_iteration(location), run.first_retained_iteration(location)
    if number:
        state = await _start_iteration(run, location, number, None, body)
    while True:
        path = f"{location}/~{number}"
        result = await _run_iteration(run, ctx, path, body, state, name)
        if isinstance(result, Break):
            return run.codec.encode(result.value, body.value_type, what=f"the value of loop {name!r}")
        number, state = number + 1, result.state
        if number % commit_every == 0:
            if number - first_retained >= keep + prune_every:
                first_retained = run.prune(location, first_retained, number - keep)
            state = await _start_iteration(run, location, number, state, body)


async def _run_iteration(
    run: LoopHost, ctx: Any, path: str, body: LoopBody, state: Any, name: str
) -> Continue[Any] | Break[Any]:
    """Run one iteration. Tasks that it started and did not await are cancelled at its end and awaited."""
    with run.iteration(path):
        try:
            return await body(ctx, state, name)
        finally:
            while tasks := run.tasks_in_iteration(path):
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)


async def _start_iteration(run: LoopHost, location: str, number: int, state: Any, body: LoopBody) -> Any:
    """Record the state of an iteration and return it, decoded, as a replay would."""
    what = f"the state of loop {location.rpartition('/')[2]!r}"

    def read(entry: Entry) -> Any:
        return run.codec.decode(entry.value or b"null", body.state_type, what=what)

    encoded = run.codec.encode(state, body.state_type, what=what) if state is not None else b"null"
    return await run.issue(
        Command(
            kind="iteration",
            name=str(number),
            segment=f"{location}/~{number}",
            read=read,
            immediate_value=encoded,
            fixed_location=True,
        )
    )


def _round_trip(run: LoopHost, state: Any, body: LoopBody, name: str) -> Any:
    """Return the initial state after encoding and decoding, like every later state."""
    if state is None:
        return None
    what = f"the state of loop {name!r}"
    return run.codec.decode(run.codec.encode(state, body.state_type, what=what), body.state_type, what=what)


def _break_type(returns: Any) -> Any:
    """Return the value type of a loop: the argument of `Break` in the return annotation of its body."""
    origin = typing.get_origin(returns)
    if origin is Break:
        return typing.get_args(returns)[0]
    found = [_break_type(member) for member in typing.get_args(returns) if origin is not Continue]
    return next((kind for kind in found if kind is not Any), Any)
