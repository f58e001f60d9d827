"""Topic events are assigned to eligible runs, in order and once, whether publish or subscribe comes first."""

from __future__ import annotations

import asyncio

from perdure.model.records import Hold, Message, RunStatus, Subscription
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, EventPublished, LimitReached
from perdure.stores.writes import ContinueAs, RunPatch
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
    publish,
    receive,
    record,
    refused,
    run,
    stored_events,
    succeeded,
    suspended,
    turn,
    waiting,
)

ONE = "topic/t/1"
TWO = "topic/t/2"


class PublishCases(ContractCase):
    @case
    async def test_an_event_is_assigned_to_a_waiting_run_and_wakes_it(self, store: Store) -> None:
        await store.commit(waiting())
        write = publish(sender="s", expires_at=900.0, event_id="paid-7")
        assert await store.commit([write]) == [EventPublished(offset=1, woken=1)]
        assert await store.inbox("r") == [
            Message(
                id=ONE,
                kind="assignment",
                number=1,
                name="t",
                body=b'{"by":"ada"}',
                sender="s",
                sent_at=120.0,
                expires_at=900.0,
                target="0/receive",
                offset=1,
                event_id="paid-7",
            )
        ]
        row = await record(store)
        assert (row.wake_at, row.last_message_no, row.status) == (120.0, 1, RunStatus.SUSPENDED)
        assert await claim_ids(store, claim("b", 120.0)) == ["r"]

    @case
    async def test_an_assignment_to_an_owned_run_counts_as_a_message(self, store: Store) -> None:
        patch = RunPatch(status=RunStatus.RUNNING, owner="a")
        await store.commit([run(owner="a"), receive(0, "t", patch=patch), publish()])
        assert await store.owned_with_messages("a") == ["r"]

    @case
    async def test_a_held_run_is_not_woken_by_an_assignment(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "t", patch=suspended(held=Hold("diverged", "why")))])
        assert await store.commit([publish()]) == [EventPublished(1, 1)]
        assert (await record(store)).wake_at is None
        assert await assigned(store, "r") == [[ONE]]

    @case
    async def test_a_consumed_event_is_deleted(self, store: Store) -> None:
        await store.commit([*waiting(), publish()])
        assert await stored_events(store) == ["e"], "it keeps its offset until it is consumed"
        assert await store.commit([turn(1, owned=False, seen=1, consumed=(1,), patch=suspended())]) == [Committed()]
        assert await stored_events(store) == []
        await store.commit(waiting("next"))
        assert await assigned(store, "r", "next") == [[], []]

    @case
    async def test_events_are_assigned_to_the_oldest_subscription_first(self, store: Store) -> None:
        for id in ("z", "a", "m"):
            await store.commit(waiting(id))
        await store.commit([turn(1, id="a", owned=False, patch=suspended())])  # it keeps waiting
        await store.commit([publish("e1"), publish("e2"), publish("e3")])
        assert await assigned(store, "z", "a", "m") == [[ONE], [TWO], ["topic/t/3"]]

    @case
    async def test_a_repeated_subscription_keeps_its_age(self, store: Store) -> None:
        await store.commit([*waiting("first"), *waiting("second"), receive(1, "t", id="first"), publish()])
        assert await assigned(store, "first", "second") == [[ONE], []]
        await store.commit([publish("e2")])
        assert await assigned(store, "first", "second") == [[ONE], [TWO]], "it is one subscription"

    @case
    async def test_an_unsubscribed_run_gets_no_event(self, store: Store) -> None:
        await store.commit([*waiting(), run("s", owner="a"), receive(0, "t", id="s", target="0/other")])
        unsubscribed = TurnExtras(unsubscribe=("0/receive", "unknown"))
        await store.commit([turn(1, owned=False, patch=suspended(), extras=unsubscribed)])
        await store.commit([turn(1, id="s", owned=False, patch=suspended(), extras=unsubscribed)])
        await store.commit([publish()])
        assert await assigned(store, "r", "s") == [[], [ONE]]

    @case
    async def test_an_event_is_not_assigned_to_subscribers_of_other_topics(self, store: Store) -> None:
        await store.commit([*waiting(), publish(topic="T"), publish(topic="tt")])
        assert await assigned(store, "r") == [[]]
        assert (await stored_events(store, "t"), await stored_events(store, "T"), await stored_events(store, "tt")) == (
            [],
            ["e"],
            ["e"],
        )

    @case
    async def test_an_assignment_removes_the_subscription_from_all_its_topics(self, store: Store) -> None:
        await store.commit([*waiting("r", "t", "u"), *waiting("s", "u")])
        results = await store.commit([publish("e1"), publish("e2", topic="u"), publish("e3")])
        assert results == [EventPublished(1, 1), EventPublished(1, 1), EventPublished(2, 0)]
        assert await assigned(store, "r", "s") == [[ONE], ["topic/u/1"]]

    @case
    async def test_a_topic_named_twice_in_a_subscription_counts_once(self, store: Store) -> None:
        await store.commit([*waiting("r", "t", "t"), publish("e1"), publish("e2")])
        assert await assigned(store, "r") == [[ONE]]

    @case
    async def test_two_receives_of_one_run_each_take_an_event(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "t"), receive(1, "t", target="0/other")])
        await store.commit([publish("e1"), publish("e2"), publish("e3")])
        assert [(m.id, m.target) for m in await store.inbox("r")] == [(ONE, "0/receive"), (TWO, "0/other")]
        assert await stored_events(store) == ["e1", "e2", "e3"]

    @case
    async def test_an_event_id_is_accepted_once_per_topic(self, store: Store) -> None:
        await store.commit([*waiting("r"), *waiting("s")])
        again = EventPublished(1, woken=0, fresh=False)
        assert await store.commit([publish(), publish(body=b"other")]) == [EventPublished(1, 1), again]
        await store.commit([turn(1, owned=False, seen=1, consumed=(1,), patch=suspended())])
        assert await store.commit([publish()]) == [again], "its id is retained after it was deleted"
        assert await assigned(store, "s") == [[]]
        assert await store.commit([publish(topic="u"), publish("f")]) == [EventPublished(1, 0), EventPublished(2, 1)]

    @case
    async def test_the_id_of_a_queued_event_is_accepted_once(self, store: Store) -> None:
        await store.commit([publish()])
        assert await store.commit([publish(limit=1)]) == [EventPublished(1, woken=0, fresh=False)]
        assert await stored_events(store) == ["e"]

    @case
    async def test_everything_of_an_event_comes_back(self, store: Store) -> None:
        write = publish(
            'é"e',
            topic="orders/päid",
            body=b"\xff\x00",
            delivery="after_create",
            consume=False,
            expires_at=1e9,
            sender="s",
            event_id='"é',
        )
        await store.commit([write, publish("plain", topic="orders/päid", body=None)])
        first, second = await store.topic("orders/päid")
        assert first == type(first)(
            topic="orders/päid",
            id='é"e',
            body=b"\xff\x00",
            sent_at=120.0,
            delivery="after_create",
            consume=False,
            expires_at=1e9,
            sender="s",
            offset=1,
            event_id='"é',
        )
        assert (second.offset, second.delivery, second.consume, second.expires_at) == (2, "all", True, None)
        assert (second.body, second.sender, second.event_id) == (None, None, None)

    @case
    async def test_a_topic_is_listed_in_pages(self, store: Store) -> None:
        await store.commit([publish(f"e{n}") for n in range(5)])
        assert [event.offset for event in await store.topic("t", limit=2)] == [1, 2]
        assert [event.offset for event in await store.topic("t", limit=2, after=2)] == [3, 4]
        assert await store.topic("t", after=5) == []
        assert await store.topic("missing") == []

    @case
    async def test_a_malformed_event_is_refused(self, store: Store) -> None:
        for bad in (publish(""), publish(topic=""), publish(body="text"), publish(delivery="first"), publish(page=0)):
            await refused(store.commit([publish("good"), bad]))
        assert await stored_events(store) == []

    @case
    async def test_publishers_and_subscribers_do_not_miss_each_other(self, store: Store) -> None:
        other = await self.second(store)
        ids = [f"r{n}" for n in range(20)]
        await store.commit([run(id, owner="a") for id in ids])
        subscribing = [store.commit([receive(0, "t", id=id)]) for id in ids]
        publishing = [other.commit([publish(f"e{n}")]) for n in range(20)]
        await asyncio.gather(*(call for pair in zip(subscribing, publishing, strict=True) for call in pair))
        assignments = [each for box in await assigned(store, *ids) for each in box]
        assert len(assignments) == len(set(assignments)) == 20
        assert sorted(await claim_ids(store, claim("b", limit=100))) == sorted(ids)

    # restart

    @case
    async def test_continue_as_removes_subscriptions(self, store: Store) -> None:
        continue_as = ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=111.0)
        await store.commit([*waiting(), receive(1, "t", target="1/receive", continue_as=continue_as), publish()])
        assert await assigned(store, "r") == [[]]
        assert await stored_events(store) == ["e"]

    @case
    async def test_continue_as_keeps_assignments(self, store: Store) -> None:
        continue_as = ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=111.0)
        await store.commit([*waiting(), publish(), turn(1, owned=False, continue_as=continue_as, patch=suspended())])
        assert await assigned(store, "r") == [[ONE]]

    @case
    async def test_a_rejected_turn_makes_no_subscription(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "t", worker="b"), publish()])
        assert await assigned(store, "r") == [[]]
        assert await stored_events(store) == ["e"]

    @case
    async def test_assignments_count_against_the_inbox_limit_but_are_never_refused(self, store: Store) -> None:
        await store.commit([*waiting(), deliver("m1", name="t"), deliver("m2", kind="cancel")])
        assert await store.commit([publish(limit=1)]) == [EventPublished(1, 1)]
        assert await store.commit([deliver("m3", name="t", limit=2)]) == [LimitReached(2)]
        (result,) = await store.commit([deliver("m4", kind="child", limit=2)])
        assert not isinstance(result, LimitReached)


class TopicQueueCases(ContractCase):
    @case
    async def test_a_later_subscription_gets_a_queued_event(self, store: Store) -> None:
        assert await store.commit([publish("e1"), publish("e2")]) == [EventPublished(1, 0), EventPublished(2, 0)]
        await store.commit([run(owner="a")])
        assert await store.commit([receive(0, "t")]) == [Committed(has_messages=True)]
        row = await record(store)
        assert (row.status, row.wake_at, row.last_message_no) == (RunStatus.SUSPENDED, 110.0, 1)
        (message,) = await store.inbox("r")
        assert (message.id, message.target, message.offset, message.number) == (ONE, "0/receive", 1, 1)
        await store.commit(waiting("s"))
        assert await assigned(store, "s") == [[TWO]]
        await store.commit([*waiting("u"), publish("e3")])
        assert await assigned(store, "u") == [["topic/t/3"]]

    @case
    async def test_a_repeated_subscribing_turn_reports_its_assignment(self, store: Store) -> None:
        await store.commit([publish("e1"), publish("e2"), run(owner="a")])
        write = receive(0, "t")
        assert await store.commit([write]) == [Committed(has_messages=True)]
        assert await store.commit([write]) == [Committed(has_messages=True)]
        assert await assigned(store, "r") == [[ONE]]

    @case
    async def test_a_turn_that_keeps_its_run_reports_the_assignment_of_its_subscription(self, store: Store) -> None:
        extras = TurnExtras(subscribe=(Subscription("0/receive", ("t",)),))
        await store.commit([publish(), run(owner="a")])
        assert await store.commit([turn(0, entry(), extras=extras)]) == [Committed(has_messages=True)]
        assert await store.owned_with_messages("a") == ["r"]
        assert await store.commit([turn(1, entry("b", 1), seen=1, consumed=(1,))]) == [Committed()]
        assert (await store.owned_with_messages("a"), await stored_events(store)) == ([], [])

    @case
    async def test_a_subscription_to_several_topics_gets_the_event_sent_first(self, store: Store) -> None:
        await store.commit([publish("e1", now=130.0), publish("e2", topic="u", now=120.0), run(owner="a")])
        await store.commit([receive(0, "t", "u")])
        assert await assigned(store, "r") == [["topic/u/1"]]
        await store.commit([publish("e3", topic="u", now=130.0), run("s", owner="a"), run("v", owner="a")])
        await store.commit([receive(0, "u", "t", id="s"), receive(0, "u", "t", id="v")])
        assert await assigned(store, "s", "v") == [["topic/u/2"], [ONE]]

    @case
    async def test_several_subscriptions_of_one_turn_are_served_in_order(self, store: Store) -> None:
        await store.commit([publish("e1"), publish("e2"), run(owner="a")])
        waits = (Subscription("0/x", ("t",)), Subscription("0/y", ("u", "t")), Subscription("0/z", ("t",)))
        await store.commit([turn(0, patch=suspended(), extras=TurnExtras(subscribe=waits))])
        assert [(m.id, m.target, m.number) for m in await store.inbox("r")] == [(ONE, "0/x", 1), (TWO, "0/y", 2)]
        await store.commit([publish("e3")])
        assert (await store.inbox("r"))[-1].target == "0/z"

    @case
    async def test_an_after_wait_event_is_assigned_to_waiting_runs_and_never_queued(self, store: Store) -> None:
        results = await store.commit([publish("e1", delivery="after_wait", limit=0), *waiting()])
        assert results[0] == EventPublished(1, 0)
        assert (await assigned(store, "r"), await stored_events(store)) == ([[]], [])
        results = await store.commit([publish("e2", delivery="after_wait", limit=0), publish("e1")])
        assert results == [EventPublished(2, 1), EventPublished(1, 0, fresh=False)]
        assert await assigned(store, "r") == [[TWO]]

    @case
    async def test_an_after_create_event_is_assigned_to_runs_created_before_it(self, store: Store) -> None:
        for id, created_at in (("older", 119.0), ("equal", 120.0), ("younger", 121.0)):
            await store.commit([run(id, owner="a", created_at=created_at)])
        early = publish("e1", delivery="after_create")
        assert await store.commit([early, publish("e2", delivery="after_create", now=119.5)]) == [
            EventPublished(1, 0),
            EventPublished(2, 0),
        ]
        await store.commit([receive(0, "t", id="younger", now=130.0)])
        assert await assigned(store, "younger") == [[]]
        await store.commit([receive(0, "t", id=id, now=130.0) for id in ("equal", "older")])
        assert await assigned(store, "younger", "equal", "older") == [[], [ONE], [TWO]]

    @case
    async def test_an_after_create_event_skips_younger_waiting_runs(self, store: Store) -> None:
        await store.commit([*waiting("younger", created_at=121.0), *waiting("older")])
        assert await store.commit([publish(delivery="after_create")]) == [EventPublished(1, 1)]
        assert await assigned(store, "younger", "older") == [[], [ONE]]
        await store.commit([publish("e2")])
        assert await assigned(store, "younger") == [[TWO]]

    @case
    async def test_an_expired_event_is_never_assigned(self, store: Store) -> None:
        await store.commit([publish("e1", expires_at=200.0), publish("e2", expires_at=201.0), run(owner="a")])
        await store.commit([receive(0, "t", now=200.0)])
        assert await assigned(store, "r") == [[TWO]]

    @case
    async def test_an_event_that_has_expired_on_arrival_is_accepted_and_dropped(self, store: Store) -> None:
        await store.commit(waiting())
        write = publish(expires_at=120.0, limit=0)
        assert await store.commit([write]) == [EventPublished(1, 0)]
        assert await store.commit([write]) == [EventPublished(1, 0, fresh=False)]
        assert (await assigned(store, "r"), await stored_events(store)) == ([[]], [])
        assert await store.commit([publish("e2")]) == [EventPublished(2, 1)]

    @case
    async def test_a_full_topic_refuses_an_event_that_it_would_queue(self, store: Store) -> None:
        results = await store.commit([publish(f"e{n}", limit=2) for n in range(3)])
        assert results == [EventPublished(1, 0), EventPublished(2, 0), LimitReached(2)]
        assert await store.commit([publish("w", delivery="after_wait", limit=2)]) == [EventPublished(3, 0)]
        assert await store.commit([publish("n", consume=False, limit=2)]) == [LimitReached(2)]
        assert await store.commit([publish("o", topic="u", limit=2)]) == [EventPublished(1, 0)], (
            "another topic has its own limit"
        )
        await store.commit(waiting())
        assert await store.commit([publish("e2", limit=2)]) == [EventPublished(4, 0)], (
            "an assigned event does not count"
        )
        await store.commit([publish("e3", limit=None)])
        assert await stored_events(store) == ["e0", "e1", "e2", "e3"]

    @case
    async def test_a_full_topic_accepts_an_event_that_a_run_waits_for(self, store: Store) -> None:
        await store.commit([*waiting("r", created_at=150.0), publish("old", delivery="after_create")])
        shared = publish("n", consume=False, limit=1)
        assert await store.commit([shared]) == [LimitReached(1)], "it would be queued for later subscriptions too"
        assert await store.commit([publish("e1", limit=1), publish("e2", limit=1)]) == [
            EventPublished(2, 1),
            LimitReached(1),
        ]

    @case
    async def test_expired_events_do_not_count_against_the_topic_limit(self, store: Store) -> None:
        await store.commit([publish("e1", expires_at=130.0)])
        assert await store.commit([publish("e2", now=129.0, limit=1)]) == [LimitReached(1)]
        assert await store.commit([publish("e2", now=130.0, limit=1)]) == [EventPublished(2, 0)]

    # without consume

    @case
    async def test_without_consume_every_waiting_run_gets_the_event(self, store: Store) -> None:
        await store.commit([*waiting("r1"), *waiting("r2"), *waiting("r3", "u")])
        assert await store.commit([publish(consume=False)]) == [EventPublished(1, 2)]
        assert await assigned(store, "r1", "r2", "r3") == [[ONE], [ONE], []]

    @case
    async def test_without_consume_each_run_gets_the_event_once(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish("e1", consume=False), publish("e2", consume=False)])
        await store.commit([receive(1, "t", seen=1, consumed=(1,), target="0/next")])
        assert await assigned(store, "r") == [[TWO]]
        await store.commit([receive(2, "t", seen=2, consumed=(2,), target="0/third")])
        assert await assigned(store, "r") == [[]]
        await store.commit(waiting("later"))
        assert await assigned(store, "later") == [[ONE]], "so does a run that subscribes later"
        assert await stored_events(store) == ["e1", "e2"]
        await store.commit([publish("e3", consume=False)])
        assert await assigned(store, "r") == [["topic/t/3"]]

    @case
    async def test_a_run_with_an_unread_assignment_does_not_get_the_event_again(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish(consume=False), receive(1, "t", target="0/other")])
        assert await assigned(store, "r") == [[ONE]]

    @case
    async def test_two_receives_of_one_run_get_a_shared_event_once(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "t"), receive(1, "t", target="0/other")])
        assert await store.commit([publish(consume=False)]) == [EventPublished(1, 1)]
        assert [message.target for message in await store.inbox("r")] == ["0/receive"]
        await store.commit([publish("e2")])
        assert await assigned(store, "r") == [[ONE, TWO]], "the other receive still waits"

    @case
    async def test_a_shared_after_wait_event_is_deleted_when_all_runs_have_read_it(self, store: Store) -> None:
        await store.commit([*waiting("r1"), *waiting("r2"), publish(consume=False, delivery="after_wait")])
        await store.commit([*waiting("late"), turn(1, id="r1", owned=False, consumed=(1,), seen=1)])
        assert await stored_events(store) == ["e"]
        await store.commit([turn(1, id="r2", owned=False, consumed=(1,), seen=1)])
        assert (await stored_events(store), await assigned(store, "late")) == ([], [[]])
        assert await store.commit([publish("n", consume=False, delivery="after_wait", topic="u")]) == [
            EventPublished(1, 0)
        ]
        assert await stored_events(store, "u") == [], "no run waited"

    @case
    async def test_an_after_wait_event_stays_while_an_ended_run_has_it_unread(self, store: Store) -> None:
        await store.commit([*waiting(), publish(consume=False, delivery="after_wait"), end()])
        assert await stored_events(store) == ["e"]

    # pruning

    @case
    async def test_expired_events_are_pruned(self, store: Store) -> None:
        await store.commit([publish("e1", expires_at=200.0), publish("e2", expires_at=300.0), publish("e3")])
        await store.commit([*waiting("r", "u"), publish("e4", topic="u", expires_at=200.0)])
        assert await store.prune(199.0, keep_ids_for=50.0) == []
        assert (await stored_events(store), await stored_events(store, "u")) == (["e1", "e2", "e3"], ["e4"])
        assert await store.prune(200.0, keep_ids_for=50.0) == [], "only runs are counted"
        assert (await stored_events(store), await stored_events(store, "u")) == (["e2", "e3"], [])
        assert await assigned(store, "r") == [["topic/u/1"]], "an assignment in an inbox stays"
        assert await store.commit([turn(1, owned=False, seen=1, consumed=(1,), patch=suspended())]) == [Committed()]

    @case
    async def test_ids_of_events_are_retained_for_keep_ids_for(self, store: Store) -> None:
        await store.commit([*waiting(), publish("read"), publish("queued"), publish("late", expires_at=100.0)])
        await store.commit([publish("unread", delivery="after_wait", now=120.0)])
        await store.commit([turn(1, owned=False, seen=1, consumed=(1,), patch=suspended(), now=150.0)])
        await store.prune(169.0, keep_ids_for=50.0)
        for id in ("read", "queued", "late", "unread"):
            (result,) = await store.commit([publish(id, now=169.0)])
            assert isinstance(result, EventPublished)
            assert not result.fresh, id
        await store.prune(170.0, keep_ids_for=50.0)
        results = await store.commit([publish(id, now=170.0, topic="t") for id in ("read", "late", "unread", "queued")])
        assert [result.fresh for result in results if isinstance(result, EventPublished)] == [False, True, True, False]
        await store.prune(200.0, keep_ids_for=50.0)
        assert await store.commit([publish("read", now=200.0)]) == [EventPublished(7, 0)], "offsets are not reused"

    @case
    async def test_a_pruned_run_is_removed_from_its_topics(self, store: Store) -> None:
        await store.commit([*waiting(), publish(consume=False)])
        await store.commit([turn(1, owned=False, seen=1, consumed=(1,), patch=succeeded(prune_at=200.0))])
        assert len(await store.prune(200.0, keep_ids_for=50.0)) == 1
        await store.commit([run(owner="a", created_by="another"), receive(0, "t")])
        assert await assigned(store, "r") == [[ONE]], "a new run with the same id has not got the event"
        assert (await load(store)).record.last_message_no == 1
