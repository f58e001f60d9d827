"""Recorded errors come from a store or an import: whatever they name, no foreign code is called."""

from __future__ import annotations

import sys
import types
from typing import Any

import msgspec
import pytest

from perdure.codec import JSON
from perdure.codec.failures import error_from_record, error_to_record, step_error_from_record
from perdure.errors import RecordedError, RunNotFound, StepFailed
from perdure.model.records import ErrorRecord

CALLED: list[Any] = []
FIELDS = b'{"parts":{"args.0":"touch /tmp/perdure-exploited"}}'


class Declined(Exception):
    def __init__(self, code: int) -> None:
        CALLED.append(code)
        super().__init__(code)
        self.code = code


class NotAnError:
    def __init__(self, *args: Any) -> None:
        CALLED.append(args)


@pytest.fixture(autouse=True)
def fresh() -> None:
    CALLED.clear()


@pytest.mark.parametrize(
    ("kind", "qualified"),
    [
        ("system", "os:system"),
        ("exec", "builtins:exec"),
        ("eval", "builtins:eval"),
        ("SystemExit", "builtins:SystemExit"),
        ("KeyboardInterrupt", "builtins:KeyboardInterrupt"),
        ("BaseException", "builtins:BaseException"),
        ("GeneratorExit", "builtins:GeneratorExit"),
        ("__import__", "builtins:__import__"),
        ("Popen", "subprocess:Popen"),
        ("NotAnError", f"{__name__}:NotAnError"),
        ("__dict__", "builtins:__dict__"),
        ("", ":"),
        ("StopIteration", "builtins:StopIteration"),
    ],
)
@pytest.mark.parametrize("fields", [None, FIELDS, b"garbage", b'{"parts":[]}', b'{"parts":{"fields.__class__":1}}'])
def test_type_that_is_not_an_exception_becomes_a_recorded_error(kind, qualified, fields):
    record = ErrorRecord(kind, "message", qualified=qualified, fields=fields)
    found = error_from_record(record, JSON, (Declined,), __name__)
    assert isinstance(found, RecordedError)
    failed = step_error_from_record(record, JSON, location="s", attempts=1, raises=(Declined,))
    assert isinstance(failed, StepFailed)
    assert isinstance(failed.cause, RecordedError | StopIteration)
    assert CALLED == []


@pytest.mark.parametrize(
    "fields",
    [
        b"",
        b"null",
        b"[1]",
        b'{"parts":{"args.0":{"a":[{}]}}}',
        b'{"parts":{"fields.code":"x"},"plain":5}',
        b'{"parts":{"x":1},"plain":["y"]}',
        b"[" * 5_000,
    ],
)
def test_fields_that_do_not_match_never_raise(fields):
    for raises in ((Declined,), (Exception,), (UnicodeDecodeError, ExceptionGroup)):
        for kind in (Declined, UnicodeDecodeError, ExceptionGroup, OSError):
            record = ErrorRecord(kind.__name__, "m", qualified=f"{kind.__module__}:{kind.__qualname__}", fields=fields)
            assert isinstance(error_from_record(record, JSON, raises, __name__), Exception)
            step_error_from_record(record, JSON, location="s", attempts=1, raises=raises)
    assert CALLED == [], "__init__ is not called"


def test_attributes_with_two_underscores_are_not_set():
    parts = {"args.0": 5, "fields.code": 5, "fields.__notes__": 7, "fields.__class__": "x", "fields.__dict__": {}}
    record = ErrorRecord(
        "Declined", "5", qualified=f"{__name__}:Declined", fields=msgspec.json.encode({"parts": parts})
    )
    found = error_from_record(record, JSON, (Declined,))
    assert type(found) is Declined
    assert vars(found) == {"code": 5}


def test_module_attribute_that_executes_code_is_not_read(monkeypatch):
    module = types.ModuleType("perdure_lazy_module")
    module.__getattr__ = CALLED.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    record = ErrorRecord("Anything", "m", qualified="perdure_lazy_module:Anything", fields=FIELDS)
    assert isinstance(error_from_record(record, JSON, (), module.__name__), RecordedError)
    assert CALLED == []


def test_errors_of_perdure_keep_their_type():
    record = error_to_record(RunNotFound("r"), JSON, raises=(RunNotFound,))
    found = error_from_record(record, JSON)
    assert isinstance(found, RunNotFound)
    assert found.run_id == "r"
