"""Statements that turns, topics and streams cost, and validity of the cached run states after writes to other runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import apsw
import pytest

from perdure.model.records import PublishedValue, RunStatus, StreamItem
from perdure.model.turns import TurnExtras
from perdure.stores.results import Committed, EventPublished, Superseded
from perdure.stores.sqlite.store import SqliteStore
from perdure.stores.writes import AppendStream, CreateRun, RewindRun, RunPatch, Write
from perdure.testing.contract.builders import (
    assigned,
    claim,
    claim_ids,
    deliver,
    end,
    entry,
    finalize,
    observe,
    publish,
    receive,
    run,
    succeeded,
    suspended,
    turn,
    waiting,
    worker,
)
from perdure.testing.contract.queue_builders import admit_now, configure, queued

STILL_RUNNING = RunPatch(status=RunStatus.RUNNING, owner="a")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


def on(path: str, test: Callable[[SqliteStore], Awaitable[None]]) -> None:
    """Run a test on an open store with the worker "a"."""

    async def main() -> None:
        store = SqliteStore(path, synchronous="off")
        await store.open(shards=16)
        try:
            await store.join(worker("a"))
            await test(store)
        finally:
            await store.close()

    asyncio.run(main())


async def statements_of(store: SqliteStore, *batch: Write) -> list[str]:
    """Return the first words of every statement that the batch executes."""
    seen: list[str] = []

    def trace(cursor: apsw.Cursor, sql: str, bindings: object) -> bool:
        seen.append(" ".join(sql.split()[:3]))
        return True

    writer = store._thread(store._writer)
    await writer.call(lambda connection: setattr(connection, "exec_trace", trace))
    await store.commit(batch)
    await writer.call(lambda connection: setattr(connection, "exec_trace", None))
    return seen


async def vm_steps_of(store: SqliteStore, *batch: Write) -> int:
    """Return how many instructions of SQLite's virtual machine the batch executes, in tens."""
    calls = 0

    def count() -> bool:
        nonlocal calls
        calls += 1
        return False

    writer = store._thread(store._writer)
    await writer.call(lambda connection: connection.set_progress_handler(count, 10))
    await store.commit(batch)
    await writer.call(lambda connection: connection.set_progress_handler(None))
    return calls


# --- turns of cached runs ---------------------------------------------------------------------------------------------


def test_a_step_of_a_cached_run_is_one_insert_without_a_read(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([run(owner="a")])
        await store.commit([turn(0, entry())])
        assert await statements_of(store, turn(1, entry("b", 1))) == [
            "BEGIN IMMEDIATE",
            "PRAGMA data_version",
            "INSERT INTO entries",
            "COMMIT",
        ]

    on(path, test)


def test_a_worker_that_another_process_fences_is_not_cached_as_live(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([run(owner="a")])
        assert await store.commit([turn(0, entry())]) == [Committed()]
        other = SqliteStore(path, synchronous="off")
        await other.open(shards=16)
        try:
            await other.fence_worker("a")
        finally:
            await other.close()
        assert await store.commit([turn(1, entry("b", 1))]) == [Superseded()]

    on(path, test)


def test_a_new_run_is_cached_without_a_read(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([run("q", owner="a"), run("r", owner="a"), run("s", owner="a")])
        assert "SELECT id, pk," not in await statements_of(store, turn(0, entry(), id="r"), turn(0, entry("z"), id="q"))
        assert [[each.entry.location for each in await store.history(id)] for id in "qrs"] == [["z"], ["charge"], []]

    on(path, test)


def test_the_end_of_a_cached_run_reads_nothing(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([run(owner="a")])
        await store.commit([turn(0, entry())])
        assert (await statements_of(store, turn(1, entry("b", 1), patch=succeeded())))[2:] == [
            "INSERT INTO entries",
            "UPDATE runs SET",
            "COMMIT",
        ]

    on(path, test)


def test_a_cached_run_is_not_read_again_after_a_stream_append(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        item = StreamItem(stream="log", value=b"1", location="s", at=1.0, writer="w")
        await store.commit([run(owner="a")])
        await store.commit([turn(0, entry())])
        await store.commit([AppendStream(run_id="r", worker="a", items=(item,), first=0)])
        assert "SELECT id, pk," not in await statements_of(store, turn(1, entry("b", 1)))

    on(path, test)


# --- cost of topics ---------------------------------------------------------------------------------------------------


def test_the_cost_of_a_publish_is_independent_of_other_topics(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([*waiting("first"), *waiting("second")])
        before = await vm_steps_of(store, publish("e1"))
        for n in range(1500):
            await store.commit([*waiting(f"r{n}", f"t{n}"), *waiting(f"s{n}", "t", "u"), publish("e", topic=f"v{n}")])
        assert await vm_steps_of(store, publish("e2")) < 2 * before

    on(path, test)


def test_subscribing_does_not_scan_events_that_the_run_has_seen(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([run(owner="a")])
        before = await vm_steps_of(store, receive(0, "t"))
        position = 1
        for n in range(500):
            await store.commit([publish(f"e{n}", consume=False)])
            await store.commit([receive(position, "t", seen=n + 1, consumed=(n + 1,), target=f"0/receive#{n}")])
            position += 1
        again = TurnExtras(unsubscribe=("0/receive#499",))
        await store.commit([turn(position, owned=False, patch=suspended(), extras=again)])
        assert await vm_steps_of(store, receive(position + 1, "t", seen=500, target="0/last")) < 2 * before
        assert await assigned(store, "r") == [[]]

    on(path, test)


def test_a_released_event_is_offered_to_the_run_again(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([run(owner="a"), receive(0, "t"), receive(1, "t", target="0/other")])
        await store.commit([publish("e1", consume=False), publish("e2", consume=False)])
        back = TurnExtras(released_assignments=(1,))
        await store.commit([turn(2, owned=False, seen=2, consumed=(2,), patch=suspended(), extras=back)])
        await store.commit([receive(3, "t", seen=2, target="0/third")])
        assert await assigned(store, "r") == [["topic/t/1"]], "although the run has seen a later event"

    on(path, test)


# --- validity of cached states ----------------------------------------------------------------------------------------


def busy(id: str) -> list[Write]:
    """Return writes that create a running, cached run with an open receive."""
    return [run(id, owner="a"), receive(0, "t", id=id, patch=STILL_RUNNING), turn(1, entry(), id=id)]


RELEASE_FIRST = TurnExtras(released_assignments=(1,))


@pytest.mark.parametrize(
    ("before", "assigning"),
    [
        ([], publish()),
        ([*waiting("other"), publish()], turn(1, id="other", owned=False, patch=suspended(), extras=RELEASE_FIRST)),
        ([*waiting("other"), publish(), end(id="other")], finalize("other", returned=(1,), orphaned_children=True)),
    ],
)
def test_an_assignment_by_another_write_updates_the_cached_run(
    path: str, before: list[Write], assigning: Write
) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([*before, *busy("r")])
        await store.commit([turn(2, entry("b", 1))])
        results = await store.commit([turn(3, entry("c", 2)), assigning, turn(4, entry("d", 3))])
        assert (results[0], results[-1]) == (Committed(), Committed(has_messages=True))
        assert await store.owned_with_messages("a") == ["r"]
        assert await store.commit([turn(5, entry("e", 4))]) == [Committed(has_messages=True)]
        assert await store.commit([turn(6, entry("f", 5), seen=1, consumed=(1,))]) == [Committed()]
        assert await store.owned_with_messages("a") == []

    on(path, test)


def test_an_observer_of_a_cached_run_makes_its_end_need_finalization(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([run(owner="a")])
        await store.commit([turn(0, entry()), observe(), turn(1, entry("b", 1)), turn(2, patch=succeeded())])
        assert len(await store.unfinalized()) == 1

    on(path, test)


def test_a_cached_run_is_read_again_after_a_rewind(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([run(owner="a")])
        rewind = RewindRun(run_id="r", base=1, turn_id="back", now=300.0, dropped=("charge",))
        results = await store.commit([turn(0, entry()), rewind, turn(2, entry(), owned=False)])
        assert results == [Committed()] * 3
        assert await store.commit([turn(3, entry("b", 1), owned=False)]) == [Committed()]

    on(path, test)


# --- pruning ----------------------------------------------------------------------------------------------------------


def rows_of_runs(connection: apsw.Connection) -> dict[str, int]:
    """Return the number of rows of each table whose rows belong to runs."""
    tables = "SELECT name FROM sqlite_schema WHERE type = 'table' AND sql LIKE '%run_pk%'"
    names = [name for (name,) in connection.execute(tables)]
    return {name: connection.execute(f"SELECT count(*) FROM {name}").get for name in [*names, "runs"]}


def test_a_pruned_run_leaves_no_rows_in_any_table(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        item = StreamItem(stream="log", value=b"1", location="s", at=1.0, writer="w")
        output = TurnExtras(published=(PublishedValue("k", b"1"),), streamed=(item,))
        await store.commit([configure(), queued(tags={"tenant": "acme"})])
        assert await admit_now(store, 1) == ["r"]
        assert await claim_ids(store, claim()) == ["r"]
        await store.commit([*waiting()[1:], publish(consume=False), observe(), deliver()])
        await store.commit([receive(1, "t", target="0/next", seen=2, consumed=(1,))])
        await store.commit([turn(2, entry(), owned=False, extras=output)])
        before = await store._read(rows_of_runs)
        assert all(before.values()), before
        await store.commit([turn(3, owned=False, seen=2, patch=succeeded(prune_at=200.0))])
        (ended,) = await store.unfinalized()
        await store.commit([finalize(notified=ended.observers, consumed=(2,))])
        assert len(await store.prune(200.0, keep_ids_for=50.0)) == 1
        assert set((await store._read(rows_of_runs)).values()) == {0}

    on(path, test)


def test_a_fork_that_releases_its_copy_of_an_assignment_does_not_requeue_the_event(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([*waiting(), publish()])
        (copy,) = await store.inbox("r")
        await store.commit([CreateRun(run("fork", owner="a").record, inbox=(copy,))])
        extras = TurnExtras(released_assignments=(1,))
        await store.commit([turn(0, id="fork", seen=1, patch=suspended(), extras=extras), *waiting("next")])
        assert await assigned(store, "r", "fork", "next") == [["topic/t/1"], [], []]

    on(path, test)


def test_prune_takes_no_write_lock_when_nothing_is_prunable(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([publish(expires_at=500.0), *waiting("r", "u")])
        other = apsw.Connection(path)
        other.execute("BEGIN IMMEDIATE")
        assert await store.prune(499.0, keep_ids_for=50.0) == []
        other.close()
        assert await store.commit([publish("f", topic="u")]) == [EventPublished(1, 1)]

    on(path, test)


def test_connections_keep_one_query_plan_for_all_bound_values(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        for call in (store._write, store._read):
            assert await call(lambda connection: connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, -1)) == 1

    on(path, test)
