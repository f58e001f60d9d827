"""A Redis or Valkey server, or a cluster: its URL, the connection, required settings, scripts, and errors.

This module knows no runs: it calls a script in a partition and returns its result. Calls are not repeated here. A lost
connection is a retryable `StoreError`, and the engine sends the same batch again.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import logging
from collections.abc import Awaitable, Callable
from functools import cache, partial
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from msgspec import Struct
from redis import exceptions as failures
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from perdure.errors import StoreError
from perdure.stores.redis.connections import ScriptConnectionPool, propagate_cancellation
from perdure.stores.urls import find_mistake, redact_password

Call = Callable[..., Awaitable[Any]]

LOGGER = logging.getLogger("perdure.stores")
MIN_VERSION = (6, 2)
SOCKET_SCHEME = "redis+unix"
MAX_CONNECTIONS = 32  # of one store object to one server
CALL_TIMEOUT_SECONDS = 30.0

SCRIPT_MODULES = {
    "commit": (
        *("run_rows", "run_index", "due_queues", "history", "run_writes", "other_writes"),
        *("inbox", "outbox", "topics", "streams", "dead_letters", "documents"),
        *("places", "queues"),
    ),
    "workers": ("run_rows", "run_index", "due_queues", "dead_letters", "topics", "places", "queues"),
    "maintenance": (
        *("run_rows", "run_index", "due_queues", "inbox", "outbox", "topics", "streams", "documents", "places"),
        "queues",
    ),
    "reads": ("run_rows", "due_queues", "queue_reads"),
}
"""The Lua modules of each script.

Its text is `lua/keys.lua`, `lua/tags.lua`, `lua/core.lua`, the modules and the file of its own name. A script that is
not listed has no modules and no `lua/core.lua`; only the one that creates runs has `lua/tags.lua`.
"""

# Replies of a server that may accept the call later: exceptions of the client, or error codes without an exception.
_RETRYABLE = (
    failures.ReadOnlyError,
    failures.ClusterError,
    failures.RedisClusterException,
    failures.AskError,
    failures.TryAgainError,
    failures.OutOfMemoryError,
)
_FAILURES = (failures.RedisError, failures.RedisClusterException, OSError, AttributeError)
_RETRYABLE_CODES = ("NOREPLICAS", "MISCONF", "BUSY", "UNKILLABLE", "FAILOVER")


class Script(Struct, frozen=True):
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Return a script. Each module becomes a table of its own name, filled when it is first used (`lua/core.lua`)."""
    names = SCRIPT_MODULES.get(name, ())
    preludes = ("keys", "tags") if names or name == "fast_create" else ("keys",)
    modules = (f"{module} = module(function({module})\n{_read_lua(module)}\nend)\n" for module in names)
    core = (f"local {', '.join(names)}\n", _read_lua("core")) if names else ()
    text = "".join((*map(_read_lua, preludes), *core, *modules, _read_lua(name)))
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _read_lua(name: str) -> str:
    return (importlib.resources.files("perdure.stores.redis") / "lua" / f"{name}.lua").read_text("utf-8")


class RedisUrl(Struct, frozen=True):
    """A parsed URL: the address of the server, and the options of the store."""

    url: str  # for redis-py, without the options of the store
    prefix: str = "perdure"
    relaxed: bool = False
    partitions: int | None = None

    def __repr__(self) -> str:
        return f"<{redact_password(self.url)}>"


def parse_url(url: str) -> RedisUrl:
    """Parse redis://[user:password@]host[:port][/db][?prefix=name&durability=relaxed&partitions=n].

    Also rediss:// for TLS, and redis+unix://[user:password@]/path/of/the/socket[?db=n&...] for a server on this host.
    Raises `StoreError` for anything else, without the password in its message.
    """
    if (mistake := find_mistake(url)) is not None:
        raise StoreError(mistake)
    parts = urlsplit(url)
    if parts.scheme == SOCKET_SCHEME:
        if parts.hostname or len(parts.path) < 2:
            raise StoreError(
                f"the URL must name a server's socket on this machine: {SOCKET_SCHEME}:///run/redis.sock?db=0"
            )
    elif parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise StoreError("this is no Redis URL; use one like redis://host:6379/0?prefix=perdure")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    prefix = options.pop("prefix", "perdure")
    durability = options.pop("durability", "full")
    partitions = options.pop("partitions", "")
    if not prefix or set(prefix) & set("{}:\0"):
        raise StoreError(f"prefix must be a name without braces and colons, not {prefix!r}")
    if durability not in ("full", "relaxed"):
        raise StoreError(f"durability must be full or relaxed, not {durability!r}")
    if partitions and (not partitions.isdigit() or int(partitions) < 1):
        raise StoreError(f"partitions must be a number, at least 1, not {partitions!r}")
    scheme = "unix" if parts.scheme == SOCKET_SCHEME else parts.scheme  # as redis-py has it
    query = f"?{urlencode(options)}" if options else ""
    client_url = f"{scheme}://{parts.netloc}{parts.path}{query}"
    _check_options(client_url)
    return RedisUrl(client_url, prefix, durability == "relaxed", int(partitions) if partitions else None)


def _check_options(url: str) -> None:
    """Build a connection without connecting, because redis-py checks its options only then."""
    try:
        pool = ConnectionPool.from_url(url)
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, ValueError) as error:
        raise StoreError(
            "the URL of a Redis store has an invalid option; perdure's options are prefix=name, "
            f"durability=full|relaxed and partitions=1, all others are redis-py's, which reports: {error}"
        ) from error


class RedisServer:
    """One server or cluster."""

    def __init__(self, address: RedisUrl) -> None:
        self.address = address
        self.is_cluster = False
        self._client: Redis | RedisCluster | None = None
        self._script_pool: ScriptConnectionPool | None = None  # None for a cluster

    async def connect(self) -> None:
        """Connect, and refuse a server whose settings would lose acknowledged commits."""
        single = self.build_single_client()
        try:
            found = await self._translate_errors(single, single.info, "everything")
            self._check(found, await self._translate_errors(single, _read_appendfsync, single))
            self.is_cluster = bool(int(found.get("cluster_enabled", 0)))
            if not self.is_cluster:
                self._client = single
                self._script_pool = self._build_script_pool(single)
                return
            if _is_socket(self.address.url):
                raise StoreError(f"{self.name} is a node of a cluster; use its host and port")
        except BaseException:
            await single.aclose()
            raise
        await single.aclose()
        self._client = RedisCluster.from_url(self.address.url, **_settings(self.address.url))
        await self._translate_errors(self._client, self._client.initialize)  # finds the other nodes

    def build_single_client(self) -> Redis:
        """Return a new client of the server in the URL. On a cluster any node serves a listener."""
        settings = {"max_connections": MAX_CONNECTIONS, "timeout": CALL_TIMEOUT_SECONDS, **_settings(self.address.url)}
        return Redis.from_pool(BlockingConnectionPool.from_url(self.address.url, **settings))  # closed with the client

    def _build_script_pool(self, client: Redis) -> ScriptConnectionPool:
        return ScriptConnectionPool(client.connection_pool, MAX_CONNECTIONS, CALL_TIMEOUT_SECONDS)

    async def close(self) -> None:
        pool, self._script_pool = self._script_pool, None
        if pool is not None:
            await pool.close()
        client, self._client = self._client, None
        if isinstance(client, RedisCluster):
            for nodes in ("nodes_cache", "startup_nodes"):  # `aclose` of the client closes none if its last call failed
                await client.nodes_manager.aclose(nodes)
        if client is not None:
            await client.aclose()

    async def call(self, name: str, tag: str, *arguments: bytes | str | int) -> Any:
        """Run a script in the partition of this tag. A server that does not know the script gets its text."""
        client, pool = self.client, self._script_pool
        if pool is None:
            return await self._translate_errors(client, self._run, client.execute_command, name, tag, *arguments)
        try:  # without `_translate_errors`, which costs 5 us per call: the pool loses no cancellation
            return await self._run(pool.execute, name, tag, *arguments)
        except _FAILURES as error:
            raise await self._to_store_error(client, error) from error

    async def _run(self, execute: Call, name: str, tag: str, *arguments: bytes | str | int) -> Any:
        found = script(name)
        try:
            return await execute("EVALSHA", found.sha, 1, tag, *arguments)
        except failures.NoScriptError:
            return await execute("EVAL", found.text, 1, tag, *arguments)

    async def command(self, *command: bytes | str | int) -> Any:
        """Return the reply of a command. On a cluster its first key decides which node gets it."""
        return await self._translate_errors(self.client, self.client.execute_command, *command)

    async def now(self) -> float:
        client = self.client
        node = {"target_nodes": RedisCluster.DEFAULT_NODE} if isinstance(client, RedisCluster) else {}
        seconds, micros = await self._translate_errors(client, partial(client.execute_command, "TIME", **node))
        return int(seconds) + int(micros) / 1e6

    @property
    def client(self) -> Redis | RedisCluster:
        if self._client is None:
            raise StoreError(f"the store {self.name} is not open; open it first (an Engine or a Client does)")
        return self._client

    @property
    def name(self) -> str:
        """Return the URL without user and password."""
        parts = urlsplit(self.address.url)
        scheme = SOCKET_SCHEME if _is_socket(self.address.url) else parts.scheme
        return f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}?prefix={self.address.prefix}"

    # required settings

    def _check(self, found: dict[str, Any], fsync: str | None) -> None:
        version = str(found.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
            raise StoreError(f"{self.name} is Redis {version}; the store needs 6.2 or later, or Valkey")
        if found.get("role") == "slave":
            raise StoreError(f"{self.name} is a replica; use the address of its primary", retryable=True)
        policy = str(found.get("maxmemory_policy", "noeviction"))
        if policy.startswith("allkeys-"):
            raise StoreError(
                f"{self.name} evicts keys, and runs with them, when its memory is full (maxmemory-policy is {policy}); "
                "set it to noeviction"
            )
        self._check_persistence(bool(int(found.get("aof_enabled", 0))), fsync)

    def _check_persistence(self, append_only: bool, fsync: str | None) -> None:
        lost = f"{self.name} has no append-only file, so acknowledged commits are lost when it restarts"
        if not append_only and not self.address.relaxed:
            raise StoreError(f"{lost}; set appendonly to yes, or add durability=relaxed to the URL to accept this")
        if not append_only:
            _warn_once(lost)
        elif fsync not in (None, "always") and not self.address.relaxed:
            _warn_once(
                f"{self.name} does not flush its append-only file with every commit (appendfsync is {fsync}), so the "
                "last acknowledged commits are lost when its machine fails; set it to always, or add "
                "durability=relaxed to the URL"
            )

    # errors

    async def _translate_errors(self, client: Redis | RedisCluster, call: Call, *arguments: Any) -> Any:
        """Return the result of a call of redis-py; raise its errors as `StoreError`."""
        try:
            if isinstance(client, RedisCluster):
                # A client that does not know the nodes sends scripts to any of them, and closes all its connections
                # after too many MOVED errors. After a failover it might never recover.
                await propagate_cancellation(client.initialize)
            return await propagate_cancellation(call, *arguments)
        except _FAILURES as error:
            raise await self._to_store_error(client, error) from error

    async def _to_store_error(self, client: Redis | RedisCluster, error: Exception) -> StoreError:
        """Return the `StoreError` for an error of redis-py, and drop connections that are useless after it."""
        if isinstance(error, (failures.ConnectionError, failures.TimeoutError, OSError)):
            await self._drop_connections(client)
            return StoreError(f"{self.name} cannot be reached ({error})", retryable=not _is_denied(error))
        if isinstance(error, AttributeError):
            # redis-py raises it when another call closes the connection that this call is opening.
            return StoreError(f"{self.name}: the connection was closed while it was being opened", retryable=True)
        if isinstance(error, (failures.ReadOnlyError, failures.ClusterError, failures.RedisClusterException)):
            await self._drop_connections(client)
        is_retryable = isinstance(error, _RETRYABLE) or str(error).startswith(_RETRYABLE_CODES)
        return StoreError(f"{self.name} refused a call: {error}", retryable=is_retryable)

    async def _drop_connections(self, client: Redis | RedisCluster) -> None:
        """Close idle connections: they are lost like the one that failed, or lead to a former primary."""
        if isinstance(client, RedisCluster):
            await client.aclose()  # the next call reads again which node has which slots
        else:
            await client.connection_pool.disconnect(inuse_connections=False)
        if self._script_pool is not None:
            await self._script_pool.drop_idle()


@cache
def _warn_once(problem: str) -> None:
    LOGGER.warning("Store %s", problem)


async def _read_appendfsync(client: Redis) -> str | None:
    """Return the setting, or None if the server does not show its settings, as hosted ones often do."""
    try:
        found = await client.config_get("appendfsync")
    except failures.ResponseError:
        return None
    return str(found["appendfsync"]) if "appendfsync" in found else None


def _is_denied(error: BaseException) -> bool:
    return isinstance(error, (failures.AuthenticationError, failures.AuthorizationError))


def _is_socket(url: str) -> bool:
    """Return whether a URL of redis-py names a socket on this machine."""
    return url.startswith("unix://")


def _settings(url: str) -> dict[str, Any]:
    """Return the settings of the client: no hidden retries, and timeouts unless the URL sets them."""
    given = dict(parse_qsl(urlsplit(url).query))
    timeouts = {"socket_timeout": CALL_TIMEOUT_SECONDS, "socket_connect_timeout": 5.0}
    return {"retry": Retry(NoBackoff(), 0), **{name: value for name, value in timeouts.items() if name not in given}}
