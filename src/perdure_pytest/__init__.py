"""The pytest plugin: the fixture `perdure_engine`, a `TestEngine` for one test.

pytest loads every plugin that is installed, used or not. So this is a package of its own, and perdure is imported when
a test first asks for the fixture.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from perdure.testing import TestEngine

FIXTURE = "perdure_engine"


@pytest.fixture
def perdure_engine() -> Iterator[TestEngine]:
    """An engine in memory on a clock that skips time; see `perdure.testing.TestEngine`."""
    from perdure.testing import TestEngine

    engine = TestEngine()
    yield engine
    engine.drop()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test that uses the fixture, unless a plugin for async tests has taken it already."""
    if FIXTURE not in pyfuncitem.fixturenames or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    engine: Any = pyfuncitem.funcargs[FIXTURE]

    async def test() -> None:
        async with engine:
            await pyfuncitem.obj(**given)

    asyncio.run(test())
    return True
