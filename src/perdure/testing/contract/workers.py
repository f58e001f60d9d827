"""Claims and workers: each run has one owner, and none that is gone."""

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
    entry,
    mail,
    record,
    run,
    succeeded,
    suspended,
    take,
    turn,
    worker,
)


class FleetCases(ContractCase):
    @case
    async def test_a_claimed_run_is_running_and_begun(self, store: Store) -> None:
        await store.commit([run()])
        assert await take(store, claim("a", 130.0)) == ["r"]
        row = await record(store)
        assert (row.status, row.owner, row.wake_at, row.first_executed_at) == (RunStatus.RUNNING, "a", None, 130.0)
        await store.commit([turn(0, patch=suspended(140.0))])
        assert await take(store, claim("b", 150.0)) == ["r"]
        assert (await record(store)).first_executed_at == 130.0, "it began when it first executed"

    @case
    async def test_claims_go_by_workflow_version_pool_and_shard(self, store: Store) -> None:
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
        assert await take(store, claim(workflows=())) == []
        assert await take(store, claim(workflows=(("flow", 2), ("other", 2), ("none", 1)))) == ["r2"]
        assert await take(store, claim(pool="gpu")) == ["r4"]
        assert await take(store, claim(shards=frozenset())) == []
        assert await take(store, claim(shards=frozenset((5, 7)))) == ["r5"]
        assert await take(store, claim(workflows=(FLOW, ("other", 1)))) == ["r1", "r3", "r6"]

    @case
    async def test_earliest_first_and_equal_wake_ups_by_id(self, store: Store) -> None:
        ids = ["c", "a#10", "a#9", "b"]
        await store.commit(
            [run(id, wake_at=150.0) for id in ids] + [run("z", wake_at=149.0), run("late", wake_at=151.0)]
        )
        assert await take(store, claim(now=150.0, limit=2)) == ["z", "a#10"]
        assert await take(store, claim(now=150.0, limit=10)) == ["a#9", "b", "c"]
        assert await take(store, claim(now=150.0)) == []

    @case
    async def test_earliest_first_over_all_shards_page_by_page(self, store: Store) -> None:
        moments = {f"r{n * 7 % 200:03}": 100.0 + n * 37 % 50 for n in range(200)}
        shards = {id: n % SHARDS if n % 2 else 0 for n, id in enumerate(moments)}  # half of them in the first
        await store.commit([run(id, wake_at=at, shard=shards[id]) for id, at in moments.items()])
        taken = [id for limit in (1, 7, 40, 100, 500) for id in await take(store, claim(limit=limit))]
        assert taken == sorted(moments, key=lambda id: (moments[id], id))

    @case
    async def test_earliest_first_across_workflows(self, store: Store) -> None:
        await store.commit([run(f"r{n}", workflow=f"w{n % 3}", wake_at=150.0 - n) for n in range(9)])
        pairs = tuple((f"w{n}", 1) for n in range(3))
        assert await take(store, claim(workflows=pairs, limit=4)) == ["r8", "r7", "r6", "r5"]

    @case
    async def test_only_what_has_been_due_for_long_if_asked_so(self, store: Store) -> None:
        await store.commit([run("long", wake_at=110.0), run("just", wake_at=120.0), run("not", wake_at=121.0)])
        assert await take(store, claim(now=150.0, due_by=120.0)) == ["long", "just"]
        assert ((await record(store, "long")).first_executed_at, (await record(store, "long")).updated_at) == (
            150.0,
            150.0,
        )
        assert await take(store, claim(now=150.0)) == ["not"]

    @case
    async def test_a_thousand_due_runs_are_paged_exactly_once(self, store: Store) -> None:
        other = await self.second(store)
        ids = [f"r{n:04d}" for n in range(1000)]
        await store.commit([run(id, wake_at=120.0) for id in ids])
        given: list[str] = []
        while True:
            pages = await asyncio.gather(take(store, claim("a", limit=37)), take(other, claim("b", limit=41)))
            given += pages[0] + pages[1]
            if not pages[0] and not pages[1]:
                break
        assert sorted(given) == ids
        assert await store.next_wake("default") is None

    @case
    async def test_a_claim_says_how_far_the_mail_has_come(self, store: Store) -> None:
        await store.commit([run("r1"), run("r2"), mail("m1", id="r2"), mail("m2", id="r2")])
        assert await store.claim(claim()) == [ClaimedRun("r1", 0), ClaimedRun("r2", 2)]

    @case
    async def test_a_worker_finds_its_runs_after_the_answer_to_a_claim_got_lost(self, store: Store) -> None:
        await store.commit([run(f"r{n}") for n in range(4)] + [run("of b", owner="b")])
        assert await store.owned("a") == []
        await store.claim(claim("a", limit=3))
        assert await store.owned("a") == ["r0", "r1", "r2"]
        await store.release_runs("a", 210.0, recovered=False, limit=1)
        assert len(await store.owned("a")) == 2

    @case
    async def test_nothing_is_given_to_a_worker_that_is_gone_or_unknown(self, store: Store) -> None:
        await store.commit([run()])
        await store.fence_worker("a")
        assert await take(store, claim("a")) == []
        assert await take(store, claim("stranger")) == []
        assert await take(store, claim("b")) == ["r"]

    @case
    async def test_the_next_wake_up_is_the_earliest_of_the_pool(self, store: Store) -> None:
        assert await store.next_wake("default") is None
        await store.commit([run("r1", wake_at=170.0), run("r2", workflow="zoo", wake_at=160.0), run("r3", pool="gpu")])
        await store.commit([run("r4", owner="a"), run("r5", owner="a"), turn(0, id="r5", patch=suspended(165.0))])
        assert (await store.next_wake("default"), await store.next_wake("gpu")) == (160.0, 100.0)
        await take(store, claim(workflows=(("zoo", 1),)))
        assert await store.next_wake("default") == 165.0
        await store.commit([turn(1, id="r5", owned=False, patch=succeeded())])
        assert await store.next_wake("default") == 170.0

    @case
    async def test_a_run_without_a_wake_up_is_never_due(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=suspended(None))])
        assert await take(store, claim(now=9e9)) == []
        assert await store.next_wake("default") is None

    # workers

    @case
    async def test_workers_are_kept_as_they_said(self, store: Store) -> None:
        row = worker("c", pool="gpu", workflows=(("f", 1), ("f", 2)), node="host/1", pid=42)
        assert await store.join(row)
        assert [w.id for w in await store.workers()] == ["a", "b", "c"]
        assert (await store.workers())[2] == row
        renewed = worker("c", lease_until=2000.0)
        assert await store.renew(renewed)
        assert (await store.workers())[2] == renewed

    @case
    async def test_nobody_joins_under_the_id_of_another(self, store: Store) -> None:
        assert not await store.join(worker("a", lease_until=9e9))
        await store.fence_worker("b")
        assert not await store.join(worker("b", lease_until=9e9))
        assert [(w.id, w.lease_until, w.fenced) for w in await store.workers()] == [
            ("a", 1000.0, False),
            ("b", 1000.0, True),
        ]

    @case
    async def test_a_worker_declared_gone_cannot_come_back(self, store: Store) -> None:
        assert await store.fence_worker("a")
        assert not await store.renew(worker("a", lease_until=9e9))
        gone = {w.id: (w.fenced, w.lease_until) for w in await store.workers()}
        assert gone == {"a": (True, 1000.0), "b": (False, 1000.0)}
        assert await store.fence_worker("a"), "its answer was lost"
        assert not await store.fence_worker("stranger")

    @case
    async def test_a_worker_that_renewed_in_time_is_not_declared_gone(self, store: Store) -> None:
        assert not await store.fence_worker("a", unless_renewed_after=999.0)
        assert await store.renew(worker("a"))
        assert await store.fence_worker("a", unless_renewed_after=1000.0)
        assert not await store.renew(worker("a"))

    @case
    async def test_a_renewal_races_with_the_declaration_and_one_wins(self, store: Store) -> None:
        other = await self.second(store)
        for n in range(10):
            await store.join(worker(f"w{n}", lease_until=200.0))
            renewed, gone = await asyncio.gather(
                store.renew(worker(f"w{n}", lease_until=300.0)), other.fence_worker(f"w{n}", unless_renewed_after=200.0)
            )
            assert renewed != gone

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
        assert await take(store, claim("b", 150.0)) == ids
        assert (await record(store, "of b")).owner == "b"

    @case
    async def test_a_recovery_is_counted_only_if_it_was_one(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        await store.release_runs("a", 150.0, recovered=False)
        await take(store, claim("a", 150.0))
        assert (await record(store)).recoveries == 0
        for count in (1, 2):
            await store.release_runs("a", 150.0, recovered=True)
            await take(store, claim("a", 150.0))
            assert (await record(store)).recoveries == count

    @case
    async def test_a_retired_worker_is_forgotten(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        await store.fence_worker("a")
        await store.release_runs("a", 150.0, recovered=True)
        await store.remove_worker("a")
        await store.remove_worker("stranger")
        assert [w.id for w in await store.workers()] == ["b"]

    @case
    async def test_a_renewal_that_comes_too_late_does_not_make_up_a_worker(self, store: Store) -> None:
        await store.fence_worker("a")
        await store.remove_worker("a")
        assert not await store.renew(worker("a")), "it was on its way when its sender was taken over"
        assert not await store.renew(worker("stranger"))
        assert [w.id for w in await store.workers()] == ["b"]
        await store.commit([run()])
        assert await take(store, claim("a", 150.0)) == []
        assert await take(store, claim("stranger", 150.0)) == []

    @case
    async def test_retiring_a_worker_never_loses_its_runs(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        await store.remove_worker("a")
        assert [(w.id, w.fenced) for w in await store.workers()] == [("a", True), ("b", False)]
        assert await store.release_runs("a", 150.0, recovered=True) == ["r"]

    @case
    async def test_a_worker_goes_on_after_renewing(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        await store.renew(worker("a", lease_until=5000.0))
        assert await store.commit([turn(0, entry())]) == [Committed()]
