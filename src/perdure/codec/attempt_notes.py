"""AttemptNotes: what the row of a pending step keeps from one attempt to the next.

The notes are the value of an entry that is pending; the result of the step replaces them. They go through the codec of
the store, like every value of a user. This module knows no run, step or store.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from perdure.codec.codec import Codec


class AttemptNotes(Struct, frozen=True):
    """The last heartbeat of a step and its time; `since`: the start of its first attempt, if `max_elapsed` needs it.

    `starts` counts the attempts on other workers that were made before a person gave the step its attempts again.
    """

    heartbeat: Any = None
    heartbeat_at: float | None = None
    since: float | None = None
    starts: int = 0


NO_NOTES = AttemptNotes()


def encode_notes(codec: Codec, notes: AttemptNotes, what: str = "heartbeat") -> bytes:
    """Return the notes as bytes. Raises `InvalidPayload` if the heartbeat cannot be encoded."""
    given: dict[str, Any] = {}
    if notes.heartbeat_at is not None:
        given = {"heartbeat": notes.heartbeat, "heartbeat_at": notes.heartbeat_at}
    if notes.since is not None:
        given["since"] = notes.since
    if notes.starts:
        given["starts"] = notes.starts
    return codec.encode(given, what=what)


def decode_notes(codec: Codec, data: bytes | None) -> AttemptNotes:
    """Return the notes of a pending step. An imported row may contain anything: what is no note is ignored."""
    if data is None:
        return NO_NOTES
    given = codec.decode(data, what="the notes of a step")
    if not isinstance(given, dict):
        return NO_NOTES
    heartbeat_at, since = _time(given.get("heartbeat_at")), _time(given.get("since"))
    starts = given.get("starts", 0)
    known_starts = starts if isinstance(starts, int) and not isinstance(starts, bool) and starts > 0 else 0
    return AttemptNotes(None if heartbeat_at is None else given.get("heartbeat"), heartbeat_at, since, known_starts)


def _time(given: Any) -> float | None:
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool) and math.isfinite(given)
    return float(given) if is_number and 0 <= given < _LAST_SECOND else None


_LAST_SECOND = 253_402_300_799.0  # the end of the year 9999, the last that a datetime can have
