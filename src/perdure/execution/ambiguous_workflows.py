"""Runs of workflows that two modules define: no definition may be chosen silently, and no run waits silently."""

from __future__ import annotations

import logging

from perdure.errors import WorkflowMisuse
from perdure.execution.catalog import Catalog
from perdure.model.queries import RunQuery
from perdure.model.records import RunRecord, RunStatus
from perdure.stores.protocol import Store
from perdure.workflows.definition import REGISTRY

LOGGER = logging.getLogger("perdure.execution")
OPEN = tuple(status for status in RunStatus if not status.terminal)
PAGE = 100


class AmbiguousWorkflows:
    """Finds runs in a store that an engine cannot execute, because their workflow is defined twice."""

    def __init__(self, store: Store, catalog: Catalog, pool: str) -> None:
        self._store = store
        self._catalog = catalog
        self._pool = pool
        self._reported: set[tuple[str, int]] = set()

    async def refuse(self) -> None:
        """Raise `WorkflowMisuse` if an open run needs one of several definitions of its workflow."""
        for pair in self._catalog.ambiguous():
            record = await self._find_run(pair)
            if record is not None:
                raise WorkflowMisuse(f"{REGISTRY.describe_ambiguity(*pair)}: run {record.id!r} needs it")

    async def report(self) -> None:
        """Log once per workflow that a run waits for one of several definitions."""
        for pair in self._catalog.ambiguous():
            if pair in self._reported or (record := await self._find_run(pair)) is None:
                continue
            self._reported.add(pair)
            LOGGER.error(
                "Run %s cannot be executed here: %s",
                record.id,
                REGISTRY.describe_ambiguity(*pair),
                extra={"run_id": record.id, "workflow": record.workflow},
            )

    async def _find_run(self, pair: tuple[str, int]) -> RunRecord | None:
        """Return an open run of the workflow and version in this pool that no worker owns."""
        query = RunQuery(workflow=pair[0], status=OPEN, limit=PAGE)
        page = await self._store.runs(query)
        ours = (each for each in page.runs if each.version == pair[1] and each.pool == self._pool)
        return next((each for each in ours if each.owner is None), None)
