"""Departure: every end of a run frees its slot or place in the same commit, once; a rewound run waits again."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from perdure.model.queue_records import Place
from perdure.model.records import ErrorRecord, RunStatus
from perdure.stores.protocol import Store
from perdure.stores.results import AlreadyStarted, Committed, Created, NotQueued, QueueMissing, Superseded
from perdure.stores.writes import ContinueAs, CreateRun, Predecessor, RunPatch, Write
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    claim,
    claim_ids,
    deliver,
    end,
    entry,
    finalize,
    load,
    observed,
    record,
    refused,
    succeeded,
    suspended,
    turn,
)
from perdure.testing.contract.queue_builders import (
    admit_now,
    check_has_no_place,
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


def _replacing(write: CreateRun, before: Predecessor, **fields: Any) -> CreateRun:
    return replace(write, replaces=before, **fields)


FAILED = RunPatch(status=RunStatus.FAILED, error=ErrorRecord("E", "no"), ended_at=210.0)
CANCELLED = RunPatch(status=RunStatus.CANCELLED, ended_at=210.0)


class DepartureCases(ContractCase):
    @case
    async def test_every_kind_of_end_frees_the_slot(self, store: Store) -> None:
        await store.commit([configure(), *(queued(f"r{n}") for n in range(5))])
        await admit_now(store, 5, gate=True)
        await claim_ids(store, claim(gates=(("q", 4),)))
        ends: tuple[Write, ...] = (
            turn(0, entry(), id="r0", patch=succeeded()),
            turn(0, entry(), id="r1", patch=FAILED),
            turn(0, id="r2", patch=CANCELLED),
            end(id="r3", status=RunStatus.FAILED),
            end(id="r4", only_if_not_started=True),
        )
        for n, write in enumerate(ends):
            assert await store.commit([write]) == [Committed()], "alone, so that a fast path may be taken"
            await check_has_no_place(store, f"r{n}")
            assert (await record(store, f"r{n}")).queue == "q"
            assert (await view_of(store)).held == 4 - n
            assert await store.commit([write]) == [Committed()], "a repeated call"
            assert (await view_of(store)).held == 4 - n
        summary = await summary_of(store)
        assert (summary.held, summary.waiting) == (0, 0)

    @case
    async def test_a_run_keeps_its_slot_until_it_ends(self, store: Store) -> None:
        await store.commit([configure(), queued(), queued("next")])
        await admit_now(store, 1)
        await claim_ids(store, claim())
        steps: tuple[Write, ...] = (
            turn(0, entry(), patch=suspended(300.0)),
            turn(1, owned=False, patch=suspended(None)),
            turn(
                2,
                owned=False,
                continue_as=ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=220.0),
                patch=RunPatch(status=RunStatus.RUNNING, owner="a"),
            ),
        )
        for write in steps:
            assert await store.commit([write]) == [Committed()]
            assert await holders(store) == ["r"]
        assert await store.release_runs("a", 230.0, recovered=True) == ["r"]
        assert (await holders(store), (await view_of(store)).held) == (["r"], 1)
        row = await record(store)
        assert (row.queue, row.waiting, row.wake_at) == ("q", False, 230.0)

    @case
    async def test_a_terminated_run_that_waited_leaves_no_place(self, store: Store) -> None:
        await store.commit([configure(), queued(), queued("late", eligible_at=300.0, expires_at=400.0)])
        assert await store.commit([end(), end(id="late")]) == [Committed(), Committed()]
        for id in ("r", "late"):
            await check_has_no_place(store, id)
        summary = await summary_of(store)
        assert (summary.waiting, summary.next_at, summary.needs_admission) == (0, None, False)
        assert await admit_now(store, 9, promote=9, now=500.0) == []

    @case
    async def test_a_cancel_ends_a_waiting_run_that_never_executed(self, store: Store) -> None:
        await store.commit([configure(), queued()])
        assert await store.commit([end(only_if_not_started=True)]) == [Committed()]
        await check_has_no_place(store)

    @case
    async def test_a_cancel_does_not_end_a_waiting_run_that_was_rewound(self, store: Store) -> None:
        await store.commit([configure(), queued()])
        await admit_now(store, 1)
        await claim_ids(store, claim())
        await store.commit([turn(0, entry(), patch=succeeded()), requeue_ended(1)])
        assert await store.commit([end(only_if_not_started=True)]) == [AlreadyStarted()]
        await check_waits(store)

    @case
    async def test_a_released_run_frees_its_slot_once(self, store: Store) -> None:
        await store.commit([configure(), *(queued(f"r{n}") for n in range(3))])
        await admit_now(store, 2)
        await claim_ids(store, claim())
        assert await store.commit([leave("r0", "q", 205.0)]) == [Committed()]
        assert (await view_of(store)).held == 1
        await store.commit([turn(0, id="r0", patch=succeeded())])
        assert ((await view_of(store)).held, await holders(store)) == (1, ["r1"]), "the end does not free another slot"
        assert await store.commit([leave("r0", "q", 215.0)]) == [NotQueued()]

    @case
    async def test_a_start_and_an_end_of_one_partition_in_one_batch(self, store: Store) -> None:
        await store.commit([configure(partitioned=True), queued("r0", partition="x")])
        await admit_now(store, take("x", 1, turn=1, limit=1))
        results = await store.commit(
            [end(id="r0"), queued("r1", partition="x"), end(id="r1"), queued("r2", partition="x")]
        )
        assert results == [Committed(), Created(owned=False), Committed(), Created(owned=False)]
        (partition,) = (await view_of(store)).partitions
        assert (partition.waiting, partition.held) == (1, 0)
        assert await waiting_ids(store) == ["r2"]

    @case
    async def test_pruned_and_deleted_runs_have_left_no_place(self, store: Store) -> None:
        await store.commit([configure(), queued("r0", dedupe="k"), queued("r1"), queued("r2")])
        await admit_now(store, 1)
        await store.commit([end(id="r0", prune_after=1.0), end(id="r1", prune_after=1.0), finalize("r0")])
        await store.commit([finalize("r1")])
        assert await store.delete_run("r1") == Committed()
        await store.prune(1000.0)
        assert await store.records(["r0", "r1"]) == [None, None]
        assert (await store.place("r0"), await store.place("r1")) == (None, None)
        assert (await waiting_ids(store), await holders(store)) == (["r2"], [])

    @case
    async def test_an_ended_waiting_run_needs_finalization_as_any_other(self, store: Store) -> None:
        await store.commit([configure(), observed(queued()), end()])
        (pending,) = await store.unfinalized()
        assert (pending.record.id, pending.orphaned_children) == ("r", False)


class QueuedRewindCases(ContractCase):
    @case
    async def test_an_ended_run_that_is_rewound_waits_again(self, store: Store) -> None:
        await store.commit([configure(), configure("other"), queued(dedupe="k", priority=1)])
        await admit_now(store, 1, gate=True)
        await claim_ids(store, claim(gates=(("q", 1),)))
        await store.commit([turn(0, entry(), patch=succeeded())])
        place = Place(queue="other", partition="x", priority=-2, expires_at=900.0)
        rewind = requeue_ended(1, place=place)
        assert await store.commit([rewind]) == [Committed()]
        await check_waits(store)
        row, stored = await record(store), await place_of(store)
        assert (row.queue, row.partition, row.priority, row.generation) == ("other", "x", -2, 1)
        assert (stored.since, stored.expires_at, stored.dedupe) == (170.0, 900.0, None)
        assert await store.commit([rewind]) == [Committed()], "a repeated call"
        assert ((await summary_of(store, "other")).waiting, (await summary_of(store)).waiting) == (1, 0)
        assert await claim_ids(store, claim()) == []
        assert await admit_now(store, take("x"), queue="other") == ["r"]
        assert await claim_ids(store, claim()) == ["r"]
        assert [type(each) for each in await store.commit([queued("s", dedupe="k")])] == [Created], "the key is free"

    @case
    async def test_an_ended_run_rewound_without_a_place_is_due(self, store: Store) -> None:
        await store.commit([configure(), queued(), end(), requeue_ended(1, place=None)])
        await check_has_no_place(store)
        assert (await record(store)).wake_at == 170.0

    @case
    async def test_an_open_run_that_is_rewound_keeps_its_slot(self, store: Store) -> None:
        await store.commit([configure(), queued(partition="x"), queued("next", partition="x")])
        await admit_now(store, take("x"), gate=True)
        await claim_ids(store, claim(gates=(("q", 1),)))
        await store.commit([turn(0, entry())])
        assert await store.commit([requeue_ended(1, place=Place(queue="missing"))]) == [Committed()]
        row = await record(store)
        assert (row.waiting, row.wake_at, row.gate, row.queue, row.partition) == (False, 170.0, "q", "q", "x")
        assert await holders(store) == ["r"]

    @case
    async def test_an_open_run_that_waits_still_waits_when_it_is_rewound(self, store: Store) -> None:
        await store.commit([configure(), queued(), queued("next")])
        number = (await place_of(store)).number
        assert await store.commit([requeue_ended(0)]) == [Committed()]
        await check_waits(store)
        assert ((await place_of(store)).number, await waiting_ids(store)) == (number, ["r", "next"])

    @case
    async def test_a_rewind_into_an_unknown_queue_changes_nothing(self, store: Store) -> None:
        await store.commit([configure(), queued(), end()])
        before = await load(store)
        assert await store.commit([requeue_ended(1, place=Place(queue="missing"))]) == [QueueMissing()]
        assert await load(store) == before
        assert await store.commit([requeue_ended(5, place=Place(queue="missing"))]) == [Superseded()]
        await refused(store.commit([requeue_ended(1, place=Place(queue="q", dedupe="k"))]))

    @case
    async def test_a_restarted_run_waits_again(self, store: Store) -> None:
        await store.commit([configure(), queued(), end(), queued("key", dedupe="k")])
        old = await record(store)
        before = Predecessor(old.created_by, old.generation)
        write = queued(created_by="again", created_at=180.0, priority=3)
        missing = queued(queue="missing", created_by="again")
        joins = queued(dedupe="k", created_by="joins")
        results = await store.commit([_replacing(missing, before), _replacing(joins, before)])
        assert [type(each).__name__ for each in results] == ["QueueMissing", "Joined"]
        assert await record(store) == old, "nothing was deleted"
        assert await store.commit([_replacing(write, before)]) == [Created(owned=False)]
        await check_waits(store)
        assert ((await record(store)).created_by, (await place_of(store)).priority) == ("again", 3)
        assert (await place_of(store)).since == 180.0
        await store.commit([deliver()])
        await check_waits(store)

    @case
    async def test_a_restarted_run_without_a_place_has_left_its_queue(self, store: Store) -> None:
        await store.commit([configure(), queued(), end()])
        old = await record(store)
        write = queued(created_by="again")
        plain = _replacing(write, Predecessor(old.created_by, old.generation), place=None)
        assert await store.commit([plain]) == [Created(owned=False)]
        await check_has_no_place(store)
        assert ((await record(store)).queue, await claim_ids(store, claim())) == (None, ["r"])
