"""What the engine needs of its membership in the fleet; `perdure.cluster` provides it, and neither knows the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from perdure.records import Takeover


class Member(Protocol):
    """A worker's place among the others."""

    id: str

    def listen(self, *, lost: Callable[[], None], released: Callable[[], None]) -> None:
        """Whom to tell that this worker was declared gone, and that runs of others were released."""

    async def join(self) -> None: ...

    async def renew(self, now: float) -> float | None: ...

    async def look_after_others(self, now: float) -> float | None: ...

    async def take_over(self, now: float) -> Takeover: ...

    async def leave(self) -> None: ...
