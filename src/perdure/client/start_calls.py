"""The calls of a client that start runs, typed by the number of arguments.

Python has no other way to type them: an overload per number. The implementations are one line each.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from perdure.client.run_handle import Run, RunClient
from perdure.client.starts import StartClient
from perdure.workflows.context import Context
from perdure.workflows.definition import BoundWorkflow, Workflow
from perdure.workflows.start_options import StartKeywords

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
G = TypeVar("G")
H = TypeVar("H")
R = TypeVar("R")
Body = Coroutine[Any, Any, R]


class StartCalls:
    """Base of `Client`: one line per call."""

    _starts: StartClient

    @property
    def _client(self) -> RunClient:
        """The client that the handles of runs call."""
        raise NotImplementedError

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
        return Run(run_id, self._client, request.workflow, created=created)

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
