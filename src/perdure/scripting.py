"""`perdure.run`: the blocking one-liner for scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from perdure.context import Context
from perdure.embedded import Engine
from perdure.store.base import Store

P = ParamSpec("P")
R = TypeVar("R")


def run(
    workflow: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]],
    *args: Any,
    store: str | Store = "memory://",
    id: str | None = None,
) -> R:
    """Run a workflow to its end and return its value. With an id and a durable store it goes on after a crash."""

    async def main() -> R:
        async with Engine(store) as engine:
            handle: Any = await engine.start(workflow, *args, id=id)
            result: R = await handle.result()
            return result

    return asyncio.run(main())
