"""Perdure itself, through its public API, on each of its stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.peer_protocol import Adapter, Peer, Variant
from benchmarks.step_bodies import QUEUES, STEPS, Gate, QueuedRuns, noop

if TYPE_CHECKING:
    from perdure import Context, Engine


class Perdure(Adapter):
    async def open(self) -> None:
        import perdure

        self._workflows = _workflows(Gate(self.setting.folder))
        self._queued = _queued_workflow(self.queued)
        self._queues = {name: perdure.WorkQueue(name, limit) for name, limit in QUEUES.items()}
        self._engine: Engine = perdure.Engine(self._url, workflows=[*self._workflows.values(), self._queued])
        await self._engine.open()

    @property
    def _url(self) -> str:
        if self.variant == "sqlite":
            return f"sqlite:///{self.setting.folder / 'perdure.db'}"
        return self.setting.urls[self.variant]

    async def close(self) -> None:
        await self._engine.shutdown(grace=0)

    async def execute(self, workflow: str, number: int) -> int:
        result: int = await self._engine.execute(self._workflows[workflow], number)
        return result

    async def start(self, workflow: str, number: int, id: str) -> None:
        await self._engine.start(self._workflows[workflow], number, id=id)

    async def enqueue(self, queue: str, number: int) -> None:
        await self._engine.start(self._queued, number, queue=self._queues[queue])

    async def result(self, id: str) -> int:
        result: int = await self._engine.get(id).result()
        return result


def _queued_workflow(runs: QueuedRuns) -> Any:
    from perdure import step, workflow

    note = step(runs.note)

    @workflow
    async def queued(ctx: Context, number: int) -> int:
        return await note(number)

    return queued


def _workflows(gate: Gate) -> dict[str, Any]:
    from perdure import step, workflow

    task, stop = step(noop), step(gate.stop)

    @workflow
    async def one_step(ctx: Context, number: int) -> int:
        return await task(number)

    @workflow
    async def ten_steps(ctx: Context, number: int) -> int:
        for _ in range(STEPS):
            number = await task(number)
        return number

    @workflow
    async def halfway(ctx: Context, number: int) -> int:
        for _ in range(STEPS // 2):
            await task(number)
        await stop(number)
        for _ in range(STEPS // 2):
            await task(number)
        return number

    @workflow
    async def children(ctx: Context, number: int) -> int:
        return len(await ctx.join(*(ctx.run_child(one_step, child) for child in range(number))))

    @workflow
    async def parallel(ctx: Context, number: int) -> int:
        return len(await ctx.join(*(task(each) for each in range(number))))

    return {each.name: each for each in (one_step, ten_steps, halfway, children, parallel)}


_ALL = ("noop10", "latency", "recovery", "fanout", "queues")
PEER = Peer(
    title="Perdure",
    adapter=Perdure,
    variants={
        "sqlite": Variant("SQLite", _ALL),
        "postgres": Variant("PostgreSQL", _ALL, needs=("postgres",)),
        "redis": Variant("Redis", _ALL, needs=("redis",)),
        "redis-everysec": Variant("Redis flushing every second", ("latency",), needs=("redis-everysec",)),
    },
    settings="defaults: an acknowledged commit is on disk, on Redis because of appendfsync=always; with everysec, the "
    "default of Redis, it is on disk within a second",
)
