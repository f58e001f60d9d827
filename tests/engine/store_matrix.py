"""How engine tests are run: over every store, on virtual time, each with an event loop of its own.

PostgreSQL and Redis are real servers (`tests/servers`), whose stores go by the test's clock in place of the server's.
What one test stores no other sees: it has a schema or keys of its own.

All tests run on all stores. Those that play a long scenario again for every commit or for every order of its calls, and
those of sheer volume, make thousands of calls, each of which takes a server ten times as long: the longest of them play
a shorter scenario there (`SERVERS`).
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
    """A new, empty store; `name` is its own among those in the folder."""
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
    """The store as another process would open it; one in memory is the same object."""
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
    """All that is stored of these runs, to see whether it has changed."""
    return list(await store.load(list(run_ids)))
