"""What the engine needs of its membership in the fleet; `perdure.cluster` provides it, and neither knows the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from perdure.model.records import Takeover
from perdure.model.types import ShardAssignment, WorkflowVersions


class MembershipProtocol(Protocol):
    """A worker's place among the others."""

    id: str
    lease_until: float  # of the latest renewal that is known to have arrived

    def listen(self, *, lost: Callable[[], None], more: Callable[[], None]) -> None:
        """Whom to tell that this worker was declared gone, and that there may be more runs to take."""

    async def join(self) -> None: ...

    async def renew(self, now: float) -> float | None: ...

    async def take_over_expired(self, now: float) -> float | None: ...

    async def take_over(self, now: float) -> Takeover: ...

    def shares(self, workflows: WorkflowVersions) -> tuple[ShardAssignment, ...]:
        """Which runs of these workflows this worker should take, as far as it knows who is alive."""

    async def refresh_members(self, now: float) -> bool:
        """See who is alive. Whether that has changed what this worker should take."""

    async def stop_accepting(self) -> None:
        """Say that this worker takes no more runs; it stays a member until it leaves."""

    async def leave(self) -> None: ...
