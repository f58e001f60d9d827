"""Events of topics find the runs that may have them, whoever comes first, in order and once."""

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
    end,
    entry,
    held_by,
    load,
    mail,
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

ONE = "topic/t/1"
TWO = "topic/t/2"


class PublishingCases(ContractCase):
    @case
    async def test_an_event_goes_to_a_run_that_waits_and_wakes_it(self, store: Store) -> None:
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
        assert await take(store, claim("b", 120.0)) == ["r"]

    @case
    async def test_an_owner_is_told_of_an_assignment_like_of_other_mail(self, store: Store) -> None:
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
    async def test_a_consumed_event_is_gone(self, store: Store) -> None:
        await store.commit([*waiting(), publish()])
        assert await held_by(store) == ["e"], "it keeps its place until it is read"
        assert await store.commit([turn(1, owned=False, seen=1, consumed=(1,), patch=suspended())]) == [Committed()]
        assert await held_by(store) == []
        await store.commit(waiting("next"))
        assert await assigned(store, "r", "next") == [[], []]

    @case
    async def test_the_subscription_that_has_stood_longest_is_served_first(self, store: Store) -> None:
        for id in ("z", "a", "m"):
            await store.commit(waiting(id))
        await store.commit([turn(1, id="a", owned=False, patch=suspended())])  # it goes on waiting
        await store.commit([publish("e1"), publish("e2"), publish("e3")])
        assert await assigned(store, "z", "a", "m") == [[ONE], [TWO], ["topic/t/3"]]

    @case
    async def test_a_subscription_that_is_named_again_keeps_its_standing(self, store: Store) -> None:
        await store.commit([*waiting("first"), *waiting("second"), receive(1, "t", id="first"), publish()])
        assert await assigned(store, "first", "second") == [[ONE], []]
        await store.commit([publish("e2")])
        assert await assigned(store, "first", "second") == [[ONE], [TWO]], "and is one"

    @case
    async def test_who_unsubscribes_gets_nothing(self, store: Store) -> None:
        await store.commit([*waiting(), run("s", owner="a"), receive(0, "t", id="s", target="0/other")])
        gone = TurnExtras(unsubscribe=("0/receive", "never was"))
        await store.commit([turn(1, owned=False, patch=suspended(), extras=gone)])
        await store.commit([turn(1, id="s", owned=False, patch=suspended(), extras=gone)])
        await store.commit([publish()])
        assert await assigned(store, "r", "s") == [[], [ONE]]

    @case
    async def test_an_event_of_another_topic_is_nobodys_business(self, store: Store) -> None:
        await store.commit([*waiting(), publish(topic="T"), publish(topic="tt")])
        assert await assigned(store, "r") == [[]]
        assert (await held_by(store, "t"), await held_by(store, "T"), await held_by(store, "tt")) == ([], ["e"], ["e"])

    @case
    async def test_an_assignment_uses_up_a_subscription_in_all_its_topics(self, store: Store) -> None:
        await store.commit([*waiting("r", "t", "u"), *waiting("s", "u")])
        answers = await store.commit([publish("e1"), publish("e2", topic="u"), publish("e3")])
        assert answers == [EventPublished(1, 1), EventPublished(1, 1), EventPublished(2, 0)]
        assert await assigned(store, "r", "s") == [[ONE], ["topic/u/1"]]

    @case
    async def test_a_topic_that_is_named_twice_is_one(self, store: Store) -> None:
        await store.commit([*waiting("r", "t", "t"), publish("e1"), publish("e2")])
        assert await assigned(store, "r") == [[ONE]]

    @case
    async def test_two_receives_of_one_run_each_take_an_event(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "t"), receive(1, "t", target="0/other")])
        await store.commit([publish("e1"), publish("e2"), publish("e3")])
        assert [(m.id, m.target) for m in await store.inbox("r")] == [(ONE, "0/receive"), (TWO, "0/other")]
        assert await held_by(store) == ["e1", "e2", "e3"]

    @case
    async def test_an_event_id_is_taken_once_per_topic(self, store: Store) -> None:
        await store.commit([*waiting("r"), *waiting("s")])
        again = EventPublished(1, woken=0, fresh=False)
        assert await store.commit([publish(), publish(body=b"other")]) == [EventPublished(1, 1), again]
        await store.commit([turn(1, owned=False, seen=1, consumed=(1,), patch=suspended())])
        assert await store.commit([publish()]) == [again], "its id is remembered when it is gone"
        assert await assigned(store, "s") == [[]]
        assert await store.commit([publish(topic="u"), publish("f")]) == [EventPublished(1, 0), EventPublished(2, 1)]

    @case
    async def test_a_queued_events_id_is_known_too(self, store: Store) -> None:
        await store.commit([publish()])
        assert await store.commit([publish(limit=1)]) == [EventPublished(1, woken=0, fresh=False)]
        assert await held_by(store) == ["e"]

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
        assert await store.topic("nobody's") == []

    @case
    async def test_what_is_no_event_is_refused(self, store: Store) -> None:
        for bad in (publish(""), publish(topic=""), publish(body="text"), publish(delivery="first"), publish(page=0)):
            await refused(store.commit([publish("good"), bad]))
        assert await held_by(store) == []

    @case
    async def test_publishers_and_subscribers_do_not_miss_each_other(self, store: Store) -> None:
        other = await self.second(store)
        ids = [f"r{n}" for n in range(20)]
        await store.commit([run(id, owner="a") for id in ids])
        subscribing = [store.commit([receive(0, "t", id=id)]) for id in ids]
        publishing = [other.commit([publish(f"e{n}")]) for n in range(20)]
        await asyncio.gather(*(call for pair in zip(subscribing, publishing, strict=True) for call in pair))
        got = [each for box in await assigned(store, *ids) for each in box]
        assert len(got) == len(set(got)) == 20
        assert sorted(await take(store, claim("b", limit=100))) == sorted(ids)

    # going away

    @case
    async def test_a_subscription_goes_when_the_run_begins_anew(self, store: Store) -> None:
        continue_as = ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=111.0)
        await store.commit([*waiting(), receive(1, "t", target="1/receive", continue_as=continue_as), publish()])
        assert await assigned(store, "r") == [[]]
        assert await held_by(store) == ["e"]

    @case
    async def test_an_assignment_stays_when_the_run_begins_anew(self, store: Store) -> None:
        continue_as = ContinueAs(workflow="flow", version=1, input=b"2", first_executed_at=111.0)
        await store.commit([*waiting(), publish(), turn(1, owned=False, continue_as=continue_as, patch=suspended())])
        assert await assigned(store, "r") == [[ONE]]

    @case
    async def test_a_refused_turn_subscribes_to_nothing(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "t", worker="b"), publish()])
        assert await assigned(store, "r") == [[]]
        assert await held_by(store) == ["e"]

    @case
    async def test_assignments_fill_the_mailbox_but_are_never_refused(self, store: Store) -> None:
        await store.commit([*waiting(), mail("m1"), mail("m2", kind="cancel")])
        assert await store.commit([publish(limit=1)]) == [EventPublished(1, 1)]
        assert await store.commit([mail("m3", limit=2)]) == [LimitReached(2)]
        (answer,) = await store.commit([mail("m4", kind="child", limit=2)])
        assert not isinstance(answer, LimitReached)


class QueueCases(ContractCase):
    @case
    async def test_a_queued_event_is_found_by_who_subscribes_later(self, store: Store) -> None:
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
    async def test_a_lost_answer_to_a_subscription_that_found_an_event(self, store: Store) -> None:
        await store.commit([publish("e1"), publish("e2"), run(owner="a")])
        write = receive(0, "t")
        assert await store.commit([write]) == [Committed(has_messages=True)]
        assert await store.commit([write]) == [Committed(has_messages=True)]
        assert await assigned(store, "r") == [[ONE]]

    @case
    async def test_a_turn_that_goes_on_is_told_of_what_its_subscription_found(self, store: Store) -> None:
        extras = TurnExtras(subscribe=(Subscription("0/receive", ("t",)),))
        await store.commit([publish(), run(owner="a")])
        assert await store.commit([turn(0, entry(), extras=extras)]) == [Committed(has_messages=True)]
        assert await store.owned_with_messages("a") == ["r"]
        assert await store.commit([turn(1, entry("b", 1), seen=1, consumed=(1,))]) == [Committed()]
        assert (await store.owned_with_messages("a"), await held_by(store)) == ([], [])

    @case
    async def test_of_several_topics_what_was_sent_first_comes_first(self, store: Store) -> None:
        await store.commit([publish("e1", now=130.0), publish("e2", topic="u", now=120.0), run(owner="a")])
        await store.commit([receive(0, "t", "u")])
        assert await assigned(store, "r") == [["topic/u/1"]]
        await store.commit([publish("e3", topic="u", now=130.0), run("s", owner="a"), run("v", owner="a")])
        await store.commit([receive(0, "u", "t", id="s"), receive(0, "u", "t", id="v")])
        assert await assigned(store, "s", "v") == [["topic/u/2"], [ONE]]

    @case
    async def test_several_receives_of_one_turn_are_served_in_their_order(self, store: Store) -> None:
        await store.commit([publish("e1"), publish("e2"), run(owner="a")])
        waits = (Subscription("0/x", ("t",)), Subscription("0/y", ("u", "t")), Subscription("0/z", ("t",)))
        await store.commit([turn(0, patch=suspended(), extras=TurnExtras(subscribe=waits))])
        assert [(m.id, m.target, m.number) for m in await store.inbox("r")] == [(ONE, "0/x", 1), (TWO, "0/y", 2)]
        await store.commit([publish("e3")])
        assert (await store.inbox("r"))[-1].target == "0/z"

    @case
    async def test_after_wait_is_for_runs_that_wait_and_never_queued(self, store: Store) -> None:
        answers = await store.commit([publish("e1", delivery="after_wait", limit=0), *waiting()])
        assert answers[0] == EventPublished(1, 0)
        assert (await assigned(store, "r"), await held_by(store)) == ([[]], [])
        answers = await store.commit([publish("e2", delivery="after_wait", limit=0), publish("e1")])
        assert answers == [EventPublished(2, 1), EventPublished(1, 0, fresh=False)]
        assert await assigned(store, "r") == [[TWO]]

    @case
    async def test_after_create_is_for_runs_that_were_there(self, store: Store) -> None:
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
    async def test_after_create_passes_over_younger_runs_that_wait(self, store: Store) -> None:
        await store.commit([*waiting("younger", created_at=121.0), *waiting("older")])
        assert await store.commit([publish(delivery="after_create")]) == [EventPublished(1, 1)]
        assert await assigned(store, "younger", "older") == [[], [ONE]]
        await store.commit([publish("e2")])
        assert await assigned(store, "younger") == [[TWO]]

    @case
    async def test_an_event_is_never_delivered_once_it_has_expired(self, store: Store) -> None:
        await store.commit([publish("e1", expires_at=200.0), publish("e2", expires_at=201.0), run(owner="a")])
        await store.commit([receive(0, "t", now=200.0)])
        assert await assigned(store, "r") == [[TWO]]

    @case
    async def test_an_event_that_has_expired_on_arrival_is_accepted_and_dropped(self, store: Store) -> None:
        await store.commit(waiting())
        write = publish(expires_at=120.0, limit=0)
        assert await store.commit([write]) == [EventPublished(1, 0)]
        assert await store.commit([write]) == [EventPublished(1, 0, fresh=False)]
        assert (await assigned(store, "r"), await held_by(store)) == ([[]], [])
        assert await store.commit([publish("e2")]) == [EventPublished(2, 1)]

    @case
    async def test_a_full_topic_refuses_what_it_would_have_to_queue(self, store: Store) -> None:
        answers = await store.commit([publish(f"e{n}", limit=2) for n in range(3)])
        assert answers == [EventPublished(1, 0), EventPublished(2, 0), LimitReached(2)]
        assert await store.commit([publish("w", delivery="after_wait", limit=2)]) == [EventPublished(3, 0)]
        assert await store.commit([publish("n", consume=False, limit=2)]) == [LimitReached(2)]
        assert await store.commit([publish("o", topic="u", limit=2)]) == [EventPublished(1, 0)], (
            "another topic has room"
        )
        await store.commit(waiting())
        assert await store.commit([publish("e2", limit=2)]) == [EventPublished(4, 0)], "an assigned event waits no more"
        await store.commit([publish("e3", limit=None)])
        assert await held_by(store) == ["e0", "e1", "e2", "e3"]

    @case
    async def test_a_full_topic_takes_an_event_that_somebody_waits_for(self, store: Store) -> None:
        await store.commit([*waiting("r", created_at=150.0), publish("old", delivery="after_create")])
        everyones = publish("n", consume=False, limit=1)
        assert await store.commit([everyones]) == [LimitReached(1)], "that is for those who come later too"
        assert await store.commit([publish("e1", limit=1), publish("e2", limit=1)]) == [
            EventPublished(2, 1),
            LimitReached(1),
        ]

    @case
    async def test_expired_events_take_no_room(self, store: Store) -> None:
        await store.commit([publish("e1", expires_at=130.0)])
        assert await store.commit([publish("e2", now=129.0, limit=1)]) == [LimitReached(1)]
        assert await store.commit([publish("e2", now=130.0, limit=1)]) == [EventPublished(2, 0)]

    # for every run

    @case
    async def test_without_consume_every_waiting_run_gets_the_event(self, store: Store) -> None:
        await store.commit([*waiting("r1"), *waiting("r2"), *waiting("r3", "u")])
        assert await store.commit([publish(consume=False)]) == [EventPublished(1, 2)]
        assert await assigned(store, "r1", "r2", "r3") == [[ONE], [ONE], []]

    @case
    async def test_without_consume_each_run_sees_the_event_once_ever(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish("e1", consume=False), publish("e2", consume=False)])
        await store.commit([receive(1, "t", seen=1, consumed=(1,), target="0/next")])
        assert await assigned(store, "r") == [[TWO]]
        await store.commit([receive(2, "t", seen=2, consumed=(2,), target="0/third")])
        assert await assigned(store, "r") == [[]]
        await store.commit(waiting("later"))
        assert await assigned(store, "later") == [[ONE]], "also a run that comes later"
        assert await held_by(store) == ["e1", "e2"]
        await store.commit([publish("e3", consume=False)])
        assert await assigned(store, "r") == [["topic/t/3"]]

    @case
    async def test_a_run_that_has_not_read_it_yet_does_not_get_it_again(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish(consume=False), receive(1, "t", target="0/other")])
        assert await assigned(store, "r") == [[ONE]]

    @case
    async def test_two_receives_of_one_run_see_the_event_once(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "t"), receive(1, "t", target="0/other")])
        assert await store.commit([publish(consume=False)]) == [EventPublished(1, 1)]
        assert [message.target for message in await store.inbox("r")] == ["0/receive"]
        await store.commit([publish("e2")])
        assert await assigned(store, "r") == [[ONE, TWO]], "the other one waits on"

    @case
    async def test_after_wait_without_consume_is_gone_once_all_have_read_it(self, store: Store) -> None:
        await store.commit([*waiting("r1"), *waiting("r2"), publish(consume=False, delivery="after_wait")])
        await store.commit([*waiting("late"), turn(1, id="r1", owned=False, consumed=(1,), seen=1)])
        assert await held_by(store) == ["e"]
        await store.commit([turn(1, id="r2", owned=False, consumed=(1,), seen=1)])
        assert (await held_by(store), await assigned(store, "late")) == ([], [[]])
        assert await store.commit([publish("n", consume=False, delivery="after_wait", topic="u")]) == [
            EventPublished(1, 0)
        ]
        assert await held_by(store, "u") == [], "nobody waited"

    @case
    async def test_who_ended_with_the_event_unread_keeps_after_wait_from_going(self, store: Store) -> None:
        await store.commit([*waiting(), publish(consume=False, delivery="after_wait"), end()])
        assert await held_by(store) == ["e"]

    # forgetting

    @case
    async def test_expired_events_are_pruned(self, store: Store) -> None:
        await store.commit([publish("e1", expires_at=200.0), publish("e2", expires_at=300.0), publish("e3")])
        await store.commit([*waiting("r", "u"), publish("e4", topic="u", expires_at=200.0)])
        assert await store.prune(199.0, keep_ids_for=50.0) == 0
        assert (await held_by(store), await held_by(store, "u")) == (["e1", "e2", "e3"], ["e4"])
        assert await store.prune(200.0, keep_ids_for=50.0) == 0, "these are no runs"
        assert (await held_by(store), await held_by(store, "u")) == (["e2", "e3"], [])
        assert await assigned(store, "r") == [["topic/u/1"]], "what lies in a mailbox is the run's to drop"
        assert await store.commit([turn(1, owned=False, seen=1, consumed=(1,), patch=suspended())]) == [Committed()]

    @case
    async def test_ids_of_events_are_remembered_for_a_while(self, store: Store) -> None:
        await store.commit([*waiting(), publish("read"), publish("queued"), publish("late", expires_at=100.0)])
        await store.commit([publish("unheard", delivery="after_wait", now=120.0)])
        await store.commit([turn(1, owned=False, seen=1, consumed=(1,), patch=suspended(), now=150.0)])
        await store.prune(169.0, keep_ids_for=50.0)
        for id in ("read", "queued", "late", "unheard"):
            (answer,) = await store.commit([publish(id, now=169.0)])
            assert isinstance(answer, EventPublished)
            assert not answer.fresh, id
        await store.prune(170.0, keep_ids_for=50.0)
        answers = await store.commit(
            [publish(id, now=170.0, topic="t") for id in ("read", "late", "unheard", "queued")]
        )
        assert [answer.fresh for answer in answers if isinstance(answer, EventPublished)] == [False, True, True, False]
        await store.prune(200.0, keep_ids_for=50.0)
        assert await store.commit([publish("read", now=200.0)]) == [EventPublished(7, 0)], "places are not given again"

    @case
    async def test_a_pruned_run_is_forgotten_by_its_topics(self, store: Store) -> None:
        await store.commit([*waiting(), publish(consume=False)])
        await store.commit([turn(1, owned=False, seen=1, consumed=(1,), patch=succeeded(prune_at=200.0))])
        assert await store.prune(200.0, keep_ids_for=50.0) == 1
        await store.commit([run(owner="a", created_by="anew"), receive(0, "t")])
        assert await assigned(store, "r") == [[ONE]], "another run that has its id has not seen the event"
        assert (await load(store)).record.last_message_no == 1
