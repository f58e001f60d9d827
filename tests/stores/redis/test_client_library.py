"""Canary: the undocumented names of redis-py and hiredis that the Redis store uses.

`pyproject.toml` caps redis-py below its next major version. When the cap is raised, or a minor version moves one of
these names, the tests here fail and name it. Then adapt the module that uses it.
"""

from __future__ import annotations

import asyncio
import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hiredis
import pytest
import redis
from redis.asyncio import BlockingConnectionPool, Connection, ConnectionPool, Redis
from redis.asyncio.cluster import NodesManager, RedisCluster
from redis.asyncio.connection import DefaultParser
from redis.exceptions import ResponseError

from tests.servers.redis import shared_url

ROOT = Path(__file__).parents[3]


def build_pool() -> ConnectionPool:
    return ConnectionPool.from_url("redis://host:6379/0?socket_timeout=3")


def build_nodes() -> NodesManager:
    return RedisCluster.from_url("redis://host:6379/0").nodes_manager


# name -> (an object that must have it, the attribute, the module that uses it)
ATTRIBUTES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "redis.asyncio.Connection()._writer": (Connection, "_writer", "connections.py"),
    "DefaultParser.parse_error": (lambda: DefaultParser, "parse_error", "connections.py"),
    "ConnectionPool().make_connection": (build_pool, "make_connection", "connections.py"),
    "ConnectionPool().connection_kwargs": (build_pool, "connection_kwargs", "connections.py, server.py"),
    "ConnectionPool().connection_class": (build_pool, "connection_class", "server.py"),
    "Redis.from_pool": (lambda: Redis, "from_pool", "server.py"),
    "RedisCluster.DEFAULT_NODE": (lambda: RedisCluster, "DEFAULT_NODE", "server.py"),
    "RedisCluster().nodes_manager.nodes_cache": (build_nodes, "nodes_cache", "server.py"),
    "RedisCluster().nodes_manager.startup_nodes": (build_nodes, "startup_nodes", "server.py"),
    "hiredis.Reader": (lambda: hiredis, "Reader", "connections.py"),
    "hiredis.pack_command": (lambda: hiredis, "pack_command", "connections.py"),
}

# name -> (a function, the parameter that it must have, the module that uses it)
PARAMETERS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "Connection.disconnect(nowait)": (Connection.disconnect, "nowait", "connections.py"),
    "ConnectionPool.disconnect(inuse_connections)": (ConnectionPool.disconnect, "inuse_connections", "server.py"),
    "NodesManager.aclose(attr)": (NodesManager.aclose, "attr", "server.py"),
    "BlockingConnectionPool(timeout)": (BlockingConnectionPool.__init__, "timeout", "server.py"),
}

VERSIONS = f"redis-py {redis.__version__}, hiredis {hiredis.__version__}"


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_client_library_has_attribute_that_the_store_uses(name: str) -> None:
    async def has_attribute() -> bool:  # some constructors need an event loop
        build, attribute, _ = ATTRIBUTES[name]
        return hasattr(build(), attribute)

    assert asyncio.run(has_attribute()), f"{VERSIONS} has no {name}, which stores/redis/{ATTRIBUTES[name][2]} uses"


@pytest.mark.parametrize("name", PARAMETERS)
def test_client_library_has_parameter_that_the_store_uses(name: str) -> None:
    function, parameter, user = PARAMETERS[name]
    assert parameter in inspect.signature(function).parameters, f"{VERSIONS} has no {name}, which {user} uses"


def test_open_connection_has_a_transport_that_can_be_taken_over() -> None:
    async def scenario() -> None:
        pool = ConnectionPool.from_url(shared_url())
        connection = pool.make_connection()
        await connection.connect()
        try:
            transport = getattr(connection._writer, "transport", None)
            assert isinstance(transport, asyncio.Transport), (
                f"{VERSIONS}: `connection._writer.transport` is {transport!r}; stores/redis/connections.py needs it"
            )
        finally:
            await connection.disconnect(nowait=True)

    asyncio.run(scenario())


def test_reader_returns_errors_and_marks_incomplete_replies() -> None:
    incomplete = object()
    reader = hiredis.Reader(replyError=DefaultParser.parse_error, notEnoughData=incomplete)
    reader.feed(b"-ERR no such thing\r\n$2\r\nh")
    error = reader.gets()
    assert isinstance(error, ResponseError), f"{VERSIONS}: `hiredis.Reader(replyError=...)` returned {error!r}"
    assert reader.gets() is incomplete, f"{VERSIONS}: `hiredis.Reader(notEnoughData=...)` has no effect"


def test_project_caps_redis_py_at_a_tested_major_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (requirement,) = project["optional-dependencies"]["redis"]
    _, less, cap = requirement.rpartition("<")
    assert less, f"{requirement} does not cap redis-py below its next major version"
    assert int(redis.__version__.partition(".")[0]) < int(cap), f"{requirement} excludes the installed {VERSIONS}"
