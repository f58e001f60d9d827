"""`perdure.run`, the blocking call for scripts, and the choice of the event loop for programs that perdure starts."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, Unpack, overload

from perdure.client.store_urls import open_store
from perdure.clock import SYSTEM_CLOCK
from perdure.engine import Engine
from perdure.errors import WorkflowMisuse
from perdure.execution.lifespan import LifespanOption
from perdure.stores.protocol import Store
from perdure.workflows.context import Context
from perdure.workflows.definition import BoundWorkflow
from perdure.workflows.start_options import StartKeywords

R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
G = TypeVar("G")
H = TypeVar("H")
Body = Coroutine[Any, Any, R]


class RunKeywords(StartKeywords, total=False):
    """Options of `perdure.run`: those of a start, the store, and the lifespan of its engine."""

    store: str | Store
    lifespan: LifespanOption | None


@overload
def run(
    wf: Callable[[Context], Body[R]],
    /,
    **options: Unpack[RunKeywords],
) -> R: ...
@overload
def run(
    wf: Callable[[Context, A], Body[R]],
    a: A,
    /,
    **options: Unpack[RunKeywords],
) -> R: ...
@overload
def run(
    wf: Callable[[Context, A, B], Body[R]],
    a: A,
    b: B,
    /,
    **options: Unpack[RunKeywords],
) -> R: ...
@overload
def run(
    wf: Callable[[Context, A, B, C], Body[R]],
    a: A,
    b: B,
    c: C,
    /,
    **options: Unpack[RunKeywords],
) -> R: ...
@overload
def run(
    wf: Callable[[Context, A, B, C, D], Body[R]],
    a: A,
    b: B,
    c: C,
    d: D,
    /,
    **options: Unpack[RunKeywords],
) -> R: ...
@overload
def run(
    wf: Callable[[Context, A, B, C, D, E], Body[R]],
    a: A,
    b: B,
    c: C,
    d: D,
    e: E,
    /,
    **options: Unpack[RunKeywords],
) -> R: ...
@overload
def run(
    wf: Callable[[Context, A, B, C, D, E, F], Body[R]],
    a: A,
    b: B,
    c: C,
    d: D,
    e: E,
    f: F,
    /,
    **options: Unpack[RunKeywords],
) -> R: ...
@overload
def run(
    wf: Callable[[Context, A, B, C, D, E, F, G], Body[R]],
    a: A,
    b: B,
    c: C,
    d: D,
    e: E,
    f: F,
    g: G,
    /,
    **options: Unpack[RunKeywords],
) -> R: ...
@overload
def run(
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
    **options: Unpack[RunKeywords],
) -> R: ...
@overload
def run(
    wf: BoundWorkflow[..., R],
    /,
    *args: Any,
    store: str | Store = ...,
    lifespan: LifespanOption | None = None,
    **kwargs: Any,
) -> R: ...
def run(
    wf: Any, /, *args: Any, store: str | Store = "memory://", lifespan: LifespanOption | None = None, **given: Any
) -> Any:
    """Execute a workflow to its end and return its value. Keyword arguments are those of `Engine.execute`.

    With an `id` and a durable `store`, call it again after a crash to continue the run. Raises `WorkflowMisuse` in a
    running event loop, which it would block. `lifespan` is that of the `Engine` that executes it.
    """
    with contextlib.suppress(RuntimeError):  # raised if no event loop runs
        asyncio.get_running_loop()
        raise WorkflowMisuse(
            "perdure.run(...) would block the event loop that runs in this thread: use await engine.execute(...)"
        )

    async def main() -> Any:
        async with Engine(open_store(store, SYSTEM_CLOCK, owns_loop=True), lifespan=lifespan) as engine:
            return await engine.execute(wf, *args, **given)

    return run_with_uvloop(main())


def run_with_uvloop(main: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine like `asyncio.run`, on uvloop if installed (`perdure[fast]`): 7 % fewer instructions per step."""
    found = importlib.util.find_spec("uvloop")
    make_loop = None if found is None else importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(main)
