"""Shard assignment: which worker should claim the runs of which shard. A pure function of the live workers.

Rendezvous hashing: each worker has a score for each shard. Of the workers that have a workflow and version, the one
with the highest score is assigned the runs of it in that shard. When a worker joins, only the shards where it scores
highest move, to it; when it leaves, only its own shards move.

A score depends on worker and shard, not on the workflow. Workflows that the same workers have are therefore divided in
the same way, and workers that all have the same workflows need one claim, however many workflows there are.

An assignment only decides which worker claims first. Safety does not depend on it: a run executes correctly on any
worker that claims it (ADR 8).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

from perdure.model.records import WorkerRecord
from perdure.model.shards import ShardAssignment, WorkflowVersions

SCORE_BYTES = 8


def assigned_shards(
    worker: str, workflows: WorkflowVersions, others: Iterable[WorkerRecord], shards: int
) -> tuple[ShardAssignment, ...]:
    """Return the assignments of a worker that has these workflows, given the other live workers of its pool."""
    candidates: dict[tuple[str, int], list[str]] = {pair: [] for pair in workflows}
    for other in others:
        for pair in other.workflows:
            if pair in candidates:
                candidates[pair].append(other.id)
    by_candidates: dict[frozenset[str], list[tuple[str, int]]] = {}
    for pair, ids in candidates.items():
        by_candidates.setdefault(frozenset(ids), []).append(pair)
    return tuple((tuple(pairs), _shards_among(worker, ids, shards)) for ids, pairs in by_candidates.items())


def assigned_worker(shard: int, workers: Sequence[str]) -> str:
    """Return the worker that is assigned the shard."""
    return max(workers, key=lambda worker: (_scores(worker, shard + 1)[shard], worker))


def _shards_among(worker: str, candidates: frozenset[str], shards: int) -> frozenset[int] | None:
    if not candidates:
        return None
    own_scores = _scores(worker, shards)
    candidate_scores = [(_scores(candidate, shards), candidate) for candidate in candidates]
    return frozenset(
        shard
        for shard in range(shards)
        if all((own_scores[shard], worker) > (scores[shard], candidate) for scores, candidate in candidate_scores)
    )


@lru_cache(maxsize=1024)
def _scores(worker: str, shards: int) -> tuple[int, ...]:
    """Return the scores of a worker for the first shards. A score does not depend on the number of shards."""
    digest = hashlib.shake_128(worker.encode()).digest(SCORE_BYTES * shards)
    return tuple(int.from_bytes(digest[at : at + SCORE_BYTES], "big") for at in range(0, len(digest), SCORE_BYTES))
