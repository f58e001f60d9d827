"""The rows of a recorded run, written to the servers without the engine, as `raw_sqlite.py` does for SQLite.

PostgreSQL: asyncpg inserts the recorded rows into new tables with the same indexes. Each batch is one transaction with
one statement per table; runs that end are updated. Redis: redis-py sends the bytes of the recorded writes, each batch
in one pipeline: a hash per run and a list per history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import asyncpg
from redis.asyncio import Redis

from benchmarks.recording_stores import RecordingMixin
from perdure import EngineConfig
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.redis.encoding import encode
from perdure.stores.redis.store import RedisStore
from perdure.stores.redis.write_encoding import encode_write
from perdure.stores.writes import CommitTurn, CreateRun, Write

SHARDS = EngineConfig().shards


class RecordingPostgresStore(RecordingMixin, PostgresStore):
    """A PostgreSQL store that records its batches."""


class RecordingRedisStore(RecordingMixin, RedisStore):
    """A Redis store that records its batches."""


@dataclass
class Rows:
    """The rows of one batch in the tables of PostgreSQL."""

    created: list[Any] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


async def write_raw_postgres(url: str, batches: Sequence[Sequence[Write]], recorded: str) -> list[float]:
    """Write the rows of the schema `recorded` to the schema `raw`. Return the seconds per batch."""
    store = PostgresStore(f"{url}&schema=raw")
    await store.open(shards=SHARDS)
    await store.close()
    connection = await asyncpg.connect(url)
    try:
        rows = [each async for each in _read_rows(connection, batches, recorded)]
        insert_runs, insert_entries, end_runs = await _statements(connection)
        seconds = []
        for batch in rows:
            started_at = perf_counter()
            async with connection.transaction():
                if batch.created:
                    await insert_runs.fetch(batch.created)
                if batch.entries:
                    await insert_entries.fetch(batch.entries)
                if batch.ended:
                    await end_runs.fetch(batch.ended)
            seconds.append(perf_counter() - started_at)
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


async def _read_rows(connection: Any, batches: Sequence[Sequence[Write]], recorded: str) -> Any:
    runs = {row["id"]: row for row in await connection.fetch(f"SELECT * FROM {recorded}.runs")}
    found = await connection.fetch(f"SELECT * FROM {recorded}.entries")
    entries = {(row["run_pk"], row["position"]): row for row in found}
    for batch in batches:
        rows = Rows()
        for write in batch:
            if isinstance(write, CreateRun):
                rows.created.append(tuple(runs[write.record.id]))
            elif isinstance(write, CommitTurn):
                number = runs[write.run_id]["pk"]
                positions = range(write.base + 1, write.base + 1 + len(write.entries))
                rows.entries += [tuple(entries[number, position]) for position in positions]
                if write.patch is not None and write.patch.status.terminal:
                    rows.ended.append(write.run_id)
        yield rows


async def write_raw_redis(url: str, batches: Sequence[Sequence[Write]]) -> list[float]:
    """Send the bytes of the recorded writes again. Return the seconds per batch."""
    client = Redis.from_url(url.removeprefix("redis+"))  # redis-py's scheme is unix://
    try:
        seconds = []
        for commands in [list(_commands(batch)) for batch in batches]:
            started_at = perf_counter()
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            await pipeline.execute()
            seconds.append(perf_counter() - started_at)
        return seconds
    finally:
        await client.aclose()


def _commands(batch: Sequence[Write]) -> Iterator[tuple[str | bytes, ...]]:
    for write in batch:
        body = encode(encode_write(write, lambda name: 0))
        if isinstance(write, CreateRun):
            yield "HSET", f"raw:run:{write.record.id}", "row", body
        elif isinstance(write, CommitTurn):
            yield "RPUSH", f"raw:history:{write.run_id}", body
