"""Typed errors between processes: a child fails in one, its parent runs in another, and the caller is a third."""

import asyncio
from decimal import Decimal
from pathlib import Path

import pytest

from perdure import Client, RunFailed
from tests.crash.process_harness import STORES, scenario
from tests.crash.programs.declining_worker import Declined, order
from tests.crash.store_readers import TIMEOUT_SECONDS


@pytest.mark.parametrize("kind", STORES)
def test_declared_error_crosses_processes(kind: str, tmp_path: Path) -> None:
    """The workers are scripts, so that the module of their types is `__main__`; this process imports the module."""

    async def call(url: str) -> BaseException | None:
        async with asyncio.timeout(TIMEOUT_SECONDS), Client(url) as client:
            with pytest.raises(RunFailed, match=r"Declined: 9\.99 declined") as caught:
                await client.execute(order, Decimal("9.99"))
            return caught.value.__cause__

    with scenario(tmp_path, kind) as here:
        here.start("declining_worker")
        here.start("declining_worker", "parents")
        cause = asyncio.run(call(here.url))
    assert type(cause) is Declined
    assert (str(cause), cause.amount, cause.code) == ("9.99 declined", Decimal("9.99"), 51)
