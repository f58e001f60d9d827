"""Runs are made once, whoever asks and however often."""

from __future__ import annotations

import asyncio

from perdure.model.records import ErrorRecord, Hold, RunStatus, Wait
from perdure.stores.protocol import Store
from perdure.stores.results import Created, IdTaken
from perdure.stores.writes import EndRun
from perdure.testing.contract.builders import ContractCase, case, claim, load, record, run, take, worker


class CreatingCases(ContractCase):
    @case
    async def test_a_run_with_a_living_owner_is_born_claimed(self, store: Store) -> None:
        assert await store.commit([run(owner="a")]) == [Created(owned=True)]
        made = await record(store)
        assert (made.status, made.owner, made.first_executed_at, made.wake_at) == (RunStatus.RUNNING, "a", 100.0, None)
        assert await take(store, claim("b")) == []

    @case
    async def test_a_run_without_an_owner_is_due_at_once(self, store: Store) -> None:
        assert await store.commit([run()]) == [Created(owned=False)]
        made = await record(store)
        assert (made.status, made.owner, made.first_executed_at, made.wake_at) == (RunStatus.PENDING, None, None, 100.0)
        assert await take(store, claim(now=100.0)) == ["r"]

    @case
    async def test_a_delayed_run_is_due_at_its_time(self, store: Store) -> None:
        await store.commit([run(wake_at=150.0)])
        assert (await record(store)).wake_at == 150.0
        assert await take(store, claim(now=149.9)) == []
        assert await take(store, claim(now=150.0)) == ["r"]

    @case
    async def test_an_owner_that_is_unknown_or_gone_does_not_get_the_run(self, store: Store) -> None:
        await store.fence_worker("b")
        answers = await store.commit([run("r1", owner="b"), run("r2", owner="stranger")])
        assert answers == [Created(owned=False), Created(owned=False)]
        assert await take(store, claim("a")) == ["r1", "r2"]

    @case
    async def test_a_taken_id_answers_with_the_run_that_has_it(self, store: Store) -> None:
        await store.commit([run(input=b'{"n":1}', owner="a")])
        (answer,) = await store.commit([run(input=b'{"n":2}', created_by="another call")])
        assert isinstance(answer, IdTaken)
        assert answer.record == await record(store)
        assert answer.record.input == b'{"n":1}'

    @case
    async def test_a_repeated_call_after_a_lost_answer_created_the_run(self, store: Store) -> None:
        write = run(owner="a")
        assert await store.commit([write]) == [Created(owned=True)]
        assert await store.commit([write]) == [Created(owned=True)]
        await store.release_runs("a", 110.0, recovered=False)
        assert await store.commit([write]) == [Created(owned=False)], "it lost the run meanwhile"
        await store.commit([EndRun(run_id="r", turn_id="end", now=111.0)])
        assert await store.commit([write]) == [Created(owned=False)]

    @case
    async def test_the_same_id_twice_in_one_batch_is_one_run(self, store: Store) -> None:
        first, second, third = await store.commit([run(), run(created_by="another call"), run()])
        assert (first, third) == (Created(owned=False), Created(owned=False))
        assert isinstance(second, IdTaken)

    @case
    async def test_fifty_creators_of_one_id_make_one_run(self, store: Store) -> None:
        other = await self.second(store)
        calls = [(store, other)[i % 2].commit([run(created_by=f"call {i}", input=b"%d" % i)]) for i in range(50)]
        answers = [answer for (answer,) in await asyncio.gather(*calls)]
        assert answers.count(Created(owned=False)) == 1
        winner = await record(store)
        assert all(answer == IdTaken(winner) for answer in answers if not isinstance(answer, Created))
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
        made = await record(store)
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
            assert getattr(made, name) == getattr(write.record, name), name
        assert (made.input, made.deadline_at, made.retention) == (write.record.input, 1e9, 3.5)
        assert (made.created_at, made.updated_at, made.created_by) == (100.0, 100.0, "call-r")
        assert made == (await load(store)).record

    @case
    async def test_what_a_new_run_cannot_have_yet_is_not_taken_over(self, store: Store) -> None:
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
        made = snapshot.record
        assert (made.status, made.last_message_no, made.fence, snapshot.position) == (RunStatus.PENDING, 0, 0, 0)
        assert (made.waits, made.held, made.error, made.result, made.ended_at) == ((), None, None, None, None)
        assert (made.recoveries, made.drift) == (0, ())

    @case
    async def test_a_worker_can_own_what_it_made_before_it_was_declared_gone(self, store: Store) -> None:
        await store.join(worker("c"))
        await store.commit([run(owner="c")])
        await store.fence_worker("c")
        assert await store.commit([run(owner="c")]) == [Created(owned=True)], "until it is released, the row says so"
