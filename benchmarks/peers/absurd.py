"""Absurd: durable tasks in PostgreSQL functions, with the worker of its Python SDK.

Worker and caller each have their own connection. With a single connection, they would wait for each other.
"""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peer_protocol import Adapter, Peer, Variant
from benchmarks.step_bodies import STEPS, noop

AT_ONCE = 100  # concurrent tasks of the worker; its default is one
QUEUE = "bench"


class Absurd(Adapter):
    async def open(self) -> None:
        sdk: Any = importlib.import_module("absurd_sdk")
        url = self.setting.urls["postgres"]
        await asyncio.to_thread(_make_schema, url)
        self._client = sdk.AsyncAbsurd(url, queue_name=QUEUE)
        await self._client.create_queue()
        self._worker = sdk.AsyncAbsurd(url, queue_name=QUEUE)
        for workflow in (one_step, ten_steps):
            self._worker.register_task(workflow.__name__)(workflow)
        self._work = asyncio.create_task(self._worker.start_worker(concurrency=AT_ONCE))

    async def close(self) -> None:
        self._work.cancel()
        await asyncio.wait([self._work])
        await self._worker.close()
        await self._client.close()

    async def execute(self, workflow: str, number: int) -> int:
        task = await self._client.spawn(workflow, number, queue=QUEUE)
        snapshot = await self._client.await_task_result(task["task_id"], queue_name=QUEUE)
        return int(snapshot.result)


async def one_step(number: int, ctx: Any) -> int:
    return int(await ctx.step("task", lambda: noop(number)))


async def ten_steps(number: int, ctx: Any) -> int:
    for _ in range(STEPS):
        await ctx.step("task", lambda: noop(number))
    return number


def _make_schema(url: str) -> None:
    """Create the schema with Absurd's own program, which needs psql."""
    program = Path(sys.executable).parent / "absurdctl"
    done = subprocess.run([program, "init", "-d", url], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"absurdctl init: {(done.stderr or done.stdout).strip()}")


PEER = Peer(
    title="Absurd",
    adapter=Absurd,
    variants={"": Variant("PostgreSQL", ("noop10", "latency"), needs=("postgres",))},
    settings=f"defaults, except {AT_ONCE} concurrent tasks",
    python=("absurd-sdk", "absurdctl", "uvloop"),
    unsupported={
        "recovery": "a task of a dead worker is claimed again after its claim timeout, two minutes by default",
        "queues": "its queues have no limit of concurrency over all workers",
        "fanout": "a task cannot run concurrent steps or wait for another task of the same queue",
    },
)
