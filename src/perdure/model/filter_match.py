"""Decide whether a run matches a filter: the reference of every store, in Python.

A condition on a key that the run does not have is false, so its negation is true. Keys that name a field of a run:

    status:S     the status                          workflow:W  the workflow's name
    version:N    the workflow's version; also >, <   pool:P      the pool
    parent:ID    the run that started it             queue:Q     the queue of its start
    held:KIND    why it is held now                  waiting:W   why it is suspended (`Awaited`)
    error:TYPE   the type of the error it ended with worker:ID   the worker that executes it
    id:PREFIX    its id begins with this             created, updated, ended: times; only compared

With `*`: `waiting` matches every suspended run, and `worker` every run that a worker owns. Other keys name tags.
Equality compares the canonical text of a tag; a comparison compares numbers, and times in seconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from perdure.model.awaited import parse_awaited
from perdure.model.filters import RUN_FIELDS, AllOf, AnyOf, Filter, Not, Relative, Term
from perdure.model.records import RunRecord, RunStatus
from perdure.model.tags import index_tag

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}


def matches(filter: Filter, record: RunRecord) -> bool:
    """Return whether the run matches. Relative times must have been resolved."""
    match filter:
        case Term():
            return _matches_term(filter, record)
        case Not():
            return not matches(filter.part, record)
        case AllOf():
            return all(matches(part, record) for part in filter.parts)
        case AnyOf():
            return any(matches(part, record) for part in filter.parts)


def _matches_term(term: Term, record: RunRecord) -> bool:
    if term.operator != ":":
        number = _number_of(term.key, record)
        if isinstance(term.value, Relative) or not isinstance(term.value, int | float):
            raise AssertionError(f"{term} is not resolved")
        return number is not None and _COMPARE[term.operator](number, term.value)
    if term.key == "waiting":
        if term.value is None:
            return record.status is RunStatus.SUSPENDED
        return parse_awaited(term.value).matches(record)
    text = _text_of(term.key, record)
    if text is None or term.value is None:
        return text is not None
    return text.startswith(str(term.value)) if term.key == "id" else text == term.value


def _text_of(key: str, record: RunRecord) -> str | None:
    """Return what `:` compares, or None if the run does not have the key."""
    if key not in RUN_FIELDS:
        return index_tag(key, record.tags[key]).text if key in record.tags else None
    match key:
        case "held":
            return None if record.current_hold is None else record.current_hold.kind
        case "error":
            return None if record.error is None else record.error.type
        case "worker":
            return record.owner
        case "version":
            return str(record.version)
        case "created" | "updated" | "ended":
            return None if _number_of(key, record) is None else ""
        case _:
            text: str | None = getattr(record, key)
            return text


def _number_of(key: str, record: RunRecord) -> float | None:
    """Return what a comparison compares, or None if the run does not have the key or its value has no order."""
    match key:
        case "created":
            return record.created_at
        case "updated":
            return record.updated_at
        case "ended":
            return record.ended_at
        case "version":
            return record.version
        case _:
            return index_tag(key, record.tags[key]).number if key in record.tags else None
