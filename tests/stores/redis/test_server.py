"""What is particular to the Redis store: servers that restart, lose connections, or are set to lose data."""

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
from perdure.stores.redis import server as redis_server
from perdure.stores.redis.partitions import gathered
from perdure.stores.redis.server import address_of
from perdure.stores.redis.store import RedisStore
from perdure.stores.results import Committed, Created, DeadLetterMissing, EventPublished, MessageDelivered
from perdure.stores.writes import RedirectedEvent, ReplayDeadLetter, Write
from perdure.testing.contract.builders import (
    assigned,
    entry,
    letter,
    load,
    mail,
    publish,
    receive,
    record,
    run,
    settle,
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


async def patiently(commit: Callable[[], Awaitable[object]]) -> object:
    """The answer of a call that is repeated as the engine would."""
    for _ in range(50):
        try:
            return await commit()
        except StoreError as error:
            if not error.retryable:
                raise
    raise AssertionError("the store does not come back")


# --- what is sent and stored -----------------------------------------------------------------------------------------


def test_a_run_that_begins_goes_on_and_ends_needs_few_rooms_of_lua(monkeypatch: pytest.MonkeyPatch) -> None:
    lua, closed = redis_server._lua, {"queues", "writes", "mail", "topics", "shown", "letters"}
    monkeypatch.setattr(redis_server, "_lua", lambda name: "error('opened')" if name in closed else lua(name))
    monkeypatch.setattr(redis_server, "script", redis_server.script.__wrapped__)

    async def scenario(url: str) -> None:
        async with opened(url) as store:
            assert await store.commit([run("r", owner="a"), run("s", owner="a")]) == [Created(owned=True)] * 2
            assert (
                await store.commit([turn(0, entry()), turn(1, entry("x", 1), patch=succeeded())]) == [Committed()] * 2
            )
            with pytest.raises(StoreError, match="opened"):
                await store.commit([mail()])

    with prefix_of_its_own() as url:
        asyncio.run(scenario(url))


def test_what_is_at_its_default_is_not_stored() -> None:
    async def scenario(url: str) -> None:
        async with opened(url) as store:
            await store.commit([run("r", owner="a")])
            made = {b"id", b"workflow", b"version", b"input", b"created_at", b"created_by", b"seed", b"shard"}
            assert set(await store._slices.ask(0, "HKEYS", "run:r")) == made | {
                b"status",
                b"owner",
                b"first_executed_at",
            }

    with prefix_of_its_own() as url:
        asyncio.run(scenario(url))


# --- restarts and lost connections -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_acknowledged_is_there_after_a_restart(own_server: Server, how: signal.Signals) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as store:
            batch: list[Write] = [run(f"r{n}", owner="a") for n in range(50)]
            await store.commit([*batch, *(turn(0, entry("x"), id=f"r{n}") for n in range(50))])
            await store.commit([*waiting("w"), mail(id="r1"), turn(1, id="r2", patch=succeeded())])
            before = await store.load([f"r{n}" for n in range(50)])
            own_server.restart(how)
            assert await patiently(lambda: store.load([f"r{n}" for n in range(50)])) == before
            assert await store.commit([publish()]) == [EventPublished(1, 1)], (
                "scripts are given to the new server again"
            )
            assert await store.commit([turn(1, entry("y", 1), id="r0")]) == [Committed()]

    asyncio.run(scenario())


def test_a_server_that_is_away_is_worth_another_try(own_server: Server) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as store:
            own_server.stop()
            error = await retryable(store.commit([run()]))
            assert own_server.url not in str(error), "the password is nobody's business"
            await retryable(store.now())
            own_server.start()
            assert await patiently(lambda: store.commit([run()])) == [Created(owned=False)]

    asyncio.run(scenario())


def test_a_batch_whose_answer_is_lost_is_recognised(own_server: Server) -> None:
    async def scenario() -> None:
        async with cut_line(own_server.port) as (port, line):
            url = own_server.url.replace(f":{own_server.port}/", f":{port}/")
            async with opened(url) as store:
                await store.commit([run("r", owner="a"), *waiting("w")])
                batch: list[Write] = [turn(0, entry()), mail(), publish(), run("s")]
                line.cut_answers = True
                await retryable(store.commit(batch))
                line.cut_answers = False
                assert await store.commit(batch) == [
                    Committed(has_messages=True),
                    MessageDelivered(1, fresh=False, owner="a"),
                    EventPublished(1, 0, fresh=False),
                    Created(owned=False),
                ]
                assert (await load(store)).position == 1
                assert await assigned(store, "w") == [["topic/t/1"]]

    asyncio.run(scenario())


class Line:
    """A proxy that passes questions on and, when it is told to, breaks the connection instead of answering."""

    cut_answers = False

    def __init__(self, port: int) -> None:
        self._port = port
        self._carriers: set[asyncio.Task[None]] = set()

    async def carry(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        carrier = asyncio.current_task()
        assert carrier is not None
        self._carriers.add(carrier)
        server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        asking = asyncio.create_task(_pass_on(client, to_server))
        try:
            while data := await server.read(65536):
                if self.cut_answers:
                    break
                to_client.write(data)
        finally:
            asking.cancel()
            for writer in (to_client, to_server):
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    async def close(self) -> None:
        for carrier in self._carriers:
            carrier.cancel()
        await asyncio.gather(*self._carriers, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)


@contextlib.asynccontextmanager
async def cut_line(port: int) -> AsyncIterator[tuple[int, Line]]:
    line = Line(port)
    proxy = await asyncio.start_server(line.carry, "127.0.0.1", 0)
    try:
        yield proxy.sockets[0].getsockname()[1], line
    finally:
        proxy.close()
        await line.close()


def test_who_has_opened_a_store_hears_all_that_others_do_from_then_on(own_server: Server) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as other:
            for n in range(20):
                async with opened(own_server.url) as store:
                    told: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
                    store.on_change(told.put_nowait)
                    await other.commit([run(f"r{n}")])
                    first = await asyncio.wait_for(told.get(), 10)
                    assert first == frozenset([f"r{n}"]), "not that it began to listen, and knows nothing of before"

    asyncio.run(scenario())


def test_those_who_listen_hear_again_after_their_line_was_cut(own_server: Server) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as store, opened(own_server.url) as other:
            told: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
            leave = store.on_change(told.put_nowait)

            async def hears(what: frozenset[str] | None) -> None:
                while await asyncio.wait_for(told.get(), 10) != what:
                    pass

            await other.commit([run("first")])
            await hears(frozenset(["first"]))
            own_server.command("CLIENT", "KILL", "TYPE", "pubsub")
            await hears(None)  # what came meanwhile is unknown
            await other.commit([run("second")])
            await hears(frozenset(["second"]))
            leave()

    asyncio.run(scenario())


async def told_of(store: RedisStore, listener: RedisStore, name: str) -> None:
    """Two runs that `store` makes in a batch are heard of by who listens, and one that ends plainly."""
    told: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
    leave = listener.on_change(told.put_nowait)
    pair = [f"{name} {n}" for n in range(2)]
    await store.commit([run(id) for id in pair])
    await store.commit([run(name, owner="a")])
    await store.commit([turn(0, entry(), id=name, patch=succeeded())])
    for changed in (pair, [name]):
        while await asyncio.wait_for(told.get(), 10) != frozenset(changed):
            pass
    leave()


async def listens_alone(server: Server, store: RedisStore) -> None:
    me = store._slices.me
    async with asyncio.timeout(10):
        while server.command("PUBSUB", "NUMSUB", me.channel, me.mine).count(b":1\r\n") < 2:
            await asyncio.sleep(0.01)


def test_who_listens_alone_publishes_nothing(own_server: Server) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as store:
            await listens_alone(own_server, store)
            before = own_server.commands()
            await told_of(store, store, "alone")  # others in this process are told all the same
            assert (own_server.commands() - before)["publish"] == 0
            async with opened(own_server.url) as other:
                await told_of(store, other, "with another")
                assert (own_server.commands() - before)["publish"] == 2
            await listens_alone(own_server, store)
            await store.commit([run("alone again")])
            assert (own_server.commands() - before)["publish"] == 2

    asyncio.run(scenario())


def test_a_store_that_is_deaf_tells_another_that_listens_alone(own_server: Server) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as store, opened(own_server.url) as other:
            await store._listener.stop()
            await listens_alone(own_server, other)
            await told_of(store, other, "r")

    asyncio.run(scenario())


def test_a_user_who_may_not_know_who_listens_tells_everybody(own_server: Server) -> None:
    rules = ("+@all", "-pubsub", "~*", "resetchannels", "&perdure:changes")
    own_server.command("ACL", "SETUSER", "shop", "on", ">secret", *rules)
    as_shop = urlsplit(own_server.url)._replace(netloc=f"shop:secret@127.0.0.1:{own_server.port}").geturl()

    async def scenario() -> None:
        async with opened(as_shop) as store, opened(own_server.url) as other:
            await told_of(store, other, "r")
            await told_of(other, store, "s")

    asyncio.run(scenario())


# --- servers that lose data, or cannot write -------------------------------------------------------------------------


def open_and_close(url: str) -> None:
    async def scenario() -> None:
        async with opened(url):
            pass

    asyncio.run(scenario())


def test_a_server_that_throws_keys_away_is_refused(own_server: Server) -> None:
    own_server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreError, match="noeviction") as caught:
        open_and_close(own_server.url)
    assert not caught.value.retryable
    own_server.command("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
    open_and_close(own_server.url)  # only keys with an end of their own would go, and ours have none


def test_a_server_without_an_append_only_file_is_refused(own_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    own_server.command("CONFIG", "SET", "appendonly", "no")
    with pytest.raises(StoreError, match="appendonly"):
        open_and_close(own_server.url)
    with caplog.at_level(logging.WARNING):
        open_and_close(with_options(own_server.url, durability="relaxed"))
    assert "append-only" in caplog.text


def test_a_file_that_is_not_written_through_at_once_is_warned_of(
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


def test_a_primary_that_has_become_a_replica_is_worth_another_try(own_server: Server) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as store:
            own_server.command("REPLICAOF", "127.0.0.1", "1")
            await retryable(store.commit([run()]))
            await retryable(RedisStore(own_server.url).open(shards=16))
            own_server.command("REPLICAOF", "NO", "ONE")
            assert await patiently(lambda: store.commit([run()])) == [Created(owned=False)]

    asyncio.run(scenario())


def test_a_server_whose_memory_is_full_stores_nothing_of_a_batch(own_server: Server) -> None:
    async def scenario() -> None:
        async with opened(own_server.url) as store:
            await store.commit([run(owner="a")])
            own_server.command("CONFIG", "SET", "maxmemory", "1")
            await retryable(store.commit([turn(0, entry()), mail(), run("s")]))
            own_server.command("CONFIG", "SET", "maxmemory", "0")
            snapshot = await load(store)
            assert (snapshot.position, snapshot.inbox, await store.records(["s"])) == (0, (), [None])

    asyncio.run(scenario())


# --- what is ours ----------------------------------------------------------------------------------------------------


def test_keys_that_are_not_ours_or_newer_are_refused() -> None:
    async def scenario(url: str) -> None:
        async with opened(url) as store:
            await store._slices.ask(0, "HSET", "meta:", "format", "99")
            with pytest.raises(StoreError, match="version"):
                await RedisStore(url).open(shards=16)
            await store._slices.ask(0, "DEL", "meta:")
            await store._slices.ask(0, "HSET", "meta:", "colour", "red")
            with pytest.raises(StoreError, match="not ours"):
                await RedisStore(url).open(shards=16)

    with prefix_of_its_own() as url:
        asyncio.run(scenario(url))


def test_two_prefixes_are_two_stores() -> None:
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
        "redis://host?slices=0",
        "redis://host?slices=many",
    ],
)
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(StoreError):
        RedisStore(url)


def test_what_the_url_says() -> None:
    address = address_of("rediss://me:pw@host:7000/2?prefix=shop&durability=relaxed&slices=8&socket_timeout=3")
    assert (address.prefix, address.relaxed, address.slices) == ("shop", True, 8)
    assert address.url == "rediss://me:pw@host:7000/2?socket_timeout=3"
    assert urlsplit(address_of("redis://host").url).hostname == "host"
    assert address_of("redis+unix://me:pw@/run/redis.sock?db=2&slices=4").url == "unix://me:pw@/run/redis.sock?db=2"
    assert address_of("redis+unix:///run/redis.sock").url == "unix:///run/redis.sock"


def test_a_connection_that_another_call_closed_is_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that finds its server gone closes all connections, also one that another call is just making."""

    async def scenario(url: str) -> None:
        async with opened(url) as store:
            assert store._server._link is not None

            async def cut_off(*command: object) -> None:
                writer = None
                writer.writelines(command)  # type: ignore[attr-defined]  # as redis-py does it

            monkeypatch.setattr(store._server._link, "execute", cut_off)
            assert "cut off" in str(await retryable(store.commit([run()])))
            monkeypatch.undo()
            assert await store.commit([run()]) == [Created(owned=False)]

    with prefix_of_its_own() as url:
        asyncio.run(scenario(url))


def test_nobody_hears_of_a_failure_before_all_slices_have_answered() -> None:
    answered: list[str] = []

    async def slow() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        answered.append("slow")

    async def failing() -> None:
        raise StoreError("away", retryable=True)

    async def scenario() -> None:
        with pytest.raises(StoreError, match="away"):
            await gathered([failing(), slow()])
        assert answered == ["slow"]

    asyncio.run(scenario())


def test_a_store_that_is_not_open_says_so() -> None:
    with pytest.raises(StoreError, match="not open"):
        asyncio.run(RedisStore("redis://host").records(["r"]))


# --- dying between two slices ----------------------------------------------------------------------------------------


class Dead(Exception):
    """The process was killed here."""


async def die_before_handing_over(store: RedisStore, *batch: Write) -> None:
    async def die(posts: object) -> None:
        raise Dead

    store._slices._hand_over = die  # type: ignore[assignment, method-assign]
    with pytest.raises(Dead):
        await store.commit(list(batch))


async def die_before_ticking_off(store: RedisStore, *batch: Write) -> None:
    call = store._slices._call_alone

    async def dying(script: str, number: int, request: bytes) -> object:
        if b"settle_posts" in request:
            raise Dead
        return await call(script, number, request)

    store._slices._call_alone = dying  # type: ignore[assignment, method-assign]
    with pytest.raises(Dead):
        await store.commit(list(batch))


DEATHS = [die_before_handing_over, die_before_ticking_off]


@pytest.fixture
def sliced_url() -> Iterator[str]:
    """A store in which run "r" and topic "t" are in different slices."""
    with prefix_of_its_own(slices=16) as url:
        yield url


async def in_different_slices(store: RedisStore) -> None:
    assert store._slices.of("r") != store._slices.of("t")


@pytest.mark.parametrize("death", DEATHS)
def test_an_assignment_whose_publisher_died_is_delivered_once(sliced_url: str, death) -> None:
    async def scenario() -> None:
        async with opened(sliced_url) as dying, opened(sliced_url) as other:
            await in_different_slices(dying)
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
def test_a_subscription_whose_worker_died_finds_what_is_queued(sliced_url: str, death) -> None:
    async def scenario() -> None:
        async with opened(sliced_url) as dying, opened(sliced_url) as other:
            await in_different_slices(dying)
            await other.commit([publish(), run("r", owner="a")])
            await death(dying, receive(0, "t"))
            assert (await record(other)).status is RunStatus.SUSPENDED
            await other.unfinished_broadcasts()
            assert await assigned(other, "r") == [["topic/t/1"]]
            assert (await record(other)).wake_at == 110.0
            assert await other.commit([receive(0, "t")]) == [Committed(has_messages=True)], "its answer was lost"
            assert (await record(other)).last_message_no == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("death", DEATHS)
def test_an_event_whose_reader_died_is_gone_all_the_same(sliced_url: str, death) -> None:
    async def scenario() -> None:
        async with opened(sliced_url) as dying, opened(sliced_url) as other:
            await other.commit([*waiting("r"), publish()])
            await death(dying, turn(1, owned=False, seen=1, consumed=(1,)))
            await other.unfinished_broadcasts()
            assert await other.topic("t") == []
            await other.commit(waiting("s"))
            assert await assigned(other, "s") == [[]]

    asyncio.run(scenario())


@pytest.mark.parametrize("death", DEATHS)
def test_a_letter_whose_replayer_died_is_sent_once(sliced_url: str, death) -> None:
    async def scenario() -> None:
        async with opened(sliced_url) as dying, opened(sliced_url) as other:
            await in_different_slices(dying)
            await other.commit([run("r", owner="a"), turn(0, extras=TurnExtras(dead_letters=(letter(),)))])
            await death(dying, ReplayDeadLetter(letter_id="d", send=publish("mine")))
            assert await other.dead_letters() == []
            assert await other.commit([ReplayDeadLetter(letter_id="d", send=publish("theirs"))]) == [
                DeadLetterMissing()
            ]
            await other.unfinished_broadcasts()
            assert [event.id for event in await other.topic("t")] == ["mine"]
            assert await other.commit([ReplayDeadLetter(letter_id="d", send=publish("mine"))]) == [EventPublished(1, 0)]

    asyncio.run(scenario())


@pytest.mark.parametrize("death", DEATHS)
def test_a_letter_that_is_refused_after_its_replayer_died_is_there_again(sliced_url: str, death) -> None:
    async def scenario() -> None:
        async with opened(sliced_url) as dying, opened(sliced_url) as other:
            await in_different_slices(dying)
            letters = (letter("first"), letter("d"), letter("last"))
            await other.commit([publish("e"), run("r", owner="a"), turn(0, extras=TurnExtras(dead_letters=letters))])
            await death(dying, ReplayDeadLetter(letter_id="d", send=publish("mine", limit=1)))
            await other._slices.sweep()
            assert [each.id for each in await other.dead_letters()] == ["first", "d", "last"]

    asyncio.run(scenario())


def test_an_old_post_does_not_send_a_letter_twice(sliced_url: str) -> None:
    """It was handed over and refused; the letter came back, was dealt with, and now there would be room."""

    async def scenario() -> None:
        async with opened(sliced_url) as dying, opened(sliced_url) as other:
            await other.commit(
                [publish("e"), run("r", owner="a"), turn(0, extras=TurnExtras(dead_letters=(letter(),)))]
            )
            await die_before_ticking_off(dying, ReplayDeadLetter(letter_id="d", send=publish("mine", limit=1)))
            assert await other.commit([ReplayDeadLetter(letter_id="d", send=mail("elsewhere"))]) == [
                MessageDelivered(1, True, "a")
            ]
            await other.commit([*waiting("s"), turn(1, id="s", owned=False, seen=1, consumed=(1,))])
            assert await other.topic("t") == []
            await other._slices.sweep()
            assert await other.topic("t") == []
            assert await other.dead_letters() == []

    asyncio.run(scenario())


@pytest.mark.parametrize("death", DEATHS)
def test_mail_that_moves_to_a_topic_whose_worker_died_is_there_once(sliced_url: str, death) -> None:
    async def scenario() -> None:
        async with opened(sliced_url) as dying, opened(sliced_url) as other:
            await in_different_slices(dying)
            await other.commit([run("r", owner="a"), mail("m"), turn(0, seen=1, patch=succeeded())])
            write = settle(moved=(RedirectedEvent(1, publish("moved"), letter()),))
            await death(dying, write)
            assert await other.unfinalized() == []
            await other.unfinished_broadcasts()
            assert [event.id for event in await other.topic("t")] == ["moved"]
            assert await other.commit([write]) == [Committed()]
            assert len(await other.topic("t")) == 1
            assert await other.dead_letters() == []

    asyncio.run(scenario())


def test_what_became_of_letters_is_forgotten_after_a_while(sliced_url: str) -> None:
    async def scenario() -> None:
        async with opened(sliced_url) as store:
            await store.commit([run("r", owner="a"), turn(0, extras=TurnExtras(dead_letters=(letter(),)))])
            await store.commit([ReplayDeadLetter(letter_id="d", send=publish("mine", now=200.0))])
            target = store._slices.of("t")
            await store.prune(249.0, keep_ids_for=50.0)
            assert await store._slices.read(target, "sent", "replay/mine")
            await store.prune(250.0, keep_ids_for=50.0)
            assert not await store._slices.read(target, "sent", "replay/mine")

    asyncio.run(scenario())


def test_an_assignment_that_meets_no_open_receive_goes_to_the_next(sliced_url: str) -> None:
    async def scenario() -> None:
        async with opened(sliced_url) as dying, opened(sliced_url) as other:
            await other.commit([*waiting("r"), *waiting("s")])
            await die_before_handing_over(dying, publish())
            await other.commit([turn(1, owned=False, patch=succeeded())])
            await other.unfinished_broadcasts()
            assert await assigned(other, "r", "s") == [[], ["topic/t/1"]]

    asyncio.run(scenario())


def test_an_old_post_does_not_give_a_returned_event_twice(sliced_url: str) -> None:
    """It was handed over and returned, and comes again when another run has the event."""

    async def scenario() -> None:
        async with opened(sliced_url) as dying, opened(sliced_url) as other:
            await other.commit([*waiting("r"), *waiting("s")])
            await die_before_ticking_off(dying, publish())
            await other.commit([receive(1, "t", target="0/again", seen=1, released_assignments=(1,))])
            assert await assigned(other, "r", "s") == [[], ["topic/t/1"]]
            await other.unfinished_broadcasts()
            assert await assigned(other, "r", "s") == [[], ["topic/t/1"]]

    asyncio.run(scenario())


def test_a_worker_that_is_gone_is_fenced_off_in_every_slice(sliced_url: str) -> None:
    async def scenario(ids: list[str]) -> None:
        async with opened(sliced_url) as store:
            await store.commit([run(id, owner="a") for id in ids])
            await store._slices.change(0, "declare_gone", "a", "")  # who declares it dies before the other slices know
            assert sorted(await store.release_runs("a", 120.0, recovered=True)) == ids
            answers = await store.commit([turn(0, entry(), id=id, owned=False) for id in ids])
            assert not any(isinstance(answer, Committed) for answer in answers)

    asyncio.run(scenario([f"r{n:02d}" for n in range(40)]))


def test_every_key_of_a_slice_has_its_tag(own_server: Server) -> None:
    async def scenario(url: str) -> None:
        async with opened(url) as store:
            await store.commit([*waiting("r"), publish(), mail(id="r"), run("s", owner="a"), turn(0, entry(), id="s")])
            await store.keys("tokens", 1.0)
            keys = await store._server.ask("KEYS", "*")
            tags = {store._slices.tag(n).encode() for n in range(4)}
            assert {key.partition(b"}")[0] + b"}" for key in keys} <= tags

    asyncio.run(scenario(with_options(own_server.url, prefix=new_prefix(), slices=4)))
