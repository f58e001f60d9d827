"""Run ids: time-ordered new ids, ids derived from idempotency keys, and the shard of an id. Ids of completions.

This module reads no clock; callers pass the time.
"""

from __future__ import annotations

import hashlib
import os
import zlib

from perdure.errors import InvalidArgument
from perdure.model.validation import MAX_NAME, describe_value

MAX_READABLE_KEY = 128
_VERSION_AND_VARIANT = 7 << 76 | 2 << 62
_RANDOM_BITS = (2**12 - 1) << 64 | 2**62 - 1  # The bits of a version 7 UUID that are random.


def new_run_id(now: float) -> str:
    """Return a new id that sorts by creation time: a UUID of version 7."""
    time_ms, randomness = int(now * 1000) & (2**48 - 1), int.from_bytes(os.urandom(10))
    text = f"{time_ms << 80 | randomness & _RANDOM_BITS | _VERSION_AND_VARIANT:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def new_token() -> str:
    """Return a random token of 128 bits, in hexadecimal."""
    return os.urandom(16).hex()


def keyed_run_id(workflow: str, key: object) -> str:
    """Return the run id of an idempotency key: readable if the key is short and printable, hashed otherwise."""
    if not isinstance(key, str):
        returned = describe_value(key)
        raise InvalidArgument(
            f"the idempotency_key of workflow {workflow!r} returned {returned}; it must return a string"
        )
    key = str.__str__(key)  # the text of a member of a string enum
    name = workflow.replace("%", "%25").replace(":", "%3A")  # Escaped, so that two workflows cannot share an id.
    if key and len(key) <= MAX_READABLE_KEY and key.isprintable() and len(name) + len(key) < MAX_NAME:
        return f"{name}:{key}"
    digest = hashlib.sha256(f"{workflow}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{name[:400]}:{digest}"


def deferred_message_id(epoch: int, name: str) -> str:
    """Return the id of every completion of a deferred: a store accepts one message of an id, so the first one wins."""
    return f"deferred/{epoch}/{name}"


def fallback_message_id(epoch: int, name: str, body: bytes) -> str:
    """Return the id of a completion that counts if the ones before it do not fit. Equal completions have one id."""
    return f"fallback/{epoch}/{hashlib.sha256(body).hexdigest()[:32]}/{name}"


def deferred_message_epoch(message_id: str) -> str:
    """Return the epoch in the id of a completion."""
    return message_id.partition("/")[2].partition("/")[0]


def shard_of(run_id: str, shards: int) -> int:
    """Return the shard of a run id."""
    return zlib.crc32(run_id.encode()) % shards
