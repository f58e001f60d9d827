"""The grammar of filters: what text means, what is refused and where, and that printing is stable."""

import math
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import InvalidArgument
from perdure.model.filter_parser import MAX_DEPTH, MAX_TERMS, check_filter, parse_filter
from perdure.model.filters import RUN_FIELDS, TIME_FIELDS, AllOf, AnyOf, Filter, Not, Relative, Term, resolve
from perdure.model.queries import RunQuery
from perdure.model.records import HOLD_KINDS, RunStatus


def tag(key: str, value: str | None) -> Term:
    return Term(key, ":", value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", AllOf()),
        ("  \n\t ", AllOf()),
        ("tenant:acme", tag("tenant", "acme")),
        ("a:1 b:2", AllOf((tag("a", "1"), tag("b", "2")))),
        ("-tenant:acme", Not(tag("tenant", "acme"))),
        ("--a:1", Not(Not(tag("a", "1")))),
        ("a:1 OR b:2", AnyOf((tag("a", "1"), tag("b", "2")))),
        ("(a:1 OR b:2) c:3", AllOf((AnyOf((tag("a", "1"), tag("b", "2"))), tag("c", "3")))),
        ("-(a:1 b:2)", Not(AllOf((tag("a", "1"), tag("b", "2"))))),
        ("((a:1) (b:2))", AllOf((tag("a", "1"), tag("b", "2")))),
        ("(a:1 OR (b:2 OR c:3))", AnyOf((tag("a", "1"), tag("b", "2"), tag("c", "3")))),
        ("amount>500", Term("amount", ">", 500.0)),
        ("amount<=-1.5e2", Term("amount", "<=", -150.0)),
        ("amount:500", tag("amount", "500")),
        ("vip:*", tag("vip", None)),
        ('vip:"*"', tag("vip", "*")),
        ('"a key":"a \\"b\\" \\\\ c"', tag("a key", 'a "b" \\ c')),
        ('"":""', None),
        ('note:""', tag("note", "")),
        ("waiting:event:Approved", tag("waiting", "event:Approved")),
        ('waiting:event:"a b"', None),
        ('waiting:"event:a b"', tag("waiting", "event:a b")),
        ("held:*", tag("held", None)),
        ("held:diverged", tag("held", "diverged")),
        ("status:failed", tag("status", "failed")),
        ("version:07", tag("version", "7")),
        ("version>=2", Term("version", ">=", 2.0)),
        ("order-42", tag("id", "order-42")),
        ('"order 42"', tag("id", "order 42")),
        ('"OR"', tag("id", "OR")),
        ("OR:x", tag("OR", "x")),
        ("ORDER", tag("id", "ORDER")),
        ("a!b:c", tag("a!b", "c")),
        ("url:https://x/y?z=1", tag("url", "https://x/y?z=1")),
        ("created>-2h", Term("created", ">", Relative(-7200.0, "-2h"))),
        ("created>-1.5d", Term("created", ">", Relative(-129_600.0, "-1.5d"))),
        ("due<+1w", Term("due", "<", Relative(604_800.0, "+1w"))),
        ("created>=2026-11-01", Term("created", ">=", 1_793_491_200.0)),
        ("ended<2026-11-01T01:00:00+01:00", Term("ended", "<", 1_793_491_200.0)),
        ("ended:*", tag("ended", None)),
    ],
)
def test_text_means_a_filter(text: str, expected: Filter | None):
    if expected is None:
        with pytest.raises(InvalidArgument):
            parse_filter(text)
    else:
        assert parse_filter(text) == expected


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("a:1 OR", 5, "needs a condition after"),
        ("OR a:1", 1, "needs a condition before"),
        ("a:1 OR OR b:1", 8, "needs a condition before"),
        ("a:1 b:2 OR c:3", 9, "brackets"),
        ("(a:1", 1, "not closed"),
        ("a:1)", 4, "closes nothing"),
        ("a:1 ()", 5, "empty"),
        ("a:1 -", 5, "must follow -"),
        ("a:1 - b:2", 5, "must follow -"),
        ("a:1 (-)", 6, "must follow -"),
        ('a:"x', 3, "quote is not closed"),
        ('a:"x\\n"', 3, "quote is not closed"),
        ('a:"x"y', 6, "'y' is not allowed here"),
        ("a(b)", 2, "put the text in quotes"),
        ("a:", 3, "value must follow a:"),
        ("x:1 a:)", 7, "value must follow a:"),
        ("amount=5", 7, "'=' is not an operator"),
        ("status!=failed", 7, "'!=' is not an operator"),
        ("amount=>5", 7, "'=>' is not an operator"),
        ("amount>>5", 7, "'>>' is not an operator"),
        (":x", 1, "empty"),
        ("a:x*", 3, "only alone"),
        ("a>*", 3, "only alone"),
        ("ord*", 4, "not allowed here"),
        ("a:1 AND b:2", 5, "remove AND"),
        ("NOT a:1", 1, "write - before"),
        ("x:1 status:open", 5, "is not a run status; use one of pending"),
        ("held:lost", 1, "kind of hold"),
        ("waiting:friday", 1, "waiting must be one of event"),
        ("waiting:timer:x", 1, "timer has no name"),
        ("created:2026-11-01", 1, "compare it"),
        ("created>yesterday", 1, "-2h, 2026-11-01"),
        ("created>2026", 1, "must be compared with a time"),
        ("created>2h", 1, "-2h, 2026-11-01"),
        ("created>2026-13-01", 1, "must be compared with a time"),
        ("created>9999-12-31", 1, "years 1 to 9998"),
        ("x:1 amount>many", 5, "a number or a time"),
        ("amount>1e999", 1, "number or a time"),
        ("status>failed", 1, "has no order; use status:value"),
        ("id>x", 1, "has no order"),
        ("version:two", 1, "whole number"),
        ("version>-2h", 1, "whole number"),
        ("a:\x00", 1, "control or unprintable"),
        ("tenant:" + "x" * 600, 1, "600 characters"),
        ("(" * 9 + "a" + ")" * 9, 9, "nested at most 8 deep"),
        ("-" * 9 + "a", 9, "nested at most 8 deep"),
    ],
)
def test_wrong_text_is_refused_with_its_position(text: str, position: int, words: str):
    with pytest.raises(InvalidArgument) as refused:
        parse_filter(text)
    assert f"at position {position}:" in str(refused.value)
    assert words in str(refused.value)


def test_size_conditions_and_depth_are_limited():
    with pytest.raises(InvalidArgument, match="at most 2048 bytes, this one has 2049"):
        parse_filter(" " * 2048 + "é"[0:0] + "a")
    parse_filter(" " * 2047 + "a")
    with pytest.raises(InvalidArgument, match="at most 2048 bytes"):
        parse_filter("é" * 1025)
    parse_filter(" ".join(f"a:{n}" for n in range(MAX_TERMS)))
    with pytest.raises(InvalidArgument, match="at most 32 conditions, this one has 33"):
        parse_filter(" ".join(f"a:{n}" for n in range(MAX_TERMS + 1)))
    deep = "a:1 (b:1 OR (c:1 (d:1 OR (e:1 (f:1 OR (g:1 (h:1 OR (i:1 j:1))))))))"
    assert str(parse_filter(deep)) == deep
    built: Filter = tag("a", "1")
    for _ in range(MAX_DEPTH + 1):
        built = Not(built)
    check_filter(built)
    with pytest.raises(InvalidArgument, match="nested at most 8 deep"):
        check_filter(Not(built))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (tag("", "x"), "key of a condition is empty"),
        (Term("a", "=", "x"), "'=' is not an operator"),
        (Term("a", ":", 500.0), "must be text"),
        (Term("a", ">", "x"), "number or a time"),
        (Term("a", ">", True), "number or a time"),
        (Term("a", ">", math.nan), "number or a time"),
        (Term("a", ">", None), "number or a time"),
        (Term("status", ">", 1.0), "has no order"),
        (AnyOf(()), "at least one part"),
        (Not(cast("Any", "a")), "made of Term"),
        (AllOf(cast("Any", (1,))), "made of Term"),
        (17, "made of Term"),
        (b"a:1", "made of Term"),
    ],
)
def test_a_filter_that_code_builds_is_checked(given: Any, words: str):
    with pytest.raises(InvalidArgument, match=words):
        RunQuery(where=given)


def test_a_query_takes_text_or_a_filter():
    assert RunQuery(where="a:1").filter == tag("a", "1")
    assert RunQuery(where=AllOf((AllOf((tag("a", "1"),)),))).where == tag("a", "1")
    assert RunQuery().filter is None
    with pytest.raises(InvalidArgument, match="position 2"):
        RunQuery(where="a=1")


def test_relative_times_are_resolved():
    found = resolve(parse_filter("(created>-2h OR -(due<+1d)) a>5 b:x"), 10_000.0)
    assert found == AllOf(
        (
            AnyOf((Term("created", ">", 2800.0), Not(Term("due", "<", 96_400.0)))),
            Term("a", ">", 5.0),
            tag("b", "x"),
        )
    )


# --- printing ------------------------------------------------------------------------------------------------------

printable = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=8).filter(
    str.isprintable
)
operators = st.sampled_from([">", "<", ">=", "<="])
seconds = st.floats(-60e9, 250e9)
relative = st.builds(
    lambda sign, number, unit: Relative(
        float(f"{sign}{number}") * {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}[unit],
        f"{sign}{number}{unit}",
    ),
    st.sampled_from("+-"),
    st.integers(0, 999),
    st.sampled_from("smhdw"),
)
tag_keys = printable.filter(lambda key: key not in RUN_FIELDS)
terms = st.one_of(
    st.builds(tag, tag_keys, st.none() | printable | st.just("")),
    st.builds(Term, tag_keys, operators, st.floats(allow_nan=False, allow_infinity=False) | relative),
    st.builds(tag, st.just("status"), st.sampled_from(RunStatus).map(str)),
    st.builds(tag, st.just("held"), st.none() | st.sampled_from(HOLD_KINDS)),
    st.builds(tag, st.just("id"), printable),
    st.builds(Term, st.sampled_from(TIME_FIELDS), operators, seconds | relative),
    st.builds(tag, st.just("version"), st.integers(0, 99).map(str)),
)
filters: st.SearchStrategy[Filter] = st.recursive(
    terms,
    lambda parts: st.one_of(
        st.builds(Not, parts),
        st.builds(AllOf, st.lists(parts, min_size=1, max_size=3).map(tuple)),
        st.builds(AnyOf, st.lists(parts, min_size=1, max_size=3).map(tuple)),
    ),
    max_leaves=6,
)


@given(filters)
def test_printing_is_stable_and_keeps_the_meaning(given_filter: Filter):
    try:
        checked = check_filter(given_filter)
    except InvalidArgument:
        return  # nested too deeply
    text = str(checked)
    parsed = parse_filter(text)
    assert str(parsed) == text
    assert _with_rounded_times(parsed) == _with_rounded_times(checked)


@given(st.text(alphabet=' abOR:<>=!-"()*\\12h.+', max_size=30) | st.text(max_size=20))
def test_any_text_is_parsed_or_refused(text: str):
    try:
        parsed = parse_filter(text)
    except InvalidArgument:
        return
    printed = str(parsed)
    assert str(parse_filter(printed)) == printed
    assert parse_filter(printed) == parsed


def _with_rounded_times(given_filter: Filter) -> Filter:
    """Text has times in microseconds."""
    match given_filter:
        case Term(key=key, operator=operator, value=float(value)) if key in TIME_FIELDS:
            return Term(key, operator, round(value, 3))
        case Not(part=part):
            return Not(_with_rounded_times(part))
        case AllOf(parts=parts):
            return AllOf(tuple(map(_with_rounded_times, parts)))
        case AnyOf(parts=parts):
            return AnyOf(tuple(map(_with_rounded_times, parts)))
        case _:
            return given_filter
