"""Tokens of deferreds: what was signed comes back, anything else is refused, and rotation keeps old ones valid."""

import base64
import hmac
import string
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perdure.errors import InvalidArgument, InvalidToken
from perdure.model.records import SigningKey
from perdure.workflows.tokens import make_token, read_token

FIRST = SigningKey(1, 100.0, b"a" * 32)
SECOND = SigningKey(2, 200.0, b"b" * 32)
THIRD = SigningKey(3, 300.0, b"c" * 32)
FOREIGN = SigningKey(1, 100.0, b"z" * 32)

names = st.text(min_size=1, max_size=100)
URL_SAFE = set(string.ascii_letters + string.digits + "-_")


@given(run_id=names, epoch=st.integers(0, 2**40), name=names, number=st.integers(0, 10**9))
@example(run_id="order-42", epoch=0, name="review", number=1)
@example(run_id="a/b", epoch=127, name="ü\0", number=128)
def test_read_token_returns_the_values_of_make_token(run_id, epoch, name, number):
    key = SigningKey(number, 0.0, b"k" * 32)
    token = make_token([key], run_id, epoch, name, at=1.0)
    assert set(token) <= URL_SAFE
    assert read_token([key], token) == (run_id, epoch, name)


def test_names_of_maximum_length_fit_into_a_token():
    longest = "\U0001f600" * 512
    token = make_token([FIRST], longest, 10**6, longest, at=1.0)
    assert read_token([FIRST], token) == (longest, 10**6, longest)


def test_make_token_rejects_values_that_are_too_long():
    with pytest.raises(InvalidArgument, match="too long for a token"):
        make_token([FIRST], "r" * 9000, 0, "review", at=1.0)


def test_short_name_makes_a_short_token():
    assert len(make_token([FIRST], "order-42", 0, "review", at=150.0)) < 70


@given(run_id=names, name=names, data=st.data())
def test_token_with_one_flipped_bit_is_rejected(run_id, name, data):
    token = make_token([FIRST, SECOND, THIRD], run_id, 0, name, at=150.0)
    at, bit = data.draw(st.integers(0, len(token) - 1)), data.draw(st.integers(0, 7))
    changed = token[:at] + chr(ord(token[at]) ^ 1 << bit) + token[at + 1 :]
    with pytest.raises(InvalidToken):
        read_token([FIRST, SECOND, THIRD], changed)


def test_every_flipped_bit_of_one_token_is_rejected():
    token = make_token([FIRST], "order-42", 0, "review", at=150.0)
    for at in range(len(token)):
        for bit in range(8):
            changed = token[:at] + chr(ord(token[at]) ^ 1 << bit) + token[at + 1 :]
            with pytest.raises(InvalidToken):
                read_token([FIRST], changed)


@given(run_id=names, name=names, moved=st.integers(1, 3))
def test_boundary_between_run_id_and_name_is_signed(run_id, name, moved):
    raw = bytearray(_raw(make_token([FIRST], run_id, 0, name, at=150.0)))
    raw[2] = (raw[2] + moved) % 128
    with pytest.raises(InvalidToken):
        read_token([FIRST], _text(bytes(raw)))


@pytest.mark.parametrize(
    "token",
    [
        "",
        "A",
        "AAAA",
        "=",
        "not a token",
        "tökén",
        "\ud800",
        "A" * 8192,
        "A" * 1_000_000,
        base64.urlsafe_b64encode(b"\xff" * 201).decode(),  # a number that never ends
        None,
        b"AAAA",
        7,
    ],
    ids=lambda token: ascii(token)[:20],
)
def test_invalid_tokens_are_rejected(token):
    with pytest.raises(InvalidToken):
        read_token([FIRST], token)


@given(st.text(max_size=300))
def test_arbitrary_text_is_rejected(text):
    with pytest.raises(InvalidToken):
        read_token([FIRST, SECOND], text)


@given(st.binary(max_size=300))
def test_arbitrary_base64_is_rejected(raw):
    with pytest.raises(InvalidToken):
        read_token([FIRST, SECOND], _text(raw))


@pytest.mark.parametrize("change", [lambda t: t + "=", lambda t: t + "\n", lambda t: f" {t}", lambda t: t[:-1]])
def test_only_the_canonical_encoding_is_accepted(change):
    token = make_token([FIRST], "order-42", 0, "review", at=150.0)
    with pytest.raises(InvalidToken):
        read_token([FIRST], change(token))


@pytest.mark.parametrize("run_id", ["r", "ru", "run"])  # each leaves another number of surplus bits at the end
def test_surplus_bits_of_the_last_character_are_rejected(run_id):
    token = make_token([FIRST], run_id, 0, "n", at=150.0)
    for last in URL_SAFE - {token[-1]}:
        with pytest.raises(InvalidToken):
            read_token([FIRST], token[:-1] + last)


def test_key_of_another_store_with_the_same_number_is_rejected():
    token = make_token([FOREIGN], "order-42", 0, "review", at=150.0)
    with pytest.raises(InvalidToken):
        read_token([FIRST, SECOND], token)


def test_unknown_key_is_rejected_after_checking_a_signature(monkeypatch):
    work = []
    signed = make_token([THIRD], "order-42", 0, "review", at=400.0)

    def compare(one, other):
        work.append((len(one), len(other)))
        return True  # even then: without a key there is no right signature

    monkeypatch.setattr("perdure.workflows.tokens.hmac.compare_digest", compare)
    with pytest.raises(InvalidToken):
        read_token([FIRST, SECOND], signed)
    assert work == [(32, 32)]


def test_signature_for_another_purpose_is_rejected():
    said = b"\x01\x00\x01rn"
    with pytest.raises(InvalidToken):
        read_token([FIRST], _text(said + hmac.digest(FIRST.secret, said, "sha256")))


def test_old_tokens_stay_valid_after_key_rotation():
    before = make_token([FIRST], "order-42", 0, "review", at=150.0)
    assert read_token([FIRST, SECOND], before) == ("order-42", 0, "review")
    assert read_token([SECOND, FIRST], before) == ("order-42", 0, "review")


def test_replay_after_key_rotation_makes_the_same_token():
    before = make_token([FIRST], "order-42", 0, "review", at=150.0)
    assert make_token([FIRST, SECOND, THIRD], "order-42", 0, "review", at=150.0) == before


@pytest.mark.parametrize(
    ("at", "signer"), [(50.0, FIRST), (100.0, FIRST), (199.0, FIRST), (200.0, SECOND), (299.0, SECOND), (900.0, THIRD)]
)
@pytest.mark.parametrize("keys", [[FIRST, SECOND, THIRD], [THIRD, FIRST, SECOND]])
def test_newest_key_at_the_start_of_the_run_signs(at, signer, keys):
    token = make_token(keys, "order-42", 0, "review", at=at)
    assert read_token([signer], token) == ("order-42", 0, "review")


def test_of_two_keys_of_the_same_time_the_higher_number_signs():
    twin = SigningKey(2, 100.0, b"t" * 32)
    assert read_token([twin], make_token([twin, FIRST], "r", 0, "n", at=100.0)) == ("r", 0, "n")


def test_make_token_accepts_any_object_with_the_fields_of_a_signing_key():
    @dataclass(frozen=True)
    class Own:
        number: int
        created_at: float
        secret: bytes

    key: Any = Own(1, 100.0, b"a" * 32)
    assert make_token([key], "r", 0, "n", at=1.0) == make_token([FIRST], "r", 0, "n", at=1.0)


def test_tokens_of_other_epochs_and_names_differ():
    tokens = {make_token([FIRST], *of, at=1.0) for of in [("r", 0, "n"), ("r", 1, "n"), ("rn", 0, ""), ("r", 0, "m")]}
    assert len(tokens) == 4


def _raw(token: str) -> bytes:
    return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
