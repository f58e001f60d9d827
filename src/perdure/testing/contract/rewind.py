"""A run may be rewound to an earlier point of its history, in any status."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from perdure.model.records import Hold, RunStatus, StreamItem, Wait
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.results import AlreadyStarted, Committed, MessageDelivered, RunMissing, Superseded
from perdure.stores.writes import AppendStream, Observer, RewindRun, RunPatch
from perdure.testing.contract.builders import (
    ContractCase,
    assigned,
    case,
    claim,
    claim_ids,
    deliver,
    end,
    entry,
    load,
    locations,
    observe,
    publish,
    receive,
    record,
    refused,
    run,
    stored_events,
    succeeded,
    suspended,
    turn,
    unfinalized,
    waiting,
)


def rewind(base: int, *dropped: str, id: str = "r", **fields: Any) -> RewindRun:
    given: dict[str, Any] = {"turn_id": f"rewind-{base}", "now": 300.0}
    return RewindRun(run_id=id, base=base, dropped=dropped, **{**given, **fields})


class RewindCases(ContractCase):
    @case
    async def test_a_rewind_deletes_the_rows_of_dropped_locations(self, store: Store) -> None:
        pending, done = entry("b", 1, value=None), entry("b", 1)
        await store.commit([run(owner="a"), turn(0, entry("a"), pending), turn(2, done), turn(3, entry("b/c", 2))])
        await store.commit([turn(4, entry("bc", 3))])
        assert await store.commit([rewind(5, "b", "bc", "unknown")]) == [Committed()]
        snapshot = await load(store)
        assert locations(snapshot) == ["a", "b/c"], "only exact locations are dropped, not those below"
        assert (snapshot.position, snapshot.record.fence) == (6, 6)

    @case
    async def test_a_rewind_appends_its_entries(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("a"), entry("b", 1))])
        replaced = (entry("a", attempts=0, value=None), entry("x", 5))
        assert await store.commit([rewind(2, "a", "b", entries=replaced)]) == [Committed()]
        snapshot = await load(store)
        assert (snapshot.entries, snapshot.position, snapshot.record.fence) == (replaced, 4, 4)
        assert [row.position for row in await store.history("r")] == [3, 4]

    @case
    async def test_a_rewound_run_is_due_and_has_no_owner(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry())])
        await store.commit([rewind(1, "charge")])
        row = await record(store)
        assert (row.status, row.owner, row.wake_at, row.generation, row.updated_at) == (
            RunStatus.RUNNING,
            None,
            300.0,
            1,
            300.0,
        )
        assert (row.first_executed_at, row.epoch, row.run_attempt) == (100.0, 0, 1), "a rewind is not a restart"
        assert await claim_ids(store, claim("b", 300.0)) == ["r"]
        assert (await record(store)).first_executed_at == 100.0

    @case
    async def test_turns_of_the_former_owner_of_a_rewound_run_are_rejected(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry()), deliver(), rewind(1, "charge")])
        assert await store.owned_with_messages("a") == []
        assert await store.owned("a") == []
        stale = [turn(base, entry("zombie"), turn_id=f"z{base}") for base in range(3)]
        assert await store.commit(stale) == [Superseded()] * 3
        unowned = [turn(base, entry("zombie"), turn_id=f"z{base}", owned=False) for base in range(2)]
        assert await store.commit(unowned) == [Superseded()] * 2

    @case
    async def test_a_rewind_clears_hold_waits_recoveries_and_drift(self, store: Store) -> None:
        held, waits = Hold("step_failed", "why"), (Wait("timer"),)
        patch = suspended(900.0, held=held, waits=waits, recoveries=3, drift=("charge",))
        await store.commit([run(owner="a"), turn(0, entry(), patch=patch), rewind(1, "charge")])
        row = await record(store)
        assert (row.held, row.waits, row.wake_at) == (None, (), 300.0)
        assert (row.recoveries, row.drift) == (0, ())
        assert await store.retry_held([("flow", 1)], "step_failed", 301.0) == 0
        assert await claim_ids(store, claim("b", 300.0)) == ["r"]

    @case
    async def test_a_rewound_ended_run_continues(self, store: Store) -> None:
        error = replace(succeeded(prune_at=400.0), status=RunStatus.FAILED)
        await store.commit([run(owner="a"), turn(0, entry("a"), entry("b", 1), patch=error)])
        assert await store.commit([rewind(2, "b")]) == [Committed()]
        row = await record(store)
        assert (row.status, row.result, row.error, row.ended_at) == (RunStatus.RUNNING, None, None, None)
        assert await store.prune(9e9) == []
        assert await claim_ids(store, claim("a", 300.0)) == ["r"]
        assert await store.commit([turn(3, entry("b", 1), patch=succeeded(310.0))]) == [Committed()]
        assert (await record(store)).status is RunStatus.SUCCEEDED
        assert await store.prune(9e9) == [], "prune_at of the undone end does not count"

    @case
    async def test_finalization_of_an_undone_end_moves_to_the_next_end(self, store: Store) -> None:
        await store.commit([run(owner="a"), observe(), deliver(), end()])
        assert (await unfinalized(store))["r"].orphaned_children
        await store.commit([rewind(1)])
        assert await store.unfinalized() == []
        await store.commit([turn(2, owned=False, seen=1, consumed=(1,), patch=succeeded(310.0))])
        (pending,) = await store.unfinalized()
        assert (pending.observers, pending.messages, pending.orphaned_children) == (
            (Observer("above", "0/child"),),
            (),
            False,
        )

    @case
    async def test_a_rewound_run_that_never_executed_stays_pending(self, store: Store) -> None:
        await store.commit([run(wake_at=900.0), rewind(0)])
        row = await record(store)
        assert (row.status, row.first_executed_at, row.wake_at) == (RunStatus.PENDING, None, 300.0)
        assert await store.commit([end(only_if_not_started=True)]) == [AlreadyStarted()]

    @case
    async def test_a_rewind_from_another_position_is_rejected(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("a"), entry("b", 1))])
        for base in (0, 1, 3):
            assert await store.commit([rewind(base, "b")]) == [Superseded()]
        assert await store.commit([rewind(0, id="missing")]) == [RunMissing()]
        snapshot = await load(store)
        assert (snapshot.position, snapshot.record.generation, snapshot.record.owner) == (2, 0, "a")

    @case
    async def test_rewinding_is_idempotent_by_its_turn(self, store: Store) -> None:
        for id, entries in (("r", ()), ("s", (entry("x"),))):
            write = rewind(2, "b", id=id, entries=entries)
            await store.commit([run(id, owner="a"), turn(0, entry("a"), entry("b", 1), id=id)])
            assert await store.commit([write]) == [Committed()]
            before = await load(store, id)
            assert await store.commit([write]) == [Committed()], "its result was lost"
            assert await load(store, id) == before
            await claim_ids(store, claim("b", 310.0))
            assert await store.commit([turn(3, entry("c", 2), id=id, worker="b")]) == [Committed()]
            assert await store.commit([write]) == [Committed()]
            assert (await record(store, id)).generation == 1

    @case
    async def test_returned_messages_are_unread_again_under_their_old_numbers(self, store: Store) -> None:
        await store.commit([run(owner="a"), *(deliver(f"m{n}", policy="broadcast") for n in range(1, 5))])
        before = await store.inbox("r")
        await store.commit([turn(0, entry(), seen=4, consumed=(1, 3, 4))])
        back = (replace(before[2], body=b"changed"), before[0])
        await store.commit([rewind(1, "charge", returned=back)])
        inbox = await store.inbox("r")
        assert inbox == [before[0], before[1], back[0]]
        assert (await load(store)).inbox == tuple(inbox)
        assert await store.inbox("r", after=2) == [back[0]]
        assert await store.commit([deliver("m3"), deliver("m4")]) == [
            MessageDelivered(3, fresh=False),
            MessageDelivered(4, fresh=False),
        ]
        assert await store.commit([deliver("m5")]) == [MessageDelivered(5, fresh=True)]
        await store.commit([turn(2, owned=False, seen=5, consumed=(1, 2, 3, 5), patch=suspended())])
        assert await store.inbox("r") == []

    @case
    async def test_a_consumed_assignment_may_be_returned_as_an_event(self, store: Store) -> None:
        await store.commit([*waiting(), publish("e1", event_id="own")])
        (given,) = await store.inbox("r")
        await store.commit([turn(1, entry(), owned=False, seen=1, consumed=(1,), patch=suspended())])
        back = replace(given, kind="event", target=None, offset=0)
        await store.commit([rewind(2, "charge", returned=(back,))])
        assert await store.inbox("r") == [back]
        assert await stored_events(store) == [], "the topic has deleted it"

    @case
    async def test_the_id_of_a_returned_message_is_not_pruned(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver(), turn(0, entry(), seen=1, consumed=(1,))])
        await store.commit([rewind(1, "charge", returned=(replace(deliver().message, number=1),))])
        await store.prune(9e9)
        assert await store.commit([deliver()]) == [MessageDelivered(1, fresh=False)]

    @case
    async def test_a_message_is_returned_even_if_its_id_was_pruned(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver(), turn(0, entry(), seen=1, consumed=(1,))])
        await store.prune(9e9)
        back = replace(deliver().message, number=1)
        await store.commit([rewind(1, "charge", returned=(back,))])
        assert await store.inbox("r") == [back]
        assert await store.commit([deliver(), deliver("n")]) == [
            MessageDelivered(1, fresh=False),
            MessageDelivered(2, fresh=True),
        ]

    @case
    async def test_returned_events_that_stay_unread_need_finalization(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver(), turn(0, entry(), seen=1, consumed=(1,), patch=succeeded())])
        await store.commit([rewind(1, "charge", returned=(replace(deliver().message, number=1),)), end(now=310.0)])
        assert [message.id for message in (await unfinalized(store))["r"].messages] == ["m"]

    @case
    async def test_a_rewind_removes_subscriptions_and_keeps_assignments(self, store: Store) -> None:
        await store.commit([*waiting(), receive(1, "t", target="0/other"), publish("e1"), rewind(2), publish("e2")])
        assert await assigned(store, "r") == [["topic/t/1"]]
        assert await stored_events(store) == ["e1", "e2"]

    @case
    async def test_stream_items_of_dropped_locations_are_marked_superseded(self, store: Store) -> None:
        def item(location: str) -> StreamItem:
            return StreamItem(stream="log", value=b"1", location=location, at=1.0, writer="w")

        await store.commit([run(owner="a"), turn(0, extras=TurnExtras(streamed=(item("a"), item("b"), item("b/c"))))])
        await store.commit([AppendStream(run_id="r", worker="a", items=(item("b"), item("d")))])
        await store.commit([rewind(1, "b", "unknown")])
        marked = [(each.location, each.superseded) for each in await store.stream("r", "log")]
        assert marked == [("a", False), ("b", True), ("b/c", False), ("b", True), ("d", False)]

    @case
    async def test_a_rewind_replaces_the_deadline(self, store: Store) -> None:
        await store.commit([run(owner="a", deadline_at=105.0), turn(0, entry("a"), patch=succeeded())])
        await store.commit([rewind(1, "a", deadline_at=400.0)])
        assert (await record(store)).deadline_at == 400.0
        await store.commit([rewind(2)])
        assert (await record(store)).deadline_at is None

    @case
    async def test_a_malformed_rewind_is_refused(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        for bad in (rewind(0, turn_id=""), rewind(0, entries=(entry(value=12),)), rewind(0, id="")):
            await refused(store.commit([deliver(), bad]))
        assert (await load(store)).inbox == ()

    @case
    async def test_a_run_may_be_rewound_while_it_runs_again(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("a"), patch=succeeded()), rewind(1, "a")])
        await claim_ids(store, claim("b", 300.0))
        running = RunPatch(status=RunStatus.RUNNING, owner="b")
        assert await store.commit([turn(2, entry("a"), worker="b", patch=running)]) == [Committed()]
        assert await store.commit([rewind(3, "a")]) == [Committed()]
        row = await record(store)
        assert (row.generation, row.owner) == (2, None)
