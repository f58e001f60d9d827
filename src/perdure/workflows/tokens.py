"""Tokens of deferreds: a token is a signed capability to complete one deferred of one run.

A token contains the key number, epoch (`bind_epoch`), run id and name, followed by an HMAC-SHA256 over them, in
URL-safe base64 without padding. Its content is readable but cannot be changed without invalidating the signature.

This module knows neither stores nor runs; callers pass the signing keys.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Iterable, Sequence

from perdure.errors import InvalidArgument, InvalidToken, StoreError
from perdure.model.records import SigningKey

KEYS = "deferred"
"""Name under which the store holds the signing keys of deferred tokens."""
KEY_REFRESH_SECONDS = 60.0
"""Interval at which a worker reads new signing keys."""
KEY_ACTIVATION_DELAY_SECONDS = 2 * KEY_REFRESH_SECONDS
"""Delay before a new key signs. By then every worker has read it."""

# Part of the signed data, so that a signature made with the same key for another purpose is not a valid token.
_PURPOSE = b"perdure deferred 1\0"
_SIGNATURE_BYTES = 32
_NO_SECRET = bytes(_SIGNATURE_BYTES)
# Large enough for a run id and a deferred name of 512 characters each, at four bytes per character.
_MAX_LENGTH = 8192
_EPOCH_BITS = 32


def bind_epoch(epoch: int, incarnation: str) -> int:
    """Return the number in the tokens of a run that stands for its epoch: with its incarnation, if it has one."""
    return epoch | int(incarnation, 16) << _EPOCH_BITS if incarnation else epoch


def is_of_another_run(token_epoch: int, incarnation: str) -> bool:
    """Return whether a token is that of an earlier run with the same id.

    A token without an incarnation, which an earlier version of perdure issued, is valid for its id.
    """
    return token_epoch >> _EPOCH_BITS not in (0, int(incarnation, 16) if incarnation else 0)


def make_token(keys: Sequence[SigningKey], run_id: str, epoch: int, name: str, *, at: float) -> str:
    """Return the token of a deferred. Deterministic for a given `at`, even after key rotation.

    `at` is when the run first executed. The newest key created by then signs, or the oldest key if all are newer. A
    replay after a rotation therefore returns the token that was issued before it.
    """
    key = _select_key(keys, at)
    if key.number < 0 or epoch < 0:
        raise StoreError(f"signing key {key.number} or epoch {epoch} of run {run_id!r} is damaged; restore the store")
    encoded_id, encoded_name = run_id.encode(), name.encode()
    header = _encode_number(key.number) + _encode_number(epoch) + _encode_number(len(encoded_id))
    payload = header + encoded_id + encoded_name
    token = _encode_text(payload + _signature(key.secret, payload))
    if len(token) > _MAX_LENGTH:
        raise InvalidArgument(
            f"the run id and the name of deferred {name[:40]!r}... are too long for a token; use shorter ones"
        )
    return token


def read_token(keys: Iterable[SigningKey], token: str) -> tuple[str, int, str]:
    """Return the run id, epoch and name in a token. Raises `InvalidToken` unless one of `keys` signed it."""
    raw = _decode_text(token)
    payload, signature = raw[:-_SIGNATURE_BYTES], raw[-_SIGNATURE_BYTES:]
    try:
        number, rest = _read_number(payload)
    except IndexError:
        raise _invalid_token() from None
    known = next((key.secret for key in keys if key.number == number), None)
    # Check a signature for an unknown key too, so that response times do not reveal which key numbers exist.
    valid = hmac.compare_digest(_signature(_NO_SECRET if known is None else known, payload), signature)
    if known is None or not valid:
        raise _invalid_token()
    epoch, rest = _read_number(rest)
    length, rest = _read_number(rest)
    return rest[:length].decode(), epoch, rest[length:].decode()


def _select_key(keys: Sequence[SigningKey], at: float) -> SigningKey:
    assert keys, "a store always has a signing key"
    by_age = sorted(keys, key=lambda key: (key.created_at, key.number))
    return next((key for key in reversed(by_age) if key.created_at <= at), by_age[0])


def _signature(secret: bytes, payload: bytes) -> bytes:
    return hmac.digest(secret, _PURPOSE + payload, "sha256")


def _encode_text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def _decode_text(token: str) -> bytes:
    if not isinstance(token, str) or not token.isascii() or len(token) > _MAX_LENGTH:
        raise _invalid_token()
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    except binascii.Error:
        raise _invalid_token() from None
    # base64 decoding ignores unknown characters and surplus bits. Accept only the canonical encoding.
    if _encode_text(raw) != token:
        raise _invalid_token()
    return raw


def _invalid_token() -> InvalidToken:
    return InvalidToken("the token is not valid: it is forged, truncated, or was issued by another store")


def _encode_number(number: int) -> bytes:
    """Return an unsigned LEB128 varint: seven bits per byte, lowest first; the high bit marks continuation."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_number(raw: bytes) -> tuple[int, bytes]:
    """Return the varint at the start of `raw`, and the remaining bytes."""
    number = shift = used = 0
    while True:
        byte = raw[used]
        number |= (byte & 0x7F) << shift
        used, shift = used + 1, shift + 7
        if byte <= 0x7F:
            return number, raw[used:]
