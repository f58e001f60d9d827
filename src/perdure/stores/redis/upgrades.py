"""Numbered upgrades of a Redis store: each one brings keys and fields from one format to the next.

An upgrade is additive: workers of the previous version share the store while they are replaced, and neither read nor
remove what it adds. It is also idempotent: several processes may run it at once, and a process may die in it. The
format is raised after the upgrade of the last partition, so that an interrupted upgrade runs again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol


class UpgradedPartitions(Protocol):
    """The part of `Partitions` that upgrades use."""

    count: int

    async def execute(self, number: int, *command: Any) -> Any: ...

    async def command(self, number: int, command: str, key: str, *arguments: str | bytes | int) -> Any: ...


OLDEST_FORMAT = 3  # there is no upgrade from earlier formats, which were never released
Upgrade = Callable[[UpgradedPartitions, int], Awaitable[None]]
UPGRADES: tuple[Upgrade, ...] = ()
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
