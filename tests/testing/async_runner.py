"""Run the tests of the testing kit, each in its own event loop, as users without a plugin do."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable

from perdure.testing import TestEngine


def with_engine(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make `async def test(engine)` a plain test with an open engine; its other parameters are fixtures."""

    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        async def main() -> None:
            async with TestEngine() as engine:
                await test(engine, **fixtures)

        asyncio.run(main())

    fixtures = list(inspect.signature(test).parameters.values())[1:]
    run.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
    return run
