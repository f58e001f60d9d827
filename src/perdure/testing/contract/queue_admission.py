"""Admission: applied to one version of a queue, in the order of places, and never beyond the plan."""

from __future__ import annotations

import asyncio

from perdure.model.queue_records import QueuePause
from perdure.model.records import RunStatus
from perdure.stores.protocol import Store
from perdure.stores.results import Admitted, Created, LimitReached, QueueMissing, RunMissing, Superseded, WriteResult
from perdure.stores.writes import Admit
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    claim,
    claim_ids,
    deliver,
    end,
    record,
    run,
    succeeded,
    suspended,
    turn,
    worker,
)
from perdure.testing.contract.queue_builders import (
    admit,
    admit_now,
    check_waits,
    configure,
    holders,
    leave,
    place_of,
    queued,
    requeue_ended,
    summary_of,
    take,
    view_of,
    waiting_ids,
)


class AdmitCases(ContractCase):
    @case
    async def test_admission_takes_the_first_places_and_makes_their_runs_due(self, store: Store) -> None:
        await store.commit([configure(), *(queued(f"r{n}", priority=n % 2) for n in range(6))])
        version = (await view_of(store)).version
        assert await store.commit([admit(version, 4, now=205.0)]) == [
            Admitted(("r0", "r2", "r4", "r1"), 0, version + 1)
        ]
        for id in ("r0", "r2", "r4", "r1"):
            row, place = await record(store, id), await place_of(store, id)
            assert (row.waiting, row.wake_at, row.owner, row.gate) == (False, 205.0, None, "")
            assert (row.status, row.first_executed_at, row.queue) == (RunStatus.PENDING, None, "q")
            assert (place.held, place.admitted_at, place.since) == (True, 205.0, 100.0)
        assert await waiting_ids(store) == ["r3", "r5"]
        assert await claim_ids(store, claim(now=204.9)) == []
        assert await claim_ids(store, claim(now=205.0)) == ["r0", "r1", "r2", "r4"]

    @case
    async def test_an_admission_of_an_earlier_version_is_superseded(self, store: Store) -> None:
        await store.commit([configure(), queued("r0"), queued("r1")])
        version = (await view_of(store)).version
        write = admit(version, 1)
        assert [type(each) for each in await store.commit([write])] == [Admitted]
        assert await store.commit([write]) == [Superseded()], "a repeated call"
        assert await store.commit([admit(version + 5, 1)]) == [Superseded()]
        assert await store.commit([admit(1, 1, queue="missing")]) == [QueueMissing()]
        assert (await holders(store), await waiting_ids(store)) == (["r0"], ["r1"])

    @case
    async def test_arrivals_and_departures_do_not_change_the_version(self, store: Store) -> None:
        await store.commit([configure(), queued("r0"), queued("r1")])
        version = (await view_of(store)).version
        await store.commit([queued("r2"), end(id="r0"), leave("r1", "q", 150.0)])
        assert (await view_of(store)).version == version
        assert await store.commit([admit(version, 5)]) == [Admitted(("r2",), 0, version + 1)]

    @case
    async def test_a_pause_between_view_and_admission_wins(self, store: Store) -> None:
        await store.commit([configure(), queued()])
        view = await view_of(store)
        await store.commit([configure(base=view.version, paused=QueuePause("ada", "", 1.0))])
        assert await store.commit([admit(view.version, 1)]) == [Superseded()]
        await check_waits(store)

    @case
    async def test_a_resize_between_view_and_admission_wins(self, store: Store) -> None:
        await store.commit([configure(concurrency=5), *(queued(f"r{n}") for n in range(5))])
        view = await view_of(store)
        (resized,) = await store.commit([configure(base=view.version, concurrency=1)])
        assert await store.commit([admit(view.version, 5)]) == [Superseded()]
        assert (await view_of(store)).declared.concurrency == 1
        assert await admit_now(store, 1) == ["r0"]
        view = await view_of(store)
        await store.commit([configure(base=view.version, concurrency=3)])
        assert await admit_now(store, 2) == ["r1", "r2"]
        assert resized != Superseded()

    @case
    async def test_state_and_numbers_taken_come_back(self, store: Store) -> None:
        await store.commit([configure(partitioned=True)])
        await store.commit([queued(f"r{n}", partition="x" if n < 3 else "y") for n in range(5)])
        takes = (take("x", 2, turn=4, state=b"x-state"), take("y", 5, turn=5, state=b"\x00y"))
        assert await admit_now(store, *takes, state=b"\xffwindow") == ["r0", "r1", "r3", "r4"]
        view = await view_of(store)
        assert (view.state, view.taken, view.held, (await summary_of(store)).state) == (
            b"\xffwindow",
            4,
            4,
            b"\xffwindow",
        )
        (partition,) = view.partitions
        assert (partition.partition, partition.waiting, partition.held) == ("x", 1, 2)
        assert (partition.turn, partition.state, partition.taken) == (4, b"x-state", 2)
        assert await admit_now(store, state=b"next") == []
        view = await view_of(store)
        assert (view.state, view.taken, view.partitions[0].taken) == (b"next", 0, 2), "no take of the partition"

    @case
    async def test_a_take_of_no_runs_stores_the_state_of_the_partition(self, store: Store) -> None:
        await store.commit([configure(partitioned=True), queued(partition="x")])
        assert await admit_now(store, take("x", 0, turn=9, state=b"s"), take("unknown", 0, turn=3)) == []
        (partition,) = (await view_of(store)).partitions
        assert (partition.turn, partition.state, partition.taken, partition.waiting) == (9, b"s", 0, 1)

    @case
    async def test_fewer_runs_than_planned_are_taken_if_fewer_wait(self, store: Store) -> None:
        await store.commit([configure(), queued("r0"), queued("r1")])
        view = await view_of(store)
        await store.commit([end(id="r0")])
        assert await store.commit([admit(view.version, 2)]) == [Admitted(("r1",), 0, view.version + 1)]
        assert (await view_of(store)).taken == 1

    @case
    async def test_runs_that_no_worker_executes_are_skipped_and_keep_their_place(self, store: Store) -> None:
        await store.commit([configure()])
        await store.commit(
            [queued("version", version=2), queued("pool", pool="gpu"), queued("flow", workflow="other"), queued("r")]
        )
        assert await admit_now(store, 2) == ["r"]
        assert await waiting_ids(store) == ["version", "pool", "flow"]
        assert await admit_now(store, 1, serves=()) == []
        served = (("flow", 2, "default"), ("flow", 1, "gpu"))
        assert await admit_now(store, 5, serves=served) == ["version", "pool"]

    @case
    async def test_at_most_the_first_places_of_a_partition_are_examined(self, store: Store) -> None:
        await store.commit([configure(), *(queued(f"x{n}", workflow="other") for n in range(3)), queued("r")])
        assert await admit_now(store, 1, scan=3) == []
        assert await admit_now(store, 1, scan=4) == ["r"]

    @case
    async def test_held_runs_are_skipped_until_they_are_resumed(self, store: Store) -> None:
        await store.commit([configure(), queued("r"), queued("s"), deliver("m1", kind="pause")])
        assert await admit_now(store, 1) == ["s"]
        await check_waits(store)
        await store.commit([deliver("m2", kind="resume")])
        await check_waits(store)
        assert await admit_now(store, 1) == ["r"]
        assert [message.id for message in await store.inbox("r")] == ["m1", "m2"], "the run processes both"

    @case
    async def test_expired_places_are_not_admitted(self, store: Store) -> None:
        await store.commit([configure(), queued("r0", expires_at=200.0), queued("r1", expires_at=200.1)])
        await store.commit([queued("late", expires_at=150.0, eligible_at=300.0), queued("r2")])
        view = await view_of(store, now=200.0)
        assert (view.expired, view.eligible, view.next_at) == (("late", "r0"), 0, 150.0)
        assert await admit_now(store, 5, now=200.0) == ["r1", "r2"]
        assert (await view_of(store, now=500.0)).expired == ("late", "r0"), "a slot does not expire"
        assert (await view_of(store, now=500.0, limit=1)).expired == ("late",)
        await store.commit([end(id="r0"), end(id="late")])
        view = await view_of(store, now=500.0)
        assert (view.expired, view.next_at) == ((), None)

    @case
    async def test_delayed_runs_are_admitted_after_their_promotion(self, store: Store) -> None:
        await store.commit([configure(), queued("d2", eligible_at=180.0), queued("d1", eligible_at=170.0)])
        await store.commit([queued("d3", eligible_at=200.0), queued("d4", eligible_at=200.1), queued("r")])
        number = (await place_of(store, "r")).number
        view = await view_of(store, now=200.0)
        assert (view.eligible, view.partitions[0].waiting) == (3, 1)
        assert await store.commit([admit(view.version, 1, now=200.0, promote=2)]) == [
            Admitted(("r",), 2, view.version + 1)
        ]
        numbers = [(await place_of(store, id)).number for id in ("d1", "d2")]
        assert number < numbers[0] < numbers[1], "a delayed run gets its place when its time comes"
        assert ((await place_of(store, "d1")).eligible_at, (await place_of(store, "d3")).eligible_at) == (None, 200.0)
        assert await admit_now(store, 9, now=200.0, promote=9) == ["d1", "d2", "d3"]
        assert await waiting_ids(store) == ["d4"]

    @case
    async def test_a_promoted_run_is_behind_runs_that_arrived_before_its_time(self, store: Store) -> None:
        await store.commit([configure(), queued("late", eligible_at=150.0), queued("low", priority=1), queued("r")])
        assert await admit_now(store, promote=1) == []
        assert await waiting_ids(store) == ["r", "late", "low"]

    @case
    async def test_an_admission_with_a_wrong_clock_changes_nothing(self, store: Store) -> None:
        now = await store.now()
        await store.commit([configure(), queued(), queued("late", eligible_at=1.0)])
        version = (await view_of(store)).version
        for at in (now - 1000.0, now + 1000.0):
            assert await store.commit([admit(version, 1, now=at, promote=1, tolerance=100.0)]) == [Superseded()]
        assert (await view_of(store)).version == version
        assert (await place_of(store, "late")).eligible_at == 1.0
        (result,) = await store.commit([admit(version, 1, now=await store.now(), tolerance=100.0)])
        assert isinstance(result, Admitted)
        assert result.runs == ("r",)

    @case
    async def test_active_slots_are_those_of_owned_and_due_runs(self, store: Store) -> None:
        await store.commit([configure(), *(queued(f"r{n}") for n in range(4)), queued("waits")])
        await admit_now(store, 4, now=200.0)
        assert ((await view_of(store, now=200.0)).active, (await view_of(store, now=199.0)).active) == (4, 0)
        assert await claim_ids(store, claim(now=200.0, limit=2)) == ["r0", "r1"]
        await store.commit([turn(0, id="r0", patch=suspended(500.0)), end(id="r2")])
        view = await view_of(store, now=210.0)
        assert (view.held, view.active) == (3, 2), "a suspended run keeps its slot and is not active"
        assert (await view_of(store, now=500.0)).active == 3

    @case
    async def test_a_full_queue_refuses_new_places_until_the_next_admission(self, store: Store) -> None:
        await store.commit([configure(max_waiting=2), queued("r0", dedupe="k"), queued("r1")])
        await admit_now(store, full=True)
        assert (await summary_of(store)).full
        (refused,) = await store.commit([queued("r2")])
        assert refused == LimitReached(pending=2)
        assert await store.records(["r2"]) == [None]
        results = await store.commit([queued("r1"), queued("x", dedupe="k"), run("r2")])
        assert [type(each).__name__ for each in results] == ["Created", "Joined", "Created"], "they need no new place"
        await admit_now(store, 1)
        assert not (await summary_of(store)).full
        assert await store.commit([queued("r3")]) == [Created(owned=False)]

    @case
    async def test_a_rewound_run_is_accepted_by_a_full_queue(self, store: Store) -> None:
        await store.commit([configure(), queued(), end()])
        await admit_now(store, full=True)
        assert [type(each).__name__ for each in await store.commit([requeue_ended(1)])] == ["Committed"]
        await check_waits(store)


class ConcurrentAdmissionCases(ContractCase):
    @case
    async def test_of_two_admissions_of_one_version_one_is_applied(self, store: Store) -> None:
        await store.commit([configure(), *(queued(f"r{n}") for n in range(9))])
        other = await self.second(store)
        version = (await view_of(store)).version
        calls = [handle.commit([admit(version, 2)]) for handle in (store, other, store, other)]
        results = [result for (result,) in await asyncio.gather(*calls)]
        assert sorted(type(each).__name__ for each in results) == ["Admitted", "Superseded", "Superseded", "Superseded"]
        assert await holders(store) == ["r0", "r1"]

    @case
    async def test_concurrent_admitters_and_ends_never_exceed_the_limit(self, store: Store) -> None:
        """Eight tasks view, admit and end runs through two handles; the number of slots never exceeds the limit."""
        limit, count = 3, 40
        await store.commit([configure(concurrency=limit), *(queued(f"r{n:02}") for n in range(count))])
        handles = (store, await self.second(store))
        for n in range(8):
            await store.join(worker(f"w{n}"))
        ended: list[str] = []

        async def work(n: int) -> None:
            handle, worker_id = handles[n % 2], f"w{n}"
            while len(ended) < count:
                view = await view_of(handle)
                assert view.held <= limit
                await handle.commit([admit(view.version, limit - view.held)])
                assert len(await handle.places("q", held=True)) <= limit
                for each in await handle.claim(claim(worker_id, limit=1)):
                    end_of_run = turn(0, id=each.id, worker=worker_id, patch=succeeded())
                    assert [type(done).__name__ for done in await handle.commit([end_of_run])] == ["Committed"]
                    ended.append(each.id)

        await asyncio.gather(*(work(n) for n in range(8)))
        assert sorted(ended) == [f"r{n:02}" for n in range(count)]
        summary = await summary_of(store)
        assert (summary.held, summary.waiting, summary.needs_admission) == (0, 0, False)

    @case
    async def test_starts_during_admissions_are_admitted_once_each(self, store: Store) -> None:
        await store.commit([configure()])
        handles = (store, await self.second(store))
        ids = [f"r{n:02}" for n in range(40)]
        admitted: list[str] = []

        async def start(n: int) -> None:
            for id in ids[n::4]:
                assert await handles[n % 2].commit([queued(id)]) == [Created(owned=False)]

        async def admit_all(n: int) -> None:
            while len(admitted) < len(ids):
                view = await view_of(handles[n % 2])
                (result,) = await handles[n % 2].commit([admit(view.version, 7)])
                admitted.extend(_admitted_runs(result))

        await asyncio.gather(*(start(n) for n in range(4)), *(admit_all(n) for n in range(4)))
        assert sorted(admitted) == ids

    @case
    async def test_an_admission_shares_its_batch_with_other_writes(self, store: Store) -> None:
        await store.commit([configure(), configure("p"), queued("r0"), queued("s0", "p"), run("plain", owner="a")])
        batch: list[Admit] = [admit(1, 2), admit(1, 2, queue="p"), admit(1, 2)]
        results = await store.commit([queued("r1"), *batch, end(id="plain"), queued("r2"), end(id="missing")])
        assert results[1:4] == [Admitted(("r0", "r1"), 0, 2), Admitted(("s0",), 0, 2), Superseded()]
        assert results[-1] == RunMissing()
        assert (await holders(store), await waiting_ids(store)) == (["r0", "r1"], ["r2"])


def _admitted_runs(result: WriteResult) -> tuple[str, ...]:
    assert isinstance(result, Admitted | Superseded), result
    return result.runs if isinstance(result, Admitted) else ()
