"""What the cases are made of: how one is run, and short ways to write runs, turns and mail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from msgspec.structs import replace

from perdure.errors import StoreError
from perdure.model.records import (
    DeadLetter,
    Entry,
    EntryStatus,
    Message,
    RunRecord,
    RunStatus,
    Subscription,
    TopicEvent,
    WorkerRecord,
)
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Claim, Store
from perdure.stores.results import Snapshot, UnfinalizedRun
from perdure.stores.writes import (
    CommitTurn,
    CreateRun,
    DeliverMessage,
    EndRun,
    FinalizeRun,
    Observer,
    ObserveRunEnd,
    PublishEvent,
    RunPatch,
    Write,
)

SHARDS = 16
FLOW = ("flow", 1)
"""The (workflow, version) of every run that does not say otherwise."""

K = TypeVar("K", bound="ContractCase")


def case(test: Callable[[K, Store], Coroutine[Any, Any, None]]) -> Callable[[K], None]:
    """Turn a case into a plain test method: it gets an open store with the live workers "a" and "b"."""

    def run(self: K) -> None:
        asyncio.run(self.carry_out(lambda store: test(self, store)))

    run.__name__ = test.__name__
    run.__qualname__ = test.__qualname__
    run.__doc__ = test.__doc__
    return run


class ContractCase:
    """What the author of a store gives: one to test, and a second handle on the same data."""

    async def make_store(self) -> Store:
        """A new, empty store, not yet open."""
        raise NotImplementedError

    async def again(self, store: Store) -> Store:
        """Another handle on this store's data, not yet open; for a store in memory the same object."""
        raise NotImplementedError

    async def carry_out(self, test: Callable[[Store], Awaitable[None]]) -> None:
        self._handles: list[Store] = []
        try:
            store = await self._opened(await self.make_store())
            assert await store.join(worker("a"))
            assert await store.join(worker("b"))
            await test(store)
        finally:
            for handle in reversed(self._handles):
                await handle.close()

    async def second(self, store: Store) -> Store:
        """Another handle, open until the case ends."""
        return await self._opened(await self.again(store))

    async def _opened(self, store: Store) -> Store:
        await store.open(shards=SHARDS)
        self._handles.append(store)
        return store


# --- short ways to write ---------------------------------------------------------------------------------------------


def run(id: str = "r", **fields: Any) -> CreateRun:
    """A new run, made at 100.0 by a call named after it."""
    given = {
        "workflow": "flow",
        "version": 1,
        "input": b"{}",
        "created_at": 100.0,
        "created_by": f"call-{id}",
        "seed": 7,
    }
    return CreateRun(RunRecord(id=id, **{**given, **fields}))


def entry(location: str = "charge", asked: int = 0, **fields: Any) -> Entry:
    given = {"kind": "step", "name": location, "status": EntryStatus.SUCCEEDED, "value": b'"done"'}
    return Entry(location=location, call_seq=asked, **{**given, **fields})


def turn(base: int, *entries: Entry, id: str = "r", worker: str = "a", **fields: Any) -> CommitTurn:
    """A turn of worker "a", which owns the run, computed from position `base`."""
    given: dict[str, Any] = {"turn_id": f"{id}-{worker}-{base}", "owned": True, "now": 110.0}
    return CommitTurn(run_id=id, base=base, worker=worker, entries=entries, **{**given, **fields})


def mail(
    message_id: str = "m", *, id: str = "r", now: float = 120.0, limit: int | None = None, **fields: Any
) -> DeliverMessage:
    given: dict[str, Any] = {"kind": "event", "name": "approved", "body": b'{"by":"ada"}'}
    return DeliverMessage(run_id=id, message=Message(id=message_id, **{**given, **fields}), now=now, limit=limit)


def end(turn_id: str = "end", now: float = 150.0, *, id: str = "r", **fields: Any) -> EndRun:
    return EndRun(run_id=id, turn_id=turn_id, now=now, **fields)


def observe(observer: str = "above", target: str = "0/child", *, id: str = "r") -> ObserveRunEnd:
    return ObserveRunEnd(run_id=id, observer=observer, target=target)


def observed(write: CreateRun, observer: str = "above", target: str = "0/child") -> CreateRun:
    """The same new run, observed from its birth."""
    return replace(write, observer=Observer(observer, target))


def settle(id: str = "r", now: float = 160.0, **fields: Any) -> FinalizeRun:
    return FinalizeRun(run_id=id, now=now, **fields)


def letter(id: str = "d", **fields: Any) -> DeadLetter:
    return DeadLetter(id=id, **{"kind": "poison", "at": 1.0, "reason": "why", **fields})


def publish(
    id: str = "e", *, topic: str = "t", now: float = 120.0, limit: int | None = None, page: int = 500, **fields: Any
) -> PublishEvent:
    """An event that is sent now, to its topic."""
    given: dict[str, Any] = {"body": b'{"by":"ada"}', "sent_at": now}
    return PublishEvent(event=TopicEvent(topic=topic, id=id, **{**given, **fields}), now=now, limit=limit, page=page)


def receive(base: int, *topics: str, id: str = "r", target: str = "0/receive", **fields: Any) -> CommitTurn:
    """A turn that leaves a run, which nobody or "a" owns, suspended in a receive from these topics."""
    more = {name: fields.pop(name) for name in ("released_assignments", "unsubscribe") if name in fields}
    extras = TurnExtras(subscribe=(Subscription(target, topics),), **more)
    return turn(base, id=id, **{"owned": False, "patch": suspended(), **fields}, extras=extras)


def waiting(id: str = "r", *topics: str, **fields: Any) -> list[Write]:
    """A new run that waits for events of these topics ("t")."""
    return [run(id, owner="a", **fields), receive(0, *(topics or ("t",)), id=id)]


def worker(id: str, **fields: Any) -> WorkerRecord:
    given: dict[str, Any] = {"pool": "default", "workflows": (FLOW,), "lease_until": 1000.0, "started_at": 90.0}
    return WorkerRecord(id=id, **{**given, **fields})


def claim(worker: str = "a", now: float = 200.0, **fields: Any) -> Claim:
    return Claim(worker=worker, now=now, **{"workflows": (FLOW,), **fields})


def suspended(wake_at: float | None = None, **fields: Any) -> RunPatch:
    """The run waits, and nobody owns it."""
    return RunPatch(status=RunStatus.SUSPENDED, wake_at=wake_at, **fields)


def succeeded(at: float = 110.0, **fields: Any) -> RunPatch:
    return RunPatch(status=RunStatus.SUCCEEDED, result=b'"done"', ended_at=at, **fields)


# --- short ways to ask -----------------------------------------------------------------------------------------------


async def load(store: Store, id: str = "r") -> Snapshot:
    """The run, which must be there."""
    (snapshot,) = await store.load([id])
    assert snapshot is not None, f"run {id!r} is missing"
    return snapshot


async def take(store: Store, claim: Claim) -> list[str]:
    """The ids of the runs that a claim gave."""
    return [claimed.id for claimed in await store.claim(claim)]


async def record(store: Store, id: str = "r") -> RunRecord:
    (found,) = await store.records([id])
    assert found is not None, f"run {id!r} is missing"
    return found


async def assigned(store: Store, *ids: str) -> list[list[str]]:
    """The ids of the unread assignments of each run, in order."""
    return [[each.id for each in await store.inbox(id) if each.kind == "assignment"] for id in ids]


async def held_by(store: Store, topic: str = "t") -> list[str]:
    """The ids of the events that a topic holds, in order of place."""
    return [event.id for event in await store.topic(topic)]


async def duties(store: Store) -> dict[str, UnfinalizedRun]:
    """Every run that still owes something, by id, those that ended first first."""
    return {owing.record.id: owing for owing in await store.unfinalized()}


def locations(snapshot: Snapshot) -> list[str]:
    return [entry.location for entry in snapshot.entries]


async def refused(call: Awaitable[object]) -> StoreError:
    """The error of a call that can never succeed."""
    error = await _error_of(call)
    assert error is not None, "the store took what it must refuse"
    assert not error.retryable, f"{error} would be retried for ever"
    return error


async def taken_or_refused(call: Awaitable[object]) -> bool:
    """Whether a call that a store may refuse was carried out; refusing it means for good."""
    error = await _error_of(call)
    assert error is None or not error.retryable, f"{error} would be retried for ever"
    return error is None


async def _error_of(call: Awaitable[object]) -> StoreError | None:
    try:
        await call
    except StoreError as error:
        return error
    return None
