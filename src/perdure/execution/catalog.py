"""Catalog: which workflows an engine can execute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from perdure.errors import InvalidArgument
from perdure.model.types import WorkflowVersions
from perdure.workflows.definition import REGISTRY, Workflow


class Catalog:
    """A given list, and just that; or else everything imported so far and whatever is started through the engine."""

    def __init__(self, workflows: Iterable[Workflow[Any, Any]] | None) -> None:
        self._open = workflows is None
        self._own: dict[tuple[str, int], Workflow[Any, Any]] = {}
        self._pairs: tuple[int, WorkflowVersions] | None = None
        for workflow in workflows or ():
            if not isinstance(workflow, Workflow):
                raise InvalidArgument(f"workflows must be a list of @workflow functions, not {workflow!r}")
            key = (workflow.name, workflow.version)
            if self._own.get(key, workflow).origin != workflow.origin:
                raise InvalidArgument(f"workflow {workflow.name!r} version {workflow.version} is in the list twice")
            self._own[key] = workflow

    def take(self, workflow: Workflow[Any, Any]) -> bool:
        """A workflow is started through the engine: can it execute it?"""
        key = (workflow.name, workflow.version)
        if self._open and self._own.get(key) is not workflow:
            self._own[key] = workflow
            self._pairs = None
        return key in self._own

    def find(self, name: str, version: int) -> Workflow[Any, Any] | None:
        own = self._own.get((name, version))
        if own is None and self._open:
            return REGISTRY.find(name, version)
        return own

    def pairs(self) -> WorkflowVersions:
        """All that can be executed. A name that two places define is left out until one of them is started here."""
        if not self._open:
            return tuple(self._own)
        if self._pairs is None or self._pairs[0] != REGISTRY.revision:
            self._pairs = (REGISTRY.revision, tuple({**REGISTRY.unambiguous(), **self._own}))
        return self._pairs[1]
