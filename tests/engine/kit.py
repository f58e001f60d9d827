"""How engine tests are run: over both stores, on virtual time, each with an event loop of its own."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.store.base import Store
from perdure.store.memory import MemoryStore
from perdure.store.sqlite import SqliteStore
from perdure.testing import Harness, VirtualClock

STORES = ("memory", "sqlite")


def on_every_store(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make `async def test(harness, ...)` a test for each store; its other parameters are fixtures."""

    def run(store_kind: str, tmp_path: Path, **fixtures: Any) -> None:
        async def main() -> None:
            clock = VirtualClock()
            async with Harness(make_store(store_kind, tmp_path, clock), clock=clock) as harness:
                await test(harness, **fixtures)

        asyncio.run(main())

    fixtures = list(inspect.signature(test).parameters.values())[1:]
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("store_kind", "tmp_path")]
    others = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in fixtures]
    run.__signature__ = inspect.Signature([*own, *others])  # type: ignore[attr-defined]
    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    run.__module__ = test.__module__
    run.pytestmark = list(getattr(test, "pytestmark", []))  # type: ignore[attr-defined]
    return pytest.mark.parametrize("store_kind", STORES)(run)


def make_store(kind: str, folder: Path, clock: VirtualClock, name: str = "runs") -> Store:
    if kind == "memory":
        return MemoryStore(clock)
    return SqliteStore(str(folder / f"{name}.db"), clock=clock, synchronous="off")


def another_handle(store: Store, clock: VirtualClock) -> Store:
    """The store as another process would open it; one in memory is the same object."""
    if isinstance(store, SqliteStore):
        return SqliteStore(store._path, clock=clock, synchronous="off")
    return store


async def everything_in(store: Store, *run_ids: str) -> list[Any]:
    """All that is stored of these runs, to see whether it has changed."""
    return list(await store.load(list(run_ids)))
