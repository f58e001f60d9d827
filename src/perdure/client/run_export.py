"""Export a run with its history as readable JSON, and parse it.

    {"perdure": 1, "run": {...}, "entries": [...], "inbox": [...]}

The fields are those of `RunRecord`, `Entry` and `Message`, without those that have their default. Payloads are JSON in
JSON; bytes that are not JSON are `{"$base64": "..."}`. Parsing an export gives the exported snapshot.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import fields, replace

from perdure.codec.codec import check_encoded
from perdure.errors import InvalidArgument
from perdure.model.ids import incarnation_of, with_incarnation
from perdure.model.records import Entry, Message, RunRecord
from perdure.model.tags import decode_tags, encode_tags
from perdure.stores.results import Snapshot

FORMAT = 1
PAYLOADS = ("input", "original_input", "result", "value", "detail", "body", "fields")
# These are meaningful in the exporting store only.
STORE_LOCAL_FIELDS = ("created_by", "owner", "wake_at", "shard", "last_message_no", "fence")
T = TypeVar("T", bound=Struct)


def export_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """Return a run as plain data."""
    run = {name: value for name, value in _plain(snapshot.record).items() if name not in STORE_LOCAL_FIELDS}
    if snapshot.record.tags:
        run["tags"] = msgspec.json.decode(encode_tags(snapshot.record.tags))
    if incarnation := incarnation_of(snapshot.record.created_by):
        run["incarnation"] = incarnation
    return {
        "perdure": FORMAT,
        "run": run,
        "entries": [_plain(entry) for entry in snapshot.entries],
        "inbox": [_plain(message) for message in snapshot.inbox],
    }


def parse_snapshot(data: object) -> Snapshot:
    """Return the snapshot of an exported run; `InvalidArgument` if the data is not one."""
    if not isinstance(data, Mapping) or not isinstance(data.get("run"), Mapping):
        raise InvalidArgument("this is not an exported run: it must be an object with a `run`")
    for name in ("entries", "inbox"):
        if not isinstance(data.get(name), list) or not all(isinstance(each, Mapping) for each in data[name]):
            raise InvalidArgument(f"this is not an exported run: `{name}` must be a list of objects")
    if data.get("perdure") != FORMAT:
        raise InvalidArgument(
            f"the export has format {data.get('perdure')!r}; this version of perdure reads format {FORMAT}"
        )
    try:
        run = {name: value for name, value in data["run"].items() if name not in STORE_LOCAL_FIELDS}
        incarnation = str(run.pop("incarnation", ""))
        record = _struct({**run, "created_by": with_incarnation("", incarnation)}, RunRecord)
        record = replace(record, tags=decode_tags(msgspec.json.encode(record.tags)))
        entries = tuple(_struct(each, Entry) for each in data["entries"])
        inbox = tuple(_struct(each, Message) for each in data["inbox"])
    except (
        msgspec.ValidationError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
        OverflowError,
    ) as error:
        raise InvalidArgument(f"this is not an exported run: {error}") from None
    numbered = tuple(replace(message, number=number) for number, message in enumerate(inbox, 1))
    return Snapshot(record, len(entries), entries, numbered)


def check_payloads(snapshot: Snapshot, max_bytes: int) -> None:
    """Raise `InvalidPayload` if a payload of an export is larger than `max_bytes`, or nests too deep."""
    structs = (("the run", snapshot.record), *((each.location, each) for each in snapshot.entries))
    for owner, struct in (*structs, *((f"message {each.id}", each) for each in snapshot.inbox)):
        for name in PAYLOADS:
            if (data := getattr(struct, name, None)) is not None:
                check_encoded(data, max_bytes, f"{name} of {owner} in the export")


def _plain(struct: Struct) -> dict[str, Any]:
    given = {field.name: (getattr(struct, field.name), field.default) for field in fields(struct)}
    return {name: _plain_value(name, value) for name, (value, default) in given.items() if _is_set(value, default)}


def _is_set(value: Any, default: Any) -> bool:
    return value is not None and value != default and value not in ((), {})


def _plain_value(name: str, value: Any) -> Any:
    if isinstance(value, bytes):
        return _payload(value) if name in PAYLOADS else {"$base64": base64.b64encode(value).decode()}
    if isinstance(value, Struct):
        return _plain(value)
    if isinstance(value, tuple):
        return [_plain_value("", each) for each in value]
    return dict(value) if isinstance(value, Mapping) else value


def _payload(data: bytes) -> Any:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = {"$base64": ""}
    if isinstance(value, dict) and set(value) == {"$base64"}:  # not JSON, or JSON that looks like the escape
        return {"$base64": base64.b64encode(data).decode()}
    return value


def _struct(given: Mapping[str, Any], kind: type[T]) -> T:
    """Convert plain data to a Struct. msgspec reads bytes as base64."""
    return msgspec.convert({name: _convertible(name, value) for name, value in given.items()}, kind)


def _convertible(name: str, value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"$base64"}:
        return value["$base64"]
    if name in PAYLOADS:
        return base64.b64encode(msgspec.json.encode(value)).decode()
    if name in ("error", "cause") and isinstance(value, Mapping):
        return {key: _convertible(key, each) for key, each in value.items()}
    return value
