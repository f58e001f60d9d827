"""The slices of a Redis store: which one a name belongs to, and how what one has for another gets there.

All keys of a slice have one hash tag, `{prefix:number}`, so that a Lua call can touch all of them on a cluster too,
and a call touches one slice only. On a single server there is one slice: every batch is one call, and all of it is
atomic. On a cluster there is one for each shard of the engine. How many is fixed when a store is made.

What a run's slice has to tell a topic's (subscribe, consumed, returned), or the other way round (an assignment), is a
post; so is what would be a dead letter otherwise and is sent to a run or topic in another slice (`lua/letters.lua`). It
is put into the outbox of its slice by the very call that gives rise to it, handed over after that call, and deleted
from the outbox once the other slice has taken it. Each promise holds if the process dies in between:

- before the first call: nothing has happened, and the batch is sent again;
- after it, before a post was handed over: the post lies in the outbox, and `sweep` hands it over (whoever asks for
  unfinished events sweeps, which the engine does all the time);
- after that, before it was deleted: it is handed over again, and its handler knows it (a subscription that stands, a
  serial that was seen, an assignment that is closed, a letter whose fate is on record);
- an assignment that meets no open receive, because the run went on meanwhile, is returned by another post.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from perdure.errors import StoreError
from perdure.model.ids import shard_of
from perdure.stores.redis.encoding import encode, pairs_of, raw
from perdure.stores.redis.listener import build_publisher
from perdure.stores.redis.server import RedisServer

AT_ONCE = 16  # calls to different slices under way together
PartitionMessage = tuple[float, int, int, int, bytes]
"""When its event was sent (for an assignment), the slice that it is from, that it is for, its number, the message."""

FORMAT = 2  # of the keys; another number means that this code cannot read them


class Partitions:
    """Calls of scripts by slice. `tell` is called with the ids of runs that changed."""

    def __init__(self, server: RedisServer, name: str, tell: Callable[[frozenset[str]], None]) -> None:
        self._server = server
        self._prefix = server.address.prefix
        self._tell = tell
        self._shards = 1
        self.count = 1
        self.me = build_publisher(self._prefix, name, cluster=True)  # as long as it may be one

    async def initialize(self, shards: int) -> None:
        """Make the store if there is none, and refuse what is not ours, newer than us, or cut into other shards."""
        slices = self._server.address.slices or (shards if self._server.cluster else 1)
        stored = await self.change(0, "found", FORMAT, shards, slices)
        if None in stored or not stored[0].isdigit():
            raise StoreError(f"{self._server.name}: keys with this prefix are not ours; give another prefix")
        if int(stored[0]) != FORMAT:
            raise StoreError(f"{self._server.name} was made by another version of perdure; use that, or another prefix")
        if int(stored[1]) != shards:
            raise StoreError(
                f"{self._server.name} is cut into {int(stored[1])} shards, not {shards}; "
                f"open it with shards={int(stored[1])}"
            )
        self._shards, self.count = shards, int(stored[2])
        self.me = build_publisher(self._prefix, self.me.name, cluster=self._server.cluster)

    def of(self, name: str) -> int:
        """The slice of a run's id or a topic's name."""
        return shard_of(name, self._shards) % self.count if self.count > 1 else 0

    def tag(self, number: int) -> str:
        return f"{{{self._prefix}:{number}}}"

    # calling

    async def write(self, number: int, arrays: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Writes of one slice in one call; their answers. Posts to other slices have been handed over."""
        answers: list[Any] = await self._call("commit", number, encoded(arrays))
        return answers

    async def call_fast_path(self, script: str, run_id: str, arguments: tuple[bytes | str | int, ...]) -> bool:
        """Call a script that needs nothing but what it is given, in the slice of a run; whether it did anything."""
        return bool(await self._server.call(script, self.tag(self.of(run_id)), *arguments))

    async def change(self, number: int, *call: Any) -> Any:
        """A call of `lua/fleet.lua` in one slice."""
        return await self._call("fleet", number, encoded(call))

    async def forget(self, number: int, *call: Any) -> Any:
        """A call of `lua/upkeep.lua` in one slice."""
        return await self._call("upkeep", number, encoded(call))

    async def change_all(self, *call: Any) -> list[Any]:
        return await gathered(self.change(number, *call) for number in range(self.count))

    async def change_others(self, *call: Any) -> None:
        """In all slices but the first, which is the one that decides."""
        await gathered(self.change(number, *call) for number in range(1, self.count))

    async def read(self, number: int, *question: Any) -> Any:
        """A question of `lua/reads.lua` to one slice."""
        return await self._server.call("reads", self.tag(number), encoded(question))

    async def read_all(self, *question: Any) -> list[Any]:
        return await gathered(self.read(number, *question) for number in range(self.count))

    async def ask(self, number: int, command: str, key: str, *arguments: str | bytes | int) -> Any:
        """A plain command on one key of a slice."""
        return await self._server.ask(command, f"{self.tag(number)}:{key}", *arguments)

    async def ask_all(self, command: str, key: str, *arguments: str | bytes | int) -> list[Any]:
        return await gathered(self.ask(number, command, key, *arguments) for number in range(self.count))

    async def _call(self, script: str, number: int, request: bytes) -> Any:
        answer, posts = await self._call_alone(script, number, request)
        while posts:
            posts = await self._hand_over(posts)
        return answer

    async def _call_alone(self, script: str, number: int, request: bytes) -> tuple[Any, list[PartitionMessage]]:
        """The answer, and what is to be handed over."""
        answer, posts, changed = await self._server.call(script, self.tag(number), request, number, *self.me)
        if changed:
            self._tell(frozenset(id.decode() for id in changed))
        return answer, [_post_of(number, id, packed) for id, packed in posts]

    # posts

    async def _hand_over(self, posts: Iterable[PartitionMessage]) -> list[PartitionMessage]:
        """In order, those from one slice for another together; what comes of it. Assignments by when they were sent."""
        more: list[PartitionMessage] = []
        for (source, target), group in itertools.groupby(sorted(posts, key=_urgency), lambda post: post[1:3]):
            handed = list(group)
            arrays = [("post", raw(message)) for *_, message in handed]
            _, answered = await self._call_alone("commit", target, encoded(arrays))
            more += answered
            await self._call_alone(
                "fleet", source, encoded(("settle_posts", [number for _, _, _, number, _ in handed]))
            )
        return more

    async def sweep(self) -> None:
        """Hand over what processes that died have left in the outboxes."""
        if self.count == 1:
            return
        left: list[PartitionMessage] = []
        for number, found in enumerate(await self.read_all("outbox")):
            left += sorted((_post_of(number, id, packed) for id, packed in pairs_of(found)), key=lambda post: post[3])
        while left:
            left = await self._hand_over(left)


def _post_of(source: int, number: bytes, packed: bytes) -> PartitionMessage:
    target, sent_at, message = packed.split(b":", 2)
    return (float(sent_at) if sent_at else float("-inf"), source, int(target), int(number), message)


def _urgency(post: PartitionMessage) -> float:
    return post[0]


async def gathered(calls: Iterable[Any]) -> list[Any]:
    """The results of calls to different slices, not too many at once. If one fails, its error, once all have ended:
    nobody is asked again while an earlier question is still on its way.
    """
    pending = list(calls)
    if len(pending) == 1:  # sent before anything else happens here: the server works while the engine goes on
        return [await pending[0]]
    room = asyncio.Semaphore(AT_ONCE)

    async def one(call: Any) -> Any:
        async with room:
            return await call

    def begun(call: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(one(call))
        task.add_done_callback(lambda done: call.close())  # one that was cancelled before there was room has not begun
        return task

    results = await asyncio.gather(*map(begun, pending), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def encoded(value: Any) -> bytes:
    with refusing_bad_text():
        return encode(value)


class refusing_bad_text:  # noqa: N801  # a class, because a generator would take 2 us
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UnicodeEncodeError):
            raise StoreError(f"a name or text cannot be stored: {error}") from error
