"""A typed error is recorded whatever its fields hold: what cannot be encoded is left out and named."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from perdure.codec import JSON, MSGPACK, JsonCodec
from perdure.codec.failures import error_to_record, read_fields, reconstruct_error, step_error_from_record
from perdure.errors import JoinError, RollbackError, StepFailed
from perdure.model.records import ErrorRecord
from tests.client.hostile_values import nested
from tests.codec.sample_types import Foreign

both = pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=lambda codec: codec.name)


class StatusError(Exception):
    """Like the error of an HTTP client: required keyword arguments, and attributes with sockets and locks."""

    def __init__(self, message: str, *, request: Foreign, response: Foreign) -> None:
        super().__init__(message)
        self._request = request
        self.response = response
        self.status = 503


class TextFromField(Exception):
    def __init__(self, *, response: Foreign) -> None:
        self.response = response

    def __str__(self) -> str:
        return f"status {self.response.code}"  # type: ignore[attr-defined]


class Slotted(Exception):
    __slots__ = ("code", "empty", "lock")

    def __init__(self, code: int) -> None:
        super().__init__("slotted")
        self.code = code
        self.lock = Foreign()


@dataclass(slots=True, frozen=True)
class FrozenSlots(Exception):
    code: int
    reason: str


class Unreachable(OSError):
    def __init__(self, code: int) -> None:
        super().__init__(code, "unreachable", "a.sock")
        self.tries = 3


class ThreeArguments(Exception):
    def __init__(self, a: int, b: str, c: int = 0) -> None:
        super().__init__(a, b)
        self.c = c


class Sealed(Exception):
    """No class may derive from it, so that nothing can restore its text."""

    def __init_subclass__(cls) -> None:
        raise TypeError("final")

    def __init__(self) -> None:
        self.lock = Foreign()

    def __str__(self) -> str:
        return str(self.lock)


class HidesArguments(Exception):
    @property
    def args(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no arguments")


def through(codec: Any, error: Exception) -> tuple[ErrorRecord, Any]:
    """Return the record of an error, and what a workflow gets for it; twice, as for a step error that is not caught."""
    record = error_to_record(error, codec, raises=(type(error),))
    back = reconstruct_error(record, codec, (type(error),))
    assert isinstance(back, type(error))
    again = error_to_record(back, codec, raises=(type(error),))
    assert (again.type, again.message, again.qualified) == (record.type, record.message, record.qualified)
    assert read_fields(again, codec) == read_fields(record, codec)
    return record, back


@both
def test_attributes_that_cannot_be_encoded_are_dropped(codec):
    record, back = through(codec, StatusError("bad gateway", request=Foreign(), response=Foreign()))
    assert record.dropped == ("_request", "response")
    assert type(back) is StatusError
    assert (str(back), back.args, back.status) == ("bad gateway", ("bad gateway",), 503)
    assert not hasattr(back, "response")
    assert read_fields(record, codec) == read_fields(record, codec, (StatusError,)) == {"status": 503}


@both
def test_message_is_kept_if_the_class_derives_it_from_a_dropped_attribute(codec):
    response = Foreign()
    response.code = 404  # type: ignore[attr-defined]
    record, back = through(codec, TextFromField(response=response))
    assert record.dropped == ("response",)
    assert (str(back), repr(type(back))) == ("status 404", repr(TextFromField))


@both
def test_slots_are_fields(codec):
    record, back = through(codec, Slotted(7))
    assert record.dropped == ("lock",)
    assert (back.code, str(back)) == (7, "slotted")
    assert not hasattr(back, "empty")
    record, back = through(codec, FrozenSlots(7, "no"))
    assert back == FrozenSlots(7, "no")
    assert read_fields(record, codec) == {"code": 7, "reason": "no"}


@both
def test_attributes_of_built_in_classes_are_fields(codec):
    record, back = through(codec, Unreachable(111))
    assert (back.errno, back.filename, back.tries) == (111, "a.sock", 3)
    assert read_fields(record, codec)["strerror"] == "unreachable"
    assert str(through(codec, FileNotFoundError(2, "none", "x.txt"))[1]) == "[Errno 2] none: 'x.txt'"
    undecodable = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")
    assert str(through(codec, undecodable)[1]) == str(undecodable)


@both
def test_argument_that_cannot_be_encoded_becomes_its_text(codec):
    record, back = through(codec, ConnectionError(ValueError("refused")))
    assert (record.dropped, str(back), back.args) == (("args.0",), "refused", ("refused",))
    record, back = through(codec, ValueError("a", Foreign(), 3))
    assert record.dropped == ("args.1",)
    assert (len(back.args), back.args[0], back.args[2]) == (3, "a", 3), "each has its index"
    assert str(back) == record.message


@both
def test_init_with_other_arguments_than_args(codec):
    _, back = through(codec, ThreeArguments(1, "b", c=3))
    assert (back.args, back.c) == ((1, "b"), 3)


def test_fields_over_the_limit_are_dropped_largest_first():
    codec = JsonCodec(400)
    error = ValueError("over")
    vars(error).update(huge="x" * 400, large="y" * 250, medium="z" * 150, small=1)
    record, back = through(codec, error)
    assert record.dropped == ("huge", "large")
    assert (vars(back)["medium"], vars(back)["small"], str(back)) == ("z" * 150, 1, "over")
    record, back = through(codec, ValueError("x" * 1_000))
    assert (record.dropped, str(back)) == (("args.0",), "x" * 1_000), "its message is kept"


@both
def test_field_that_nests_too_deep_or_refers_to_itself_is_dropped(codec):
    error = ValueError("odd")
    cycle: list[Any] = []
    cycle.append(cycle)
    vars(error).update(deep=nested(200), cycle=cycle, fine=nested(10), text="\ud800")
    record, back = through(codec, error)
    assert record.dropped == ("deep", "cycle", "text")
    assert list(vars(back)) == ["fine"]


@both
def test_limit_that_is_too_small_for_any_record_leaves_a_plain_error(codec):
    tiny = type(codec)(3)
    record = error_to_record(ValueError("x"), tiny, raises=(ValueError,))
    assert (record.type, record.message, record.fields) == ("ValueError", "x", None)
    assert isinstance(step_error_from_record(record, tiny, location="s", attempts=1, raises=(ValueError,)), StepFailed)


def test_errors_that_resist_are_recorded():
    record = error_to_record(Sealed(), JSON, raises=(Sealed,))
    assert type(reconstruct_error(record, JSON, (Sealed,))) is Sealed
    record = error_to_record(HidesArguments("x"), JSON, raises=(HidesArguments,))
    assert type(reconstruct_error(record, JSON, (HidesArguments,))) is HidesArguments
    record = error_to_record(ExceptionGroup("g", [ValueError()]), JSON, raises=(ExceptionGroup,))
    assert record.type == "ExceptionGroup"
    assert reconstruct_error(record, JSON, (ExceptionGroup,)) is None


def test_errors_of_perdure_lose_only_the_errors_inside():
    record, back = through(JSON, StepFailed("charge", 2, "ValueError", "no", ValueError("no")))
    assert (record.dropped, back.location, back.attempts, back.cause) == (("cause",), "charge", 2, None)
    record, _ = through(JSON, JoinError({"a": ValueError("no")}))
    assert record.dropped == ("errors",)


# --- types


def test_type_of_a_script_is_found_by_a_process_that_imports_it(monkeypatch):
    error = StatusError("no", request=Foreign(), response=Foreign())
    monkeypatch.setattr(StatusError, "__module__", "__main__")
    by_script = error_to_record(error, JSON, raises=(StatusError,))
    monkeypatch.undo()
    imported = error_to_record(error, JSON, raises=(StatusError,))
    assert type(reconstruct_error(by_script, JSON, (StatusError,))) is StatusError
    monkeypatch.setattr(StatusError, "__module__", "__main__")
    assert type(reconstruct_error(imported, JSON, (StatusError,))) is StatusError


def test_type_of_another_module_is_not_found():
    record = ErrorRecord("StatusError", "no", qualified="elsewhere:StatusError", fields=b'{"parts":{}}')
    assert reconstruct_error(record, JSON, (Exception,)) is None
    assert "elsewhere" not in sys.modules


# --- RollbackError


class UndoAll(RollbackError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


@pytest.mark.parametrize("raises", [(), (ValueError,), (RollbackError,), (UndoAll,)])
def test_rollback_error_of_a_step_keeps_its_type(raises):
    record = error_to_record(UndoAll(code=7), JSON, raises=raises)
    back: Any = step_error_from_record(record, JSON, location="s", attempts=1, raises=raises)
    assert (type(back), back.code, str(back)) == (UndoAll, 7, "code 7")


def test_rollback_error_of_an_unknown_class_is_a_rollback_error():
    record = ErrorRecord("Removed", "back", qualified="shop:Removed", fields=b'{"parts":{}}', rollback=True)
    back = step_error_from_record(record, JSON, location="s", attempts=1, raises=())
    assert (type(back), str(back)) == (RollbackError, "back")


def test_rollback_error_of_an_earlier_version_is_a_step_failed_as_it_was():
    record = ErrorRecord("RollbackError", "back", qualified="perdure.errors:RollbackError")
    assert type(step_error_from_record(record, JSON, location="s", attempts=1, raises=())) is StepFailed
