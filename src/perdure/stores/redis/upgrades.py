"""Numbered upgrades of a Redis store: each one brings keys and fields from one format to the next.

An upgrade is additive: workers of the previous version share the store while they are replaced, and neither read nor
remove what it adds. It is also idempotent: several processes may run it at once, and a process may die in it. The
format is raised after the upgrade of the last partition, so that an interrupted upgrade runs again.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from perdure.model.records import RunStatus
from perdure.stores.redis.encoding import BARE_FIELDS, bare_pairs, decode_run, encode_time, iter_pairs

PAGE_SIZE = 500  # runs per call of an upgrade


class UpgradedPartitions(Protocol):
    """The part of `Partitions` that upgrades use."""

    count: int

    async def execute(self, number: int, *command: Any) -> Any: ...

    async def read(self, number: int, *query: Any) -> Any: ...

    async def command(self, number: int, command: str, key: str, *arguments: str | bytes | int) -> Any: ...


async def index_held_runs(partitions: UpgradedPartitions, number: int) -> None:
    """Build the index `held-runs` of a partition."""
    before, last_id = "+inf", ""
    while True:
        (page,) = await partitions.read(number, "pages", ["status:suspended"], before, last_id, PAGE_SIZE)
        runs = list(iter_pairs(page))
        if runs:
            await partitions.execute(number, "index_held", [id.decode() for id, _ in runs])
            before, last_id = runs[-1][1].decode(), runs[-1][0].decode()
        if len(runs) < PAGE_SIZE:
            return


async def index_searches(partitions: UpgradedPartitions, number: int) -> None:
    """Build the indexes of `run_index.lua` and the list of topics of a partition.

    The last indexed run is stored with each page, so that an interrupted upgrade continues behind it.
    """
    stored = await partitions.command(number, "HMGET", "upgrade:", "before", "last_id")
    before, last_id = (value.decode() for value in stored) if stored[0] is not None else ("+inf", "")
    indexes = [f"status:{status}" for status in RunStatus]
    while True:
        pages = await partitions.read(number, "pages", indexes, before, last_id, PAGE_SIZE)
        found = heapq.nlargest(PAGE_SIZE, ((float(at), id.decode()) for page in pages for id, at in iter_pairs(page)))
        if not found:
            break
        before, last_id = repr(found[-1][0]), found[-1][1]
        ids = [id for _, id in found]
        rows = await partitions.read(number, "bare", ids, BARE_FIELDS)
        await partitions.execute(number, "index_runs", list(map(_describe_end, ids, rows)), before, last_id)
    cursor = "0"
    while (cursor := (await partitions.execute(number, "index_topics", cursor)).decode()) != "0":
        pass  # a cursor is text: Lua cannot read bytes of a request
    await partitions.command(number, "DEL", "upgrade:")


def _describe_end(run_id: str, row: list[bytes | None]) -> tuple[str, str, str]:
    """Return a run's id, the type of its error and its end, empty if it has none. The type is not in a field."""
    try:
        run = decode_run(bare_pairs(row))
    except Exception:  # a damaged run is in the indexes of what can be read
        return (run_id, "", "")
    return (run_id, "" if run.error is None else run.error.type, encode_time(run.ended_at))


async def add_queues(partitions: UpgradedPartitions, number: int) -> None:
    """Queues add only keys. Their own format keeps out versions that would execute a run that waits in a queue."""


OLDEST_FORMAT = 3  # there is no upgrade from earlier formats, which were never released
Upgrade = Callable[[UpgradedPartitions, int], Awaitable[None]]
UPGRADES: tuple[Upgrade, ...] = (index_held_runs, index_searches, add_queues)
"""The first brings a partition from `OLDEST_FORMAT` to the next format, and so on."""


def current_format() -> int:
    """Return the format that this version reads and writes."""
    return OLDEST_FORMAT + len(UPGRADES)


async def upgrade(partitions: UpgradedPartitions, stored: int) -> None:
    """Bring all partitions from the stored format to the current one."""
    for number, step in enumerate(UPGRADES[stored - OLDEST_FORMAT :], stored + 1):
        for partition in range(partitions.count):
            await step(partitions, partition)
        await partitions.execute(0, "raise_format", number)
