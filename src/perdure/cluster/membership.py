"""Membership: this worker's sign of life, and noticing that another one's has stopped.

A worker renews one row, its lease. When the lease has run out, or its process on this very machine is dead, whoever
sees it first declares it gone; from then on the store takes nothing from it. Then its runs are released in pages, and
its row goes last: a crash in the middle leaves a row that the next one carries on with. Safety does not depend on any
clock here: leases only say when to look.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from perdure.clock import Clock
from perdure.records import Takeover, WorkerRecord
from perdure.store.base import Store

LOGGER = logging.getLogger("perdure.cluster")
RELEASE_PAGE = 500


class Membership:
    """One worker's membership."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        pool: str,
        lease: float,
        workflows: Callable[[], tuple[tuple[str, int], ...]],
    ) -> None:
        self._store = store
        self._clock = clock
        self._pool = pool
        self._lease = lease
        self._workflows = workflows
        self._lost: Callable[[], None] = lambda: None
        self._released: Callable[[], None] = lambda: None
        self._started_at = clock.now()
        self._lease_until = 0.0  # of the latest renewal that is known to have arrived
        self._node = node_identity()
        self.id = _new_id()

    def listen(self, *, lost: Callable[[], None], released: Callable[[], None]) -> None:
        """Whom to tell that this worker was declared gone itself, and that runs of others were released."""
        self._lost = lost
        self._released = released

    async def join(self) -> None:
        """Become a member, under an id that was never used."""
        self.id = _new_id()
        while not await self._renewed():
            self.id = _new_id()

    async def renew(self, now: float) -> float | None:
        """Duty: renew the lease, three times per lease."""
        if (now > self._lease_until and await self._is_forgotten()) or not await self._renewed():
            LOGGER.warning("worker %s was declared gone; it comes back under another id", self.id)
            self._lost()
        return now + self._lease / 3

    async def look_after_others(self, now: float) -> float | None:
        """Duty: take over from workers that are gone."""
        await self.take_over(now)
        return now + self._lease / 3

    async def take_over(self, now: float) -> Takeover:
        workers = runs = 0
        for worker in await self._store.workers():
            if worker.id == self.id or not await self._is_gone(worker, now):
                continue
            workers += 1
            while page := await self._store.release(worker.id, now, recovered=True, limit=RELEASE_PAGE):
                runs += len(page)
                self._released()
            await self._store.retire(worker.id)
        if workers:
            LOGGER.warning("took over from %d workers that are gone: %d runs go on", workers, runs)
        return Takeover(workers, runs)

    async def leave(self) -> None:
        """Stop being a member, after the runs were given back. What was missed is released without blame."""
        await self._store.declare_gone(self.id)
        while await self._store.release(self.id, self._clock.now(), recovered=False, limit=RELEASE_PAGE):
            pass
        await self._store.retire(self.id)

    async def _renewed(self) -> bool:
        record = self._record()
        renewed = await self._store.renew(record)
        if renewed:
            self._lease_until = record.lease_until
        return renewed

    async def _is_forgotten(self) -> bool:
        """Taken over, and the row removed already: to renew it would be to come back under an id that has died."""
        return all(worker.id != self.id for worker in await self._store.workers())

    async def _is_gone(self, worker: WorkerRecord, now: float) -> bool:
        if worker.gone:
            return True
        if worker.lease_until < now:
            return await self._store.declare_gone(worker.id, unless_renewed_after=worker.lease_until)
        if self._node and worker.node == self._node and worker.pid != os.getpid() and not _process_lives(worker.pid):
            return await self._store.declare_gone(worker.id)
        return False

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            id=self.id,
            pool=self._pool,
            workflows=self._workflows(),
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
