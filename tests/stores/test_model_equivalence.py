"""Random sequences of calls have the same results on the memory store and on the SQL stores."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from perdure.clock import SYSTEM_CLOCK
from perdure.model.queries import RunQuery
from perdure.model.records import (
    DeadLetter,
    Hold,
    Message,
    PublishedValue,
    RunStatus,
    StreamItem,
    Subscription,
    TopicEvent,
)
from perdure.model.turns import TurnExtras
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, IdTaken, Snapshot, UnfinalizedRun
from perdure.stores.sql_rows import unpack
from perdure.stores.sqlite.rows import pack
from perdure.stores.sqlite.store import SqliteStore
from perdure.stores.writes import (
    AppendStream,
    CommitTurn,
    ContinueAs,
    DeliverMessage,
    EndRun,
    FanOut,
    FinalizeRun,
    Observer,
    ObserveRunEnd,
    PublishEvent,
    PutDocument,
    RedirectedEvent,
    ReleaseRun,
    ReplayDeadLetter,
    RewindRun,
    RunPatch,
    SupersedeStream,
    TagRun,
    Write,
)
from perdure.testing.contract.builders import claim, entry, receive, run, worker
from tests.servers import postgres_schemas as schemas

RUNS = ("r", "s", "v")
TOPICS = ("t", "u")
StoreCall = Callable[[Store, "ObservedRuns"], Awaitable[Any]]

ids = st.sampled_from(RUNS)
workers = st.sampled_from(["a", "b", "unknown"])
owners = st.sampled_from([None, "a", "b"])
times = st.integers(100, 110).map(float)
small = st.integers(0, 3)
workflows = st.sampled_from(["flow", "other"])
held = st.sampled_from([None, None, Hold("diverged", "why"), Hold("poison", "why")])
open_statuses = st.sampled_from([RunStatus.PENDING, RunStatus.RUNNING, RunStatus.SUSPENDED])
patches = st.one_of(
    st.none(),
    st.builds(
        RunPatch,
        status=open_statuses,
        owner=owners,
        wake_at=st.none() | times,
        held=held,
        recoveries=small,
    ),
    st.builds(
        RunPatch,
        status=st.sampled_from([RunStatus.SUCCEEDED, RunStatus.FAILED]),
        ended_at=times,
        prune_at=st.none() | times,
        result=st.binary(max_size=3),
    ),
)
locations = st.sampled_from(["x", "y", "z", "x/y", "x/y/z", "xy"])
entries = st.lists(st.builds(entry, locations, small), max_size=2).map(tuple)
continuations = st.none() | st.builds(
    ContinueAs,
    workflow=workflows,
    version=st.just(1),
    input=st.binary(max_size=2),
    first_executed_at=st.none() | times,
    pool=st.sampled_from([None, "default", "gpu"]),
    entries=entries,
)
numbers = st.lists(st.integers(1, 4), max_size=2, unique=True).map(tuple)
targets = st.sampled_from(["0/p", "0/q"])
few_targets = st.lists(targets, max_size=1).map(tuple)
topics = st.sampled_from(TOPICS)
dead_letters = st.builds(
    DeadLetter,
    id=st.sampled_from("de"),
    kind=st.sampled_from(["poison", "event"]),
    at=st.just(1.0),
    reason=st.just("why"),
    event_name=st.sampled_from([None, "paid"]),
)
some_dead_letters = st.just(()) | st.just(()) | dead_letters.map(lambda dead_letter: (dead_letter,))
items = st.lists(
    st.builds(
        StreamItem,
        stream=st.sampled_from("lm"),
        value=st.binary(max_size=1),
        location=locations,
        at=st.just(1.0),
        writer=st.just("w"),
    ),
    max_size=2,
).map(tuple)
subscriptions = st.lists(
    st.builds(Subscription, targets, st.lists(topics, min_size=1, max_size=2).map(tuple)), max_size=2
).map(tuple)
published_values = st.lists(
    st.builds(PublishedValue, st.sampled_from("kl"), st.binary(max_size=1), st.none() | times), max_size=1
).map(tuple)
tags = st.dictionaries(st.sampled_from(["n", "flag"]), st.integers(0, 3) | st.booleans() | st.just("2"), max_size=2)
tag_changes = st.dictionaries(st.sampled_from(["n", "flag"]), st.none() | st.integers(0, 3) | st.just(True), max_size=2)
extras = st.builds(
    TurnExtras,
    dropped=st.just(()) | st.lists(locations, max_size=2).map(tuple),
    subscribe=subscriptions,
    unsubscribe=few_targets,
    released_assignments=st.just(()) | numbers,
    published=published_values,
    streamed=st.just(()) | items,
    dead_letters=some_dead_letters,
    tags=st.just({}) | tag_changes,
)
turns = st.builds(
    CommitTurn,
    run_id=ids,
    base=st.sampled_from([0, 0, 0, 0, 1, -1, -2, -3]),  # relative to the run's last position; see `_aimed`
    turn_id=st.sampled_from(["t1", "t2", "t3", "t4", "t5"]),
    worker=st.sampled_from(["a", "a", "a", "b", "unknown"]),
    owned=st.sampled_from([True, False, False]),
    now=times,
    entries=entries,
    patch=patches,
    seen=small,
    consumed=numbers,
    continue_as=st.none() | st.none() | continuations,
    extras=st.none() | extras,
)
kinds = st.sampled_from(["event", "event", "resume", "cancel", "child", "deferred"])
messages = st.builds(
    Message,
    id=st.sampled_from("mno"),
    kind=kinds,
    policy=st.sampled_from(["discard", "broadcast"]),
    number=small,
    event_id=st.none() | st.just("own"),
)
events = st.builds(
    TopicEvent,
    topic=topics,
    id=st.sampled_from("efgh"),
    body=st.none() | st.binary(max_size=1),
    sent_at=times,
    delivery=st.sampled_from(["all", "all", "after_wait", "after_create"]),
    consume=st.booleans(),
    expires_at=st.none() | st.none() | times,
    event_id=st.none() | st.just("own"),
)
waiting: st.SearchStrategy[Write] = st.builds(
    lambda id, target, topics, now, **more: receive(0, *topics, id=id, target=target, now=now, **more),
    ids,
    targets,
    st.lists(topics, min_size=1, max_size=2),
    times,
    turn_id=st.sampled_from(["w1", "w2", "w3", "w4"]),
    seen=small,
    consumed=numbers,
    released_assignments=st.just(()) | numbers,
)
publishing = st.builds(PublishEvent, event=events, now=times, limit=st.none() | small, page=st.integers(1, 2))
delivering = st.builds(DeliverMessage, run_id=ids, message=messages, now=times, limit=st.none() | small)
on_topics: st.SearchStrategy[Write] = st.one_of(
    publishing,
    st.builds(FanOut, topic=topics, offset=st.integers(1, 4), now=times, page=st.integers(1, 2)),
)
observers = st.builds(Observer, st.sampled_from("pq"), targets)
on_ended: st.SearchStrategy[Write] = st.one_of(
    st.builds(ObserveRunEnd, run_id=ids, observer=st.sampled_from("pq"), target=targets),
    st.builds(
        FinalizeRun,
        run_id=ids,
        now=times,
        notified=st.lists(observers, max_size=2).map(tuple),
        consumed=numbers,
        returned=numbers,
        redirected=st.just(())
        | st.lists(st.builds(RedirectedEvent, st.integers(1, 4), publishing, dead_letters), max_size=2).map(tuple),
        dead_letters=some_dead_letters,
        orphaned_children=st.booleans(),
    ),
    st.builds(FinalizeRun, run_id=ids, now=times, notified=st.lists(observers, max_size=2).map(tuple)),
    st.builds(
        ReplayDeadLetter, dead_letter_id=st.sampled_from("de"), send=publishing | delivering
    ),  # sent under an id of its own; see `_aimed`
    st.builds(
        RewindRun,
        run_id=ids,
        base=st.sampled_from([0, 0, 0, 1, -1]),
        turn_id=st.sampled_from(["t1", "t2", "rewind"]),
        now=times,
        dropped=st.lists(locations, max_size=2).map(tuple),
        entries=entries,
        returned=st.just(()) | st.just((Message(id="all consumed", kind="event"),)),  # see `_aimed`
    ),
)
on_streams: st.SearchStrategy[Write] = st.one_of(
    st.builds(AppendStream, run_id=ids, worker=workers, items=items, first=st.none() | small),
    st.builds(SupersedeStream, run_id=ids, location=locations, writer=st.sampled_from(["w", "x"])),
)
writes: st.SearchStrategy[Write] = st.one_of(
    st.builds(
        lambda id, owner, by, entries, inbox, observer, **more: replace(
            run(id, owner=owner, created_by=by, **more), entries=entries, inbox=inbox, observer=observer
        ),
        ids,
        owners,
        st.sampled_from("pq"),
        st.just(()) | entries,
        st.just(()) | messages.map(lambda message: (message,)),
        st.none() | observers,
        workflow=workflows,
        wake_at=st.none() | times,
        created_at=times,
        parent=st.none() | ids,
        attached=st.booleans(),
        tags=tags,
    ),
    turns,
    turns,
    turns,
    waiting,
    waiting,
    on_topics,
    on_topics,
    on_ended,
    on_streams,
    delivering,
    st.builds(
        EndRun,
        run_id=ids,
        turn_id=st.sampled_from(["t1", "e"]),
        now=times,
        only_if_not_started=st.booleans(),
        prune_after=st.none() | st.just(2.0),
    ),
    st.builds(ReleaseRun, run_id=ids, worker=workers, now=times),
    st.builds(TagRun, run_id=ids, tags=tag_changes),
    st.builds(
        PutDocument,
        kind=st.just("k"),
        id=st.sampled_from("de"),
        base=st.just(0) | st.just(-1),  # the version that it has; see `_with_version`
        body=st.none() | st.binary(max_size=2),
        write_id=st.sampled_from("vw"),
        due_at=st.none() | times,
        expires_at=st.none() | times,
    ),
)


def method_call(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[StoreCall]:
    """Return a strategy of calls of this method with these arguments."""

    def build(**values: Any) -> StoreCall:
        async def call_store(store: Store, observed: ObservedRuns) -> Any:
            given = dict(values)
            if "batch" in values:
                given["batch"] = [await _with_version(write, store) for write in _aimed(values["batch"], observed)]
            return await getattr(store, name)(**given)

        call_store.__qualname__ = f"{name}({values})"
        return call_store

    return st.builds(build, **arguments)


pairs = st.just((("flow", 1), ("other", 1)))
calls = st.one_of(
    method_call("commit", batch=st.lists(writes, min_size=1, max_size=4)),
    method_call("commit", batch=st.lists(writes, min_size=1, max_size=4)),
    method_call("commit", batch=st.lists(writes, min_size=1, max_size=4)),
    method_call("claim", claim=st.builds(claim, workers, times, workflows=pairs, limit=st.integers(1, 2))),
    method_call("retry_held", workflows=pairs, kind=st.just("diverged"), now=times),
    method_call("join", worker=st.builds(worker, workers, lease_until=times)),
    method_call("renew", worker=st.builds(worker, workers, lease_until=times)),
    method_call("fence_worker", worker_id=workers, unless_renewed_after=st.none() | times),
    method_call("release_runs", worker_id=workers, now=times, recovered=st.booleans(), limit=st.just(10)),
    method_call("remove_worker", worker_id=workers),
    method_call("prune", now=times, keep_ids_for=st.sampled_from([0.0, 3.0, 50.0])),
    method_call("remove_dead_letter", dead_letter_id=st.sampled_from("de")),
)


@given(st.lists(calls, max_size=12))
def test_memory_and_sqlite_agree(script: list[StoreCall]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_agree(SqliteStore(f"{folder}/store.db", synchronous="off"), script))


@given(st.lists(calls, max_size=12))
def test_memory_and_postgresql_agree(script: list[StoreCall]) -> None:
    asyncio.run(_agree(schemas.borrow(SYSTEM_CLOCK), script, normalize=_existing_run_id))


def _existing_run_id(result: Any) -> Any:
    """Reduce `IdTaken` to the run's id: PostgreSQL reads the existing record after the batch, with its later writes."""
    if not isinstance(result, list):
        return result
    return [IdTaken(run(each.record.id).record) if isinstance(each, IdTaken) else each for each in result]


async def _agree(
    other: Store, script: list[StoreCall], normalize: Callable[[Any], Any] = lambda result: result
) -> None:
    memory = MemoryStore()
    try:
        for store in (memory, other):
            await store.open(shards=1)
            await store.join(worker("a"))
            await store.join(worker("b"))
            await store.commit([run(id, owner="a") for id in RUNS])
            await store.commit([receive(0, "t", id="s", turn_id="w0"), receive(0, "t", id="v", turn_id="w0")])
        observed = ObservedRuns()
        for step in script:
            observed.update(await memory.load(RUNS))
            expected, got = await step(memory, observed), await step(other, observed)
            assert normalize(_sorted(got)) == normalize(_sorted(expected)), step.__qualname__
            assert await _state(other) == await _state(memory), step.__qualname__
    finally:
        await other.close()


class ObservedRuns:
    """The last positions of the runs, and the events that they have consumed: what a rewind may return."""

    def __init__(self) -> None:
        self.steps = 0
        self.positions: dict[str, int] = {}
        self._events: dict[str, dict[str, Message]] = {}
        self.read: dict[str, tuple[Message, ...]] = {}

    def update(self, snapshots: list[Snapshot | None]) -> None:
        """Record the state of the runs before the next call."""
        found = {each.record.id: each for each in snapshots if each is not None}
        self.steps += 1
        self.positions = {id: each.position for id, each in found.items()}
        self._events = {id: self._events.get(id, {}) for id in found}
        for id, each in found.items():
            unread = {message.id: message for message in each.inbox}
            self.read[id] = tuple(message for key, message in self._events[id].items() if key not in unread)
            self._events[id] |= {key: message for key, message in unread.items() if message.kind == "event"}

    look = update  # alias until the store tests use the new name


def _aimed(batch: list[Write], observed: ObservedRuns) -> list[Write]:
    """Move turns and rewinds to, or next to, the last position of their run. Random positions would all be rejected.

    An event that is replayed from a dead letter, or moved to its topic, gets a unique id. A rewind is the only write of
    its batch, because messages that the batch consumes or delivers could not be distinguished from what it returns.
    """
    aimed: list[Write] = []
    for write in batch:
        if isinstance(write, CommitTurn | RewindRun):
            write = replace(write, base=max(0, observed.positions.get(write.run_id, 0) + write.base))
        if isinstance(write, ReplayDeadLetter):
            write = replace(write, send=_named(write.send, f"replay-{observed.steps}-{len(aimed)}"))
        if isinstance(write, FinalizeRun):
            name = f"moved-{observed.steps}-{len(aimed)}"
            moved = [replace(each, to=_named(each.to, f"{name}-{n}")) for n, each in enumerate(write.redirected)]
            write = replace(write, redirected=tuple(moved))
        if isinstance(write, RewindRun):
            return [replace(write, returned=observed.read.get(write.run_id, ()) if write.returned else ())]
        aimed.append(write)
    return aimed


async def _with_version(write: Write, store: Store) -> Write:
    """Replace the base -1 of a document by its version in this store, or by one that it never had."""
    if not isinstance(write, PutDocument) or write.base == 0:
        return write
    document = await store.document(write.kind, write.id)
    return replace(write, base=10**6 if document is None else document.version)


def _named(send: Any, id: str) -> Any:
    if isinstance(send, PublishEvent):
        return replace(send, event=replace(send.event, id=id))
    return replace(send, message=replace(send.message, id=id))


def _sorted(result: Any) -> Any:
    """Sort a list of ids: each store chooses the order of a page of released runs. Each numbers versions in its way."""
    if isinstance(result, list):
        result = [
            replace(each, version=min(each.version, 1)) if isinstance(each, Committed) else each for each in result
        ]
    return sorted(result) if isinstance(result, list) and all(isinstance(item, str) for item in result) else result


async def _state(store: Store) -> list[Any]:
    """Read everything about the runs, topics and workers of the test."""
    return [
        await store.load(RUNS),
        replace(await store.runs(RunQuery()), scanned=0),  # each store has its own plan
        [await store.count(RunQuery(where=where), 10) for where in ("n>1", "n:2", "-n:*", "flag:true", "error:*")],
        [replace(document, version=0) for document in await store.documents("k")],
        [document.id for document in await store.documents("k", due_by=105.0)],
        await store.topics(),
        [await store.history(id) for id in RUNS],
        [await store.inbox(id, 1) for id in RUNS],
        [(await store.owned_with_messages(id), await store.owned(id)) for id in ("a", "b")],
        await store.next_wake("default"),
        await store.workers(),
        await store.dead_letters(),
        await store.dead_letters(kind="event", event="paid"),
        sorted(map(_with_sorted_observers, await store.unfinalized()), key=repr),
        [await store.open_children(id) for id in RUNS],
        await store.unfinished_broadcasts(),
        [await store.topic(name) for name in TOPICS],
        [await store.published(id) for id in RUNS],
        [await store.stream(id, name) for id in RUNS for name in "lm"],
    ]


def _with_sorted_observers(pending: UnfinalizedRun) -> UnfinalizedRun:
    """Sort the observers: each store chooses their order, and that of runs that ended at the same time."""
    return replace(pending, observers=tuple(sorted(pending.observers, key=repr)))


@given(st.binary() | st.text().map(str.encode))
def test_payloads_are_packed_and_unpacked(payload: bytes) -> None:
    assert unpack(pack(payload)) == payload
