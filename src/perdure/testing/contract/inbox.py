"""Messages are numbered in the order of their commits, accepted once, and wake their run."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from perdure.model.records import Hold, RunStatus
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.results import (
    AlreadyEnded,
    Committed,
    EventPublished,
    LimitReached,
    MessageDelivered,
    RunMissing,
    Superseded,
)
from perdure.stores.writes import ContinueAs, EndRun, RunPatch
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    claim,
    claim_ids,
    dead_letter,
    deliver,
    end,
    entry,
    load,
    publish,
    receive,
    record,
    run,
    succeeded,
    suspended,
    turn,
)

HELD = Hold("diverged", "other code")
RUNNING = RunPatch(status=RunStatus.RUNNING, owner="a")
NEXT_ATTEMPT = ContinueAs(workflow="flow", version=1, input=b"{}", first_executed_at=None, run_attempt=2)


class InboxCases(ContractCase):
    @case
    async def test_messages_are_numbered_and_come_back_whole(self, store: Store) -> None:
        await store.commit([run()])
        first = deliver(
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
        results = await store.commit([first, deliver("a", kind="cancel", body=b"")])
        assert results == [MessageDelivered(1, fresh=True), MessageDelivered(2, fresh=True)]
        snapshot = await load(store)
        assert [(m.number, m.id, m.kind, m.body) for m in snapshot.inbox] == [
            (1, "z", "event", None),
            (2, "a", "cancel", b""),
        ]
        assert snapshot.inbox[0] == replace(first.message, number=1)
        default = snapshot.inbox[1]
        assert (default.policy, default.target, default.offset, default.wants_reply) == ("discard", None, 0, False)
        assert default.event_id is None
        assert snapshot.record.last_message_no == 2

    @case
    async def test_a_message_id_is_accepted_once_even_after_it_was_consumed(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("m"), deliver("n")])
        assert await store.commit([deliver("m", body=b"other")]) == [MessageDelivered(1, fresh=False, owner="a")]
        await store.commit([turn(0, entry(), seen=2, consumed=(1,))])
        assert await store.commit([deliver("m")]) == [MessageDelivered(1, fresh=False, owner="a")]
        assert [message.id for message in (await load(store)).inbox] == ["n"]
        assert await store.commit([deliver("o")]) == [MessageDelivered(3, fresh=True, owner="a")], (
            "numbers are not reused"
        )

    @case
    async def test_only_messages_after_a_number_are_read(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("m1"), deliver("m2"), deliver("m3"), deliver("m4")])
        await store.commit([turn(0, entry(), seen=4, consumed=(3,))])
        assert [message.id for message in await store.inbox("r")] == ["m1", "m2", "m4"]
        assert tuple(await store.inbox("r", after=1)) == (await load(store)).inbox[1:]
        assert await store.inbox("r", after=4) == []
        assert await store.inbox("missing") == []

    @case
    async def test_two_runs_may_get_the_same_message_id(self, store: Store) -> None:
        await store.commit([run("r1"), run("r2")])
        assert await store.commit([deliver(id="r1"), deliver(id="r2")]) == [MessageDelivered(1, fresh=True)] * 2

    @case
    async def test_an_ended_or_missing_run_refuses_messages(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("before"), turn(0, seen=1, patch=succeeded())])
        assert await store.commit([deliver("late"), deliver(id="missing")]) == [
            AlreadyEnded(RunStatus.SUCCEEDED),
            RunMissing(),
        ]
        (again,) = await store.commit([deliver("before")])
        assert again == MessageDelivered(1, fresh=False), "its result was lost"

    @case
    async def test_messages_of_one_batch_are_numbered_in_order(self, store: Store) -> None:
        await store.commit([run("r1", owner="a"), run("r2"), run("done"), end(id="done"), deliver("m1", id="r1")])
        given = [("m2", "r1"), ("m1", "r1"), ("m1", "r2"), ("m3", "r1"), ("m2", "r2")]
        undeliverable = [("m1", "done"), ("m2", "done"), ("m1", "missing"), ("m2", "missing")]
        results = await store.commit([deliver(message, id=id) for message, id in [*given, *undeliverable]])
        assert results == [
            MessageDelivered(2, fresh=True, owner="a"),
            MessageDelivered(1, fresh=False, owner="a"),
            MessageDelivered(1, fresh=True),
            MessageDelivered(3, fresh=True, owner="a"),
            MessageDelivered(2, fresh=True),
            *[AlreadyEnded(RunStatus.CANCELLED)] * 2,
            *[RunMissing()] * 2,
        ]
        results = await store.commit([deliver(message, id="r1") for message in ("n1", "n2", "n1", "n3")])
        assert [result.number for result in results if isinstance(result, MessageDelivered)] == [4, 5, 4, 6]
        assert await store.commit([deliver("n4", id="r1")]) == [MessageDelivered(7, fresh=True, owner="a")]
        assert [each.id for each in await store.inbox("r1")] == ["m1", "m2", "m3", "n1", "n2", "n3", "n4"]
        assert (await record(store, "r1")).last_message_no == 7

    @case
    async def test_messages_of_one_batch_wake_their_runs_as_single_messages_do(self, store: Store) -> None:
        runs = {"suspended": suspended(500.0), "held": suspended(held=HELD), "resumed": suspended(held=HELD)}
        for id, patch in runs.items():
            await store.commit([run(id, owner="a"), turn(0, id=id, patch=patch)])
        await store.commit([run("ours", owner="a")])
        later = [deliver(f"{id}-1", id=id, now=130.0) for id in ("suspended", "held", "resumed", "ours")]
        sooner = [deliver(f"{id}-2", id=id, now=125.0) for id in ("suspended", "held", "ours")]
        resume = deliver("resume", id="resumed", kind="resume", now=140.0)
        await store.commit([*later, resume, *sooner, deliver("resumed-2", id="resumed", now=125.0)])
        wakes = {id: (await record(store, id)).wake_at for id in runs}
        assert wakes == {"suspended": 125.0, "held": None, "resumed": 140.0}
        assert await store.owned_with_messages("a") == ["ours"]

    @case
    async def test_a_message_after_a_turn_in_its_batch_finds_the_suspended_run(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        suspend = turn(0, entry(), seen=1, patch=suspended(500.0))
        results = await store.commit([deliver("m1"), suspend, deliver("m2"), deliver("m3")])
        assert results[1:] == [Committed(), MessageDelivered(2, fresh=True), MessageDelivered(3, fresh=True)]
        assert (await record(store)).wake_at == 120.0
        assert await claim_ids(store, claim("b", 120.0)) == ["r"]

    @case
    async def test_a_full_inbox_refuses_events_until_one_is_consumed(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        results = await store.commit([deliver(f"m{n}", limit=2) for n in range(3)])
        assert results == [
            MessageDelivered(1, fresh=True, owner="a"),
            MessageDelivered(2, fresh=True, owner="a"),
            LimitReached(2),
        ]
        assert await store.commit([deliver("m0", limit=2)]) == [MessageDelivered(1, fresh=False, owner="a")]
        await store.commit([turn(0, entry(), seen=2, consumed=(2,))])
        assert await store.commit([deliver("m2", limit=2)]) == [MessageDelivered(3, fresh=True, owner="a")]
        assert await store.commit([deliver("m3", limit=2)]) == [LimitReached(2)]
        assert await store.commit([deliver("m3", limit=None)]) == [MessageDelivered(4, fresh=True, owner="a")]

    @case
    async def test_the_inbox_limit_applies_to_events_only(self, store: Store) -> None:
        await store.commit([run(), deliver("c", kind="child"), deliver("d", kind="deferred"), deliver("e1", limit=1)])
        assert await store.commit([deliver("e2", limit=1)]) == [LimitReached(1)]
        for number, kind in enumerate(("child", "deferred", "cancel", "resume"), 4):
            assert await store.commit([deliver(kind, kind=kind, limit=1)]) == [MessageDelivered(number, fresh=True)]

    @case
    async def test_ids_of_consumed_events_are_retained_for_keep_ids_for(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("m"), deliver("unread"), deliver("deferred/0/x", kind="deferred")])
        await store.commit([turn(0, entry(), seen=3, consumed=(1, 3), now=200.0)])
        await store.prune(249.0, keep_ids_for=50.0)
        assert await store.commit([deliver("m")]) == [MessageDelivered(1, fresh=False, owner="a")]
        await store.prune(250.0, keep_ids_for=50.0)
        assert await store.commit([deliver("m")]) == [MessageDelivered(4, fresh=True, owner="a")]
        assert await store.commit([deliver("unread"), deliver("deferred/0/x", kind="deferred")]) == [
            MessageDelivered(2, fresh=False, owner="a"),
            MessageDelivered(3, fresh=False, owner="a"),
        ], "a repeated completion of a deferred is recognised as long as the run exists"

    @case
    async def test_a_released_completion_of_a_deferred_is_removed_with_its_id(self, store: Store) -> None:
        first, other = deliver("deferred/0/x", kind="deferred"), deliver("deferred/0/y", kind="deferred")
        await store.commit([run(owner="a"), first, other, deliver("e")])
        assert await store.commit([first]) == [MessageDelivered(1, fresh=False, owner="a")]
        released = TurnExtras(released_assignments=(1, 3, 9), dead_letters=(dead_letter(kind="misfit"),))
        rejecting = turn(0, entry(), seen=3, extras=released)
        assert await store.commit([rejecting]) == [Committed()]
        assert [each.id for each in await store.inbox("r")] == ["deferred/0/y", "e"], "events are not released"
        assert await store.commit([rejecting]) == [Committed()], "a repeated call"
        assert await store.commit([first, other, first]) == [
            MessageDelivered(4, fresh=True, owner="a"),
            MessageDelivered(2, fresh=False, owner="a"),
            MessageDelivered(4, fresh=False, owner="a"),
        ]
        assert await store.commit([rejecting]) == [Committed(has_messages=True)]
        assert [each.id for each in await store.inbox("r")] == ["deferred/0/y", "e", "deferred/0/x"]
        assert [each.kind for each in await store.dead_letters(10)] == ["misfit"]

    @case
    async def test_a_consumed_completion_of_a_deferred_cannot_be_released(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("deferred/0/x", kind="deferred")])
        await store.commit([turn(0, entry(), seen=1, consumed=(1,))])
        await store.commit([turn(1, entry("b"), seen=1, extras=TurnExtras(released_assignments=(1,)))])
        assert await store.commit([deliver("deferred/0/x", kind="deferred")]) == [
            MessageDelivered(1, fresh=False, owner="a")
        ]

    @case
    async def test_a_completion_that_a_rejected_turn_releases_stays(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("deferred/0/x", kind="deferred")])
        extras = TurnExtras(released_assignments=(1,))
        assert await store.commit([turn(7, entry(), seen=1, extras=extras)]) == [Superseded()]
        assert [each.id for each in await store.inbox("r")] == ["deferred/0/x"]

    @case
    async def test_a_turn_that_suspends_and_releases_keeps_a_later_completion_due(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("deferred/0/x", kind="deferred")])
        extras = TurnExtras(released_assignments=(1,))
        await store.commit([turn(0, entry(), seen=1, patch=suspended(), extras=extras)])
        assert (await record(store)).wake_at is None
        await store.commit([deliver("deferred/0/x", kind="deferred", now=130.0)])
        assert (await record(store)).wake_at == 130.0

    @case
    async def test_concurrent_senders_get_different_numbers(self, store: Store) -> None:
        other = await self.second(store)
        await store.commit([run()])
        calls = [(store, other)[i % 2].commit([deliver(f"m{i}")]) for i in range(40)]
        results = [result for (result,) in await asyncio.gather(*calls)]
        numbers = {f"m{i}": result.number for i, result in enumerate(results) if isinstance(result, MessageDelivered)}
        assert sorted(numbers.values()) == list(range(1, 41))
        assert [(m.id, m.number) for m in (await load(store)).inbox] == sorted(
            numbers.items(), key=lambda item: item[1]
        )

    # waking

    @case
    async def test_a_message_makes_a_suspended_run_due(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=suspended(500.0))])
        assert await claim_ids(store, claim("b", 130.0)) == []
        await store.commit([deliver(now=120.0)])
        assert (await record(store)).wake_at == 120.0
        await store.commit([deliver("later", now=125.0)])
        assert (await record(store)).wake_at == 120.0, "an earlier wake-up stays"
        assert await claim_ids(store, claim("b", 120.0)) == ["r"]

    @case
    async def test_a_message_that_arrives_during_a_commit_still_wakes_the_run(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("seen")])
        await store.commit([deliver("unseen", now=115.0)])
        assert await store.commit([turn(0, seen=1, patch=suspended(500.0))]) == [Committed(has_messages=True)]
        row = await record(store)
        assert (row.status, row.wake_at) == (RunStatus.SUSPENDED, 110.0)
        assert await claim_ids(store, claim("b", 115.0)) == ["r"]

    @case
    async def test_concurrent_messages_and_suspending_turns_leave_every_run_due(self, store: Store) -> None:
        other = await self.second(store)
        ids = [f"r{i}" for i in range(30)]
        await store.commit([run(id, owner="a") for id in ids])
        suspensions = [store.commit([turn(0, id=id, patch=suspended())]) for id in ids]
        deliveries = [other.commit([deliver(id=id)]) for id in ids]
        await asyncio.gather(*(call for pair in zip(suspensions, deliveries, strict=True) for call in pair))
        assert sorted(await claim_ids(store, claim("b", limit=100))) == sorted(ids)

    @case
    async def test_a_message_that_was_seen_and_not_consumed_does_not_wake(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("m1"), deliver("m2")])
        assert await store.commit([turn(0, seen=2, patch=suspended(500.0))]) == [Committed(has_messages=False)]
        assert (await record(store)).wake_at == 500.0
        assert [message.id for message in (await load(store)).inbox] == ["m1", "m2"]

    @case
    async def test_a_message_does_not_start_a_delayed_run_early(self, store: Store) -> None:
        await store.commit([run(wake_at=500.0), deliver(now=120.0)])
        assert (await record(store)).wake_at == 500.0
        assert await store.claim(claim("a", 130.0)) == []
        await store.commit([deliver("n", kind="resume", now=140.0)])
        assert (await record(store)).wake_at == 140.0, "but a resume starts it"

    @case
    async def test_a_message_consumed_by_the_turn_does_not_wake(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("m1")])
        assert await store.commit([turn(0, seen=0, consumed=(1,), patch=suspended())]) == [
            Committed(has_messages=False)
        ]
        assert await store.commit([turn(1, owned=False, seen=0, patch=suspended())]) == [Committed(has_messages=False)]
        assert (await record(store)).wake_at is None

    @case
    async def test_a_repeated_turn_reports_unseen_messages(self, store: Store) -> None:
        write = turn(0, seen=0, patch=suspended())
        await store.commit([run(owner="a"), write, deliver()])
        assert await store.commit([write]) == [Committed(has_messages=True)]

    @case
    async def test_an_ended_run_keeps_unread_messages_and_is_not_due(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver()])
        assert await store.commit([turn(0, seen=0, patch=succeeded())]) == [Committed(has_messages=True)]
        assert (await record(store)).wake_at is None
        assert len((await load(store)).inbox) == 1

    # an owned run

    @case
    async def test_owned_runs_with_new_messages_are_listed_for_their_owner(self, store: Store) -> None:
        await store.commit([run("r1", owner="a"), run("r2", owner="a"), run("r3", owner="b"), run("r4")])
        assert await store.owned_with_messages("a") == []
        results = await store.commit([deliver(id=id) for id in ("r1", "r3", "r4")])
        assert results[0] == MessageDelivered(1, fresh=True, owner="a")
        assert (await store.owned_with_messages("a"), await store.owned_with_messages("b")) == (["r1"], ["r3"])
        assert await store.next_wake("default") == 100.0, "only r4 has no owner"

    @case
    async def test_owned_runs_with_messages_are_listed_in_pages(self, store: Store) -> None:
        ids = [f"r{n}" for n in range(5)]
        await store.commit([run(id, owner="a") for id in ids])
        await store.commit([deliver(id=id) for id in ids])
        assert len(await store.owned_with_messages("a", limit=3)) == 3

    @case
    async def test_a_turn_without_a_patch_that_saw_all_messages_clears_the_wake_up(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("m1"), deliver("m2")])
        assert await store.commit([turn(0, entry(), seen=1, consumed=(1,))]) == [Committed(has_messages=True)]
        assert await store.owned_with_messages("a") == ["r"], "m2 is not seen yet"
        assert await store.commit([turn(1, entry("b", 1), seen=2)]) == [Committed(has_messages=False)]
        assert await store.owned_with_messages("a") == []
        assert (await record(store)).wake_at is None

    @case
    async def test_a_patch_that_keeps_the_owner_reports_unseen_messages(self, store: Store) -> None:
        await store.commit([run(owner="a"), deliver("m1")])
        assert await store.commit([turn(0, seen=0, patch=RUNNING)]) == [Committed(has_messages=True)]
        assert await store.owned_with_messages("a") == ["r"]
        assert await store.commit([turn(1, seen=1, patch=RUNNING)]) == [Committed(has_messages=False)]
        assert await store.owned_with_messages("a") == []

    @case
    async def test_a_timer_of_an_owned_run_is_not_a_message(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        await store.commit([turn(0, patch=RunPatch(status=RunStatus.RUNNING, owner="a", wake_at=500.0))])
        assert await store.owned_with_messages("a") == []
        assert await claim_ids(store, claim("b", 600.0)) == [], "it has an owner"

    @case
    async def test_a_claim_clears_the_wake_up(self, store: Store) -> None:
        await store.commit([run(), deliver()])
        assert await claim_ids(store, claim("a")) == ["r"]
        assert await store.owned_with_messages("a") == []
        assert (await record(store)).wake_at is None

    # backoff between two attempts of a run

    @case
    async def test_a_message_does_not_shorten_the_backoff_before_an_attempt(self, store: Store) -> None:
        for kind, wakes in (("event", False), ("child", False), ("resume", True), ("cancel", True)):
            backoff = turn(0, id=kind, continue_as=NEXT_ATTEMPT, patch=suspended(500.0))
            await store.commit([run(kind, owner="a"), backoff])
            assert await store.commit([deliver(id=kind, kind=kind)]) == [MessageDelivered(1, fresh=True)]
            assert (await record(store, kind)).wake_at == (120.0 if wakes else 500.0), kind
        assert sorted(await claim_ids(store, claim("b"))) == ["cancel", "resume"]
        assert sorted(await claim_ids(store, claim("b", 500.0))) == ["child", "event"]
        assert len(await store.inbox("event")) == 1

    @case
    async def test_an_assignment_does_not_shorten_the_backoff_before_an_attempt(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, continue_as=NEXT_ATTEMPT, patch=suspended(500.0))])
        await store.commit([receive(1, "t", patch=suspended(500.0))])
        assert await store.commit([publish()]) == [EventPublished(1, 1)]
        assert (await record(store)).wake_at == 500.0

    @case
    async def test_an_unseen_message_does_not_shorten_the_backoff_before_an_attempt(self, store: Store) -> None:
        for kind, wakes in (("event", False), ("resume", True)):
            await store.commit([run(kind, owner="a"), deliver(id=kind, kind=kind)])
            (result,) = await store.commit([turn(0, id=kind, seen=0, continue_as=NEXT_ATTEMPT, patch=suspended(500.0))])
            assert result == Committed(has_messages=True)
            assert (await record(store, kind)).wake_at == (110.0 if wakes else 500.0), kind

    @case
    async def test_a_message_wakes_a_run_whose_attempt_has_started(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, continue_as=NEXT_ATTEMPT, patch=suspended(150.0))])
        assert await claim_ids(store, claim("b", 150.0)) == ["r"]
        await store.commit([turn(1, worker="b", patch=suspended(500.0)), deliver(now=160.0)])
        assert (await record(store)).wake_at == 160.0

    # held runs

    @case
    async def test_a_held_run_is_woken_by_a_resume_or_a_cancel_only(self, store: Store) -> None:
        for kind, wakes in (("event", False), ("reply", False), ("resume", True), ("cancel", True)):
            await store.commit([run(kind, owner="a"), turn(0, id=kind, patch=suspended(held=HELD))])
            assert await store.commit([deliver(id=kind, kind=kind)]) == [MessageDelivered(1, fresh=True)]
            assert (await record(store, kind)).wake_at == (120.0 if wakes else None), kind
        assert sorted(await claim_ids(store, claim("b"))) == ["cancel", "resume"]

    @case
    async def test_a_turn_that_holds_its_run_leaves_it_due_only_for_a_resume_or_cancel(self, store: Store) -> None:
        for kind, wakes in (("event", False), ("resume", True)):
            await store.commit([run(kind, owner="a"), deliver(id=kind, kind=kind)])
            (result,) = await store.commit([turn(0, id=kind, seen=0, patch=suspended(held=HELD))])
            assert result == Committed(has_messages=True)
            assert ((await record(store, kind)).wake_at is not None) == wakes, kind

    @case
    async def test_a_message_to_a_held_run_wakes_it_when_the_hold_is_removed(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=suspended(held=HELD)), deliver()])
        await store.commit([turn(1, owned=False, seen=0, patch=suspended(500.0))])
        assert (await record(store)).wake_at == 110.0

    @case
    async def test_messages_to_a_held_run_are_listed_for_the_worker_that_retries_it(self, store: Store) -> None:
        await store.commit([run(owner="a"), turn(0, patch=suspended(held=HELD))])
        await store.retry_held([("flow", 1)], "diverged", 150.0)
        assert await claim_ids(store, claim("b")) == ["r"]
        await store.commit([deliver()])
        assert await store.owned_with_messages("b") == ["r"]

    @case
    async def test_retry_held_makes_matching_runs_due(self, store: Store) -> None:
        poison = Hold("poison", "three recoveries")
        for id, held in (("r1", HELD), ("r2", poison), ("r3", None)):
            await store.commit([run(id, owner="a"), turn(0, id=id, patch=suspended(held=held))])
        await store.commit([run("r4", version=2, owner="a"), turn(0, id="r4", patch=suspended(held=HELD))])
        await store.commit([run("r5", owner="a"), turn(0, id="r5", patch=suspended(held=HELD))])
        await store.commit([EndRun(run_id="r5", turn_id="end", now=115.0)])
        assert await store.retry_held([("flow", 1), ("other", 1)], "diverged", 150.0) == 1
        assert await claim_ids(store, claim("b", 150.0)) == ["r1"]
        assert await store.retry_held([("flow", 2)], "diverged", 150.0) == 1
        assert await store.retry_held([], "diverged", 150.0) == 0
