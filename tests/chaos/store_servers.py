"""The servers of the chaos tests: each with a direct URL for the test and a proxied URL for workers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.tcp_proxy import Proxy, proxy_to
from tests.crash.store_readers import SqliteReader
from tests.servers import postgres, redis


@dataclass(frozen=True)
class Place:
    """A store under test. A file has neither connections to cut nor a server to restart."""

    url: str
    worker_url: str
    proxy: Proxy | None = None
    restart: Callable[[], None] | None = None
    can_write: Callable[[], bool] = lambda: True  # whether no process holds a write lock right now


@contextlib.contextmanager
def on_postgres(folder: Path) -> Iterator[Place]:
    home = Path(tempfile.mkdtemp(prefix="perdure-chaos-"))  # the path of a Unix socket must be short
    server = postgres.Server(home)
    try:
        server.start()
        with proxy_to(str(home / "socket" / ".s.PGSQL.5432")) as proxy:
            through = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres"
            yield Place(
                postgres.with_schema(server.url, "chaos"),
                postgres.with_schema(through, "chaos"),
                proxy,
                server.restart,
            )
    finally:
        server.remove()


@contextlib.contextmanager
def on_redis(folder: Path) -> Iterator[Place]:
    server = redis.Server(folder / "redis", appendfsync="always")
    try:
        server.start()
        with proxy_to(("127.0.0.1", server.port)) as proxy:
            through = server.url.replace(f":{server.port}", f":{proxy.port}")
            yield Place(server.url, through, proxy, server.restart)
    finally:
        server.remove()


@contextlib.contextmanager
def on_sqlite(folder: Path) -> Iterator[Place]:
    url = f"sqlite:///{folder / 'store.db'}"
    yield Place(url, url, can_write=SqliteReader(folder).can_write)


PLACES = {"postgres": on_postgres, "redis": on_redis, "sqlite": on_sqlite}
