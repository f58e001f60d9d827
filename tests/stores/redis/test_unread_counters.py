"""Unread events by name on Redis: counters are built when they are needed, and repaired after an earlier version."""

import asyncio

import redis.asyncio

from perdure.stores.redis.encoding import encode, frame
from perdure.stores.redis.store import RedisStore
from perdure.stores.results import LimitReached, MessageDelivered
from perdure.testing.contract.builders import deliver, entry, run, turn, worker
from tests.servers.redis import prefix_of_its_own


def with_store(scenario):
    async def main(url):
        store = RedisStore(url)
        await store.open(shards=16)
        try:
            async with redis.asyncio.Redis.from_url(url.partition("?")[0]) as client:
                await store.join(worker("a"))
                await store.commit([run(owner="a")])
                await scenario(store, client, store._partitions.tag(0))
        finally:
            await store.close()

    with prefix_of_its_own() as url:
        asyncio.run(main(url))


def test_mailbox_below_its_limit_has_no_counters():
    async def scenario(store, client, tag):
        await store.commit([deliver(f"m{n}", limit=3) for n in range(3)])
        assert await client.exists(f"{tag}:unread:r") == 0
        assert await store.commit([deliver("m3", name="other", limit=3)]) == [accepted(4)]
        assert await client.hgetall(f"{tag}:unread:r") == {b"approved": b"3", b"other": b"1"}
        await store.commit([turn(0, entry(), seen=4, consumed=(1, 2, 3, 4))])
        assert await client.exists(f"{tag}:unread:r") == 0
        assert await client.hget(f"{tag}:run:r", "counted_events") == b""

    with_store(scenario)


def test_messages_of_an_earlier_version_are_counted_by_name():
    async def scenario(store, client, tag):
        await store.commit([deliver(f"m{n}") for n in range(2)] + [deliver("o", name="other")])
        for number in range(1, 4):  # as an earlier version stores them: without the name in the header
            message = (await store.inbox("r"))[number - 1]
            await client.hset(f"{tag}:inbox:r", str(number), frame((message.kind, message.id), encode(message)))
        assert await store.commit([deliver("m3", limit=2)]) == [LimitReached(2)]
        assert await store.commit([deliver("p", name="other", limit=2)]) == [accepted(4)]
        await store.commit([turn(0, entry(), seen=4, consumed=(1,))])
        assert await store.commit([deliver("m3", limit=2)]) == [accepted(5)]
        assert [message.name for message in await store.inbox("r")] == ["approved", "other", "other", "approved"]

    with_store(scenario)


def test_counters_that_an_earlier_version_did_not_change_are_built_again():
    async def scenario(store, client, tag):
        await store.commit([deliver(f"m{n}") for n in range(3)])
        assert await store.commit([deliver("m3", limit=3)]) == [LimitReached(3)]
        await client.hdel(f"{tag}:inbox:r", "1")  # an earlier version consumes a message
        await client.hset(f"{tag}:run:r", "pending_events", "2")
        assert await store.commit([deliver("m3", limit=3)]) == [accepted(4)]
        assert await store.commit([deliver("m4", limit=3)]) == [LimitReached(3)]

    with_store(scenario)


def accepted(number):
    return MessageDelivered(number, fresh=True, owner="a")
