"""Read a filter from text, and check a filter that was built by other means.

    status:failed tenant:acme amount>500 created>-2h -region:us (region:eu OR region:uk) order-

A blank means "and". `key:value` equals, `key:*` has the key, `key>x` (also <, >=, <=) compares numbers and times, `-`
negates, `OR` with brackets means "or", quotes enclose blanks and special characters, and a word alone is the beginning
of an id. Errors are `InvalidArgument` and name the position (from 1) of what is wrong. This module knows no store.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from perdure.errors import InvalidArgument
from perdure.model.awaited import parse_awaited
from perdure.model.filters import (
    OPERATORS,
    RUN_FIELDS,
    TIME_FIELDS,
    AllOf,
    AnyOf,
    Filter,
    Not,
    Relative,
    Term,
    all_of,
    any_of,
)
from perdure.model.records import HOLD_KINDS, RunStatus
from perdure.model.validation import check_name, describe_value

MAX_BYTES = 2048
MAX_TERMS = 32
MAX_DEPTH = 8

_KEY = re.compile(r'(?:[^\s():<>="*\\!]|!(?![:<>=]))+')
_OPERATOR = re.compile(r"!?[:<>=]+")
_VALUE = re.compile(r'[^\s()"]+')
_QUOTED = re.compile(r'"((?:[^"\\]|\\["\\])*)"')
_OR = re.compile(r'OR(?![^\s()"])')
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")
_RELATIVE = re.compile(r"([+-]\d+(?:\.\d+)?)(s|m|min|h|d|w)")
_UNIT_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_EARLIEST, _LATEST = (datetime(year, 1, 1, tzinfo=UTC).timestamp() for year in (1, 9999))


def parse_filter(text: str) -> Filter:
    """Return the filter that the text describes. Text without conditions matches every run."""
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        raise InvalidArgument(f"a filter has at most {MAX_BYTES} bytes, this one has {size}; use fewer conditions")
    return check_filter(_Parser(text).parse())


def check_filter(filter: Filter) -> Filter:
    """Return a filter with valid terms, within the limits, without needless nesting. Raises `InvalidArgument`."""
    terms = _count_terms(filter, MAX_DEPTH + 1)  # the outermost conditions have no bracket
    if terms > MAX_TERMS:
        raise InvalidArgument(f"a filter has at most {MAX_TERMS} conditions, this one has {terms}; use fewer")
    return _checked(filter)


def _count_terms(filter: object, depth: int) -> int:
    if isinstance(filter, Term):
        return 1
    if not isinstance(filter, Not | AllOf | AnyOf):
        raise InvalidArgument(
            f"a filter must be text, or made of Term, Not, AllOf and AnyOf, not {type(filter).__name__}"
        )
    if depth == 0:
        raise InvalidArgument(f"a filter is nested at most {MAX_DEPTH} deep; use fewer brackets")
    parts = (filter.part,) if isinstance(filter, Not) else filter.parts
    return sum(_count_terms(part, depth - 1) for part in parts)


def _checked(filter: Filter) -> Filter:
    match filter:
        case Term():
            return check_term(filter)
        case Not():
            return Not(_checked(filter.part))
        case AllOf():
            return all_of(*map(_checked, filter.parts))
        case AnyOf():
            if not filter.parts:
                raise InvalidArgument("AnyOf must have at least one part")
            return any_of(*map(_checked, filter.parts))


def check_term(term: Term) -> Term:
    """Return a valid term. Raises `InvalidArgument` if its operator or value does not suit its key."""
    key = check_name("the key of a condition", term.key)
    if term.operator not in OPERATORS:
        raise InvalidArgument(f"{describe_value(term.operator)} is not an operator; use one of {' '.join(OPERATORS)}")
    if term.operator == ":":
        return Term(key, ":", None if term.value is None else _check_equal(key, term.value))
    _check_order(key, term.operator)
    return Term(key, term.operator, _check_compared(key, term.value))


def _check_order(key: str, operator: str) -> None:
    if key in RUN_FIELDS and key not in (*TIME_FIELDS, "version"):
        raise InvalidArgument(f"{key} has no order; use {key}:value instead of {operator}")


def _check_equal(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"the value of {key}: must be text, not {describe_value(value)}")
    if key not in RUN_FIELDS:
        return check_name(f"the value of tag {key!r}", value) if value else ""
    value = check_name(f"the value of {key}", value)
    if key in TIME_FIELDS:
        raise InvalidArgument(f"{key} is a time: compare it, as in {key}>-2h or {key}<2026-11-01")
    if key == "status" and value not in frozenset(RunStatus):
        raise InvalidArgument(f"{value!r} is not a run status; use one of {', '.join(RunStatus)}")
    if key == "held" and value not in HOLD_KINDS:
        raise InvalidArgument(f"{value!r} is not a kind of hold; use * or one of {', '.join(HOLD_KINDS)}")
    if key == "version" and not re.fullmatch(r"[0-9]{1,18}", value):
        raise InvalidArgument(f"a version is a whole number, not {value!r}")
    if key == "waiting":
        return str(parse_awaited(value, "waiting"))
    return str(int(value)) if key == "version" else value


def _check_compared(key: str, value: object) -> float | Relative:
    if isinstance(value, Relative):
        if key == "version":
            raise InvalidArgument(f"a version is a whole number, not {value.text!r}")
        return value
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidArgument(f"{key} must be compared with a number or a time, not {describe_value(value)}")
    if key in TIME_FIELDS and not _EARLIEST <= value <= _LATEST:
        raise InvalidArgument(f"{key} must be compared with a time of the years 1 to 9998, not {value}")
    return float(value)


class _Parser:
    """Reads one text from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def parse(self) -> Filter:
        filter = self._parse_parts(MAX_DEPTH)
        if self._at < len(self._text):
            raise self._error(self._at, "this bracket closes nothing; remove it")
        return filter

    def _parse_parts(self, depth: int) -> Filter:
        """Read conditions up to the end or to a closing bracket."""
        alternatives: list[list[Filter]] = [[]]
        last_or = 0
        while not self._is_at_end():
            if _OR.match(self._text, self._at):
                last_or = self._at
                if not alternatives[-1]:
                    raise self._error(last_or, "OR needs a condition before it")
                alternatives.append([])
                self._at += 2
            else:
                alternatives[-1].append(self._parse_condition(depth))
        if len(alternatives) == 1:
            return all_of(*alternatives[0])
        if not alternatives[-1]:
            raise self._error(last_or, "OR needs a condition after it")
        if any(len(conditions) > 1 for conditions in alternatives):
            raise self._error(last_or, "put brackets around what OR joins, as in: a:1 (b:2 OR b:3)")
        return any_of(*(conditions[0] for conditions in alternatives))

    def _is_at_end(self) -> bool:
        """Skip blanks and return whether the text or the bracket ends here."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._next() in ("", ")")

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _parse_condition(self, depth: int) -> Filter:
        start = self._at
        if self._next() not in ("-", "("):
            return self._parse_term()
        if depth == 0:
            raise self._error(start, f"a filter is nested at most {MAX_DEPTH} deep; use fewer brackets")
        self._at += 1
        if self._text[start] == "-":
            if self._next() in ("", ")") or self._next().isspace():
                raise self._error(start, "a condition must follow - without a blank")
            return Not(self._parse_condition(depth - 1))
        inside = self._parse_parts(depth - 1)
        if not self._next():
            raise self._error(start, "this bracket is not closed; add )")
        if inside == AllOf():
            raise self._error(start, "these brackets are empty; remove them")
        self._at += 1
        return inside

    def _parse_term(self) -> Term:
        start = self._at
        quoted = self._read_quoted()
        key = quoted if quoted is not None else self._read(_KEY)
        operator = self._read(_OPERATOR)
        if operator and operator not in OPERATORS:
            raise self._error(
                self._at - len(operator),
                f"{operator!r} is not an operator; use one of {' '.join(OPERATORS)}, or quotes around text with it",
            )
        try:
            if operator:
                return self._parse_value(key, operator)
            return self._parse_word(key, quoted=quoted is not None)
        except _Misplaced:
            raise
        except InvalidArgument as error:
            raise self._error(start, str(error)) from None

    def _parse_word(self, word: str, *, quoted: bool) -> Term:
        """Return the condition of a word without an operator: the beginning of an id."""
        if not quoted and word in ("AND", "NOT"):
            use = "a blank means 'and'; remove AND" if word == "AND" else "write - before the condition"
            raise InvalidArgument(f"{word} is not an operator: {use}, or put the word in quotes")
        self._check_end()
        return check_term(Term("id", ":", word))

    def _parse_value(self, key: str, operator: str) -> Term:
        start = self._at
        value = self._read_quoted()
        if value is None:
            raw = self._read(_VALUE)
            if not raw:
                raise self._error(start, f"a value must follow {key}{operator}")
            self._check_end()
            if raw == "*" and operator == ":":
                return check_term(Term(key, ":", None))
            if "*" in raw:
                raise self._error(start, "* is allowed only alone, in key:*; use quotes if it is part of the value")
            value = raw
        else:
            self._check_end()
        return check_term(Term(key, operator, value if operator == ":" else _parse_compared(key, operator, value)))

    def _read(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def _read_quoted(self) -> str | None:
        if self._next() != '"':
            return None
        found = _QUOTED.match(self._text, self._at)
        if found is None:
            raise self._error(self._at, 'this quote is not closed; inside quotes write \\" and \\\\')
        self._at = found.end()
        return re.sub(r"\\(.)", r"\1", found[1])

    def _check_end(self) -> None:
        following = self._next()
        if following and following != ")" and not following.isspace():
            raise self._error(self._at, f"{following!r} is not allowed here; put the text in quotes")

    def _error(self, at: int, what: str) -> _Misplaced:
        return _Misplaced(f"the filter {describe_value(self._text)} is wrong at position {at + 1}: {what}")


class _Misplaced(InvalidArgument):
    """An error whose message has a position."""


def _parse_compared(key: str, operator: str, text: str) -> float | Relative:
    _check_order(key, operator)
    relative = _RELATIVE.fullmatch(text)
    if relative is not None:
        return Relative(float(relative[1]) * _UNIT_SECONDS[relative[2]], text)
    if _NUMBER.fullmatch(text) and key not in TIME_FIELDS:
        return float(text)
    try:
        time = datetime.fromisoformat(text if "-" in text else "")
        return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        expected = "a time" if key in TIME_FIELDS else "a number or a time"
        example = "-2h, 2026-11-01 or 2026-11-01T08:00:00Z"
        raise InvalidArgument(f"{key} must be compared with {expected}, such as {example}, not {text!r}") from None
