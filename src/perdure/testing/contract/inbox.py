"""Mail is numbered in the order of its commits, taken once, and wakes its run."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from perdure.model.records import Hold, RunStatus
from perdure.stores.protocol import Store
from perdure.stores.results import AlreadyEnded, Committed, EventPublished, LimitReached, MessageDelivered, RunMissing
from perdure.stores.writes import ContinueAs, EndRun, RunPatch
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    claim,
    end,
    entry,
    load,
    mail,
    publish,
    receive,
    record,
    run,
    succeeded,
    suspended,
    take,
    turn,
)

HELD = Hold("diverged", "other code")
RUNNING = RunPatch(status=RunStatus.RUNNING, owner="a")
ANEW = ContinueAs(workflow="flow", version=1, input=b"{}", first_executed_at=None, run_attempt=2)


class MailCases(ContractCase):
    @case
    async def test_messages_are_numbered_and_come_back_whole(self, store: Store) -> None:
        await store.commit([run()])
        first = mail(
            "z",
            sender="run-9",
            sent_at=1.5,
            expires_at=9.5,
            body=None,
            policy="broadcast",
            target="2/join",
            offset=3,
            wants_reply=True,
            event_id="paid-7",
        )
        answers = await store.commit([first, mail("a", kind="cancel", body=b"")])
        assert answers == [MessageDelivered(1, fresh=True), MessageDelivered(2, fresh=True)]
        snapshot = await load(store)
        assert [(m.number, m.id, m.kind, m.body) for m in snapshot.inbox] == [
            (1, "z", "event", None),
            (2, "a", "cancel", b""),
        ]
        assert snapshot.inbox[0] == replace(first.message, number=1)
        plain = snapshot.inbox[1]
        assert (plain.policy, plain.target, plain.offset, plain.wants_reply) == ("discard", None, 0, False)
        assert plain.event_id is None
        assert snapshot.record.last_message_no == 2

    @case
    async def test_a_message_id_is_taken_once_even_after_it_was_consumed(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail("m"), mail("n")])
        assert await store.commit([mail("m", body=b"other")]) == [MessageDelivered(1, fresh=False, owner="a")]
        await store.commit([turn(0, entry(), seen=2, consumed=(1,))])
        assert await store.commit([mail("m")]) == [MessageDelivered(1, fresh=False, owner="a")]
        assert [message.id for message in (await load(store)).inbox] == ["n"]
        assert await store.commit([mail("o")]) == [MessageDelivered(3, fresh=True, owner="a")], (
            "numbers are not given again"
        )

    @case
    async def test_mail_after_a_number_is_read_alone(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail("m1"), mail("m2"), mail("m3"), mail("m4")])
        await store.commit([turn(0, entry(), seen=4, consumed=(3,))])
        assert [message.id for message in await store.inbox("r")] == ["m1", "m2", "m4"]
        assert tuple(await store.inbox("r", after=1)) == (await load(store)).inbox[1:]
        assert await store.inbox("r", after=4) == []
        assert await store.inbox("missing") == []

    @case
    async def test_two_runs_may_get_the_same_message_id(self, store: Store) -> None:
        await store.commit([run("r1"), run("r2")])
        assert await store.commit([mail(id="r1"), mail(id="r2")]) == [MessageDelivered(1, fresh=True)] * 2

    @case
    async def test_a_run_that_ended_or_is_missing_takes_no_mail(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail("before"), turn(0, seen=1, patch=succeeded())])
        assert await store.commit([mail("late"), mail(id="missing")]) == [
            AlreadyEnded(RunStatus.SUCCEEDED),
            RunMissing(),
        ]
        (again,) = await store.commit([mail("before")])
        assert again == MessageDelivered(1, fresh=False), "its answer was lost"

    @case
    async def test_mail_of_one_batch_is_taken_in_its_order(self, store: Store) -> None:
        await store.commit([run("r1", owner="a"), run("r2"), run("done"), end(id="done"), mail("m1", id="r1")])
        given = [("m2", "r1"), ("m1", "r1"), ("m1", "r2"), ("m3", "r1"), ("m2", "r2")]
        lost = [("m1", "done"), ("m2", "done"), ("m1", "missing"), ("m2", "missing")]
        answers = await store.commit([mail(message, id=id) for message, id in [*given, *lost]])
        assert answers == [
            MessageDelivered(2, fresh=True, owner="a"),
            MessageDelivered(1, fresh=False, owner="a"),
            MessageDelivered(1, fresh=True),
            MessageDelivered(3, fresh=True, owner="a"),
            MessageDelivered(2, fresh=True),
            *[AlreadyEnded(RunStatus.CANCELLED)] * 2,
            *[RunMissing()] * 2,
        ]
        answers = await store.commit([mail(message, id="r1") for message in ("n1", "n2", "n1", "n3")])
        assert [answer.number for answer in answers if isinstance(answer, MessageDelivered)] == [4, 5, 4, 6]
        assert await store.commit([mail("n4", id="r1")]) == [MessageDelivered(7, fresh=True, owner="a")]
        assert [each.id for each in await store.inbox("r1")] == ["m1", "m2", "m3", "n1", "n2", "n3", "n4"]
        assert (await record(store, "r1")).last_message_no == 7

    @case
    async def test_mail_of_one_batch_wakes_as_each_of_it_would(self, store: Store) -> None:
        runs = {"asleep": suspended(500.0), "held": suspended(held=HELD), "resumed": suspended(held=HELD)}
        for id, patch in runs.items():
            await store.commit([run(id, owner="a"), turn(0, id=id, patch=patch)])
        await store.commit([run("ours", owner="a")])
        later = [mail(f"{id}-1", id=id, now=130.0) for id in ("asleep", "held", "resumed", "ours")]
        sooner = [mail(f"{id}-2", id=id, now=125.0) for id in ("asleep", "held", "ours")]
        resume = mail("resume", id="resumed", kind="resume", now=140.0)
        await store.commit([*later, resume, *sooner, mail("resumed-2", id="resumed", now=125.0)])
        wakes = {id: (await record(store, id)).wake_at for id in runs}
        assert wakes == {"asleep": 125.0, "held": None, "resumed": 140.0}
        assert await store.owned_with_messages("a") == ["ours"]

    @case
    async def test_mail_after_a_turn_of_its_batch_finds_the_run_as_the_turn_left_it(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        asleep = turn(0, entry(), seen=1, patch=suspended(500.0))
        answers = await store.commit([mail("m1"), asleep, mail("m2"), mail("m3")])
        assert answers[1:] == [Committed(), MessageDelivered(2, fresh=True), MessageDelivered(3, fresh=True)]
        assert (await record(store)).wake_at == 120.0
        assert await take(store, claim("b", 120.0)) == ["r"]

    @case
    async def test_a_full_inbox_refuses_and_takes_again_once_read(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        answers = await store.commit([mail(f"m{n}", limit=2) for n in range(3)])
        assert answers == [
            MessageDelivered(1, fresh=True, owner="a"),
            MessageDelivered(2, fresh=True, owner="a"),
            LimitReached(2),
        ]
        assert await store.commit([mail("m0", limit=2)]) == [MessageDelivered(1, fresh=False, owner="a")]
        await store.commit([turn(0, entry(), seen=2, consumed=(2,))])
        assert await store.commit([mail("m2", limit=2)]) == [MessageDelivered(3, fresh=True, owner="a")]
        assert await store.commit([mail("m3", limit=2)]) == [LimitReached(2)]
        assert await store.commit([mail("m3", limit=None)]) == [MessageDelivered(4, fresh=True, owner="a")]

    @case
    async def test_only_events_fill_an_inbox_and_only_events_are_refused(self, store: Store) -> None:
        await store.commit([run(), mail("c", kind="child"), mail("d", kind="deferred"), mail("e1", limit=1)])
        assert await store.commit([mail("e2", limit=1)]) == [LimitReached(1)]
        for number, kind in enumerate(("child", "deferred", "cancel", "resume"), 4):
            assert await store.commit([mail(kind, kind=kind, limit=1)]) == [MessageDelivered(number, fresh=True)]

    @case
    async def test_ids_of_consumed_events_are_remembered_for_a_while(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail("m"), mail("unread"), mail("deferred/0/x", kind="deferred")])
        await store.commit([turn(0, entry(), seen=3, consumed=(1, 3), now=200.0)])
        await store.prune(249.0, keep_ids_for=50.0)
        assert await store.commit([mail("m")]) == [MessageDelivered(1, fresh=False, owner="a")]
        await store.prune(250.0, keep_ids_for=50.0)
        assert await store.commit([mail("m")]) == [MessageDelivered(4, fresh=True, owner="a")]
        assert await store.commit([mail("unread"), mail("deferred/0/x", kind="deferred")]) == [
            MessageDelivered(2, fresh=False, owner="a"),
            MessageDelivered(3, fresh=False, owner="a"),
        ], "who completes a deferred a second time is told so as long as the run is known"

    @case
    async def test_concurrent_senders_get_different_numbers(self, store: Store) -> None:
        other = await self.second(store)
        await store.commit([run()])
        calls = [(store, other)[i % 2].commit([mail(f"m{i}")]) for i in range(40)]
        answers = [answer for (answer,) in await asyncio.gather(*calls)]
        numbers = {f"m{i}": answer.number for i, answer in enumerate(answers) if isinstance(answer, MessageDelivered)}
        assert sorted(numbers.values()) == list(range(1, 41))
        assert [(m.id, m.number) for m in (await load(store)).inbox] == sorted(
            numbers.items(), key=lambda item: item[1]
        )

    # waking

    @case
    async def test_mail_makes_a_sleeping_run_due(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=suspended(500.0))])
        assert await take(store, claim("b", 130.0)) == []
        await store.commit([mail(now=120.0)])
        assert (await record(store)).wake_at == 120.0
        await store.commit([mail("later", now=125.0)])
        assert (await record(store)).wake_at == 120.0, "an earlier wake-up stays"
        assert await take(store, claim("b", 120.0)) == ["r"]

    @case
    async def test_a_message_that_arrives_during_a_commit_still_wakes_the_run(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail("seen")])
        await store.commit([mail("unseen", now=115.0)])
        assert await store.commit([turn(0, seen=1, patch=suspended(500.0))]) == [Committed(has_messages=True)]
        row = await record(store)
        assert (row.status, row.wake_at) == (RunStatus.SUSPENDED, 110.0)
        assert await take(store, claim("b", 115.0)) == ["r"]

    @case
    async def test_mail_races_with_suspending_turns_and_none_is_slept_through(self, store: Store) -> None:
        other = await self.second(store)
        ids = [f"r{i}" for i in range(30)]
        await store.commit([run(id, owner="a") for id in ids])
        suspensions = [store.commit([turn(0, id=id, patch=suspended())]) for id in ids]
        deliveries = [other.commit([mail(id=id)]) for id in ids]
        await asyncio.gather(*(call for pair in zip(suspensions, deliveries, strict=True) for call in pair))
        assert sorted(await take(store, claim("b", limit=100))) == sorted(ids)

    @case
    async def test_mail_that_was_seen_and_not_taken_does_not_wake(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail("m1"), mail("m2")])
        assert await store.commit([turn(0, seen=2, patch=suspended(500.0))]) == [Committed(has_messages=False)]
        assert (await record(store)).wake_at == 500.0
        assert [message.id for message in (await load(store)).inbox] == ["m1", "m2"]

    @case
    async def test_mail_does_not_begin_a_run_before_its_time(self, store: Store) -> None:
        await store.commit([run(wake_at=500.0), mail(now=120.0)])
        assert (await record(store)).wake_at == 500.0
        assert await store.claim(claim("a", 130.0)) == []
        await store.commit([mail("n", kind="resume", now=140.0)])
        assert (await record(store)).wake_at == 140.0, "but a person may"

    @case
    async def test_mail_consumed_before_it_was_counted_as_seen_does_not_wake(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail("m1")])
        assert await store.commit([turn(0, seen=0, consumed=(1,), patch=suspended())]) == [
            Committed(has_messages=False)
        ]
        assert await store.commit([turn(1, owned=False, seen=0, patch=suspended())]) == [Committed(has_messages=False)]
        assert (await record(store)).wake_at is None

    @case
    async def test_a_lost_answer_says_whether_mail_is_waiting(self, store: Store) -> None:
        write = turn(0, seen=0, patch=suspended())
        await store.commit([run(owner="a"), write, mail()])
        assert await store.commit([write]) == [Committed(has_messages=True)]

    @case
    async def test_the_end_leaves_unread_mail_and_is_not_due(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail()])
        assert await store.commit([turn(0, seen=0, patch=succeeded())]) == [Committed(has_messages=True)]
        assert (await record(store)).wake_at is None
        assert len((await load(store)).inbox) == 1

    # an owned run

    @case
    async def test_the_owner_is_told_of_its_mail(self, store: Store) -> None:
        await store.commit([run("r1", owner="a"), run("r2", owner="a"), run("r3", owner="b"), run("r4")])
        assert await store.owned_with_messages("a") == []
        answers = await store.commit([mail(id=id) for id in ("r1", "r3", "r4")])
        assert answers[0] == MessageDelivered(1, fresh=True, owner="a")
        assert (await store.owned_with_messages("a"), await store.owned_with_messages("b")) == (["r1"], ["r3"])
        assert await store.next_wake("default") == 100.0, "only r4 is anybody's to take"

    @case
    async def test_mailed_comes_in_pages(self, store: Store) -> None:
        ids = [f"r{n}" for n in range(5)]
        await store.commit([run(id, owner="a") for id in ids])
        await store.commit([mail(id=id) for id in ids])
        assert len(await store.owned_with_messages("a", limit=3)) == 3

    @case
    async def test_a_turn_that_saw_the_mail_ends_the_wake_up_without_a_patch(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail("m1"), mail("m2")])
        assert await store.commit([turn(0, entry(), seen=1, consumed=(1,))]) == [Committed(has_messages=True)]
        assert await store.owned_with_messages("a") == ["r"], "m2 is still to be looked at"
        assert await store.commit([turn(1, entry("b", 1), seen=2)]) == [Committed(has_messages=False)]
        assert await store.owned_with_messages("a") == []
        assert (await record(store)).wake_at is None

    @case
    async def test_a_patch_that_keeps_the_run_tells_of_unseen_mail(self, store: Store) -> None:
        await store.commit([run(owner="a"), mail("m1")])
        assert await store.commit([turn(0, seen=0, patch=RUNNING)]) == [Committed(has_messages=True)]
        assert await store.owned_with_messages("a") == ["r"]
        assert await store.commit([turn(1, seen=1, patch=RUNNING)]) == [Committed(has_messages=False)]
        assert await store.owned_with_messages("a") == []

    @case
    async def test_a_timer_of_an_owned_run_is_no_mail(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        await store.commit([turn(0, patch=RunPatch(status=RunStatus.RUNNING, owner="a", wake_at=500.0))])
        assert await store.owned_with_messages("a") == []
        assert await take(store, claim("b", 600.0)) == [], "it has an owner"

    @case
    async def test_a_claim_answers_the_wake_up(self, store: Store) -> None:
        await store.commit([run(), mail()])
        assert await take(store, claim("a")) == ["r"]
        assert await store.owned_with_messages("a") == []
        assert (await record(store)).wake_at is None

    # between two attempts of a whole run

    @case
    async def test_mail_does_not_cut_the_pause_before_another_attempt_short(self, store: Store) -> None:
        for kind, wakes in (("event", False), ("child", False), ("resume", True), ("cancel", True)):
            pause = turn(0, id=kind, continue_as=ANEW, patch=suspended(500.0))
            await store.commit([run(kind, owner="a"), pause])
            assert await store.commit([mail(id=kind, kind=kind)]) == [MessageDelivered(1, fresh=True)]
            assert (await record(store, kind)).wake_at == (120.0 if wakes else 500.0), kind
        assert sorted(await take(store, claim("b"))) == ["cancel", "resume"]
        assert sorted(await take(store, claim("b", 500.0))) == ["child", "event"]
        assert len(await store.inbox("event")) == 1

    @case
    async def test_an_assignment_does_not_cut_a_pause_short_either(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, continue_as=ANEW, patch=suspended(500.0))])
        await store.commit([receive(1, "t", patch=suspended(500.0))])
        assert await store.commit([publish()]) == [EventPublished(1, 1)]
        assert (await record(store)).wake_at == 500.0

    @case
    async def test_mail_that_comes_with_the_pause_does_not_cut_it_short(self, store: Store) -> None:
        for kind, wakes in (("event", False), ("resume", True)):
            await store.commit([run(kind, owner="a"), mail(id=kind, kind=kind)])
            (answer,) = await store.commit([turn(0, id=kind, seen=0, continue_as=ANEW, patch=suspended(500.0))])
            assert answer == Committed(has_messages=True)
            assert (await record(store, kind)).wake_at == (110.0 if wakes else 500.0), kind

    @case
    async def test_mail_wakes_a_run_again_once_its_attempt_has_begun(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, continue_as=ANEW, patch=suspended(150.0))])
        assert await take(store, claim("b", 150.0)) == ["r"]
        await store.commit([turn(1, worker="b", patch=suspended(500.0)), mail(now=160.0)])
        assert (await record(store)).wake_at == 160.0

    # held runs

    @case
    async def test_a_held_run_is_woken_by_a_resume_or_a_cancel_only(self, store: Store) -> None:
        for kind, wakes in (("event", False), ("reply", False), ("resume", True), ("cancel", True)):
            await store.commit([run(kind, owner="a"), turn(0, id=kind, patch=suspended(held=HELD))])
            assert await store.commit([mail(id=kind, kind=kind)]) == [MessageDelivered(1, fresh=True)]
            assert (await record(store, kind)).wake_at == (120.0 if wakes else None), kind
        assert sorted(await take(store, claim("b"))) == ["cancel", "resume"]

    @case
    async def test_a_turn_that_holds_the_run_is_woken_by_the_same_mail_only(self, store: Store) -> None:
        for kind, wakes in (("event", False), ("resume", True)):
            await store.commit([run(kind, owner="a"), mail(id=kind, kind=kind)])
            (answer,) = await store.commit([turn(0, id=kind, seen=0, patch=suspended(held=HELD))])
            assert answer == Committed(has_messages=True)
            assert ((await record(store, kind)).wake_at is not None) == wakes, kind

    @case
    async def test_mail_to_a_held_run_wakes_it_once_it_is_held_no_more(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=suspended(held=HELD)), mail()])
        await store.commit([turn(1, owned=False, seen=0, patch=suspended(500.0))])
        assert (await record(store)).wake_at == 110.0

    @case
    async def test_a_worker_that_tries_a_held_run_again_is_told_of_its_mail(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=suspended(held=HELD))])
        await store.retry_held([("flow", 1)], "diverged", 150.0)
        assert await take(store, claim("b")) == ["r"]
        await store.commit([mail()])
        assert await store.owned_with_messages("b") == ["r"]

    @case
    async def test_wake_held_makes_fitting_runs_due(self, store: Store) -> None:
        poison = Hold("poison", "again and again")
        for id, held in (("r1", HELD), ("r2", poison), ("r3", None)):
            await store.commit([run(id, owner="a"), turn(0, id=id, patch=suspended(held=held))])
        await store.commit([run("r4", version=2, owner="a"), turn(0, id="r4", patch=suspended(held=HELD))])
        await store.commit([run("r5", owner="a"), turn(0, id="r5", patch=suspended(held=HELD))])
        await store.commit([EndRun(run_id="r5", turn_id="end", now=115.0)])
        assert await store.retry_held([("flow", 1), ("other", 1)], "diverged", 150.0) == 1
        assert await take(store, claim("b", 150.0)) == ["r1"]
        assert await store.retry_held([("flow", 2)], "diverged", 150.0) == 1
        assert await store.retry_held([], "diverged", 150.0) == 0
