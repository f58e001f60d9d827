"""Servers for a measurement: a PostgreSQL and a Redis of our own, with their files beside the results.

They are the ones that tests start, but durable as in production: PostgreSQL with its defaults, Redis with an
append-only file that is on the disk before it answers (`redis`), or within a second, as is its own default
(`redis-everysec`). Both are reached by a socket in their folder. Each subject finds a database, or a Redis, that is
empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

SETTINGS = {
    "postgres": {"deadlock_timeout": "1s"},  # PostgreSQL's own; tests want to know sooner
    "redis": {"appendfsync": "always"},
    "redis-everysec": {"appendfsync": "everysec"},  # the same server, set so while it is used
}
REDIS = ("redis", "redis-everysec")


class Hosts:
    """Starts what is asked for, when it is first asked for. `missing` says what cannot be had here, and why."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers = contextlib.ExitStack()
        self._urls: dict[str, str] = {}
        self._number = 0
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._servers.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def need(self, names: tuple[str, ...]) -> str | None:
        """Have these servers running. None, or why one of them does not."""
        servers = ["redis" if name in REDIS else name for name in names]
        for name in servers:
            if name not in self._urls and name not in self.missing:
                try:
                    {"postgres": self._start_postgres, "redis": self._start_redis}[name]()
                except (ImportError, OSError, RuntimeError) as error:
                    self.missing[name] = str(error).strip().splitlines()[-1]
        return next((f"no {name}: {self.missing[name]}" for name in servers if name in self.missing), None)

    @contextlib.contextmanager
    def fresh(self, names: tuple[str, ...]) -> Iterator[dict[str, str]]:
        """URLs of servers as if they had just been made."""
        with contextlib.ExitStack() as afterwards:
            urls = {}
            if "postgres" in names:
                urls["postgres"] = afterwards.enter_context(self._database())
            for name in set(REDIS) & set(names):
                self._redis.command("CONFIG", "SET", "appendfsync", SETTINGS[name]["appendfsync"])
                self._redis.command("FLUSHALL")
                afterwards.callback(self._redis.command, "FLUSHALL")
                urls[name] = self._urls["redis"]
            yield urls

    def _start_postgres(self) -> None:
        from tests.servers.postgres import Server

        folder, where = self._folder / "postgres", ""
        if not _everyone_can_enter(self._folder.parent):
            folder = Path(self._servers.enter_context(tempfile.TemporaryDirectory(prefix="perdure-pg-"))) / "postgres"
            folder.parent.chmod(0o755)
            where = ", its files in the system's temporary folder"
        server = Server(folder, **SETTINGS["postgres"])
        self._servers.callback(server.remove)
        server.start()
        self._urls["postgres"] = server.url
        self.versions["postgres"] = asyncio.run(self._sql("SHOW server_version")) + where

    def _start_redis(self) -> None:
        from tests.servers.redis import Server

        folder = self._folder / "redis"
        self._redis = Server(folder, unixsocket=str(folder / "socket"), **SETTINGS["redis"])
        self._servers.callback(self._redis.remove)
        self._redis.start()
        self._urls["redis"] = self._redis.socket_url
        told = self._redis.command("INFO", "server").decode().splitlines()
        facts = dict(line.split(":", 1) for line in told if ":" in line)
        self.versions["redis"] = (
            f"Valkey {facts['valkey_version']}" if "valkey_version" in facts else f"Redis {facts['redis_version']}"
        )

    @contextlib.contextmanager
    def _database(self) -> Iterator[str]:
        self._number += 1
        name = f"bench_{self._number}"
        asyncio.run(self._sql(f"CREATE DATABASE {name}"))
        try:
            yield urlsplit(self._urls["postgres"])._replace(path=f"/{name}").geturl()
        finally:
            asyncio.run(self._sql(f"DROP DATABASE {name} WITH (FORCE)"))

    async def _sql(self, text: str) -> str:
        import asyncpg

        connection = await asyncpg.connect(self._urls["postgres"])
        try:
            return str(await connection.fetchval(text))
        finally:
            await connection.close()


def _everyone_can_enter(folder: Path) -> bool:
    """PostgreSQL does not run as root: started by root, it runs as somebody who may not be let into root's folders."""
    way = [folder, *folder.parents]
    return os.getuid() != 0 or all(each.stat().st_mode & stat.S_IXOTH for each in way)
