"""An unreachable store: callers get an error, workers wait with retries, and a waiting worker can be stopped."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from perdure import Client, Engine, EngineConfig, Retry, StoreError

WAITING = """
import asyncio
from perdure import Context, Worker, workflow

@workflow
async def anything(ctx: Context) -> None: ...

asyncio.run(Worker("{url}").run())
print("stopped")
"""


@pytest.fixture(params=["postgresql://127.0.0.1:{port}/shop", "redis://127.0.0.1:{port}/0"])
def nowhere(request: pytest.FixtureRequest) -> Iterator[str]:
    """An address at which no server listens, reserved for this test."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield request.param.format(port=taken.getsockname()[1])


@pytest.mark.parametrize("kind", [Client, Engine])
def test_queue_full_is_raised_to_the_caller(kind: type[Client], nowhere: str) -> None:
    async def main() -> None:
        async with kind(nowhere, config=EngineConfig(store_retry=Retry(max_attempts=3, initial=0.01))):
            pass

    with pytest.raises(StoreError) as raised:
        asyncio.run(main())
    assert raised.value.retryable


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_waits_and_can_be_stopped(nowhere: str, number: signal.Signals) -> None:
    code = WAITING.format(url=nowhere)
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        try:
            assert worker.stderr is not None
            while "the store is away" not in worker.stderr.readline():
                assert worker.poll() is None
            worker.send_signal(number)
            output, _ = worker.communicate(timeout=30)
        finally:
            worker.kill()
    assert (output, worker.returncode) == ("stopped\n", 0)
