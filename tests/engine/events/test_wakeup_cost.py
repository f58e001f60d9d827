"""Waking is cheap: what one event costs does not depend on how many runs wait. Counted in SQLite, not timed."""

import asyncio
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure import Context, EngineConfig, RunQuery, event, workflow
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing import Harness, VirtualClock

LONG = EngineConfig(sweep_interval=100_000.0, lease=500_000.0, resident_runs=20_000)
FEW, MANY = 10, 100_000
BEGUN = 5  # waiting runs that an engine created; the others are copies of their rows


@event
class Ping:
    n: int


@event(delivery="after_wait")
class Wanted:
    n: int


@workflow
async def waking_waiter(ctx: Context) -> int:
    return (await ctx.receive(Ping, Wanted)).n


class Work:
    """What SQLite did on all connections: statements, and steps of its virtual machine."""

    def __init__(self) -> None:
        self.statements = 0
        self.steps = 0

    def hook(self, connection: apsw.Connection) -> None:
        connection.exec_trace = self._trace
        connection.set_progress_handler(self._step, 10)

    def _trace(self, cursor: apsw.Cursor, sql: str, values: object) -> bool:
        if not sql.startswith("PRAGMA"):  # a thread polls for writes of other processes
            self.statements += 1
        return True

    def _step(self) -> bool:
        self.steps += 10
        return False

    def begin(self) -> None:
        self.statements, self.steps = 0, 0


@pytest.fixture
def work():
    watching = Work()
    apsw.connection_hooks.append(watching.hook)
    yield watching
    apsw.connection_hooks.remove(watching.hook)


async def send(engine: Any, one: str) -> None:
    await engine.send(one, Ping(1))


async def broadcast(engine: Any, one: str) -> None:
    assert await engine.broadcast(Ping(1)) == 1


async def broadcast_to_those_who_wait(engine: Any, one: str) -> None:
    assert await engine.broadcast(Wanted(1)) == 1


async def send_unawaited(engine: Any, one: str) -> None:
    await engine.send(one, "something else", 1)


ACTIONS = (send, broadcast, broadcast_to_those_who_wait, send_unawaited)


def multiply(path: Path, waiting: int) -> None:
    """Let this many runs wait: copies of a waiting run with all its rows."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(60_000)
    columns = ", ".join(
        name for _, name, *_ in connection.execute("PRAGMA table_info(runs)") if name not in ("pk", "id")
    )
    with connection:
        first = connection.execute("SELECT pk FROM runs WHERE id = 'run-000000'").get
        others = "WITH RECURSIVE others (n) AS (SELECT ?1 UNION ALL SELECT n + 1 FROM others WHERE n < ?2 - 1)"
        connection.execute(
            f"""INSERT INTO runs (id, {columns})
                {others} SELECT printf('run-%06d', n), {columns} FROM others, runs WHERE pk = ?3""",
            (BEGUN, waiting, first),
        )
        for table in ("entries", "subscriptions"):
            found = connection.execute(f"PRAGMA table_info({table})")
            owned = ", ".join(name for _, name, *_ in found if name not in ("pk", "run_pk"))
            connection.execute(
                f"""INSERT INTO {table} (run_pk, {owned})
                    SELECT copy.pk, {", ".join(f"own.{name}" for name in owned.split(", "))}
                    FROM runs AS copy CROSS JOIN {table} AS own
                    WHERE own.run_pk = ?1 AND copy.id >= ?2 ORDER BY copy.pk""",
                (first, f"run-{BEGUN:06}"),
            )
    connection.close()


def costs(folder: Path, work: Work, waiting: int) -> dict[str, tuple[int, int]]:
    """Return statements and steps of each action and its effects while this many runs wait."""

    async def main() -> dict[str, tuple[int, int]]:
        clock = VirtualClock()
        store = SqliteStore(str(folder / f"runs-{waiting}.db"), clock=clock, synchronous="off")
        found = {}
        async with Harness(store, clock=clock, config=LONG) as h:
            engine = await h.engine(waking_waiter)
            await asyncio.gather(*(engine.start(waking_waiter, id=f"run-{n:06}") for n in range(BEGUN)))
            await h.clock.advance(1.0)
            multiply(folder / f"runs-{waiting}.db", waiting)
            await h.clock.advance(1.0)
            for action in ACTIONS:
                work.begin()
                one = f"run-{waiting - 2 if action is send else waiting - 3:06}"
                await action(engine, one)
                await h.settle()
                found[action.__name__] = (work.statements, work.steps)
            ended = [run.id for run in await engine.runs(RunQuery(status="succeeded"))]
            assert sorted(ended) == ["run-000000", "run-000001", f"run-{waiting - 2:06}"]
        return found

    return asyncio.run(main())


def test_an_event_costs_the_same_however_many_runs_wait(tmp_path, work):
    """How often the engine looks for work in between depends on threads; a look at each run would cost thousands."""
    few, many = costs(tmp_path, work, FEW), costs(tmp_path, work, MANY)
    for action, (statements, steps) in few.items():
        assert many[action][0] <= statements + 15, action
        assert many[action][1] <= steps + 500, action
