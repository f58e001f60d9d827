"""Cursors and filters of run queries. A cursor encodes the last key of the previous page as a URL-safe string."""

from __future__ import annotations

import base64
from typing import cast

import msgspec
from msgspec.structs import replace

from perdure.errors import StoreError
from perdure.model.awaited import parse_awaited
from perdure.model.filter_match import matches
from perdure.model.filters import AllOf, Filter, Term
from perdure.model.queries import RunQuery
from perdure.model.records import RunRecord, RunStatus
from perdure.model.tags import index_tag, index_tags
from perdure.model.validation import check_name, check_time, describe_value, is_internal

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


def check_document_page(after: str | None, limit: int, due_by: float | None) -> int:
    """Return the limit of a page of documents. Raises `StoreError` if it, or `after`, is invalid."""
    if after is not None and due_by is not None:
        raise StoreError("a page of due documents begins with the earliest; use after=None with due_by")
    return check_limit(limit)


def without_payloads(record: RunRecord) -> RunRecord:
    """Return the row as a bare list shows it: an empty input and no result."""
    return replace(record, input=b"", original_input=None, result=None)


def required_terms(filter: Filter | None) -> tuple[Term, ...]:
    """Return the terms that every matching run satisfies: a store may select by any of them."""
    parts = filter.parts if isinstance(filter, AllOf) else (filter,)
    return tuple(part for part in parts if isinstance(part, Term))


def matches_query(query: RunQuery, record: RunRecord) -> bool:
    """Return whether a run matches a query, whose times are resolved: the reference of every store."""
    statuses = statuses_of(query)
    since, until = created_between(query)
    return (
        (query.internal or not is_internal(record.workflow))
        and (statuses is None or record.status in statuses)
        and query.workflow in (None, record.workflow)
        and query.parent in (None, record.parent)
        and (query.id_prefix is None or record.id.startswith(query.id_prefix))
        and (since is None or record.created_at >= since)
        and (until is None or record.created_at < until)
        and matches_hold(query, record)
        and matches_wait(query, record)
        and matches_tags(query, record)
        and (query.filter is None or matches(query.filter, record))
    )


def matches_tags(query: RunQuery, record: RunRecord) -> bool:
    """Return whether the run has the query's tags: equal values of the same type; 500 equals 500.0."""
    wanted = index_tags(query.tags or {})
    return all(tag.key in record.tags and index_tag(tag.key, record.tags[tag.key]) == tag for tag in wanted)


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
