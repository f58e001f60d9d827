"""Type aliases that several packages share."""

from __future__ import annotations

WorkflowVersions = tuple[tuple[str, int], ...]
"""Pairs of workflow name and version."""

ShardAssignment = tuple[WorkflowVersions, frozenset[int] | None]
"""The shards whose runs of these workflows a worker should claim; None means all shards."""
