"""Runs are ended from outside, released and pruned."""

from __future__ import annotations

from perdure.model.records import Hold, RunStatus, Wait
from perdure.stores.protocol import Store
from perdure.stores.results import AlreadyEnded, AlreadyStarted, Committed, Created, RunMissing, Superseded
from perdure.stores.writes import ContinueAs, ReleaseRun, RunPatch
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
    record,
    run,
    succeeded,
    suspended,
    turn,
)


class EndRunCases(ContractCase):
    @case
    async def test_a_run_is_ended_from_outside_at_once(self, store: Store) -> None:
        held = Hold("diverged", "why")
        await store.commit(
            [run(owner="a"), turn(0, entry(), patch=suspended(500.0, held=held, waits=(Wait("timer"),)))]
        )
        assert await store.commit([end()]) == [Committed()]
        row = await record(store)
        assert (row.status, row.ended_at, row.updated_at) == (RunStatus.CANCELLED, 150.0, 150.0)
        assert (row.owner, row.wake_at, row.waits, row.held) == (None, None, (), None)
        assert await claim_ids(store, claim(now=900.0)) == []

    @case
    async def test_a_turn_computed_before_an_external_end_is_rejected(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry()), end(status=RunStatus.FAILED)])
        assert await store.commit([turn(1, entry("b", 1))]) == [AlreadyEnded(RunStatus.FAILED)]
        snapshot = await load(store)
        assert (snapshot.position, snapshot.record.fence, len(snapshot.entries)) == (2, 2, 1)
        assert len(await store.history("r")) == 1

    @case
    async def test_ending_is_idempotent_by_its_turn(self, store: Store) -> None:
        await store.commit([run(), end()])
        before = await load(store)
        assert await store.commit([end(now=190.0)]) == [Committed()], "its result was lost"
        assert await store.commit([end("another")]) == [AlreadyEnded(RunStatus.CANCELLED)]
        assert await load(store) == before

    @case
    async def test_an_ended_or_missing_run_cannot_be_ended(self, store: Store) -> None:
        assert await store.commit([end()]) == [RunMissing()]
        await store.commit([run(owner="a"), turn(0, entry(), patch=succeeded())])
        assert await store.commit([end()]) == [AlreadyEnded(RunStatus.SUCCEEDED)]

    @case
    async def test_only_if_not_started_ends_a_run_that_never_executed(self, store: Store) -> None:
        await store.commit([run()])
        assert await store.commit([end(only_if_not_started=True)]) == [Committed()]
        assert await store.commit([end(only_if_not_started=True)]) == [Committed()]

    @case
    async def test_only_if_not_started_does_not_end_a_run_that_has_executed(self, store: Store) -> None:
        await store.commit([run()])
        await claim_ids(store, claim("a"))
        assert await store.commit([end(only_if_not_started=True)]) == [AlreadyStarted()]
        await store.release_runs("a", 210.0, recovered=False)
        assert await store.commit([end(only_if_not_started=True)]) == [AlreadyStarted()]
        assert (await record(store)).status is RunStatus.RUNNING

    @case
    async def test_only_if_not_started_does_not_end_a_later_generation_before_its_start(self, store: Store) -> None:
        continue_as = ContinueAs(workflow="flow", version=1, input=b"", first_executed_at=None)
        patch = RunPatch(status=RunStatus.PENDING, wake_at=500.0)
        await store.commit([run(owner="a"), turn(0, continue_as=continue_as, patch=patch)])
        assert await store.commit([end(only_if_not_started=True)]) == [AlreadyStarted()]

    @case
    async def test_an_ended_run_has_no_owner(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver(), end()])
        assert await store.owned_with_messages("a") == []
        assert await store.release_runs("a", 160.0, recovered=True) == []

    # releasing

    @case
    async def test_a_released_run_is_due_at_once(self, store: Store) -> None:
        await store.commit([run("r", owner="a")])
        write = ReleaseRun(run_id="r", worker="a", now=130.0)
        assert await store.commit([write]) == [Committed()]
        row = await record(store)
        assert (row.owner, row.wake_at, row.recoveries, row.status) == (None, 130.0, 0, RunStatus.RUNNING)
        assert await store.commit([write]) == [Committed()], "its result was lost"
        assert await claim_ids(store, claim("b", 130.0)) == ["r"]
        assert await store.commit([write]) == [Superseded()]
        assert (await record(store)).owner == "b"

    @case
    async def test_only_the_owner_can_release_a_run(self, store: Store) -> None:
        await store.commit([run("r", owner="b"), run("r2", owner="a"), turn(0, id="r2", patch=succeeded())])
        for id in ("r", "r2", "missing"):
            assert await store.commit([ReleaseRun(run_id=id, worker="a", now=130.0)]) == [Superseded()]

    # pruning

    @case
    async def test_ended_runs_are_pruned_at_prune_at(self, store: Store) -> None:
        await store.commit([run("r1", owner="a"), turn(0, entry(), id="r1", patch=succeeded(prune_at=300.0))])
        await store.commit([run("r"), deliver(kind="resume"), end(prune_after=100.0)])
        await store.commit([run("r3", owner="a"), turn(0, entry(), id="r3", patch=succeeded())])
        await store.commit([run("r4", owner="a"), turn(0, entry(), id="r4", patch=suspended(prune_at=200.0))])
        assert await store.prune(249.0) == []
        assert len(await store.prune(250.0)) == 1
        assert len(await store.prune(300.0)) == 1
        assert await store.prune(9e9) == [], "r3 has no prune_at, r4 has not ended"
        found = await store.records(["r", "r1", "r3", "r4"])
        assert [row.id if row else None for row in found] == [None, None, "r3", "r4"]

    @case
    async def test_pruning_is_paged_and_deletes_all_data_of_a_run(self, store: Store) -> None:
        for n in range(5):
            id = f"r{n}"
            await store.commit(
                [run(id, owner="a"), deliver(id=id), turn(0, entry(), id=id, patch=succeeded(prune_at=200.0))]
            )
            await store.commit([finalize(id, consumed=(1,))])
        assert [len(await store.prune(200.0, limit=2)) for _ in range(4)] == [2, 2, 1, 0]
        assert await store.history("r0") == []
        assert await store.commit([run("r0", created_by="another", owner="a")]) == [Created(owned=True)]
        snapshot = await load(store, "r0")
        assert (snapshot.position, snapshot.entries, snapshot.inbox) == (0, (), ())
