"""Perdure: durable workflows for Python. See the README for a taste, and docs/ for the rest.

Names are imported when they are first used: the command answers `--help` without the engine, and a program that only
asks does not load what executes.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from perdure.client.client import Client
    from perdure.client.run_handle import Run
    from perdure.client.views import Suspended
    from perdure.config import EngineConfig
    from perdure.engine import Engine
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
    from perdure.model.records import RunQuery, RunStatus
    from perdure.retry import Retry
    from perdure.script import run
    from perdure.worker import Worker
    from perdure.workflows.context import Context, current_context
    from perdure.workflows.definition import workflow
    from perdure.workflows.events import event
    from perdure.workflows.step_context import current_step
    from perdure.workflows.steps import step
    from perdure.workflows.types import Break, Complete, Continue, WorkQueue

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
    "perdure.workflows.step_context": ("current_step",),
    "perdure.client.client": ("Client",),
    "perdure.config": ("EngineConfig",),
    "perdure.workflows.context": (
        "Context",
        "current_context",
    ),
    "perdure.workflows.definition": ("workflow",),
    "perdure.engine": ("Engine",),
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
    "perdure.workflows.events": ("event",),
    "perdure.client.run_handle": ("Run",),
    "perdure.model.records": (
        "RunQuery",
        "RunStatus",
    ),
    "perdure.retry": ("Retry",),
    "perdure.script": ("run",),
    "perdure.workflows.steps": ("step",),
    "perdure.workflows.types": (
        "Break",
        "Complete",
        "Continue",
        "WorkQueue",
    ),
    "perdure.client.views": ("Suspended",),
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
