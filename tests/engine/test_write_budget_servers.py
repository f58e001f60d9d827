"""Write budget of a run of ten steps on a server: round trips, statements, rows and bytes, counted by the server.

The server belongs to this module, so that no other work is counted; nothing depends on time. The limits of bytes are a
fifth above the measured values. A new column or index exceeds them, and its cost must then be decided on.
"""

import asyncio
import re
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from perdure import Context, event, step, workflow
from perdure.clock import Clock
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.redis.store import RedisStore
from perdure.testing import Harness, VirtualClock
from tests.servers import postgres, redis

STEPS = 10
RUNS = 20  # averages out page headers and first statements
WAL_BYTES_PER_RUN = 6_400
AOF_BYTES_PER_RUN = 3_950
COMMANDS_PER_RUN = 20  # two of them write the indexes by workflow and by end, which searches use
WRITING = ("hset", "hdel", "zadd", "zrem", "sadd", "srem", "rpush", "set", "del", "incr", "hincrby")


@step
async def put(number: int) -> int:
    return number


@workflow
async def ten_puts(ctx: Context) -> int:
    total = 0
    for number in range(STEPS):
        total += await put(number)
    return total


@event(delivery="after_wait", consume=False)
class Heard:
    pass


@workflow
async def hears(ctx: Context) -> None:
    await ctx.receive(Heard)


@workflow
async def one_child(ctx: Context) -> int:
    return await ctx.run_child(ten_puts)


# --- PostgreSQL ----------------------------------------------------------------------------------------------------

QUIET = {"autovacuum": "off", "full_page_writes": "off", "wal_level": "minimal", "max_wal_senders": "0", "fsync": "off"}
COUNT_ROWS = """
    CREATE TABLE public.written (name text, verb text);
    CREATE FUNCTION public.count_row() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.written VALUES (TG_TABLE_NAME, TG_OP);
        RETURN NULL;
    END $$;
    DO $$
    DECLARE each text;
    BEGIN
        FOR each IN SELECT tablename FROM pg_tables WHERE schemaname = 'counted' LOOP
            EXECUTE format('CREATE TRIGGER count AFTER INSERT OR UPDATE OR DELETE ON counted.%I
                            FOR EACH ROW EXECUTE FUNCTION public.count_row()', each);
        END LOOP;
    END $$"""


class VirtualTimeStore(PostgresStore):
    def __init__(self, url: str, clock: Clock) -> None:
        super().__init__(url)
        self._clock = clock

    async def now(self) -> float:
        return self._clock.now()


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[postgres.Server]:
    with folder_for_anyone() as folder:
        server = postgres.Server(folder / "server", **QUIET)
        server.start()
        yield server
        server.remove()


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that stores send to the server, one per round trip."""
    sent: list[str] = []

    connect = asyncpg.connect

    async def tapped(*args: Any, **settings: Any) -> asyncpg.Connection:
        connection = await connect(*args, **settings)
        connection.add_query_logger(lambda query: sent.append(query.query))
        return connection

    monkeypatch.setattr(asyncpg, "connect", tapped)
    return sent


def on_postgres(server: postgres.Server, schema: str, test: Callable[[Harness], Awaitable[None]]) -> None:
    def store(clock: Clock) -> PostgresStore:
        return VirtualTimeStore(postgres.with_schema(server.url, schema), clock)

    asyncio.run(on(store, test))


def kinds_of(queries: list[str]) -> Counter[str]:
    """Count statements by the function or table they name, without type lookups of the driver and notifications.

    Several commits share a notification, so that the number of notifications depends on timing.
    """
    counted: Counter[str] = Counter()
    for query in queries:
        about = re.search(r'"\w+"\.(\w+)', query)
        if about is not None:
            counted[about[1]] += 1
    return counted


def test_postgres_ten_steps_are_eleven_statements(postgres_server, queries):
    """The start and ten steps, the last of which ends the run. Each is one statement, round trip and commit."""

    async def test(h):
        engine = await h.engine(ten_puts)
        await h.drive(engine.execute(ten_puts))
        queries.clear()
        run = await h.drive(engine.start(ten_puts))
        await h.settle()
        assert kinds_of(queries) == {"fast_create_run": 1, "fast_commit_turn": STEPS}
        assert await h.drive(run.result()) == 45

    on_postgres(postgres_server, "statements", test)


def test_postgres_end_of_a_child_does_not_try_the_fast_path(postgres_server, queries):
    """The worker knows that the child has an observer, so that the fast path would decline."""

    async def test(h):
        engine = await h.engine(one_child, ten_puts)
        await h.drive(engine.execute(one_child))
        queries.clear()
        await h.drive(engine.execute(one_child))
        await h.settle()
        assert kinds_of(queries)["fast_commit_turn"] == STEPS - 1

    on_postgres(postgres_server, "children", test)


def test_postgres_step_writes_one_row_and_does_not_update_its_run(postgres_server):
    async def test(h):
        engine = await h.engine(ten_puts)
        await h.drive(engine.execute(ten_puts))
        connection = await asyncpg.connect(postgres_server.url)
        await connection.execute(COUNT_ROWS)
        await h.drive(engine.execute(ten_puts))
        rows = await connection.fetch("SELECT name, verb, count(*) FROM public.written GROUP BY name, verb")
        await connection.close()
        counted = {(row["name"], row["verb"]): row["count"] for row in rows}
        assert counted == {("runs", "INSERT"): 1, ("entries", "INSERT"): STEPS, ("runs", "UPDATE"): 1}

    on_postgres(postgres_server, "counted", test)


def test_postgres_batch_of_turns_is_one_statement(postgres_server, queries):
    async def test(h):
        engine = await h.engine(ten_puts)
        queries.clear()
        await h.drive(asyncio.gather(*(engine.start(ten_puts, id=f"run-{number}") for number in range(100))))
        await h.settle()
        commits = kinds_of(queries)["commit_batch"]
        assert kinds_of(queries) == {"commit_batch": commits}
        assert sum(len(batch) for batch in engine.faults.committed) == 100 * (1 + STEPS)
        assert commits < 100

    on_postgres(postgres_server, "batches", test)


def test_postgres_run_writes_few_bytes_to_the_wal(postgres_server):
    async def test(h):
        engine = await h.engine(ten_puts)
        await h.drive(engine.execute(ten_puts))
        connection = await asyncpg.connect(postgres_server.url)
        before = await connection.fetchval("SELECT pg_current_wal_insert_lsn()")
        for _ in range(RUNS):
            await h.drive(engine.execute(ten_puts))
        size = await connection.fetchval("SELECT pg_current_wal_insert_lsn() - $1::pg_lsn", before)
        await connection.close()
        assert size / RUNS < WAL_BYTES_PER_RUN

    on_postgres(postgres_server, "log", test)


# --- Redis ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def redis_server() -> Iterator[redis.Server]:
    with folder_for_anyone() as folder:
        server = redis.Server(folder / "server", appendfsync="no")
        server.start()
        yield server
        server.remove()


def on_redis(server: redis.Server, prefix: str, test: Callable[[Harness], Awaitable[None]]) -> None:
    def store(clock: Clock) -> RedisStore:
        return RedisStore(redis.with_options(server.url, prefix=prefix, durability="relaxed"), clock=clock)

    asyncio.run(on(store, test))


def test_redis_ten_steps_are_eleven_round_trips(redis_server):
    """Each is a script, which writes a step with one command; the rest makes and ends the run."""

    async def test(h):
        engine = await h.engine(ten_puts)
        await h.drive(engine.execute(ten_puts))
        before = redis_server.commands()
        await h.drive(engine.execute(ten_puts))
        done = redis_server.commands() - before
        assert done["evalsha"] == 1 + STEPS
        assert sum(done[name] for name in WRITING) <= COMMANDS_PER_RUN

    on_redis(redis_server, "trips", test)


def test_redis_child_end_does_not_use_the_fast_path(redis_server):
    async def test(h):
        engine = await h.engine(one_child, ten_puts)
        await h.drive(engine.execute(one_child))
        calls_before, before = engine.faults.calls.copy(), redis_server.commands()
        await h.drive(engine.execute(one_child))
        await h.settle()
        done, calls = redis_server.commands() - before, engine.faults.calls - calls_before
        assert done["evalsha"] == sum(calls[name] for name in ("commit", "claim", "next_wake", "unfinalized"))

    on_redis(redis_server, "children", test)


def test_redis_a_batch_of_turns_is_one_round_trip(redis_server):
    async def test(h):
        engine = await h.engine(ten_puts)
        before, calls_before = redis_server.commands(), engine.faults.calls.copy()
        await h.drive(asyncio.gather(*(engine.execute(ten_puts, id=f"run-{n}") for n in range(100))))
        calls = engine.faults.calls - calls_before
        assert set(calls) == {"commit"}
        assert (redis_server.commands() - before)["evalsha"] == calls["commit"] < 100

    on_redis(redis_server, "batches", test)


def test_redis_cost_of_consuming_an_event_is_independent_of_other_readers(redis_server):
    """Otherwise a broadcast to many runs would have quadratic cost."""

    async def test(h):
        engine = await h.engine(hears)
        runs = [await engine.start(hears) for _ in range(20)]
        await h.settle()
        before = redis_server.commands()
        assert await h.drive(engine.broadcast(Heard())) == 20
        for run in runs:
            await h.run_to_end(run)
        done = redis_server.commands() - before
        assert not {"hkeys", "hvals", "hscan"} & set(done)
        assert await h.store.topic("Heard") == [], "it is over once all have read it"

    on_redis(redis_server, "topics", test)


def test_redis_bytes_in_the_file_per_run(redis_server):
    async def test(h):
        engine = await h.engine(ten_puts)
        await h.drive(engine.execute(ten_puts))
        before = size_of_file(redis_server)
        for _ in range(RUNS):
            await h.drive(engine.execute(ten_puts))
        assert (size_of_file(redis_server) - before) / RUNS < AOF_BYTES_PER_RUN

    on_redis(redis_server, "file", test)


def size_of_file(server: redis.Server) -> int:
    lines = server.command("INFO", "persistence").decode().splitlines()
    return int(next(line for line in lines if line.startswith("aof_current_size:")).partition(":")[2])


# --- both ----------------------------------------------------------------------------------------------------------


async def on(store: Callable[[Clock], PostgresStore | RedisStore], test: Callable[[Harness], Awaitable[None]]) -> None:
    clock = VirtualClock()
    async with Harness(store(clock), clock=clock) as harness:
        await test(harness)


@contextmanager
def folder_for_anyone() -> Iterator[Path]:
    """A folder that any user can read. PostgreSQL runs as another user, who cannot read pytest's folders."""
    with tempfile.TemporaryDirectory(prefix="perdure-budget-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
