"""Membership: this worker's sign of life, and noticing that another one's has stopped.

A worker renews one row, its lease. When the lease has run out, or its process on this very machine is dead, whoever
sees it first declares it gone; from then on the store takes nothing from it. Then its runs are released in pages, and
its row goes last: a crash in the middle leaves a row that the next one carries on with. Safety does not depend on any
clock here: leases only say when to look.

From who is alive it also tells which runs this worker should take (`assignment`).
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from perdure.clock import Clock
from perdure.cluster.shard_assignment import assigned_shards
from perdure.model.records import Takeover, WorkerRecord
from perdure.model.types import ShardAssignment, WorkflowVersions
from perdure.stores.protocol import Store

LOGGER = logging.getLogger("perdure.cluster")
RELEASE_PAGE = 500
LOOK_EVERY = 0.2  # seconds: who is alive is not asked more often than that
LEASE_EPSILON_SECONDS = 0.001  # seconds after the end of a lease: then it has run out by any reckoning


class Membership:
    """One worker's membership."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        pool: str,
        lease: float,
        shards: int,
        workflows: Callable[[], WorkflowVersions],
    ) -> None:
        self._store = store
        self._clock = clock
        self._pool = pool
        self._lease = lease
        self._shards = shards
        self._workflows = workflows
        self._lost: Callable[[], None] = lambda: None
        self._more: Callable[[], None] = lambda: None
        self._others: tuple[WorkerRecord, ...] = ()  # alive in this pool, as of the last look
        self._looked_at = 0.0
        self._withdrawn = False
        self._shares: tuple[WorkflowVersions, tuple[ShardAssignment, ...]] | None = None
        self._started_at = clock.now()
        self.lease_until = 0.0  # of the latest renewal that is known to have arrived
        self._node = node_identity()
        self.id = _new_id()

    def listen(self, *, lost: Callable[[], None], more: Callable[[], None]) -> None:
        """Whom to tell that this worker was declared gone itself, and that there is more to take: runs of others were
        released, or its own were in doubt and are its own."""
        self._lost = lost
        self._more = more

    async def join(self) -> None:
        """Become a member, under an id that was never used."""
        self.id = _new_id()
        self._shares = None
        while not await self._write_record(self._store.join):
            self.id = _new_id()
        self._update_members(await self._store.workers(), self._clock.now())

    async def renew(self, now: float) -> float | None:
        """Duty: renew the lease, three times per lease."""
        expired_at = self.lease_until
        if not await self._write_record(self._store.renew):
            LOGGER.warning("worker %s was declared gone; it comes back under another id", self.id)
            self._lost()
        elif now > expired_at:
            self._more()  # what it was unsure of is its own after all
        return now + self._lease / 3

    async def take_over_expired(self, now: float) -> float | None:
        """Duty: take over from workers that are gone; as soon as a lease has run out, if nobody renews it."""
        await self.take_over(now)
        ends = (other.lease_until + LEASE_EPSILON_SECONDS for other in self._others if other.lease_until >= now)
        return min((now + self._lease / 3, *ends))

    async def take_over(self, now: float) -> Takeover:
        known = await self._store.workers()
        gone = [worker for worker in known if worker.id != self.id and await self._is_gone(worker, now)]
        dead = {worker.id for worker in gone}
        self._update_members([worker for worker in known if worker.id not in dead], now)
        runs = 0
        for worker in gone:
            while page := await self._store.release_runs(worker.id, now, recovered=True, limit=RELEASE_PAGE):
                runs += len(page)
                self._more()
            await self._store.remove_worker(worker.id)
        if gone:
            LOGGER.warning("took over from %d workers that are gone: %d runs go on", len(gone), runs)
        return Takeover(len(gone), runs)

    # --- shares

    def shares(self, workflows: WorkflowVersions) -> tuple[ShardAssignment, ...]:
        """Which runs of these workflows this worker should take, as far as it knows who is alive."""
        if self._shares is None or self._shares[0] != workflows:
            self._shares = (workflows, assigned_shards(self.id, workflows, self._others, self._shards))
        return self._shares[1]

    async def refresh_members(self, now: float) -> bool:
        """See who is alive, unless that was done a moment ago. Whether it has changed."""
        if now - self._looked_at < LOOK_EVERY:
            return False
        return self._update_members(await self._store.workers(), now)

    def _update_members(self, workers: Sequence[WorkerRecord], now: float) -> bool:
        """Remember who is alive in this pool. Whether that makes a difference to what this worker should take."""
        before = {(other.id, other.workflows) for other in self._others}
        self._others = tuple(
            worker
            for worker in workers
            if worker.id != self.id and worker.pool == self._pool and self._is_alive(worker, now)
        )
        self._looked_at = now
        if {(other.id, other.workflows) for other in self._others} == before:
            return False
        self._shares = None
        return True

    # --- leaving

    async def stop_accepting(self) -> None:
        """Say that this worker takes no more runs, so that others take its shards from now on. It stays a member."""
        self._withdrawn = True
        await self._write_record(self._store.renew)

    async def leave(self) -> None:
        """Stop being a member, after the runs were given back. What was missed is released without blame."""
        await self._store.fence_worker(self.id)
        while await self._store.release_runs(self.id, self._clock.now(), recovered=False, limit=RELEASE_PAGE):
            pass
        await self._store.remove_worker(self.id)

    async def _write_record(self, tell: Callable[[WorkerRecord], Awaitable[bool]]) -> bool:
        """Tell the store of this worker, in one way or the other. Its lease counts from before that was sent."""
        record = self._record()
        accepted = await tell(record)
        if accepted:
            self.lease_until = record.lease_until
        return accepted

    async def _is_gone(self, worker: WorkerRecord, now: float) -> bool:
        if worker.fenced:
            return True
        if worker.lease_until < now:
            return await self._store.fence_worker(worker.id, unless_renewed_after=worker.lease_until)
        if self._is_dead_local_process(worker):
            return await self._store.fence_worker(worker.id)
        return False

    def _is_alive(self, worker: WorkerRecord, now: float) -> bool:
        return not worker.fenced and worker.lease_until >= now and not self._is_dead_local_process(worker)

    def _is_dead_local_process(self, worker: WorkerRecord) -> bool:
        """A process of this very machine that is no more."""
        near = self._node != "" and worker.node == self._node and worker.pid != os.getpid()
        return near and not _process_lives(worker.pid)

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            id=self.id,
            pool=self._pool,
            workflows=() if self._withdrawn else self._workflows(),
            lease_until=self._clock.now() + self._lease,
            started_at=self._started_at,
            node=self._node,
            pid=os.getpid(),
        )


def node_identity() -> str:
    """Names this boot of this machine and its process space: equal only where process ids mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""  # unknown: then only leases tell


def _process_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """A process that was killed and that its parent has not waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False


def _new_id() -> str:
    return f"w-{uuid.uuid4().hex[:20]}"
