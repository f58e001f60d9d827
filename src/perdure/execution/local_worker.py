"""LocalWorker: the worker in this process, as its clients and its external effects see it.

Every method is an optimization or a best-effort notification. The worker's periodic tasks find the same work in the
store, so a process without a worker uses `NullLocalWorker` and loses nothing but time.
"""

from __future__ import annotations

from typing import Any, Protocol

from perdure.errors import StoreError
from perdure.execution.retry_queue import WriteCallback
from perdure.model.records import RunRecord
from perdure.stores.results import WriteResult
from perdure.workflows.definition import Workflow


class LocalWorker(Protocol):
    """What the worker of this process can do at once because a caller in the same process notifies it."""

    def owner_for_new_run(self, workflow: Workflow[Any, Any]) -> str | None:
        """Return the id of this worker if it can execute a new run of this workflow at once; otherwise None."""

    def on_created_callback(self, record: RunRecord, workflow: Workflow[Any, Any]) -> WriteCallback:
        """Return the callback for the `CreateRun` write of a run that names this worker as its owner."""

    def run_has_messages(self, run_id: str) -> None:
        """Handle a local notification that a run has messages or is due."""

    def runs_may_be_due(self) -> None:
        """Handle a local notification that some runs have messages or are due."""

    def run_ended_externally(self, run_id: str) -> None:
        """Handle a local notification that a caller ended or rewound a run: its state in memory is out of date."""

    def run_is_observed(self, run_id: str) -> None:
        """Note that another run waits for the end of this run, so that the worker finalizes it without delay."""

    def is_executing(self, run_id: str) -> bool:
        """Return whether this worker owns the run and has it in memory."""

    def can_execute(self, record: RunRecord) -> bool:
        """Return whether this worker serves the run's pool and has its workflow and version."""


class NullLocalWorker:
    """The `LocalWorker` of a process that executes no runs."""

    def owner_for_new_run(self, workflow: Workflow[Any, Any]) -> str | None:
        return None

    def on_created_callback(self, record: RunRecord, workflow: Workflow[Any, Any]) -> WriteCallback:
        return _ignore_result

    def run_has_messages(self, run_id: str) -> None:
        pass

    def runs_may_be_due(self) -> None:
        pass

    def run_ended_externally(self, run_id: str) -> None:
        pass

    def run_is_observed(self, run_id: str) -> None:
        pass

    def is_executing(self, run_id: str) -> bool:
        return False

    def can_execute(self, record: RunRecord) -> bool:
        return False


def _ignore_result(result: WriteResult | StoreError) -> None:
    pass
