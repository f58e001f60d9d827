"""Codec: convert values to bytes and back by their annotations. Data only, never pickle.

    value ──encode(annotation)──▶ bytes ──decode(annotation)──▶ an equal value of the same class

`JSON` is readable in a database, `MSGPACK` is smaller. Encoding checks a value against its annotation, so that stored
data can be decoded. Without an annotation, or with `Any`, decoding returns plain data: a dataclass becomes a dict, a
tuple or set a list, a datetime text. A dict in encoded form is accepted for an object, the value of an enum member for
the member, and an int for a float; nothing else is coerced.

msgspec converts all types that it supports. Types that it rejects (`Card | Cash`, `str | Decimal`,
`Literal[Colour.RED]`, and types that contain one of these) use `converters`. In such a union every member except None,
bool, int, float and str is written with the name of its type, so that the right class is restored even if two classes
have equal fields:

    Card | Cash      {"$type": "Card", "number": "42"}         an object, with the name beside its fields
    str | Decimal    {"$type": "Decimal", "value": "1.50"}     anything else, wrapped

An object without "$type" (written before the annotation became a union) is decoded as the first member that matches.

Types that only pydantic supports, or for which it has rules (`Annotated[Cat | Dog, Field(discriminator="kind")]`), use
`pydantic_types`. This module knows no run, step or store. It needs no pydantic for other types.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import msgspec

from perdure.codec.converters import Converter, Native, converter_for
from perdure.codec.plain_values import (
    SCALARS,
    SUPPORTED,
    Mismatch,
    check_exact,
    check_same,
    children_of,
    decode_model,
    explain,
    path_step,
    to_plain,
    type_name,
)
from perdure.errors import InvalidPayload

MAX_DEPTH = 200
"""Maximum nesting of a value. Every supported Python version can decode it, so histories are portable."""

MAX_UNHASHABLE_PLANS = 1_000
"""Maximum number of cached plans of annotations that cannot be hashed. More of them are created dynamically."""


class Codec(Protocol):
    """Converts values to bytes and back. A wrapper (compression, encryption) delegates to another codec."""

    @property
    def name(self) -> str: ...

    def encode(self, value: Any, annotation: Any = Any, *, what: str = "value") -> bytes:
        """Return the value as bytes. Raises `InvalidPayload` with the field path if it cannot be encoded."""
        ...

    def decode(self, data: bytes, annotation: Any = Any, *, what: str = "value") -> Any:
        """Return a new value. Raises `InvalidPayload` with the field path if the bytes do not match."""
        ...

    def canonical(self, value: Any) -> bytes:
        """Return equal bytes for equal data, regardless of dict and set order. For comparison; never decoded."""
        ...


_EIGHT_BYTES = hashlib.blake2b(digest_size=8)


def fingerprint(codec: Codec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes | None:
    """Return an eight-byte hash of the arguments, or None if they cannot be encoded."""
    try:
        digest = _EIGHT_BYTES.copy()  # Half the cost of creating one.
        digest.update(codec.canonical((args, kwargs)))
        return digest.digest()
    except Exception:
        return None


class _MsgspecCodec:
    """Common implementation of both codecs. A subclass builds decoders and checks the limits of its format."""

    name = ""

    def __init__(self, encoder: Any, canonical: Any, max_bytes: int, plans: dict[Any, _Plan]) -> None:
        self._write: Callable[[Any], bytes] = encoder.encode
        self.canonical: Callable[[Any], bytes] = canonical.encode
        self._max_bytes = max_bytes
        self._plans = plans  # shared by all codecs of a class: building a plan is expensive
        self._unhashable_plans: dict[int, tuple[Any, _Plan]] = {}  # by id, with the annotation to keep the id

    def encode(self, value: Any, annotation: Any = Any, *, what: str = "value") -> bytes:
        try:
            plan = self._plans[annotation]
        except (KeyError, TypeError):
            plan = self._plan(annotation, what)
        try:
            data = self._write(value if plan.converter is None else plan.converter.convert(value, "", True))
            size = len(data)
            if size > self._max_bytes:
                raise Mismatch("", _too_large_message(size, self._max_bytes))
            # `find` instead of `in`: `in` first tries the operand as an integer, which costs 1 % of a step.
            if data.find(b"null") >= 0 or (size > MAX_DEPTH and not plan.bounded):
                self._check_limits(value, data)
            if plan.unchecked or type(value) is plan.exact_type:
                return data
            decoded = plan.read(data)
            # Equality is a fast check. It is not sufficient for Decimals, which can equal ints and floats.
            if type(decoded) is type(value) and plan.comparable and decoded == value:
                return data
            if plan.converter is None:
                check_exact(value, annotation, "")
            check_same(value, decoded, "")
        except Exception as error:
            raise self._encoding_error(error, value, annotation, what) from error
        return data

    def decode(self, data: bytes, annotation: Any = Any, *, what: str = "value") -> Any:
        try:
            plan = self._plans[annotation]
        except (KeyError, TypeError):
            plan = self._plan(annotation, what)
        try:
            return plan.read(data)
        except Exception as error:
            path, reason = explain(error)
            raise InvalidPayload(_format_message(what, self._name_keys(path, data, annotation), reason)) from error

    def _plan(self, annotation: Any, what: str) -> _Plan:
        known, plan = self._unhashable_plans.get(id(annotation), (None, None))
        if plan is not None and known is annotation:
            return plan
        try:
            plan = self._make_plan(annotation)
        except Mismatch as error:
            raise InvalidPayload(_format_message(what, error.path, error.reason)) from None
        try:
            self._plans[annotation] = plan
        except TypeError:
            if len(self._unhashable_plans) >= MAX_UNHASHABLE_PLANS:
                self._unhashable_plans.clear()
            self._unhashable_plans[id(annotation)] = (annotation, plan)
        return plan

    def _make_plan(self, annotation: Any) -> _Plan:
        converter = converter_for(annotation)
        if isinstance(converter, Native):
            return _Plan(
                read=self._decoder(converter.annotation),
                unchecked=converter.annotation is Any,
                exact_type=converter.kind if converter.annotation in SCALARS else None,
                comparable=converter.comparable,
                bounded=converter.bounded,
            )
        read = self._decoder(Any)
        return _Plan(read=lambda data: converter.convert(read(data), "", False), converter=converter)

    def _encoding_error(self, error: Exception, value: Any, annotation: Any, what: str) -> InvalidPayload:
        with contextlib.suppress(Exception):
            if isinstance(error, msgspec.ValidationError):
                try:
                    check_exact(value, annotation, "")  # Its message names Python types; msgspec's names encoded types.
                except Mismatch as mismatch:
                    error = mismatch
            if isinstance(error, Mismatch):
                path = self._name_keys(error.path, self._write(value), annotation)
                return InvalidPayload(_format_message(what, path, error.reason))
        path, reason = explain(error)
        if not isinstance(error, Mismatch | msgspec.ValidationError):
            path, reason = next(self._find_faults(value, "", ()), (path, reason))
        return InvalidPayload(_format_message(what, path, reason))

    def _name_keys(self, path: str, data: bytes, annotation: Any) -> str:
        """Return the path with the failing dict keys.

        msgspec writes `[...]` for any key of a dict. Try one key at a time to find the one that fails.
        """

        def failing_path() -> str:
            try:
                msgspec.convert(raw, annotation, str_keys=True, dec_hook=decode_model)
            except Exception as error:
                return explain(error)[0]
            return ""

        if "[...]" not in path:
            return path
        named = ""
        try:
            node = raw = self._decoder(Any)(data)
            for part in re.findall(r"\.[^.\[]+|\[[^\]]*\]", path):
                key: Any = part[1:] if part[0] == "." else part[1:-1]
                if part == "[...]":
                    for key, item in list(node.items()):
                        node.clear()
                        node[key] = item
                        if failing_path() == path:
                            break
                    part = path_step(key)
                elif part[0] == "[":
                    key = int(key)
                named, node = named + part, node[key]
        except Exception:
            return path
        return named

    def _find_faults(self, value: Any, path: str, parents: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        """Yield path and reason of each part of a value that cannot be encoded."""
        if id(value) in parents:
            yield path, "contains itself; a cyclic value cannot be encoded"
        elif len(parents) > MAX_DEPTH:
            yield path, f"nests deeper than {MAX_DEPTH} levels"
        else:
            try:
                children = list(children_of(value))
            except Exception as error:
                yield path, f"`{type_name(type(value))}` cannot be encoded: {error}"
                return
            for part, child in children:
                yield from self._find_faults(child, path + part, (*parents, id(value)))
            if isinstance(value, dict):
                for key in value:
                    if fault := self._leaf_fault({key: None}):
                        yield path + path_step(key), f"as a key: {fault}"
            elif not children and (fault := self._leaf_fault(value)):
                yield path, fault

    def _leaf_fault(self, value: Any) -> str | None:
        try:
            self._write(value)
        except UnicodeEncodeError:
            return "text with a lone surrogate cannot be encoded"
        except (OverflowError, ValueError) as error:
            return f"cannot be encoded: {error}"
        except Exception:
            if isinstance(value, dict):
                return f"a key of type `{type_name(type(next(iter(value))))}` cannot be encoded"
            return f"an object of type `{type_name(type(value))}` cannot be encoded; {SUPPORTED}"
        return None

    def _decoder(self, annotation: Any) -> Callable[[bytes], Any]:
        raise NotImplementedError

    def _check_limits(self, value: Any, data: bytes) -> None:
        raise NotImplementedError


class JsonCodec(_MsgspecCodec):
    """JSON codec: readable where it is stored. Rejects nan and infinity; integers have up to 4,300 digits.

    A value of more than `max_bytes` when encoded is rejected.
    """

    name = "json"
    _shared_plans: ClassVar[dict[Any, _Plan]] = {}

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        super().__init__(
            msgspec.json.Encoder(enc_hook=to_plain),
            msgspec.json.Encoder(enc_hook=to_plain, order="deterministic"),
            max_bytes,
            self._shared_plans,
        )

    def _decoder(self, annotation: Any) -> Callable[[bytes], Any]:
        return msgspec.json.Decoder(annotation, dec_hook=decode_model).decode

    def _check_limits(self, value: Any, data: bytes) -> None:
        # msgspec encodes nan and inf as null in JSON. MessagePack keeps them, so that a byte search finds them.
        if value is not None and b"null" in data and _contains_non_finite(value):
            raise ValueError("nan and infinity cannot be encoded as JSON")
        if len(data) > 2 * MAX_DEPTH and _nests_too_deep(data):
            raise RecursionError(f"nests deeper than {MAX_DEPTH} levels")

    def _leaf_fault(self, value: Any) -> str | None:
        if isinstance(value, float) and not math.isfinite(value):
            return f"{value} cannot be encoded as JSON; use None, or text such as '{value}'"
        return super()._leaf_fault(value)


class MsgpackCodec(_MsgspecCodec):
    """MessagePack codec: smaller than JSON, supports nan and infinity; integers have at most 64 bits."""

    name = "msgpack"
    _shared_plans: ClassVar[dict[Any, _Plan]] = {}

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        super().__init__(
            msgspec.msgpack.Encoder(enc_hook=to_plain),
            msgspec.msgpack.Encoder(enc_hook=to_plain, order="deterministic"),
            max_bytes,
            self._shared_plans,
        )

    def _decoder(self, annotation: Any) -> Callable[[bytes], Any]:
        return msgspec.msgpack.Decoder(annotation, dec_hook=decode_model).decode

    def _check_limits(self, value: Any, data: bytes) -> None:
        if len(data) > MAX_DEPTH and _nests_too_deep(msgspec.json.encode(value, enc_hook=to_plain)):
            raise RecursionError(f"nests deeper than {MAX_DEPTH} levels")


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """How a codec encodes and decodes values of one annotation."""

    read: Callable[[bytes], Any]
    unchecked: bool = False
    """True if every value that can be encoded matches the annotation."""
    exact_type: type | None = None
    """A value of exactly this class matches."""
    comparable: bool = True
    """True if a decoded value that is equal to the original is also identical in type and content."""
    bounded: bool = False
    """True if the nesting of matching values is bounded."""
    converter: Converter | None = None


_NON_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")


def _contains_non_finite(value: Any) -> bool:
    try:
        return _NON_FINITE.search(msgspec.msgpack.encode(value, enc_hook=to_plain)) is not None and _has_non_finite(
            value
        )
    except OverflowError:
        return _has_non_finite(value)


def _has_non_finite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    return any(_has_non_finite(child) for _, child in children_of(value))


_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _nests_too_deep(text: bytes) -> bool:
    """Return True if JSON nests deeper than MAX_DEPTH. Removes the innermost brackets, level by level."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    brackets = _TEXT.sub(b"", text).translate(_SQUARE, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def check_encoded(data: bytes, max_bytes: int, what: str) -> None:
    """Raise `InvalidPayload` for an encoded payload from outside that is too large, or JSON that nests too deep."""
    if len(data) > max_bytes:
        raise InvalidPayload(_format_message(what, "", _too_large_message(len(data), max_bytes)))
    if _nests_too_deep(data):
        raise InvalidPayload(_format_message(what, "", f"nests deeper than {MAX_DEPTH} levels"))


def _too_large_message(size: int, max_bytes: int) -> str:
    return (
        f"has {size:,} bytes when encoded; EngineConfig.max_payload_bytes is {max_bytes:,}. Store large values "
        "elsewhere and pass a reference, or raise the limit"
    )


def _format_message(what: str, path: str, reason: str) -> str:
    return f"{what}: {path.lstrip('.')}: {reason}" if path else f"{what}: {reason}"


JSON = JsonCodec()
MSGPACK = MsgpackCodec()
