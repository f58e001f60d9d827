"""Connections to one Redis server that a store's scripts go over.

They do without what redis-py's client does around a command (a pool with a lock, a retry, a task for each time-out).
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis import exceptions as failures
from redis.asyncio import ConnectionPool

from perdure.store.redis_wire import PUSHED, Wire


class Link:
    """As many connections as are in use at once, up to `most`; `pool` says how one is made."""

    def __init__(self, pool: ConnectionPool, most: int, patience: float) -> None:
        self._pool = pool
        self._idle: list[Line] = []
        self._room = asyncio.Semaphore(most)
        self._closed = False
        self._patience = pool.connection_kwargs.get("socket_timeout") or patience

    async def execute(self, *command: bytes | str | int) -> Any:
        """What the server answers; its refusals are raised as redis-py does."""
        async with self._room:
            line = await self._line()
            try:
                return await line.ask(command, self._patience)
            finally:
                if line.busy or self._closed:  # an answer may still be on its way
                    await line.close()
                else:
                    self._idle.append(line)

    async def _line(self) -> Line:
        while self._idle:
            line = self._idle.pop()
            if not line.closed:
                return line
            await line.close()
        return await Line.made(self._pool)

    async def close(self) -> None:
        """Calls that are under way close their connections themselves."""
        self._closed = True
        await self.drop_idle()

    async def drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for line in idle:
            await line.close()


class Line(Wire):
    """One connection, and one call at a time."""

    _asked: asyncio.Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come, though nobody may wait for it any more."""
        return self._asked is not None

    async def ask(self, command: tuple[bytes | str | int, ...], patience: float) -> Any:
        loop = asyncio.get_running_loop()
        asked = self._asked = loop.create_future()
        late = loop.call_later(patience, _give_up, asked, patience)
        try:
            self.send(*command)
            return await asked
        finally:
            late.cancel()

    def heard(self, answer: Any) -> None:
        if isinstance(answer, PUSHED):
            return
        asked, self._asked = self._asked, None
        assert asked is not None, f"the server answers what nobody has asked: {answer!r}"
        if isinstance(answer, Exception):
            _fail(asked, answer)
        elif not asked.done():
            asked.set_result(answer)

    def lost(self, error: Exception) -> None:
        if self._asked is not None:
            _fail(self._asked, error)


def _give_up(asked: asyncio.Future[Any], patience: float) -> None:
    _fail(asked, failures.TimeoutError(f"no answer within {patience:g} seconds"))


def _fail(asked: asyncio.Future[Any], error: Exception) -> None:
    if not asked.done():
        asked.set_exception(error)
