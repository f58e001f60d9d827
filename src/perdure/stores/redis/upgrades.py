"""Numbered upgrades of a Redis store: each one brings keys and fields from one format to the next.

An upgrade is additive: workers of the previous version share the store while they are replaced, and neither read nor
remove what it adds. It is also idempotent: several processes may run it at once, and a process may die in it. The
format is raised after the upgrade of the last partition, so that an interrupted upgrade runs again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from perdure.stores.redis.encoding import iter_pairs

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


OLDEST_FORMAT = 3  # there is no upgrade from earlier formats, which were never released
Upgrade = Callable[[UpgradedPartitions, int], Awaitable[None]]
UPGRADES: tuple[Upgrade, ...] = (index_held_runs,)
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
