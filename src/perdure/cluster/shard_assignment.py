"""Assignment: who should take which shard. A pure function of who is alive; everyone computes the same.

Rendezvous hashing: each worker has a score for each shard, and of the workers that have a workflow and version the one
with the highest score takes that shard's runs of it. When a worker comes it takes the shards for which it scores
highest, and no other moves; when it goes, only its own do.

A score depends on worker and shard alone, not on the workflow: workflows that the same workers have are cut the same
way, so that a fleet whose workers are all alike claims with one question, however many workflows there are.

It only says who asks first. A run that the wrong worker takes is a run that is executed all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

from perdure.model.records import WorkerRecord
from perdure.model.types import ShardAssignment, WorkflowVersions

SCORE_BYTES = 8


def assigned_shards(
    worker: str, workflows: WorkflowVersions, others: Iterable[WorkerRecord], shards: int
) -> tuple[ShardAssignment, ...]:
    """What a worker that has these workflows should take, among others that are alive in its pool."""
    candidates: dict[tuple[str, int], list[str]] = {pair: [] for pair in workflows}
    for other in others:
        for pair in other.workflows:
            if pair in candidates:
                candidates[pair].append(other.id)
    by_candidates: dict[frozenset[str], list[tuple[str, int]]] = {}
    for pair, ids in candidates.items():
        by_candidates.setdefault(frozenset(ids), []).append(pair)
    return tuple((tuple(pairs), _shards_among(worker, ids, shards)) for ids, pairs in by_candidates.items())


def assigned(shard: int, workers: Sequence[str]) -> str:
    """The one of these workers that takes the shard."""
    return max(workers, key=lambda worker: (_scores(worker, shard + 1)[shard], worker))


def _shards_among(worker: str, candidates: frozenset[str], shards: int) -> frozenset[int] | None:
    if not candidates:
        return None
    mine = _scores(worker, shards)
    theirs = [(_scores(rival, shards), rival) for rival in candidates]
    return frozenset(
        shard
        for shard in range(shards)
        if all((mine[shard], worker) > (scores[shard], rival) for scores, rival in theirs)
    )


@lru_cache(maxsize=1024)
def _scores(worker: str, shards: int) -> tuple[int, ...]:
    """A worker's scores for the first shards. That of a shard does not depend on how many there are."""
    drawn = hashlib.shake_128(worker.encode()).digest(SCORE_BYTES * shards)
    return tuple(int.from_bytes(drawn[at : at + SCORE_BYTES], "big") for at in range(0, len(drawn), SCORE_BYTES))
