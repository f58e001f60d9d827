"""Perdure: durable workflows for Python. See the README for a taste, and docs/ for the rest."""

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
from perdure.structure import Break, Continue, WorkQueue
from perdure.views import Complete, Suspended
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
