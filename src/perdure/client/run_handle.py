"""Run: a handle on one run. It holds an id and hands every call over to the client that made it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from perdure.client.views import HistoryEntry, RunDescription
from perdure.model.records import RunStatus
from perdure.workflows.definition import Workflow

R_co = TypeVar("R_co", covariant=True)


class RunCalls(Protocol):
    """What a handle needs of its client."""

    async def status(self, run_id: str) -> RunStatus | None: ...

    async def result_of(
        self, run_id: str, definition: Workflow[Any, Any] | None, timeout: float | timedelta | None
    ) -> Any: ...

    async def describe(self, run_id: str) -> RunDescription: ...

    async def cancel(self, run_id: str) -> bool: ...

    async def send(self, run_id: str, event: Any, payload: Any = None, *, event_id: str | None = None) -> None: ...

    def watch(self, run_id: str) -> AsyncIterator[HistoryEntry]: ...


class Run(Generic[R_co]):
    """`id`, whether this call made the run (`created`), and what can be asked of it."""

    __slots__ = ("_calls", "_definition", "created", "id")

    def __init__(self, run_id: str, calls: RunCalls, definition: Workflow[Any, Any] | None, created: bool) -> None:
        self.id = run_id
        self.created = created
        self._calls = calls
        self._definition = definition

    async def status(self) -> RunStatus:
        """Where the run stands; `RunNotFound` if there is none."""
        return (await self._calls.describe(self.id)).status

    async def result(self, timeout: float | timedelta | None = None) -> R_co:
        """Wait for the end. Raises `RunFailed`, `RunCancelled`, or `TimeoutError` if it takes longer than `timeout`."""
        result: R_co = await self._calls.result_of(self.id, self._definition, timeout)
        return result

    async def describe(self) -> RunDescription:
        return await self._calls.describe(self.id)

    async def cancel(self) -> bool:
        return await self._calls.cancel(self.id)

    async def send(self, event: Any, payload: Any = None, *, event_id: str | None = None) -> None:
        """Put an event into the run's mailbox; see `Client.send`."""
        await self._calls.send(self.id, event, payload, event_id=event_id)

    def watch(self) -> AsyncIterator[HistoryEntry]:
        """Entries as they are recorded, from the first; ends when the run does."""
        return self._calls.watch(self.id)

    def __repr__(self) -> str:
        return f"<run {self.id}>"
