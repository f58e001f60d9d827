"""Run ids: time-ordered new ids, ids derived from idempotency keys, the shard of an id, and incarnations.

An id can be used again after its run was deleted or pruned. The incarnation distinguishes the runs of one id (ADR 26).
It is part of everything that a run leaves in other runs and in topics: ids of its messages, of its children's starts,
and tokens. It is the end of `RunRecord.created_by`. Runs that a version without incarnations created have none.
Also here: the ids of completions of deferreds.

This module reads no clock; callers pass the time.
"""

from __future__ import annotations

import hashlib
import os
import re
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


# --- incarnations ----------------------------------------------------------------------------------------------------

_INCARNATION = "~~"
_INCARNATION_LENGTH = 12  # hexadecimal digits
_CREATED_BY = re.compile(rf"{_INCARNATION}([0-9a-f]{{{_INCARNATION_LENGTH}}})\Z")


def new_creation_id() -> str:
    """Return a `created_by` for a new run: unique, with a new incarnation."""
    token = new_token()
    return with_incarnation(token, token[:_INCARNATION_LENGTH])


def child_creation_id(origin: str, incarnation: str, target: str) -> str:
    """Return the `created_by` of a child: the same whenever its parent requests it again."""
    creation_id = f"child/{origin}/{target}"
    if not incarnation:
        return creation_id
    digest = hashlib.blake2b(creation_id.encode(), digest_size=_INCARNATION_LENGTH // 2)
    return with_incarnation(creation_id, digest.hexdigest())


def with_incarnation(creation_id: str, incarnation: str) -> str:
    """Return a `created_by` with this incarnation, which may be empty."""
    return f"{creation_id}{_INCARNATION}{incarnation}" if incarnation else creation_id


def incarnation_of(created_by: str) -> str:
    """Return the incarnation in a `created_by`; empty for a run without one."""
    found = _CREATED_BY.search(created_by)
    return "" if found is None else found[1]


def origin_of(run_id: str, incarnation: str) -> str:
    """Return what ids of a run's effects begin with: its id and its incarnation."""
    return f"{run_id}~{incarnation}" if incarnation else run_id
