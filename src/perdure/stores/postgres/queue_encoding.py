"""Encode the writes of queues as JSON for the SQL functions of the schema.

The key `queues` tells `commit_write` and `commit_batch` which locks a write needs: "place" those of partitions and of
dedupe keys, "settings" also those of queues.
"""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.model.queue_records import COUNT_CAP, Place
from perdure.stores.writes import Admit, ConfigurePartition, ConfigureQueue, LeaveQueue, Requeue

Json = dict[str, Any]

_encode = msgspec.json.Encoder().encode


def requested_place(place: Place) -> Json:
    """Return the fields of a write that requests a place."""
    fields = {name: getattr(place, name) for name in place.__struct_fields__}
    return {"queues": "place", "place": {name: value for name, value in fields.items() if value is not None}}


def queue_write(write: Admit | ConfigureQueue | ConfigurePartition | Requeue | LeaveQueue) -> Json:
    """Return a write that concerns a queue, in the format of `apply_write`."""
    match write:
        case Admit():
            return _admission(write)
        case ConfigureQueue():
            return _settings(write)
        case ConfigurePartition():
            override = None if write.override is None else _text(write.override)
            pair = {"queue": write.queue, "partition": write.partition}
            return _without_none({"kind": "configure_partition", "queues": "settings", **pair, "override": override})
        case Requeue():
            return {"kind": "requeue", **_fields(write)}
        case LeaveQueue():
            return {"kind": "leave_queue", **_fields(write)}


def _admission(write: Admit) -> Json:
    takes = [_without_none(_fields(take)) for take in write.takes]
    encoded = {"kind": "admit", "queues": "settings", **_fields(write), "takes": takes or None}
    return _without_none(encoded)


def _settings(write: ConfigureQueue) -> Json:
    """Return new settings as text, which the server compares, and what it needs of them."""
    override = write.override.max_waiting if isinstance(write.override.max_waiting, int) else 0
    encoded = {
        "kind": "configure_queue",
        "queues": "settings",
        "queue": write.name,
        "base": write.base,
        "declared": _text(write.declared),
        "override": _text(write.override),
        "paused": None if write.paused is None else _text(write.paused),
        "partitioned": write.declared.partitioned,
        "count_cap": max(COUNT_CAP, write.declared.max_waiting or 0, override),
    }
    return _without_none(encoded)


def _text(settings: msgspec.Struct) -> str:
    return _encode(settings).decode()


def _fields(struct: msgspec.Struct) -> Json:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _without_none(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}
