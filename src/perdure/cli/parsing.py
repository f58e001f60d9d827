"""Parse command-line arguments: payloads, tags, times, run filters."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from perdure.cli.output import now, short
from perdure.cli.session import UsageError

if TYPE_CHECKING:
    from perdure.model.queries import RunQuery
    from perdure.model.records import RunStatus
    from perdure.workflows.definition import Workflow

_LENGTH = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def arguments_of(workflow: Workflow[Any, Any], payload: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Parse a JSON payload into the arguments of a workflow, as values of its own types."""
    from perdure.codec import JSON

    names = list(workflow.parameters.hints)
    given = {} if payload is None else _by_parameter(workflow.name, names, json_value(payload))
    unknown = set(given) - set(names)
    if unknown:
        advice = f"it takes {', '.join(names)}" if names else "it takes no payload"
        raise UsageError(f"workflow {workflow.name} has no parameter {', '.join(sorted(unknown))}", advice)
    what = f"payload of workflow {workflow.name!r}"
    return workflow.parameters.decode(JSON, JSON.encode(given), what)


def json_value(text: str) -> Any:
    """Parse JSON from the command line or, for `-`, from stdin."""
    import msgspec

    source = sys.stdin.buffer.read() if text == "-" else text.encode("utf-8", "surrogateescape")
    try:
        return msgspec.json.decode(source)
    except RecursionError:
        reason = "it nests too deep"
    except (msgspec.DecodeError, UnicodeError) as error:
        reason = str(error)
    advice = """quote it for the shell: '{"id": 42}' or '"text"'"""
    raise UsageError(f"{source[:40].decode('utf-8', 'replace')} is not valid JSON: {reason}", advice)


def _by_parameter(workflow: str, names: list[str], value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and value and set(value) <= set(names):
        return dict(value)
    if len(names) == 1:
        return {names[0]: value}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list) and len(value) <= len(names):
        return dict(zip(names, value, strict=False))
    expected = f"an object with {', '.join(names)}, or a list of them in this order" if names else "no payload"
    raise UsageError(f"workflow {workflow} cannot be started with {short(value)}", f"use {expected}")


def query_of(
    status: Sequence[RunStatus] | None,
    workflow: str | None,
    tag: Sequence[str] | None,
    prefix: str | None,
    parent: str | None = None,
    since: str | None = None,
    until: str | None = None,
    *,
    limit: int = 100,
    after: str | None = None,
    held: bool = False,
    waiting_for: str | None = None,
    where: str | None = None,
) -> RunQuery:
    """Build the query for these filter options. A tag of an option has no type, as in a filter."""
    from perdure.model.filter_parser import parse_filter
    from perdure.model.filters import RUN_FIELDS, Term, all_of
    from perdure.model.queries import RunQuery

    tags = tags_of(tag) or {}
    terms = [Term(key, ":", value) for key, value in tags.items() if key not in RUN_FIELDS]
    return RunQuery(
        status=tuple(status) if status else None,
        workflow=workflow,
        tags={key: value for key, value in tags.items() if key in RUN_FIELDS},
        where=all_of(parse_filter(where or ""), *terms) if where or terms else None,
        parent=parent,
        id_prefix=prefix,
        created_after=None if since is None else time_of(since),
        created_before=None if until is None else time_of(until),
        limit=limit,
        after=after,
        held=held or None,
        waiting_for=waiting_for,
    )


def tags_of(given: Sequence[str] | None) -> dict[str, str] | None:
    if not given:
        return None
    tags = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"{text!r} is not a tag", "use --tag KEY=VALUE")
        tags[key] = value
    return tags


def duration(text: str) -> timedelta:
    """Parse `90s`, `2h`, `7d`, `1h30m`, or a number of seconds."""
    found = _LENGTH.findall(text)
    try:
        if found and _LENGTH.sub("", text).strip() == "":
            return sum((timedelta(**{_UNITS[unit]: float(number)}) for number, unit in found), timedelta(0))
        return timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        raise UsageError(f"{text!r} is not a duration", "use 90s, 30m, 2h or 7d") from None


def time_of(text: str) -> datetime:
    """Parse a time: a duration before now, or ISO 8601 (UTC if it has no zone)."""
    try:
        if _LENGTH.match(text) and _LENGTH.sub("", text).strip() == "":
            return now() - duration(text)
        at = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise UsageError(f"{text!r} is not a time", "use 2h, 7d, or 2026-01-31T12:00Z") from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
