"""Followers: a process that follows a run is notified of every kind of commit to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from perdure.model.records import PublishedValue
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.writes import Write
from perdure.testing.contract.builders import ContractCase, case, deliver, entry, run, succeeded, turn
from perdure.testing.contract.streams import append, item

ATTEMPTS = 500
ATTEMPT_SECONDS = 0.1


@asynccontextmanager
async def following(store: Store, run_id: str = "r") -> AsyncIterator[asyncio.Event]:
    """Yield an event that is set after commits to the run."""
    notified = asyncio.Event()
    unfollow = store.follow(run_id, notified.set)
    try:
        yield notified
    finally:
        unfollow()
        unfollow()


async def commit_until_notified(store: Store, notified: asyncio.Event) -> None:
    """Append to the stream of run "r" until its follower is notified: a follower may become known late."""
    for n in range(ATTEMPTS):
        await store.commit([append(item(b"%d" % n))])
        try:
            await asyncio.wait_for(notified.wait(), ATTEMPT_SECONDS)
            return
        except TimeoutError:
            continue
    raise AssertionError("the follower was not notified")


def commits() -> Sequence[Sequence[Write]]:
    """Batches, one of each kind of change that a reader follows, for run "r" at position 0."""
    return (
        [append(item(b"1"))],
        [turn(0, entry())],
        [turn(1, entry("b", 1), extras=TurnExtras(published=(PublishedValue("key", b"1"),)))],
        [turn(2, entry("c", 2), extras=TurnExtras(streamed=(item(b"2"),)))],
        [turn(3, entry("d", 3)), run("other", owner="a")],
        [deliver()],
        [turn(4, seen=1, patch=succeeded())],
    )


class FollowerCases(ContractCase):
    @case
    async def test_a_follower_is_notified_of_every_commit_through_its_own_handle(self, store: Store) -> None:
        """Ends and messages may be notified as change hints only."""
        await store.commit([run(owner="a")])
        changed = asyncio.Event()
        unsubscribe = store.on_change(lambda ids: changed.set() if ids is None or "r" in ids else None)
        async with following(store) as notified:
            for batch in commits():
                notified.clear()
                changed.clear()
                await store.commit(batch)
                await asyncio.sleep(0)
                assert notified.is_set() or changed.is_set(), batch
        unsubscribe()

    @case
    async def test_a_follower_is_notified_of_every_commit_through_another_handle(self, store: Store) -> None:
        writer = await self.second(store)
        await store.commit([run(owner="a")])
        changed = asyncio.Event()
        unsubscribe = store.on_change(lambda ids: changed.set() if ids is None or "r" in ids else None)
        async with following(store) as notified:
            await commit_until_notified(writer, notified)
            for batch in commits():
                notified.clear()
                changed.clear()
                await writer.commit(batch)
                waiting = [asyncio.ensure_future(each.wait()) for each in (notified, changed)]
                done, pending = await asyncio.wait(waiting, timeout=10, return_when=asyncio.FIRST_COMPLETED)
                assert done, batch
                for each in pending:
                    each.cancel()
        unsubscribe()

    @case
    async def test_a_follower_is_not_notified_of_other_runs(self, store: Store) -> None:
        writer = await self.second(store)
        await store.commit([run(owner="a"), run("other", owner="a")])
        async with following(store, "other") as other, following(store) as notified:
            await commit_until_notified(writer, notified)
            assert not other.is_set()

    @case
    async def test_a_follower_that_has_stopped_is_not_notified(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        async with following(store) as stopped:
            pass
        async with following(store) as notified:
            await store.commit([turn(0, entry())])
            await asyncio.wait_for(notified.wait(), 10)
        assert not stopped.is_set()
