"""Tokens of deferreds: who holds one may complete that deferred of that run, and nothing else.

A token is data with a signature: key number, epoch, run id and name, then an HMAC-SHA256 over them, in URL-safe base64
without padding. It is not secret data but a proof: what it says can be read by anyone, and changed by nobody. This room
knows neither stores nor runs; it is handed the keys.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Iterable, Sequence
from typing import Protocol

from perdure.errors import InvalidArgument, InvalidToken

# Signed along with what a token says, so that a signature made with the same key for another purpose is none of ours.
_PURPOSE = b"perdure deferred 1\0"
_SIGNATURE_BYTES = 32
_NO_SECRET = bytes(_SIGNATURE_BYTES)
# A run's id and a deferred's name of 512 characters each, four bytes a character, fit in.
_MAX_LENGTH = 8192


class SigningKey(Protocol):
    """A key of the store, as `perdure.stores.results.Key` is one."""

    @property
    def number(self) -> int: ...

    @property
    def made_at(self) -> float: ...

    @property
    def secret(self) -> bytes: ...


def make_token(keys: Sequence[SigningKey], run_id: str, epoch: int, name: str, *, at: float) -> str:
    """The token of a deferred: always the same for the same `at`, whatever keys are added later.

    `at` is when the run began: the newest key of that time signs (the oldest of all, if none is that old), so that a
    replay after a rotation makes the token that was handed out before it.
    """
    key = _key_of(keys, at)
    run, called = run_id.encode(), name.encode()
    payload = _number_bytes(key.number) + _number_bytes(epoch) + _number_bytes(len(run)) + run + called
    token = _text_of(payload + _signature(key.secret, payload))
    if len(token) > _MAX_LENGTH:
        raise InvalidArgument(
            f"the id of the run and the name of the deferred {name[:40]!r}... are too long for a token"
        )
    return token


def read_token(keys: Iterable[SigningKey], token: str) -> tuple[str, int, str]:
    """The run id, epoch and name that a token stands for. `InvalidToken` unless one of these keys has signed it."""
    raw = _raw_of(token)
    payload, signature = raw[:-_SIGNATURE_BYTES], raw[-_SIGNATURE_BYTES:]
    try:
        number, rest = _take_number(payload)
    except IndexError:
        raise _invalid_token() from None
    known = next((key.secret for key in keys if key.number == number), None)
    # An unknown key costs as much time as a wrong signature: nobody learns from it which numbers there are.
    right = hmac.compare_digest(_signature(_NO_SECRET if known is None else known, payload), signature)
    if known is None or not right:
        raise _invalid_token()
    epoch, rest = _take_number(rest)
    length, rest = _take_number(rest)
    return rest[:length].decode(), epoch, rest[length:].decode()


def _key_of(keys: Sequence[SigningKey], at: float) -> SigningKey:
    assert keys, "a store always has a key"
    age = sorted(keys, key=lambda key: (key.made_at, key.number))
    return next((key for key in reversed(age) if key.made_at <= at), age[0])


def _signature(secret: bytes, payload: bytes) -> bytes:
    return hmac.digest(secret, _PURPOSE + payload, "sha256")


def _text_of(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def _raw_of(token: str) -> bytes:
    if not isinstance(token, str) or not token.isascii() or len(token) > _MAX_LENGTH:
        raise _invalid_token()
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    except binascii.Error:
        raise _invalid_token() from None
    # Decoding passes over strange characters and surplus bits: only the one text that we would write is taken.
    if _text_of(raw) != token:
        raise _invalid_token()
    return raw


def _invalid_token() -> InvalidToken:
    return InvalidToken("this token was not made here: it is forged, cut short, or of another store")


def _number_bytes(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _take_number(raw: bytes) -> tuple[int, bytes]:
    number = shift = used = 0
    while True:
        byte = raw[used]
        number |= (byte & 0x7F) << shift
        used, shift = used + 1, shift + 7
        if byte <= 0x7F:
            return number, raw[used:]


KEYS = "deferred"


KEY_REFRESH_SECONDS = 60.0  # seconds between two looks for new keys


KEY_ACTIVATION_DELAY_SECONDS = 2 * KEY_REFRESH_SECONDS  # a new key signs from then on, when every worker has read it
