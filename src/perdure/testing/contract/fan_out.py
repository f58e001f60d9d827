"""Events are fanned out in pages, and an assignment that meets no open receive is released."""

from __future__ import annotations

from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, EventPublished, LimitReached
from perdure.stores.writes import FanOut, Write
from perdure.testing.contract.builders import (
    ContractCase,
    assigned,
    case,
    claim,
    claim_ids,
    deliver,
    end,
    finalize,
    publish,
    receive,
    record,
    run,
    stored_events,
    succeeded,
    suspended,
    turn,
    waiting,
)

ONE = "topic/t/1"
TWO = "topic/t/2"


def fan_out(offset: int = 1, *, now: float = 125.0, page: int = 2, topic: str = "t") -> FanOut:
    return FanOut(topic=topic, offset=offset, now=now, page=page)


def release(base: int = 1, *numbers: int, id: str = "r", now: float = 110.0) -> Write:
    """Build a turn whose receive has timed out: it unsubscribes and releases the assignments that came meanwhile."""
    extras = TurnExtras(released_assignments=numbers or (1,), unsubscribe=("0/receive",))
    return turn(base, id=id, owned=False, seen=9, patch=suspended(), extras=extras, now=now)


class FanOutCases(ContractCase):
    async def _five(self, store: Store) -> None:
        for n in range(5):
            await store.commit(waiting(f"r{n}"))

    @case
    async def test_an_event_is_fanned_out_in_pages(self, store: Store) -> None:
        await self._five(store)
        assert await store.commit([publish(consume=False, page=2)]) == [EventPublished(1, 2, more=True)]
        assert await assigned(store, "r0", "r1", "r2", "r3", "r4") == [[ONE], [ONE], [], [], []]
        assert [event.id for event in await store.unfinished_broadcasts()] == ["e"]
        assert await store.commit([fan_out()]) == [EventPublished(1, 2, more=True)]
        assert await store.commit([fan_out()]) == [EventPublished(1, 1)]
        assert await assigned(store, "r0", "r1", "r2", "r3", "r4") == [[ONE]] * 5
        assert await store.unfinished_broadcasts() == []
        assert await store.commit([fan_out()]) == [EventPublished(1, 0)], "its result was lost"
        assert len(await claim_ids(store, claim("b", 130.0))) == 5

    @case
    async def test_a_page_that_reaches_the_last_subscription_finishes_the_fan_out(self, store: Store) -> None:
        await self._five(store)
        assert await store.commit([publish(consume=False, page=5)]) == [EventPublished(1, 5)]
        assert await store.unfinished_broadcasts() == []

    @case
    async def test_a_repeated_publish_reports_whether_its_fan_out_is_unfinished(self, store: Store) -> None:
        await self._five(store)
        write = publish(consume=False, page=4)
        await store.commit([write])
        assert await store.commit([write]) == [EventPublished(1, 0, more=True, fresh=False)]
        await store.commit([fan_out()])
        assert await store.commit([write]) == [EventPublished(1, 0, fresh=False)]

    @case
    async def test_a_page_counts_ineligible_subscriptions(self, store: Store) -> None:
        await store.commit([*waiting("r0"), *waiting("young", created_at=500.0), *waiting("r1"), *waiting("r2")])
        write = publish(consume=False, delivery="after_create", page=2)
        assert await store.commit([write]) == [EventPublished(1, 1, more=True)]
        assert await store.commit([fan_out(page=1)]) == [EventPublished(1, 1, more=True)]
        assert await store.commit([fan_out(page=1)]) == [EventPublished(1, 1)]
        assert await assigned(store, "r0", "young", "r1", "r2") == [[ONE], [], [ONE], [ONE]]

    @case
    async def test_a_run_that_unsubscribes_during_a_fan_out_gets_nothing(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, page=2)])
        unsubscribed = TurnExtras(unsubscribe=("0/receive",))
        await store.commit([turn(1, id="r2", owned=False, patch=suspended(), extras=unsubscribed), end(id="r4")])
        assert await store.commit([fan_out(page=9)]) == [EventPublished(1, 1)]
        assert await assigned(store, "r2", "r3", "r4") == [[], [ONE], []]

    @case
    async def test_a_run_that_subscribes_during_a_fan_out_gets_the_queued_event_once(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, page=2), *waiting("late")])
        assert await assigned(store, "late") == [[ONE]]
        assert await store.commit([fan_out(page=9)]) == [EventPublished(1, 3)]
        assert await assigned(store, "late") == [[ONE]]

    @case
    async def test_a_run_that_subscribes_during_a_fan_out_does_not_get_an_after_wait_event(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, delivery="after_wait", page=2), *waiting("late")])
        assert await store.commit([fan_out(page=9)]) == [EventPublished(1, 3)]
        assert await assigned(store, "r4", "late") == [[ONE], []]

    @case
    async def test_a_fan_out_skips_a_run_that_got_an_event_of_another_topic(self, store: Store) -> None:
        await store.commit([*waiting("r0"), *waiting("r1", "t", "u"), *waiting("r2")])
        await store.commit([publish(consume=False, page=1), publish("f", topic="u")])
        assert await store.commit([fan_out(page=9)]) == [EventPublished(1, 1)]
        assert await assigned(store, "r0", "r1", "r2") == [[ONE], ["topic/u/1"], [ONE]]
        await store.commit([receive(1, "t", id="r1", seen=1, consumed=(1,))])
        assert await assigned(store, "r1") == [[ONE]], "its next receive finds the queued event"

    @case
    async def test_two_receives_of_one_run_on_different_pages_get_the_event_once(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "t"), receive(1, "t", target="0/other"), *waiting("s")])
        assert await store.commit([publish(consume=False, page=1)]) == [EventPublished(1, 1, more=True)]
        assert await store.commit([fan_out(page=1)]) == [EventPublished(1, 0, more=True)]
        assert await store.commit([fan_out(page=1)]) == [EventPublished(1, 1)]
        assert await assigned(store, "r", "s") == [[ONE], [ONE]]

    @case
    async def test_an_event_that_expires_during_its_fan_out_is_not_assigned_further(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, page=2, expires_at=130.0)])
        assert await store.commit([fan_out(now=130.0)]) == [EventPublished(1, 0)]
        assert await store.unfinished_broadcasts() == []
        assert await assigned(store, "r1", "r2") == [[ONE], []]

    @case
    async def test_pruning_an_expired_event_finishes_its_fan_out(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, page=2, expires_at=130.0)])
        await store.prune(130.0, keep_ids_for=50.0)
        assert await store.unfinished_broadcasts() == []
        assert await store.commit([fan_out(now=129.0)]) == [EventPublished(1, 0)]
        assert await assigned(store, "r2") == [[]]

    @case
    async def test_a_paged_after_wait_event_is_deleted_when_all_runs_have_read_it(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, delivery="after_wait", page=4)])
        for n in range(4):
            await store.commit([turn(1, id=f"r{n}", owned=False, seen=1, consumed=(1,), patch=suspended())])
        assert await stored_events(store) == ["e"]
        await store.commit([fan_out()])
        await store.commit([turn(1, id="r4", owned=False, seen=1, consumed=(1,), patch=suspended())])
        assert await stored_events(store) == []

    @case
    async def test_a_later_event_waits_for_the_unfinished_fan_out_of_an_earlier_event(self, store: Store) -> None:
        await self._five(store)
        results = await store.commit(
            [publish(consume=False, page=2), publish("f"), publish("g", delivery="after_wait")]
        )
        assert results == [
            EventPublished(1, 2, more=True),
            EventPublished(2, 0, more=True),
            EventPublished(3, 0, more=True),
        ]
        assert [(event.id, event.offset) for event in await store.unfinished_broadcasts()] == [
            ("e", 1),
            ("f", 2),
            ("g", 3),
        ]
        assert [event.id for event in await store.unfinished_broadcasts(limit=1)] == ["e"]
        assert await store.commit([fan_out(2)]) == [EventPublished(2, 0, more=True)], (
            "this was a page of the earlier event"
        )
        assert await store.commit([fan_out(2)]) == [EventPublished(2, 0, more=True)]
        assert await assigned(store, "r0", "r1", "r2", "r3", "r4") == [[ONE]] * 5
        await store.commit(waiting("late"))
        assert await assigned(store, "late") == [[ONE]]
        assert await store.commit([fan_out(2), fan_out(3)]) == [EventPublished(2, 0), EventPublished(3, 0)]
        assert await store.unfinished_broadcasts() == []
        assert await stored_events(store) == ["e", "f"], "no run waited for the third event when it was sent"

    @case
    async def test_a_waiting_event_is_assigned_to_the_oldest_subscription_at_its_fan_out(self, store: Store) -> None:
        await store.commit([*waiting("r0"), *waiting("r1"), *waiting("young", created_at=500.0)])
        await store.commit([publish(consume=False, delivery="after_create", page=1), publish("f")])
        await store.commit(waiting("late", created_at=501.0))
        assert await assigned(store, "young", "late") == [[], []], "the newest subscription does not get it first"
        results = await store.commit([fan_out(1, page=9), fan_out(2)])
        assert results == [EventPublished(1, 1), EventPublished(2, 1)]
        assert await assigned(store, "r0", "r1", "young", "late") == [[ONE], [ONE], [TWO], []]

    @case
    async def test_a_waiting_event_is_assigned_to_a_later_subscription_if_no_earlier_one_is_left(
        self, store: Store
    ) -> None:
        await store.commit([*waiting("r0"), *waiting("r1"), publish(consume=False, delivery="after_create", page=1)])
        await store.commit([publish("f"), *waiting("late", created_at=500.0)])
        assert await store.commit([fan_out(1), fan_out(2)]) == [EventPublished(1, 1), EventPublished(2, 1)]
        assert await assigned(store, "late") == [[TWO]]

    @case
    async def test_an_event_that_waits_for_a_fan_out_counts_against_the_limit(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, page=2)])
        assert await store.commit([publish("f", limit=1)]) == [LimitReached(1)]
        assert await store.commit([publish("f", limit=2)]) == [EventPublished(2, 0, more=True)]
        assert await store.commit([publish("g", limit=2)]) == [LimitReached(2)]

    @case
    async def test_unfinished_events_are_listed_by_topic_and_offset(self, store: Store) -> None:
        await store.commit([*waiting("r0", "u"), *waiting("r1", "u"), *waiting("s0"), *waiting("s1")])
        await store.commit([publish("e1", topic="u", consume=False, page=1), publish("e2", consume=False, page=1)])
        await store.commit([publish("e3", topic="u")])
        found = [(event.topic, event.offset) for event in await store.unfinished_broadcasts()]
        assert found == [("t", 1), ("u", 1), ("u", 2)]

    @case
    async def test_a_fan_out_of_a_missing_topic_or_event_does_nothing(self, store: Store) -> None:
        assert await store.commit([fan_out(7, topic="missing")]) == [EventPublished(7, 0)]
        await store.commit([publish()])
        assert await store.commit([fan_out(1), fan_out(7)]) == [EventPublished(1, 0), EventPublished(7, 0)]


class ReleaseCases(ContractCase):
    @case
    async def test_a_released_event_is_assigned_to_the_next_subscription(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish(event_id="own"), *waiting("s"), *waiting("u")])
        assert await store.commit([release()]) == [Committed()]
        assert await assigned(store, "r", "s", "u") == [[], [ONE], []]
        assert [message.event_id for message in await store.inbox("s")] == ["own"]
        assert (await record(store, "s")).wake_at == 110.0
        assert await stored_events(store) == ["e"]

    @case
    async def test_a_released_event_without_subscriptions_keeps_its_offset(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish("e1"), publish("e2"), release()])
        assert [(event.id, event.offset) for event in await store.topic("t")] == [("e1", 1), ("e2", 2)]
        await store.commit([*waiting("s"), *waiting("u")])
        assert await assigned(store, "s", "u") == [[ONE], [TWO]]

    @case
    async def test_a_released_event_may_be_assigned_to_the_same_run_again(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish(), release()])
        assert await store.commit([receive(2, "t", target="0/next", seen=1)]) == [Committed(has_messages=True)]
        (message,) = await store.inbox("r")
        assert (message.id, message.number, message.target) == (ONE, 2, "0/next")
        await store.commit([turn(3, owned=False, seen=2, consumed=(2,), patch=suspended())])
        assert (await stored_events(store), await store.inbox("r")) == ([], [])

    @case
    async def test_a_turn_may_release_an_event_and_subscribe_again(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish()])
        write = receive(1, "t", target="0/next", seen=1, released_assignments=(1,))
        assert await store.commit([write]) == [Committed(has_messages=True)]
        assert [(m.number, m.target) for m in await store.inbox("r")] == [(2, "0/next")]
        await store.commit([*waiting("s"), receive(2, "t", target="0/third", seen=2, released_assignments=(2,))])
        assert await assigned(store, "r", "s") == [[], [ONE]], "its new subscription is younger than the others"

    @case
    async def test_a_released_event_may_go_to_another_receive_of_the_run(self, store: Store) -> None:
        for consume in (True, False):
            id, topic = f"r-{consume}", f"t-{consume}"
            await store.commit([run(id, owner="a"), receive(0, topic, id=id)])
            await store.commit([receive(1, topic, id=id, target="0/other"), publish(topic=topic, consume=consume)])
            await store.commit([release(2, 1, id=id)])
            assert [(m.number, m.target) for m in await store.inbox(id)] == [(2, "0/other")]

    @case
    async def test_a_released_event_goes_to_the_oldest_other_receive_of_the_run(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "t"), receive(1, "u", target="0/elsewhere")])
        await store.commit([receive(2, "t", target="0/second"), receive(3, "t", target="0/third")])
        await store.commit([publish(consume=False), release(4)])
        assert [(m.number, m.target) for m in await store.inbox("r")] == [(2, "0/second")]

    @case
    async def test_a_released_after_wait_event_does_not_go_to_a_later_receive_of_the_run(self, store: Store) -> None:
        await store.commit([*waiting(), publish(consume=False, delivery="after_wait")])
        await store.commit([receive(1, "t", target="0/later", seen=1), release(2)])
        assert (await store.inbox("r"), await stored_events(store)) == ([], [])

    @case
    async def test_a_run_may_get_a_shared_event_again_after_releasing_it(self, store: Store) -> None:
        await store.commit([*waiting("r"), *waiting("s"), publish(consume=False), release()])
        await store.commit([receive(1, "t", id="s", target="0/next", seen=1)])
        assert await assigned(store, "r", "s") == [[], [ONE]]
        await store.commit([receive(2, "t", target="0/next", seen=1)])
        assert await assigned(store, "r") == [[ONE]]

    @case
    async def test_a_released_after_wait_event_goes_only_to_runs_that_waited_when_it_was_sent(
        self, store: Store
    ) -> None:
        await store.commit([*waiting("r"), *waiting("s"), publish(delivery="after_wait"), *waiting("late")])
        await store.commit([release()])
        assert await assigned(store, "r", "s", "late") == [[], [ONE], []]
        await store.commit([release(id="s")])
        assert (await assigned(store, "s", "late"), await stored_events(store)) == ([[], []], [])
        assert await store.commit([publish()]) == [EventPublished(1, 0, fresh=False)]

    @case
    async def test_a_shared_after_wait_event_is_deleted_when_the_last_run_released_or_read_it(
        self, store: Store
    ) -> None:
        await store.commit([*waiting("r"), *waiting("s"), publish(delivery="after_wait", consume=False)])
        await store.commit([release()])
        assert await stored_events(store) == ["e"]
        await store.commit([turn(1, id="s", owned=False, seen=1, consumed=(1,), patch=suspended())])
        assert await stored_events(store) == []

    @case
    async def test_a_released_after_create_event_goes_only_to_older_runs(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish(delivery="after_create"), *waiting("young", created_at=500.0)])
        await store.commit([*waiting("old"), release()])
        assert await assigned(store, "young", "old") == [[], [ONE]]

    @case
    async def test_an_expired_event_that_is_released_is_not_assigned(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish(expires_at=200.0), *waiting("s"), release(now=200.0)])
        assert await assigned(store, "r", "s") == [[], []]

    @case
    async def test_releasing_a_pruned_event_does_not_restore_it(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish(expires_at=200.0)])
        await store.prune(200.0, keep_ids_for=50.0)
        assert await store.commit([release(now=150.0)]) == [Committed()]
        await store.commit(waiting("s"))
        assert (await store.inbox("r"), await assigned(store, "s"), await stored_events(store)) == ([], [[]], [])

    @case
    async def test_only_an_unread_assignment_can_be_released(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish()])
        await store.commit([turn(1, owned=False, seen=1, consumed=(1,), patch=suspended())])
        await store.commit([release(2, 1, 7), *waiting("s"), deliver("m")])
        assert await assigned(store, "r", "s") == [[], []]
        await store.commit([release(3, 2)])
        assert [message.id for message in await store.inbox("r")] == ["m"], (
            "an event that was sent to the run belongs to no topic"
        )

    @case
    async def test_a_run_that_ends_does_not_get_the_event_it_releases(self, store: Store) -> None:
        await store.commit([*waiting("r"), receive(1, "t", target="0/other"), publish(), *waiting("s")])
        extras = TurnExtras(released_assignments=(1,))
        await store.commit([turn(2, owned=False, seen=1, patch=succeeded(), extras=extras)])
        assert await assigned(store, "r", "s") == [[], [ONE]]
        assert await store.unfinalized() == []

    @case
    async def test_a_repeated_release_changes_nothing(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish()])
        write = release()
        await store.commit([write, *waiting("s"), write])
        await store.commit([write])
        assert await assigned(store, "r", "s") == [[], [ONE]]

    @case
    async def test_an_ended_run_releases_its_assignments_in_order(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "t"), receive(1, "t", target="0/other")])
        await store.commit([publish("e1"), publish("e2"), end(), *waiting("s"), *waiting("u")])
        write = finalize(returned=(1, 2), orphaned_children=True)
        assert await store.commit([write]) == [Committed()]
        assert await assigned(store, "s", "u") == [[ONE], [TWO]]
        assert await store.commit([write]) == [Committed()], "its result was lost"
        assert await store.unfinalized() == []
