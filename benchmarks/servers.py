"""PostgreSQL and Redis servers for a measurement, with their files next to the results.

They are the servers that the tests start, but durable as in production. PostgreSQL has its defaults. Redis flushes its
append-only file before it responds (`redis`), or every second, which is its default (`redis-everysec`). Both are
reached by a socket in their folder. Each subject gets an empty database or an empty Redis.
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
    "postgres": {"deadlock_timeout": "1s"},  # PostgreSQL's default; the tests use a shorter one
    "redis": {"appendfsync": "always"},
    "redis-everysec": {"appendfsync": "everysec"},  # the same server, reconfigured
}
REDIS = ("redis", "redis-everysec")


class BenchmarkServers:
    """Starts servers on first use. `missing` has the reasons for servers that cannot be started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers = contextlib.ExitStack()
        self._urls: dict[str, str] = {}
        self._number = 0
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def __enter__(self) -> BenchmarkServers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._servers.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ensure_started(self, names: tuple[str, ...]) -> str | None:
        """Start these servers if they are not running. Return None, or the reason for a failure."""
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
        """Yield URLs of servers without data."""
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

        folder, note = self._folder / "postgres", ""
        if not _is_accessible_to_all_users(self._folder.parent):
            folder = Path(self._servers.enter_context(tempfile.TemporaryDirectory(prefix="perdure-pg-"))) / "postgres"
            folder.parent.chmod(0o755)
            note = ", its files in the system's temporary folder"
        server = Server(folder, **SETTINGS["postgres"])
        self._servers.callback(server.remove)
        server.start()
        self._urls["postgres"] = server.url
        self.versions["postgres"] = asyncio.run(self._sql("SHOW server_version")) + note

    def _start_redis(self) -> None:
        from tests.servers.redis import Server

        folder = self._folder / "redis"
        self._redis = Server(folder, unixsocket=str(folder / "socket"), **SETTINGS["redis"])
        self._servers.callback(self._redis.remove)
        self._redis.start()
        self._urls["redis"] = self._redis.socket_url
        lines = self._redis.command("INFO", "server").decode().splitlines()
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
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


def _is_accessible_to_all_users(folder: Path) -> bool:
    """Return whether all users may enter the folder. If root starts PostgreSQL, it runs as another user."""
    path = [folder, *folder.parents]
    return os.getuid() != 0 or all(each.stat().st_mode & stat.S_IXOTH for each in path)
