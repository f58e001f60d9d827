"""Positions of dropped or restarted histories stay taken; batches are all or nothing and in order."""

from __future__ import annotations

from perdure.model.records import EntryStatus, RunStatus
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.results import AlreadyEnded, Committed, RunMissing, Snapshot, Superseded
from perdure.stores.writes import (
    CommitTurn,
    ContinueAs,
    EndRun,
    FanOut,
    FinalizeRun,
    ObserveRunEnd,
    ReleaseRun,
    RunPatch,
    SupersedeStream,
    Write,
)
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    claim,
    deliver,
    entry,
    load,
    locations,
    record,
    refused,
    run,
    succeeded,
    suspended,
    turn,
)


class HistoryCases(ContractCase):
    # dropping and continue_as

    @case
    async def test_dropped_entries_are_deleted_and_their_positions_stay_taken(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("x")), turn(1), turn(2, entry("y", 1), entry("z", 2))])
        write = turn(4, entry("loop", 3), extras=TurnExtras(dropped=("x", "y", "unknown")))
        assert await store.commit([write]) == [Committed()]
        snapshot = await load(store)
        assert locations(snapshot) == ["z", "loop"]
        assert (snapshot.position, snapshot.record.fence) == (5, 5)
        assert await store.commit([write]) == [Committed()], "its result was lost"
        for base in range(5):
            assert await store.commit([turn(base, entry("stale"), turn_id=f"stale {base}")]) == [Superseded()]
        assert await store.commit([turn(5, entry("next", 4))]) == [Committed()]

    @case
    async def test_replaced_versions_of_an_entry_are_deleted_and_their_positions_stay_taken(self, store: Store) -> None:
        beats = [entry("slow", 1, status=EntryStatus.PENDING, value=b"%d" % number) for number in range(3)]
        await store.commit([run(owner="a"), turn(0, entry("x")), turn(1, beats[0]), turn(2, entry("y", 2))])
        second = turn(3, beats[1], extras=TurnExtras(replaced=(2,)))
        assert await store.commit([second]) == [Committed()]
        assert await store.commit([second]) == [Committed()], "its result was lost"
        assert (await load(store)).entries[-1].value == b"1"
        late = turn(3, beats[2], worker="b", extras=TurnExtras(replaced=(4,)))
        assert await store.commit([late]) == [Superseded()], "another worker's turn deletes nothing"
        last = turn(4, entry("slow", 1), entry("z", 3), extras=TurnExtras(replaced=(4, 2)))
        assert await store.commit([last]) == [Committed()], "the row before the turn itself, and one that is not there"
        snapshot = await load(store)
        assert locations(snapshot) == ["x", "y", "slow", "z"]
        assert (snapshot.position, snapshot.record.fence) == (6, 0)
        for base in range(6):
            assert await store.commit([turn(base, entry("stale"), turn_id=f"stale {base}")]) == [Superseded()]
        assert await store.commit([turn(6, entry("next", 4))]) == [Committed()]

    @case
    async def test_the_position_of_a_dropped_last_entry_is_not_reused(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("x"))])
        write = turn(1, extras=TurnExtras(dropped=("x",)))
        assert await store.commit([write]) == [Committed()]
        snapshot = await load(store)
        assert (snapshot.position, snapshot.entries, snapshot.record.fence) == (2, (), 2)
        assert await store.commit([write]) == [Committed()]
        assert (
            await store.commit([turn(0, entry(), turn_id="s0"), turn(1, entry(), turn_id="s1")]) == [Superseded()] * 2
        )

    @case
    async def test_all_rows_of_a_location_and_below_are_dropped(self, store: Store) -> None:
        names = ("a", "a/b", "a/b", "a/b/c", "a/bc", "a/b0", "a/b.c", "a_b/c", "b/a/b", "A/b", "a/b/c/d%e", "a/b/")
        rows = [entry(name, n) for n, name in enumerate(names)]
        await store.commit([run(owner="a"), turn(0, *rows)])
        await store.commit([turn(12, extras=TurnExtras(dropped=("a/b",)))])
        assert locations(await load(store)) == ["a", "a/bc", "a/b0", "a/b.c", "a_b/c", "b/a/b", "A/b"]

    @case
    async def test_locations_with_pattern_characters_are_dropped_exactly(self, store: Store) -> None:
        names = ("100%", "100x", "100%/in", "100x/in", "l_p", "lop", "l_p/x", "lop/x", "[a]", "a", "é", "é/x", "*", "?")
        rows = [entry(name, n) for n, name in enumerate(names)]
        await store.commit([run(owner="a"), turn(0, *rows)])
        await store.commit([turn(len(names), extras=TurnExtras(dropped=("100%", "l_p", "[a]", "é", "*", "?")))])
        assert locations(await load(store)) == ["100x", "100x/in", "lop", "lop/x", "a"]

    @case
    async def test_a_turns_entries_are_written_after_its_drops(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("loop"), entry("loop/1", 1))])
        replaced = (entry("loop", value=b"2"), entry("loop/2", 2))
        assert await store.commit([turn(2, *replaced, extras=TurnExtras(dropped=("loop",)))]) == [Committed()]
        assert (await load(store)).entries == replaced

    @case
    async def test_continue_as_clears_the_history_and_keeps_the_inbox(self, store: Store) -> None:
        await store.commit(
            [run(owner="a", input=b"1"), deliver("m1"), deliver("m2"), turn(0, entry("x"), entry("y", 1))]
        )
        continue_as = ContinueAs(workflow="flow2", version=3, input=b"2", first_executed_at=None, run_attempt=2)
        patch = RunPatch(status=RunStatus.PENDING, wake_at=150.0)
        write = turn(2, continue_as=continue_as, patch=patch, seen=2, consumed=(1,))
        assert await store.commit([write]) == [Committed()]
        snapshot = await load(store)
        row = snapshot.record
        assert (row.workflow, row.version, row.input) == ("flow2", 3, b"2")
        assert (row.original_workflow, row.original_input) == ("flow", b"1")
        assert (row.generation, row.epoch, row.run_attempt) == (1, 1, 2)
        assert (row.first_executed_at, row.wake_at, row.pool) == (None, 150.0, "default")
        assert (snapshot.entries, snapshot.position, row.fence) == ((), 3, 3)
        assert [message.id for message in snapshot.inbox] == ["m2"]
        assert await store.commit([write]) == [Committed()], "its result was lost"
        assert (await load(store)) == snapshot

    @case
    async def test_a_turn_of_an_earlier_generation_is_rejected(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("x"), entry("y", 1))])
        continue_as = ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=111.0)
        patch = RunPatch(status=RunStatus.RUNNING, owner="a")
        await store.commit([turn(2, continue_as=continue_as, patch=patch)])
        for base in range(3):
            assert await store.commit([turn(base, entry("old"), turn_id=f"old {base}")]) == [Superseded()]
        assert await store.commit([turn(3, entry("new"))]) == [Committed()]
        assert locations(await load(store)) == ["new"]

    @case
    async def test_the_original_input_survives_repeated_continue_as(self, store: Store) -> None:
        await store.commit([run(owner="a", input=b"1")])
        patch = RunPatch(status=RunStatus.RUNNING, owner="a")
        for base in range(3):
            continue_as = ContinueAs(workflow="flow", version=1, input=b"%d" % (base + 2), first_executed_at=111.0)
            await store.commit([turn(base, continue_as=continue_as, patch=patch)])
        row = await record(store)
        assert (row.original_input, row.input, row.generation, row.first_executed_at) == (b"1", b"4", 3, 111.0)

    @case
    async def test_the_entries_of_a_turn_with_continue_as_are_not_stored(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("old"))])
        continue_as = ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=111.0)
        write = turn(1, entry("last"), entry("too", 1), continue_as=continue_as)
        assert await store.commit([write]) == [Committed()]
        snapshot = await load(store)
        assert (snapshot.entries, snapshot.position, snapshot.record.fence) == ((), 3, 3)
        assert await store.commit([write]) == [Committed()], "its result was lost"
        assert await store.commit([turn(2, entry("stale"))]) == [Superseded()]
        assert await store.commit([turn(3, entry("new"))]) == [Committed()]
        assert [row.position for row in await store.history("r")] == [4]

    @case
    async def test_continue_as_may_carry_entries_over(self, store: Store) -> None:
        carried = (entry("undo"), entry("undo#1", 1))
        for extra, entries in ((0, ()), (1, (entry("x", 3),)), (3, tuple(entry(f"x{n}", n) for n in range(3)))):
            id = f"r{extra}"
            await store.commit([run(id, owner="a"), turn(0, entry("old"), id=id)])
            continue_as = ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=111.0, entries=carried)
            running = RunPatch(status=RunStatus.RUNNING, owner="a")
            write = turn(1, *entries, id=id, continue_as=continue_as, patch=running)
            assert await store.commit([write]) == [Committed()]
            snapshot = await load(store, id)
            last = 1 + max(2, extra)
            assert (snapshot.entries, snapshot.position, snapshot.record.fence) == (carried, last, last)
            assert [row.position for row in await store.history(id)] == [2, 3]
            assert await store.commit([write]) == [Committed()], "its result was lost"
            assert await load(store, id) == snapshot
            assert await store.commit([turn(last, entry("new", 2), id=id)]) == [Committed()]

    @case
    async def test_continue_as_may_move_the_run_to_another_pool(self, store: Store) -> None:
        continue_as = ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=None, pool="gpu")
        await store.commit([run(owner="a"), turn(0, continue_as=continue_as, patch=suspended(150.0))])
        assert (await record(store)).pool == "gpu"
        assert (await store.next_wake("gpu"), await store.next_wake("default")) == (150.0, None)
        assert [each.id for each in await store.claim(claim("b", pool="gpu"))] == ["r"]

    # batches

    @case
    async def test_a_malformed_write_leaves_nothing_of_its_batch(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        malformed = (
            turn(1, entry(value=12)),
            turn(1, entry(kind="marker")),
            EndRun(run_id="r", turn_id="t", now=1.0, status=RunStatus.RUNNING),
            CommitTurn(run_id="", base=0, turn_id="t", worker="a", owned=True, now=1.0),
            run("r3", input="text"),
            turn(
                1,
                continue_as=ContinueAs(
                    workflow="f", version=1, input=b"", first_executed_at=None, entries=(entry(value=12),)
                ),
            ),
            FanOut(topic="t", offset=1, now=1.0, page=0),
            FanOut(topic="", offset=1, now=1.0),
            ObserveRunEnd(run_id="", observer="above", target="0/child"),
            FinalizeRun(run_id="", now=1.0),
            SupersedeStream(run_id="", location="charge", writer="w"),
            ReleaseRun(run_id="", worker="a", now=1.0),
            "not a write",
        )
        for bad in malformed:
            batch = [run("r2"), deliver(), turn(0, entry()), bad]
            await refused(store.commit(batch))  # type: ignore[arg-type]
            snapshot = await load(store)
            assert (snapshot.position, snapshot.inbox, await store.records(["r2", "r3"])) == (0, (), [None, None])
        assert await store.commit([turn(0, entry())]) == [Committed()], "the store still works"

    @case
    async def test_writes_to_one_run_in_one_batch_apply_in_order(self, store: Store) -> None:
        batch: list[Write] = [
            run(owner="a"),
            turn(0, entry("x")),
            turn(0, entry("stale"), turn_id="stale"),
            deliver("m1"),
            turn(1, entry("y", 1), seen=0, patch=suspended(500.0)),
            deliver("m1"),
            turn(2, entry("z", 2), owned=False, seen=1, consumed=(1,), patch=succeeded()),
            deliver("m2"),
        ]
        results = await store.commit(batch)
        assert results[1:3] == [Committed(), Superseded()]
        assert results[4] == Committed(has_messages=True)
        assert results[6:] == [Committed(), AlreadyEnded(RunStatus.SUCCEEDED)]
        assert locations(await load(store)) == ["x", "y", "z"]

    @case
    async def test_an_empty_batch_returns_no_results(self, store: Store) -> None:
        assert await store.commit([]) == []
        assert await store.load([]) == []
        assert await store.records([]) == []

    @case
    async def test_a_rejected_write_does_not_affect_other_writes_of_its_batch(self, store: Store) -> None:
        await store.commit([run("r1", owner="a"), run("r2", owner="b"), run("r3", owner="a")])
        results = await store.commit([turn(0, entry(), id=id) for id in ("r1", "r2", "missing", "r3")])
        assert results == [Committed(), Superseded(), RunMissing(), Committed()]
        assert [(await load(store, id)).position for id in ("r1", "r2", "r3")] == [1, 0, 1]

    @case
    async def test_runs_are_loaded_in_the_order_of_the_ids(self, store: Store) -> None:
        await store.commit([run("r1"), run("r2")])
        snapshots = await store.load(["r2", "missing", "r1", "r2"])
        found = [snapshot.record.id if isinstance(snapshot, Snapshot) else snapshot for snapshot in snapshots]
        assert found == ["r2", None, "r1", "r2"]
        records = await store.records(["r2", "missing", "r1", "r2"])
        assert [row and row.id for row in records] == ["r2", None, "r1", "r2"]
