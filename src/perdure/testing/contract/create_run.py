"""A run is created once, by any caller and however often the call is repeated."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from perdure.model.records import ErrorRecord, Hold, RunStatus, Wait
from perdure.stores.protocol import Store
from perdure.stores.results import Created, IdTaken, Superseded
from perdure.stores.writes import EndRun
from perdure.testing.contract.builders import ContractCase, case, claim, claim_ids, load, record, run, worker


class CreateRunCases(ContractCase):
    @case
    async def test_a_new_run_with_a_live_owner_is_claimed_at_creation(self, store: Store) -> None:
        assert await store.commit([run(owner="a")]) == [Created(owned=True)]
        created = await record(store)
        assert (created.status, created.owner, created.first_executed_at, created.wake_at) == (
            RunStatus.RUNNING,
            "a",
            100.0,
            None,
        )
        assert await claim_ids(store, claim("b")) == []

    @case
    async def test_status_and_times_of_a_new_run_are_derived_from_its_owner(self, store: Store) -> None:
        given = {"status": RunStatus.SUSPENDED, "first_executed_at": 5.0, "updated_at": 6.0}
        await store.commit([run("r1", owner="a", wake_at=150.0, **given)])
        await store.commit([run("r2", owner="unknown", wake_at=150.0, **given), run("r3", **given)])
        rows = [await record(store, id) for id in ("r1", "r2", "r3")]
        assert [(row.status, row.owner, row.first_executed_at, row.wake_at) for row in rows] == [
            (RunStatus.RUNNING, "a", 100.0, None),
            (RunStatus.PENDING, None, None, 150.0),
            (RunStatus.PENDING, None, None, 100.0),
        ]
        assert [row.updated_at for row in rows] == [100.0] * 3

    @case
    async def test_a_run_without_an_owner_is_due_at_once(self, store: Store) -> None:
        assert await store.commit([run()]) == [Created(owned=False)]
        created = await record(store)
        assert (created.status, created.owner, created.first_executed_at, created.wake_at) == (
            RunStatus.PENDING,
            None,
            None,
            100.0,
        )
        assert await claim_ids(store, claim(now=100.0)) == ["r"]

    @case
    async def test_a_delayed_run_is_due_at_its_time(self, store: Store) -> None:
        await store.commit([run(wake_at=150.0)])
        assert (await record(store)).wake_at == 150.0
        assert await claim_ids(store, claim(now=149.9)) == []
        assert await claim_ids(store, claim(now=150.0)) == ["r"]

    @case
    async def test_a_new_run_of_an_unknown_or_fenced_owner_has_no_owner(self, store: Store) -> None:
        await store.fence_worker("b")
        results = await store.commit([run("r1", owner="b"), run("r2", owner="unknown")])
        assert results == [Created(owned=False), Created(owned=False)]
        assert await claim_ids(store, claim("a")) == ["r1", "r2"]

    @case
    async def test_a_fenced_or_unknown_worker_creates_no_run(self, store: Store) -> None:
        write = run("r1")
        assert await store.commit([replace(write, by="a")]) == [Created(owned=False)]
        assert await store.commit([replace(write, by="a")]) == [Created(owned=False)], "a repeated call"
        assert await store.commit([replace(run("r2"), by="unknown")]) == [Superseded()]
        await store.fence_worker("a")
        writes = [replace(write, by="a"), replace(run("r1", created_by="other"), by="a"), replace(run("r2"), by="a")]
        assert await store.commit(writes) == [Superseded()] * 3
        assert (await store.records(["r1", "r2"]))[1] is None
        assert await store.commit([run("r2")]) == [Created(owned=False)]

    @case
    async def test_creating_a_run_with_a_taken_id_returns_the_existing_run(self, store: Store) -> None:
        await store.commit([run(input=b'{"n":1}', owner="a")])
        (result,) = await store.commit([run(input=b'{"n":2}', created_by="another call")])
        assert isinstance(result, IdTaken)
        assert result.record == await record(store)
        assert result.record.input == b'{"n":1}'

    @case
    async def test_a_repeated_creation_is_recognised_after_a_lost_result(self, store: Store) -> None:
        write = run(owner="a")
        assert await store.commit([write]) == [Created(owned=True)]
        assert await store.commit([write]) == [Created(owned=True)]
        await store.release_runs("a", 110.0, recovered=False)
        assert await store.commit([write]) == [Created(owned=False)], "the worker has lost the run meanwhile"
        await store.commit([EndRun(run_id="r", turn_id="end", now=111.0)])
        assert await store.commit([write]) == [Created(owned=False)]

    @case
    async def test_the_same_id_twice_in_one_batch_is_one_run(self, store: Store) -> None:
        first, second, third = await store.commit([run(), run(created_by="another call"), run()])
        assert (first, third) == (Created(owned=False), Created(owned=False))
        assert isinstance(second, IdTaken)

    @case
    async def test_concurrent_creations_of_one_id_create_one_run(self, store: Store) -> None:
        other = await self.second(store)
        calls = [(store, other)[i % 2].commit([run(created_by=f"call {i}", input=b"%d" % i)]) for i in range(50)]
        results = [result for (result,) in await asyncio.gather(*calls)]
        assert results.count(Created(owned=False)) == 1
        winner = await record(store)
        assert all(result == IdTaken(winner) for result in results if not isinstance(result, Created))
        assert winner.created_by == f"call {int(winner.input)}"

    @case
    async def test_every_field_of_a_run_comes_back(self, store: Store) -> None:
        write = run(
            input=b'{"x": "\xc3\xa9"}',
            seed=2**64 - 1,
            pool="gpu",
            shard=3,
            generation=2,
            epoch=1,
            run_attempt=4,
            original_workflow="before",
            original_input=b"\x00\xff",
            parent="above",
            attached=True,
            tags={"city": "Zürich", "": "empty", 'quo"te': "'"},
            deadline_at=1e9,
            retention=3.5,
        )
        await store.commit([write])
        created = await record(store)
        for name in (
            "seed",
            "pool",
            "shard",
            "generation",
            "epoch",
            "run_attempt",
            "original_workflow",
            "original_input",
            "parent",
            "attached",
            "tags",
        ):
            assert getattr(created, name) == getattr(write.record, name), name
        assert (created.input, created.deadline_at, created.retention) == (write.record.input, 1e9, 3.5)
        assert (created.created_at, created.updated_at, created.created_by) == (100.0, 100.0, "call-r")
        assert created == (await load(store)).record

    @case
    async def test_outcome_and_progress_fields_of_a_new_run_are_ignored(self, store: Store) -> None:
        write = run(
            status=RunStatus.SUCCEEDED,
            last_message_no=9,
            fence=9,
            waits=(Wait("timer"),),
            held=Hold("poison", "no"),
            error=ErrorRecord("E", "no"),
            result=b"1",
            ended_at=5.0,
            recoveries=3,
            drift=("here",),
        )
        await store.commit([write])
        snapshot = await load(store)
        created = snapshot.record
        assert (created.status, created.last_message_no, created.fence, snapshot.position) == (
            RunStatus.PENDING,
            0,
            0,
            0,
        )
        assert (created.waits, created.held, created.error, created.result, created.ended_at) == (
            (),
            None,
            None,
            None,
            None,
        )
        assert (created.recoveries, created.drift) == (0, ())

    @case
    async def test_a_fenced_worker_owns_the_run_it_created_until_the_run_is_released(self, store: Store) -> None:
        await store.join(worker("c"))
        await store.commit([run(owner="c")])
        await store.fence_worker("c")
        assert await store.commit([run(owner="c")]) == [Created(owned=True)], (
            "the row keeps its owner until the run is released"
        )
