"""A TCP proxy in front of a server, in its own thread, whose connections can be cut and stalled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

CHUNK = 65_536


class Proxy:
    """Forwards connections to `port` to the target: a path (a Unix socket) or a (host, port)."""

    def __init__(self, target: str | tuple[str, int]) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._lines: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = server.sockets[0].getsockname()[1]
        self._server = server

    def cut(self) -> None:
        """Close all connections, and refuse new ones until `heal`."""
        self._loop.call_soon_threadsafe(self._break_lines)

    def hold_up(self) -> None:
        """Keep connections open without forwarding until `heal`, as a network partition does."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def heal(self) -> None:
        self._refuses = False
        self._loop.call_soon_threadsafe(self._flows.set)

    def close(self) -> None:
        self.cut()
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _stop(self) -> None:
        self._server.close()
        self._flows.set()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _break_lines(self) -> None:
        self._refuses = True
        for line in self._lines:
            line.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), self._known(writer):
            if self._refuses:
                return
            if isinstance(self._target, str):
                there = await asyncio.open_unix_connection(self._target)
            else:
                there = await asyncio.open_connection(*self._target)
            with self._known(there[1]):
                pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, there[1]), (there[0], writer))]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)

    @contextlib.contextmanager
    def _known(self, line: asyncio.StreamWriter) -> Iterator[None]:
        self._lines.add(line)
        try:
            yield
        finally:
            self._lines.discard(line)
            line.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            await self._flows.wait()
            writer.write(data)
            await writer.drain()


@contextlib.contextmanager
def proxy_to(target: str | tuple[str, int]) -> Iterator[Proxy]:
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
