"""The cursor of a page of runs: where the page before ended, as an opaque string that survives a URL."""

from __future__ import annotations

import base64
from typing import cast

import msgspec

from perdure.errors import StoreError
from perdure.model.queries import RunQuery
from perdure.model.records import RunStatus

Key = tuple[float, str]
"""Runs are listed by (created_at, id), newest first."""

_decoder = msgspec.json.Decoder(tuple[float, str])


def cursor_after(created_at: float, run_id: str) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((created_at, run_id))).decode()


def key_of(cursor: str) -> Key:
    """The key in a cursor; refuses what was not made by `cursor_after`."""
    try:
        return _decoder.decode(base64.b64decode(cursor.encode("ascii"), altchars=b"-_", validate=True))
    except (ValueError, AttributeError) as error:
        raise StoreError(
            f"{cursor!r} is no cursor of a page; pass on the `next` of the page before, unchanged"
        ) from error


def check_limit(limit: int) -> int:
    if limit < 1:
        raise StoreError(f"a page's limit must be at least 1, not {limit!r}")
    return limit


def statuses_of(query: RunQuery) -> tuple[RunStatus, ...] | None:
    """The statuses asked for; None: any."""
    if query.status is None:
        return None
    given = (query.status,) if isinstance(query.status, str) else query.status
    return tuple(RunStatus(each) for each in given)


def created_between(query: RunQuery) -> tuple[float | None, float | None]:
    """From when (inclusive) until when (exclusive), in seconds, as which a query keeps its times."""
    return cast("float | None", query.created_after), cast("float | None", query.created_before)
