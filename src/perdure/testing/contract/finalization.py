"""What a run owes when it ends: news to those who observe it, an answer to its unread events, word to its children."""

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
    duties,
    end,
    entry,
    letter,
    load,
    mail,
    observe,
    observed,
    publish,
    receive,
    record,
    run,
    settle,
    succeeded,
    suspended,
    take,
    turn,
    waiting,
)

ABOVE = Observer("above", "0/child")


def moved(number: int, *, topic: str = "t", limit: int | None = None) -> RedirectedEvent:
    to = publish(f"moved-{number}", topic=topic, now=160.0, limit=limit)
    return RedirectedEvent(number, to, letter(f"letter-{number}"))


class ObservingCases(ContractCase):
    @case
    async def test_an_observed_run_owes_news_once_it_has_ended(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        assert await store.commit([observe()]) == [ObserverAdded()]
        assert await store.unfinalized() == []
        await store.commit([turn(0, entry(), patch=succeeded())])
        (owing,) = await store.unfinalized()
        assert (owing.observers, owing.messages, owing.orphans) == ((ABOVE,), (), False)
        assert owing.record == await record(store)

    @case
    async def test_observing_changes_nothing_else_of_the_run(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=suspended(500.0))])
        before = await load(store)
        await store.commit([observe()])
        assert await load(store) == before
        assert await take(store, claim("b", 130.0)) == []

    @case
    async def test_an_observer_is_noted_once_per_target(self, store: Store) -> None:
        answers = await store.commit(
            [run(owner="a"), observe(), observe(), observe(target="0/other"), observe("beside"), observe()]
        )
        assert answers[1:] == [ObserverAdded()] * 5
        await store.commit([turn(0, patch=succeeded())])
        (owing,) = await store.unfinalized()
        assert sorted(owing.observers, key=lambda each: (each.run_id, each.target)) == [
            ABOVE,
            Observer("above", "0/other"),
            Observer("beside", "0/child"),
        ]

    @case
    async def test_who_observes_a_run_that_has_ended_learns_how(self, store: Store) -> None:
        error = ErrorRecord("E", "bad", fields=b"\xff")
        failed = RunPatch(status=RunStatus.FAILED, error=error, ended_at=110.0)
        await store.commit([run("r1", owner="a"), turn(0, id="r1", patch=succeeded())])
        await store.commit([run("r2", owner="a"), turn(0, id="r2", patch=failed), run("r3"), end(id="r3")])
        answers = await store.commit([observe(id=id) for id in ("r1", "r2", "r3", "missing")])
        assert answers == [
            AlreadyEnded(RunStatus.SUCCEEDED, RunResult(result=b'"done"')),
            AlreadyEnded(RunStatus.FAILED, RunResult(RunStatus.FAILED, error=error)),
            AlreadyEnded(RunStatus.CANCELLED, RunResult(RunStatus.CANCELLED)),
            RunMissing(),
        ]
        assert await store.unfinalized() == [], "it was told at once"

    @case
    async def test_observing_and_ending_do_not_miss_each_other(self, store: Store) -> None:
        other = await self.second(store)
        ids = [f"r{n}" for n in range(20)]
        await store.commit([run(id, owner="a") for id in ids])
        ends = [store.commit([turn(0, id=id, patch=succeeded())]) for id in ids]
        asked = [other.commit([observe(id=id)]) for id in ids]
        answers = await asyncio.gather(*(call for pair in zip(asked, ends, strict=True) for call in pair))
        told = {id for id, (answer,) in zip(ids, answers[::2], strict=True) if isinstance(answer, AlreadyEnded)}
        assert told | set(await duties(store)) == set(ids)
        assert not told & set(await duties(store))

    @case
    async def test_observers_stay_when_the_run_begins_anew(self, store: Store) -> None:
        continue_as = ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=111.0)
        going_on = RunPatch(status=RunStatus.RUNNING, owner="a")
        await store.commit([run(owner="a"), observe(), turn(0, continue_as=continue_as, patch=going_on)])
        await store.commit([turn(1, patch=succeeded())])
        assert (await duties(store))["r"].observers == (ABOVE,)

    @case
    async def test_a_run_may_be_observed_from_its_birth(self, store: Store) -> None:
        births = [observed(run("r1", owner="a")), run("r2", owner="a"), observed(run("r3"), "beside", "0/x")]
        created = [Created(owned=True), Created(owned=True), Created(owned=False)]
        assert await store.commit(births) == created
        assert await store.unfinalized() == []
        await store.commit([turn(0, id=id, patch=succeeded()) for id in ("r1", "r2")])
        await store.commit([end(id="r3")])
        owing = await duties(store)
        assert {id: each.observers for id, each in owing.items()} == {
            "r1": (ABOVE,),
            "r3": (Observer("beside", "0/x"),),
        }

    @case
    async def test_a_fork_may_be_observed_from_its_birth(self, store: Store) -> None:
        fork = replace(observed(run(owner="a")), entries=(entry(),), inbox=(mail(kind="child").message,))
        assert await store.commit([fork]) == [Created(owned=True)]
        await store.commit([turn(1, seen=1, patch=succeeded())])
        assert (await duties(store))["r"].observers == (ABOVE,)

    @case
    async def test_who_asks_again_for_a_run_observes_it_again(self, store: Store) -> None:
        await store.commit([run("r1", owner="a"), observed(run("r2", owner="a"))])
        again = [observed(run(id, owner="a")) for id in ("r1", "r2", "r3")]
        assert await store.commit(again) == [Created(owned=True)] * 3
        assert await store.commit([*again, *again]) == [Created(owned=True)] * 6
        await store.commit([turn(0, id=id, patch=succeeded()) for id in ("r1", "r2", "r3")])
        assert [each.observers for each in (await duties(store)).values()] == [(ABOVE,)] * 3

    @case
    async def test_who_asks_again_for_a_run_that_has_ended_learns_how(self, store: Store) -> None:
        births = [observed(run(id, owner="a")) for id in ("r1", "r2")]
        await store.commit(births)
        await store.commit([turn(0, id="r1", patch=succeeded()), settle("r1", notified=(ABOVE,))])
        how = AlreadyEnded(RunStatus.SUCCEEDED, RunResult(result=b'"done"'))
        assert await store.commit(births) == [how, Created(owned=True)]
        assert await store.unfinalized() == [], "it was told at once"

    @case
    async def test_a_run_whose_id_was_taken_is_not_observed(self, store: Store) -> None:
        await store.commit([run("r1", owner="a"), run("r2", owner="a")])
        answers = await store.commit(
            [observed(run("r1", created_by="another")), observed(run("r3", owner="a")), observed(run("r2"))]
        )
        assert [type(answer) for answer in answers] == [IdTaken, Created, Created]
        await store.commit([turn(0, id=id, patch=succeeded()) for id in ("r1", "r2", "r3")])
        assert sorted(await duties(store)) == ["r2", "r3"]

    @case
    async def test_asking_again_for_a_run_and_its_end_do_not_miss_each_other(self, store: Store) -> None:
        other = await self.second(store)
        ids = [f"r{n}" for n in range(20)]
        await store.commit([run(id, owner="a") for id in ids])
        ends = [store.commit([turn(0, id=id, patch=succeeded())]) for id in ids]
        asked = [other.commit([observed(run(id, owner="a"))]) for id in ids]
        answers = await asyncio.gather(*(call for pair in zip(asked, ends, strict=True) for call in pair))
        told = {id for id, (answer,) in zip(ids, answers[::2], strict=True) if isinstance(answer, AlreadyEnded)}
        assert told | set(await duties(store)) == set(ids)
        assert not told & set(await duties(store))


class DutyCases(ContractCase):
    @case
    async def test_the_end_of_a_plain_run_is_settled_at_once(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail("m", kind="resume"), mail("c", kind="child"), mail("e")])
        await store.commit([turn(0, seen=3, consumed=(3,), patch=succeeded(prune_at=200.0))])
        assert await store.unfinalized() == [], "mail that is no event is nobody's loss"
        assert await store.prune(200.0) == 1

    @case
    async def test_unread_events_are_owed_an_answer(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail("m1"), mail("m2", kind="cancel"), mail("m3", policy="broadcast")])
        await store.commit([turn(0, seen=0, patch=succeeded())])
        (owing,) = await store.unfinalized()
        assert [message.id for message in owing.messages] == ["m1", "m3"]
        assert owing.messages[1] == (await store.inbox("r"))[2], "as it lies in the inbox"

    @case
    async def test_unread_assignments_are_owed_to_their_topic(self, store: Store) -> None:
        await store.commit([*waiting(), publish(), end()])
        (owing,) = await store.unfinalized()
        assert [(message.kind, message.offset) for message in owing.messages] == [("assignment", 1)]
        await store.commit([*waiting("next")])
        assert await store.commit([settle(returned=(1,), orphans=True)]) == [Committed()]
        assert await store.unfinalized() == []
        assert [message.id for message in await store.inbox("next")] == ["topic/t/1"]
        assert await store.inbox("r") == []

    @case
    async def test_a_terminated_run_leaves_orphans(self, store: Store) -> None:
        await store.commit([run("r1", owner="a"), run("r2"), run("r3"), run("r4", owner="a")])
        await store.commit([end(id="r1"), end(id="r2"), end(id="r3", only_if_not_started=True)])
        await store.commit([turn(0, id="r4", patch=RunPatch(status=RunStatus.CANCELLED, ended_at=110.0))])
        owing = await duties(store)
        assert list(owing) == ["r1"], "one that never executed has no children; one that ends itself has seen to them"
        assert (owing["r1"].orphans, owing["r1"].observers, owing["r1"].messages) == (True, (), ())
        await store.commit([settle("r1")])
        assert list(await duties(store)) == ["r1"]
        assert await store.commit([settle("r1", orphans=True)]) == [Committed()]
        assert await store.unfinalized() == []

    @case
    async def test_a_run_that_was_ended_before_it_began_still_tells(self, store: Store) -> None:
        await store.commit([run(), observe(), mail(), end(only_if_not_started=True)])
        (owing,) = await store.unfinalized()
        assert (owing.observers, len(owing.messages), owing.orphans) == ((ABOVE,), 1, False)

    @case
    async def test_duties_are_ticked_off_in_parts(self, store: Store) -> None:
        await store.commit([run(owner="a"), observe(), observe("beside"), mail("m1"), mail("m2")])
        await store.commit([turn(0, seen=2, patch=succeeded(prune_at=200.0))])
        first = settle(notified=(ABOVE,), consumed=(1,), dead_letters=(letter("d1"),))
        assert await store.commit([first]) == [Committed()]
        assert await store.commit([first]) == [Committed()], "its answer was lost"
        (owing,) = await store.unfinalized()
        assert owing.observers == (Observer("beside", "0/child"),)
        assert [message.id for message in owing.messages] == ["m2"]
        assert await store.prune(300.0) == 0
        await store.commit([settle(notified=owing.observers)])
        await store.commit([settle(consumed=(2,))])
        assert await store.unfinalized() == []
        assert [each.id for each in await store.dead_letters()] == ["d1"]
        assert await store.prune(300.0) == 1

    @case
    async def test_settling_changes_nothing_else_of_the_run(self, store: Store) -> None:
        await store.commit([run(owner="a"), observe(), turn(0, entry(), patch=succeeded())])
        before = await load(store)
        await store.commit([settle(notified=(ABOVE,))])
        assert await load(store) == before

    @case
    async def test_a_settled_runs_letter_does_not_come_back(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail(), turn(0, seen=1, patch=succeeded())])
        write = settle(consumed=(1,), dead_letters=(letter(),))
        await store.commit([write])
        assert await store.remove_dead_letter("d")
        assert await store.commit([write]) == [Committed()], "its answer was lost"
        assert await store.dead_letters() == []

    @case
    async def test_a_run_that_goes_on_has_nothing_to_settle(self, store: Store) -> None:
        await store.commit([run(owner="a"), observe(), mail()])
        assert await store.commit([settle(notified=(ABOVE,), consumed=(1,), dead_letters=(letter(),))]) == [Committed()]
        assert await store.dead_letters() == []
        assert len(await store.inbox("r")) == 1, "it was rewound meanwhile, and its duties are its next end's"
        await store.commit([turn(0, seen=1, patch=succeeded())])
        (owing,) = await store.unfinalized()
        assert (owing.observers, len(owing.messages)) == ((ABOVE,), 1)
        assert await store.commit([FinalizeRun(run_id="missing", now=1.0)]) == [RunMissing()]

    # events that move to their topics

    @case
    async def test_an_event_moves_to_its_topic_with_the_settling(self, store: Store) -> None:
        await store.commit([*waiting("w"), run(owner="a"), mail("m1"), mail("m2"), turn(0, seen=2, patch=succeeded())])
        write = settle(moved=(moved(1), moved(2)))
        assert await store.commit([write]) == [Committed()]
        assert [each.offset for each in await store.inbox("w")] == [1]
        assert [(each.offset, each.id) for each in await store.topic("t")] == [(1, "moved-1"), (2, "moved-2")]
        assert await store.inbox("r") == []
        assert await store.unfinalized() == []
        assert await take(store, claim("b")) == ["w"]
        assert await store.commit([write]) == [Committed()], "its answer was lost"
        assert len(await store.topic("t")) == 2

    @case
    async def test_an_event_whose_topic_is_full_becomes_a_letter_with_the_settling(self, store: Store) -> None:
        await store.commit([publish(), run(owner="a"), mail("m1"), mail("m2"), turn(0, seen=2, patch=succeeded())])
        write = settle(moved=(moved(1, limit=1), moved(2, topic="u", limit=1)))
        assert await store.commit([write]) == [Committed()]
        assert [each.id for each in await store.dead_letters()] == ["letter-1"]
        assert [[each.id for each in await store.topic(topic)] for topic in "tu"] == [["e"], ["moved-2"]]
        assert await store.unfinalized() == []
        assert await store.remove_dead_letter("letter-1")
        await store.commit([write])
        assert await store.dead_letters() == []

    @case
    async def test_an_event_of_a_run_that_was_rewound_meanwhile_stays_its_mail(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail(), turn(0, entry(), seen=1, patch=succeeded())])
        await store.commit([RewindRun(run_id="r", base=1, turn_id="back", now=155.0, dropped=("charge",))])
        assert await store.commit([settle(moved=(moved(1),))]) == [Committed()]
        assert await store.topic("t") == []
        assert [message.id for message in await store.inbox("r")] == ["m"]

    @case
    async def test_an_event_that_moves_behind_an_unfinished_one_waits_its_turn(self, store: Store) -> None:
        for n in range(3):
            await store.commit(waiting(f"w{n}"))
        await store.commit([publish(page=2, consume=False)])
        await store.commit([run(owner="a"), mail(), turn(0, seen=1, patch=succeeded()), settle(moved=(moved(1),))])
        assert [each.id for each in await store.unfinished_broadcasts()] == ["e", "moved-1"]

    @case
    async def test_those_that_ended_first_come_first_and_in_pages(self, store: Store) -> None:
        ended = {"r1": 130.0, "r2": 110.0, "r3": 120.0}
        for id, at in ended.items():
            await store.commit([run(id, owner="a"), observe(id=id), turn(0, id=id, patch=succeeded(at))])
        assert [each.record.id for each in await store.unfinalized()] == ["r2", "r3", "r1"]
        assert [each.record.id for each in await store.unfinalized(limit=2)] == ["r2", "r3"]

    @case
    async def test_what_many_runs_owed_is_ticked_off_in_one_batch(self, store: Store) -> None:
        ids = [f"r{n}" for n in range(6)]
        beside = Observer("beside", "0/child")
        births = [observed(run(id, owner="a")) for id in ids]
        await store.commit([*births, *(observe("beside", id=id) for id in ids), mail(id="r2"), mail(id="r3")])
        await store.commit([turn(0, id=id, patch=succeeded()) for id in ids[:5]])
        rewind = RewindRun(run_id="r4", base=1, turn_id="back", now=155.0, dropped=())
        answers = await store.commit(
            [
                settle("r0", notified=(ABOVE, beside)),
                settle("r1", notified=(beside,)),
                settle("nobody", notified=(ABOVE,)),
                settle("r2", notified=(ABOVE, beside)),
                settle("r3", notified=(ABOVE, beside), consumed=(1,)),
                settle("r5", notified=(ABOVE,)),  # has not ended
                rewind,
                settle("r4", notified=(ABOVE,)),  # not any more
            ]
        )
        assert answers == [Committed(), Committed(), RunMissing(), *[Committed()] * 5]
        owing = await duties(store)
        assert {id: (each.observers, len(each.messages)) for id, each in owing.items()} == {
            "r1": ((ABOVE,), 0),
            "r2": ((), 1),
        }
        await store.commit([end("e", id="r4"), end("e", id="r5")])
        owing = await duties(store)
        assert owing["r4"].observers == owing["r5"].observers == (ABOVE, beside)
        await store.commit([settle("r1"), settle("r2", consumed=(1,))])
        assert set(await duties(store)) == {"r1", "r4", "r5"}

    @case
    async def test_many_observers_and_letters_are_all_seen_to(self, store: Store) -> None:
        observers = [observe(f"o{n:04d}") for n in range(1200)]
        await store.commit([run(owner="a"), *observers, *(mail(f"m{n}") for n in range(1200))])
        await store.commit([turn(0, seen=0, patch=succeeded())])
        told, read = set[str](), set[str]()
        while owings := await store.unfinalized():
            (owing,) = owings
            assert owing.observers or owing.messages
            told |= {each.run_id for each in owing.observers}
            read |= {each.id for each in owing.messages}
            await store.commit(
                [settle(notified=owing.observers, consumed=tuple(each.number for each in owing.messages))]
            )
        assert (len(told), len(read)) == (1200, 1200)

    @case
    async def test_runs_with_duties_or_an_open_parent_are_not_pruned(self, store: Store) -> None:
        await store.commit([run("above", owner="a"), run("r", parent="above", owner="a")])
        await store.commit([run("s", parent="nobody", owner="a"), observe(id="s")])
        for id in ("r", "s"):
            await store.commit([turn(0, id=id, patch=succeeded(prune_at=200.0))])
        assert await store.prune(300.0) == 0
        await store.commit([settle("s", notified=(ABOVE,))])
        assert await store.prune(300.0) == 1, "a parent that is not there is not open"
        await store.commit([turn(0, id="above", patch=succeeded())])
        assert await store.prune(300.0) == 1
        assert await store.records(["r", "s"]) == [None, None]

    @case
    async def test_children_that_must_stay_do_not_keep_others_from_being_pruned(self, store: Store) -> None:
        await store.commit([run("above", owner="a")])
        for n in range(5):
            await store.commit([run(f"c{n}", parent="above", owner="a"), run(f"p{n}", owner="a")])
            await store.commit([turn(0, id=f"{kind}{n}", patch=succeeded(prune_at=200.0)) for kind in "cp"])
        assert await store.prune(300.0, limit=3) == 3
        assert await store.prune(300.0, limit=3) == 2
        assert await store.prune(300.0, limit=3) == 0

    @case
    async def test_a_run_does_not_wait_once_it_has_ended(self, store: Store) -> None:
        await store.commit([*waiting("r1"), end(id="r1"), *waiting("r2")])
        await store.commit([turn(1, id="r2", owned=False, patch=succeeded())])
        await store.commit([run("r3", owner="a"), receive(0, "t", id="r3", patch=succeeded())])
        await store.commit([publish()])
        assert [await store.inbox(id) for id in ("r1", "r2", "r3")] == [[], [], []]
        assert [each.id for each in await store.topic("t")] == ["e"]
