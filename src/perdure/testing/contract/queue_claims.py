"""Claims through the gates of queues that limit runs per worker, and change hints about queues."""

from __future__ import annotations

import asyncio

from perdure.model.records import queue_hint
from perdure.stores.protocol import Store
from perdure.stores.writes import Write
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
)
from perdure.testing.contract.queue_builders import (
    admit_now,
    configure,
    leave,
    queued,
    requeue_ended,
    view_of,
)


class QueueClaimCases(ContractCase):
    @case
    async def test_runs_with_a_gate_are_claimed_only_by_its_name(self, store: Store) -> None:
        await store.commit([configure(worker_concurrency=2), *(queued(f"r{n}") for n in range(3)), run("plain")])
        await admit_now(store, 3, gate=True)
        assert (await record(store, "r0")).gate == "q"
        assert await claim_ids(store, claim(gates=(("other", 5),))) == ["plain"]
        assert await claim_ids(store, claim(gates=(("q", 0),))) == []
        assert await claim_ids(store, claim(gates=(("q", 2),))) == ["r0", "r1"]
        assert await store.next_wake("default") == 200.0
        assert await claim_ids(store, claim("b", gates=(("q", 2),))) == ["r2"]

    @case
    async def test_a_queue_without_a_worker_limit_has_no_gate(self, store: Store) -> None:
        await store.commit([configure(), queued()])
        await admit_now(store, 1)
        assert (await record(store)).gate == ""
        assert await claim_ids(store, claim(gates=(("q", 0),))) == ["r"]

    @case
    async def test_gates_are_passed_for_all_shards(self, store: Store) -> None:
        await store.commit([configure(), *(queued(f"r{n}", shard=n) for n in range(4)), run("s1", shard=1)])
        await store.commit([run("s9", shard=9)])
        await admit_now(store, 4, gate=True)
        claimed = await claim_ids(store, claim(shards=frozenset((1,)), gates=(("q", 3),)))
        assert claimed == ["s1", "r0", "r1", "r2"]
        assert await claim_ids(store, claim(shards=frozenset(), gates=(("q", 3),))) == ["r3"]

    @case
    async def test_the_limit_of_a_claim_counts_all_runs_earliest_first(self, store: Store) -> None:
        await store.commit([configure(), configure("p"), queued("q1"), queued("q2"), queued("p1", "p")])
        await admit_now(store, 2, gate=True, now=150.0)
        await admit_now(store, 1, gate=True, now=140.0, queue="p")
        await store.commit([run("r1", wake_at=145.0), run("r2", wake_at=160.0)])
        gates = (("q", 5), ("p", 5))
        assert await claim_ids(store, claim(limit=3, gates=gates)) == ["p1", "r1", "q1"]
        assert await claim_ids(store, claim(due_by=155.0, gates=gates)) == ["q2"]
        assert await claim_ids(store, claim(gates=gates)) == ["r2"]

    @case
    async def test_gates_respect_workflow_version_and_pool(self, store: Store) -> None:
        await store.commit([configure(), queued("v2", version=2), queued("gpu", pool="gpu"), queued("r")])
        served = (("flow", 1, "default"), ("flow", 2, "default"), ("flow", 1, "gpu"))
        await admit_now(store, 3, gate=True, serves=served)
        assert await claim_ids(store, claim(gates=(("q", 9),))) == ["r"]
        assert await claim_ids(store, claim(gates=(("q", 9),), pool="gpu")) == ["gpu"]
        assert await claim_ids(store, claim(gates=(("q", 9),), workflows=(("flow", 2),))) == ["v2"]

    @case
    async def test_a_run_passes_its_gate_after_each_suspension(self, store: Store) -> None:
        await store.commit([configure(), queued()])
        await admit_now(store, 1, gate=True)
        assert await claim_ids(store, claim(gates=(("q", 1),))) == ["r"]
        await store.commit([turn(0, patch=suspended(None))])
        await store.commit([deliver(now=210.0)])
        assert (await record(store)).gate == "q"
        assert await claim_ids(store, claim(now=300.0)) == []
        assert await claim_ids(store, claim(now=300.0, gates=(("q", 1),))) == ["r"]
        assert await store.release_runs("a", 310.0, recovered=True) == ["r"]
        assert await claim_ids(store, claim("b", now=310.0)) == []
        assert await claim_ids(store, claim("b", now=310.0, gates=(("q", 1),))) == ["r"]

    @case
    async def test_the_next_wake_up_leaves_out_runs_behind_other_gates(self, store: Store) -> None:
        await store.commit([configure(), configure("p"), queued("q1"), queued("p1", "p"), run(wake_at=170.0)])
        await admit_now(store, 1, gate=True, now=150.0)
        await admit_now(store, 1, gate=True, now=160.0, queue="p")
        given: tuple[tuple[str, ...] | None, ...] = (None, (), ("q",), ("p",), ("p", "q"), ("other",))
        found = [await store.next_wake("default", gates) for gates in given]
        assert found == [150.0, 170.0, 150.0, 160.0, 150.0, 170.0]

    @case
    async def test_concurrent_claims_through_a_gate_get_each_run_once(self, store: Store) -> None:
        await store.commit([configure(), *(queued(f"r{n:02}") for n in range(20))])
        await admit_now(store, 20, gate=True)
        handles = (store, await self.second(store))
        calls = [claim_ids(handles[n % 2], claim("ab"[n % 2], gates=(("q", 3),))) for n in range(8)]
        found = await asyncio.gather(*calls)
        assert all(len(ids) <= 3 for ids in found)
        claimed = [id for ids in found for id in ids]
        assert len(claimed) == len(set(claimed))


class QueueHintCases(ContractCase):
    @case
    async def test_listeners_are_notified_of_queues_that_need_an_admission(self, store: Store) -> None:
        changes: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        unsubscribe = store.on_change(changes.put_nowait)

        async def wait_for(*names: str) -> None:
            """Wait until all names were in hints; a hint about anything has them all."""
            missing = set(names)
            while missing:
                ids = await asyncio.wait_for(changes.get(), 10)
                missing = set() if ids is None else missing - ids

        hint = queue_hint("q")
        await store.commit([configure(partitioned=True)])
        await wait_for(hint)
        for write in (queued("r0"), queued("r1"), queued("late", eligible_at=500.0)):
            await store.commit([write])
            await wait_for(hint)
        await admit_now(store, 2)
        await wait_for("r0", "r1")
        await claim_ids(store, claim())
        frees: tuple[Write, ...] = (turn(0, id="r0", patch=succeeded()), end(id="r1"), requeue_ended(1, id="r1"))
        for freeing in frees:
            await store.commit([freeing])
            await wait_for(hint)
        version = (await view_of(store)).version
        await store.commit([configure(base=version, partitioned=True, concurrency=4)])
        await wait_for(hint)
        await admit_now(store, 1)
        await wait_for("r1")
        await store.commit([leave("r1", "q", 220.0)])
        await wait_for(hint)
        await store.commit([leave("late", "q", 220.0)])
        await wait_for("late")
        unsubscribe()

    @case
    async def test_a_resumed_waiting_run_notifies_its_queue(self, store: Store) -> None:
        await store.commit([configure(), queued(), deliver("p", kind="pause")])
        changes: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        unsubscribe = store.on_change(changes.put_nowait)
        await store.commit([deliver("m", kind="resume")])
        while (ids := await asyncio.wait_for(changes.get(), 10)) is not None and queue_hint("q") not in ids:
            pass
        unsubscribe()
