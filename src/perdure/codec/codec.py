"""Values to bytes and back, by their annotations; data only, never pickle.

    value ──encode(annotation)──▶ bytes ──decode(annotation)──▶ an equal value of the same class

`JSON` is readable in a database, `MSGPACK` is smaller. What is encoded was checked against its annotation, so what a
store holds can be read back. Without an annotation (or with `Any`) plain data comes out: a dataclass comes back as a
dict, a tuple or set as a list, a datetime as text. A dict in encoded form may stand for an object, and an
enum's value for its member; nothing else is coerced, except an int where a float is asked for.

msgspec does the work wherever it can. What it refuses (`Card | Cash`, `str | Decimal`, `Literal[Colour.RED]`, and
whatever holds one of these) goes through `shapes`. In such a union every member but None, bool,
int, float and str is written with the name of its type, so that the right class comes back even if two have equal
fields:

    Card | Cash      {"$type": "Card", "number": "42"}         an object, with the name beside its fields
    str | Decimal    {"$type": "Decimal", "value": "1.50"}     anything else, wrapped

An object without "$type" (written before the annotation became a union) is read as the first member that fits.

This room knows errors and bytes; it knows no run, step or store. pydantic is used where it is already imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from perdure.codec.converters import Converter, Native, converter_for
from perdure.codec.plain_values import (
    SCALARS,
    SUPPORTED,
    Mismatch,
    check_exact,
    check_same,
    children_of,
    explain,
    path_step,
    revive,
    to_plain,
    type_name,
)
from perdure.errors import InvalidPayload

MAX_DEPTH = 200
"""How deep a value may nest: far below what every supported Python can read, so that a history moves between them."""


class Codec(Protocol):
    """How values become bytes; a wrapper (compression, encryption) holds another codec and hands over to it."""

    @property
    def name(self) -> str: ...

    def encode(self, value: Any, annotation: Any = Any, *, what: str = "value") -> bytes:
        """The value as bytes; `InvalidPayload` with the field's path if it does not fit or cannot be encoded."""
        ...

    def decode(self, data: bytes, annotation: Any = Any, *, what: str = "value") -> Any:
        """A new value; `InvalidPayload` with the field's path if the bytes do not fit the annotation."""
        ...

    def canonical(self, value: Any) -> bytes:
        """The same bytes for equal data, whatever the order of dicts and sets; for comparing, never decoded."""
        ...


_EIGHT_BYTES = hashlib.blake2b(digest_size=8)


def fingerprint(codec: Codec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes | None:
    """Eight bytes that change with the arguments; None if these cannot be encoded."""
    try:
        digest = _EIGHT_BYTES.copy()  # half of what a new one costs
        digest.update(codec.canonical((args, kwargs)))
        return digest.digest()
    except Exception:
        return None


class _MsgspecCodec:
    """What both codecs share; a subclass says how to build readers and what its format cannot hold."""

    name = ""

    def __init__(self, encoder: Any, canonical: Any) -> None:
        self._write: Callable[[Any], bytes] = encoder.encode
        self.canonical: Callable[[Any], bytes] = canonical.encode
        self._plans: dict[Any, _Plan] = {}

    def encode(self, value: Any, annotation: Any = Any, *, what: str = "value") -> bytes:
        try:
            plan = self._plans[annotation]
        except (KeyError, TypeError):
            plan = self._plan(annotation, what)
        try:
            data = self._write(value if plan.shape is None else plan.shape.convert(value, "", True))
            # `find` and not `in`, which first takes the text for a number and writes an error about it: 1 % of a step
            if data.find(b"null") >= 0 or (len(data) > MAX_DEPTH and not plan.bounded):
                self._inspect(value, data)
            if plan.unchecked or type(value) is plan.certain:
                return data
            back = plan.read(data)
            # Equality is quick proof; it says nothing about Decimals, which equal ints and floats.
            if type(back) is type(value) and plan.comparable and back == value:
                return data
            if plan.shape is None:
                check_exact(value, annotation, "")
            check_same(value, back, "")
        except Exception as error:
            raise self._refusal(error, value, annotation, what) from error
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
            raise InvalidPayload(_sentence(what, self._name_keys(path, data, annotation), reason)) from error

    def _plan(self, annotation: Any, what: str) -> _Plan:
        try:
            plan = self._make_plan(annotation)
        except Mismatch as error:
            raise InvalidPayload(_sentence(what, error.path, error.reason)) from None
        with contextlib.suppress(TypeError):  # an annotation that cannot be hashed is planned each time
            self._plans[annotation] = plan
        return plan

    def _make_plan(self, annotation: Any) -> _Plan:
        shape = converter_for(annotation)
        if isinstance(shape, Native):
            return _Plan(
                read=self._reader(shape.annotation),
                unchecked=shape.annotation is Any,
                certain=shape.kind if shape.annotation in SCALARS else None,
                comparable=shape.comparable,
                bounded=shape.bounded,
            )
        read = self._reader(Any)
        return _Plan(read=lambda data: shape.convert(read(data), "", False), shape=shape)

    def _refusal(self, error: Exception, value: Any, annotation: Any, what: str) -> InvalidPayload:
        with contextlib.suppress(Exception):
            if isinstance(error, msgspec.ValidationError):
                try:
                    check_exact(value, annotation, "")  # speaks of Python's types, where the reader spoke of texts
                except Mismatch as misfit:
                    error = misfit
            if isinstance(error, Mismatch):
                path = self._name_keys(error.path, self._write(value), annotation)
                return InvalidPayload(_sentence(what, path, error.reason))
        path, reason = explain(error)
        if not isinstance(error, Mismatch | msgspec.ValidationError):
            path, reason = next(self._faults(value, "", ()), (path, reason))
        return InvalidPayload(_sentence(what, path, reason))

    def _name_keys(self, path: str, data: bytes, annotation: Any) -> str:
        """msgspec says `[...]` for any key of a dict. Leave one key at a time in: the guilty one fails alone."""

        def failing() -> str:
            try:
                msgspec.convert(raw, annotation, str_keys=True, dec_hook=revive)
            except Exception as error:
                return explain(error)[0]
            return ""

        if "[...]" not in path:
            return path
        named = ""
        try:
            node = raw = self._reader(Any)(data)
            for part in re.findall(r"\.[^.\[]+|\[[^\]]*\]", path):
                key: Any = part[1:] if part[0] == "." else part[1:-1]
                if part == "[...]":
                    for key, item in list(node.items()):
                        node.clear()
                        node[key] = item
                        if failing() == path:
                            break
                    part = path_step(key)
                elif part[0] == "[":
                    key = int(key)
                named, node = named + part, node[key]
        except Exception:
            return path
        return named

    def _faults(self, value: Any, path: str, parents: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        """Where in a value that could not be written the trouble is, and what it is."""
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
                yield from self._faults(child, path + part, (*parents, id(value)))
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

    def _reader(self, annotation: Any) -> Callable[[bytes], Any]:
        raise NotImplementedError

    def _inspect(self, value: Any, data: bytes) -> None:
        raise NotImplementedError


class JsonCodec(_MsgspecCodec):
    """JSON text: readable where it is stored. Has no nan and no infinity; integers up to 4,300 digits."""

    name = "json"

    def __init__(self) -> None:
        super().__init__(
            msgspec.json.Encoder(enc_hook=to_plain), msgspec.json.Encoder(enc_hook=to_plain, order="deterministic")
        )

    def _reader(self, annotation: Any) -> Callable[[bytes], Any]:
        return msgspec.json.Decoder(annotation, dec_hook=revive).decode

    def _inspect(self, value: Any, data: bytes) -> None:
        # msgspec writes nan and inf as null. MessagePack writes them as they are, which is quick to search.
        if value is not None and b"null" in data and _holds_non_finite(value):
            raise ValueError("nan and infinity cannot be written as JSON")
        if len(data) > 2 * MAX_DEPTH and _too_deep(data):
            raise RecursionError(f"nests deeper than {MAX_DEPTH} levels")

    def _leaf_fault(self, value: Any) -> str | None:
        if isinstance(value, float) and not math.isfinite(value):
            return f"{value} cannot be written as JSON; send None or text instead, or use the MessagePack codec"
        return super()._leaf_fault(value)


class MsgpackCodec(_MsgspecCodec):
    """MessagePack: smaller than JSON, holds nan and infinity; integers of at most 64 bits."""

    name = "msgpack"

    def __init__(self) -> None:
        super().__init__(
            msgspec.msgpack.Encoder(enc_hook=to_plain),
            msgspec.msgpack.Encoder(enc_hook=to_plain, order="deterministic"),
        )

    def _reader(self, annotation: Any) -> Callable[[bytes], Any]:
        return msgspec.msgpack.Decoder(annotation, dec_hook=revive).decode

    def _inspect(self, value: Any, data: bytes) -> None:
        if len(data) > MAX_DEPTH and _too_deep(msgspec.json.encode(value, enc_hook=to_plain)):
            raise RecursionError(f"nests deeper than {MAX_DEPTH} levels")


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """What one codec does for one annotation."""

    read: Callable[[bytes], Any]
    unchecked: bool = False
    """Whatever can be encoded fits."""
    certain: type | None = None
    """A value of exactly this class fits."""
    comparable: bool = True
    """A value that comes back equal has come back whole."""
    bounded: bool = False
    """No value that fits can nest without end."""
    shape: Converter | None = None


_NON_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")


def _holds_non_finite(value: Any) -> bool:
    try:
        return _NON_FINITE.search(msgspec.msgpack.encode(value, enc_hook=to_plain)) is not None and _non_finite(value)
    except OverflowError:
        return _non_finite(value)


def _non_finite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    return any(_non_finite(child) for _, child in children_of(value))


_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _too_deep(text: bytes) -> bool:
    """Whether JSON nests too deep; the innermost brackets are taken away, level by level."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    brackets = _TEXT.sub(b"", text).translate(_SQUARE, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _sentence(what: str, path: str, reason: str) -> str:
    return f"{what}: {path.lstrip('.')}: {reason}" if path else f"{what}: {reason}"


JSON = JsonCodec()
MSGPACK = MsgpackCodec()
