"""Values of tags: what is allowed, how they are stored, and how they are indexed."""

import math
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum, IntEnum, StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import InvalidArgument
from perdure.model.tags import decode_tags, encode_tags, index_tag
from perdure.model.validation import MAX_COUNT, check_tags, refuse_reserved_tags


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Word(StrEnum):
    YES = "yes"


tag_values = st.one_of(
    st.text(max_size=20).filter(lambda text: text.isprintable()),
    st.booleans(),
    st.integers(-MAX_COUNT, MAX_COUNT),
    st.floats(allow_nan=False, allow_infinity=False),
    st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=st.timezones()),  # noqa: DTZ001  # hypothesis adds the zone
)


@given(st.dictionaries(st.text("abc.é", min_size=1, max_size=5), tag_values, max_size=5))
def test_checked_tags_come_back_from_their_stored_form(tags: dict[str, Any]):
    checked = check_tags(tags)
    loaded = decode_tags(encode_tags(checked))
    assert loaded == checked
    assert {key: type(value) for key, value in loaded.items()} == {key: type(value) for key, value in checked.items()}
    assert check_tags(loaded) == loaded, "a checked tag is valid and unchanged"


def test_values_become_plain():
    berlin = datetime(2026, 11, 18, 13, tzinfo=timezone(timedelta(hours=1)))
    given: dict[str, Any] = {"a": Color.RED, "b": Level.HIGH, "c": Word.YES, "d": berlin, "e": True, "f": -0.0}
    checked = check_tags(given)
    assert checked == {"a": "red", "b": 3, "c": "yes", "d": datetime(2026, 11, 18, 12, tzinfo=UTC), "e": True, "f": 0}
    assert [type(value) for value in checked.values()] == [str, int, str, datetime, bool, float]
    assert checked["d"].tzinfo is UTC  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ({"": "x"}, "key is empty"),
        ({"k" * 513: "x"}, "513 characters"),
        ({"k\n": "x"}, "control or unprintable"),
        ({1: "x"}, "must be a string"),
        ({"k": None}, "must be text, a number, a bool or an aware datetime, not None"),
        ({"k": b"x"}, "must be text"),
        ({"k": ["x"]}, "must be text"),
        ({"k": "x" * 513}, "513 characters"),
        ({"k": "x\x00"}, "control or unprintable"),
        ({"k": math.inf}, "finite"),
        ({"k": math.nan}, "finite"),
        ({"k": 2**63}, "at most"),
        ({"k": -(2**63)}, "at least"),
        ({"k": datetime(2026, 1, 1)}, "aware datetime"),  # noqa: DTZ001
        ({"k": datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))}, "years 1 to 9999"),
        ({str(n): n for n in range(33)}, "at most 32 tags, not 33"),
        ({str(n): "é" * 300 for n in range(14)}, "at most 8192 bytes"),
        ([("k", "x")], "must be a dict"),
    ],
)
def test_other_values_are_refused(tags: Any, words: str):
    with pytest.raises(InvalidArgument, match=words):
        check_tags(tags)


def test_reserved_keys_are_refused_for_users():
    refuse_reserved_tags(["perdure", "x.perdure.", "Perdure.x"])
    with pytest.raises(InvalidArgument, match=r"'perdure\.slot' is refused"):
        refuse_reserved_tags(["a", "perdure.slot"])


def test_equal_numbers_have_one_canonical_text():
    assert index_tag("k", 500).text == index_tag("k", 500.0).text == "500"
    assert index_tag("k", -0.0).text == "0"
    assert index_tag("k", True).text == "true"
    assert index_tag("k", True).number is None
    assert index_tag("k", datetime(2026, 11, 18, 12, tzinfo=UTC)).text == "2026-11-18T12:00:00Z"
