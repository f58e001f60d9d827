"""Aliases for what a worker can execute and which part of it the worker should claim."""

from __future__ import annotations

WorkflowVersions = tuple[tuple[str, int], ...]  # names and versions of workflows
ShardAssignment = tuple[WorkflowVersions, frozenset[int] | None]  # runs of these workflows in these shards, or in all
