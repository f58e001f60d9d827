"""Pytest plugin: the fixture `perdure_engine`, a `TestEngine` for one test.

pytest loads every installed plugin, even if no test uses it. The plugin is therefore a separate package, which imports
perdure only when a test requests the fixture.
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
    """Provide an in-memory `perdure.testing.TestEngine` on a virtual clock."""
    from perdure.testing import TestEngine

    engine = TestEngine()
    yield engine
    engine.drop()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test that uses the fixture. Does nothing if a plugin for async tests has wrapped the test."""
    if FIXTURE not in pyfuncitem.fixturenames or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    engine: Any = pyfuncitem.funcargs[FIXTURE]

    async def test() -> None:
        async with engine:
            await pyfuncitem.obj(**arguments)

    asyncio.run(test())
    return True
