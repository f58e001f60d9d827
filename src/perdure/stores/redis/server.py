"""A Redis or Valkey server, alone or a cluster: connecting, what it must be set to, its scripts, and its errors.

Knows no runs: it sends a request to a script in a slice and gives back what the script returned. Calls are not repeated
here; a lost connection is a retryable `StoreError`, and the engine sends the same batch again.
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

Call = Callable[..., Awaitable[Any]]

LOGGER = logging.getLogger("perdure.stores")
OLDEST = (6, 2)
SOCKET_SCHEME = "redis+unix"
CONNECTIONS = 32  # of one store object to one server
CALL_TIMEOUT = 30.0  # seconds until a server that says nothing counts as lost

SCRIPT_MODULES = {
    "commit": ("rows", "queues", "history", "course", "writes", "mail", "posts", "topics", "shown", "letters"),
    "fleet": ("rows", "queues", "letters"),
    "upkeep": ("rows", "queues", "mail", "posts", "topics", "shown"),
    "reads": ("rows", "queues"),
}
"""The rooms that a script has between `lua/core.lua` and the file of its own name. One that is not here has no rooms,
and nothing but `lua/keys.lua` before it."""

# How a server says that it cannot now, but may later: by classes of the client, or by a word that it has no class for.
_RETRYABLE = (
    failures.ReadOnlyError,
    failures.ClusterError,
    failures.RedisClusterException,
    failures.AskError,
    failures.TryAgainError,
    failures.OutOfMemoryError,
)
_FAILURES = (failures.RedisError, failures.RedisClusterException, OSError, AttributeError)
_LATER_WORDS = ("NOREPLICAS", "MISCONF", "BUSY", "UNKILLABLE", "FAILOVER")


class Script(Struct, frozen=True):
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """A room is a table of the name of its file; the file says what is put into it once something in it is wanted."""
    wanted = SCRIPT_MODULES.get(name, ())
    rooms = (f"{room} = room(function({room})\n{_lua(room)}\nend)\n" for room in wanted)
    opening = (f"local {', '.join(wanted)}\n", _lua("core")) if wanted else ()
    text = "".join((_lua("keys"), *opening, *rooms, _lua(name)))
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _lua(name: str) -> str:
    return (importlib.resources.files("perdure.stores.redis") / "lua" / f"{name}.lua").read_text("utf-8")


class RedisUrl(Struct, frozen=True):
    """What a URL says: where the server is, and how the store is to use it."""

    url: str  # for the client library, without what is ours
    prefix: str = "perdure"
    relaxed: bool = False
    slices: int | None = None


def address_of(url: str) -> RedisUrl:
    """redis://[user:password@]host[:port][/db][?prefix=name&durability=relaxed&slices=n], or rediss:// for TLS.

    Or redis+unix://[user:password@]/path/of/the/socket[?db=n&...], for a server on this machine.
    """
    parts = urlsplit(url)
    if parts.scheme == SOCKET_SCHEME:
        if parts.hostname or len(parts.path) < 2:
            raise StoreError(
                f"it should name a server's socket on this machine: {SOCKET_SCHEME}:///run/redis.sock?db=0"
            )
    elif parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise StoreError("this is no Redis URL; it should look like redis://host:6379/0?prefix=perdure")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    prefix = options.pop("prefix", "perdure")
    durability = options.pop("durability", "full")
    slices = options.pop("slices", "")
    if not prefix or set(prefix) & set("{}:\0"):
        raise StoreError(f"a prefix is a name without braces and colons, not {prefix!r}")
    if durability not in ("full", "relaxed"):
        raise StoreError(f"durability is full or relaxed, not {durability!r}")
    if slices and (not slices.isdigit() or int(slices) < 1):
        raise StoreError(f"slices is how many parts the keys are cut into, at least 1, not {slices!r}")
    scheme = "unix" if parts.scheme == SOCKET_SCHEME else parts.scheme  # as redis-py has it
    query = f"?{urlencode(options)}" if options else ""
    plain = f"{scheme}://{parts.netloc}{parts.path}{query}"
    _check_options(plain)
    return RedisUrl(plain, prefix, durability == "relaxed", int(slices) if slices else None)


def _check_options(url: str) -> None:
    """Let the client make a connection of it, without connecting: it would complain about its options only then."""
    try:
        pool = ConnectionPool.from_url(url)
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, ValueError) as error:
        raise StoreError(
            "a bad option in the URL of a Redis store; there are prefix=name, durability=full|relaxed and slices=1; "
            f"all others are redis-py's, which says: {error}"
        ) from error


class RedisServer:
    """One server or cluster. `call` sends a request to a script."""

    def __init__(self, address: RedisUrl) -> None:
        self.address = address
        self.cluster = False
        self._client: Redis | RedisCluster | None = None
        self._link: ScriptConnectionPool | None = None  # None to a cluster

    async def connect(self) -> None:
        """Connect, and refuse a server that would lose what it has acknowledged."""
        alone = self._alone()
        try:
            found = await self._explained(alone, alone.info, "everything")
            self._check(found, await self._explained(alone, _appendfsync, alone))
            self.cluster = bool(int(found.get("cluster_enabled", 0)))
            if not self.cluster:
                self._client = alone
                self._link = self._linked(alone)
                return
            if _is_socket(self.address.url):
                raise StoreError(f"{self.name} is a node of a cluster; give its host and port, as the others have them")
        except BaseException:
            await alone.aclose()
            raise
        await alone.aclose()
        self._client = RedisCluster.from_url(self.address.url, **_settings(self.address.url))
        await self._explained(self._client, self._client.initialize)  # finds the other nodes

    def _alone(self) -> Redis:
        settings = {"max_connections": CONNECTIONS, "timeout": CALL_TIMEOUT, **_settings(self.address.url)}
        return Redis.from_pool(BlockingConnectionPool.from_url(self.address.url, **settings))  # closed with the client

    def _linked(self, client: Redis) -> ScriptConnectionPool:
        return ScriptConnectionPool(client.connection_pool, CONNECTIONS, CALL_TIMEOUT)

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()
        client, self._client = self._client, None
        if isinstance(client, RedisCluster):
            for nodes in ("nodes_cache", "startup_nodes"):  # its own `aclose` closes none if the last call has failed
                await client.nodes_manager.aclose(nodes)
        if client is not None:
            await client.aclose()

    def subscriber(self) -> Redis:
        """A client of its own for listening; on a cluster any node passes on what is published."""
        return self._alone()

    async def call(self, name: str, tag: str, *arguments: bytes | str | int) -> Any:
        """Run a script in the slice of this tag. A server that has not seen it, or was restarted, is given its text."""
        client, link = self.client, self._link
        if link is None:
            return await self._explained(client, self._run, client.execute_command, name, tag, *arguments)
        try:  # not through `_explained`, which takes 5 us of each call: a link loses no cancel
            return await self._run(link.execute, name, tag, *arguments)
        except _FAILURES as error:
            raise await self._explanation(client, error) from error

    async def _run(self, execute: Call, name: str, tag: str, *arguments: bytes | str | int) -> Any:
        wanted = script(name)
        try:
            return await execute("EVALSHA", wanted.sha, 1, tag, *arguments)
        except failures.NoScriptError:
            return await execute("EVAL", wanted.text, 1, tag, *arguments)

    async def ask(self, *command: bytes | str | int) -> Any:
        """A plain command; the first key in it decides which node of a cluster is asked."""
        return await self._explained(self.client, self.client.execute_command, *command)

    async def now(self) -> float:
        client = self.client
        node = {"target_nodes": RedisCluster.DEFAULT_NODE} if isinstance(client, RedisCluster) else {}
        seconds, micros = await self._explained(client, partial(client.execute_command, "TIME", **node))
        return int(seconds) + int(micros) / 1e6

    @property
    def client(self) -> Redis | RedisCluster:
        if self._client is None:
            raise StoreError(f"the store {self.name} is not open; open it first (an Engine or a Client does)")
        return self._client

    @property
    def name(self) -> str:
        """The URL without a password."""
        parts = urlsplit(self.address.url)
        scheme = SOCKET_SCHEME if _is_socket(self.address.url) else parts.scheme
        return f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}?prefix={self.address.prefix}"

    # what the server must be set to

    def _check(self, found: dict[str, Any], fsync: str | None) -> None:
        version = str(found.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            raise StoreError(f"{self.name} is Redis {version}; the store needs 6.2 or later, or Valkey")
        if found.get("role") == "slave":
            raise StoreError(f"{self.name} is a replica; give the address of its primary", retryable=True)
        policy = str(found.get("maxmemory_policy", "noeviction"))
        if policy.startswith("allkeys-"):
            raise StoreError(
                f"{self.name} throws keys away when its memory is full (maxmemory-policy {policy}), and runs with "
                "them; set it to noeviction"
            )
        self._check_persistence(bool(int(found.get("aof_enabled", 0))), fsync)

    def _check_persistence(self, append_only: bool, fsync: str | None) -> None:
        lost = f"{self.name} keeps no append-only file: what it has acknowledged is lost when it is restarted"
        if not append_only and not self.address.relaxed:
            raise StoreError(f"{lost}; set appendonly to yes, or add durability=relaxed to the URL to accept that")
        if not append_only:
            _warn_once(lost)
        elif fsync not in (None, "always") and not self.address.relaxed:
            _warn_once(
                f"{self.name} writes its append-only file through to the disk only now and then (appendfsync {fsync}): "
                "when its machine fails, the last of what it has acknowledged is lost; set it to always, or add "
                "durability=relaxed to the URL"
            )

    # errors

    async def _explained(self, client: Redis | RedisCluster, call: Call, *arguments: Any) -> Any:
        """What the call answers; how the client fails as a `StoreError`."""
        try:
            if isinstance(client, RedisCluster):
                # One that does not know its nodes would send a script to any of them, and close all its connections
                # when it hears too often that it was the wrong one: after a failover it might never find back.
                await propagate_cancellation(client.initialize)
            return await propagate_cancellation(call, *arguments)
        except _FAILURES as error:
            raise await self._explanation(client, error) from error

    async def _explanation(self, client: Redis | RedisCluster, error: Exception) -> StoreError:
        """What a failure of the client means; connections that it leaves useless are dropped."""
        if isinstance(error, (failures.ConnectionError, failures.TimeoutError, OSError)):
            await self._drop_connections(client)
            return StoreError(f"{self.name} cannot be reached ({error})", retryable=not _denied(error))
        if isinstance(error, AttributeError):
            # So redis-py stumbles where another call has closed the connection that this one was making.
            return StoreError(f"{self.name} was cut off while it was being reached", retryable=True)
        if isinstance(error, (failures.ReadOnlyError, failures.ClusterError, failures.RedisClusterException)):
            await self._drop_connections(client)
        later = isinstance(error, _RETRYABLE) or str(error).startswith(_LATER_WORDS)
        return StoreError(f"{self.name} refused a call: {error}", retryable=later)

    async def _drop_connections(self, client: Redis | RedisCluster) -> None:
        """Those that lie ready are as dead as the one that failed, or lead to a primary that is none any more."""
        if isinstance(client, RedisCluster):
            await client.aclose()  # the next call asks again which node has what
        else:
            await client.connection_pool.disconnect(inuse_connections=False)
        if self._link is not None:
            await self._link.drop_idle()


@cache
def _warn_once(text: str) -> None:
    LOGGER.warning("%s", text)


async def _appendfsync(client: Redis) -> str | None:
    """None where a server, as hosted ones do, keeps its settings to itself."""
    try:
        found = await client.config_get("appendfsync")
    except failures.ResponseError:
        return None
    return str(found["appendfsync"]) if "appendfsync" in found else None


def _denied(error: BaseException) -> bool:
    return isinstance(error, (failures.AuthenticationError, failures.AuthorizationError))


def _is_socket(url: str) -> bool:
    """Whether a URL of redis-py's names a socket on this machine."""
    return url.startswith("unix://")


def _settings(url: str) -> dict[str, Any]:
    """Ours, unless the URL says otherwise: no calls repeated behind our back, and an end to waiting."""
    given = dict(parse_qsl(urlsplit(url).query))
    ours = {"socket_timeout": CALL_TIMEOUT, "socket_connect_timeout": 5.0}
    return {"retry": Retry(NoBackoff(), 0), **{name: value for name, value in ours.items() if name not in given}}
