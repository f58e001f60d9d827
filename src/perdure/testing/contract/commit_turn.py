"""A turn is accepted by the acceptance rule of `perdure.stores.protocol`, and applied once."""

from __future__ import annotations

import asyncio

from perdure.model.records import EntryStatus, ErrorRecord, Hold, RunStatus, Wait
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.results import AlreadyEnded, Committed, RunMissing, Superseded
from perdure.stores.writes import EndRun, ReleaseRun, RunPatch, Write
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    claim,
    claim_ids,
    dead_letter,
    deliver,
    entry,
    load,
    locations,
    record,
    run,
    succeeded,
    suspended,
    turn,
    worker,
)


class CommitTurnCases(ContractCase):
    @case
    async def test_entries_are_appended_in_order_and_read_back(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        assert await store.commit([turn(0, entry("z", 0), entry("a", 1))]) == [Committed()]
        assert await store.commit([turn(2, entry("m", 2))]) == [Committed()]
        snapshot = await load(store)
        assert snapshot.position == 3
        assert locations(snapshot) == ["z", "a", "m"]
        assert [(row.position, row.entry.location) for row in await store.history("r")] == [
            (1, "z"),
            (2, "a"),
            (3, "m"),
        ]
        assert [row.position for row in await store.history("r", after=1)] == [2, 3]

    @case
    async def test_entries_are_ordered_by_position_and_not_by_name(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        names = [f"charge#{n}" for n in range(12)]
        for position, name in enumerate(names):
            await store.commit([turn(position, entry(name, position))])
        assert locations(await load(store)) == names
        assert [row.entry.location for row in await store.history("r")] == names

    @case
    async def test_a_changed_entry_is_a_new_row(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        pending, done = entry(status=EntryStatus.PENDING, value=None), entry(attempts=1)
        await store.commit([turn(0, pending)])
        await store.commit([turn(1, done)])
        assert (await load(store)).entries == (pending, done)

    @case
    async def test_a_turn_without_a_patch_leaves_the_row_unchanged(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        before = await record(store)
        await store.commit([turn(0, entry())])
        assert await record(store) == before

    @case
    async def test_a_patch_replaces_all_its_fields_of_the_row(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        cause = ErrorRecord("Cause", "worse", rollback=True)
        error = ErrorRecord("E", "bad", "trace", "charge", "m.E", b"\x00{}", cause, ("response", "_request"))
        held = Hold("diverged", "why", "charge", "step a", "step b", "flow.py:3")
        waits = (Wait("timer", "nap", None, 500.0), Wait("event", name="approved"))
        patch = suspended(500.0, waits=waits, held=held, drift=("a", "b"), recoveries=2, error=error)
        failed = entry(status=EntryStatus.FAILED, value=None, error=error)
        await store.commit([turn(0, failed, patch=patch)])
        assert (await load(store)).entries == (failed,)
        row = await record(store)
        assert (row.status, row.owner, row.wake_at, row.updated_at) == (RunStatus.SUSPENDED, None, 500.0, 110.0)
        assert (row.waits, row.held, row.drift, row.recoveries, row.error) == (waits, held, ("a", "b"), 2, error)
        await store.commit([turn(1, owned=False, patch=RunPatch(status=RunStatus.RUNNING, owner="a"))])
        row = await record(store)
        assert (row.waits, row.held, row.drift, row.recoveries, row.error) == ((), None, (), 0, None)

    @case
    async def test_the_last_entry_and_the_end_are_one_commit(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        await store.commit([turn(0, entry(), patch=succeeded(111.0))])
        row = await record(store)
        assert (row.status, row.result, row.ended_at, row.owner, row.wake_at) == (
            RunStatus.SUCCEEDED,
            b'"done"',
            111.0,
            None,
            None,
        )

    @case
    async def test_an_ended_run_rejects_turns(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=succeeded())])
        ended = AlreadyEnded(RunStatus.SUCCEEDED)
        assert await store.commit([turn(1, entry(), turn_id="late")]) == [ended]
        assert await store.commit([turn(0, entry(), turn_id="stale")]) == [ended]
        assert await store.commit([turn(1, entry(), turn_id="free", owned=False)]) == [ended]
        assert (await load(store)).position == 1

    @case
    async def test_a_run_that_ends_is_not_owned_and_not_due(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        patch = RunPatch(status=RunStatus.FAILED, owner="a", wake_at=120.0, ended_at=110.0)
        await store.commit([turn(0, patch=patch)])
        row = await record(store)
        assert (row.owner, row.wake_at) == (None, None)
        assert await store.next_wake("default") is None
        assert await store.release_runs("a", 130.0, recovered=True) == []

    @case
    async def test_a_turn_of_a_missing_run_is_rejected(self, store: Store) -> None:
        assert await store.commit([turn(0, entry())]) == [RunMissing()]
        assert await store.load(["r"]) == [None]
        assert await store.records(["r"]) == [None]
        assert await store.history("r") == []

    # positions: rule 6

    @case
    async def test_a_turn_from_a_stale_position_is_rejected(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("first"))])
        assert await store.commit([turn(0, entry("stale"), turn_id="other")]) == [Superseded()]
        assert await store.commit([turn(0, turn_id="marker")]) == [Superseded()]
        assert locations(await load(store)) == ["first"]

    @case
    async def test_a_turn_from_a_future_position_is_rejected(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("first"))])
        assert await store.commit([turn(2, entry("gap"))]) == [Superseded()]
        assert (await load(store)).position == 1

    @case
    async def test_a_turn_from_within_another_turn_is_rejected(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("x"), entry("y"), entry("z"))])
        assert await store.commit([turn(1, entry("within"))]) == [Superseded()]
        assert await store.commit([turn(3, entry("after"))]) == [Committed()]

    @case
    async def test_a_turn_without_entries_takes_a_position(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        assert await store.commit([turn(0, turn_id="one")]) == [Committed()]
        assert await store.commit([turn(0, entry(), turn_id="two")]) == [Superseded()]
        snapshot = await load(store)
        assert (snapshot.position, snapshot.entries) == (1, ())
        assert await store.history("r") == []
        assert await store.commit([turn(1, entry())]) == [Committed()]
        assert [row.position for row in await store.history("r")] == [2]

    @case
    async def test_of_concurrent_turns_from_one_position_one_is_committed(self, store: Store) -> None:
        other = await self.second(store)
        await store.commit([run(owner="a")])
        for base in range(20):
            turns = [turn(base, entry(f"of {i}"), turn_id=f"{base}-{i}") for i in range(6)]
            calls = [(store, other)[i % 2].commit([turns[i]]) for i in range(6)]
            results = [result for (result,) in await asyncio.gather(*calls)]
            assert results.count(Committed()) == 1
            assert results.count(Superseded()) == 5
            winner = f"of {results.index(Committed())}"
            assert (await store.history("r", after=base))[0].entry.location == winner
        assert (await load(other)).position == 20

    # ownership: rules 4 and 5

    @case
    async def test_a_turn_for_another_workers_run_is_rejected(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        assert await store.commit([turn(0, entry(), worker="b")]) == [Superseded()]
        assert await store.commit([turn(0, entry(), worker="b", owned=False)]) == [Superseded()]

    @case
    async def test_a_run_without_an_owner_accepts_a_turn_that_does_not_claim_ownership(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=suspended(500.0))])
        assert await store.commit([turn(1, entry(), turn_id="claims ownership")]) == [Superseded()]
        assert await store.commit([turn(1, entry(), worker="b", owned=False)]) == [Committed()]
        assert await store.commit([turn(2, owned=False, patch=RunPatch(status=RunStatus.RUNNING, owner="a"))])
        assert await store.commit([turn(3, entry(), owned=False)]) == [Committed()], (
            "a run that it owns is accepted too"
        )
        assert (await record(store)).owner == "a"

    @case
    async def test_all_turns_of_a_fenced_worker_are_rejected(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        await store.fence_worker("a")
        assert await store.commit([turn(0, entry())]) == [Superseded()]
        await store.release_runs("a", 120.0, recovered=True)
        assert await store.commit([turn(0, entry(), owned=False)]) == [Superseded()]
        assert await store.commit([ReleaseRun(run_id="r", worker="a", now=121.0)]) == [Superseded()]
        assert (await load(store)).position == 0

    @case
    async def test_all_turns_of_an_unknown_worker_are_rejected(self, store: Store) -> None:
        await store.commit([run()])
        assert await store.commit([turn(0, entry(), worker="unknown", owned=False)]) == [Superseded()]
        await store.join(worker("c"))
        await store.remove_worker("c")
        assert await store.commit([turn(0, entry(), worker="c", owned=False)]) == [Superseded()]

    @case
    async def test_a_fenced_worker_cannot_change_a_run_after_its_takeover(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("before"))])
        await store.fence_worker("a")
        assert await store.release_runs("a", 120.0, recovered=True) == ["r"]
        assert await claim_ids(store, claim("b", 121.0)) == ["r"]
        zombie = turn(1, entry("zombie"))
        assert await store.commit([zombie]) == [Superseded()]
        assert await store.commit([turn(1, entry("after"), worker="b")]) == [Committed()]
        assert await store.commit([zombie]) == [Superseded()]
        assert locations(await load(store)) == ["before", "after"]

    # repeated calls after a lost result: rule 2

    @case
    async def test_a_repeated_turn_is_recognised_after_a_lost_result(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        for base, entries in ((0, ()), (1, (entry(), entry("b", 1))), (3, (entry("c", 2),))):
            write = turn(base, *entries)
            assert await store.commit([write]) == [Committed()]
            assert await store.commit([write]) == [Committed()]
        assert (await load(store)).position == 4

    @case
    async def test_a_repeated_turn_is_recognised_whatever_was_committed_since(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        write = turn(0, entry())
        await store.commit([write])
        await store.fence_worker("a")
        assert await store.commit([write]) == [Committed()]
        await store.release_runs("a", 120.0, recovered=True)
        await claim_ids(store, claim("b", 121.0))
        await store.commit([turn(1, entry("next"), worker="b")])
        assert await store.commit([write]) == [Committed()]
        await store.commit([turn(2, worker="b", patch=succeeded())])
        assert await store.commit([write]) == [Committed()]
        assert locations(await load(store)) == ["charge", "next"]

    @case
    async def test_a_repeated_turn_that_ended_its_run_is_recognised(self, store: Store) -> None:
        write = turn(0, entry(), patch=succeeded())
        await store.commit([run(owner="a"), write])
        assert await store.commit([write]) == [Committed()]

    @case
    async def test_a_repeated_batch_changes_nothing(self, store: Store) -> None:
        batch: list[Write] = [
            run(owner="a"),
            deliver("m1"),
            turn(0, entry(), seen=1, consumed=(1,), extras=TurnExtras(dead_letters=(dead_letter(),))),
            run("r2"),
            EndRun(run_id="r2", turn_id="end", now=115.0),
        ]
        await store.commit(batch)
        before = (await load(store), await load(store, "r2"), await store.dead_letters())
        await store.commit(batch)
        assert (await load(store), await load(store, "r2"), await store.dead_letters()) == before
