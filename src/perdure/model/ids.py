"""Ids of runs: time-ordered new ones, readable ones from an idempotency key, and the shard that an id belongs to."""

from __future__ import annotations

import hashlib
import os
import zlib

from perdure.errors import InvalidArgument
from perdure.model.validation import MAX_NAME

MAX_READABLE_KEY = 128
_VERSION_AND_VARIANT = 7 << 76 | 2 << 62
_CHANCE = (2**12 - 1) << 64 | 2**62 - 1  # the bits of a UUID of version 7 that mean nothing


def new_run_id(now: float) -> str:
    """A new id that sorts by time of creation: a UUID of version 7."""
    time, chance = int(now * 1000) & (2**48 - 1), int.from_bytes(os.urandom(10))
    text = f"{time << 80 | chance & _CHANCE | _VERSION_AND_VARIANT:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def new_token() -> str:
    """Something that nobody else has."""
    return os.urandom(16).hex()


def keyed_run_id(workflow: str, key: object) -> str:
    """The id that a key stands for: readable where the key is short and printable, hashed where it is not."""
    if not isinstance(key, str):
        raise InvalidArgument(f"the idempotency_key of workflow {workflow!r} returned {key!r}; it must return a string")
    name = workflow.replace("%", "%25").replace(":", "%3A")  # so that no two workflows can mean the same id
    if key and len(key) <= MAX_READABLE_KEY and key.isprintable() and len(name) + len(key) < MAX_NAME:
        return f"{name}:{key}"
    digest = hashlib.sha256(f"{workflow}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{name[:400]}:{digest}"


def shard_of(run_id: str, shards: int) -> int:
    return zlib.crc32(run_id.encode()) % shards
