"""RunAdmission: how many runs this worker may claim, and whether a loaded run executes here.

Capacity has three limits: the size of the run cache, the concurrency of the worker, and quarantine. Runs that are being
loaded take a slot already.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from perdure.config import EngineConfig
from perdure.execution.quarantine import QUARANTINE_AFTER_RECOVERIES, Quarantine
from perdure.execution.run_cache import RunCache
from perdure.execution.run_loader import RunLoader
from perdure.model.records import Hold, RunRecord
from perdure.workflows.definition import Workflow

FindWorkflow = Callable[[str, int], Workflow[Any, Any] | None]  # by name and version


class NotAdmitted(Enum):
    """What happens to a loaded run that does not execute now."""

    RELEASE = "release"  # another worker may claim it
    WAIT = "wait"  # it is the suspect of this worker, and starts when the other runs have stopped


class RunAdmission:
    """Decides for one worker. `on_slot_freed` is called when the worker may be able to claim another run."""

    def __init__(
        self,
        config: EngineConfig,
        cache: RunCache,
        loader: RunLoader,
        quarantine: Quarantine,
        *,
        find_workflow: FindWorkflow,
        on_slot_freed: Callable[[], None],
        concurrency: int | None,
    ) -> None:
        self.draining = False  # shutdown: the worker executes no further run
        self._config = config
        self._cache = cache
        self._loader = loader
        self._quarantine = quarantine
        self._find_workflow = find_workflow
        self._on_slot_freed = on_slot_freed
        self._concurrency = concurrency

    @property
    def free_slots(self) -> int:
        """The number of further runs that this worker may claim."""
        loading = self._loader.loading_count
        free_slots = self._cache.free_slots - loading
        if self._concurrency is not None:
            free_slots = min(free_slots, self._concurrency - len(self._cache.all_active()) - loading)
        if (limit := self._quarantine.claim_limit) is not None:
            free_slots = min(free_slots, limit - loading)
        return max(0, free_slots)

    def decide(self, record: RunRecord) -> Workflow[Any, Any] | Hold | NotAdmitted:
        """Return the definition to execute a loaded run with, or a hold for a poison run, or why it does not execute.

        A run with too many recoveries is poison. One with several is a suspect: it executes after `Quarantine` has
        started it, and is loaded a second time for that.
        """
        definition = self._find_workflow(record.workflow, record.version)
        if definition is None or self.draining:
            return NotAdmitted.RELEASE
        if record.recoveries > self._config.max_recoveries:
            reason = f"its worker died {record.recoveries} times while executing it; find out why, then resume it"
            return Hold("poison", reason)
        if record.recoveries >= QUARANTINE_AFTER_RECOVERIES and not self._quarantine.has_started(record.id):
            return self._quarantine_run(record.id)
        if record.recoveries < QUARANTINE_AFTER_RECOVERIES:
            self._quarantine.on_healthy_run()
        return definition

    def keeps(self, run_id: str) -> bool:
        """Return whether this run is the suspect that waits for its quarantine."""
        return self._quarantine.suspect == run_id

    def on_run_stopped(self, run_id: str) -> None:
        """Free the slot of a run that no longer executes here, and start or end a quarantine that waits for it."""
        if self._quarantine.suspect == run_id and not self._loader.is_loading(run_id):
            self._quarantine.on_suspect_stopped()
        elif self._quarantine.suspect is not None and not self._cache.all_active():
            self._quarantine.on_no_other_runs()
        self._on_slot_freed()

    def clear(self) -> None:
        """Drop the suspect, because all runs in memory are discarded."""
        self._quarantine.clear()

    def _quarantine_run(self, run_id: str) -> NotAdmitted:
        if not self._quarantine.admit(run_id):
            return NotAdmitted.RELEASE
        if not self._cache.all_active():
            self._quarantine.on_no_other_runs()
        return NotAdmitted.WAIT
