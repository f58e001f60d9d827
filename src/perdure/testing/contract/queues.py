"""Queues: settings by compare-and-set, places in order, moves and lists."""

from __future__ import annotations

import asyncio

from perdure.model.queue_records import (
    PartitionOverride,
    PlaceCursor,
    QueueOverride,
    QueuePause,
    QueueSettings,
    RateLimit,
)
from perdure.model.records import RunStatus
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, Created, IdTaken, NotQueued, QueueMissing, RunMissing, Superseded
from perdure.stores.writes import ConfigurePartition, ConfigureQueue
from perdure.testing.contract.builders import ContractCase, case, claim, claim_ids, end, record, refused, run
from perdure.testing.contract.queue_builders import (
    admit,
    admit_now,
    check_has_no_place,
    check_waits,
    configure,
    holders,
    leave,
    move,
    place_of,
    queued,
    summary_of,
    take,
    versions,
    view_of,
    waiting_ids,
)

SETTINGS = QueueSettings(
    concurrency=50,
    worker_concurrency=5,
    rate=RateLimit(100, 60.0),
    partitioned=True,
    partition_concurrency=2,
    partition_rate=RateLimit(10, 1.5),
    max_waiting=1000,
)


class QueueSettingsCases(ContractCase):
    @case
    async def test_settings_override_and_pause_come_back(self, store: Store) -> None:
        override = QueueOverride(concurrency=None, rate=RateLimit(1, 2.0), max_waiting=7)
        paused = QueuePause("ada", "the bank is closed", 99.5)
        write = ConfigureQueue(name="q", base=0, declared=SETTINGS, override=override, paused=paused)
        (version,) = versions(await store.commit([write]))
        other = await self.second(store)
        for handle in (store, other):
            summary, view = await summary_of(handle), await view_of(handle)
            for each in (summary, view):
                assert (each.name, each.version, each.declared) == ("q", version, SETTINGS)
                assert (each.override, each.paused, each.state, each.held) == (override, paused, b"", 0)
            assert (summary.waiting, summary.needs_admission, summary.full, summary.next_at) == (0, False, False, None)
            assert (view.active, view.taken, view.partitions, view.eligible, view.expired) == (0, 0, (), 0, ())

    @case
    async def test_a_change_of_settings_needs_the_last_version(self, store: Store) -> None:
        (first,) = versions(await store.commit([configure(concurrency=1)]))
        assert first == 1
        assert await store.commit([configure(concurrency=2), configure(base=9, concurrency=2)]) == [Superseded()] * 2
        (second,) = versions(await store.commit([configure(base=first, concurrency=2)]))
        assert second > first
        assert await store.commit([configure(base=first, concurrency=3)]) == [Superseded()]
        assert (await summary_of(store)).declared == QueueSettings(concurrency=2)
        assert await store.commit([configure("missing", 1)]) == [Superseded()]

    @case
    async def test_equal_settings_change_nothing(self, store: Store) -> None:
        write = configure(concurrency=1)
        (version,) = versions(await store.commit([write]))
        assert versions(await store.commit([write, configure(base=77, concurrency=1)])) == [version, version]
        assert (await summary_of(store)).version == version
        paused = configure(base=version, concurrency=1, paused=QueuePause("a", "", 1.0))
        (next_version,) = versions(await store.commit([paused]))
        assert versions(await store.commit([paused])) == [next_version]

    @case
    async def test_an_override_of_a_partition_changes_the_version_once(self, store: Store) -> None:
        assert await store.commit([ConfigurePartition(queue="q", partition="x", override=None)]) == [QueueMissing()]
        (before,) = versions(await store.commit([configure(partitioned=True)]))
        override = PartitionOverride(concurrency=3, weight=2)
        write = ConfigurePartition(queue="q", partition="x", override=override)
        (after,) = versions(await store.commit([write]))
        assert after > before
        assert versions(await store.commit([write])) == [after]
        assert await store.commit([admit(before)]) == [Superseded()]
        await store.commit([queued(partition="x")])
        assert [each.override for each in (await view_of(store)).partitions] == [override]
        removal = ConfigurePartition(queue="q", partition="x", override=None)
        (last,) = versions(await store.commit([removal]))
        assert (last > after, versions(await store.commit([removal]))) == (True, [last])
        assert [each.override for each in (await view_of(store)).partitions] == [None]

    @case
    async def test_queues_are_listed_by_name(self, store: Store) -> None:
        assert await store.queues() == []
        await store.commit([configure("b"), configure("~flow"), configure("a")])
        assert [each.name for each in await store.queues()] == ["a", "b", "~flow"]
        assert await store.queue_view("missing", 100.0) is None
        assert await store.places("missing") == []

    @case
    async def test_racing_declarations_create_one_queue(self, store: Store) -> None:
        other = await self.second(store)
        calls = [(store, other)[n % 2].commit([configure(concurrency=1 + n % 4)]) for n in range(16)]
        results = [result for (result,) in await asyncio.gather(*calls)]
        (winner,) = {n % 4 for n, result in enumerate(results) if isinstance(result, Committed)}
        assert results == [Committed(version=1) if n % 4 == winner else Superseded() for n in range(16)]
        assert (await summary_of(store)).declared.concurrency == 1 + winner

    @case
    async def test_malformed_writes_are_refused(self, store: Store) -> None:
        await store.commit([configure()])
        for write in (
            configure(""),
            queued(queue=""),
            queued(on_duplicate="ignore"),
            queued(dedupe=""),
            queued(debounce=True, dedupe="k"),
            queued(debounce=True, eligible_at=1.0),
            admit(1, 1, scan=0),
            admit(1, -1),
            admit(1, promote=-1),
            admit(1, take("x"), take("x")),
            move("", "q", 1),
            leave("r", "", 1.0),
        ):
            await refused(store.commit([run("other"), write]))
        assert await store.records(["other", "r"]) == [None, None]


class PlaceCases(ContractCase):
    @case
    async def test_a_queued_run_waits_and_is_not_due(self, store: Store) -> None:
        await store.commit([configure()])
        write = queued(owner="a", wake_at=50.0, partition="x", priority=-3, expires_at=900.0, dedupe="k")
        assert await store.commit([write]) == [Created(owned=False)]
        row, place = await record(store), await place_of(store)
        assert (row.status, row.first_executed_at) == (RunStatus.PENDING, None)
        await check_waits(store)
        assert (place.run_id, place.queue, place.partition, place.priority) == ("r", "q", "x", -3)
        assert (place.since, place.eligible_at, place.expires_at, place.dedupe) == (100.0, None, 900.0, "k")
        assert await claim_ids(store, claim(now=1e9, gates=(("q", 9),))) == []
        assert await store.next_wake("default") is None
        assert await store.commit([write]) == [Created(owned=False)], "a repeated call"
        assert (await summary_of(store)).waiting == 1

    @case
    async def test_a_run_without_a_place_has_no_queue(self, store: Store) -> None:
        await store.commit([configure(), run(queue="q", partition="x", priority=2, waiting=True, gate="q")])
        row = await record(store)
        assert (row.queue, row.partition, row.priority, row.waiting, row.gate) == (None, "", 0, False, "")
        await check_has_no_place(store)
        assert await claim_ids(store, claim()) == ["r"]

    @case
    async def test_queues_in_which_an_ancestor_holds_a_slot_come_back(self, store: Store) -> None:
        await store.commit([configure(), queued(ancestor_queues=("gpu", "q")), run("s", ancestor_queues=("x",))])
        assert (await record(store)).ancestor_queues == ("gpu", "q")
        assert (await record(store, "s")).ancestor_queues == ("x",)

    @case
    async def test_a_run_of_an_unknown_queue_is_not_created(self, store: Store) -> None:
        assert await store.commit([queued(), run("other")]) == [QueueMissing(), Created(owned=False)]
        assert (await store.records(["r"]), await store.place("r")) == ([None], None)

    @case
    async def test_the_id_is_checked_before_the_queue_and_the_key(self, store: Store) -> None:
        await store.commit([run(created_by="first"), configure(), queued("s", dedupe="k")])
        results = await store.commit([queued(queue="missing"), queued(dedupe="k")])
        assert [type(result) for result in results] == [IdTaken, IdTaken]
        assert await store.commit([queued("s", queue="missing")]) == [Created(owned=False)], "a repeated call"

    @case
    async def test_places_are_in_the_order_of_partition_priority_and_arrival(self, store: Store) -> None:
        await store.commit([configure(partitioned=True)])
        for n, (partition, priority) in enumerate([("b", 0), ("a", 5), ("a", 0), ("b", 0), ("a", -5), ("a", 0)]):
            await store.commit([queued(f"r{n}", partition=partition, priority=priority)])
        assert await waiting_ids(store) == ["r4", "r2", "r5", "r1", "r0", "r3"]
        assert await waiting_ids(store, partition="b") == ["r0", "r3"]
        assert [await store.places_ahead(f"r{n}") for n in range(6)] == [0, 3, 1, 1, 0, 2]
        assert await store.places_ahead("r1", cap=2) == 2
        assert await store.places_ahead("missing") == 0

    @case
    async def test_a_batch_of_starts_keeps_its_order(self, store: Store) -> None:
        ids = [f"r{n:02}" for n in reversed(range(30))]
        await store.commit([configure(), *(queued(id) for id in ids)])
        assert await waiting_ids(store) == ids

    @case
    async def test_pages_of_places_follow_each_other(self, store: Store) -> None:
        await store.commit([configure(partitioned=True)])
        writes = [queued(f"r{n}", partition=f"p{n % 3}", priority=n % 2) for n in range(12)]
        await store.commit(writes)
        expected, found = await waiting_ids(store), list[str]()
        cursor: PlaceCursor | None = None
        while page := await store.places("q", after=cursor, limit=5):
            found += [place.run_id for place in page]
            cursor = page[-1].cursor
        assert found == expected
        assert len(set(found)) == 12
        part = await store.places("q", partition="p1", limit=2)
        rest = await store.places("q", partition="p1", after=part[-1].cursor)
        assert [place.run_id for place in (*part, *rest)] == await waiting_ids(store, partition="p1")

    @case
    async def test_places_of_slots_are_listed_apart(self, store: Store) -> None:
        await store.commit([configure(), *(queued(f"r{n}", priority=-n) for n in range(4))])
        assert await admit_now(store, 2) == ["r3", "r2"]
        assert [place.run_id for place in await store.places("q", held=True)] == ["r3", "r2"]
        assert await waiting_ids(store) == ["r1", "r0"]
        (last,) = await store.places("q", held=True, limit=1, after=(await place_of(store, "r3")).cursor)
        assert (last.run_id, last.held, last.admitted_at) == ("r2", True, 200.0)

    @case
    async def test_delayed_places_wait_but_are_not_ahead(self, store: Store) -> None:
        await store.commit([configure(), queued("late", eligible_at=300.0), queued("r")])
        assert await waiting_ids(store) == ["late", "r"]
        assert await store.places_ahead("r") == 0
        summary = await summary_of(store)
        assert (summary.waiting, summary.next_at, summary.needs_admission) == (2, 300.0, True)

    @case
    async def test_the_next_time_is_that_of_the_first_delayed_or_expiring_place(self, store: Store) -> None:
        await store.commit([configure(), queued("d", eligible_at=300.0), queued("e", expires_at=250.0)])
        assert ((await summary_of(store)).next_at, (await view_of(store)).next_at) == (250.0, 250.0)
        assert await admit_now(store, 1) == ["e"]
        assert ((await summary_of(store)).next_at, (await view_of(store)).next_at) == (300.0, 300.0)
        assert (await view_of(store, now=400.0)).next_at == 300.0, "a time that has passed counts"


class QueueMoveCases(ContractCase):
    @case
    async def test_a_moved_run_keeps_its_number(self, store: Store) -> None:
        await store.commit([configure(), *(queued(f"r{n}") for n in range(4))])
        number = (await place_of(store, "r2")).number
        assert await store.commit([move("r2", "q", -1), move("r0", "q", 1)]) == [Committed(), Committed()]
        assert await waiting_ids(store) == ["r2", "r1", "r3", "r0"]
        assert await store.commit([move("r2", "q", 0), move("r2", "q", 0)]) == [Committed(), Committed()]
        assert await waiting_ids(store) == ["r1", "r2", "r3", "r0"]
        assert (await place_of(store, "r2")).number == number
        assert ((await record(store, "r0")).priority, (await place_of(store, "r0")).priority) == (1, 1)
        await check_waits(store, "r0")

    @case
    async def test_only_a_waiting_run_of_the_queue_is_moved(self, store: Store) -> None:
        await store.commit([configure(), configure("other"), queued("held", priority=4), queued("r"), run("plain")])
        await admit_now(store, 1)  # the run that arrived later has the lower priority
        await admit_now(store, 1)
        assert await holders(store) == ["held", "r"]
        await store.commit([queued("s")])
        results = await store.commit(
            [move("held", "q", 1), move("s", "other", 1), move("plain", "q", 1), move("none", "q", 1)]
        )
        assert results == [NotQueued(), NotQueued(), NotQueued(), RunMissing()]
        assert await store.commit([move("held", "q", 4)]) == [Committed()], "it has this priority"
        assert (await place_of(store, "s")).priority == 0

    @case
    async def test_a_delayed_run_can_be_moved(self, store: Store) -> None:
        await store.commit([configure(), queued("late", eligible_at=150.0), queued("r"), move("late", "q", -1)])
        assert (await place_of(store, "late")).eligible_at == 150.0
        assert await admit_now(store, 1, promote=5) == ["late"]

    @case
    async def test_a_waiting_run_that_leaves_is_due_without_a_slot(self, store: Store) -> None:
        await store.commit([configure(worker_concurrency=1), queued(), queued("late", eligible_at=900.0)])
        assert await store.commit([leave("r", "other", 150.0)]) == [NotQueued()]
        results = await store.commit([leave("r", "q", 150.0), leave("late", "q", 151.0)])
        assert results == [Committed(), Committed()]
        for id, at in (("r", 150.0), ("late", 151.0)):
            row = await record(store, id)
            assert (row.wake_at, row.queue) == (at, "q")
            await check_has_no_place(store, id)
        summary = await summary_of(store)
        assert (summary.waiting, summary.held, summary.next_at) == (0, 0, None)
        assert await claim_ids(store, claim()) == ["r", "late"]
        assert await store.commit([leave("r", "q", 160.0)]) == [NotQueued()]
        assert await store.commit([leave("none", "q", 160.0)]) == [RunMissing()]

    @case
    async def test_a_run_that_gives_up_its_slot_continues_without_a_gate(self, store: Store) -> None:
        await store.commit([configure(worker_concurrency=1), queued()])
        await admit_now(store, 1, gate=True)
        assert await claim_ids(store, claim(gates=(("q", 1),))) == ["r"]
        assert await store.commit([leave("r", "q", 210.0)]) == [Committed()]
        row = await record(store)
        assert (row.owner, row.status, row.wake_at, row.queue) == ("a", RunStatus.RUNNING, None, "q")
        await check_has_no_place(store)
        assert (await view_of(store)).held == 0
        await store.release_runs("a", 220.0, recovered=False)
        assert await claim_ids(store, claim("b", 230.0)) == ["r"], "it has no gate"

    @case
    async def test_an_ended_run_has_no_place_to_move_or_leave(self, store: Store) -> None:
        await store.commit([configure(), queued(), end()])
        assert await store.commit([move("r", "q", 1), leave("r", "q", 160.0)]) == [NotQueued()] * 2
