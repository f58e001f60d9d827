"""Who should take which shard: a pure function on which all agree, fair, and which moves no more than it must."""

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
    """What a worker computes for itself, given the others."""
    [(pairs, shards)] = assigned_shards(worker, (PAIR,), [row(id) for id in everyone if id != worker], SHARDS)
    assert pairs == (PAIR,)
    return frozenset(range(SHARDS)) if shards is None else shards


@given(IDS)
def test_every_shard_is_taken_by_exactly_one(ids: list[str]) -> None:
    taken = sorted(shard for id in ids for shard in shards_of(id, ids))
    assert taken == list(range(SHARDS))


@given(IDS, st.randoms(use_true_random=False))
def test_the_order_in_which_workers_are_seen_does_not_matter(ids: list[str], chance: random.Random) -> None:
    before = {id: shards_of(id, ids) for id in ids}
    chance.shuffle(ids)
    assert {id: shards_of(id, ids) for id in ids} == before


@given(IDS)
def test_each_finds_for_itself_what_all_find_together(ids: list[str]) -> None:
    for shard in range(0, SHARDS, 9):
        assert shard in shards_of(assigned_worker(shard, ids), ids)


@given(IDS, st.data())
def test_when_a_worker_comes_shards_move_only_to_it_and_when_it_goes_only_its_own_move(
    ids: list[str], data: st.DataObject
) -> None:
    comer = data.draw(st.sampled_from(ids))
    without = [id for id in ids if id != comer]
    for id in without:
        assert shards_of(id, ids) == shards_of(id, without) - shards_of(comer, ids)


@given(st.integers(2, 8), st.integers(0, 10_000))
@settings(max_examples=200)
def test_shares_are_fair_within_bounds(workers: int, seed: int) -> None:
    """Five standard deviations of a fair draw: none of 200 examples comes near it unless the draw is not fair."""
    ids = [f"w-{random.Random(f'{seed}/{n}').getrandbits(80):020x}" for n in range(workers)]
    mean = SHARDS / workers
    spread = (mean * (1 - 1 / workers)) ** 0.5
    for id in ids:
        assert abs(len(shards_of(id, ids)) - mean) <= 5 * spread


def test_shares_even_out_over_many_fleets() -> None:
    """A worker's expected share does not depend on how its id reads or where it comes in the order."""
    totals = [0, 0, 0, 0]
    for fleet in range(200):
        ids = [f"worker-{fleet}-{n}" for n in range(4)]
        for n, id in enumerate(ids):
            totals[n] += len(shards_of(id, ids))
    assert sum(totals) == 200 * SHARDS
    assert all(abs(total - 6400) < 400 for total in totals), totals


def test_only_workers_that_have_the_workflow_and_version_count() -> None:
    others = [row("b", ("flow", 2)), row("c", ("other", 1))]
    assert assigned_shards("a", (("flow", 1),), others, SHARDS) == (((("flow", 1),), None),)
    [(_, shards)] = assigned_shards("a", (("flow", 2),), others, SHARDS)
    assert shards is not None
    assert 0 < len(shards) < SHARDS


def test_workflows_that_the_same_workers_have_are_asked_for_together() -> None:
    mine = (("f", 1), ("f", 2), ("g", 1), ("h", 1))
    shares = assigned_shards("a", mine, [row("b", ("f", 1), ("g", 1)), row("c", ("g", 1), ("f", 1), ("h", 1))], SHARDS)
    assert [pairs for pairs, _ in shares] == [(("f", 1), ("g", 1)), (("f", 2),), (("h", 1),)]
    assert shares[1][1] is None


@pytest.mark.parametrize("shards", [1, 7, 4096])
def test_any_number_of_shards_is_spread(shards: int) -> None:
    ids = ["a", "b", "c"]
    taken = [assigned_shards(id, (PAIR,), [row(other) for other in ids if other != id], shards)[0][1] for id in ids]
    assert sum(len(each) for each in taken if each is not None) == shards
