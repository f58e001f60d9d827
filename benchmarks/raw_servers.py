"""The same rows on the servers without the engine, as `raw.py` does it for SQLite.

PostgreSQL: the rows that a recorded run left in its tables, inserted into new tables with the same indexes through
asyncpg, each batch in one transaction with one statement per table; runs that end are updated. Redis: the bytes that
the recorded writes sent, each batch in one pipeline: a hash per run and a list per history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import asyncpg
from redis.asyncio import Redis

from benchmarks.recording_stores import Remembering
from perdure import EngineConfig
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.redis.encoding import encode
from perdure.stores.redis.store import RedisStore
from perdure.stores.redis.write_encoding import array_of
from perdure.stores.writes import CommitTurn, CreateRun, Write

SHARDS = EngineConfig().shards


class RememberingPostgres(Remembering, PostgresStore):
    """A PostgreSQL store that remembers what it was given."""


class RememberingRedis(Remembering, RedisStore):
    """A Redis store that remembers what it was given."""


@dataclass
class Rows:
    """What one batch leaves in PostgreSQL's tables."""

    made: list[Any] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


async def write_raw_postgres(url: str, batches: Sequence[Sequence[Write]], recorded: str) -> list[float]:
    """Write again, into a schema of its own, what a run has left in the schema `recorded`; seconds per batch."""
    store = PostgresStore(f"{url}&schema=raw")
    await store.open(shards=SHARDS)
    await store.close()
    connection = await asyncpg.connect(url)
    try:
        rows = [each async for each in _rows_of(connection, batches, recorded)]
        make, enter, end = await _statements(connection)
        seconds = []
        for batch in rows:
            began = perf_counter()
            async with connection.transaction():
                if batch.made:
                    await make.fetch(batch.made)
                if batch.entries:
                    await enter.fetch(batch.entries)
                if batch.ended:
                    await end.fetch(batch.ended)
            seconds.append(perf_counter() - began)
        return seconds
    finally:
        await connection.close()


async def _statements(connection: Any) -> Sequence[Any]:
    return [
        await connection.prepare(text)
        for text in (
            "INSERT INTO raw.runs OVERRIDING SYSTEM VALUE SELECT * FROM unnest($1::raw.runs[])",
            "INSERT INTO raw.entries SELECT * FROM unnest($1::raw.entries[])",
            "UPDATE raw.runs SET status = 'succeeded', owner = NULL, ended_at = 0, prune_at = 0 WHERE id = ANY($1)",
        )
    ]


async def _rows_of(connection: Any, batches: Sequence[Sequence[Write]], recorded: str) -> Any:
    runs = {row["id"]: row for row in await connection.fetch(f"SELECT * FROM {recorded}.runs")}
    found = await connection.fetch(f"SELECT * FROM {recorded}.entries")
    entries = {(row["run_no"], row["position"]): row for row in found}
    for batch in batches:
        rows = Rows()
        for write in batch:
            if isinstance(write, CreateRun):
                rows.made.append(tuple(runs[write.record.id]))
            elif isinstance(write, CommitTurn):
                number = runs[write.run_id]["no"]
                places = range(write.base + 1, write.base + 1 + len(write.entries))
                rows.entries += [tuple(entries[number, place]) for place in places]
                if write.patch is not None and write.patch.status.terminal:
                    rows.ended.append(write.run_id)
        yield rows


async def write_raw_redis(url: str, batches: Sequence[Sequence[Write]]) -> list[float]:
    """Send again the bytes of the recorded writes; seconds per batch."""
    client = Redis.from_url(url.removeprefix("redis+"))  # unix://, as redis-py has it
    try:
        seconds = []
        for commands in [list(_commands(batch)) for batch in batches]:
            began = perf_counter()
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            await pipeline.execute()
            seconds.append(perf_counter() - began)
        return seconds
    finally:
        await client.aclose()


def _commands(batch: Sequence[Write]) -> Iterator[tuple[str | bytes, ...]]:
    for write in batch:
        body = encode(array_of(write, lambda name: 0))
        if isinstance(write, CreateRun):
            yield "HSET", f"raw:run:{write.record.id}", "row", body
        elif isinstance(write, CommitTurn):
            yield "RPUSH", f"raw:history:{write.run_id}", body
