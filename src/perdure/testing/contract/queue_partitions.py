"""Partitions: their order in a view, when they are ready, and that no departure is lost between view and admission."""

from __future__ import annotations

from perdure.model.queue_records import PartitionOverride, QueueView, Take
from perdure.stores.protocol import Store
from perdure.stores.results import Admitted, Superseded
from perdure.stores.writes import ConfigurePartition
from perdure.testing.contract.builders import ContractCase, case, claim, claim_ids, end, record, succeeded, turn
from perdure.testing.contract.queue_builders import (
    admit,
    admit_now,
    configure,
    queued,
    requeue_ended,
    summary_of,
    take,
    view_of,
)


def names(view: QueueView) -> list[str]:
    return [each.partition for each in view.partitions]


async def is_ready(store: Store, partition: str = "x", now: float = 200.0) -> bool:
    return partition in names(await view_of(store, now=now))


class PartitionCases(ContractCase):
    @case
    async def test_partitions_are_served_in_the_order_of_their_turns(self, store: Store) -> None:
        """Round robin over three partitions, as a plan of one run per turn makes it."""
        await store.commit([configure(partitioned=True)])
        await store.commit([queued(f"{name}{n}", partition=name) for name in "abc" for n in range(3)])
        admitted: list[str] = []
        for turn_number in range(2, 11):
            first = (await view_of(store)).partitions[0]
            admitted += await admit_now(store, take(first.partition, 1, turn=turn_number))
        assert admitted == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]

    @case
    async def test_a_new_partition_gets_the_turn_after_all_others(self, store: Store) -> None:
        await store.commit(
            [configure(partitioned=True), *(queued(f"{name}{n}", partition=name) for name in "by" for n in range(2))]
        )
        assert [(each.partition, each.turn) for each in (await view_of(store)).partitions] == [("b", 1), ("y", 1)]
        await admit_now(store, take("b", 1, turn=7), take("y", 1, turn=5))
        await store.commit([queued("a0", partition="a")])
        view = await view_of(store)
        assert [(each.partition, each.turn) for each in view.partitions] == [("y", 5), ("b", 7), ("a", 8)]
        await store.commit([end(id="b1"), queued("b2", partition="b")])
        assert [each.turn for each in (await view_of(store)).partitions] == [5, 7, 8], (
            "a known partition keeps its turn"
        )

    @case
    async def test_a_view_has_the_first_ready_partitions(self, store: Store) -> None:
        await store.commit([configure(partitioned=True), *(queued(f"r{n}", partition=f"p{n}") for n in range(8))])
        await admit_now(store, *(take(f"p{n}", 0, turn=8 - n) for n in range(8)))
        assert names(await view_of(store, limit=3)) == ["p7", "p6", "p5"]
        assert len((await view_of(store)).partitions) == 8

    @case
    async def test_a_partition_at_its_limit_is_ready_when_a_slot_is_returned(self, store: Store) -> None:
        await store.commit([configure(partitioned=True), *(queued(f"r{n}", partition="x") for n in range(4))])
        assert await admit_now(store, take("x", 2, limit=2)) == ["r0", "r1"]
        assert (await is_ready(store), (await summary_of(store)).needs_admission) == (False, False)
        await store.commit([queued("r4", partition="x")])
        assert not await is_ready(store), "an arrival does not help"
        await claim_ids(store, claim())
        await store.commit([turn(0, id="r0", patch=succeeded())])
        assert (await is_ready(store), (await summary_of(store)).needs_admission) == (True, True)
        (partition,) = (await view_of(store)).partitions
        assert (partition.waiting, partition.held) == (3, 1)

    @case
    async def test_a_departure_between_view_and_admission_is_not_lost(self, store: Store) -> None:
        await store.commit([configure(partitioned=True), *(queued(f"r{n}", partition="x") for n in range(3))])
        await admit_now(store, take("x", 1, limit=1))
        view = await view_of(store)
        await store.commit([end(id="r0")])
        (result,) = await store.commit([admit(view.version, take("x", 0, limit=1))])
        assert isinstance(result, Admitted)
        assert await is_ready(store), "the plan did not know that the slot is free"

    @case
    async def test_a_departure_in_the_batch_of_an_admission_is_not_lost(self, store: Store) -> None:
        await store.commit([configure(partitioned=True), *(queued(f"r{n}", partition="x") for n in range(4))])
        await admit_now(store, take("x", 1, limit=1))
        version = (await view_of(store)).version
        await store.commit([admit(version, take("x", 0, limit=1)), end(id="r0")])
        assert await is_ready(store)
        assert await admit_now(store, take("x", 1, limit=1)) == ["r1"]
        version = (await view_of(store)).version
        await store.commit([end("again", id="r1"), admit(version, take("x", 1, limit=1))])
        assert (await view_of(store)).held == 1

    @case
    async def test_an_arrival_makes_a_partition_below_its_limit_ready(self, store: Store) -> None:
        await store.commit([configure(partitioned=True), queued("r0", partition="x")])
        await admit_now(store, take("x", 1, limit=2))
        assert (await is_ready(store), (await summary_of(store)).needs_admission) == (False, False)
        await store.commit([queued("r1", partition="x")])
        assert (await is_ready(store), (await summary_of(store)).needs_admission) == (True, True)
        await store.commit([end(id="r1")])
        assert not await is_ready(store)

    @case
    async def test_a_partition_is_ready_again_at_its_time(self, store: Store) -> None:
        await store.commit([configure(partitioned=True), *(queued(f"r{n}", partition="x") for n in range(3))])
        await admit_now(store, take("x", 1, ready_at=250.0))
        summary = await summary_of(store)
        assert (summary.needs_admission, summary.next_at, (await view_of(store)).next_at) == (False, 250.0, 250.0)
        assert [await is_ready(store, now=now) for now in (249.9, 250.0)] == [False, True]
        await admit_now(store, take("x", 2, ready_at=300.0), now=250.0)
        assert (await summary_of(store)).next_at is None, "no run waits"
        await store.commit([queued("r3", partition="x")])
        assert (await summary_of(store)).next_at == 300.0

    @case
    async def test_partitions_that_wait_for_a_time_keep_their_turns(self, store: Store) -> None:
        await store.commit([configure(partitioned=True), *(queued(f"r{n}", partition=f"p{n}") for n in range(3))])
        takes = (take("p0", 0, turn=2, ready_at=210.0), take("p1", 0, turn=1, ready_at=220.0), take("p2", 0, turn=3))
        await admit_now(store, *takes)
        found = [names(await view_of(store, now=now)) for now in (200.0, 210.0, 220.0)]
        assert found == [["p2"], ["p0", "p2"], ["p1", "p0", "p2"]]

    @case
    async def test_promoted_runs_make_their_partition_ready(self, store: Store) -> None:
        await store.commit([configure(partitioned=True), queued(partition="x", eligible_at=150.0)])
        assert (await is_ready(store), (await summary_of(store)).needs_admission) == (False, False)
        assert await admit_now(store, promote=1) == []
        assert (await is_ready(store), (await summary_of(store)).needs_admission) == (True, True)

    @case
    async def test_new_settings_make_all_partitions_with_waiting_runs_ready(self, store: Store) -> None:
        await store.commit([configure(partitioned=True)])
        await store.commit([queued(f"{name}{n}", partition=name) for name in "xyz" for n in range(2)])
        blocked = [take(name, 1, limit=1, turn=1) for name in "xy"] + [take("z", 0, ready_at=900.0, turn=2)]
        await admit_now(store, *blocked)
        assert names(await view_of(store)) == []
        version = (await view_of(store)).version
        await store.commit([configure(base=version, partitioned=True, partition_concurrency=5)])
        assert names(await view_of(store)) == ["x", "y", "z"]
        assert (await summary_of(store)).next_at is None

    @case
    async def test_new_settings_count_for_partitions_without_waiting_runs(self, store: Store) -> None:
        await store.commit([configure(partitioned=True), queued("r0", partition="x")])
        await admit_now(store, take("x", 1, limit=1))
        version = (await view_of(store)).version
        await store.commit([configure(base=version, partitioned=True, partition_concurrency=5)])
        await store.commit([queued("r1", partition="x")])
        assert await is_ready(store), "the limit of the last take does not apply any more"

    @case
    async def test_an_override_makes_its_partition_ready(self, store: Store) -> None:
        await store.commit([configure(partitioned=True)])
        await store.commit([queued(f"{name}{n}", partition=name) for name in "xy" for n in range(2)])
        await admit_now(store, take("x", 1, limit=1), take("y", 1, limit=1))
        version = (await view_of(store)).version
        write = ConfigurePartition(queue="q", partition="x", override=PartitionOverride(concurrency=2))
        await store.commit([write])
        assert names(await view_of(store)) == ["x"]
        assert await store.commit([admit(version, take("x"))]) == [Superseded()]

    @case
    async def test_a_queue_without_partitions_is_ready_by_the_same_rules(self, store: Store) -> None:
        await store.commit([configure(concurrency=2), *(queued(f"r{n}") for n in range(4))])
        (partition,) = (await view_of(store)).partitions
        assert (partition.partition, partition.waiting, partition.held) == ("", 4, 0)
        assert await admit_now(store, take("", 2, limit=2)) == ["r0", "r1"]
        assert (names(await view_of(store)), (await summary_of(store)).needs_admission) == ([], False)
        await store.commit([end(id="r0")])
        assert (names(await view_of(store)), (await summary_of(store)).needs_admission) == ([""], True)
        await admit_now(store, take("", 0, ready_at=300.0))
        assert (names(await view_of(store)), (await summary_of(store)).next_at) == ([], 300.0)

    @case
    async def test_the_empty_partition_is_one_like_any_other(self, store: Store) -> None:
        await store.commit([configure(partitioned=True), queued("r0"), queued("r1", partition="x")])
        assert names(await view_of(store)) == ["", "x"]
        assert await admit_now(store, take("", 1, turn=1, state=b"s")) == ["r0"]
        await store.commit([queued("r2")])
        assert [(each.partition, each.state) for each in (await view_of(store)).partitions] == [("", b"s"), ("x", b"")]

    @case
    async def test_a_rewound_run_arrives_in_the_partition_of_its_place(self, store: Store) -> None:
        await store.commit([configure(partitioned=True), queued(partition="x"), queued("s", partition="y")])
        await admit_now(store, take("x"))
        await store.commit([end()])
        base = 1
        place = queued(partition="y").place
        await store.commit([requeue_ended(base, place=place)])
        (partition,) = (await view_of(store)).partitions
        assert (partition.partition, partition.waiting, partition.held) == ("y", 2, 0)
        assert (await record(store)).partition == "y"

    @case
    async def test_partitions_without_places_are_pruned_when_their_state_is_not_needed(self, store: Store) -> None:
        await store.commit([configure(partitioned=True)])
        ids = ("empty", "until", "kept", "override", "used")
        await store.commit([queued(id, partition=id) for id in ids])
        override = PartitionOverride(concurrency=9)
        await store.commit([ConfigurePartition(queue="q", partition="override", override=override)])
        takes: list[Take] = [
            take("empty", 1, turn=50),
            take("until", 1, turn=51, state=b"s", keep_until=400.0),
            take("kept", 1, turn=52, state=b"s"),
            take("override", 1, turn=53),
            take("used", 1, turn=54),
        ]
        await admit_now(store, *takes)
        await store.commit([end(f"end-{id}", id=id) for id in ids[:4]])
        turns = {"empty": [60, 60], "until": [51, 60], "kept": [52, 52], "override": [53, 53], "used": [54, 54]}
        for n, now in enumerate((300.0, 400.0)):
            await store.prune(now)
            await admit_now(store, take("highest", 0, turn=59))
            await store.commit([queued(f"{id}-{n}", partition=id) for id in ids])
            view = await view_of(store)
            assert {each.partition: each.turn for each in view.partitions} == {id: turns[id][n] for id in ids}
            await store.commit([end(f"end-{id}-{n}", id=f"{id}-{n}") for id in ids])
