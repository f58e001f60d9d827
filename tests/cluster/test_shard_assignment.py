"""Shard assignment: all workers compute the same, shares are fair, and few shards move when workers change."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.cluster.shard_assignment import assigned_shards, assigned_worker
from perdure.model.records import WorkerRecord

SHARDS = 128
PAIR = ("flow", 1)
IDS = st.lists(st.text("abcdefgh0123456789-", min_size=1, max_size=24), min_size=1, max_size=12, unique=True)


def row(id: str, *pairs: tuple[str, int]) -> WorkerRecord:
    return WorkerRecord(id=id, pool="default", workflows=pairs or (PAIR,), lease_until=1.0, started_at=0.0)


def shards_of(worker: str, everyone: list[str]) -> frozenset[int]:
    """Return the shards that a worker computes for itself, given all workers."""
    [(pairs, shards)] = assigned_shards(worker, (PAIR,), [row(id) for id in everyone if id != worker], SHARDS)
    assert pairs == (PAIR,)
    return frozenset(range(SHARDS)) if shards is None else shards


@given(IDS)
def test_every_shard_is_assigned_to_exactly_one_worker(ids: list[str]) -> None:
    taken = sorted(shard for id in ids for shard in shards_of(id, ids))
    assert taken == list(range(SHARDS))


@given(IDS, st.randoms(use_true_random=False))
def test_assignment_does_not_depend_on_the_order_of_workers(ids: list[str], randomness: random.Random) -> None:
    before = {id: shards_of(id, ids) for id in ids}
    randomness.shuffle(ids)
    assert {id: shards_of(id, ids) for id in ids} == before


@given(IDS)
def test_assigned_worker_agrees_with_assigned_shards(ids: list[str]) -> None:
    for shard in range(0, SHARDS, 9):
        assert shard in shards_of(assigned_worker(shard, ids), ids)


@given(IDS, st.data())
def test_only_the_shards_of_a_joining_or_leaving_worker_move(ids: list[str], data: st.DataObject) -> None:
    joining = data.draw(st.sampled_from(ids))
    without = [id for id in ids if id != joining]
    for id in without:
        assert shards_of(id, ids) == shards_of(id, without) - shards_of(joining, ids)


@given(st.integers(2, 8), st.integers(0, 10_000))
@settings(max_examples=200)
def test_shares_are_fair_within_five_standard_deviations(workers: int, seed: int) -> None:
    """None of 200 examples comes near that bound unless the hash is biased."""
    ids = [f"w-{random.Random(f'{seed}/{n}').getrandbits(80):020x}" for n in range(workers)]
    mean = SHARDS / workers
    spread = (mean * (1 - 1 / workers)) ** 0.5
    for id in ids:
        assert abs(len(shards_of(id, ids)) - mean) <= 5 * spread


def test_shares_even_out_over_many_sets_of_workers() -> None:
    """The expected share of a worker does not depend on its id or its position in the order."""
    totals = [0, 0, 0, 0]
    for group in range(200):
        ids = [f"worker-{group}-{n}" for n in range(4)]
        for n, id in enumerate(ids):
            totals[n] += len(shards_of(id, ids))
    assert sum(totals) == 200 * SHARDS
    assert all(abs(total - 6400) < 400 for total in totals), totals


def test_only_workers_with_the_workflow_and_version_are_candidates() -> None:
    others = [row("b", ("flow", 2)), row("c", ("other", 1))]
    assert assigned_shards("a", (("flow", 1),), others, SHARDS) == (((("flow", 1),), None),)
    [(_, shards)] = assigned_shards("a", (("flow", 2),), others, SHARDS)
    assert shards is not None
    assert 0 < len(shards) < SHARDS


def test_workflows_with_the_same_candidates_form_one_assignment() -> None:
    mine = (("f", 1), ("f", 2), ("g", 1), ("h", 1))
    shares = assigned_shards("a", mine, [row("b", ("f", 1), ("g", 1)), row("c", ("g", 1), ("f", 1), ("h", 1))], SHARDS)
    assert [pairs for pairs, _ in shares] == [(("f", 1), ("g", 1)), (("f", 2),), (("h", 1),)]
    assert shares[1][1] is None


@pytest.mark.parametrize("shards", [1, 7, 4096])
def test_any_number_of_shards_is_assigned(shards: int) -> None:
    ids = ["a", "b", "c"]
    taken = [assigned_shards(id, (PAIR,), [row(other) for other in ids if other != id], shards)[0][1] for id in ids]
    assert sum(len(each) for each in taken if each is not None) == shards
