"""The calls of a client about schedules, and the handle that `schedule` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, TypeVar, Unpack, overload

from perdure.client.schedule_views import ScheduleDescription
from perdure.client.schedules import ScheduleClient
from perdure.workflows.context import Context
from perdure.workflows.schedules import Schedule, ScheduleKeywords
from perdure.workflows.schedules import preview as preview_slots

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
G = TypeVar("G")
H = TypeVar("H")
R = TypeVar("R")
Body = Coroutine[Any, Any, R]
OPTION_NAMES = frozenset(option.name for option in dataclasses.fields(Schedule))


class ScheduleCalls:
    """Base of `Client`: one line per call."""

    _schedules: ScheduleClient

    @overload
    async def schedule(
        self, id: str, wf: Callable[[Context], Body[Any]], /, **options: Unpack[ScheduleKeywords]
    ) -> ScheduleHandle: ...
    @overload
    async def schedule(
        self, id: str, wf: Callable[[Context, A], Body[Any]], a: A, /, **options: Unpack[ScheduleKeywords]
    ) -> ScheduleHandle: ...
    @overload
    async def schedule(
        self, id: str, wf: Callable[[Context, A, B], Body[Any]], a: A, b: B, /, **options: Unpack[ScheduleKeywords]
    ) -> ScheduleHandle: ...
    @overload
    async def schedule(
        self,
        id: str,
        wf: Callable[[Context, A, B, C], Body[Any]],
        a: A,
        b: B,
        c: C,
        /,
        **options: Unpack[ScheduleKeywords],
    ) -> ScheduleHandle: ...
    @overload
    async def schedule(
        self,
        id: str,
        wf: Callable[[Context, A, B, C, D], Body[Any]],
        a: A,
        b: B,
        c: C,
        d: D,
        /,
        **options: Unpack[ScheduleKeywords],
    ) -> ScheduleHandle: ...
    @overload
    async def schedule(
        self,
        id: str,
        wf: Callable[[Context, A, B, C, D, E], Body[Any]],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        /,
        **options: Unpack[ScheduleKeywords],
    ) -> ScheduleHandle: ...
    @overload
    async def schedule(
        self,
        id: str,
        wf: Callable[[Context, A, B, C, D, E, F], Body[Any]],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        f: F,
        /,
        **options: Unpack[ScheduleKeywords],
    ) -> ScheduleHandle: ...
    @overload
    async def schedule(
        self,
        id: str,
        wf: Callable[[Context, A, B, C, D, E, F, G], Body[Any]],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        f: F,
        g: G,
        /,
        **options: Unpack[ScheduleKeywords],
    ) -> ScheduleHandle: ...
    @overload
    async def schedule(
        self,
        id: str,
        wf: Callable[[Context, A, B, C, D, E, F, G, H], Body[Any]],
        a: A,
        b: B,
        c: C,
        d: D,
        e: E,
        f: F,
        g: G,
        h: H,
        /,
        **options: Unpack[ScheduleKeywords],
    ) -> ScheduleHandle: ...
    @overload
    async def schedule(
        self, id: str, wf: str, /, *args: Any, **options: Unpack[ScheduleKeywords]
    ) -> ScheduleHandle: ...
    async def schedule(self, id: str, wf: Any, /, *args: Any, **given: Any) -> ScheduleHandle:
        """Start a workflow by `cron`, `every` so many seconds, or `at` some times. Return a handle on the schedule.

        Creates the schedule, or changes it if it differs; the handle says so. Keyword arguments are options of
        `Schedule`; others belong to the payload. The run of a time slot has the id `<schedule>/<slot>`. Raises
        `InvalidArgument` for an invalid option, `InvalidPayload`, and `ScheduleConflict` if code declares the id.
        """
        rule = Schedule(**{name: value for name, value in given.items() if name in OPTION_NAMES})
        payload = {name: value for name, value in given.items() if name not in OPTION_NAMES}
        created, changed = await self._schedules.schedule(id, wf, args, rule, payload)
        return ScheduleHandle(id, self, created=created, changed=changed)

    async def schedules(self, after: str | None = None, limit: int = 100) -> list[ScheduleDescription]:
        """Return a page of schedules in order of id, after this id."""
        return await self._schedules.schedules(after, limit)

    async def get_schedule(self, id: str) -> ScheduleDescription:
        """Return a schedule: its rule, next time slots, last outcomes and counters. Raises `ScheduleNotFound`."""
        return await self._schedules.describe(id)

    async def pause_schedule(self, id: str, reason: str = "") -> None:
        """Fire no time slot of a schedule until it is resumed. The pause stays when the schedule is changed."""
        await self._schedules.pause(id, reason)

    async def resume_schedule(self, id: str, catch_up: bool = False) -> None:
        """End the pause of a schedule. With `catch_up`, start the time slots of the pause; otherwise ignore them."""
        await self._schedules.resume(id, catch_up)

    async def delete_schedule(self, id: str) -> bool:
        """Delete a schedule. Runs that it has started continue. False if there is no such schedule."""
        return await self._schedules.delete(id)

    @staticmethod
    def preview(*, count: int = 10, after: datetime | None = None, **rule: Any) -> list[datetime]:
        """Return the next time slots of a rule, given as for `Schedule`, in its zone. Reads no store."""
        return preview_slots(count=count, after=after, **rule)


class ScheduleHandle:
    """A handle on one schedule: whether the call that returned it `created` or `changed` it, and calls about it."""

    __slots__ = ("_client", "changed", "created", "id")

    def __init__(self, id: str, client: ScheduleCalls, *, created: bool, changed: bool) -> None:
        self.id = id
        self.created = created
        self.changed = changed
        self._client = client

    async def describe(self) -> ScheduleDescription:
        """Return the schedule; see `Client.get_schedule`."""
        return await self._client.get_schedule(self.id)

    async def pause(self, reason: str = "") -> None:
        """Fire no time slot until `resume`; see `Client.pause_schedule`."""
        await self._client.pause_schedule(self.id, reason)

    async def resume(self, catch_up: bool = False) -> None:
        """End the pause; see `Client.resume_schedule`."""
        await self._client.resume_schedule(self.id, catch_up)

    async def delete(self) -> bool:
        """Delete the schedule; see `Client.delete_schedule`."""
        return await self._client.delete_schedule(self.id)

    def __repr__(self) -> str:
        return f"<schedule {self.id}>"
