"""Whatever is asked of them, in whatever order, the memory store and the SQLite store say the same."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from perdure.records import DeadLetter, Held, Message, RunQuery, RunStatus
from perdure.store.base import CommitTurn, Deliver, EndRun, ReleaseRun, Restart, RunPatch, Store, Write
from perdure.store.memory import MemoryStore
from perdure.store.sqlite import SqliteStore
from perdure.store.sqlite_rows import pack, unpack
from perdure.testing.contract.kit import claim, entry, run, worker

Ask = Callable[[Store, dict[str, int]], Awaitable[Any]]

ids = st.sampled_from(["r", "s"])
workers = st.sampled_from(["a", "b", "nobody"])
owners = st.sampled_from([None, "a", "b"])
moments = st.integers(100, 110).map(float)
small = st.integers(0, 3)
workflows = st.sampled_from(["flow", "other"])
held = st.sampled_from([None, None, Held("diverged", "why"), Held("poison", "why")])
going_on = st.sampled_from([RunStatus.PENDING, RunStatus.RUNNING, RunStatus.SUSPENDED])
patches = st.one_of(
    st.none(),
    st.builds(
        RunPatch,
        status=going_on,
        owner=owners,
        wake_at=st.none() | moments,
        held=held,
        recoveries=small,
    ),
    st.builds(
        RunPatch,
        status=st.sampled_from([RunStatus.SUCCEEDED, RunStatus.FAILED]),
        ended_at=moments,
        prune_at=st.none() | moments,
        result=st.binary(max_size=3),
    ),
)
restarts = st.none() | st.builds(
    Restart, workflow=workflows, version=st.just(1), input=st.binary(max_size=2), begun_at=st.none() | moments
)
numbers = st.lists(st.integers(1, 4), max_size=2, unique=True).map(tuple)
turns = st.builds(
    CommitTurn,
    run_id=ids,
    base=st.sampled_from([0, 0, 0, 0, 1, -1, -2, -3]),  # from where the run is now; see `_aimed`
    turn_id=st.sampled_from(["t1", "t2", "t3", "t4", "t5"]),
    worker=st.sampled_from(["a", "a", "a", "b", "nobody"]),
    owned=st.sampled_from([True, False, False]),
    now=moments,
    entries=st.lists(st.builds(entry, st.sampled_from("xyz"), small), max_size=2).map(tuple),
    patch=patches,
    seen=small,
    consumed=numbers,
    dropped=st.just(()) | numbers,
    restart=st.none() | st.none() | restarts,
    dead_letters=st.just(()) | st.just((DeadLetter(id="d", kind="poison", at=1.0, reason="why"),)),
)
kinds = st.sampled_from(["event", "resume", "cancel"])
writes: st.SearchStrategy[Write] = st.one_of(
    st.builds(
        lambda id, owner, by, **more: run(id, owner=owner, created_by=by, **more),
        ids,
        owners,
        st.sampled_from("pq"),
        workflow=workflows,
        wake_at=st.none() | moments,
    ),
    turns,
    turns,
    turns,
    st.builds(
        Deliver,
        run_id=ids,
        message=st.builds(Message, id=st.sampled_from("mno"), kind=kinds),
        now=moments,
        limit=st.none() | small,
    ),
    st.builds(
        EndRun,
        run_id=ids,
        turn_id=st.sampled_from(["t1", "e"]),
        now=moments,
        unless_begun=st.booleans(),
        prune_after=st.none() | st.just(2.0),
    ),
    st.builds(ReleaseRun, run_id=ids, worker=workers, now=moments),
)


def ask(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Ask]:
    def call(**values: Any) -> Ask:
        def asked(store: Store, positions: dict[str, int]) -> Awaitable[Any]:
            given = {**values, "batch": _aimed(values["batch"], positions)} if "batch" in values else values
            answer: Awaitable[Any] = getattr(store, name)(**given)
            return answer

        asked.__qualname__ = f"{name}({values})"
        return asked

    return st.builds(call, **arguments)


pairs = st.just((("flow", 1), ("other", 1)))
asks = st.one_of(
    ask("commit", batch=st.lists(writes, min_size=1, max_size=4)),
    ask("commit", batch=st.lists(writes, min_size=1, max_size=4)),
    ask("commit", batch=st.lists(writes, min_size=1, max_size=4)),
    ask("claim", claim=st.builds(claim, workers, moments, workflows=pairs, limit=st.integers(1, 2))),
    ask("wake_held", workflows=pairs, kind=st.just("diverged"), now=moments),
    ask("renew", worker=st.builds(worker, workers, lease_until=moments)),
    ask("declare_gone", worker_id=workers, unless_renewed_after=st.none() | moments),
    ask("release", worker_id=workers, now=moments, recovered=st.booleans(), limit=st.just(10)),
    ask("retire", worker_id=workers),
    ask("prune", now=moments),
)


@given(st.lists(asks, max_size=12))
def test_two_stores_agree(script: list[Ask]) -> None:
    asyncio.run(_agree(script))


async def _agree(script: list[Ask]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        memory, sqlite = MemoryStore(), SqliteStore(f"{folder}/store.db", synchronous="off")
        try:
            for store in (memory, sqlite):
                await store.open(shards=1)
                await store.renew(worker("a"))
                await store.renew(worker("b"))
                await store.commit([run("r", owner="a"), run("s", owner="a")])
            for step in script:
                positions = {found.record.id: found.position for found in await memory.load(["r", "s"]) if found}
                expected, got = await step(memory, positions), await step(sqlite, positions)
                assert _sorted(got) == _sorted(expected), step.__qualname__
                assert await _state(sqlite) == await _state(memory), step.__qualname__
        finally:
            await sqlite.close()


def _aimed(batch: list[Write], positions: dict[str, int]) -> list[Write]:
    """Turns at random positions would hardly ever be taken: they are aimed at, or beside, where their run is."""
    return [
        replace(write, base=max(0, positions.get(write.run_id, 0) + write.base))
        if isinstance(write, CommitTurn)
        else write
        for write in batch
    ]


def _sorted(answer: Any) -> Any:
    """The order of a page of released runs is a store's own."""
    return sorted(answer) if isinstance(answer, list) and all(isinstance(item, str) for item in answer) else answer


async def _state(store: Store) -> list[Any]:
    """Everything that can be asked about two runs and their workers."""
    return [
        await store.load(["r", "s"]),
        await store.runs(RunQuery()),
        [await store.history(id) for id in ("r", "s")],
        [await store.inbox(id, 1) for id in ("r", "s")],
        [(await store.mailed(id), await store.owned(id)) for id in ("a", "b")],
        await store.next_wake("default"),
        await store.workers(),
        await store.dead_letters(),
    ]


@given(st.binary() | st.text().map(str.encode))
def test_payloads_are_packed_and_unpacked(payload: bytes) -> None:
    assert unpack(pack(payload)) == payload
