"""Cursors and filters of run queries. A cursor encodes the last key of the previous page as a URL-safe string."""

from __future__ import annotations

import base64
from typing import cast

import msgspec

from perdure.errors import StoreError
from perdure.model.queries import RunQuery, parse_awaited
from perdure.model.records import RunRecord, RunStatus
from perdure.model.validation import check_name, check_time, describe_value

Key = tuple[float, str]
"""Runs are listed by (created_at, id), newest first."""

_decoder = msgspec.json.Decoder(tuple[float, str])


def cursor_after(created_at: float, run_id: str) -> str:
    """Return the cursor of the page that follows this run."""
    return base64.urlsafe_b64encode(msgspec.json.encode((created_at, run_id))).decode()


def key_of(cursor: str) -> Key:
    """Return the key in a cursor. Raises `StoreError` for a string that `cursor_after` did not make."""
    try:
        created_at, run_id = _decoder.decode(base64.b64decode(cursor.encode("ascii"), altchars=b"-_", validate=True))
        return check_time("the time in it", created_at), check_name("the id in it", run_id)
    except (ValueError, AttributeError, RecursionError) as error:
        shown = describe_value(cursor)
        raise StoreError(
            f"{shown} is not a cursor of a page; use the `next` of the previous page, unchanged"
        ) from error


def check_limit(limit: int) -> int:
    """Return the limit of a page. Raises `StoreError` if it is less than 1."""
    if limit < 1:
        raise StoreError(f"a page's limit must be at least 1, not {limit!r}")
    return limit


def statuses_of(query: RunQuery) -> tuple[RunStatus, ...] | None:
    """Return the requested statuses, or None for any."""
    if query.status is None:
        return None
    given = (query.status,) if isinstance(query.status, str) else query.status
    return tuple(RunStatus(each) for each in given)


def created_between(query: RunQuery) -> tuple[float | None, float | None]:
    """Return the query's time range in seconds: start (inclusive) and end (exclusive)."""
    return cast("float | None", query.created_after), cast("float | None", query.created_before)


def matches_hold(query: RunQuery, record: RunRecord) -> bool:
    """Return whether the run is held as the query requests."""
    hold = record.current_hold
    return query.held is None or (hold is not None and query.held in (True, hold.kind))


def matches_wait(query: RunQuery, record: RunRecord) -> bool:
    """Return whether the run waits for what the query requests."""
    return query.waiting_for is None or parse_awaited(query.waiting_for).matches(record)
