"""What functions take and raise, as payloads: parameters by name, exceptions by their fields.

A workflow's payload is encoded as one object by parameter name, `{"order": {...}, "gift": true}`: readable in a
database, and independent of the order of the parameters. Defaults are not recorded: a parameter that was not given
gets the default of the code that runs.

This room knows annotations and codecs; it knows no workflow, step, run or store.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from perdure.codec import Codec
from perdure.errors import InvalidPayload


class Parameters:
    """How the arguments of one function are encoded; built once per definition."""

    @classmethod
    def of(cls, fn: Callable[..., Any], skip: int) -> Parameters:
        """The parameters of a function after the first `skip`. Annotations are resolved on first use, so that they
        may name what is defined later; one that cannot be resolved counts as `Any`."""
        signature = inspect.signature(fn)
        kept = list(signature.parameters.values())[skip:]
        return cls(fn, signature.replace(parameters=kept))

    def __init__(self, fn: Callable[..., Any], signature: inspect.Signature) -> None:
        self._fn = fn
        self._nearby = enclosing_names(fn)
        self._signature = signature
        self._parameters = tuple(signature.parameters.values())
        self._names = tuple(signature.parameters)
        self._simple = all(each.kind is Parameter.POSITIONAL_OR_KEYWORD for each in self._parameters)
        self._required = sum(each.default is Parameter.empty for each in self._parameters)

    @functools.cached_property
    def type(self) -> Any:
        """The payload as one annotation: a TypedDict, in which parameters with a default may be missing."""
        hints = _annotations(self._fn, self._nearby)
        fields = {each.name: _field(each, hints.get(each.name, Any)) for each in self._parameters}
        return _typed_dict(getattr(self._fn, "__name__", "payload"), fields)

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        """The annotation of each parameter, in order."""
        known = _annotations(self._fn, self._nearby)
        return {each.name: known.get(each.name, Any) for each in self._parameters}

    def encode(self, codec: Codec, args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str) -> bytes:
        """The arguments as bytes; `InvalidPayload` if they do not fit the parameters or their annotations."""
        if self._simple and not kwargs and self._required <= len(args) <= len(self._names):
            return codec.encode(dict(zip(self._names, args, strict=False)), self.type, what=what)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidPayload(f"{what}: {getattr(self._fn, '__name__', self._fn)}(): {error}") from None
        return codec.encode(bound.arguments, self.type, what=what)

    def decode(self, codec: Codec, data: bytes, what: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, ready for a call: positional ones up to the first that was not given, the others by name."""
        given = codec.decode(data, self.type, what=what)
        if self._simple and len(given) == len(self._names):
            return tuple(given[name] for name in self._names), {}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        gap = False
        for each in self._parameters:
            if each.name not in given:
                gap = True
            elif each.kind is Parameter.VAR_POSITIONAL:
                args.extend(given[each.name])
            elif each.kind is Parameter.VAR_KEYWORD:
                kwargs.update(given[each.name])
            elif gap or each.kind is Parameter.KEYWORD_ONLY:
                kwargs[each.name] = given[each.name]
            else:
                args.append(given[each.name])
        return tuple(args), kwargs

    def equal(self, codec: Codec, a: bytes, b: bytes) -> bool:
        """Whether two payloads are the same arguments for today's code, defaults included."""
        if a == b:
            return True
        try:
            one, other = self._with_defaults(codec, a), self._with_defaults(codec, b)
            # Equality knows that 1.0 and 1.00 are one Decimal, encoding knows objects that do not define equality.
            return bool(one == other) or codec.canonical(one) == codec.canonical(other)
        except Exception:
            return False  # what cannot be read today is not what was asked for today

    def _with_defaults(self, codec: Codec, data: bytes) -> dict[str, Any]:
        given = codec.decode(data, self.type)
        bound = inspect.BoundArguments(self._signature, given)
        bound.apply_defaults()
        return dict(bound.arguments)


def returns_of(fn: Callable[..., Any], nearby: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """The return annotation of a function; `Any` where there is none or it cannot be resolved.

    `nearby` are the `enclosing_names` at the time when it was decorated.
    """
    return _annotations(fn, nearby).get("return", Any)


def encode_exception(codec: Codec, error: BaseException) -> bytes:
    """The arguments and attributes of an exception; `InvalidPayload` if one of them cannot be encoded."""
    kind: Any = type(error)
    parts = {f"args.{index}": value for index, value in enumerate(error.args)}
    parts |= {f"fields.{name}": value for name, value in vars(error).items() if not name.startswith("__")}
    hints = _exception_hints(kind, len(error.args))
    # An annotation is a hint here, not a contract: `Declined(code: int)` may well pass text on to Exception.
    plain = [name for name, value in parts.items() if name in hints and not _fits(codec, value, hints[name])]
    record = {"parts": parts, "plain": plain} if plain else {"parts": parts}
    return codec.encode(record, _exception_type(kind, tuple(parts), tuple(plain)), what=kind.__name__)


def decode_exception(codec: Codec, data: bytes, cls: type[BaseException]) -> BaseException:
    """The exception again, as an instance of `cls` with its arguments and attributes; `__init__` is not called."""
    kind: Any = cls
    raw = codec.decode(data, _exception_type(kind, None, ()), what=cls.__name__)
    annotation = _exception_type(kind, tuple(raw["parts"]), tuple(raw.get("plain", ())))
    parts: dict[str, Any] = codec.decode(data, annotation, what=cls.__name__)["parts"]
    args = tuple(value for name, value in parts.items() if name.startswith("args."))
    try:
        error = cls.__new__(cls, *args)
    except Exception:  # a __new__ of its own, which wants something else
        error = BaseException.__new__(cls)
    BaseException.__setattr__(error, "args", args)  # also where the class is frozen
    vars(error).update(
        {name.removeprefix("fields."): value for name, value in parts.items() if name.startswith("fields.")}
    )
    return error


def _fits(codec: Codec, value: Any, annotation: Any) -> bool:
    try:
        codec.encode(value, annotation)
    except InvalidPayload:
        return False
    return True


@functools.lru_cache(maxsize=1024)
def _exception_type(cls: type[BaseException], names: tuple[str, ...] | None, plain: tuple[str, ...]) -> Any:
    """A record's annotation; while its names are not known, with parts of any type."""
    parts: Any = dict[str, Any]
    if names is not None:
        hints = _exception_hints(typing.cast(Any, cls), sum(name.startswith("args.") for name in names))
        fields = {name: Any if name in plain else hints.get(name, Any) for name in names}
        parts = _typed_dict(cls.__name__, fields)
    return _typed_dict("Exception", {"parts": parts, "plain": typing.NotRequired[list[str]]})


@functools.lru_cache(maxsize=1024)
def _exception_hints(cls: type[BaseException], count: int) -> dict[str, Any]:
    """What is known of the types: arguments by the parameters of `__init__`, attributes by the class or, where
    they have a parameter's name, by that parameter."""
    init = cls.__dict__.get("__init__") or cls.__init__
    hints = _annotations(init, {}) if inspect.isfunction(init) else {}
    names = list(inspect.signature(init).parameters)[1:] if inspect.isfunction(init) else []
    hints = {name: hint for name, hint in hints.items() if name in names}
    known = {f"args.{index}": hints.get(name, Any) for index, name in enumerate(names)} if len(names) == count else {}
    return known | {f"fields.{name}": hint for name, hint in (hints | _class_hints(cls)).items()}


def _class_hints(cls: type) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        hints = typing.get_type_hints(cls, include_extras=True)
        return {name: hint for name, hint in hints.items() if typing.get_origin(hint) is not typing.ClassVar}
    return {}


def _field(parameter: Parameter, annotation: Any) -> Any:
    """One parameter's place in the payload."""
    if isinstance(annotation, typing.ParamSpecArgs | typing.ParamSpecKwargs):
        annotation = Any
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return typing.NotRequired[typing.cast(Any, tuple)[annotation, ...]]
    if parameter.kind is Parameter.VAR_KEYWORD:
        unpacked = typing.get_origin(annotation) is typing.Unpack
        return typing.NotRequired[
            typing.get_args(annotation)[0] if unpacked else typing.cast(Any, dict)[str, annotation]
        ]
    return annotation if parameter.default is Parameter.empty else typing.NotRequired[annotation]


def _typed_dict(name: str, fields: dict[str, Any]) -> Any:
    return typing.cast(Any, typing.TypedDict)(name, fields)


def _annotations(fn: Callable[..., Any], nearby: Mapping[str, Any]) -> dict[str, Any]:
    """The annotations of a function as types, each resolved on its own if they cannot be resolved together."""
    try:
        return typing.get_type_hints(fn, include_extras=True)
    except Exception:
        pass  # a name that only the type checker sees, or one of an enclosing function
    inner: Any = inspect.unwrap(fn)
    names = {**enclosing_names(fn), **nearby, **_closure(inner)}
    found = {}
    for name, annotation in inner.__annotations__.items():
        with contextlib.suppress(Exception):
            found[name] = _resolved(annotation, inner, names)
    return found


def _resolved(annotation: Any, fn: Any, names: dict[str, Any]) -> Any:
    def holder() -> None: ...

    holder.__annotations__ = {"it": annotation}
    return typing.get_type_hints(holder, fn.__globals__, names, include_extras=True)["it"]


def _closure(fn: Any) -> dict[str, Any]:
    names = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # still empty
            names[name] = cell.cell_contents
    return names


def enclosing_names(fn: Callable[..., Any]) -> dict[str, Any]:
    """What postponed annotations name in the functions around `fn`, as long as these are still running.

    A class that is local to a test is no closure variable of the workflow beside it; only the frame knows it.
    """
    inner: Any = inspect.unwrap(fn)
    if "<locals>" not in getattr(inner, "__qualname__", ""):
        return {}
    texts = " ".join(text for text in inner.__annotations__.values() if isinstance(text, str))
    wanted = set(re.findall(r"[^\W\d]\w*", texts))
    names: dict[str, Any] = {}
    code, frame = inner.__code__, sys._getframe(1)
    while wanted and (frame := typing.cast(Any, frame).f_back) is not None:
        if code in frame.f_code.co_consts:
            code = frame.f_code
            names = {name: frame.f_locals[name] for name in wanted if name in frame.f_locals} | names
    return names
