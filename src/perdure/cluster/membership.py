"""Membership: the lease of this worker, takeover from dead workers, and the shard assignments that follow.

A worker is one row in the store and renews the lease in it. Takeover from another worker has three steps:

    fence     when its lease has expired, or its process on this host is dead, the first worker to notice fences it;
              from then on the store rejects all its writes
    release   its runs are released in pages, and each counts one recovery
    remove    its row is deleted last, so that another worker can continue an interrupted takeover

Safety does not depend on clocks: a lease only says when to check, and the store decides by the fence (ADR 1). Leases
are in the time of the store. A worker measures it before it renews its lease and judges those of others (ADR 19).
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from perdure.clock import StoreClock
from perdure.cluster.shard_assignment import assigned_shards, assigned_worker
from perdure.model.ids import shard_of
from perdure.model.records import Takeover, WorkerRecord
from perdure.model.shards import ShardAssignment, WorkflowVersions
from perdure.stores.protocol import Store

LOGGER = logging.getLogger("perdure.cluster")
RELEASE_PAGE = 500
REFRESH_INTERVAL_SECONDS = 0.2  # minimum time between two reads of the members
LEASE_EPSILON_SECONDS = 0.001  # after the end of a lease, so that rounding does not make it valid


class Membership:
    """The membership of one worker."""

    def __init__(
        self,
        store: Store,
        clock: StoreClock,
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
        self._on_fenced: Callable[[], None] = lambda: None
        self._on_runs_available: Callable[[], None] = lambda: None
        self._on_members_changed: Callable[[], None] = lambda: None
        self._all_others: tuple[WorkerRecord, ...] = ()  # the other live workers of all pools
        self._others: tuple[WorkerRecord, ...] = ()  # the other live workers of this pool, as of the last read
        self._refreshed_at = 0.0
        self._may_fence_at = 0.0
        self._stopping = False
        self._assignments: tuple[WorkflowVersions, tuple[ShardAssignment, ...]] | None = None
        self._started_at = clock.now()
        self.lease_until = 0.0  # of the latest renewal that the store has confirmed
        self._host = node_identity()
        self.id = _new_id()

    def subscribe(
        self,
        *,
        on_fenced: Callable[[], None],
        on_runs_available: Callable[[], None],
        on_members_changed: Callable[[], None],
        on_workers_changed: Callable[[], None],
    ) -> None:
        """Set the callbacks.

        `on_fenced`: the store has fenced this worker. `on_runs_available`: runs of other workers were released, or the
        lease of this worker is valid again, so that it may act on its own runs. `on_members_changed`: a worker of the
        pool has joined or left, or has other workflows. `on_workers_changed`: the same of any pool.
        """
        self._on_fenced = on_fenced
        self._on_runs_available = on_runs_available
        self._on_members_changed = on_members_changed
        self._on_workers_changed = on_workers_changed

    async def join(self) -> None:
        """Become a member with a new id."""
        await self._clock.synchronize()
        self.id = _new_id()
        self._assignments = None
        while not await self._write_record(self._store.join):
            self.id = _new_id()
        self._update_members(await self._store.workers(), self._clock.now())

    async def renew(self, now: float) -> float | None:
        """Periodic task: renew the lease, three times per lease."""
        now = await self._clock.synchronize()
        was_expired = self._check_own_lease(now)
        if not await self._write_record(self._store.renew):
            LOGGER.warning(
                "Worker %s was fenced after its lease expired; rejoining with a new id",
                self.id,
                extra={"worker": self.id},
            )
            self._on_fenced()
        elif was_expired:
            self._on_runs_available()  # the lease had expired, but no worker has fenced this one
        return now + self._lease / 3

    def _check_own_lease(self, now: float) -> bool:
        """Return whether the lease has expired. If so, other workers get the time to renew theirs before a takeover.

        This worker was suspended, or the store was unavailable, and that may be true for all of them. Without the
        delay, each worker would fence those that return a little later.
        """
        is_expired = now > self.lease_until
        if is_expired:
            self._may_fence_at = now + self._lease / 3
        return is_expired

    # --- takeover

    async def take_over_expired(self, now: float) -> float | None:
        """Periodic task: take over from dead workers. Runs again when the next lease expires unless it is renewed."""
        now = await self._clock.synchronize()
        self._check_own_lease(now)
        if now < self._may_fence_at:
            return self._may_fence_at
        await self.take_over(now)
        ends = (other.lease_until + LEASE_EPSILON_SECONDS for other in self._others if other.lease_until >= now)
        return min((now + self._lease / 3, *ends))

    async def take_over(self, now: float) -> Takeover:
        """Fence dead workers, release their runs, remove them, and return how many workers and runs that were.

        `now` was measured before this call: a local clock that is ahead must not make leases look expired.
        """
        known = await self._store.workers()
        fenced = [worker for worker in known if worker.id != self.id and await self._fence_if_dead(worker, now)]
        fenced_ids = {worker.id for worker in fenced}
        self._update_members([worker for worker in known if worker.id not in fenced_ids], now)
        runs = 0
        for worker in fenced:
            try:
                runs += await self._release_all(worker.id, now)
            except Exception as error:  # the runs of other workers do not depend on this one; it stays fenced
                extra = {"worker": worker.id}
                LOGGER.error("Takeover from worker %s failed, will retry: %r", worker.id, error, extra=extra)
        if fenced:
            LOGGER.warning(
                "Took over %d %s from %d dead %s: %s",
                runs,
                "run" if runs == 1 else "runs",
                len(fenced),
                "worker" if len(fenced) == 1 else "workers",
                ", ".join(fenced_ids),
                extra={"worker": self.id, "fenced_workers": sorted(fenced_ids), "runs": runs},
            )
        return Takeover(len(fenced), runs)

    async def _release_all(self, worker_id: str, now: float) -> int:
        """Release the runs of a fenced worker and remove it; return the number of runs."""
        runs = 0
        while page := await self._store.release_runs(worker_id, now, recovered=True, limit=RELEASE_PAGE):
            runs += len(page)
            self._on_runs_available()  # claim the first pages while the next are released
        await self._store.remove_worker(worker_id)
        return runs

    async def _fence_if_dead(self, worker: WorkerRecord, now: float) -> bool:
        """Return whether the worker is fenced, by an earlier takeover or by this call."""
        if worker.fenced:
            return True
        if worker.lease_until < now:
            # Compare-and-set: a renewal that arrived after the row was read prevents the fence.
            return await self._store.fence_worker(worker.id, unless_renewed_after=worker.lease_until)
        if self._is_dead_local_process(worker):
            return await self._store.fence_worker(worker.id)
        return False

    # --- assignments

    def assignments(self, workflows: WorkflowVersions) -> tuple[ShardAssignment, ...]:
        """Return which runs of these workflows this worker should claim, given the members it knows to be alive."""
        if self._assignments is None or self._assignments[0] != workflows:
            self._assignments = (workflows, assigned_shards(self.id, workflows, self._others, self._shards))
        return self._assignments[1]

    def is_assigned(self, name: str) -> bool:
        """Return whether this worker has the work of this name, which any worker of any pool can do."""
        if self._stopping:
            return False
        # A worker that stops accepting has no workflows. So does one that never had any, which then gets no work.
        others = [other.id for other in self._all_others if other.workflows]
        return assigned_worker(shard_of(name, self._shards), [self.id, *others]) == self.id

    def live_workers(self) -> tuple[WorkerRecord, ...]:
        """Return the workers of all pools that this worker knows to be alive, and itself."""
        return (*self._all_others, self._record())

    async def refresh_members(self, now: float) -> bool:
        """Read which workers are alive, unless that was done just before; return whether the members have changed."""
        if now - self._refreshed_at < REFRESH_INTERVAL_SECONDS:
            return False
        return self._update_members(await self._store.workers(), now)

    def _update_members(self, workers: Sequence[WorkerRecord], now: float) -> bool:
        """Remember the live workers of this pool; return whether they or their workflows have changed."""
        before = {(other.id, other.workflows) for other in self._others}
        all_before = {(other.id, other.workflows) for other in self._all_others}
        self._all_others = tuple(each for each in workers if each.id != self.id and self._is_alive(each, now))
        self._others = tuple(each for each in self._all_others if each.pool == self._pool)
        self._refreshed_at = now
        if {(other.id, other.workflows) for other in self._all_others} != all_before:
            self._on_workers_changed()
        if {(other.id, other.workflows) for other in self._others} == before:
            return False
        self._assignments = None
        self._on_members_changed()
        return True

    # --- leaving

    async def stop_accepting(self) -> None:
        """Announce that this worker claims no more runs, so that others take its shards. It stays a member."""
        self._stopping = True
        await self._write_record(self._store.renew)

    async def leave(self) -> None:
        """Stop being a member, after the runs were released. Runs that remain are released without a recovery."""
        await self._store.fence_worker(self.id)
        while await self._store.release_runs(self.id, self._clock.now(), recovered=False, limit=RELEASE_PAGE):
            pass
        await self._store.remove_worker(self.id)

    # --- this worker's row, and whether a worker is alive

    async def _write_record(self, write: Callable[[WorkerRecord], Awaitable[bool]]) -> bool:
        """Write the row of this worker with a new lease, and return whether the store accepted it.

        The lease counts from before the call: a slow call must not make it longer than the store knows.
        """
        record = self._record()
        accepted = await write(record)
        if accepted:
            self.lease_until = record.lease_until
        return accepted

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            id=self.id,
            pool=self._pool,
            workflows=() if self._stopping else self._workflows(),
            lease_until=self._clock.now() + self._lease,
            started_at=self._started_at,
            host=self._host,
            pid=os.getpid(),
        )

    def _is_alive(self, worker: WorkerRecord, now: float) -> bool:
        return not worker.fenced and worker.lease_until >= now and not self._is_dead_local_process(worker)

    def _is_dead_local_process(self, worker: WorkerRecord) -> bool:
        """Return whether the worker is a process of this host that has ended."""
        is_local = self._host != "" and worker.host == self._host and worker.pid != os.getpid()
        return is_local and not _is_process_alive(worker.pid)


def node_identity() -> str:
    """Return an id of this boot of this host and its process namespace; empty if unknown.

    Process ids can be compared only between workers with the same identity (ADR 3).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""  # not Linux: only leases show that a worker is dead


def _is_process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Return whether the process has ended and its parent has not waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False


def _new_id() -> str:
    return f"w-{uuid.uuid4().hex[:20]}"
