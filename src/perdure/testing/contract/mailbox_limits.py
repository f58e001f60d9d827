"""Contract: the limit of a mailbox counts unread events per name, however they entered and left the inbox."""

from __future__ import annotations

from msgspec.structs import replace

from perdure.stores.protocol import Store
from perdure.stores.results import Committed, LimitReached, MessageDelivered
from perdure.stores.writes import RewindRun
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    deliver,
    entry,
    load,
    publish,
    receive,
    run,
    turn,
)


def accepted(number: int) -> MessageDelivered:
    return MessageDelivered(number, fresh=True, owner="a")


class MailboxLimitCases(ContractCase):
    @case
    async def test_a_flood_of_one_name_does_not_block_another(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        flood = [deliver(f"f{n}", name="flood", limit=3) for n in range(5)]
        assert await store.commit(flood) == [accepted(1), accepted(2), accepted(3), LimitReached(3), LimitReached(3)]
        others = [deliver(f"o{n}", name="other", limit=3) for n in range(4)]
        assert await store.commit(others) == [accepted(4), accepted(5), accepted(6), LimitReached(3)]
        for write in (deliver("f9", name="flood", limit=3), deliver("o9", name="other", limit=3)):
            assert await store.commit([write]) == [LimitReached(3)]
        assert await store.commit([deliver("t", name="third", limit=3)]) == [accepted(7)]

    @case
    async def test_a_consumed_event_makes_space_for_its_name_only(self, store: Store) -> None:
        writes = [deliver(f"{name}{n}", name=name) for n in range(2) for name in ("a", "b")]
        await store.commit([run(owner="a"), *writes])
        assert await store.commit([deliver("a2", name="a", limit=2)]) == [LimitReached(2)]
        await store.commit([turn(0, entry(), seen=4, consumed=(2,))])  # b0
        assert await store.commit([deliver("a2", name="a", limit=2)]) == [LimitReached(2)]
        assert await store.commit([deliver("b2", name="b", limit=2)]) == [accepted(5)]
        assert await store.commit([deliver("b3", name="b", limit=2)]) == [LimitReached(2)]
        await store.commit([turn(1, entry("c", 1), seen=5, consumed=(1, 3, 4, 5))])
        assert await store.commit([deliver(f"a{n}", name="a", limit=2) for n in (3, 4, 5)]) == [
            accepted(6),
            accepted(7),
            LimitReached(2),
        ]

    @case
    async def test_an_event_older_than_a_flood_of_another_name_is_counted(self, store: Store) -> None:
        flood = [deliver(f"f{n}", name="flood") for n in range(6)]
        await store.commit([run(owner="a"), deliver("o1", name="other"), *flood])
        assert await store.commit([deliver("o2", name="other", limit=3)]) == [accepted(8)]
        assert await store.commit([deliver("o3", name="other", limit=3)]) == [accepted(9)]
        assert await store.commit([deliver("o4", name="other", limit=3)]) == [LimitReached(3)]
        assert await store.commit([deliver("f9", name="flood", limit=3)]) == [LimitReached(6)]

    @case
    async def test_assigned_events_of_a_topic_count_for_their_name(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "news")])
        await store.commit([publish("p", topic="news")])
        assert await store.commit([deliver("n1", name="news", limit=1)]) == [LimitReached(1)]
        assert await store.commit([deliver("o1", name="other", limit=1)]) == [MessageDelivered(2, fresh=True)]

    @case
    async def test_events_that_a_rewind_returns_count_again(self, store: Store) -> None:
        messages = [deliver(f"{name}{n}", name=name) for name in ("a", "b") for n in range(2)]
        await store.commit([run(owner="a"), *messages])
        assert await store.commit([deliver("a2", name="a", limit=2)]) == [LimitReached(2)]
        unread = (await load(store)).inbox
        await store.commit([turn(0, entry("x"), seen=4, consumed=(1, 2, 3))])
        rewound = RewindRun(
            run_id="r", base=1, turn_id="rewind-1", now=300.0, dropped=("x",), returned=(unread[0], unread[2])
        )
        assert await store.commit([rewound]) == [Committed()]
        results = await store.commit([deliver(f"{name}9", name=name, limit=2) for name in ("a", "b")])
        assert results == [MessageDelivered(5, fresh=True), LimitReached(2)]

    @case
    async def test_events_of_a_new_run_with_an_inbox_count(self, store: Store) -> None:
        inbox = tuple(deliver(f"a{n}", name="a").message for n in range(2))
        await store.commit([replace(run(), inbox=inbox)])
        results = await store.commit([deliver(f"{name}9", name=name, limit=2) for name in ("a", "b")])
        assert results == [LimitReached(2), MessageDelivered(3, fresh=True)]
