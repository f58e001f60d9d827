"""Partitions of a Redis store: the partition of a run or topic, calls to partitions, and messages between them.

All keys of a partition have one hash tag, `{prefix:number}`, so that one Lua call can touch all of them, also on a
cluster. A call touches one partition only. A single server has one partition: every batch is one atomic call. A cluster
has one partition per shard of the engine. The number is fixed when a store is created.

A change that concerns a run and a topic in different partitions (subscribe, assign, consumed, released), or an event
that is sent to another partition and becomes a dead letter if it is refused (`lua/dead_letters.lua`), is a partition
message. The call that causes it puts it into the outbox of its own partition. After that call, the message is delivered
to the other partition, and deleted from the outbox when the other partition has handled it. If the process dies:

- before the first call: nothing has happened, and the batch is sent again;
- after it, before the delivery: the message is in the outbox, and `sweep` delivers it (`unfinished_broadcasts` sweeps,
  and workers call that periodically);
- after the delivery, before the deletion: the message is delivered again, and its handler detects that (an active
  subscription, a known serial, a closed assignment, a recorded result);
- an assignment that meets no open receive, because the run has continued meanwhile, is released by another message.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

from perdure.errors import StoreError
from perdure.model.ids import shard_of
from perdure.stores.redis.encoding import as_lua_string, encode, iter_pairs
from perdure.stores.redis.listener import build_publisher
from perdure.stores.redis.server import RedisServer

MAX_CONCURRENT_CALLS = 16  # to different partitions
FORMAT = 3  # of the keys and fields; a store with another number is refused
UPGRADE_PAGE_SIZE = 500  # runs per call of an upgrade


class PartitionMessage(NamedTuple):
    """A message in the outbox of a partition."""

    sent_at: float  # of the event, for an assignment; -inf for all others
    source: int
    target: int
    number: int  # in the outbox
    body: bytes


class Partitions:
    """Calls of scripts by partition. `on_change` is called with the ids of runs that a call has changed."""

    def __init__(self, server: RedisServer, name: str, on_change: Callable[[frozenset[str]], None]) -> None:
        self._server = server
        self._prefix = server.address.prefix
        self._on_change = on_change
        self._shards = 1
        self.count = 1
        self.publisher = build_publisher(self._prefix, name, cluster=True)  # correct also if it is no cluster

    async def initialize(self, shards: int) -> None:
        """Create the store if it does not exist.

        Raises `StoreError` if the keys are not those of a perdure store, have another format, or other shards.
        """
        wanted = self._server.address.partitions or (shards if self._server.is_cluster else 1)
        stored_format, stored_shards, count, upgrades = await self.execute(
            0, "initialize", FORMAT, shards, wanted, len(UPGRADES)
        )
        if stored_format is None or stored_shards is None or not stored_format.isdigit():
            raise StoreError(f"{self._server.name}: keys with this prefix are not perdure's; use another prefix")
        if int(stored_format) != FORMAT or count is None:
            raise StoreError(
                f"{self._server.name} was created by another version of perdure (format {int(stored_format)}, not "
                f"{FORMAT}); use that version, or another prefix"
            )
        if int(stored_shards) != shards:
            raise StoreError(
                f"{self._server.name} has {int(stored_shards)} shards, not {shards}; "
                f"open it with shards={int(stored_shards)}"
            )
        self._shards, self.count = shards, int(count)
        self.publisher = build_publisher(self._prefix, self.publisher.name, cluster=self._server.is_cluster)
        await self._upgrade(int(upgrades or 0))

    async def _upgrade(self, applied: int) -> None:
        """Apply the upgrades that the store does not have. Each is idempotent: several processes may apply it."""
        for number, upgrade in enumerate(UPGRADES[applied:], applied + 1):
            for partition in range(self.count):
                await upgrade(self, partition)
            await self.execute(0, "record_upgrades", number)

    def of(self, name: str) -> int:
        """Return the partition of a run id or a topic name."""
        return shard_of(name, self._shards) % self.count if self.count > 1 else 0

    def tag(self, number: int) -> str:
        return f"{{{self._prefix}:{number}}}"

    # calls

    async def write(self, number: int, arrays: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Apply the writes of one partition in one call; return their results.

        Messages to other partitions have been delivered when this returns.
        """
        results: list[Any] = await self._call("commit", number, encode_request(arrays))
        return results

    async def call_fast_path(self, script: str, run_id: str, arguments: tuple[bytes | str | int, ...]) -> bool:
        """Call a fast-path script in the partition of a run; return False if it declined."""
        return bool(await self._server.call(script, self.tag(self.of(run_id)), *arguments))

    async def execute(self, number: int, *command: Any) -> Any:
        """Return the result of a command of `lua/workers.lua` in one partition."""
        return await self._call("workers", number, encode_request(command))

    async def execute_on_all(self, *command: Any) -> list[Any]:
        return await gather_calls(self.execute(number, *command) for number in range(self.count))

    async def execute_on_others(self, *command: Any) -> None:
        """Execute a command in all partitions except 0, which has decided before."""
        await gather_calls(self.execute(number, *command) for number in range(1, self.count))

    async def maintain(self, number: int, *command: Any) -> Any:
        """Return the result of a command of `lua/maintenance.lua` in one partition."""
        return await self._call("maintenance", number, encode_request(command))

    async def read(self, number: int, *query: Any) -> Any:
        """Return the result of a query of `lua/reads.lua` in one partition."""
        return await self._server.call("reads", self.tag(number), encode_request(query))

    async def read_all(self, *query: Any) -> list[Any]:
        return await gather_calls(self.read(number, *query) for number in range(self.count))

    async def command(self, number: int, command: str, key: str, *arguments: str | bytes | int) -> Any:
        """Return the reply of a Redis command on one key of a partition."""
        return await self._server.command(command, f"{self.tag(number)}:{key}", *arguments)

    async def command_all(self, command: str, key: str, *arguments: str | bytes | int) -> list[Any]:
        return await gather_calls(self.command(number, command, key, *arguments) for number in range(self.count))

    async def _call(self, script: str, number: int, request: bytes) -> Any:
        result, messages = await self._call_once(script, number, request)
        while messages:
            messages = await self._deliver(messages)
        return result

    async def _call_once(self, script: str, number: int, request: bytes) -> tuple[Any, list[PartitionMessage]]:
        """Return the result of a script, and the messages to other partitions that it has caused."""
        result, outgoing, changed = await self._server.call(script, self.tag(number), request, number, *self.publisher)
        if changed:
            self._on_change(frozenset(id.decode() for id in changed))
        return result, [_decode_message(number, id, packed) for id, packed in outgoing]

    # partition messages

    async def _deliver(self, messages: Iterable[PartitionMessage]) -> list[PartitionMessage]:
        """Deliver messages in order, assignments by the time of their events; return the messages that these cause.

        Consecutive messages from one partition to another are one call.
        """
        caused: list[PartitionMessage] = []
        ordered = sorted(messages, key=lambda message: message.sent_at)
        for (source, target), group in itertools.groupby(ordered, lambda message: (message.source, message.target)):
            delivered = list(group)
            arrays = [("partition_message", as_lua_string(message.body)) for message in delivered]
            _, more = await self._call_once("commit", target, encode_request(arrays))
            caused += more
            numbers = [message.number for message in delivered]
            await self._call_once("workers", source, encode_request(("delete_outgoing", numbers)))
        return caused

    async def sweep(self) -> None:
        """Deliver messages that processes left in the outboxes when they died."""
        if self.count == 1:
            return
        left: list[PartitionMessage] = []
        for number, found in enumerate(await self.read_all("outbox")):
            messages = (_decode_message(number, id, packed) for id, packed in iter_pairs(found))
            left += sorted(messages, key=lambda message: message.number)
        while left:
            left = await self._deliver(left)


def _decode_message(source: int, number: bytes, packed: bytes) -> PartitionMessage:
    target, sent_at, body = packed.split(b":", 2)
    return PartitionMessage(float(sent_at) if sent_at else float("-inf"), source, int(target), int(number), body)


async def gather_calls(calls: Iterable[Any]) -> list[Any]:
    """Return the results of calls to different partitions, a limited number at a time.

    If a call fails, its error is raised when all calls have ended: a retry must not meet a call of the first attempt.
    """
    pending = list(calls)
    if len(pending) == 1:  # sent before this task yields, so that the server works while the engine continues
        return [await pending[0]]
    slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def run(call: Any) -> Any:
        async with slots:
            return await call

    def start(call: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(run(call))
        task.add_done_callback(lambda done: call.close())  # a call that was cancelled before it got a slot never ran
        return task

    results = await asyncio.gather(*map(start, pending), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def encode_request(value: Any) -> bytes:
    with refuse_invalid_text():
        return encode(value)


class refuse_invalid_text:  # noqa: N801  # a class, because a generator-based context manager costs 2 us
    """Context manager that raises `StoreError` for text that cannot be encoded as UTF-8."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UnicodeEncodeError):
            raise StoreError(f"a name or text cannot be stored: {error}") from error


async def _index_held_runs(partitions: Partitions, number: int) -> None:
    """Upgrade 1: build the index `held-runs` of a partition."""
    before, last_id = "+inf", ""
    while True:
        (page,) = await partitions.read(number, "pages", ["status:suspended"], before, last_id, UPGRADE_PAGE_SIZE)
        runs = list(iter_pairs(page))
        if runs:
            await partitions.execute(number, "index_held", [id.decode() for id, _ in runs])
            before, last_id = runs[-1][1].decode(), runs[-1][0].decode()
        if len(runs) < UPGRADE_PAGE_SIZE:
            return


UPGRADES: tuple[Callable[[Partitions, int], Awaitable[None]], ...] = (_index_held_runs,)
"""What changes stores that were created by an earlier version of the same format, per partition, in order."""
