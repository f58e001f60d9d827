"""Perdure: durable workflows for Python. See the README for a taste, and docs/ for the rest.

Names are imported when they are first used: the command answers `--help` without the engine, and a program that only
asks does not load what executes.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from perdure.attempt import current_step
    from perdure.client import Client
    from perdure.config import EngineConfig
    from perdure.context import Context, current_context
    from perdure.definition import workflow
    from perdure.embedded import Engine
    from perdure.errors import (
        ChildFailed,
        CriticalError,
        HistoryDiverged,
        InvalidPayload,
        InvalidToken,
        JoinError,
        PerdureError,
        QueueFull,
        RaceError,
        RollbackError,
        RunCancelled,
        RunConflict,
        RunFailed,
        RunNotFound,
        RunTerminated,
        StepFailed,
        StepInterrupted,
        StoreError,
        WorkflowMisuse,
    )
    from perdure.events import event
    from perdure.handle import Run
    from perdure.records import RunQuery, RunStatus
    from perdure.retry import Retry
    from perdure.scripting import run
    from perdure.steps import step
    from perdure.structure import Break, Complete, Continue, WorkQueue
    from perdure.views import Suspended
    from perdure.worker import Worker

__all__ = [
    "Break",
    "ChildFailed",
    "Client",
    "Complete",
    "Context",
    "Continue",
    "CriticalError",
    "Engine",
    "EngineConfig",
    "HistoryDiverged",
    "InvalidPayload",
    "InvalidToken",
    "JoinError",
    "PerdureError",
    "QueueFull",
    "RaceError",
    "Retry",
    "RollbackError",
    "Run",
    "RunCancelled",
    "RunConflict",
    "RunFailed",
    "RunNotFound",
    "RunQuery",
    "RunStatus",
    "RunTerminated",
    "StepFailed",
    "StepInterrupted",
    "StoreError",
    "Suspended",
    "WorkQueue",
    "Worker",
    "WorkflowMisuse",
    "current_context",
    "current_step",
    "event",
    "run",
    "step",
    "workflow",
]

_ROOMS = {
    "perdure.attempt": ("current_step",),
    "perdure.client": ("Client",),
    "perdure.config": ("EngineConfig",),
    "perdure.context": (
        "Context",
        "current_context",
    ),
    "perdure.definition": ("workflow",),
    "perdure.embedded": ("Engine",),
    "perdure.errors": (
        "ChildFailed",
        "CriticalError",
        "HistoryDiverged",
        "InvalidPayload",
        "InvalidToken",
        "JoinError",
        "PerdureError",
        "QueueFull",
        "RaceError",
        "RollbackError",
        "RunCancelled",
        "RunConflict",
        "RunFailed",
        "RunNotFound",
        "RunTerminated",
        "StepFailed",
        "StepInterrupted",
        "StoreError",
        "WorkflowMisuse",
    ),
    "perdure.events": ("event",),
    "perdure.handle": ("Run",),
    "perdure.records": (
        "RunQuery",
        "RunStatus",
    ),
    "perdure.retry": ("Retry",),
    "perdure.scripting": ("run",),
    "perdure.steps": ("step",),
    "perdure.structure": (
        "Break",
        "Complete",
        "Continue",
        "WorkQueue",
    ),
    "perdure.views": ("Suspended",),
    "perdure.worker": ("Worker",),
}
_ROOM_OF = {_name: _room for _room, _names in _ROOMS.items() for _name in _names}


def __getattr__(name: str) -> object:
    """A public name, from the room that defines it; from then on it is an attribute like any other."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_ROOM_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
