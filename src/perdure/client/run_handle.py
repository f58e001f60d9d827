"""Run: a handle on one run. It has an id, and calls its client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from perdure.client.queries import QueryClient
from perdure.client.views import HistoryEntry, RunDescription
from perdure.model.records import RunStatus
from perdure.model.tags import TagValue
from perdure.workflows.definition import Workflow

R_co = TypeVar("R_co", covariant=True)


class RunClient(Protocol):
    """The calls of a client that a handle uses."""

    _queries: QueryClient

    async def describe(self, run_id: str) -> RunDescription: ...

    async def cancel(self, run_id: str, reason: str | None = None) -> bool: ...

    async def tag(
        self, run_id: str, tags: Mapping[str, TagValue | None] | None = None, /, **named: TagValue | None
    ) -> None: ...

    async def send(self, run_id: str, event: Any, payload: Any = None, *, event_id: str | None = None) -> None: ...

    def watch(self, run_id: str) -> AsyncIterator[HistoryEntry]: ...


class Run(Generic[R_co]):
    """A handle on one run: its `id`, whether the call that returned the handle `created` it, and calls about it."""

    __slots__ = ("_client", "_definition", "created", "id")

    def __init__(self, run_id: str, client: RunClient, definition: Workflow[Any, Any] | None, created: bool) -> None:
        self.id = run_id
        self.created = created
        self._client = client
        self._definition = definition

    async def status(self) -> RunStatus:
        """Return the status of the run. Raises `RunNotFound`."""
        return (await self._client.describe(self.id)).status

    async def result(self, timeout: float | timedelta | None = None, raise_if_held: bool = False) -> R_co:
        """Wait for the end of the run and return its value; see `Client.result`."""
        result: R_co = await self._client._queries.result(
            self.id, timeout, self._definition, raise_if_held=raise_if_held
        )
        return result

    async def describe(self) -> RunDescription:
        """Return everything about the run but its history; see `Client.describe`."""
        return await self._client.describe(self.id)

    async def cancel(self, reason: str | None = None) -> bool:
        """Request cancellation of the run; see `Client.cancel`."""
        return await self._client.cancel(self.id, reason)

    async def tag(self, tags: Mapping[str, TagValue | None] | None = None, /, **named: TagValue | None) -> None:
        """Change tags of the run; see `Client.tag`."""
        await self._client.tag(self.id, tags, **named)

    async def send(self, event: Any, payload: Any = None, *, event_id: str | None = None) -> None:
        """Put an event into the run's mailbox; see `Client.send`."""
        await self._client.send(self.id, event, payload, event_id=event_id)

    def watch(self) -> AsyncIterator[HistoryEntry]:
        """Yield the run's entries as they change; see `Client.watch`."""
        return self._client.watch(self.id)

    def __repr__(self) -> str:
        return f"<run {self.id}>"
