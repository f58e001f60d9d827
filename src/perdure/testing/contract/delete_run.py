"""A deleted run leaves nothing behind: a later run with the same id meets no data of its predecessor."""

from __future__ import annotations

import asyncio

from perdure.model.records import PublishedValue, StreamItem
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, Created, MessageDelivered, RunMissing, RunRetained
from perdure.stores.writes import Observer, RewindRun
from perdure.testing.contract.builders import (
    ContractCase,
    assigned,
    case,
    dead_letter,
    deliver,
    end,
    entry,
    finalize,
    load,
    observe,
    publish,
    receive,
    run,
    succeeded,
    turn,
    waiting,
)


class DeleteRunCases(ContractCase):
    @case
    async def test_deleting_removes_the_run_and_all_that_it_owns(self, store: Store) -> None:
        item = StreamItem(stream="s", value=b"1", location="l", at=1.0)
        extras = TurnExtras(
            published=(PublishedValue("k", b"1"),), streamed=(item,), dead_letters=(dead_letter(original_target="r"),)
        )
        await store.commit([run(owner="a"), deliver(), turn(0, entry(), seen=1, consumed=(1,), extras=extras)])
        await store.commit([turn(1, patch=succeeded(prune_at=9e9))])
        assert await store.delete_run("r") == Committed()
        assert (await store.records(["r"]), await store.load(["r"])) == ([None], [None])
        assert (await store.history("r"), await store.inbox("r")) == ([], [])
        assert (await store.published("r"), await store.stream("r", "s")) == ([], [])
        assert [each.id for each in await store.dead_letters()] == ["d"], "dead letters are retained for a person"
        assert await store.delete_run("r") == RunMissing()
        assert await store.commit([turn(1, id="r")]) == [RunMissing()]

    @case
    async def test_a_run_without_prune_at_can_be_deleted(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=succeeded())])
        await store.commit([run("other", owner="a"), turn(0, id="other", patch=succeeded())])
        assert await store.delete_run("r") == Committed()
        assert [each is None for each in await store.records(["r", "other"])] == [True, False]

    @case
    async def test_open_unfinalized_and_awaited_runs_are_retained(self, store: Store) -> None:
        await store.commit([run("above", owner="a"), run(parent="above", owner="a"), observe()])
        assert await store.delete_run("r") == RunRetained("open")
        await store.commit([turn(0, patch=succeeded(prune_at=0.0))])
        assert await store.delete_run("r") == RunRetained("unfinalized")
        await store.commit([finalize(notified=(Observer("above", "0/child"),))])
        assert await store.delete_run("r") == RunRetained("parent_open")
        assert len((await load(store)).entries) == 0
        await store.commit([turn(0, id="above", patch=succeeded())])
        assert await store.delete_run("r") == Committed()
        assert await store.delete_run("missing") == RunMissing()

    @case
    async def test_a_rewound_run_is_retained(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry(), patch=succeeded(prune_at=0.0))])
        await store.commit([RewindRun(run_id="r", base=1, turn_id="back", now=120.0, dropped=("charge",))])
        assert await store.delete_run("r") == RunRetained("open")

    @case
    async def test_a_later_run_of_the_id_starts_empty(self, store: Store) -> None:
        await store.commit([*waiting(), publish(consume=False), deliver("sent"), deliver("d", kind="deferred")])
        await store.commit([turn(1, owned=False, seen=3, consumed=(1, 2, 3), now=200.0, patch=succeeded())])
        assert await store.delete_run("r") == Committed()
        assert await store.commit([run(created_by="another", owner="a")]) == [Created(owned=True)]
        snapshot = await load(store)
        assert (snapshot.position, snapshot.entries, snapshot.inbox) == (0, (), ())
        assert await store.commit([deliver("sent"), deliver("d", kind="deferred")]) == [
            MessageDelivered(1, fresh=True, owner="a"),
            MessageDelivered(2, fresh=True, owner="a"),
        ], "ids that the predecessor accepted are not known"
        await store.commit([receive(0, "t", seen=2)])
        assert len((await assigned(store, "r"))[0]) == 1, "the event was delivered to the predecessor only"

    @case
    async def test_ids_of_a_later_run_are_retained_for_their_own_time(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("m"), turn(0, entry(), seen=1, consumed=(1,), now=200.0)])
        await store.commit([turn(1, patch=succeeded())])
        await store.delete_run("r")
        await store.commit([run(created_by="another", owner="a"), deliver("m")])
        await store.commit([turn(0, entry(), seen=1, consumed=(1,), now=240.0, turn_id="later")])
        await store.prune(260.0, keep_ids_for=50.0)
        assert await store.commit([deliver("m")]) == [MessageDelivered(1, fresh=False, owner="a")]

    @case
    async def test_a_later_run_keeps_values_that_its_predecessor_published_with_an_expiry(self, store: Store) -> None:
        expiring = TurnExtras(published=(PublishedValue("k", b"1", 200.0),))
        await store.commit([run(owner="a"), turn(0, extras=expiring), turn(1, patch=succeeded())])
        await store.delete_run("r")
        await store.commit([run(created_by="another", owner="a")])
        await store.commit([turn(0, extras=TurnExtras(published=(PublishedValue("k", b"2"),)), turn_id="later")])
        await store.prune(300.0)
        assert [each.value for each in await store.published("r")] == [b"2"]

    @case
    async def test_of_concurrent_deletions_one_succeeds(self, store: Store) -> None:
        other = await self.second(store)
        await store.commit([run(owner="a"), end()])
        await store.commit([finalize(orphaned_children=True)])
        results = await asyncio.gather(*(each.delete_run("r") for each in (store, other, store, other)))
        assert sorted(type(result).__name__ for result in results) == ["Committed", *["RunMissing"] * 3]
