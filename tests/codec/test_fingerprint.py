"""A fingerprint tells arguments apart, and does not depend on the order of dicts and sets."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.codec import JSON, MSGPACK, fingerprint
from tests.codec.sample_types import Foreign, Order

both = pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=lambda codec: codec.name)


@both
def test_fingerprint_ignores_dict_and_set_order(codec):
    one = fingerprint(codec, ({"a": 1, "b": {"c": 1, "d": 2}},), {"x": 1, "y": {"p", "q", "r"}})
    assert one == fingerprint(codec, ({"b": {"d": 2, "c": 1}, "a": 1},), {"y": {"r", "q", "p"}, "x": 1})
    assert one is not None
    assert len(one) == 8


@both
@pytest.mark.parametrize(
    ("args", "kwargs"), [((1, 3), {}), ((1,), {}), ((1, "2"), {}), ((1,), {"b": 2}), (((1, 2),), {}), ((2, 1), {})]
)
def test_different_arguments_have_different_fingerprints(codec, args, kwargs):
    assert fingerprint(codec, (1, 2), {}) != fingerprint(codec, args, kwargs)


@both
def test_fingerprint_of_objects_depends_on_their_fields(codec):
    assert fingerprint(codec, (Order("a", 1),), {}) == fingerprint(codec, (Order("a", 1),), {})
    assert fingerprint(codec, (Order("a", 1),), {}) != fingerprint(codec, (Order("a", 2),), {})


@both
def test_unsupported_arguments_have_no_fingerprint(codec):
    ring: list[object] = []
    ring.append(ring)
    for value in (Foreign(), ring, "\ud800"):
        assert fingerprint(codec, (value,), {}) is None


def test_fingerprint_is_the_same_in_every_process():
    program = (
        "from perdure.codec import JSON, fingerprint\n"
        "print(fingerprint(JSON, ({'a', 'b', 'c'}, {'x': 1, 'y': 2}), {}).hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(seen) == 1


@both
@given(st.dictionaries(st.text(), st.integers(0, 9) | st.text()), st.randoms())
def test_fingerprint_is_the_same_for_any_dict_order(codec, value, random):
    items = list(value.items())
    random.shuffle(items)
    assert fingerprint(codec, (value,), value) == fingerprint(codec, (dict(items),), dict(items))
