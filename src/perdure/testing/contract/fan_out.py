"""Events that go out in pages, and events that come back because the receive they were meant for is not there."""

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
    end,
    held_by,
    mail,
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

ONE = "topic/t/1"
TWO = "topic/t/2"


def fan_out(place: int = 1, *, now: float = 125.0, page: int = 2, topic: str = "t") -> FanOut:
    return FanOut(topic=topic, offset=place, now=now, page=page)


def giving_back(base: int = 1, *numbers: int, id: str = "r", now: float = 110.0) -> Write:
    """The receive is gone (timed out, cancelled), and the assignment that came meanwhile goes back."""
    extras = TurnExtras(released_assignments=numbers or (1,), unsubscribe=("0/receive",))
    return turn(base, id=id, owned=False, seen=9, patch=suspended(), extras=extras, now=now)


class FanOutCases(ContractCase):
    async def _five(self, store: Store) -> None:
        for n in range(5):
            await store.commit(waiting(f"r{n}"))

    @case
    async def test_an_event_goes_out_in_pages(self, store: Store) -> None:
        await self._five(store)
        assert await store.commit([publish(consume=False, page=2)]) == [EventPublished(1, 2, more=True)]
        assert await assigned(store, "r0", "r1", "r2", "r3", "r4") == [[ONE], [ONE], [], [], []]
        assert [event.id for event in await store.unfinished_broadcasts()] == ["e"]
        assert await store.commit([fan_out()]) == [EventPublished(1, 2, more=True)]
        assert await store.commit([fan_out()]) == [EventPublished(1, 1)]
        assert await assigned(store, "r0", "r1", "r2", "r3", "r4") == [[ONE]] * 5
        assert await store.unfinished_broadcasts() == []
        assert await store.commit([fan_out()]) == [EventPublished(1, 0)], "its answer was lost"
        assert len(await take(store, claim("b", 130.0))) == 5

    @case
    async def test_a_page_that_serves_the_last_one_is_the_last(self, store: Store) -> None:
        await self._five(store)
        assert await store.commit([publish(consume=False, page=5)]) == [EventPublished(1, 5)]
        assert await store.unfinished_broadcasts() == []

    @case
    async def test_a_repeated_call_says_whether_there_is_more_to_come(self, store: Store) -> None:
        await self._five(store)
        write = publish(consume=False, page=4)
        await store.commit([write])
        assert await store.commit([write]) == [EventPublished(1, 0, more=True, fresh=False)]
        await store.commit([fan_out()])
        assert await store.commit([write]) == [EventPublished(1, 0, fresh=False)]

    @case
    async def test_a_page_counts_those_that_may_not_have_it(self, store: Store) -> None:
        await store.commit([*waiting("r0"), *waiting("young", created_at=500.0), *waiting("r1"), *waiting("r2")])
        write = publish(consume=False, delivery="after_create", page=2)
        assert await store.commit([write]) == [EventPublished(1, 1, more=True)]
        assert await store.commit([fan_out(page=1)]) == [EventPublished(1, 1, more=True)]
        assert await store.commit([fan_out(page=1)]) == [EventPublished(1, 1)]
        assert await assigned(store, "r0", "young", "r1", "r2") == [[ONE], [], [ONE], [ONE]]

    @case
    async def test_who_leaves_in_between_gets_nothing(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, page=2)])
        gone = TurnExtras(unsubscribe=("0/receive",))
        await store.commit([turn(1, id="r2", owned=False, patch=suspended(), extras=gone), end(id="r4")])
        assert await store.commit([fan_out(page=9)]) == [EventPublished(1, 1)]
        assert await assigned(store, "r2", "r3", "r4") == [[], [ONE], []]

    @case
    async def test_who_comes_in_between_gets_it_from_the_queue_once(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, page=2), *waiting("late")])
        assert await assigned(store, "late") == [[ONE]]
        assert await store.commit([fan_out(page=9)]) == [EventPublished(1, 3)]
        assert await assigned(store, "late") == [[ONE]]

    @case
    async def test_who_comes_in_between_has_not_waited(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, delivery="after_wait", page=2), *waiting("late")])
        assert await store.commit([fan_out(page=9)]) == [EventPublished(1, 3)]
        assert await assigned(store, "r4", "late") == [[ONE], []]

    @case
    async def test_who_got_an_event_of_another_topic_meanwhile_is_passed_over(self, store: Store) -> None:
        await store.commit([*waiting("r0"), *waiting("r1", "t", "u"), *waiting("r2")])
        await store.commit([publish(consume=False, page=1), publish("f", topic="u")])
        assert await store.commit([fan_out(page=9)]) == [EventPublished(1, 1)]
        assert await assigned(store, "r0", "r1", "r2") == [[ONE], ["topic/u/1"], [ONE]]
        await store.commit([receive(1, "t", id="r1", seen=1, consumed=(1,))])
        assert await assigned(store, "r1") == [[ONE]], "and finds it in the queue"

    @case
    async def test_two_receives_of_one_run_are_on_different_pages(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "t"), receive(1, "t", target="0/other"), *waiting("s")])
        assert await store.commit([publish(consume=False, page=1)]) == [EventPublished(1, 1, more=True)]
        assert await store.commit([fan_out(page=1)]) == [EventPublished(1, 0, more=True)]
        assert await store.commit([fan_out(page=1)]) == [EventPublished(1, 1)]
        assert await assigned(store, "r", "s") == [[ONE], [ONE]]

    @case
    async def test_what_expires_in_between_is_not_given_to_the_rest(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, page=2, expires_at=130.0)])
        assert await store.commit([fan_out(now=130.0)]) == [EventPublished(1, 0)]
        assert await store.unfinished_broadcasts() == []
        assert await assigned(store, "r1", "r2") == [[ONE], []]

    @case
    async def test_what_is_pruned_in_between_is_finished(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, page=2, expires_at=130.0)])
        await store.prune(130.0, keep_ids_for=50.0)
        assert await store.unfinished_broadcasts() == []
        assert await store.commit([fan_out(now=129.0)]) == [EventPublished(1, 0)]
        assert await assigned(store, "r2") == [[]]

    @case
    async def test_after_wait_that_goes_out_in_pages_goes_once_all_have_read_it(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, delivery="after_wait", page=4)])
        for n in range(4):
            await store.commit([turn(1, id=f"r{n}", owned=False, seen=1, consumed=(1,), patch=suspended())])
        assert await held_by(store) == ["e"]
        await store.commit([fan_out()])
        await store.commit([turn(1, id="r4", owned=False, seen=1, consumed=(1,), patch=suspended())])
        assert await held_by(store) == []

    @case
    async def test_a_later_event_waits_until_the_earlier_has_gone_out(self, store: Store) -> None:
        await self._five(store)
        answers = await store.commit(
            [publish(consume=False, page=2), publish("f"), publish("g", delivery="after_wait")]
        )
        assert answers == [
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
        assert await store.commit([fan_out(2)]) == [EventPublished(2, 0, more=True)], "the earlier one's page"
        assert await store.commit([fan_out(2)]) == [EventPublished(2, 0, more=True)]
        assert await assigned(store, "r0", "r1", "r2", "r3", "r4") == [[ONE]] * 5
        await store.commit(waiting("late"))
        assert await assigned(store, "late") == [[ONE]]
        assert await store.commit([fan_out(2), fan_out(3)]) == [EventPublished(2, 0), EventPublished(3, 0)]
        assert await store.unfinished_broadcasts() == []
        assert await held_by(store) == ["e", "f"], "nobody waited any more when the third was sent"

    @case
    async def test_a_later_event_goes_to_who_is_first_in_line_when_its_turn_comes(self, store: Store) -> None:
        await store.commit([*waiting("r0"), *waiting("r1"), *waiting("young", created_at=500.0)])
        await store.commit([publish(consume=False, delivery="after_create", page=1), publish("f")])
        await store.commit(waiting("late", created_at=501.0))
        assert await assigned(store, "young", "late") == [[], []], "it is not for who comes last"
        answers = await store.commit([fan_out(1, page=9), fan_out(2)])
        assert answers == [EventPublished(1, 1), EventPublished(2, 1)]
        assert await assigned(store, "r0", "r1", "young", "late") == [[ONE], [ONE], [TWO], []]

    @case
    async def test_a_later_event_that_finds_nobody_in_line_goes_to_who_came_since(self, store: Store) -> None:
        await store.commit([*waiting("r0"), *waiting("r1"), publish(consume=False, delivery="after_create", page=1)])
        await store.commit([publish("f"), *waiting("late", created_at=500.0)])
        assert await store.commit([fan_out(1), fan_out(2)]) == [EventPublished(1, 1), EventPublished(2, 1)]
        assert await assigned(store, "late") == [[TWO]]

    @case
    async def test_an_event_that_must_wait_its_turn_needs_room(self, store: Store) -> None:
        await self._five(store)
        await store.commit([publish(consume=False, page=2)])
        assert await store.commit([publish("f", limit=1)]) == [LimitReached(1)]
        assert await store.commit([publish("f", limit=2)]) == [EventPublished(2, 0, more=True)]
        assert await store.commit([publish("g", limit=2)]) == [LimitReached(2)]

    @case
    async def test_unfinished_events_are_listed_by_topic_and_place(self, store: Store) -> None:
        await store.commit([*waiting("r0", "u"), *waiting("r1", "u"), *waiting("s0"), *waiting("s1")])
        await store.commit([publish("e1", topic="u", consume=False, page=1), publish("e2", consume=False, page=1)])
        await store.commit([publish("e3", topic="u")])
        found = [(event.topic, event.offset) for event in await store.unfinished_broadcasts()]
        assert found == [("t", 1), ("u", 1), ("u", 2)]

    @case
    async def test_nothing_goes_out_of_a_topic_that_is_not_there(self, store: Store) -> None:
        assert await store.commit([fan_out(7, topic="nobody's")]) == [EventPublished(7, 0)]
        await store.commit([publish()])
        assert await store.commit([fan_out(1), fan_out(7)]) == [EventPublished(1, 0), EventPublished(7, 0)]


class ReturningCases(ContractCase):
    @case
    async def test_a_returned_event_goes_to_the_next_in_line(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish(event_id="own"), *waiting("s"), *waiting("u")])
        assert await store.commit([giving_back()]) == [Committed()]
        assert await assigned(store, "r", "s", "u") == [[], [ONE], []]
        assert [message.event_id for message in await store.inbox("s")] == ["own"]
        assert (await record(store, "s")).wake_at == 110.0
        assert await held_by(store) == ["e"]

    @case
    async def test_a_returned_event_that_nobody_waits_for_goes_back_to_its_place(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish("e1"), publish("e2"), giving_back()])
        assert [(event.id, event.offset) for event in await store.topic("t")] == [("e1", 1), ("e2", 2)]
        await store.commit([*waiting("s"), *waiting("u")])
        assert await assigned(store, "s", "u") == [[ONE], [TWO]]

    @case
    async def test_what_was_returned_may_be_given_to_the_same_run_again(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish(), giving_back()])
        assert await store.commit([receive(2, "t", target="0/next", seen=1)]) == [Committed(has_messages=True)]
        (message,) = await store.inbox("r")
        assert (message.id, message.number, message.target) == (ONE, 2, "0/next")
        await store.commit([turn(3, owned=False, seen=2, consumed=(2,), patch=suspended())])
        assert (await held_by(store), await store.inbox("r")) == ([], [])

    @case
    async def test_a_turn_may_return_an_event_and_wait_anew(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish()])
        write = receive(1, "t", target="0/next", seen=1, released_assignments=(1,))
        assert await store.commit([write]) == [Committed(has_messages=True)]
        assert [(m.number, m.target) for m in await store.inbox("r")] == [(2, "0/next")]
        await store.commit([*waiting("s"), receive(2, "t", target="0/third", seen=2, released_assignments=(2,))])
        assert await assigned(store, "r", "s") == [[], [ONE]], "but behind those who wait already"

    @case
    async def test_another_receive_of_the_run_is_in_line_too(self, store: Store) -> None:
        for consume in (True, False):
            id, topic = f"r-{consume}", f"t-{consume}"
            await store.commit([run(id, owner="a"), receive(0, topic, id=id)])
            await store.commit([receive(1, topic, id=id, target="0/other"), publish(topic=topic, consume=consume)])
            await store.commit([giving_back(2, 1, id=id)])
            assert [(m.number, m.target) for m in await store.inbox(id)] == [(2, "0/other")]

    @case
    async def test_of_the_runs_other_receives_the_one_that_has_stood_longest_is_next(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "t"), receive(1, "u", target="0/elsewhere")])
        await store.commit([receive(2, "t", target="0/second"), receive(3, "t", target="0/third")])
        await store.commit([publish(consume=False), giving_back(4)])
        assert [(m.number, m.target) for m in await store.inbox("r")] == [(2, "0/second")]

    @case
    async def test_a_receive_of_the_run_that_came_later_has_not_waited(self, store: Store) -> None:
        await store.commit([*waiting(), publish(consume=False, delivery="after_wait")])
        await store.commit([receive(1, "t", target="0/later", seen=1), giving_back(2)])
        assert (await store.inbox("r"), await held_by(store)) == ([], [])

    @case
    async def test_a_returned_event_that_all_may_have_is_as_if_this_run_had_never_seen_it(self, store: Store) -> None:
        await store.commit([*waiting("r"), *waiting("s"), publish(consume=False), giving_back()])
        await store.commit([receive(1, "t", id="s", target="0/next", seen=1)])
        assert await assigned(store, "r", "s") == [[], [ONE]]
        await store.commit([receive(2, "t", target="0/next", seen=1)])
        assert await assigned(store, "r") == [[ONE]]

    @case
    async def test_after_wait_goes_to_those_only_who_waited_when_it_was_sent(self, store: Store) -> None:
        await store.commit([*waiting("r"), *waiting("s"), publish(delivery="after_wait"), *waiting("late")])
        await store.commit([giving_back()])
        assert await assigned(store, "r", "s", "late") == [[], [ONE], []]
        await store.commit([giving_back(id="s")])
        assert (await assigned(store, "s", "late"), await held_by(store)) == ([[], []], [])
        assert await store.commit([publish()]) == [EventPublished(1, 0, fresh=False)]

    @case
    async def test_after_wait_without_consume_goes_once_the_last_has_returned_it(self, store: Store) -> None:
        await store.commit([*waiting("r"), *waiting("s"), publish(delivery="after_wait", consume=False)])
        await store.commit([giving_back()])
        assert await held_by(store) == ["e"]
        await store.commit([turn(1, id="s", owned=False, seen=1, consumed=(1,), patch=suspended())])
        assert await held_by(store) == []

    @case
    async def test_after_create_stays_with_older_runs(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish(delivery="after_create"), *waiting("young", created_at=500.0)])
        await store.commit([*waiting("old"), giving_back()])
        assert await assigned(store, "young", "old") == [[], [ONE]]

    @case
    async def test_an_expired_event_that_is_returned_goes_to_nobody(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish(expires_at=200.0), *waiting("s"), giving_back(now=200.0)])
        assert await assigned(store, "r", "s") == [[], []]

    @case
    async def test_an_event_that_was_pruned_meanwhile_is_not_returned(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish(expires_at=200.0)])
        await store.prune(200.0, keep_ids_for=50.0)
        assert await store.commit([giving_back(now=150.0)]) == [Committed()]
        await store.commit(waiting("s"))
        assert (await store.inbox("r"), await assigned(store, "s"), await held_by(store)) == ([], [[]], [])

    @case
    async def test_what_is_not_an_unread_assignment_cannot_be_returned(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish()])
        await store.commit([turn(1, owned=False, seen=1, consumed=(1,), patch=suspended())])
        await store.commit([giving_back(2, 1, 7), *waiting("s"), mail("m")])
        assert await assigned(store, "r", "s") == [[], []]
        await store.commit([giving_back(3, 2)])
        assert [message.id for message in await store.inbox("r")] == ["m"], "a targeted event is not a topic's"

    @case
    async def test_a_run_that_ends_does_not_take_what_it_returns(self, store: Store) -> None:
        await store.commit([*waiting("r"), receive(1, "t", target="0/other"), publish(), *waiting("s")])
        extras = TurnExtras(released_assignments=(1,))
        await store.commit([turn(2, owned=False, seen=1, patch=succeeded(), extras=extras)])
        assert await assigned(store, "r", "s") == [[], [ONE]]
        assert await store.unfinalized() == []

    @case
    async def test_returning_is_done_once(self, store: Store) -> None:
        await store.commit([*waiting("r"), publish()])
        write = giving_back()
        await store.commit([write, *waiting("s"), write])
        await store.commit([write])
        assert await assigned(store, "r", "s") == [[], [ONE]]

    @case
    async def test_an_ended_run_returns_in_order(self, store: Store) -> None:
        await store.commit([run(owner="a"), receive(0, "t"), receive(1, "t", target="0/other")])
        await store.commit([publish("e1"), publish("e2"), end(), *waiting("s"), *waiting("u")])
        write = settle(returned=(1, 2), orphans=True)
        assert await store.commit([write]) == [Committed()]
        assert await assigned(store, "s", "u") == [[ONE], [TWO]]
        assert await store.commit([write]) == [Committed()], "its answer was lost"
        assert await store.unfinalized() == []
