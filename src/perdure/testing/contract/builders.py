"""Builders for the contract cases: how a case runs, and short calls for runs, turns, messages and events."""

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
"""The (workflow, version) of every run by default."""

K = TypeVar("K", bound="ContractCase")


def case(test: Callable[[K, Store], Coroutine[Any, Any, None]]) -> Callable[[K], None]:
    """Turn a case into a plain test method. The case gets an open store with the live workers "a" and "b"."""

    def run(self: K) -> None:
        asyncio.run(self.run_case(lambda store: test(self, store)))

    run.__name__ = test.__name__
    run.__qualname__ = test.__qualname__
    run.__doc__ = test.__doc__
    return run


class ContractCase:
    """What the author of a store implements: an empty store, and a second handle on the same data."""

    async def make_store(self) -> Store:
        """Return a new, empty store, not yet open."""
        raise NotImplementedError

    async def again(self, store: Store) -> Store:
        """Return another handle on this store's data, not yet open; for a store in memory the same object."""
        raise NotImplementedError

    async def run_case(self, test: Callable[[Store], Awaitable[None]]) -> None:
        """Run a case on a new store with the workers "a" and "b", and close all its handles."""
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
        """Return another handle, open until the case ends."""
        return await self._opened(await self.again(store))

    async def _opened(self, store: Store) -> Store:
        await store.open(shards=SHARDS)
        self._handles.append(store)
        return store


# --- writes and records ----------------------------------------------------------------------------------------------


def run(id: str = "r", **fields: Any) -> CreateRun:
    """Build a new run, created at 100.0 by a call named after it."""
    given = {
        "workflow": "flow",
        "version": 1,
        "input": b"{}",
        "created_at": 100.0,
        "created_by": f"call-{id}",
        "seed": 7,
    }
    return CreateRun(RunRecord(id=id, **{**given, **fields}))


def entry(location: str = "charge", call_seq: int = 0, **fields: Any) -> Entry:
    """Build the entry of a step that succeeded."""
    given = {"kind": "step", "name": location, "status": EntryStatus.SUCCEEDED, "value": b'"done"'}
    return Entry(location=location, call_seq=call_seq, **{**given, **fields})


def turn(base: int, *entries: Entry, id: str = "r", worker: str = "a", **fields: Any) -> CommitTurn:
    """Build a turn of worker "a", which owns the run, computed from position `base`."""
    given: dict[str, Any] = {"turn_id": f"{id}-{worker}-{base}", "owned": True, "now": 110.0}
    return CommitTurn(run_id=id, base=base, worker=worker, entries=entries, **{**given, **fields})


def deliver(
    message_id: str = "m", *, id: str = "r", now: float = 120.0, limit: int | None = None, **fields: Any
) -> DeliverMessage:
    """Build the delivery of an event to a run's inbox."""
    given: dict[str, Any] = {"kind": "event", "name": "approved", "body": b'{"by":"ada"}'}
    return DeliverMessage(run_id=id, message=Message(id=message_id, **{**given, **fields}), now=now, limit=limit)


def end(turn_id: str = "end", now: float = 150.0, *, id: str = "r", **fields: Any) -> EndRun:
    """Build an external end of a run."""
    return EndRun(run_id=id, turn_id=turn_id, now=now, **fields)


def observe(observer: str = "above", target: str = "0/child", *, id: str = "r") -> ObserveRunEnd:
    """Build the observation of a run's end by another run."""
    return ObserveRunEnd(run_id=id, observer=observer, target=target)


def observed(write: CreateRun, observer: str = "above", target: str = "0/child") -> CreateRun:
    """Return the same new run, observed from its creation."""
    return replace(write, observer=Observer(observer, target))


def finalize(id: str = "r", now: float = 160.0, **fields: Any) -> FinalizeRun:
    """Build a finalization of an ended run."""
    return FinalizeRun(run_id=id, now=now, **fields)


def dead_letter(id: str = "d", **fields: Any) -> DeadLetter:
    """Build a dead letter."""
    return DeadLetter(id=id, **{"kind": "poison", "at": 1.0, "reason": "why", **fields})


def publish(
    id: str = "e", *, topic: str = "t", now: float = 120.0, limit: int | None = None, page: int = 500, **fields: Any
) -> PublishEvent:
    """Build the publication of an event that is sent now."""
    given: dict[str, Any] = {"body": b'{"by":"ada"}', "sent_at": now}
    return PublishEvent(event=TopicEvent(topic=topic, id=id, **{**given, **fields}), now=now, limit=limit, page=page)


def receive(base: int, *topics: str, id: str = "r", target: str = "0/receive", **fields: Any) -> CommitTurn:
    """Build a turn that suspends a run, without an owner or owned by "a", in a receive from these topics."""
    more = {name: fields.pop(name) for name in ("released_assignments", "unsubscribe") if name in fields}
    extras = TurnExtras(subscribe=(Subscription(target, topics),), **more)
    return turn(base, id=id, **{"owned": False, "patch": suspended(), **fields}, extras=extras)


def waiting(id: str = "r", *topics: str, **fields: Any) -> list[Write]:
    """Build a new run that waits for events of these topics (default "t")."""
    return [run(id, owner="a", **fields), receive(0, *(topics or ("t",)), id=id)]


def worker(id: str, **fields: Any) -> WorkerRecord:
    """Build a live worker of the default pool."""
    given: dict[str, Any] = {"pool": "default", "workflows": (FLOW,), "lease_until": 1000.0, "started_at": 90.0}
    return WorkerRecord(id=id, **{**given, **fields})


def claim(worker: str = "a", now: float = 200.0, **fields: Any) -> Claim:
    """Build a claim of due runs of the default workflow."""
    return Claim(worker=worker, now=now, **{"workflows": (FLOW,), **fields})


def suspended(wake_at: float | None = None, **fields: Any) -> RunPatch:
    """Build the patch of a run that is suspended and has no owner."""
    return RunPatch(status=RunStatus.SUSPENDED, wake_at=wake_at, **fields)


def succeeded(at: float = 110.0, **fields: Any) -> RunPatch:
    """Build the patch of a run that succeeded."""
    return RunPatch(status=RunStatus.SUCCEEDED, result=b'"done"', ended_at=at, **fields)


# --- reads -----------------------------------------------------------------------------------------------------------


async def load(store: Store, id: str = "r") -> Snapshot:
    """Load a run, which must exist."""
    (snapshot,) = await store.load([id])
    assert isinstance(snapshot, Snapshot), f"run {id!r} is missing"
    return snapshot


async def claim_ids(store: Store, claim: Claim) -> list[str]:
    """Claim runs and return their ids."""
    return [claimed.id for claimed in await store.claim(claim)]


async def record(store: Store, id: str = "r") -> RunRecord:
    """Return the row of a run, which must exist."""
    (found,) = await store.records([id])
    assert isinstance(found, RunRecord), f"run {id!r} is missing"
    return found


async def assigned(store: Store, *ids: str) -> list[list[str]]:
    """Return the ids of the unread assignments of each run, in order."""
    return [[each.id for each in await store.inbox(id) if each.kind == "assignment"] for id in ids]


async def stored_events(store: Store, topic: str = "t") -> list[str]:
    """Return the ids of the events that a topic stores, in order of offset."""
    return [event.id for event in await store.topic(topic)]


async def unfinalized(store: Store) -> dict[str, UnfinalizedRun]:
    """Return all runs that need finalization, by id, in the order in which they ended."""
    return {pending.record.id: pending for pending in await store.unfinalized()}


def locations(snapshot: Snapshot) -> list[str]:
    """Return the locations of all entries, in order of position."""
    return [entry.location for entry in snapshot.entries]


async def refused(call: Awaitable[object]) -> StoreError:
    """Return the error of a call that the store must refuse for good."""
    error = await _error_of(call)
    assert error is not None, "the store accepted what it must refuse"
    assert not error.retryable, f"{error} is retryable and would be retried without end"
    return error


async def accepted_or_refused(call: Awaitable[object]) -> bool:
    """Return whether a call that a store may refuse was accepted; a refusal must not be retryable."""
    error = await _error_of(call)
    assert error is None or not error.retryable, f"{error} is retryable and would be retried without end"
    return error is None


async def _error_of(call: Awaitable[object]) -> StoreError | None:
    try:
        await call
    except StoreError as error:
        return error
    return None
