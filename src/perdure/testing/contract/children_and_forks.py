"""Children are listed by their parent, and a fork is created with a history and an inbox."""

from __future__ import annotations

from msgspec.structs import replace

from perdure.model.queries import RunQuery
from perdure.model.records import RunStatus
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, Created, IdTaken, MessageDelivered, Superseded
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    claim,
    claim_ids,
    deliver,
    end,
    entry,
    load,
    record,
    refused,
    run,
    succeeded,
    suspended,
    turn,
)


class ChildrenCases(ContractCase):
    @case
    async def test_attached_children_that_are_open_are_listed_by_id(self, store: Store) -> None:
        for id in ("c3", "c1", "c2", "ended", "terminated"):
            await store.commit([run(id, parent="r", attached=True, owner="a")])
        await store.commit([run("loose", parent="r"), run("other", parent="s", attached=True), run(), run("c0")])
        await store.commit([turn(0, id="ended", patch=succeeded()), end(id="terminated")])
        await store.commit([turn(0, id="c1", patch=suspended())])
        assert await store.open_children("r") == ["c1", "c2", "c3"]
        assert await store.open_children("r", limit=2) == ["c1", "c2"]
        assert await store.open_children("r", limit=2, after="c2") == ["c3"]
        assert await store.open_children("r", after="c3") == []
        assert await store.open_children("c1") == []
        page = await store.runs(RunQuery(parent="r"))
        assert len(page.runs) == 6, "a query finds detached and ended children too"

    @case
    async def test_attachment_and_epoch_of_a_child_come_back(self, store: Store) -> None:
        await store.commit([run("r1", parent="r", attached=True, epoch=3), run("r2", parent="r")])
        first, second = await record(store, "r1"), await record(store, "r2")
        assert (first.parent, first.attached, first.epoch) == ("r", True, 3)
        assert (second.parent, second.attached, second.epoch) == ("r", False, 0)


class ForkCases(ContractCase):
    @case
    async def test_a_fork_is_created_with_a_history_and_an_inbox(self, store: Store) -> None:
        entries = (entry("a"), entry("b", 1))
        inbox = tuple(
            replace(deliver(f"m{n}", policy="dead_letter", target="0/x", wants_reply=True).message, number=n)
            for n in (4, 7)
        )
        write = replace(run(generation=2, epoch=1), entries=entries, inbox=inbox)
        assert await store.commit([write]) == [Created(owned=False)]
        snapshot = await load(store)
        assert (snapshot.entries, snapshot.position, snapshot.record.fence) == (entries, 2, 0)
        assert snapshot.inbox == (replace(inbox[0], number=1), replace(inbox[1], number=2))
        row = snapshot.record
        assert (row.last_message_no, row.generation, row.epoch, row.status) == (2, 2, 1, RunStatus.PENDING)
        assert [each.position for each in await store.history("r")] == [1, 2]

    @case
    async def test_a_fork_continues_from_its_given_history(self, store: Store) -> None:
        write = replace(run(owner="a"), entries=(entry("a"),), inbox=(deliver("m").message,))
        assert await store.commit([write]) == [Created(owned=True)]
        assert (await store.owned_with_messages("a"), (await record(store)).wake_at) == ([], None), (
            "its creator knows of its messages"
        )
        assert await store.commit([deliver("m"), deliver("n")]) == [
            MessageDelivered(1, fresh=False, owner="a"),
            MessageDelivered(2, fresh=True, owner="a"),
        ]
        assert await store.commit([turn(0, entry("stale"))]) == [Superseded()]
        assert await store.commit([turn(1, entry("b", 1), seen=2, consumed=(1,))]) == [Committed()]
        assert (await load(store)).position == 2

    @case
    async def test_inbox_of_a_fork_is_numbered_after_what_its_history_received(self, store: Store) -> None:
        with_inbox = replace(run(owner="a"), entries=(entry("a"),), inbox=(deliver("m").message,), received=4)
        without = replace(run("s", owner="a"), entries=(entry("a"),), received=4)
        await store.commit([with_inbox, without])
        assert [message.number for message in (await load(store)).inbox] == [5]
        assert await store.commit([deliver("m"), deliver("n"), deliver("n", id="s")]) == [
            MessageDelivered(5, fresh=False, owner="a"),
            MessageDelivered(6, fresh=True, owner="a"),
            MessageDelivered(5, fresh=True, owner="a"),
        ]

    @case
    async def test_a_fork_is_due_and_claimed_like_any_run(self, store: Store) -> None:
        await store.commit([replace(run(), entries=(entry("a"), entry("b", 1)), inbox=(deliver("m").message,))])
        (claimed,) = await store.claim(claim("b"))
        assert (claimed.id, claimed.position, claimed.last_message_no) == ("r", 2, 1)

    @case
    async def test_a_fork_is_created_once(self, store: Store) -> None:
        write = replace(run(), entries=(entry("a"),), inbox=(deliver("m").message,))
        await store.commit([write])
        before = await load(store)
        assert await store.commit([write]) == [Created(owned=False)]
        (result,) = await store.commit([replace(run(created_by="another"), entries=(entry("x"),))])
        assert isinstance(result, IdTaken)
        assert await load(store) == before

    @case
    async def test_a_malformed_fork_is_refused(self, store: Store) -> None:
        for bad in (
            replace(run("bad"), entries=(entry(value=12),)),
            replace(run("bad"), inbox=(deliver("m", body="text").message,)),
            replace(run("bad"), inbox=(deliver("").message,)),
        ):
            await refused(store.commit([run("good"), bad]))
        assert await store.records(["good", "bad"]) == [None, None]
        assert await claim_ids(store, claim()) == []
