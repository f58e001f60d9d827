"""Encoding of the writes of queues as Lua takes them, and decoding of queues and places.

Settings, overrides and pauses are MessagePack that only Python reads. Equal values have equal bytes, because the Lua
modules compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from perdure.errors import StoreError
from perdure.model.queue_records import (
    COUNT_CAP,
    PartitionOverride,
    PartitionView,
    Place,
    PlaceRecord,
    QueueOverride,
    QueuePause,
    QueueSettings,
    QueueSummary,
    QueueView,
    Take,
)
from perdure.stores.redis.encoding import as_lua_string, encode, encode_time
from perdure.stores.writes import Admit, ConfigurePartition, ConfigureQueue, LeaveQueue, Requeue

Array = tuple[Any, ...]
T = TypeVar("T")
MAX_PRIORITY = 255  # priority and number of a place share one score
NUMBERS = 1 << 44  # of places, as in `lua/places.lua`

_settings = msgspec.msgpack.Decoder(QueueSettings)
_override = msgspec.msgpack.Decoder(QueueOverride)
_pause = msgspec.msgpack.Decoder(QueuePause)
_partition_override = msgspec.msgpack.Decoder(PartitionOverride)


def encode_queue_write(write: Admit | ConfigureQueue | ConfigurePartition | Requeue | LeaveQueue) -> Array:
    match write:
        case Admit():
            return _encode_admit(write)
        case ConfigureQueue():
            settings = (_canonical(_settings, write.declared), _canonical(_override, write.override))
            paused = "" if write.paused is None else _canonical(_pause, write.paused)
            return ("configure_queue", write.name, write.base, *settings, paused)
        case ConfigurePartition():
            override = "" if write.override is None else _canonical(_partition_override, write.override)
            return ("configure_partition", write.queue, write.partition, override)
        case Requeue():
            return ("requeue", write.run_id, write.queue, _check_priority(write.priority))
        case LeaveQueue():
            return ("leave_queue", write.run_id, write.queue, encode_time(write.now))


def _encode_admit(write: Admit) -> Array:
    """Return the array of an admission without its last element, the time of the store's clock."""
    served = ["\0".join((workflow, str(version), pool)) for workflow, version, pool in write.serves]
    takes = [_encode_take(take) for take in write.takes]
    plan = (as_lua_string(write.state), takes, served, write.gate, write.full, write.promote, write.scan)
    tolerance = "" if write.tolerance is None else repr(float(write.tolerance))
    return ("admit", write.queue, write.base, encode_time(write.now), *plan, tolerance)


def _encode_take(take: Take) -> Array:
    limit = "" if take.limit is None else str(take.limit)
    times = (encode_time(take.ready_at), encode_time(take.keep_until))
    return (take.partition, take.count, take.turn, as_lua_string(take.state), limit, *times)


def encode_place(place: Place | None) -> Sequence[Any]:
    """Return a requested place; empty for None."""
    if place is None:
        return ()
    times = (encode_time(place.eligible_at), encode_time(place.expires_at))
    duplicates = (place.dedupe or "", place.on_duplicate, place.debounce, encode_time(place.latest_at))
    return (place.queue, place.partition, _check_priority(place.priority), *times, *duplicates)


def _check_priority(priority: int) -> int:
    if abs(priority) > MAX_PRIORITY:
        raise StoreError(f"a priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, not {priority!r}")
    return priority


def _canonical(decoder: msgspec.msgpack.Decoder[T], value: T) -> msgspec.Raw:
    """Encode settings so that equal values have equal bytes: a float may have been given as an int."""
    return as_lua_string(encode(decoder.decode(encode(value))))


# --- from Lua --------------------------------------------------------------------------------------------------------


def score_of(priority: int, number: int) -> str:
    """Return the score of a place in its partition."""
    return str(priority * NUMBERS + number)


def decode_place(found: Any) -> PlaceRecord | None:
    """Return a place, or None if the run has none."""
    id, fields = found
    queue, partition, priority, number, since, held, admitted_at, eligible_at, expires_at, dedupe = fields
    if queue is None:
        return None
    return PlaceRecord(
        run_id=id.decode(),
        queue=queue.decode(),
        partition=partition.decode(),
        priority=int(priority),
        number=int(number),
        since=float(since),
        held=held == b"1",
        admitted_at=_time(admitted_at),
        eligible_at=_time(eligible_at),
        expires_at=_time(expires_at),
        dedupe=dedupe.decode() if dedupe else None,
    )


def decode_summary(found: Sequence[Any]) -> QueueSummary:
    name, fields, waiting, held, needs_admission, next_at = found
    version, state, declared, override, paused, _, full = fields
    return QueueSummary(
        name=name.decode(),
        version=int(version),
        state=state or b"",
        declared=_settings.decode(declared),
        override=_override.decode(override),
        paused=_pause.decode(paused) if paused else None,
        waiting=min(waiting, COUNT_CAP),
        held=min(held, COUNT_CAP),
        needs_admission=bool(needs_admission),
        full=full == b"1",
        next_at=_time(next_at),
    )


def decode_view(name: str, found: Sequence[Any]) -> QueueView:
    fields, held, active, partitions, eligible, expired, next_at = found
    version, state, declared, override, paused, taken, _ = fields
    return QueueView(
        name=name,
        version=int(version),
        state=state or b"",
        declared=_settings.decode(declared),
        override=_override.decode(override),
        paused=_pause.decode(paused) if paused else None,
        held=held,
        active=active,
        taken=int(taken or 0),
        partitions=tuple(map(_decode_partition, partitions)),
        eligible=eligible,
        expired=tuple(id.decode() for id in expired),
        next_at=_time(next_at),
    )


def _decode_partition(found: Sequence[Any]) -> PartitionView:
    partition, waiting, held, turn, state, taken, override = found
    return PartitionView(
        partition=partition.decode(),
        waiting=min(waiting, COUNT_CAP),
        held=held,
        turn=int(turn),
        state=state or b"",
        taken=int(taken or 0),
        override=_partition_override.decode(override) if override else None,
    )


def _time(text: bytes | None) -> float | None:
    return float(text) if text else None
