"""Behaviour of the Redis store only: restarts, lost connections, unsafe server settings, deaths between partitions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from perdure.errors import StoreError
from perdure.model.records import RunStatus
from perdure.model.turns import TurnExtras
from perdure.stores.followed_runs import FollowedRuns
from perdure.stores.redis import server as redis_server
from perdure.stores.redis.partitions import gather_calls
from perdure.stores.redis.server import parse_url
from perdure.stores.redis.store import RedisStore
from perdure.stores.results import Committed, Created, DeadLetterMissing, EventPublished, MessageDelivered
from perdure.stores.writes import RedirectedEvent, ReplayDeadLetter, Write
from perdure.testing.contract.builders import (
    assigned,
    dead_letter,
    deliver,
    entry,
    finalize,
    load,
    publish,
    receive,
    record,
    run,
    succeeded,
    turn,
    waiting,
    worker,
)
from tests.servers.redis import Server, new_prefix, prefix_of_its_own, with_options


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server that the test may stop and change."""
    server = Server(tmp_path / "redis")
    server.start()
    yield server
    server.remove()


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(url)
    await store.open(shards=16)
    try:
        await store.join(worker("a"))
        yield store
    finally:
        await store.close()


async def retryable(call: Awaitable[object]) -> StoreError:
    with pytest.raises(StoreError) as caught:
        await call
    assert caught.value.retryable
    return caught.value


async def retry_until_available(commit: Callable[[], Awaitable[object]]) -> object:
    """Return the result of a call that is retried as the engine would."""
    for _ in range(50):
        try:
            return await commit()
        except StoreError as error:
            if not error.retryable:
                raise
    raise AssertionError("the store does not become available")


# --- scripts and stored fields ---------------------------------------------------------------------------------------


def test_run_without_messages_builds_few_lua_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    read_lua, unused = (
        redis_server._read_lua,
        {"due_queues", "other_writes", "inbox", "topics", "streams", "dead_letters"},
    )
    monkeypatch.setattr(redis_server, "_read_lua", lambda name: "error('built')" if name in unused else read_lua(name))
    monkeypatch.setattr(redis_server, "script", redis_server.script.__wrapped__)

    async def scenario(url: str) -> None:
        async with opened(url) as store:
            assert await store.commit([run("r", owner="a"), run("s", owner="a")]) == [Created(owned=True)] * 2
            assert (
                await store.commit([turn(0, entry()), turn(1, entry("x", 1), patch=succeeded())]) == [Committed()] * 2
            )
            with pytest.raises(StoreError, match="built"):
                await store.commit([deliver()])

    with prefix_of_its_own() as url:
        asyncio.run(scenario(url))


def test_fields_at_their_default_are_not_stored() -> None:
    async def scenario(url: str) -> None:
        async with opened(url) as store:
            await store.commit([run("r", owner="a")])
            required = {b"id", b"workflow", b"version", b"input", b"created_at", b"created_by", b"seed", b"shard"}
            assert set(await store._partitions.command(0, "HKEYS", "run:r")) == required | {
                b"status",
                b"owner",
                b"first_executed_at",
            }

    with prefix_of_its_own() as url:
        asyncio.run(scenario(url))


# --- restarts and lost connections -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_acknowledged_commits_survive_a_restart(own_server: Server, how: signal.Signals) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as store:
            batch: list[Write] = [run(f"r{n}", owner="a") for n in range(50)]
            await store.commit([*batch, *(turn(0, entry("x"), id=f"r{n}") for n in range(50))])
            await store.commit([*waiting("w"), deliver(id="r1"), turn(1, id="r2", patch=succeeded())])
            before = await store.load([f"r{n}" for n in range(50)])
            own_server.restart(how)
            assert await retry_until_available(lambda: store.load([f"r{n}" for n in range(50)])) == before
            assert await store.commit([publish()]) == [EventPublished(1, 1)], (
                "the restarted server gets the scripts again"
            )
            assert await store.commit([turn(1, entry("y", 1), id="r0")]) == [Committed()]

    asyncio.run(scenario())


def test_unavailable_server_is_a_retryable_error(own_server: Server) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as store:
            own_server.stop()
            error = await retryable(store.commit([run()]))
            assert own_server.url not in str(error), "an error must not show the password"
            await retryable(store.now())
            own_server.start()
            assert await retry_until_available(lambda: store.commit([run()])) == [Created(owned=False)]

    asyncio.run(scenario())


def test_repeated_batch_after_a_lost_reply_is_recognised(own_server: Server) -> None:
    async def scenario() -> None:
        async with reply_dropping_proxy(own_server.port) as (port, proxy):
            url = own_server.url.replace(f":{own_server.port}/", f":{port}/")
            async with opened(url) as store:
                await store.commit([run("r", owner="a"), *waiting("w")])
                batch: list[Write] = [turn(0, entry()), deliver(), publish(), run("s")]
                proxy.drop_replies = True
                await retryable(store.commit(batch))
                proxy.drop_replies = False
                assert await store.commit(batch) == [
                    Committed(has_messages=True),
                    MessageDelivered(1, fresh=False, owner="a"),
                    EventPublished(1, 0, fresh=False),
                    Created(owned=False),
                ]
                assert (await load(store)).position == 1
                assert await assigned(store, "w") == [["topic/t/1"]]

    asyncio.run(scenario())


class ReplyDroppingProxy:
    """A proxy that forwards requests. If `drop_replies` is set, it closes the connection instead of a reply."""

    drop_replies = False

    def __init__(self, port: int) -> None:
        self._port = port
        self._forwarders: set[asyncio.Task[None]] = set()

    async def forward(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        forwarder = asyncio.current_task()
        assert forwarder is not None
        self._forwarders.add(forwarder)
        server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        requests = asyncio.create_task(_pass_on(client, to_server))
        try:
            while data := await server.read(65536):
                if self.drop_replies:
                    break
                to_client.write(data)
        finally:
            requests.cancel()
            for writer in (to_client, to_server):
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    async def close(self) -> None:
        for forwarder in self._forwarders:
            forwarder.cancel()
        await asyncio.gather(*self._forwarders, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)


@contextlib.asynccontextmanager
async def reply_dropping_proxy(port: int) -> AsyncIterator[tuple[int, ReplyDroppingProxy]]:
    proxy = ReplyDroppingProxy(port)
    server = await asyncio.start_server(proxy.forward, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], proxy
    finally:
        server.close()
        await proxy.close()


def test_opened_store_gets_every_later_change_hint(own_server: Server) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as other:
            for n in range(20):
                async with opened(own_server.url) as store:
                    hints: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
                    store.on_change(hints.put_nowait)
                    await other.commit([run(f"r{n}")])
                    first = await asyncio.wait_for(hints.get(), 60)
                    assert first == frozenset([f"r{n}"]), "the hint of the new subscription (None) came before"

    asyncio.run(scenario())


def test_listener_reconnects_after_its_connection_is_killed(own_server: Server) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as store, opened(own_server.url) as other:
            hints: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
            unsubscribe = store.on_change(hints.put_nowait)

            async def wait_for_hint(what: frozenset[str] | None) -> None:
                while await asyncio.wait_for(hints.get(), 60) != what:
                    pass

            await other.commit([run("first")])
            await wait_for_hint(frozenset(["first"]))
            own_server.command("CLIENT", "KILL", "TYPE", "pubsub")
            await wait_for_hint(None)  # any run may have changed meanwhile
            await other.commit([run("second")])
            await wait_for_hint(frozenset(["second"]))
            unsubscribe()

    asyncio.run(scenario())


async def check_hints(store: RedisStore, listener: RedisStore, name: str) -> None:
    """Check that `listener` gets hints of two runs that `store` creates in a batch, and of one that ends."""
    hints: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
    unsubscribe = listener.on_change(hints.put_nowait)
    pair = [f"{name} {n}" for n in range(2)]
    await store.commit([run(id) for id in pair])
    await store.commit([run(name, owner="a")])
    await store.commit([turn(0, entry(), id=name, patch=succeeded())])
    for changed in (pair, [name]):
        while await asyncio.wait_for(hints.get(), 60) != frozenset(changed):
            pass
    unsubscribe()


async def wait_until_only_listener(server: Server, store: RedisStore) -> None:
    publisher = store._partitions.publisher
    async with asyncio.timeout(60):
        while server.command("PUBSUB", "NUMSUB", publisher.channel, publisher.own_channel).count(b":1\r\n") < 2:
            await asyncio.sleep(0.01)


def test_only_listener_publishes_no_hints(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FollowedRuns, "join", lambda followed: None)  # a message of followers, not a hint

    async def scenario() -> None:
        async with opened(own_server.url) as store:
            await wait_until_only_listener(own_server, store)
            before = own_server.commands()
            await check_hints(store, store, "alone")  # listeners in this process are notified all the same
            assert (own_server.commands() - before)["publish"] == 0
            async with opened(own_server.url) as other:
                await check_hints(store, other, "with another")
                assert (own_server.commands() - before)["publish"] == 2
            await wait_until_only_listener(own_server, store)
            await store.commit([run("alone again")])
            assert (own_server.commands() - before)["publish"] == 2

    asyncio.run(scenario())


def test_store_without_a_listener_notifies_the_only_listener(own_server: Server) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as store, opened(own_server.url) as other:
            await store._listener.stop()
            await wait_until_only_listener(own_server, other)
            await check_hints(store, other, "r")

    asyncio.run(scenario())


def test_notifies_all_when_listener_count_is_not_readable(own_server: Server) -> None:
    rules = ("+@all", "-pubsub", "~*", "resetchannels", "&perdure:changes")
    own_server.command("ACL", "SETUSER", "shop", "on", ">secret", *rules)
    as_shop = urlsplit(own_server.url)._replace(netloc=f"shop:secret@127.0.0.1:{own_server.port}").geturl()

    async def scenario() -> None:
        async with opened(as_shop) as store, opened(own_server.url) as other:
            await check_hints(store, other, "r")
            await check_hints(other, store, "s")

    asyncio.run(scenario())


# --- unsafe settings, and servers that cannot write ------------------------------------------------------------------


def open_and_close(url: str) -> None:
    async def scenario() -> None:
        async with opened(url):
            pass

    asyncio.run(scenario())


def test_evicting_server_is_refused(own_server: Server) -> None:
    own_server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreError, match="noeviction") as caught:
        open_and_close(own_server.url)
    assert not caught.value.retryable
    own_server.command("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
    open_and_close(own_server.url)  # evicts only keys with an expiry; those of a store have none


def test_server_without_append_only_file_is_refused_unless_durability_is_relaxed(
    own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.command("CONFIG", "SET", "appendonly", "no")
    with pytest.raises(StoreError, match="appendonly"):
        open_and_close(own_server.url)
    with caplog.at_level(logging.WARNING):
        open_and_close(with_options(own_server.url, durability="relaxed"))
    assert "append-only" in caplog.text


def test_warns_if_append_only_file_is_not_flushed_with_every_commit(
    own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        open_and_close(own_server.url)
    assert "everysec" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        open_and_close(with_options(own_server.url, durability="relaxed"))
        own_server.command("CONFIG", "SET", "appendfsync", "always")
        open_and_close(own_server.url)
    assert caplog.text == ""


def test_primary_that_becomes_a_replica_is_a_retryable_error(own_server: Server) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as store:
            own_server.command("REPLICAOF", "127.0.0.1", "1")
            await retryable(store.commit([run()]))
            await retryable(RedisStore(own_server.url).open(shards=16))
            own_server.command("REPLICAOF", "NO", "ONE")
            assert await retry_until_available(lambda: store.commit([run()])) == [Created(owned=False)]

    asyncio.run(scenario())


def test_server_with_full_memory_stores_nothing_of_a_batch(own_server: Server) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as store:
            await store.commit([run(owner="a")])
            own_server.command("CONFIG", "SET", "maxmemory", "1")
            await retryable(store.commit([turn(0, entry()), deliver(), run("s")]))
            own_server.command("CONFIG", "SET", "maxmemory", "0")
            snapshot = await load(store)
            assert (snapshot.position, snapshot.inbox, await store.records(["s"])) == (0, (), [None])

    asyncio.run(scenario())


# --- prefixes, formats and URLs --------------------------------------------------------------------------------------


def test_refuses_keys_of_other_programs_and_newer_formats() -> None:
    async def scenario(url: str) -> None:
        async with opened(url) as store:
            await store._partitions.command(0, "HSET", "meta:", "format", "99")
            with pytest.raises(StoreError, match="version"):
                await RedisStore(url).open(shards=16)
            await store._partitions.command(0, "DEL", "meta:")
            await store._partitions.command(0, "HSET", "meta:", "colour", "red")
            with pytest.raises(StoreError, match="not perdure's"):
                await RedisStore(url).open(shards=16)

    with prefix_of_its_own() as url:
        asyncio.run(scenario(url))


def test_refuses_the_format_before_the_renaming_of_fields() -> None:
    """Format 2 had the same keys with other names of fields: `slices`, `has_messages`, `standing` and others."""

    async def scenario(url: str) -> None:
        async with opened(url) as store:
            await store._partitions.command(0, "DEL", "meta:")
            await store._partitions.command(0, "HSET", "meta:", "format", "2", "shards", "16", "slices", "1")
            with pytest.raises(StoreError, match=r"another version of perdure \(format 2, not 6\)") as caught:
                await RedisStore(url).open(shards=16)
            assert not caught.value.retryable

    with prefix_of_its_own() as url:
        asyncio.run(scenario(url))


def test_stores_with_different_prefixes_are_separate() -> None:
    async def scenario(first: str, second: str) -> None:
        async with opened(first) as store, opened(second) as other:
            await store.commit([run(owner="a"), publish()])
            assert await other.records(["r"]) == [None]
            assert await other.topic("t") == []

    with prefix_of_its_own() as first, prefix_of_its_own() as second:
        asyncio.run(scenario(first, second))


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "http://host",
        "redis://host?prefix=",
        "redis://host?prefix=a:b",
        "redis://host?prefix={a}",
        "redis://host?durability=some",
        "redis://host?partitions=0",
        "redis://host?partitions=many",
    ],
)
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(StoreError):
        RedisStore(url)


def test_url_is_parsed_into_address_and_options() -> None:
    address = parse_url(
        "rediss://publisher:pw@host:7000/2?prefix=shop&durability=relaxed&partitions=8&socket_timeout=3"
    )
    assert (address.prefix, address.relaxed, address.partitions) == ("shop", True, 8)
    assert address.url == "rediss://publisher:pw@host:7000/2?socket_timeout=3"
    assert urlsplit(parse_url("redis://host").url).hostname == "host"
    assert (
        parse_url("redis+unix://publisher:pw@/run/redis.sock?db=2&partitions=4").url
        == "unix://publisher:pw@/run/redis.sock?db=2"
    )
    assert parse_url("redis+unix:///run/redis.sock").url == "unix:///run/redis.sock"


def test_connection_closed_by_another_call_is_a_retryable_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that loses its server closes all connections, also one that another call is opening."""

    async def scenario(url: str) -> None:
        async with opened(url) as store:
            assert store._server._script_pool is not None

            async def cut_off(*command: object) -> None:
                writer = None
                writer.writelines(command)  # type: ignore[attr-defined]  # as in redis-py

            monkeypatch.setattr(store._server._script_pool, "execute", cut_off)
            assert "while it was being opened" in str(await retryable(store.commit([run()])))
            monkeypatch.undo()
            assert await store.commit([run()]) == [Created(owned=False)]

    with prefix_of_its_own() as url:
        asyncio.run(scenario(url))


def test_failure_is_raised_when_all_partitions_have_responded() -> None:
    completed: list[str] = []

    async def slow() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        completed.append("slow")

    async def failing() -> None:
        raise StoreError("unavailable", retryable=True)

    async def scenario() -> None:
        with pytest.raises(StoreError, match="unavailable"):
            await gather_calls([failing(), slow()])
        assert completed == ["slow"]

    asyncio.run(scenario())


def test_closed_store_refuses_calls() -> None:
    with pytest.raises(StoreError, match="not open"):
        asyncio.run(RedisStore("redis://host").records(["r"]))


# --- deaths between two partitions -----------------------------------------------------------------------------------


class Dead(Exception):
    """The process was killed at this point."""


async def die_before_delivery(store: RedisStore, *batch: Write) -> None:
    async def die(messages: object) -> None:
        raise Dead

    store._partitions._deliver = die  # type: ignore[assignment, method-assign]
    with pytest.raises(Dead):
        await store.commit(list(batch))


async def die_before_deletion(store: RedisStore, *batch: Write) -> None:
    call = store._partitions._call_once

    async def dying(script: str, number: int, request: bytes) -> object:
        if b"delete_outgoing" in request:
            raise Dead
        return await call(script, number, request)

    store._partitions._call_once = dying  # type: ignore[assignment, method-assign]
    with pytest.raises(Dead):
        await store.commit(list(batch))


DEATHS = [die_before_delivery, die_before_deletion]


@pytest.fixture
def partitioned_url() -> Iterator[str]:
    """Return the URL of a store in which run "r" and topic "t" are in different partitions."""
    with prefix_of_its_own(partitions=16) as url:
        yield url


async def check_different_partitions(store: RedisStore) -> None:
    assert store._partitions.of("r") != store._partitions.of("t")


@pytest.mark.parametrize("death", DEATHS)
def test_assignment_is_delivered_once_if_its_publisher_dies(partitioned_url: str, death) -> None:
    async def scenario() -> None:
        async with opened(partitioned_url) as dying, opened(partitioned_url) as other:
            await check_different_partitions(dying)
            await dying.commit(waiting("r"))
            await death(dying, publish())
            await other.unfinished_broadcasts()
            assert await assigned(other, "r") == [["topic/t/1"]]
            await other.unfinished_broadcasts()
            assert (await record(other)).last_message_no == 1
            assert await other.commit([publish()]) == [EventPublished(1, 0, fresh=False)]
            await other.commit([turn(1, owned=False, seen=1, consumed=(1,))])
            assert await other.topic("t") == []

    asyncio.run(scenario())


@pytest.mark.parametrize("death", DEATHS)
def test_subscription_finds_queued_event_if_its_worker_dies(partitioned_url: str, death) -> None:
    async def scenario() -> None:
        async with opened(partitioned_url) as dying, opened(partitioned_url) as other:
            await check_different_partitions(dying)
            await other.commit([publish(), run("r", owner="a")])
            await death(dying, receive(0, "t"))
            assert (await record(other)).status is RunStatus.SUSPENDED
            await other.unfinished_broadcasts()
            assert await assigned(other, "r") == [["topic/t/1"]]
            assert (await record(other)).wake_at == 110.0
            assert await other.commit([receive(0, "t")]) == [Committed(has_messages=True)], "its reply was lost"
            assert (await record(other)).last_message_no == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("death", DEATHS)
def test_consumed_event_is_deleted_if_its_reader_dies(partitioned_url: str, death) -> None:
    async def scenario() -> None:
        async with opened(partitioned_url) as dying, opened(partitioned_url) as other:
            await other.commit([*waiting("r"), publish()])
            await death(dying, turn(1, owned=False, seen=1, consumed=(1,)))
            await other.unfinished_broadcasts()
            assert await other.topic("t") == []
            await other.commit(waiting("s"))
            assert await assigned(other, "s") == [[]]

    asyncio.run(scenario())


@pytest.mark.parametrize("death", DEATHS)
def test_dead_letter_is_replayed_once_if_its_caller_dies(partitioned_url: str, death) -> None:
    async def scenario() -> None:
        async with opened(partitioned_url) as dying, opened(partitioned_url) as other:
            await check_different_partitions(dying)
            await other.commit([run("r", owner="a"), turn(0, extras=TurnExtras(dead_letters=(dead_letter(),)))])
            await death(dying, ReplayDeadLetter(dead_letter_id="d", send=publish("mine")))
            assert await other.dead_letters() == []
            assert await other.commit([ReplayDeadLetter(dead_letter_id="d", send=publish("theirs"))]) == [
                DeadLetterMissing()
            ]
            await other.unfinished_broadcasts()
            assert [event.id for event in await other.topic("t")] == ["mine"]
            assert await other.commit([ReplayDeadLetter(dead_letter_id="d", send=publish("mine"))]) == [
                EventPublished(1, 0)
            ]

    asyncio.run(scenario())


@pytest.mark.parametrize("death", DEATHS)
def test_refused_replay_restores_the_dead_letter_if_its_caller_dies(partitioned_url: str, death) -> None:
    async def scenario() -> None:
        async with opened(partitioned_url) as dying, opened(partitioned_url) as other:
            await check_different_partitions(dying)
            dead_letters = (dead_letter("first"), dead_letter("d"), dead_letter("last"))
            await other.commit(
                [publish("e"), run("r", owner="a"), turn(0, extras=TurnExtras(dead_letters=dead_letters))]
            )
            await death(dying, ReplayDeadLetter(dead_letter_id="d", send=publish("mine", limit=1)))
            await other._partitions.sweep()
            assert [each.id for each in await other.dead_letters()] == ["first", "d", "last"]

    asyncio.run(scenario())


def test_repeated_partition_message_does_not_replay_a_dead_letter_twice(partitioned_url: str) -> None:
    """The message was delivered and refused. The dead letter was stored again and replayed; the topic has space now."""

    async def scenario() -> None:
        async with opened(partitioned_url) as dying, opened(partitioned_url) as other:
            await other.commit(
                [publish("e"), run("r", owner="a"), turn(0, extras=TurnExtras(dead_letters=(dead_letter(),)))]
            )
            await die_before_deletion(dying, ReplayDeadLetter(dead_letter_id="d", send=publish("mine", limit=1)))
            assert await other.commit([ReplayDeadLetter(dead_letter_id="d", send=deliver("other"))]) == [
                MessageDelivered(1, True, "a")
            ]
            await other.commit([*waiting("s"), turn(1, id="s", owned=False, seen=1, consumed=(1,))])
            assert await other.topic("t") == []
            await other._partitions.sweep()
            assert await other.topic("t") == []
            assert await other.dead_letters() == []

    asyncio.run(scenario())


@pytest.mark.parametrize("death", DEATHS)
def test_redirected_event_is_published_once_if_its_worker_dies(partitioned_url: str, death) -> None:
    async def scenario() -> None:
        async with opened(partitioned_url) as dying, opened(partitioned_url) as other:
            await check_different_partitions(dying)
            await other.commit([run("r", owner="a"), deliver("m"), turn(0, seen=1, patch=succeeded())])
            write = finalize(redirected=(RedirectedEvent(1, publish("moved"), dead_letter()),))
            await death(dying, write)
            assert await other.unfinalized() == []
            await other.unfinished_broadcasts()
            assert [event.id for event in await other.topic("t")] == ["moved"]
            assert await other.commit([write]) == [Committed()]
            assert len(await other.topic("t")) == 1
            assert await other.dead_letters() == []

    asyncio.run(scenario())


def test_results_of_replays_are_deleted_after_the_retention_of_ids(partitioned_url: str) -> None:
    async def scenario() -> None:
        async with opened(partitioned_url) as store:
            await store.commit([run("r", owner="a"), turn(0, extras=TurnExtras(dead_letters=(dead_letter(),)))])
            await store.commit([ReplayDeadLetter(dead_letter_id="d", send=publish("mine", now=200.0))])
            target = store._partitions.of("t")
            await store.prune(249.0, keep_ids_for=50.0)
            assert await store._partitions.read(target, "sent", "replay/mine")
            await store.prune(250.0, keep_ids_for=50.0)
            assert not await store._partitions.read(target, "sent", "replay/mine")

    asyncio.run(scenario())


def test_assignment_without_open_receive_goes_to_the_next_subscription(partitioned_url: str) -> None:
    async def scenario() -> None:
        async with opened(partitioned_url) as dying, opened(partitioned_url) as other:
            await other.commit([*waiting("r"), *waiting("s")])
            await die_before_delivery(dying, publish())
            await other.commit([turn(1, owned=False, patch=succeeded())])
            await other.unfinished_broadcasts()
            assert await assigned(other, "r", "s") == [[], ["topic/t/1"]]

    asyncio.run(scenario())


def test_repeated_partition_message_does_not_assign_a_released_event_twice(partitioned_url: str) -> None:
    """The message was delivered, the assignment released, and the message comes again when another run has it."""

    async def scenario() -> None:
        async with opened(partitioned_url) as dying, opened(partitioned_url) as other:
            await other.commit([*waiting("r"), *waiting("s")])
            await die_before_deletion(dying, publish())
            await other.commit([receive(1, "t", target="0/again", seen=1, released_assignments=(1,))])
            assert await assigned(other, "r", "s") == [[], ["topic/t/1"]]
            await other.unfinished_broadcasts()
            assert await assigned(other, "r", "s") == [[], ["topic/t/1"]]

    asyncio.run(scenario())


def test_fenced_worker_is_fenced_in_every_partition(partitioned_url: str) -> None:
    async def scenario(ids: list[str]) -> None:
        async with opened(partitioned_url) as store:
            await store.commit([run(id, owner="a") for id in ids])
            await store._partitions.execute(0, "fence_worker", "a", "")  # the caller dies before the other partitions
            assert sorted(await store.release_runs("a", 120.0, recovered=True)) == ids
            results = await store.commit([turn(0, entry(), id=id, owned=False) for id in ids])
            assert not any(isinstance(result, Committed) for result in results)

    asyncio.run(scenario([f"r{n:02d}" for n in range(40)]))


def test_every_key_has_the_tag_of_its_partition(own_server: Server) -> None:
    async def scenario(url: str) -> None:
        async with opened(url) as store:
            await store.commit(
                [*waiting("r"), publish(), deliver(id="r"), run("s", owner="a"), turn(0, entry(), id="s")]
            )
            await store.keys("tokens", 1.0)
            keys = await store._server.command("KEYS", "*")
            tags = {store._partitions.tag(n).encode() for n in range(4)}
            assert {key.partition(b"}")[0] + b"}" for key in keys} <= tags

    asyncio.run(scenario(with_options(own_server.url, prefix=new_prefix(), partitions=4)))
