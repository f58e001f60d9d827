"""MembershipProtocol: what a worker needs to know of the other workers.

`perdure.cluster` implements it. Neither package imports the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from perdure.model.records import Takeover, WorkerRecord
from perdure.model.shards import ShardAssignment, WorkflowVersions


class MembershipProtocol(Protocol):
    """The membership of one worker."""

    id: str
    lease_until: float  # of the latest renewal that the store has confirmed

    def subscribe(
        self,
        *,
        on_fenced: Callable[[], None],
        on_runs_available: Callable[[], None],
        on_members_changed: Callable[[], None],
        on_workers_changed: Callable[[], None],
    ) -> None:
        """Set the callbacks.

        The store has fenced this worker; there may be more runs to claim; the members of the pool changed; the live
        workers of any pool changed.
        """

    async def join(self) -> None: ...

    async def renew(self, now: float) -> float | None: ...

    async def take_over_expired(self, now: float) -> float | None: ...

    async def take_over(self, now: float) -> Takeover: ...

    def assignments(self, workflows: WorkflowVersions) -> tuple[ShardAssignment, ...]:
        """Return which runs of these workflows this worker should claim, given the members it knows to be alive."""

    def is_assigned(self, name: str) -> bool:
        """Return whether this worker has the work of this name, which any worker of any pool can do."""

    def live_workers(self) -> tuple[WorkerRecord, ...]:
        """Return the workers of all pools that this worker knows to be alive, and itself."""

    async def refresh_members(self, now: float) -> bool:
        """Read which workers are alive; return whether that changes the assignments of this worker."""

    async def stop_accepting(self) -> None:
        """Announce that this worker claims no more runs. It stays a member until it leaves."""

    async def leave(self) -> None: ...
