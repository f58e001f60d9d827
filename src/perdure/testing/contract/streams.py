"""Outputs of a run: streams in one order, and published values by key."""

from __future__ import annotations

from typing import Any

from perdure.model.records import PublishedValue, RunStatus, StreamItem
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.results import AlreadyEnded, Committed, RunMissing, Superseded
from perdure.stores.writes import AppendStream, ContinueAs, RewindRun, RunPatch, SupersedeStream
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    end,
    finalize,
    refused,
    run,
    succeeded,
    suspended,
    turn,
)


def item(value: bytes = b"1", stream: str = "log", **fields: Any) -> StreamItem:
    return StreamItem(stream=stream, value=value, **{"location": "charge", "at": 1.0, **fields})


def append(*items: StreamItem, id: str = "r", worker: str = "a", first: int | None = None) -> AppendStream:
    return AppendStream(run_id=id, worker=worker, items=items, first=first)


def supersede(writer: str, location: str = "charge", id: str = "r") -> SupersedeStream:
    return SupersedeStream(run_id=id, location=location, writer=writer)


async def values(store: Store, stream: str = "log", **page: int) -> list[bytes]:
    return [each.value for each in await store.stream("r", stream, **page)]


class StreamCases(ContractCase):
    @case
    async def test_items_get_the_next_offsets_of_their_stream(self, store: Store) -> None:
        extras = TurnExtras(streamed=(item(b"1"), item(b"a", "other"), item(b"2")))
        await store.commit([run(owner="a"), turn(0, extras=extras)])
        assert await store.commit([append(item(b"3", offset=70), item(b"b", "other"))]) == [Committed()]
        await store.commit([turn(1, extras=TurnExtras(streamed=(item(b"4"),)))])
        assert [(each.offset, each.value) for each in await store.stream("r", "log")] == [
            (0, b"1"),
            (1, b"2"),
            (2, b"3"),
            (3, b"4"),
        ]
        assert await values(store, "other") == [b"a", b"b"]

    @case
    async def test_everything_of_an_item_comes_back(self, store: Store) -> None:
        full = item(b"\xff\x00", "é log", location="a/b#1", at=1.5, attempt=3, writer="w")
        await store.commit([run(owner="a"), append(full)])
        assert await store.stream("r", "é log") == [full]

    @case
    async def test_a_stream_is_read_in_pages(self, store: Store) -> None:
        await store.commit([run(owner="a"), append(*(item(b"%d" % n) for n in range(5)))])
        assert await values(store, limit=2) == [b"0", b"1"]
        assert await values(store, start=2, limit=2) == [b"2", b"3"]
        assert await values(store, start=5) == []
        assert await store.stream("missing", "log") == await store.stream("r", "nothing") == []

    @case
    async def test_only_the_owner_may_append(self, store: Store) -> None:
        await store.commit([run(owner="a"), run("free"), run("done", owner="a"), turn(0, id="done", patch=succeeded())])
        results = await store.commit(
            [
                append(item(), worker="b"),
                append(item(), id="free"),
                append(item(), id="done"),
                append(item(), id="missing"),
                append(),
            ]
        )
        assert results == [Superseded(), Superseded(), AlreadyEnded(RunStatus.SUCCEEDED), RunMissing(), Committed()]
        await store.fence_worker("a")
        assert await store.commit([append(item())]) == [Superseded()]
        assert await values(store) == []

    @case
    async def test_a_rejected_turn_streams_and_publishes_nothing(self, store: Store) -> None:
        extras = TurnExtras(streamed=(item(),), published=(PublishedValue("k", b"1"),))
        await store.commit([run(owner="a"), turn(0, worker="b", extras=extras)])
        assert (await values(store), await store.published("r")) == ([], [])

    @case
    async def test_a_repeated_call_appends_once(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        first = append(item(b"1", writer="w"), item(b"a", "other", writer="w"), first=0)
        second = append(item(b"2", writer="w"), item(b"3", writer="w"), first=2)
        for write in (first, first, second, first, second):
            assert await store.commit([write]) == [Committed()]
        assert (await values(store), await values(store, "other")) == ([b"1", b"2", b"3"], [b"a"])
        longer = append(item(b"2", writer="w"), item(b"3", writer="w"), item(b"4", writer="w"), first=2)
        await store.commit([longer, append(item(b"x", writer="another"), first=0)])
        assert await values(store) == [b"1", b"2", b"3", b"4", b"x"]

    @case
    async def test_a_repeated_turn_streams_once(self, store: Store) -> None:
        write = turn(0, extras=TurnExtras(streamed=(item(),)))
        await store.commit([run(owner="a"), write])
        await store.commit([write])
        assert await values(store) == [b"1"]

    @case
    async def test_items_of_earlier_executions_are_marked_superseded(self, store: Store) -> None:
        await store.commit([run(owner="a"), append(item(b"1", writer="w1"), item(b"a", "other", writer="w1"))])
        await store.commit([append(item(b"x", writer="w1", location="charge/below"))])
        await store.commit([append(item(b"2", writer="w2"))])
        assert await store.commit([supersede("w2")]) == [Committed()]
        marked = [(each.value, each.superseded) for each in await store.stream("r", "log")]
        assert marked == [(b"1", True), (b"x", False), (b"2", False)]
        assert [each.superseded for each in await store.stream("r", "other")] == [True]
        await store.commit([append(item(b"3", writer="w1")), supersede("w2")])
        assert [each.superseded for each in await store.stream("r", "log")] == [True, False, False, True]
        assert await store.commit([supersede("w", id="missing")]) == [RunMissing()]

    @case
    async def test_items_of_an_earlier_epoch_are_not_marked_superseded(self, store: Store) -> None:
        continue_as = ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=111.0)
        running = RunPatch(status=RunStatus.RUNNING, owner="a")
        last = TurnExtras(streamed=(item(b"2"),))
        await store.commit([run(owner="a"), append(item(b"1", writer="w1"))])
        await store.commit(
            [turn(0, continue_as=continue_as, patch=running, extras=last), append(item(b"3", writer="w1"))]
        )
        await store.commit([supersede("w2")])
        assert [each.superseded for each in await store.stream("r", "log")] == [False, False, True]
        await store.commit([RewindRun(run_id="r", base=1, turn_id="rewind", now=300.0, dropped=("charge",))])
        assert [each.superseded for each in await store.stream("r", "log")] == [False, False, True]

    @case
    async def test_streams_survive_continue_as_and_are_pruned_with_the_run(self, store: Store) -> None:
        continue_as = ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=111.0)
        running = RunPatch(status=RunStatus.RUNNING, owner="a")
        await store.commit([run(owner="a"), append(item(b"1")), turn(0, continue_as=continue_as, patch=running)])
        await store.commit([append(item(b"2")), end(prune_after=10.0), finalize(orphaned_children=True)])
        assert await values(store) == [b"1", b"2"]
        await store.prune(160.0)
        assert await values(store) == []
        await store.commit([run(owner="a", created_by="another"), append(item(b"3"))])
        assert [(each.offset, each.value) for each in await store.stream("r", "log")] == [(0, b"3")]

    @case
    async def test_malformed_stream_items_are_refused(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        bad = item("text")  # type: ignore[arg-type]
        await refused(store.commit([append(item()), append(bad)]))
        await refused(store.commit([turn(0, extras=TurnExtras(streamed=(bad,)))]))
        await refused(store.commit([append(item(stream=""))]))
        assert await values(store) == []


class PublishedCases(ContractCase):
    @case
    async def test_published_values_are_listed_by_key(self, store: Store) -> None:
        published = (PublishedValue("é", b""), PublishedValue("z", b"1"), PublishedValue("~a", b"\xff", 200.0))
        await store.commit([run(owner="a"), run("s", owner="a"), turn(0, extras=TurnExtras(published=published))])
        assert await store.published("r") == sorted(published, key=lambda value: value.key)
        assert await store.published("s") == await store.published("missing") == []

    @case
    async def test_a_value_replaces_that_of_the_same_key(self, store: Store) -> None:
        first = (PublishedValue("k", b"1", 200.0), PublishedValue("other", b"x"), PublishedValue("k", b"2", 200.0))
        await store.commit([run(owner="a"), turn(0, extras=TurnExtras(published=first))])
        assert await store.published("r") == [first[2], first[1]]
        second = (PublishedValue("k", b"3"),)
        await store.commit([turn(1, extras=TurnExtras(published=second), patch=suspended())])
        assert await store.published("r") == [second[0], first[1]]

    @case
    async def test_expired_values_are_pruned(self, store: Store) -> None:
        published = (PublishedValue("a", b"1", 200.0), PublishedValue("b", b"2", 201.0), PublishedValue("c", b"3"))
        await store.commit([run(owner="a"), turn(0, extras=TurnExtras(published=published))])
        await store.prune(199.0)
        assert await store.published("r") == list(published), "the store uses the time of the call"
        await store.prune(200.0)
        assert await store.published("r") == list(published[1:])

    @case
    async def test_a_value_that_was_replaced_does_not_expire(self, store: Store) -> None:
        kept = PublishedValue("a", b"2", 300.0)
        await store.commit([run(owner="a"), turn(0, extras=TurnExtras(published=(PublishedValue("a", b"1", 200.0),)))])
        await store.commit([turn(1, extras=TurnExtras(published=(kept,)))])
        await store.prune(200.0)
        assert await store.published("r") == [kept]

    @case
    async def test_published_values_survive_continue_as_and_end_and_are_pruned_with_the_run(self, store: Store) -> None:
        continue_as = ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=111.0)
        published = PublishedValue("k", b"1")
        running = RunPatch(status=RunStatus.RUNNING, owner="a")
        write = turn(0, continue_as=continue_as, patch=running, extras=TurnExtras(published=(published,)))
        await store.commit([run(owner="a"), write])
        assert await store.published("r") == [published]
        last = PublishedValue("last", b"2")
        await store.commit([turn(1, patch=succeeded(prune_at=200.0), extras=TurnExtras(published=(last,)))])
        assert await store.published("r") == [published, last]
        await store.prune(200.0)
        await store.commit([run(owner="a", created_by="another")])
        assert await store.published("r") == []

    @case
    async def test_a_malformed_published_value_is_refused(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        bad = PublishedValue("k", "text")  # type: ignore[arg-type]
        await refused(store.commit([turn(0, extras=TurnExtras(published=(bad,)))]))
        assert await store.published("r") == []
