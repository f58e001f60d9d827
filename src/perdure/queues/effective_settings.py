"""Effective settings: the limits that apply, from what code declares and what an operator has set instead."""

from __future__ import annotations

from msgspec import UNSET, Struct
from msgspec.structs import fields, replace

from perdure.model.queue_records import PartitionOverride, QueueOverride, QueueSettings, RateLimit

LIMIT_NAMES = tuple(field.name for field in fields(QueueOverride))
"""The limits that an override can replace."""


class PartitionLimits(Struct, frozen=True):
    """The limits of one partition, and how many runs it is served per turn."""

    concurrency: int | None
    rate: RateLimit | None
    weight: int = 1


def effective_settings(declared: QueueSettings, override: QueueOverride) -> QueueSettings:
    """Return the declared settings with the limits that the override sets."""
    changed = {name: limit for name in LIMIT_NAMES if (limit := getattr(override, name)) is not UNSET}
    return replace(declared, **changed) if changed else declared


def partition_limits(settings: QueueSettings, override: PartitionOverride | None) -> PartitionLimits:
    """Return the limits of a partition, from the effective settings of its queue and the partition's own override."""
    if override is None:
        return PartitionLimits(settings.partition_concurrency, settings.partition_rate)
    return PartitionLimits(
        settings.partition_concurrency if override.concurrency is UNSET else override.concurrency,
        settings.partition_rate if override.rate is UNSET else override.rate,
        override.weight,
    )
