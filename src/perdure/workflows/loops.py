"""ctx.loop: a loop whose state is durable, whose past is pruned, and that resumes where it was.

    pages            the loop itself: pending until its body breaks it off, then its value
    pages/~40        its 40th iteration began with this state: the last one of these is where a replay begins
    pages/~40/fetch  what the iteration asked for

An iteration's beginning is a completion like any other, with its place in the order of all: so a replay takes the loop
up at the very point at which it was, relative to whatever else the run does.
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
from perdure.codec.annotations import enclosing_names, returns_of
from perdure.codec.parameters import Parameters
from perdure.errors import WorkflowMisuse
from perdure.model.records import Entry
from perdure.model.validation import check_count, check_name
from perdure.workflows.commands import Command

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Break(Generic[R_co]):
    """Returned by a loop's body: the loop ends with this value."""

    value: R_co = None  # type: ignore[assignment]  # the default for a loop without state


@dataclass(frozen=True, slots=True)
class Continue(Generic[R_co]):
    """Returned by a loop's body: go on with this state."""

    state: R_co = None  # type: ignore[assignment]  # the default for a loop without state


class LoopHost(Protocol):
    """What a loop asks of the run."""

    @property
    def codec(self) -> Codec: ...

    def escape(self, name: str) -> str: ...

    def issue(self, question: Command) -> Any: ...

    def last_iteration(self, location: str) -> int: ...

    def first_kept(self, location: str) -> int: ...

    def loop_ended(self, location: str) -> bool: ...

    def end_loop(self, location: str, value: bytes) -> None: ...

    def fail_loop(self, location: str, error: BaseException | None) -> None: ...

    def iteration(self, path: str) -> AbstractContextManager[None]: ...

    def tasks_in_scope(self, path: str) -> list[Any]: ...

    def prune(self, location: str, first: int, end: int) -> int: ...


class Body:
    """The body of a loop: how to call it, and the types of its state and of what it breaks off with."""

    def __init__(self, fn: Callable[..., Any], state: Any) -> None:
        if not callable(fn):
            raise WorkflowMisuse(f"ctx.loop takes a function as its body, not {fn!r}")
        self._fn = fn
        hints = list(Parameters.of(fn, skip=1).hints.values())
        self._takes_state = bool(hints)
        self.state_type: Any = hints[0] if hints else Any
        if self.state_type is Any and state is not None:
            self.state_type = type(state)
        self.value_type = _break_type(returns_of(fn, enclosing_names(fn)))

    async def __call__(self, ctx: Any, state: Any, name: str) -> Continue[Any] | Break[Any]:
        made = self._fn(ctx, state) if self._takes_state else self._fn(ctx)
        result = await made if inspect.isawaitable(made) else made
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
    """See `Context.loop`."""
    check_name("a loop's name", name)
    for option, least in (("commit_every", 1), ("prune_every", 1), ("keep", 0)):
        check_count(
            option, {"commit_every": commit_every, "prune_every": prune_every, "keep": keep}[option], least=least
        )
    body = Body(fn, state)
    state = _round_trip(run, state, body, name)

    def read(entry: Entry) -> Any:
        return run.codec.decode(entry.value or b"null", body.value_type, what=f"what loop {name!r} ended with")

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
    run: LoopHost, ctx: Any, location: str, body: Body, state: Any, commit_every: int, prune_every: int, keep: int
) -> bytes:
    """Until the body breaks it off; gives the encoded value."""
    name = location.rpartition("/")[2]
    number, kept_from = run.last_iteration(location), run.first_kept(location)
    if number:
        state = await _begin_iteration(run, location, number, None, body)
    while True:
        path = f"{location}/~{number}"
        result = await _run_iteration(run, ctx, path, body, state, name)
        if isinstance(result, Break):
            return run.codec.encode(result.value, body.value_type, what=f"what loop {name!r} ends with")
        number, state = number + 1, result.state
        if number % commit_every == 0:
            if number - kept_from >= keep + prune_every:
                kept_from = run.prune(location, kept_from, number - keep)
            state = await _begin_iteration(run, location, number, state, body)


async def _run_iteration(
    run: LoopHost, ctx: Any, path: str, body: Body, state: Any, name: str
) -> Continue[Any] | Break[Any]:
    """One iteration. Tasks that it opened and left are cancelled at its end, and seen out."""
    with run.iteration(path):
        try:
            return await body(ctx, state, name)
        finally:
            while tasks := run.tasks_in_scope(path):
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)


async def _begin_iteration(run: LoopHost, location: str, number: int, state: Any, body: Body) -> Any:
    """Make the state durable; what comes back went through the codec, now as on a replay."""
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


def _round_trip(run: LoopHost, state: Any, body: Body, name: str) -> Any:
    """The first state goes through the codec like every later one."""
    if state is None:
        return None
    what = f"the state of loop {name!r}"
    return run.codec.decode(run.codec.encode(state, body.state_type, what=what), body.state_type, what=what)


def _break_type(returns: Any) -> Any:
    """The type of a loop's value: what the annotation of its body says about Break."""
    origin = typing.get_origin(returns)
    if origin is Break:
        return typing.get_args(returns)[0]
    found = [_break_type(member) for member in typing.get_args(returns) if origin is not Continue]
    return next((kind for kind in found if kind is not Any), Any)
