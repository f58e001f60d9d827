"""QueueHandle and PartitionHandle: the calls of a client about one work queue."""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from perdure.client.queue_reader import QueueReader
from perdure.client.queue_views import QueueDescription, WaitingRun, waiting_run
from perdure.client.session import ClientSession
from perdure.errors import InvalidArgument, QueueNotFound, RunNotFound, StoreError
from perdure.execution.store_writes import build_end_run
from perdure.model.ids import new_token
from perdure.model.queue_records import (
    PartitionOverride,
    PlaceCursor,
    QueueOverride,
    QueuePause,
    QueueSummary,
    RateLimit,
)
from perdure.model.records import RunRecord
from perdure.model.validation import check_count, check_name, check_optional_count, check_text, describe_value
from perdure.queues.effective_settings import effective_settings
from perdure.stores.results import Committed, NotQueued, QueueMissing, RunMissing, WriteResult
from perdure.stores.writes import ConfigurePartition, ConfigureQueue, LeaveQueue, Requeue
from perdure.workflows.work_queues import MAX_PRIORITY, Rate, check_partition, check_rate, check_settings

MAX_ATTEMPTS = 20  # admissions may change the version of the queue between the read and the write
MAX_WEIGHT = 100
CLEAR_PAGE = 500

Limit = int | UnsetType | None
RateOption = Rate | str | UnsetType | None
_CURSOR = re.compile(r"(-?[0-9]{1,3})/([0-9]{1,18})/(.{0,512})")
_PARTITION_LIMITS = ("partition_concurrency", "partition_rate")


class QueueHandle:
    """One work queue of a store. Its calls raise `QueueNotFound` if the store has no such queue."""

    def __init__(self, session: ClientSession, name: str) -> None:
        self.name = check_name("a queue's name", name)
        self._session = session
        self._reader = QueueReader(session)

    async def describe(self) -> QueueDescription:
        """Return limits, waiting runs, slot holders, and what limits the queue now."""
        return await self._reader.describe(self.name)

    async def pause(self, reason: str = "", *, by: str | None = None) -> None:
        """Admit no more runs until `resume`. Starts are accepted, and runs that hold slots continue."""
        reason = "" if reason == "" else check_text("a reason", reason)
        author = _user_name() if by is None else check_name("by", by)
        pause = QueuePause(author, reason, self._session.clock.now())
        await self._configure(lambda queue: _configuration(queue, paused=queue.paused or pause))

    async def resume(self) -> None:
        """Admit runs again."""
        await self._configure(lambda queue: _configuration(queue, paused=None))

    async def resize(
        self,
        *,
        concurrency: Limit = UNSET,
        worker_concurrency: Limit = UNSET,
        rate: RateOption = UNSET,
        partition_concurrency: Limit = UNSET,
        partition_rate: RateOption = UNSET,
        max_waiting: Limit = UNSET,
        reset: bool = False,
    ) -> None:
        """Override declared limits; None removes one. An option that is not given stays as it is.

        With `reset`, all earlier overrides are dropped first. After a resize to a lower limit, nothing is admitted
        until it fits.
        """
        changed: dict[str, Any] = {
            "concurrency": _check_limit("concurrency", concurrency),
            "worker_concurrency": _check_limit("worker_concurrency", worker_concurrency),
            "rate": _check_rate("rate", rate),
            "partition_concurrency": _check_limit("partition_concurrency", partition_concurrency),
            "partition_rate": _check_rate("partition_rate", partition_rate),
            "max_waiting": _check_limit("max_waiting", max_waiting),
        }
        changed = {name: limit for name, limit in changed.items() if limit is not UNSET}
        if not changed and not reset:
            raise InvalidArgument("resize was given nothing to change; use concurrency=, rate=, ..., or reset=True")

        def resized(queue: QueueSummary) -> ConfigureQueue:
            override = replace(QueueOverride() if reset else queue.override, **changed)
            if not queue.declared.partitioned and any(changed.get(name) is not None for name in _PARTITION_LIMITS):
                raise InvalidArgument(f"queue {queue.name!r} is not partitioned; declare it with a partition_key")
            check_settings(f"queue {queue.name!r}", effective_settings(queue.declared, override))
            return _configuration(queue, override=override)

        await self._configure(resized)

    def partition(self, key: str) -> PartitionHandle:
        """Return a handle for the limits of one partition."""
        return PartitionHandle(self, check_partition("a partition", key))

    async def waiting(
        self, partition: str | None = None, after: str | None = None, limit: int = 100
    ) -> list[WaitingRun]:
        """Return a page of waiting runs in order of partition and place. `after` is the `cursor` of the last one."""
        partition = None if partition is None else check_partition("a partition", partition)
        limit, cursor = check_count("limit", limit, maximum=10_000), None if after is None else _read_cursor(after)
        await self._reader.summary(self.name)
        store = self._session.store
        places = await self._session.read(lambda: store.places(self.name, partition, cursor, limit))
        return [waiting_run(place, position) for position, place in enumerate(places, 1)]

    async def move(self, run_id: str, *, priority: int) -> None:
        """Give a waiting run another priority. Raises `InvalidArgument` if the run does not wait in this queue."""
        checked = check_count("priority", priority, minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY)
        write = Requeue(run_id=check_name("a run's id", run_id), queue=self.name, priority=checked)
        await self._change_place(write, "does not wait in")

    async def release(self, run_id: str) -> None:
        """Give up the slot of a run, which continues without it; or let a waiting run begin without a slot.

        Raises `InvalidArgument` if the run neither waits nor holds a slot in this queue.
        """
        now = self._session.clock.now()
        write = LeaveQueue(run_id=check_name("a run's id", run_id), queue=self.name, now=now)
        await self._change_place(write, "has no place or slot in")
        self._session.local_worker.run_has_messages(run_id)

    async def clear(self, partition: str | None = None) -> int:
        """Cancel the runs that wait now, and return how many. Runs that hold slots continue."""
        partition = None if partition is None else check_partition("a partition", partition)
        await self._reader.summary(self.name)
        session, cleared, cursor = self._session, 0, None
        while True:
            after = cursor
            places = await session.read(lambda: session.store.places(self.name, partition, after, CLEAR_PAGE))  # noqa: B023
            if not places:
                return cleared
            cursor = places[-1].cursor
            cleared += await self._cancel([place.run_id for place in places])

    async def _cancel(self, run_ids: list[str]) -> int:
        session, now = self._session, self._session.clock.now()
        records = await session.read(lambda: session.store.records(run_ids))
        waiting = [each for each in records if isinstance(each, RunRecord) and each.waiting]
        ends = [
            build_end_run(
                each.id, new_token(), now, session.config, retention=each.retention, only_if_not_started=False
            )
            for each in waiting
        ]
        results = await session.committer.write_all(ends)
        for result in results:
            if isinstance(result, StoreError):
                raise result
        ended = [each.id for each, result in zip(waiting, results, strict=True) if isinstance(result, Committed)]
        session.waiters.notify(ended)
        for run_id in ended:
            session.local_worker.run_ended_externally(run_id)
        return len(ended)

    async def _change_place(self, write: Requeue | LeaveQueue, problem: str) -> None:
        result = await self._session.committer.write(write)
        if isinstance(result, RunMissing):
            raise RunNotFound(write.run_id)
        if isinstance(result, NotQueued):
            await self._reader.summary(self.name)
            raise InvalidArgument(f"run {write.run_id!r} {problem} queue {self.name!r}")

    async def _configure(self, build: Callable[[QueueSummary], ConfigureQueue]) -> None:
        for _ in range(MAX_ATTEMPTS):
            write = build(await self._reader.summary(self.name))
            if isinstance(await self._session.committer.write(write), Committed):
                return
        raise StoreError(
            f"queue {self.name!r} was changed during each of {MAX_ATTEMPTS} attempts to configure it; try again",
            retryable=True,
        )

    async def _write(self, write: ConfigurePartition) -> WriteResult:
        return await self._session.committer.write(write)

    def __repr__(self) -> str:
        return f"<queue {self.name}>"


class PartitionHandle:
    """One partition of a queue."""

    def __init__(self, queue: QueueHandle, key: str) -> None:
        self.key = key
        self._queue = queue

    async def resize(
        self, *, concurrency: Limit = UNSET, rate: RateOption = UNSET, weight: int = 1, reset: bool = False
    ) -> None:
        """Set the limits of this partition instead of those of all partitions; None removes one.

        `weight` is how many runs the partition is served per turn. The given options replace an earlier override;
        `reset` removes it. Raises `QueueNotFound`.
        """
        summary = await self._queue._reader.summary(self._queue.name)
        if not summary.declared.partitioned:
            raise InvalidArgument(f"queue {summary.name!r} is not partitioned; declare it with a partition_key")
        override = PartitionOverride(
            concurrency=_check_limit("concurrency", concurrency),
            rate=_check_rate("rate", rate),
            weight=check_count("weight", weight, maximum=MAX_WEIGHT),
        )
        if reset and override != PartitionOverride():
            raise InvalidArgument("reset=True removes the override of the partition; give no other option with it")
        write = ConfigurePartition(queue=summary.name, partition=self.key, override=None if reset else override)
        if isinstance(await self._queue._write(write), QueueMissing):
            raise QueueNotFound(summary.name)

    def __repr__(self) -> str:
        return f"<partition {self.key!r} of queue {self._queue.name}>"


def _configuration(queue: QueueSummary, **changed: Any) -> ConfigureQueue:
    write = ConfigureQueue(
        name=queue.name, base=queue.version, declared=queue.declared, override=queue.override, paused=queue.paused
    )
    return replace(write, **changed)


def _check_limit(name: str, limit: Limit) -> Limit:
    return limit if limit is UNSET else check_optional_count(name, limit)


def _check_rate(name: str, rate: RateOption) -> RateLimit | UnsetType | None:
    return UNSET if isinstance(rate, UnsetType) else check_rate(name, rate)


def _read_cursor(cursor: str) -> PlaceCursor:
    found = _CURSOR.fullmatch(cursor) if isinstance(cursor, str) else None
    if found is None:
        raise InvalidArgument(f"after must be the cursor of a waiting run, not {describe_value(cursor)}")
    return PlaceCursor(found[3], int(found[1]), int(found[2]))


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a process without a name, as in some containers
        return ""
