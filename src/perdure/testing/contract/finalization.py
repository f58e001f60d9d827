"""An ended run is finalized: observers are notified, unread events processed, attached children ended."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from perdure.model.records import ErrorRecord, RunResult, RunStatus
from perdure.stores.protocol import Store
from perdure.stores.results import AlreadyEnded, Committed, Created, IdTaken, ObserverAdded, RunMissing
from perdure.stores.writes import ContinueAs, FinalizeRun, Observer, RedirectedEvent, RewindRun, RunPatch
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    claim,
    claim_ids,
    dead_letter,
    deliver,
    end,
    entry,
    finalize,
    load,
    observe,
    observed,
    publish,
    receive,
    record,
    run,
    succeeded,
    suspended,
    turn,
    unfinalized,
    waiting,
)

ABOVE = Observer("above", "0/child")


def redirected(number: int, *, topic: str = "t", limit: int | None = None) -> RedirectedEvent:
    to = publish(f"redirected-{number}", topic=topic, now=160.0, limit=limit)
    return RedirectedEvent(number, to, dead_letter(f"dead-{number}"))


class ObserverCases(ContractCase):
    @case
    async def test_an_observed_run_needs_finalization_when_it_has_ended(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        assert await store.commit([observe()]) == [ObserverAdded()]
        assert await store.unfinalized() == []
        await store.commit([turn(0, entry(), patch=succeeded())])
        (pending,) = await store.unfinalized()
        assert (pending.observers, pending.messages, pending.orphaned_children) == ((ABOVE,), (), False)
        assert pending.record == await record(store)

    @case
    async def test_observing_changes_nothing_else_of_the_run(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=suspended(500.0))])
        before = await load(store)
        await store.commit([observe()])
        assert await load(store) == before
        assert await claim_ids(store, claim("b", 130.0)) == []

    @case
    async def test_an_observer_is_stored_once_per_target(self, store: Store) -> None:
        results = await store.commit(
            [run(owner="a"), observe(), observe(), observe(target="0/other"), observe("beside"), observe()]
        )
        assert results[1:] == [ObserverAdded()] * 5
        await store.commit([turn(0, patch=succeeded())])
        (pending,) = await store.unfinalized()
        assert sorted(pending.observers, key=lambda each: (each.run_id, each.target)) == [
            ABOVE,
            Observer("above", "0/other"),
            Observer("beside", "0/child"),
        ]

    @case
    async def test_observing_an_ended_run_returns_its_result(self, store: Store) -> None:
        error = ErrorRecord("E", "bad", fields=b"\xff")
        failed = RunPatch(status=RunStatus.FAILED, error=error, ended_at=110.0)
        await store.commit([run("r1", owner="a"), turn(0, id="r1", patch=succeeded())])
        await store.commit([run("r2", owner="a"), turn(0, id="r2", patch=failed), run("r3"), end(id="r3")])
        results = await store.commit([observe(id=id) for id in ("r1", "r2", "r3", "missing")])
        assert results == [
            AlreadyEnded(RunStatus.SUCCEEDED, RunResult(result=b'"done"')),
            AlreadyEnded(RunStatus.FAILED, RunResult(RunStatus.FAILED, error=error)),
            AlreadyEnded(RunStatus.CANCELLED, RunResult(RunStatus.CANCELLED)),
            RunMissing(),
        ]
        assert await store.unfinalized() == [], "its result was returned at once"

    @case
    async def test_observing_and_ending_do_not_miss_each_other(self, store: Store) -> None:
        other = await self.second(store)
        ids = [f"r{n}" for n in range(20)]
        await store.commit([run(id, owner="a") for id in ids])
        ends = [store.commit([turn(0, id=id, patch=succeeded())]) for id in ids]
        observations = [other.commit([observe(id=id)]) for id in ids]
        results = await asyncio.gather(*(call for pair in zip(observations, ends, strict=True) for call in pair))
        informed = {id for id, (result,) in zip(ids, results[::2], strict=True) if isinstance(result, AlreadyEnded)}
        assert informed | set(await unfinalized(store)) == set(ids)
        assert not informed & set(await unfinalized(store))

    @case
    async def test_observers_stay_when_the_run_restarts(self, store: Store) -> None:
        continue_as = ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=111.0)
        running = RunPatch(status=RunStatus.RUNNING, owner="a")
        await store.commit([run(owner="a"), observe(), turn(0, continue_as=continue_as, patch=running)])
        await store.commit([turn(1, patch=succeeded())])
        assert (await unfinalized(store))["r"].observers == (ABOVE,)

    @case
    async def test_a_run_may_be_observed_from_its_creation(self, store: Store) -> None:
        creations = [observed(run("r1", owner="a")), run("r2", owner="a"), observed(run("r3"), "beside", "0/x")]
        created = [Created(owned=True), Created(owned=True), Created(owned=False)]
        assert await store.commit(creations) == created
        assert await store.unfinalized() == []
        await store.commit([turn(0, id=id, patch=succeeded()) for id in ("r1", "r2")])
        await store.commit([end(id="r3")])
        pending = await unfinalized(store)
        assert {id: each.observers for id, each in pending.items()} == {
            "r1": (ABOVE,),
            "r3": (Observer("beside", "0/x"),),
        }

    @case
    async def test_a_fork_may_be_observed_from_its_creation(self, store: Store) -> None:
        fork = replace(observed(run(owner="a")), entries=(entry(),), inbox=(deliver(kind="child").message,))
        assert await store.commit([fork]) == [Created(owned=True)]
        await store.commit([turn(1, seen=1, patch=succeeded())])
        assert (await unfinalized(store))["r"].observers == (ABOVE,)

    @case
    async def test_a_repeated_creation_adds_its_observer(self, store: Store) -> None:
        await store.commit([run("r1", owner="a"), observed(run("r2", owner="a"))])
        again = [observed(run(id, owner="a")) for id in ("r1", "r2", "r3")]
        assert await store.commit(again) == [Created(owned=True)] * 3
        assert await store.commit([*again, *again]) == [Created(owned=True)] * 6
        await store.commit([turn(0, id=id, patch=succeeded()) for id in ("r1", "r2", "r3")])
        assert [each.observers for each in (await unfinalized(store)).values()] == [(ABOVE,)] * 3

    @case
    async def test_a_repeated_creation_that_observes_an_ended_run_returns_its_result(self, store: Store) -> None:
        creations = [observed(run(id, owner="a")) for id in ("r1", "r2")]
        await store.commit(creations)
        await store.commit([turn(0, id="r1", patch=succeeded()), finalize("r1", notified=(ABOVE,))])
        how = AlreadyEnded(RunStatus.SUCCEEDED, RunResult(result=b'"done"'))
        assert await store.commit(creations) == [how, Created(owned=True)]
        assert await store.unfinalized() == [], "its result was returned at once"

    @case
    async def test_a_creation_with_a_taken_id_adds_no_observer(self, store: Store) -> None:
        await store.commit([run("r1", owner="a"), run("r2", owner="a")])
        results = await store.commit(
            [observed(run("r1", created_by="another")), observed(run("r3", owner="a")), observed(run("r2"))]
        )
        assert [type(result) for result in results] == [IdTaken, Created, Created]
        await store.commit([turn(0, id=id, patch=succeeded()) for id in ("r1", "r2", "r3")])
        assert sorted(await unfinalized(store)) == ["r2", "r3"]

    @case
    async def test_repeated_creation_and_end_of_a_run_do_not_miss_each_other(self, store: Store) -> None:
        other = await self.second(store)
        ids = [f"r{n}" for n in range(20)]
        await store.commit([run(id, owner="a") for id in ids])
        ends = [store.commit([turn(0, id=id, patch=succeeded())]) for id in ids]
        observations = [other.commit([observed(run(id, owner="a"))]) for id in ids]
        results = await asyncio.gather(*(call for pair in zip(observations, ends, strict=True) for call in pair))
        informed = {id for id, (result,) in zip(ids, results[::2], strict=True) if isinstance(result, AlreadyEnded)}
        assert informed | set(await unfinalized(store)) == set(ids)
        assert not informed & set(await unfinalized(store))


class FinalizationCases(ContractCase):
    @case
    async def test_a_run_without_observers_and_unread_events_needs_no_finalization(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("m", kind="resume"), deliver("c", kind="child"), deliver("e")])
        await store.commit([turn(0, seen=3, consumed=(3,), patch=succeeded(prune_at=200.0))])
        assert await store.unfinalized() == [], "only unread events need finalization"
        assert len(await store.prune(200.0)) == 1

    @case
    async def test_unread_events_need_finalization(self, store: Store) -> None:
        await store.commit(
            [run(owner="a"), deliver("m1"), deliver("m2", kind="cancel"), deliver("m3", policy="broadcast")]
        )
        await store.commit([turn(0, seen=0, patch=succeeded())])
        (pending,) = await store.unfinalized()
        assert [message.id for message in pending.messages] == ["m1", "m3"]
        assert pending.messages[1] == (await store.inbox("r"))[2], "as in the inbox"

    @case
    async def test_unread_assignments_of_an_ended_run_are_released_by_finalization(self, store: Store) -> None:
        await store.commit([*waiting(), publish(), end()])
        (pending,) = await store.unfinalized()
        assert [(message.kind, message.offset) for message in pending.messages] == [("assignment", 1)]
        await store.commit([*waiting("next")])
        assert await store.commit([finalize(returned=(1,), orphaned_children=True)]) == [Committed()]
        assert await store.unfinalized() == []
        assert [message.id for message in await store.inbox("next")] == ["topic/t/1"]
        assert await store.inbox("r") == []

    @case
    async def test_a_terminated_run_that_has_executed_leaves_orphans(self, store: Store) -> None:
        await store.commit([run("r1", owner="a"), run("r2"), run("r3"), run("r4", owner="a")])
        await store.commit([end(id="r1"), end(id="r2"), end(id="r3", only_if_not_started=True)])
        await store.commit([turn(0, id="r4", patch=RunPatch(status=RunStatus.CANCELLED, ended_at=110.0))])
        pending = await unfinalized(store)
        assert list(pending) == ["r1"], "r2 and r3 never executed and have no children; r4 ended by its own turn"
        assert (pending["r1"].orphaned_children, pending["r1"].observers, pending["r1"].messages) == (True, (), ())
        await store.commit([finalize("r1")])
        assert list(await unfinalized(store)) == ["r1"]
        assert await store.commit([finalize("r1", orphaned_children=True)]) == [Committed()]
        assert await store.unfinalized() == []

    @case
    async def test_a_run_ended_before_its_start_still_needs_finalization(self, store: Store) -> None:
        await store.commit([run(), observe(), deliver(), end(only_if_not_started=True)])
        (pending,) = await store.unfinalized()
        assert (pending.observers, len(pending.messages), pending.orphaned_children) == ((ABOVE,), 1, False)

    @case
    async def test_finalization_may_be_recorded_in_parts(self, store: Store) -> None:
        await store.commit([run(owner="a"), observe(), observe("beside"), deliver("m1"), deliver("m2")])
        await store.commit([turn(0, seen=2, patch=succeeded(prune_at=200.0))])
        first = finalize(notified=(ABOVE,), consumed=(1,), dead_letters=(dead_letter("d1"),))
        assert await store.commit([first]) == [Committed()]
        assert await store.commit([first]) == [Committed()], "its result was lost"
        (pending,) = await store.unfinalized()
        assert pending.observers == (Observer("beside", "0/child"),)
        assert [message.id for message in pending.messages] == ["m2"]
        assert await store.prune(300.0) == []
        await store.commit([finalize(notified=pending.observers)])
        await store.commit([finalize(consumed=(2,))])
        assert await store.unfinalized() == []
        assert [each.id for each in await store.dead_letters()] == ["d1"]
        assert len(await store.prune(300.0)) == 1

    @case
    async def test_finalization_changes_nothing_else_of_the_run(self, store: Store) -> None:
        await store.commit([run(owner="a"), observe(), turn(0, entry(), patch=succeeded())])
        before = await load(store)
        await store.commit([finalize(notified=(ABOVE,))])
        assert await load(store) == before

    @case
    async def test_a_repeated_finalization_does_not_restore_a_removed_dead_letter(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver(), turn(0, seen=1, patch=succeeded())])
        write = finalize(consumed=(1,), dead_letters=(dead_letter(),))
        await store.commit([write])
        assert await store.remove_dead_letter("d")
        assert await store.commit([write]) == [Committed()], "its result was lost"
        assert await store.dead_letters() == []

    @case
    async def test_finalizing_an_open_run_changes_nothing(self, store: Store) -> None:
        await store.commit([run(owner="a"), observe(), deliver()])
        assert await store.commit([finalize(notified=(ABOVE,), consumed=(1,), dead_letters=(dead_letter(),))]) == [
            Committed()
        ]
        assert await store.dead_letters() == []
        assert len(await store.inbox("r")) == 1, "an open run, such as a rewound one, is finalized after its next end"
        await store.commit([turn(0, seen=1, patch=succeeded())])
        (pending,) = await store.unfinalized()
        assert (pending.observers, len(pending.messages)) == ((ABOVE,), 1)
        assert await store.commit([FinalizeRun(run_id="missing", now=1.0)]) == [RunMissing()]

    # events that move to their topics

    @case
    async def test_finalization_moves_an_event_to_its_topic(self, store: Store) -> None:
        await store.commit(
            [*waiting("w"), run(owner="a"), deliver("m1"), deliver("m2"), turn(0, seen=2, patch=succeeded())]
        )
        write = finalize(redirected=(redirected(1), redirected(2)))
        assert await store.commit([write]) == [Committed()]
        assert [each.offset for each in await store.inbox("w")] == [1]
        assert [(each.offset, each.id) for each in await store.topic("t")] == [(1, "redirected-1"), (2, "redirected-2")]
        assert await store.inbox("r") == []
        assert await store.unfinalized() == []
        assert await claim_ids(store, claim("b")) == ["w"]
        assert await store.commit([write]) == [Committed()], "its result was lost"
        assert len(await store.topic("t")) == 2

    @case
    async def test_finalization_makes_an_event_a_dead_letter_if_its_topic_is_full(self, store: Store) -> None:
        await store.commit(
            [publish(), run(owner="a"), deliver("m1"), deliver("m2"), turn(0, seen=2, patch=succeeded())]
        )
        write = finalize(redirected=(redirected(1, limit=1), redirected(2, topic="u", limit=1)))
        assert await store.commit([write]) == [Committed()]
        assert [each.id for each in await store.dead_letters()] == ["dead-1"]
        assert [[each.id for each in await store.topic(topic)] for topic in "tu"] == [["e"], ["redirected-2"]]
        assert await store.unfinalized() == []
        assert await store.remove_dead_letter("dead-1")
        await store.commit([write])
        assert await store.dead_letters() == []

    @case
    async def test_finalization_does_not_move_an_event_of_a_rewound_run(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver(), turn(0, entry(), seen=1, patch=succeeded())])
        await store.commit([RewindRun(run_id="r", base=1, turn_id="back", now=155.0, dropped=("charge",))])
        assert await store.commit([finalize(redirected=(redirected(1),))]) == [Committed()]
        assert await store.topic("t") == []
        assert [message.id for message in await store.inbox("r")] == ["m"]

    @case
    async def test_a_moved_event_waits_for_the_unfinished_fan_out_of_an_earlier_event(self, store: Store) -> None:
        for n in range(3):
            await store.commit(waiting(f"w{n}"))
        await store.commit([publish(page=2, consume=False)])
        await store.commit(
            [run(owner="a"), deliver(), turn(0, seen=1, patch=succeeded()), finalize(redirected=(redirected(1),))]
        )
        assert [each.id for each in await store.unfinished_broadcasts()] == ["e", "redirected-1"]

    @case
    async def test_unfinalized_runs_are_listed_in_the_order_of_their_ends(self, store: Store) -> None:
        ended = {"r1": 130.0, "r2": 110.0, "r3": 120.0}
        for id, at in ended.items():
            await store.commit([run(id, owner="a"), observe(id=id), turn(0, id=id, patch=succeeded(at))])
        assert [each.record.id for each in await store.unfinalized()] == ["r2", "r3", "r1"]
        assert [each.record.id for each in await store.unfinalized(limit=2)] == ["r2", "r3"]

    @case
    async def test_many_runs_are_finalized_in_one_batch(self, store: Store) -> None:
        ids = [f"r{n}" for n in range(6)]
        beside = Observer("beside", "0/child")
        creations = [observed(run(id, owner="a")) for id in ids]
        await store.commit([*creations, *(observe("beside", id=id) for id in ids), deliver(id="r2"), deliver(id="r3")])
        await store.commit([turn(0, id=id, patch=succeeded()) for id in ids[:5]])
        rewind = RewindRun(run_id="r4", base=1, turn_id="back", now=155.0, dropped=())
        results = await store.commit(
            [
                finalize("r0", notified=(ABOVE, beside)),
                finalize("r1", notified=(beside,)),
                finalize("missing", notified=(ABOVE,)),
                finalize("r2", notified=(ABOVE, beside)),
                finalize("r3", notified=(ABOVE, beside), consumed=(1,)),
                finalize("r5", notified=(ABOVE,)),  # has not ended
                rewind,
                finalize("r4", notified=(ABOVE,)),  # rewound
            ]
        )
        assert results == [Committed(), Committed(), RunMissing(), *[Committed()] * 5]
        pending = await unfinalized(store)
        assert {id: (each.observers, len(each.messages)) for id, each in pending.items()} == {
            "r1": ((ABOVE,), 0),
            "r2": ((), 1),
        }
        await store.commit([end("e", id="r4"), end("e", id="r5")])
        pending = await unfinalized(store)
        assert pending["r4"].observers == pending["r5"].observers == (ABOVE, beside)
        await store.commit([finalize("r1"), finalize("r2", consumed=(1,))])
        assert set(await unfinalized(store)) == {"r1", "r4", "r5"}

    @case
    async def test_many_observers_and_events_are_finalized_in_pages(self, store: Store) -> None:
        observers = [observe(f"o{n:04d}") for n in range(1200)]
        await store.commit([run(owner="a"), *observers, *(deliver(f"m{n}") for n in range(1200))])
        await store.commit([turn(0, seen=0, patch=succeeded())])
        notified, read = set[str](), set[str]()
        while page := await store.unfinalized():
            (pending,) = page
            assert pending.observers or pending.messages
            notified |= {each.run_id for each in pending.observers}
            read |= {each.id for each in pending.messages}
            await store.commit(
                [finalize(notified=pending.observers, consumed=tuple(each.number for each in pending.messages))]
            )
        assert (len(notified), len(read)) == (1200, 1200)

    @case
    async def test_unfinalized_runs_and_children_of_open_parents_are_not_pruned(self, store: Store) -> None:
        await store.commit([run("above", owner="a"), run("r", parent="above", owner="a")])
        await store.commit([run("s", parent="missing", owner="a"), observe(id="s")])
        for id in ("r", "s"):
            await store.commit([turn(0, id=id, patch=succeeded(prune_at=200.0))])
        assert await store.prune(300.0) == []
        await store.commit([finalize("s", notified=(ABOVE,))])
        assert len(await store.prune(300.0)) == 1, "a missing parent is not open"
        await store.commit([turn(0, id="above", patch=succeeded())])
        assert len(await store.prune(300.0)) == 1
        assert await store.records(["r", "s"]) == [None, None]

    @case
    async def test_children_of_open_parents_do_not_block_pruning_of_other_runs(self, store: Store) -> None:
        await store.commit([run("above", owner="a")])
        for n in range(5):
            await store.commit([run(f"c{n}", parent="above", owner="a"), run(f"p{n}", owner="a")])
            await store.commit([turn(0, id=f"{kind}{n}", patch=succeeded(prune_at=200.0)) for kind in "cp"])
        assert len(await store.prune(300.0, limit=3)) == 3
        assert len(await store.prune(300.0, limit=3)) == 2
        assert await store.prune(300.0, limit=3) == []

    @case
    async def test_an_ended_run_has_no_subscriptions(self, store: Store) -> None:
        await store.commit([*waiting("r1"), end(id="r1"), *waiting("r2")])
        await store.commit([turn(1, id="r2", owned=False, patch=succeeded())])
        await store.commit([run("r3", owner="a"), receive(0, "t", id="r3", patch=succeeded())])
        await store.commit([publish()])
        assert [await store.inbox(id) for id in ("r1", "r2", "r3")] == [[], [], []]
        assert [each.id for each in await store.topic("t")] == ["e"]
