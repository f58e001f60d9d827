"""DBOS Transact for Python: a library over SQLite or PostgreSQL, with coroutines or with threads."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.peer_protocol import Adapter, Peer, Variant
from benchmarks.step_bodies import QUEUES, STEPS, Gate, QueuedRuns, noop

AT_ONCE = 100  # threads that call workflows, in the sync variants


class Dbos(Adapter):
    async def open(self) -> None:
        self._dbos: Any = importlib.import_module("dbos")
        self._sync = self.variant.endswith("sync")
        self._threads = ThreadPoolExecutor(AT_ONCE)
        # DBOS recovers only runs of the same application version, so both processes of `recovery` use the same one.
        config = {"name": "bench", "system_database_url": self._url, "log_level": "ERROR", "application_version": "1"}
        self._dbos.DBOS(config=config)
        gate = Gate(self.setting.folder)
        make = _blocking_workflows if self._sync else _workflows
        self._workflows = make(self._dbos.DBOS, gate)
        self._queued = _queued_workflow(self._dbos.DBOS, self.queued)
        self._queues = {name: self._dbos.Queue(name, concurrency=limit) for name, limit in QUEUES.items()}
        await self._run_in_thread(self._dbos.DBOS.launch)

    @property
    def _url(self) -> str:
        if self.variant.startswith("sqlite"):
            return f"sqlite:///{self.setting.folder / 'dbos.sqlite'}"
        return self.setting.urls["postgres"].replace("postgresql://", "postgresql+psycopg://", 1)

    async def close(self) -> None:
        await self._run_in_thread(self._dbos.DBOS.destroy)
        self._threads.shutdown()

    async def execute(self, workflow: str, number: int) -> int:
        body = self._workflows[workflow]
        result: int = await (self._run_in_thread(partial(body, number)) if self._sync else body(number))
        return result

    async def start(self, workflow: str, number: int, id: str) -> None:
        with self._dbos.SetWorkflowID(id):
            await self._dbos.DBOS.start_workflow_async(self._workflows[workflow], number)

    async def enqueue(self, queue: str, number: int) -> None:
        await self._queues[queue].enqueue_async(self._queued, number)

    async def result(self, id: str) -> int:
        handle = await self._dbos.DBOS.retrieve_workflow_async(id)
        result: int = await handle.get_result()
        return result

    async def _run_in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _queued_workflow(dbos: Any, runs: QueuedRuns) -> Any:
    async def note_run(number: int) -> int:  # a function, because the decorator sets attributes
        return await runs.note(number)

    note = dbos.step()(note_run)

    async def queued(number: int) -> int:
        return int(await note(number))

    return dbos.workflow()(queued)


def _workflows(dbos: Any, gate: Gate) -> dict[str, Any]:
    step, workflow = dbos.step(), dbos.workflow()

    async def stop_at_gate(number: int) -> int:  # a function, because the decorator sets attributes
        return await gate.stop(number)

    task, stop = step(noop), step(stop_at_gate)

    async def one_step(number: int) -> int:
        return int(await task(number))

    async def ten_steps(number: int) -> int:
        for _ in range(STEPS):
            number = await task(number)
        return number

    async def halfway(number: int) -> int:
        for _ in range(STEPS // 2):
            await task(number)
        await stop(number)
        for _ in range(STEPS // 2):
            await task(number)
        return number

    child = workflow(one_step)

    async def children(number: int) -> int:
        handles = [await dbos.start_workflow_async(child, each) for each in range(number)]
        return len([await handle.get_result() for handle in handles])

    async def parallel(number: int) -> int:
        return len(await asyncio.gather(*(task(each) for each in range(number))))

    others = {body.__name__: workflow(body) for body in (ten_steps, halfway, children, parallel)}
    return {"one_step": child, **others}


def _blocking_workflows(dbos: Any, gate: Gate) -> dict[str, Any]:
    step, workflow = dbos.step(), dbos.workflow()
    task = step(lambda number: number)

    def one_step(number: int) -> int:
        return int(task(number))

    def ten_steps(number: int) -> int:
        for _ in range(STEPS):
            number = task(number)
        return number

    return {body.__name__: workflow(body) for body in (one_step, ten_steps)}


_ASYNC = ("noop10", "latency", "recovery", "fanout", "queues")
_SYNC = ("noop10", "latency")
PEER = Peer(
    title="DBOS",
    adapter=Dbos,
    variants={
        "sqlite": Variant("SQLite", _ASYNC),
        "sqlite-sync": Variant("SQLite, threads", _SYNC),
        "postgres": Variant("PostgreSQL", _ASYNC, needs=("postgres",)),
        "postgres-sync": Variant("PostgreSQL, threads", _SYNC, needs=("postgres",)),
    },
    settings="defaults; the caller is in the process that executes the runs",
    python=("dbos", "uvloop"),
)
