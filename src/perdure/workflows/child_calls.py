"""ChildCalls: the calls of a context that start children, typed by the number of the workflow's parameters."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack, overload

from perdure.workflows.children import Child, ChildHost, cancel_run, run_child, start_child
from perdure.workflows.work_queues import WorkQueue

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
Coro = Coroutine[Any, Any, R]
Call = Coroutine[None, None, R]  # a durable call
# Workflow functions by the number of their parameters after the context.
W0 = Callable[[Any], Coro[R]]
W1 = Callable[[Any, A], Coro[R]]
W2 = Callable[[Any, A, B], Coro[R]]
W3 = Callable[[Any, A, B, C], Coro[R]]
W4 = Callable[[Any, A, B, C, D], Coro[R]]
W5 = Callable[[Any, A, B, C, D, E], Coro[R]]
W6 = Callable[[Any, A, B, C, D, E, F], Coro[R]]
W7 = Callable[[Any, A, B, C, D, E, F, G], Coro[R]]
W8 = Callable[[Any, A, B, C, D, E, F, G, H], Coro[R]]


class ChildKeywords(TypedDict, total=False):
    """The options of `run_child`."""

    id: str | None
    queue: WorkQueue | str | None
    priority: int | None
    partition: str | None


class ChildOptions(ChildKeywords, total=False):
    """The options of `start_child`."""

    detached: bool


class ChildCalls:
    """Calls of a context that start or cancel other runs."""

    _run: ChildHost

    @overload
    def run_child(self, wf: W0[R], /, **options: Unpack[ChildKeywords]) -> Call[R]: ...
    @overload
    def run_child(self, wf: W1[A, R], a: A, /, **options: Unpack[ChildKeywords]) -> Call[R]: ...
    @overload
    def run_child(self, wf: W2[A, B, R], a: A, b: B, /, **options: Unpack[ChildKeywords]) -> Call[R]: ...
    @overload
    def run_child(self, wf: W3[A, B, C, R], a: A, b: B, c: C, /, **options: Unpack[ChildKeywords]) -> Call[R]: ...
    @overload
    def run_child(
        self, wf: W4[A, B, C, D, R], a: A, b: B, c: C, d: D, /, **options: Unpack[ChildKeywords]
    ) -> Call[R]: ...
    @overload
    def run_child(
        self, wf: W5[A, B, C, D, E, R], a: A, b: B, c: C, d: D, e: E, /, **options: Unpack[ChildKeywords]
    ) -> Call[R]: ...
    @overload
    def run_child(
        self, wf: W6[A, B, C, D, E, F, R], a: A, b: B, c: C, d: D, e: E, f: F, /, **options: Unpack[ChildKeywords]
    ) -> Call[R]: ...
    @overload
    def run_child(
        self,
        wf: W7[A, B, C, D, E, F, G, R],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        f: F,
        g: G,
        /,
        **options: Unpack[ChildKeywords],
    ) -> Call[R]: ...
    @overload
    def run_child(
        self,
        wf: W8[A, B, C, D, E, F, G, H, R],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        f: F,
        g: G,
        h: H,
        /,
        **options: Unpack[ChildKeywords],
    ) -> Call[R]: ...
    @overload
    def run_child(
        self, wf: Callable[Concatenate[Any, P], Coro[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[None, None, R]: ...
    @overload
    def run_child(
        self,
        wf: str,
        /,
        *args: Any,
        id: str | None = None,
        queue: WorkQueue | str | None = ...,
        priority: int | None = None,
        partition: str | None = None,
        **kwargs: Any,
    ) -> Coroutine[None, None, Any]: ...
    def run_child(self, wf: Any, /, *args: Any, **given: Any) -> Any:
        """Start a child run and return its result. Raises `ChildFailed`. Cancelling the wait cancels the child.

        `id`, `queue`, `priority` and `partition` are options of the start; all other keyword arguments belong to the
        payload. `queue=None` bypasses the queue of the child's workflow.
        """
        return run_child(self._run, wf, args, given)

    @overload
    def start_child(self, wf: W0[R], /, **options: Unpack[ChildOptions]) -> Call[Child[R]]: ...
    @overload
    def start_child(self, wf: W1[A, R], a: A, /, **options: Unpack[ChildOptions]) -> Call[Child[R]]: ...
    @overload
    def start_child(self, wf: W2[A, B, R], a: A, b: B, /, **options: Unpack[ChildOptions]) -> Call[Child[R]]: ...
    @overload
    def start_child(
        self, wf: W3[A, B, C, R], a: A, b: B, c: C, /, **options: Unpack[ChildOptions]
    ) -> Call[Child[R]]: ...
    @overload
    def start_child(
        self, wf: W4[A, B, C, D, R], a: A, b: B, c: C, d: D, /, **options: Unpack[ChildOptions]
    ) -> Call[Child[R]]: ...
    @overload
    def start_child(
        self, wf: W5[A, B, C, D, E, R], a: A, b: B, c: C, d: D, e: E, /, **options: Unpack[ChildOptions]
    ) -> Call[Child[R]]: ...
    @overload
    def start_child(
        self, wf: W6[A, B, C, D, E, F, R], a: A, b: B, c: C, d: D, e: E, f: F, /, **options: Unpack[ChildOptions]
    ) -> Call[Child[R]]: ...
    @overload
    def start_child(
        self,
        wf: W7[A, B, C, D, E, F, G, R],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        f: F,
        g: G,
        /,
        **options: Unpack[ChildOptions],
    ) -> Call[Child[R]]: ...
    @overload
    def start_child(
        self,
        wf: W8[A, B, C, D, E, F, G, H, R],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        f: F,
        g: G,
        h: H,
        /,
        **options: Unpack[ChildOptions],
    ) -> Call[Child[R]]: ...
    @overload
    def start_child(
        self, wf: Callable[Concatenate[Any, P], Coro[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[None, None, Child[R]]: ...
    @overload
    def start_child(
        self,
        wf: str,
        /,
        *args: Any,
        id: str | None = None,
        detached: bool = False,
        queue: WorkQueue | str | None = ...,
        priority: int | None = None,
        partition: str | None = None,
        **kwargs: Any,
    ) -> Coroutine[None, None, Child[Any]]: ...
    def start_child(self, wf: Any, /, *args: Any, **given: Any) -> Any:
        """Start a child run and return a handle. Its `result()` and `outcome()` wait for the child.

        `id`, `detached`, `queue`, `priority` and `partition` are options of the start; all other keyword arguments
        belong to the payload.
        """
        detached = given.pop("detached", False)
        return start_child(self._run, wf, args, given, detached)

    def cancel(self, run_id: str, reason: str | None = None) -> Coroutine[None, None, bool]:
        """Request cancellation of a run, exactly once. False if it has ended or does not exist.

        The call does not wait for the end of the run. `reason` is as in `Client.cancel`.
        """
        return cancel_run(self._run, run_id, reason)
