"""Lists in pages: histories and topics."""

from __future__ import annotations

from perdure.stores.protocol import Store
from perdure.stores.results import TopicSummary
from perdure.testing.contract.builders import ContractCase, case, end, entry, publish, refused, run, turn, waiting


class ListCases(ContractCase):
    @case
    async def test_a_history_is_read_in_pages(self, store: Store) -> None:
        entries = [entry(f"s#{n}", n) for n in range(10)]
        await store.commit([run(owner="a"), turn(0, *entries[:4]), turn(4), turn(5, *entries[4:])])
        everything = await store.history("r")
        assert [stored.position for stored in everything] == [1, 2, 3, 4, *range(6, 12)]
        pages, after = [], 0
        while page := await store.history("r", after, 3):
            pages.append(page)
            after = page[-1].position
        assert [len(page) for page in pages] == [3, 3, 3, 1]
        assert [stored for page in pages for stored in page] == everything
        assert await store.history("r", 4, 1) == everything[4:5], "a turn without entries has none"
        assert await store.history("r", 11, 1) == []
        assert await store.history("missing", 0, 5) == []
        await refused(store.history("r", 0, 0))

    @case
    async def test_topics_are_listed_by_name_with_what_waits_in_them(self, store: Store) -> None:
        assert await store.topics() == []
        await store.commit([publish("e1", topic="b"), publish("e2", topic="b"), publish("e3", topic="é")])
        await store.commit([*waiting("r", "c", "d"), *waiting("s", "c")])
        await store.commit([publish("e4", topic="late", delivery="after_wait")])
        expected = [
            TopicSummary("b", 2, 0),
            TopicSummary("c", 0, 2),
            TopicSummary("d", 0, 1),
            TopicSummary("é", 1, 0),
        ]
        assert await store.topics() == expected
        assert await store.topics(limit=2) == expected[:2]
        assert await store.topics("b", 2) == expected[1:3]
        assert await store.topics("é") == []
        await refused(store.topics(limit=0))
        await store.commit([publish("e5", topic="c"), end(id="s")])
        assert await store.topics("b") == [TopicSummary("é", 1, 0)], "r got the event, s has ended"
        await store.commit([end("end r", id="r")])
        assert [topic.name for topic in await store.topics()] == ["b", "é"], "the event of r is not released yet"

    @case
    async def test_an_event_that_a_run_has_unread_does_not_wait_in_its_topic(self, store: Store) -> None:
        await store.commit([*waiting("r", "t"), publish("e1", consume=True)])
        assert await store.topics() == []
        await store.commit([*waiting("s", "u"), publish("e2", topic="u", consume=False)])
        assert await store.topics() == [TopicSummary("u", 1, 0)], "another run may read it"
