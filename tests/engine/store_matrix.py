"""Run engine tests on every store, on virtual time, each in its own event loop.

PostgreSQL and Redis are real servers (`tests/servers`). Their stores use the test's clock instead of the server's. Each
test has its own schema or key prefix.

A test that makes thousands of calls uses a shorter scenario on servers (`SERVERS`), where a call takes ten times as
long, or a sample of its repetitions (`tests/repetitions.py`).
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing import Harness, VirtualClock
from tests.servers import postgres_schemas as schemas
from tests.servers import redis_prefixes as prefixes

SERVERS = ("postgres", "redis")
STORES = ("memory", "sqlite", *SERVERS)


def on_every_store(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make `async def test(harness, ...)` a test for each store; its other parameters are fixtures, or `store_kind`."""
    fixtures = list(inspect.signature(test).parameters.values())[1:]

    def run(store_kind: str, tmp_path: Path, **given: Any) -> None:
        if any(each.name == "store_kind" for each in fixtures):
            given["store_kind"] = store_kind

        async def main() -> None:
            clock = VirtualClock()
            async with Harness(make_store(store_kind, tmp_path, clock), clock=clock) as harness:
                await test(harness, **given)

        asyncio.run(main())

    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("store_kind", "tmp_path")]
    others = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in fixtures if each.name != "store_kind"]
    run.__signature__ = inspect.Signature([*own, *others])  # type: ignore[attr-defined]
    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    run.__module__ = test.__module__
    run.pytestmark = list(getattr(test, "pytestmark", []))  # type: ignore[attr-defined]
    return pytest.mark.parametrize("store_kind", STORES)(run)


def make_store(kind: str, folder: Path, clock: VirtualClock, name: str = "runs") -> Store:
    """Return a new, empty store; `name` is unique in the folder."""
    match kind:
        case "memory":
            return MemoryStore(clock)
        case "sqlite":
            return SqliteStore(str(folder / f"{name}.db"), clock=clock, synchronous="off")
        case "postgres":
            return schemas.borrow(clock)
        case "redis":
            return prefixes.borrow(clock)
        case _:
            raise AssertionError(f"there is no store called {kind}")


def another_handle(store: Store, clock: VirtualClock) -> Store:
    """Return the store as another process would open it; a memory store is the same object."""
    match store:
        case SqliteStore():
            return SqliteStore(store._path, clock=clock, synchronous="off")
        case schemas.BorrowedStore():
            return store.schema.store(clock)
        case prefixes.BorrowedStore():
            return prefixes.BorrowedStore(store.url, clock)
        case _:
            return store


async def everything_in(store: Store, *run_ids: str) -> list[Any]:
    """Return all stored data of these runs, to detect changes."""
    return list(await store.load(list(run_ids)))
