"""A run whose history is cut back goes on from there, whatever it was doing."""

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
    duties,
    end,
    entry,
    held_by,
    load,
    locations,
    mail,
    observe,
    publish,
    receive,
    record,
    refused,
    run,
    succeeded,
    suspended,
    take,
    turn,
    waiting,
)


def rewind(base: int, *dropped: str, id: str = "r", **fields: Any) -> RewindRun:
    given: dict[str, Any] = {"turn_id": f"rewind-{base}", "now": 300.0}
    return RewindRun(run_id=id, base=base, dropped=dropped, **{**given, **fields})


class RewindingCases(ContractCase):
    @case
    async def test_the_rows_of_the_dropped_locations_go(self, store: Store) -> None:
        pending, done = entry("b", 1, value=None), entry("b", 1)
        await store.commit([run(owner="a"), turn(0, entry("a"), pending), turn(2, done), turn(3, entry("b/c", 2))])
        await store.commit([turn(4, entry("bc", 3))])
        assert await store.commit([rewind(5, "b", "bc", "never was")]) == [Committed()]
        snapshot = await load(store)
        assert locations(snapshot) == ["a", "b/c"], "of exactly these: what is below is named itself"
        assert (snapshot.position, snapshot.record.fence) == (6, 6)

    @case
    async def test_entries_are_put_in_their_place(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("a"), entry("b", 1))])
        anew = (entry("a", attempts=0, value=None), entry("x", 5))
        assert await store.commit([rewind(2, "a", "b", entries=anew)]) == [Committed()]
        snapshot = await load(store)
        assert (snapshot.entries, snapshot.position, snapshot.record.fence) == (anew, 4, 4)
        assert [row.position for row in await store.history("r")] == [3, 4]

    @case
    async def test_a_rewound_run_is_due_and_nobodys(self, store: Store) -> None:
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
        assert (row.first_executed_at, row.epoch, row.run_attempt) == (100.0, 0, 1), "it is cut back, not begun anew"
        assert await take(store, claim("b", 300.0)) == ["r"]
        assert (await record(store)).first_executed_at == 100.0

    @case
    async def test_the_owner_of_a_rewound_run_is_refused(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry()), mail(), rewind(1, "charge")])
        assert await store.owned_with_messages("a") == []
        assert await store.owned("a") == []
        stale = [turn(base, entry("zombie"), turn_id=f"z{base}") for base in range(3)]
        assert await store.commit(stale) == [Superseded()] * 3
        unowned = [turn(base, entry("zombie"), turn_id=f"z{base}", owned=False) for base in range(2)]
        assert await store.commit(unowned) == [Superseded()] * 2

    @case
    async def test_a_suspended_and_held_run_is_let_go(self, store: Store) -> None:
        held, waits = Hold("step_failed", "why"), (Wait("timer"),)
        patch = suspended(900.0, held=held, waits=waits, recoveries=3, drift=("charge",))
        await store.commit([run(owner="a"), turn(0, entry(), patch=patch), rewind(1, "charge")])
        row = await record(store)
        assert (row.held, row.waits, row.wake_at) == (None, (), 300.0)
        assert (row.recoveries, row.drift) == (0, ())
        assert await store.retry_held([("flow", 1)], "step_failed", 301.0) == 0
        assert await take(store, claim("b", 300.0)) == ["r"]

    @case
    async def test_a_run_that_has_ended_goes_on(self, store: Store) -> None:
        error = replace(succeeded(prune_at=400.0), status=RunStatus.FAILED)
        await store.commit([run(owner="a"), turn(0, entry("a"), entry("b", 1), patch=error)])
        assert await store.commit([rewind(2, "b")]) == [Committed()]
        row = await record(store)
        assert (row.status, row.result, row.error, row.ended_at) == (RunStatus.RUNNING, None, None, None)
        assert await store.prune(9e9) == 0
        assert await take(store, claim("a", 300.0)) == ["r"]
        assert await store.commit([turn(3, entry("b", 1), patch=succeeded(310.0))]) == [Committed()]
        assert (await record(store)).status is RunStatus.SUCCEEDED
        assert await store.prune(9e9) == 0, "the end that was undone says no more when to forget it"

    @case
    async def test_the_duties_of_an_end_that_is_undone_are_the_next_ends(self, store: Store) -> None:
        await store.commit([run(owner="a"), observe(), mail(), end()])
        assert (await duties(store))["r"].orphans
        await store.commit([rewind(1)])
        assert await store.unfinalized() == []
        await store.commit([turn(2, owned=False, seen=1, consumed=(1,), patch=succeeded(310.0))])
        (owing,) = await store.unfinalized()
        assert (owing.observers, owing.messages, owing.orphans) == ((Observer("above", "0/child"),), (), False)

    @case
    async def test_a_run_that_never_executed_waits_on(self, store: Store) -> None:
        await store.commit([run(wake_at=900.0), rewind(0)])
        row = await record(store)
        assert (row.status, row.first_executed_at, row.wake_at) == (RunStatus.PENDING, None, 300.0)
        assert await store.commit([end(only_if_not_started=True)]) == [AlreadyStarted()]

    @case
    async def test_rewinding_is_refused_from_another_position(self, store: Store) -> None:
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
            assert await store.commit([write]) == [Committed()], "its answer was lost"
            assert await load(store, id) == before
            await take(store, claim("b", 310.0))
            assert await store.commit([turn(3, entry("c", 2), id=id, worker="b")]) == [Committed()]
            assert await store.commit([write]) == [Committed()]
            assert (await record(store, id)).generation == 1

    @case
    async def test_returned_mail_is_unread_again_under_its_old_number(self, store: Store) -> None:
        await store.commit([run(owner="a"), *(mail(f"m{n}", policy="broadcast") for n in range(1, 5))])
        before = await store.inbox("r")
        await store.commit([turn(0, entry(), seen=4, consumed=(1, 3, 4))])
        back = (replace(before[2], body=b"kept elsewhere"), before[0])
        await store.commit([rewind(1, "charge", returned=back)])
        inbox = await store.inbox("r")
        assert inbox == [before[0], before[1], back[0]]
        assert (await load(store)).inbox == tuple(inbox)
        assert await store.inbox("r", after=2) == [back[0]]
        assert await store.commit([mail("m3"), mail("m4")]) == [
            MessageDelivered(3, fresh=False),
            MessageDelivered(4, fresh=False),
        ]
        assert await store.commit([mail("m5")]) == [MessageDelivered(5, fresh=True)]
        await store.commit([turn(2, owned=False, seen=5, consumed=(1, 2, 3, 5), patch=suspended())])
        assert await store.inbox("r") == []

    @case
    async def test_an_assignment_may_come_back_as_mail_of_its_own(self, store: Store) -> None:
        await store.commit([*waiting(), publish("e1", event_id="own")])
        (given,) = await store.inbox("r")
        await store.commit([turn(1, entry(), owned=False, seen=1, consumed=(1,), patch=suspended())])
        back = replace(given, kind="event", target=None, offset=0)
        await store.commit([rewind(2, "charge", returned=(back,))])
        assert await store.inbox("r") == [back]
        assert await held_by(store) == [], "the topic has let go of it"

    @case
    async def test_the_id_of_returned_mail_is_not_forgotten(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail(), turn(0, entry(), seen=1, consumed=(1,))])
        await store.commit([rewind(1, "charge", returned=(replace(mail().message, number=1),))])
        await store.prune(9e9)
        assert await store.commit([mail()]) == [MessageDelivered(1, fresh=False)]

    @case
    async def test_mail_comes_back_even_if_its_id_was_forgotten(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail(), turn(0, entry(), seen=1, consumed=(1,))])
        await store.prune(9e9)
        back = replace(mail().message, number=1)
        await store.commit([rewind(1, "charge", returned=(back,))])
        assert await store.inbox("r") == [back]
        assert await store.commit([mail(), mail("n")]) == [
            MessageDelivered(1, fresh=False),
            MessageDelivered(2, fresh=True),
        ]

    @case
    async def test_unread_events_that_came_back_are_owed_an_answer(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail(), turn(0, entry(), seen=1, consumed=(1,), patch=succeeded())])
        await store.commit([rewind(1, "charge", returned=(replace(mail().message, number=1),)), end(now=310.0)])
        assert [message.id for message in (await duties(store))["r"].messages] == ["m"]

    @case
    async def test_subscriptions_go_and_assignments_stay(self, store: Store) -> None:
        await store.commit([*waiting(), receive(1, "t", target="0/other"), publish("e1"), rewind(2), publish("e2")])
        assert await assigned(store, "r") == [["topic/t/1"]]
        assert await held_by(store) == ["e1", "e2"]

    @case
    async def test_what_was_streamed_at_dropped_locations_is_marked(self, store: Store) -> None:
        def item(location: str) -> StreamItem:
            return StreamItem(stream="log", value=b"1", location=location, at=1.0, writer="w")

        await store.commit([run(owner="a"), turn(0, extras=TurnExtras(streamed=(item("a"), item("b"), item("b/c"))))])
        await store.commit([AppendStream(run_id="r", worker="a", items=(item("b"), item("d")))])
        await store.commit([rewind(1, "b", "never was")])
        marked = [(each.location, each.superseded) for each in await store.stream("r", "log")]
        assert marked == [("a", False), ("b", True), ("b/c", False), ("b", True), ("d", False)]

    @case
    async def test_the_limit_of_time_is_the_one_that_the_rewind_grants(self, store: Store) -> None:
        await store.commit([run(owner="a", deadline_at=105.0), turn(0, entry("a"), patch=succeeded())])
        await store.commit([rewind(1, "a", deadline_at=400.0)])
        assert (await record(store)).deadline_at == 400.0
        await store.commit([rewind(2)])
        assert (await record(store)).deadline_at is None

    @case
    async def test_a_malformed_rewind_is_refused(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        for bad in (rewind(0, turn_id=""), rewind(0, entries=(entry(value=12),)), rewind(0, id="")):
            await refused(store.commit([mail(), bad]))
        assert (await load(store)).inbox == ()

    @case
    async def test_a_run_may_be_rewound_while_it_runs_again(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, entry("a"), patch=succeeded()), rewind(1, "a")])
        await take(store, claim("b", 300.0))
        going_on = RunPatch(status=RunStatus.RUNNING, owner="b")
        assert await store.commit([turn(2, entry("a"), worker="b", patch=going_on)]) == [Committed()]
        assert await store.commit([rewind(3, "a")]) == [Committed()]
        row = await record(store)
        assert (row.generation, row.owner) == (2, None)
