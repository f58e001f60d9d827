"""Store URLs: which store they open, their errors, and that no message shows a password."""

import asyncio
import contextlib
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure import Client, Context, Engine, workflow
from perdure.client.store_urls import open_store, redact_password
from perdure.clock import SYSTEM_CLOCK
from perdure.errors import InvalidArgument, StoreError
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.redis.store import RedisStore
from tests.servers import postgres, redis

SECRET = "hunter2"


@workflow(name="by_url.double")
async def double(ctx: Context, n: int) -> int:
    await ctx.sleep(0.001)
    return 2 * n


def run_over(url: str) -> None:
    async def main() -> None:
        async with Engine(url) as engine, Client(url) as client:
            run = await engine.start(double, 4, id="four")
            assert await run.result() == 8
            assert await client.result("four") == 8

    asyncio.run(main())


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_engine_and_client_open_postgresql(scheme):
    with postgres.schema_of_its_own() as url:
        run_over(url.replace("postgresql://", f"{scheme}://", 1))


def test_engine_and_client_open_redis():
    with redis.prefix_of_its_own() as url:
        run_over(url)


def test_engine_and_client_open_a_local_redis_by_its_socket():
    with redis_with_socket() as server:
        run_over(server.socket_url)
        run_over(f"{server.socket_url}?db=2&prefix=shop")
        keys = server.command("INFO", "keyspace").decode()
        assert "db0:" in keys
        assert "db2:" in keys


def test_redis_cluster_node_is_not_opened_by_its_socket():
    """A client would look for the other nodes at the socket's address."""
    with redis_with_socket(cluster_enabled="yes") as server, pytest.raises(StoreError) as caught:
        run_over(server.socket_url)
    assert "is a node of a cluster; use its host and port" in str(caught.value)
    assert f"redis+unix://{server.settings['unixsocket']}?prefix=perdure" in str(caught.value), "and no password"


@contextlib.contextmanager
def redis_with_socket(**settings: str) -> Iterator[redis.Server]:
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:  # the path of a socket must be short
        server = redis.Server(Path(folder) / "redis", unixsocket=f"{folder}/socket", **settings)
        server.start()
        try:
            yield server
        finally:
            server.remove()


def test_rediss_url_opens_a_redis_store():
    assert isinstance(open_store("rediss://host:6380/0?prefix=shop", SYSTEM_CLOCK), RedisStore)
    assert isinstance(open_store("postgresql://a,b/shop?target_session_attrs=primary", SYSTEM_CLOCK), PostgresStore)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://shop:hunter2@db/shop?connections=0", "0 is less than 1"),
        ("postgresql://shop:hunter2@db/shop?connections=many", "connections=4"),
        ("postgresql://shop:hunter2@db/shop?listen=maybe", "listen=yes|no"),
        ("postgresql://shop:hunter2@db/shop?timeout=0", "timeout=30"),
        ("postgresql://shop:hunter2@db/shop?schema=", "name of a schema"),
        ("postgresql://shop:hunter2[@db/shop", "Invalid"),
        ("redis://:hunter2@/0", "no Redis URL"),
        ("redis+unix://:hunter2@", "name a server's socket"),
        ("redis+unix://:hunter2@cache/0", "name a server's socket"),
        ("redis+unix://:hunter2@/run/redis.sock?colour=red", "colour"),
        ("redis://:hunter2@cache/0?prefix=a:b", "without braces and colons"),
        ("redis://:hunter2@cache/0?durability=some", "full or relaxed"),
        ("redis://:hunter2@cache/0?partitions=0", "at least 1"),
        ("redis://:hunter2@cache/0?colour=red", "colour"),
        ("redis://:hunter2@cache/0?socket_timeout=soon", "socket_timeout"),
        ("rediss://:hunter2@cache:x/0", "Port"),
        ("shop:hunter2@db/shop", "not a store URL"),
    ],
)
def test_error_of_an_invalid_url_shows_no_password(url, words):
    with pytest.raises(InvalidArgument) as caught:
        open_store(url, SYSTEM_CLOCK)
    assert words in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ada:secret@db:5432/x?schema=b", "postgresql://ada:***@db:5432/x?schema=b"),
        ("postgresql://ada:secret@db:5432/x?a=b", "postgresql://ada:***@db:5432/x?a=***"),
        ("postgresql://ada:s:e/c@ret@db/x", "postgresql://ada:***@db/x"),
        (
            "postgresql://ada@/x?host=/run&password=secret&schema=s",
            "postgresql://ada@/x?host=/run&password=***&schema=s",
        ),
        ("redis://:secret@cache/0", "redis://:***@cache/0"),
        ("redis://cache/0?password=secret", "redis://cache/0?password=***"),
        ("redis+unix://:secret@/run/redis.sock", "redis+unix://:***@/run/redis.sock"),
        ("sqlite:////var/lib/shop.db", "sqlite:////var/lib/shop.db"),
    ],
)
def test_redact_password(url, shown):
    assert redact_password(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://shop:hunter2@127.0.0.1:1/shop",
        "postgresql://shop@127.0.0.1:1/shop?password=hunter2",
        "redis://shop:hunter2@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?password=hunter2",
    ],
)
def test_error_of_an_unreachable_server_shows_no_password(url, caplog):
    async def main() -> None:
        store = open_store(url, SYSTEM_CLOCK)
        with pytest.raises(StoreError) as caught:
            await store.open(shards=8)
        assert caught.value.retryable
        assert SECRET not in str(caught.value)

    with caplog.at_level(logging.DEBUG, logger="perdure"):
        asyncio.run(main())
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("url", "driver", "extra"),
    [("postgresql://db/shop", "asyncpg", "perdure[postgres]"), ("redis://cache", "redis", "perdure[redis]")],
)
def test_missing_driver_is_refused_with_the_extra_to_install(url, driver, extra):
    script = f"import sys; sys.modules[{driver!r}] = None; import perdure; perdure.Engine({url!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"needs {driver}, which is not installed: pip install '{extra}'" in done.stderr.splitlines()[-1]
