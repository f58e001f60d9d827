"""Claims and workers: a run has at most one owner, and never a fenced one."""

from __future__ import annotations

import asyncio

from perdure.model.records import RunStatus
from perdure.stores.protocol import Store
from perdure.stores.results import ClaimedRun, Committed
from perdure.testing.contract.builders import (
    FLOW,
    SHARDS,
    ContractCase,
    case,
    claim,
    claim_ids,
    deliver,
    entry,
    record,
    run,
    succeeded,
    suspended,
    turn,
    worker,
)


class WorkerCases(ContractCase):
    @case
    async def test_a_claim_sets_status_owner_and_first_execution(self, store: Store) -> None:
        await store.commit([run()])
        assert await claim_ids(store, claim("a", 130.0)) == ["r"]
        row = await record(store)
        assert (row.status, row.owner, row.wake_at, row.first_executed_at) == (RunStatus.RUNNING, "a", None, 130.0)
        await store.commit([turn(0, patch=suspended(140.0))])
        assert await claim_ids(store, claim("b", 150.0)) == ["r"]
        assert (await record(store)).first_executed_at == 130.0, "it is set by the first claim"

    @case
    async def test_claims_are_filtered_by_workflow_version_pool_and_shard(self, store: Store) -> None:
        await store.commit(
            [
                run("r1"),
                run("r2", version=2),
                run("r3", workflow="other"),
                run("r4", pool="gpu"),
                run("r5", shard=5),
                run("r6", shard=6),
            ]
        )
        assert await claim_ids(store, claim(workflows=())) == []
        assert await claim_ids(store, claim(workflows=(("flow", 2), ("other", 2), ("none", 1)))) == ["r2"]
        assert await claim_ids(store, claim(pool="gpu")) == ["r4"]
        assert await claim_ids(store, claim(shards=frozenset())) == []
        assert await claim_ids(store, claim(shards=frozenset((5, 7)))) == ["r5"]
        assert await claim_ids(store, claim(workflows=(FLOW, ("other", 1)))) == ["r1", "r3", "r6"]

    @case
    async def test_claims_return_the_earliest_runs_first_and_equal_times_by_id(self, store: Store) -> None:
        ids = ["c", "a#10", "a#9", "b"]
        await store.commit(
            [run(id, wake_at=150.0) for id in ids] + [run("z", wake_at=149.0), run("late", wake_at=151.0)]
        )
        assert await claim_ids(store, claim(now=150.0, limit=2)) == ["z", "a#10"]
        assert await claim_ids(store, claim(now=150.0, limit=10)) == ["a#9", "b", "c"]
        assert await claim_ids(store, claim(now=150.0)) == []

    @case
    async def test_claims_return_the_earliest_runs_first_over_all_shards(self, store: Store) -> None:
        wake_times = {f"r{n * 7 % 200:03}": 100.0 + n * 37 % 50 for n in range(200)}
        shards = {
            id: n % SHARDS if n % 2 else 0 for n, id in enumerate(wake_times)
        }  # half of the runs in the first shard
        await store.commit([run(id, wake_at=at, shard=shards[id]) for id, at in wake_times.items()])
        claimed = [id for limit in (1, 7, 40, 100, 500) for id in await claim_ids(store, claim(limit=limit))]
        assert claimed == sorted(wake_times, key=lambda id: (wake_times[id], id))

    @case
    async def test_claims_return_the_earliest_runs_first_across_workflows(self, store: Store) -> None:
        await store.commit([run(f"r{n}", workflow=f"w{n % 3}", wake_at=150.0 - n) for n in range(9)])
        pairs = tuple((f"w{n}", 1) for n in range(3))
        assert await claim_ids(store, claim(workflows=pairs, limit=4)) == ["r8", "r7", "r6", "r5"]

    @case
    async def test_due_by_limits_a_claim_to_runs_that_were_due_by_then(self, store: Store) -> None:
        await store.commit([run("long", wake_at=110.0), run("just", wake_at=120.0), run("not", wake_at=121.0)])
        assert await claim_ids(store, claim(now=150.0, due_by=120.0)) == ["long", "just"]
        assert ((await record(store, "long")).first_executed_at, (await record(store, "long")).updated_at) == (
            150.0,
            150.0,
        )
        assert await claim_ids(store, claim(now=150.0)) == ["not"]

    @case
    async def test_concurrent_claims_return_each_run_exactly_once(self, store: Store) -> None:
        other = await self.second(store)
        ids = [f"r{n:04d}" for n in range(1000)]
        await store.commit([run(id, wake_at=120.0) for id in ids])
        claimed: list[str] = []
        while True:
            pages = await asyncio.gather(claim_ids(store, claim("a", limit=37)), claim_ids(other, claim("b", limit=41)))
            claimed += pages[0] + pages[1]
            if not pages[0] and not pages[1]:
                break
        assert sorted(claimed) == ids
        assert await store.next_wake("default") is None

    @case
    async def test_a_claim_returns_the_last_message_number(self, store: Store) -> None:
        await store.commit([run("r1"), run("r2"), deliver("m1", id="r2"), deliver("m2", id="r2")])
        assert await store.claim(claim()) == [ClaimedRun("r1", 0), ClaimedRun("r2", 2)]

    @case
    async def test_a_worker_finds_its_runs_after_a_lost_claim_result(self, store: Store) -> None:
        await store.commit([run(f"r{n}") for n in range(4)] + [run("of b", owner="b")])
        assert await store.owned("a") == []
        await store.claim(claim("a", limit=3))
        assert await store.owned("a") == ["r0", "r1", "r2"]
        await store.release_runs("a", 210.0, recovered=False, limit=1)
        assert len(await store.owned("a")) == 2

    @case
    async def test_a_fenced_or_unknown_worker_claims_nothing(self, store: Store) -> None:
        await store.commit([run()])
        await store.fence_worker("a")
        assert await claim_ids(store, claim("a")) == []
        assert await claim_ids(store, claim("unknown")) == []
        assert await claim_ids(store, claim("b")) == ["r"]

    @case
    async def test_next_wake_returns_the_earliest_wake_up_of_the_pool(self, store: Store) -> None:
        assert await store.next_wake("default") is None
        await store.commit([run("r1", wake_at=170.0), run("r2", workflow="zoo", wake_at=160.0), run("r3", pool="gpu")])
        await store.commit([run("r4", owner="a"), run("r5", owner="a"), turn(0, id="r5", patch=suspended(165.0))])
        assert (await store.next_wake("default"), await store.next_wake("gpu")) == (160.0, 100.0)
        await claim_ids(store, claim(workflows=(("zoo", 1),)))
        assert await store.next_wake("default") == 165.0
        await store.commit([turn(1, id="r5", owned=False, patch=succeeded())])
        assert await store.next_wake("default") == 170.0

    @case
    async def test_a_run_without_a_wake_up_is_never_due(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=suspended(None))])
        assert await claim_ids(store, claim(now=9e9)) == []
        assert await store.next_wake("default") is None

    # workers

    @case
    async def test_worker_records_come_back_unchanged(self, store: Store) -> None:
        row = worker("c", pool="gpu", workflows=(("f", 1), ("f", 2)), host="host/1", pid=42)
        assert await store.join(row)
        assert [w.id for w in await store.workers()] == ["a", "b", "c"]
        assert (await store.workers())[2] == row
        renewed = worker("c", lease_until=2000.0)
        assert await store.renew(renewed)
        assert (await store.workers())[2] == renewed

    @case
    async def test_a_worker_cannot_join_under_a_taken_id(self, store: Store) -> None:
        assert not await store.join(worker("a", lease_until=9e9))
        await store.fence_worker("b")
        assert not await store.join(worker("b", lease_until=9e9))
        assert [(w.id, w.lease_until, w.fenced) for w in await store.workers()] == [
            ("a", 1000.0, False),
            ("b", 1000.0, True),
        ]

    @case
    async def test_a_fenced_worker_cannot_renew(self, store: Store) -> None:
        assert await store.fence_worker("a")
        assert not await store.renew(worker("a", lease_until=9e9))
        fenced = {w.id: (w.fenced, w.lease_until) for w in await store.workers()}
        assert fenced == {"a": (True, 1000.0), "b": (False, 1000.0)}
        assert await store.fence_worker("a"), "its result was lost"
        assert not await store.fence_worker("unknown")

    @case
    async def test_a_worker_that_renewed_in_time_is_not_fenced(self, store: Store) -> None:
        assert not await store.fence_worker("a", unless_renewed_after=999.0)
        assert await store.renew(worker("a"))
        assert await store.fence_worker("a", unless_renewed_after=1000.0)
        assert not await store.renew(worker("a"))

    @case
    async def test_of_a_concurrent_renewal_and_fencing_one_succeeds(self, store: Store) -> None:
        other = await self.second(store)
        for n in range(10):
            await store.join(worker(f"w{n}", lease_until=200.0))
            renewed, fenced = await asyncio.gather(
                store.renew(worker(f"w{n}", lease_until=300.0)), other.fence_worker(f"w{n}", unless_renewed_after=200.0)
            )
            assert renewed != fenced

    @case
    async def test_the_runs_of_a_worker_are_released_in_pages(self, store: Store) -> None:
        ids = [f"r{n}" for n in range(5)]
        await store.commit([run(id, owner="a") for id in ids] + [run("of b", owner="b")])
        await store.fence_worker("a")
        pages = [await store.release_runs("a", 150.0, recovered=True, limit=2) for _ in range(4)]
        assert [len(page) for page in pages] == [2, 2, 1, 0]
        assert sorted(id for page in pages for id in page) == ids
        row = await record(store, "r0")
        assert (row.owner, row.wake_at, row.recoveries, row.status) == (None, 150.0, 1, RunStatus.RUNNING)
        assert await claim_ids(store, claim("b", 150.0)) == ids
        assert (await record(store, "of b")).owner == "b"

    @case
    async def test_release_counts_a_recovery_only_if_recovered(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        await store.release_runs("a", 150.0, recovered=False)
        await claim_ids(store, claim("a", 150.0))
        assert (await record(store)).recoveries == 0
        for count in (1, 2):
            await store.release_runs("a", 150.0, recovered=True)
            await claim_ids(store, claim("a", 150.0))
            assert (await record(store)).recoveries == count

    @case
    async def test_a_removed_worker_is_not_listed(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        await store.fence_worker("a")
        await store.release_runs("a", 150.0, recovered=True)
        await store.remove_worker("a")
        await store.remove_worker("unknown")
        assert [w.id for w in await store.workers()] == ["b"]

    @case
    async def test_a_late_renewal_does_not_create_a_worker(self, store: Store) -> None:
        await store.fence_worker("a")
        await store.remove_worker("a")
        assert not await store.renew(worker("a")), "it was sent before the worker was fenced"
        assert not await store.renew(worker("unknown"))
        assert [w.id for w in await store.workers()] == ["b"]
        await store.commit([run()])
        assert await claim_ids(store, claim("a", 150.0)) == []
        assert await claim_ids(store, claim("unknown", 150.0)) == []

    @case
    async def test_removing_a_worker_that_owns_runs_fences_it(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        await store.remove_worker("a")
        assert [(w.id, w.fenced) for w in await store.workers()] == [("a", True), ("b", False)]
        assert await store.release_runs("a", 150.0, recovered=True) == ["r"]

    @case
    async def test_a_renewed_worker_commits_turns(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        await store.renew(worker("a", lease_until=5000.0))
        assert await store.commit([turn(0, entry())]) == [Committed()]
