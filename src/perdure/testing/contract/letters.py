"""Dead letters are kept for a person, once each; keys are the same for everyone."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from perdure.records import DeadLetter, TurnExtras
from perdure.store.base import CommitTurn, Key, Store
from perdure.testing.contract.kit import Kit, case, letter, refused, run, turn


def leaving(base: int, *letters: DeadLetter, worker: str = "a") -> CommitTurn:
    return turn(base, worker=worker, extras=TurnExtras(dead_letters=letters))


class LetterCases(Kit):
    @case
    async def test_dead_letters_are_kept_once_and_in_order(self, store: Store) -> None:
        letters = [
            DeadLetter(
                id=f"d{9 - n}",
                kind="event",
                at=5.0,
                reason="nobody there",
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
        await store.commit([run(owner="a"), leaving(0, *letters[:3], letters[0])])
        await store.commit([leaving(1, replace(letters[1], reason="again"), *letters[3:])])
        assert await store.dead_letters() == letters
        assert await store.dead_letters(limit=2) == letters[:2]
        assert await store.dead_letters(limit=2, after=letters[1].id) == letters[2:4]
        assert await store.dead_letters(after=letters[4].id) == []
        await refused(store.dead_letters(after="unknown"))
        await refused(store.dead_letters(limit=0))

    @case
    async def test_a_refused_turn_leaves_no_dead_letter(self, store: Store) -> None:
        await store.commit([run(owner="a"), leaving(0, letter(), worker="b")])
        assert await store.dead_letters() == []

    @case
    async def test_dead_letters_are_found_by_kind_and_event(self, store: Store) -> None:
        letters = [
            letter("d1", kind="event", event_name="paid"),
            letter("d2"),
            letter("d3", kind="event", event_name="shipped"),
            letter("d4", kind="schedule", event_name="paid"),
            letter("d5", kind="event", event_name="paid"),
        ]
        await store.commit([run(owner="a"), leaving(0, *letters)])

        async def found(**asked: str) -> list[str]:
            return [each.id for each in await store.dead_letters(**asked)]  # type: ignore[arg-type]

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
        await store.commit([run(owner="a"), leaving(0, letter("d1"), letter("d2"))])
        assert await store.dead_letter("d1") == letter("d1")
        assert await store.dead_letter("unknown") is None
        handles = [(store, other)[n % 2] for n in range(6)]
        removed = await asyncio.gather(*(handle.remove_dead_letter("d1") for handle in handles))
        assert removed.count(True) == 1
        assert await store.dead_letter("d1") is None
        assert await store.dead_letters() == [letter("d2")]
        assert await store.remove_dead_letter("unknown") is False

    @case
    async def test_a_dead_letter_outlives_its_run(self, store: Store) -> None:
        await store.commit([run(owner="a"), leaving(0, letter())])
        await store.prune(9e9)
        assert await store.dead_letters() == [letter()]


class KeyCases(Kit):
    @case
    async def test_the_first_key_is_made_once_and_the_same_for_everyone(self, store: Store) -> None:
        other = await self.second(store)
        asked = await asyncio.gather(*((store, other)[n % 2].keys("tokens", 100.0 + n) for n in range(8)))
        assert all(keys == asked[0] for keys in asked)
        (key,) = asked[0]
        assert len(key.secret) >= 32
        assert 100.0 <= key.made_at <= 107.0
        (another,) = await store.keys("other", 100.0)
        assert another.secret != key.secret

    @case
    async def test_another_key_is_the_newest_from_then_on(self, store: Store) -> None:
        (first,) = await store.keys("tokens", 100.0)
        second = await store.add_key("tokens", 200.0)
        assert second == Key(first.number + 1, 200.0, second.secret)
        assert len(second.secret) >= 32
        assert second.secret != first.secret
        third = await store.add_key("tokens", 200.0)
        assert await store.keys("tokens", 300.0) == [first, second, third]
        assert len(await store.keys("other", 300.0)) == 1

    @case
    async def test_keys_that_are_added_at_once_are_all_kept(self, store: Store) -> None:
        other = await self.second(store)
        added = await asyncio.gather(*((store, other)[n % 2].add_key("tokens", 100.0) for n in range(6)))
        assert len({key.number for key in added}) == len({key.secret for key in added}) == 6
        assert await other.keys("tokens", 100.0) == sorted(added, key=lambda key: key.number)
