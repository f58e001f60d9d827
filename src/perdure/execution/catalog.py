"""Catalog: the workflows that an engine can execute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.shards import WorkflowVersions
from perdure.model.validation import describe_value
from perdure.workflows.definition import REGISTRY, Workflow
from perdure.workflows.internal import INTERNAL, is_internal_name


class Catalog:
    """A fixed list of workflows; or, if none is given, all imported workflows and those started through the engine."""

    def __init__(self, workflows: Iterable[Workflow[Any, Any]] | None) -> None:
        self._open = workflows is None
        self._own: dict[tuple[str, int], Workflow[Any, Any]] = {}
        self._versions: tuple[int, WorkflowVersions] | None = None  # with the registry revision they were read at
        if workflows is not None and not isinstance(workflows, Iterable):
            raise InvalidArgument(f"workflows must be a list of @workflow functions, not {describe_value(workflows)}")
        for workflow in workflows or ():
            if not isinstance(workflow, Workflow):
                raise InvalidArgument(
                    f"workflows must be a list of @workflow functions, not {describe_value(workflow)}"
                )
            key = (workflow.name, workflow.version)
            if self._own.get(key, workflow).origin != workflow.origin:
                origins = " and ".join(".".join(each.origin) for each in (self._own[key], workflow))
                raise InvalidArgument(
                    f"workflow {workflow.name!r} version {workflow.version} is in the list twice: {origins}; name one"
                )
            self._own[key] = workflow

    @property
    def own(self) -> Mapping[tuple[str, int], Workflow[Any, Any]]:
        """The workflows of the list, or those that were started through the engine."""
        return self._own

    @property
    def is_open(self) -> bool:
        """Whether the engine also executes imported workflows that are not its own."""
        return self._open

    def add_started(self, workflow: Workflow[Any, Any]) -> bool:
        """Add a workflow that a caller starts, if the catalog is open; return whether this engine can execute it."""
        key = (workflow.name, workflow.version)
        if self._open and self._own.get(key) is not workflow:
            self._own[key] = workflow
            self._versions = None
        return key in self._own

    def find(self, name: str, version: int) -> Workflow[Any, Any] | None:
        if is_internal_name(name):
            return INTERNAL.find(name, version)
        own = self._own.get((name, version))
        if own is None and self._open:
            return REGISTRY.find(name, version)
        return own

    def latest(self, name: str) -> Workflow[Any, Any] | None:
        """Return the definition with the highest version of this name, or None.

        A version that two modules define is not considered, unless one of the two was started through this engine.
        """
        versions = [version for known, version in self.workflow_versions() if known == name]
        return self.find(name, max(versions)) if versions else None

    def all_latest(self) -> list[Workflow[Any, Any]]:
        """Return the definition with the highest version of each name, in order of name."""
        versions = dict(sorted(self.workflow_versions()))  # the highest version of a name comes last
        found = (self.find(name, version) for name, version in versions.items())
        return [definition for definition in found if definition is not None]

    def workflow_versions(self) -> WorkflowVersions:
        """Return name and version of all workflows that this engine can execute.

        A name that two modules define is left out until one of the two is started through this engine: see `ambiguous`.
        """
        if not self._open:
            return tuple(self._own)
        if self._versions is None or self._versions[0] != REGISTRY.revision:
            self._versions = (REGISTRY.revision, tuple({**REGISTRY.unambiguous(), **self._own}))
        return self._versions[1]

    def ambiguous(self) -> list[tuple[str, int]]:
        """Return name and version of the workflows that this engine cannot execute, because it would have to choose."""
        return [pair for pair in REGISTRY.ambiguous() if pair not in self._own] if self._open else []

    def refuse_ambiguous(self) -> None:
        """Raise `WorkflowMisuse` if this engine would have to choose between definitions."""
        for pair in self.ambiguous():
            raise WorkflowMisuse(REGISTRY.describe_ambiguity(*pair))
