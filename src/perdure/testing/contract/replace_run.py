"""A new run replaces an ended one under the same id; late writes to the old generation change nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace

from perdure.model.queries import RunQuery
from perdure.model.records import Message, PublishedValue, RunStatus, StreamItem
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, Created, IdTaken, MessageDelivered, Superseded
from perdure.stores.writes import CreateRun, Observer, Predecessor, RewindRun
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
    locations,
    observe,
    record,
    run,
    succeeded,
    turn,
    unfinalized,
    worker,
)


def restart(created_by: str = "again", *inbox: Message, **fields: Any) -> CreateRun:
    """Build a run that replaces generation 0 of the run that `run()` has created."""
    given = {"created_at": 200.0, "generation": 1, "epoch": 1, "input": b'{"n":2}', **fields}
    return replace(run(created_by=created_by, **given), replaces=Predecessor("call-r", 0), inbox=inbox)


def message(id: str, body: bytes = b"1") -> Message:
    """Build an unread event of a new run."""
    return Message(id=id, kind="event", name="approved", body=body, sent_at=200.0)


class ReplaceRunCases(ContractCase):
    @case
    async def test_an_ended_run_is_replaced_with_all_that_it_owns(self, store: Store) -> None:
        extras = TurnExtras(
            published=(PublishedValue("k", b"1"),), streamed=(StreamItem(stream="s", value=b"1", location="a", at=1.0),)
        )
        await store.commit([run(owner="a", original_workflow="before", tags={"old": "1"})])
        await store.commit([deliver("m"), turn(0, entry("a"), extras=extras, seen=1, consumed=(1,))])
        await store.commit([turn(1, patch=succeeded(prune_at=900.0))])
        assert await store.commit([restart(tags={"new": "1"})]) == [Created(owned=False)]
        snapshot = await load(store)
        new = snapshot.record
        assert (snapshot.entries, snapshot.inbox) == ((), ())
        assert (new.input, new.created_by, new.created_at) == (b'{"n":2}', "again", 200.0)
        assert (new.generation, new.epoch, new.original_workflow, new.tags) == (1, 1, None, {"new": "1"})
        assert (new.status, new.wake_at, new.ended_at, new.result) == (RunStatus.PENDING, 200.0, None, None)
        assert (await store.published("r"), await store.stream("r", "s")) == ([], [])
        assert await store.prune(1e9) == []
        assert [found.id for found in (await store.runs(RunQuery())).runs] == ["r"]
        assert await claim_ids(store, claim(now=200.0)) == ["r"]

    @case
    async def test_positions_and_message_numbers_of_the_old_generation_stay_taken(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("m")])
        await store.commit([turn(0, entry("a"), entry("b"), seen=1, consumed=(1,), patch=succeeded())])
        await store.commit([restart("again", message("x"), message("y"))])
        snapshot = await load(store)
        assert (snapshot.position, snapshot.record.fence) == (3, 3)
        assert [(each.id, each.number) for each in snapshot.inbox] == [("x", 2), ("y", 3)]
        assert snapshot.record.last_message_no == 3
        (claimed,) = await store.claim(claim(now=200.0))
        assert (claimed.position, claimed.last_message_no) == (3, 3)
        assert await store.commit([turn(3, entry("c"), seen=3, consumed=(2,))]) == [Committed()]
        assert locations(await load(store)) == ["c"]
        assert [each.id for each in await store.inbox("r")] == ["y"]

    @case
    async def test_late_writes_to_the_old_generation_change_nothing(self, store: Store) -> None:
        last = turn(0, entry("a"), patch=succeeded())
        rewinding = RewindRun(run_id="r", base=1, turn_id="rewind", now=190.0, dropped=("a",))
        await store.commit([run(owner="a"), last])
        await store.commit([restart(owner="a")])
        before = await load(store)
        for late in (last, turn(1, entry("b")), turn(0, entry("b"), owned=False)):
            assert await store.commit([late]) == [Superseded()]
        assert await store.commit([rewinding]) == [Superseded()]
        assert await store.commit([finalize(consumed=(1,), orphaned_children=True)]) == [Committed()]
        assert await load(store) == before
        assert await store.commit([turn(2, entry("b"))]) == [Committed()]

    @case
    async def test_message_ids_of_the_old_generation_are_free_again(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("m")])
        await store.commit([turn(0, seen=1, consumed=(1,), patch=succeeded()), restart()])
        assert await store.commit([deliver("m", now=210.0)]) == [MessageDelivered(2, fresh=True)]

    @case
    async def test_an_open_run_is_not_replaced(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        (taken,) = await store.commit([restart()])
        assert taken == IdTaken(await record(store))
        assert (await record(store)).generation == 0

    @case
    async def test_a_run_that_needs_finalization_is_not_replaced(self, store: Store) -> None:
        await store.commit([run(owner="a"), observe(), turn(0, patch=succeeded())])
        assert isinstance((await store.commit([restart()]))[0], IdTaken)
        await store.commit([finalize(notified=(Observer("above", "0/child"),))])
        assert await store.commit([restart()]) == [Created(owned=False)]

    @case
    async def test_a_terminated_run_is_replaced_after_its_children_were_ended(self, store: Store) -> None:
        await store.commit([run(owner="a"), end()])
        assert isinstance((await store.commit([restart()]))[0], IdTaken)
        await store.commit([finalize(orphaned_children=True)])
        assert await store.commit([restart()]) == [Created(owned=False)]
        assert await unfinalized(store) == {}

    @case
    async def test_another_generation_than_the_caller_has_read_is_not_replaced(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("a"), patch=succeeded())])
        await store.commit([RewindRun(run_id="r", base=1, turn_id="rewind", now=150.0, dropped=("a",))])
        await store.claim(claim())
        await store.commit([turn(2, patch=succeeded())])
        assert isinstance((await store.commit([restart()]))[0], IdTaken)
        assert await store.commit([replace(restart(), replaces=Predecessor("call-r", 1))]) == [Created(owned=False)]

    @case
    async def test_a_repeated_replacement_is_recognised_after_a_lost_result(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=succeeded())])
        write = restart("again", message("x"), owner="a")
        assert await store.commit([write]) == [Created(owned=True)]
        before = await load(store)
        assert await store.commit([write]) == [Created(owned=True)]
        assert await load(store) == before

    @case
    async def test_a_missing_run_is_created(self, store: Store) -> None:
        assert await store.commit([restart("again", message("x"))]) == [Created(owned=False)]
        snapshot = await load(store)
        assert (snapshot.position, [each.number for each in snapshot.inbox]) == (0, [1])

    @case
    async def test_a_replacement_of_a_fenced_owner_has_no_owner(self, store: Store) -> None:
        await store.join(worker("c"))
        await store.commit([run(owner="a"), turn(0, patch=succeeded())])
        await store.fence_worker("c")
        assert await store.commit([restart(owner="c")]) == [Created(owned=False)]

    @case
    async def test_one_batch_ends_and_replaces_a_run(self, store: Store) -> None:
        results = await store.commit(
            [run(owner="a"), turn(0, patch=succeeded()), restart(owner="a"), turn(2, entry("b"), turn_id="new")]
        )
        assert results == [Created(owned=True), Committed(), Created(owned=True), Committed()]
        assert locations(await load(store)) == ["b"]

    @case
    async def test_of_concurrent_replacements_one_is_applied(self, store: Store) -> None:
        other = await self.second(store)
        await store.commit([run(owner="a"), turn(0, patch=succeeded())])
        calls = [(store, other)[i % 2].commit([restart(f"call {i}")]) for i in range(20)]
        results = [result for (result,) in await asyncio.gather(*calls)]
        assert results.count(Created(owned=False)) == 1
        assert all(isinstance(result, Created | IdTaken) for result in results)

    @case
    async def test_a_message_that_races_with_a_replacement_finds_the_run(self, store: Store) -> None:
        other = await self.second(store)
        await store.commit([run(owner="a"), turn(0, patch=succeeded())])
        calls = [other.commit([deliver(f"m{i}", now=210.0)]) for i in range(10)]
        await asyncio.gather(*calls[:5], store.commit([restart()]), *calls[5:])
        (late,) = await other.commit([deliver("late", now=211.0)])
        assert isinstance(late, MessageDelivered)
        numbers = [each.number for each in await store.inbox("r")]
        assert numbers == list(range(1, len(numbers) + 1)), "every message that was accepted is in the new generation"
