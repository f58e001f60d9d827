"""Dead dead_letters are stored once each; signing keys are the same for all callers."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from perdure.model.records import DeadLetter, RunStatus, SigningKey
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.results import (
    AlreadyEnded,
    DeadLetterMissing,
    EventPublished,
    LimitReached,
    MessageDelivered,
    RunMissing,
    WriteResult,
)
from perdure.stores.writes import CommitTurn, DeliverMessage, PublishEvent, ReplayDeadLetter, Write
from perdure.testing.contract.builders import (
    ContractCase,
    assigned,
    case,
    dead_letter,
    deliver,
    publish,
    refused,
    run,
    stored_events,
    succeeded,
    turn,
    waiting,
)


def leave_dead_letters(base: int, *dead_letters: DeadLetter, worker: str = "a") -> CommitTurn:
    """Build a turn that stores these dead dead_letters."""
    return turn(base, worker=worker, extras=TurnExtras(dead_letters=dead_letters))


class DeadLetterCases(ContractCase):
    @case
    async def test_dead_letters_are_stored_once_and_in_order(self, store: Store) -> None:
        dead_letters = [
            DeadLetter(
                id=f"d{9 - n}",
                kind="event",
                at=5.0,
                reason="the run has ended",
                event_id="e",
                event_name="paid",
                value=b"\x00\xff",
                original_target="r",
                target_status="failed",
                target_ended_at=4.0,
                sent_at=3.0,
            )
            for n in range(5)
        ]
        await store.commit([run(owner="a"), leave_dead_letters(0, *dead_letters[:3], dead_letters[0])])
        await store.commit([leave_dead_letters(1, replace(dead_letters[1], reason="again"), *dead_letters[3:])])
        assert await store.dead_letters() == dead_letters
        assert await store.dead_letters(limit=2) == dead_letters[:2]
        assert await store.dead_letters(limit=2, after=dead_letters[1].id) == dead_letters[2:4]
        assert await store.dead_letters(after=dead_letters[4].id) == []
        await refused(store.dead_letters(after="unknown"))
        await refused(store.dead_letters(limit=0))

    @case
    async def test_a_rejected_turn_stores_no_dead_letter(self, store: Store) -> None:
        await store.commit([run(owner="a"), leave_dead_letters(0, dead_letter(), worker="b")])
        assert await store.dead_letters() == []

    @case
    async def test_dead_letters_are_found_by_kind_and_event(self, store: Store) -> None:
        dead_letters = [
            dead_letter("d1", kind="event", event_name="paid"),
            dead_letter("d2"),
            dead_letter("d3", kind="event", event_name="shipped"),
            dead_letter("d4", kind="schedule", event_name="paid"),
            dead_letter("d5", kind="event", event_name="paid"),
        ]
        await store.commit([run(owner="a"), leave_dead_letters(0, *dead_letters)])

        async def found(**filters: str) -> list[str]:
            return [each.id for each in await store.dead_letters(**filters)]  # type: ignore[arg-type]

        assert await found(kind="event") == ["d1", "d3", "d5"]
        assert await found(event="paid") == ["d1", "d4", "d5"]
        assert await found(kind="event", event="paid") == ["d1", "d5"]
        assert await found(kind="compensation") == []
        assert await found(kind="event", after="d1") == ["d3", "d5"]
        assert await found(kind="event", after="d2") == ["d3", "d5"]
        assert [each.id for each in await store.dead_letters(2, kind="event")] == ["d1", "d3"]

    @case
    async def test_a_dead_letter_is_read_and_removed_once(self, store: Store) -> None:
        other = await self.second(store)
        await store.commit([run(owner="a"), leave_dead_letters(0, dead_letter("d1"), dead_letter("d2"))])
        assert await store.dead_letter("d1") == dead_letter("d1")
        assert await store.dead_letter("unknown") is None
        handles = [(store, other)[n % 2] for n in range(6)]
        removed = await asyncio.gather(*(handle.remove_dead_letter("d1") for handle in handles))
        assert removed.count(True) == 1
        assert await store.dead_letter("d1") is None
        assert await store.dead_letters() == [dead_letter("d2")]
        assert await store.remove_dead_letter("unknown") is False

    @case
    async def test_a_dead_letter_outlives_its_run(self, store: Store) -> None:
        await store.commit([run(owner="a"), leave_dead_letters(0, dead_letter())])
        await store.prune(9e9)
        assert await store.dead_letters() == [dead_letter()]


def replay(send: DeliverMessage | PublishEvent, dead_letter_id: str = "d") -> ReplayDeadLetter:
    return ReplayDeadLetter(dead_letter_id=dead_letter_id, send=send)


def some_dead_letters(count: int = 1) -> list[Write]:
    """Build a run that leaves the dead letters "d", "d1", "d2" ..."""
    dead_letters = [dead_letter(f"d{n}" if n else "d", kind="event", event_name="t") for n in range(count)]
    return [run("dead", owner="a"), turn(0, id="dead", extras=TurnExtras(dead_letters=tuple(dead_letters)))]


async def only(store: Store, write: Write) -> WriteResult:
    (result,) = await store.commit([write])
    return result


class ReplayCases(ContractCase):
    @case
    async def test_a_dead_letter_replayed_to_a_run_is_removed(self, store: Store) -> None:
        await store.commit([*some_dead_letters(2), run("r"), run("s")])
        assert await only(store, replay(deliver("x", event_id="e"))) == MessageDelivered(1, fresh=True)
        (message,) = await store.inbox("r")
        assert (message.id, message.event_id, message.body) == ("x", "e", b'{"by":"ada"}')
        assert [each.id for each in await store.dead_letters()] == ["d1"]
        assert await store.dead_letter("d") is None
        assert await only(store, replay(deliver("y", id="s"))) == DeadLetterMissing()
        assert await only(store, replay(deliver("y", id="s"), "never")) == DeadLetterMissing()
        assert await store.inbox("s") == []

    @case
    async def test_a_dead_letter_replayed_to_a_topic_is_removed(self, store: Store) -> None:
        await store.commit([*some_dead_letters(2), *waiting("r")])
        assert await only(store, replay(publish("x"))) == EventPublished(1, 1)
        assert await only(store, replay(publish("y"))) == DeadLetterMissing()
        assert await only(store, replay(publish("z"), "d1")) == EventPublished(2, 0)
        assert await assigned(store, "r") == [["topic/t/1"]]
        assert await stored_events(store) == ["x", "z"]
        assert await store.dead_letters() == []

    @case
    async def test_a_repeated_replay_is_recognised_after_a_lost_result(self, store: Store) -> None:
        await store.commit([*some_dead_letters(2), run("r")])
        to_run, to_topic = replay(deliver("x")), replay(publish("y"), "d1")
        await store.commit([to_run, to_topic])
        for again in await store.commit([to_run, to_topic]):
            assert isinstance(again, MessageDelivered | EventPublished)
            assert (again.number if isinstance(again, MessageDelivered) else again.offset) == 1
        assert await only(store, replay(deliver("other"))) == DeadLetterMissing(), "another call is not a repetition"
        assert [message.id for message in await store.inbox("r")] == ["x"]
        assert await stored_events(store) == ["y"]

    @case
    async def test_a_dead_letter_stays_if_its_target_refuses_the_replay(self, store: Store) -> None:
        await store.commit(
            [*some_dead_letters(3), run("r", owner="a"), run("full"), deliver("m", id="full"), publish("e")]
        )
        await store.commit([turn(0, patch=succeeded())])
        before = await store.dead_letters()
        refusals: list[tuple[DeliverMessage | PublishEvent, WriteResult]] = [
            (deliver("x"), AlreadyEnded(RunStatus.SUCCEEDED)),
            (deliver("x", id="missing"), RunMissing()),
            (deliver("x", id="full", limit=1), LimitReached(1)),
            (publish("x", limit=1), LimitReached(1)),
        ]
        for number, (send, result) in enumerate(refusals):
            mine = replay(_named(send, f"x{number}"), "d1")
            assert await only(store, mine) == result
            assert await store.dead_letters() == before
        assert await only(store, replay(deliver("y", id="full"), "d1")) == MessageDelivered(2, fresh=True)
        assert [each.id for each in await store.dead_letters()] == ["d", "d2"]

    @case
    async def test_of_concurrent_replays_and_removals_one_succeeds(self, store: Store) -> None:
        """The calls race for runs, topics and the removal."""
        other = await self.second(store)
        runs = [f"r{n}" for n in range(4)]
        await store.commit([run(id) for id in runs])
        for round in range(5):
            home, lost = f"dead{round}", dead_letter(f"d{round}", kind="event", event_name="t")
            await store.commit([run(home, owner="a"), turn(0, id=home, extras=TurnExtras(dead_letters=(lost,)))])
            sends = [
                *(_named(deliver(id=id), f"x{round}-{id}") for id in runs),
                *(_named(publish(topic=topic), f"x{round}-{topic}") for topic in ("t", "u")),
            ]
            calls = [only((store, other)[n % 2], replay(send, lost.id)) for n, send in enumerate(sends)]
            results, removed = await asyncio.gather(asyncio.gather(*calls), store.remove_dead_letter(lost.id))
            sent = [result for result in results if result != DeadLetterMissing()]
            assert all(isinstance(result, MessageDelivered | EventPublished) for result in sent)
            assert len(sent) + removed == 1
            arrived = [message.id for id in runs for message in await store.inbox(id)]
            arrived += [id for topic in ("t", "u") for id in await stored_events(store, topic)]
            assert len([id for id in arrived if id.startswith(f"x{round}-")]) == len(sent)
        assert await store.dead_letters() == []

    @case
    async def test_a_replay_applies_in_order_with_other_writes_of_its_batch(self, store: Store) -> None:
        await store.commit([*some_dead_letters(), run("r", owner="a")])
        results = await store.commit([deliver("m"), replay(deliver("x")), deliver("n"), turn(0, seen=1, consumed=(1,))])
        numbers = [result.number for result in results[:3] if isinstance(result, MessageDelivered)]
        assert numbers == [1, 2, 3]
        assert [message.id for message in await store.inbox("r")] == ["x", "n"]

    @case
    async def test_a_malformed_replay_is_refused(self, store: Store) -> None:
        await store.commit([*some_dead_letters(), run("r")])
        await refused(store.commit([replay(deliver("x"), "")]))
        await refused(store.commit([replay(deliver(""))]))
        await refused(store.commit([replay(publish("x", delivery="sometimes"))]))
        assert len(await store.dead_letters()) == 1


def _named(send: DeliverMessage | PublishEvent, id: str) -> DeliverMessage | PublishEvent:
    if isinstance(send, PublishEvent):
        return replace(send, event=replace(send.event, id=id))
    return replace(send, message=replace(send.message, id=id))


class KeyCases(ContractCase):
    @case
    async def test_the_first_key_is_created_once_for_all_callers(self, store: Store) -> None:
        other = await self.second(store)
        replies = await asyncio.gather(*((store, other)[n % 2].keys("tokens", 100.0 + n) for n in range(8)))
        assert all(keys == replies[0] for keys in replies)
        (key,) = replies[0]
        assert len(key.secret) >= 32
        assert 100.0 <= key.created_at <= 107.0
        (another,) = await store.keys("other", 100.0)
        assert another.secret != key.secret

    @case
    async def test_an_added_key_is_the_newest(self, store: Store) -> None:
        (first,) = await store.keys("tokens", 100.0)
        second = await store.add_key("tokens", 200.0)
        assert second == SigningKey(first.number + 1, 200.0, second.secret)
        assert len(second.secret) >= 32
        assert second.secret != first.secret
        third = await store.add_key("tokens", 200.0)
        assert await store.keys("tokens", 300.0) == [first, second, third]
        assert len(await store.keys("other", 300.0)) == 1

    @case
    async def test_keys_added_concurrently_are_all_stored(self, store: Store) -> None:
        other = await self.second(store)
        added = await asyncio.gather(*((store, other)[n % 2].add_key("tokens", 100.0) for n in range(6)))
        assert len({key.number for key in added}) == len({key.secret for key in added}) == 6
        assert await other.keys("tokens", 100.0) == sorted(added, key=lambda key: key.number)
