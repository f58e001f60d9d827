"""Queues on PostgreSQL: limits under real concurrency, locks, plans of statements, one snapshot per view."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import asyncpg
import msgspec
import pytest

from perdure.model.queue_records import Take
from perdure.model.records import RunStatus, queue_hint
from perdure.model.turns import TurnExtras
from perdure.stores.postgres import fast_path, queue_reads
from perdure.stores.postgres.pool import ConnectionPool
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.postgres.url import parse_url
from perdure.stores.protocol import Claim
from perdure.stores.queue_rules import PAUSED_IN_QUEUE
from perdure.stores.results import Admitted, Committed, Created, Joined, Superseded
from perdure.stores.writes import LeaveQueue, RunPatch, Write
from perdure.testing.contract.builders import (
    claim,
    claim_ids,
    deliver,
    end,
    entry,
    observe,
    record,
    run,
    succeeded,
    suspended,
    turn,
    worker,
)
from perdure.testing.contract.queue_builders import (
    admit,
    admit_now,
    configure,
    holders,
    place_of,
    queued,
    requeue_ended,
    summary_of,
    take,
    view_of,
    waiting_ids,
)
from tests.servers.postgres import postgres_url, schema_of_its_own
from tests.stores.fast_path_cases import prepare
from tests.stores.postgres.test_fast_path import RecordingStore
from tests.stores.postgres.test_store import EXPLAIN_ALL, applied_not_committed, apply_batch, on, opened, query

__all__ = ["postgres_url"]  # a fixture

COUNTERS = """
    SELECT q.name, p.partition, p.waiting, p.delayed, p.held
    FROM {schema}.partitions p JOIN {schema}.queues q ON q.pk = p.queue_pk WHERE p.is_counted
    ORDER BY q.name, p.partition"""
RECOUNT = """
    SELECT q.name, p.partition, count(*) FILTER (WHERE NOT p.held AND p.eligible_at IS NULL),
           count(*) FILTER (WHERE p.eligible_at IS NOT NULL), count(*) FILTER (WHERE p.held)
    FROM {schema}.places p JOIN {schema}.queues q ON q.pk = p.queue_pk
    WHERE q.is_partitioned OR p.partition <> ''
    GROUP BY q.name, p.partition ORDER BY q.name, p.partition"""


async def check_counters(url: str) -> None:
    """Check that the counters of partitions equal a recount of their places."""
    counted = [tuple(row) for row in await query(url, COUNTERS) if any(row[2:])]
    assert counted == [tuple(row) for row in await query(url, RECOUNT)]


# --- the fast path --------------------------------------------------------------------------------------------------

ROWS = (
    "SELECT to_jsonb(r) - 'pk' FROM {schema}.runs r ORDER BY r.id",
    "SELECT r.id, to_jsonb(e) - 'run_pk' FROM {schema}.entries e JOIN {schema}.runs r ON r.pk = e.run_pk"
    " ORDER BY r.id, e.position",
    "SELECT r.id, to_jsonb(p) - 'run_pk' FROM {schema}.places p JOIN {schema}.runs r ON r.pk = p.run_pk ORDER BY r.id",
    "SELECT to_jsonb(q) FROM {schema}.queues q",
    "SELECT to_jsonb(p) FROM {schema}.partitions p ORDER BY p.partition",
)
ADMITTED: tuple[Write | Claim, ...] = (
    configure(partitioned=True),
    queued("q0", partition="x"),
    queued("q1", partition="x"),
    admit(1, take("x", 1)),
    claim(now=400.0),
)
SCENARIOS: dict[str, tuple[Sequence[Write | Claim], Write]] = {
    "the end of a run with a slot": (ADMITTED, turn(0, entry(), id="q0", patch=succeeded())),
    "a step of a run with a slot": (ADMITTED, turn(0, entry(), id="q0")),
    "a turn of a run that waits": (ADMITTED, turn(0, entry(), id="q1")),
    "the end of a run that has left its queue": (
        (*ADMITTED, LeaveQueue(run_id="q0", queue="q", now=401.0)),
        turn(0, entry(), id="q0", patch=succeeded()),
    ),
    "the end of another run": (ADMITTED, turn(0, entry(), patch=succeeded())),
    "a new run without a queue": (ADMITTED, run("new", owner="a")),
    "a new run with text tags": (ADMITTED, run("new", owner="a", tags={"team": "a", "n": "1"})),
    "a new run with a typed tag": (ADMITTED, run("new", owner="a", tags={"n": 1, "team": "a"})),
    "a new run below a queue": (ADMITTED, run("new", owner="a", ancestor_queues=("q",))),
}
TAGS = (
    "SELECT r.id, to_jsonb(t) - 'run_pk' FROM {schema}.run_tags t JOIN {schema}.runs r ON r.pk = t.run_pk ORDER BY 1, 2"
)


def apply(before: Sequence[Write | Claim], write: Write) -> list[Any]:
    """Return the result of a write, and the rows and notifications that it left."""

    async def main(url: str) -> list[Any]:
        store = RecordingStore(url)
        await store.open(shards=16)
        try:
            await prepare(store, before)
            notified: list[Any] = []
            store.on_change(notified.append)
            return [await store.commit([write]), [await query(url, text) for text in (*ROWS, TAGS)], notified]
        finally:
            await store.close()

    with schema_of_its_own() as url:
        return asyncio.run(main(url))


@pytest.mark.parametrize("what", SCENARIOS)
def test_fast_path_equals_the_general_path_with_queues(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = SCENARIOS[what]
    fast = apply(before, write)
    monkeypatch.setattr(fast_path, "call", lambda write: None)
    assert fast == apply(before, write)


def test_run_without_queue_and_tags_costs_one_statement() -> None:
    async def main(url: str) -> list[list[str]]:
        store = RecordingStore(url)
        await store.open(shards=16)
        await store.join(worker("a"))
        called = []
        for write in (run("new", owner="a"), turn(0, entry(), id="new"), turn(1, entry("x", 1), patch=succeeded())):
            await store.commit([write])
            called.append(list(store.called))
        await store.close()
        return called

    with schema_of_its_own() as url:
        assert asyncio.run(main(url)) == [
            ["fast_create_run"],
            ["fast_commit_turn"],
            ["fast_commit_turn", "commit_write"],
        ]


# --- limits under concurrency ---------------------------------------------------------------------------------------


def test_concurrent_admitters_never_exceed_the_limit(postgres_url: str) -> None:
    """Eight tasks over two pools of connections, 200 admissions each. Runs end in batches, so that many slots return
    between two statements: a view that mixed snapshots would count some of them twice."""
    limit, tasks, admissions = 10, 8, 200

    async def test(store: PostgresStore) -> None:
        handles = (store, await opened(postgres_url))
        await store.commit([configure(concurrency=limit)])
        for first in range(0, 2000, 500):
            await store.commit([queued(f"q{n:04}") for n in range(first, first + 500)])
        most: list[int] = []
        applied = Counter[str]()

        async def work(n: int) -> None:
            handle = handles[n % 2]
            for _ in range(admissions):
                view = await view_of(handle)
                most.append(view.held)
                (result,) = await handle.commit([admit(view.version, max(0, limit - view.held))])
                applied[type(result).__name__] += 1
                slots = await holders(handle)
                most.append(len(slots))
                await handle.commit([end(f"end-{n}", id=id) for id in slots[n % 2 :: 2]])

        await asyncio.gather(*(work(n) for n in range(tasks)))
        assert max(most) == limit, "never more, and at times as many as it may"
        assert applied["Superseded"] > 0, "the tasks did race"
        assert applied["Admitted"] + applied["Superseded"] == tasks * admissions
        await handles[1].close()

    on(postgres_url, test)


def test_view_is_one_statement(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement reads one snapshot if it calls no function that takes another one."""

    async def test(store: PostgresStore) -> None:
        await store.commit([configure(), queued("q0")])
        statements: list[str] = []
        fetch = store._open.fetch

        async def recorded(text: str, *values: Any) -> Any:
            statements.append(text)
            return await fetch(text, *values)

        monkeypatch.setattr(store._open, "fetch", recorded)
        await view_of(store)
        assert len(statements) == 1
        called = set(re.findall(r"(\w+)\s*\(", queue_reads.QUEUE_VIEW)) & {
            row[0]
            for row in await query(
                postgres_url,
                "SELECT proname FROM pg_proc WHERE pronamespace = $1::regnamespace",
                parse_url(postgres_url).quoted,
            )
        }
        assert called == set()

    on(postgres_url, test)


def test_locked_place_ends_a_take(postgres_url: str) -> None:
    """It is never passed over: the runs behind it wait, in its partition alone."""

    async def test(store: PostgresStore) -> None:
        await store.commit([configure(partitioned=True)])
        await store.commit([queued(f"{name}{n}", partition=name) for name in "xy" for n in range(4)])
        version = (await view_of(store)).version
        async with applied_not_committed(postgres_url, [deliver(id="x1")]):
            (result,) = await store.commit([admit(version, take("x", 3), take("y", 3))])
            assert result == Admitted(("x0", "y0", "y1", "y2"), 0, version + 1)
        view = await view_of(store)
        assert [(each.partition, each.waiting, each.held, each.taken) for each in view.partitions] == [
            ("x", 3, 1, 1),
            ("y", 1, 3, 3),
        ]
        assert await admit_now(store, take("x", 3)) == ["x1", "x2", "x3"]
        await check_counters(postgres_url)

    on(postgres_url, test)


def test_locked_run_delays_its_promotion(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.commit([configure(), *(queued(f"d{n}", eligible_at=150.0 + n) for n in range(3))])
        async with applied_not_committed(postgres_url, [deliver(id="d1")]):
            assert await admit_now(store, promote=9) == []
            assert [(await place_of(store, f"d{n}")).eligible_at for n in range(3)] == [None, 151.0, 152.0]
        assert await admit_now(store, 9, promote=9) == ["d0", "d1", "d2"]

    on(postgres_url, test)


def test_partition_that_another_transaction_holds_does_not_block_a_promotion(postgres_url: str) -> None:
    """A promotion learns late which partitions it needs, and then waits for none: here one that was locked before."""

    async def test(store: PostgresStore) -> None:
        await store.commit([configure(partitioned=True), queued("d0", partition="x", eligible_at=150.0)])
        connection = await asyncpg.connect(parse_url(postgres_url).dsn)
        schema = parse_url(postgres_url).quoted
        async with connection.transaction():
            await connection.execute(f"SELECT FROM {schema}.partitions FOR NO KEY UPDATE")
            await connection.execute(f"SET LOCAL search_path = {schema}; SET LOCAL lock_timeout = '5s'")
            other = await asyncpg.connect(parse_url(postgres_url).dsn)
            await other.execute(f"SET search_path = {schema}; SET lock_timeout = '5s'")
            promoted = await other.fetchval("SELECT promote_places(q, 200.0, 5) FROM queues q")
            assert promoted == 0
            await other.close()
        await connection.close()
        assert await admit_now(store, take("x"), promote=1) == ["d0"]
        await check_counters(postgres_url)

    on(postgres_url, test)


def test_no_deadlock_between_starts_with_keys_ends_and_admissions(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of several kinds of writes about the same partitions, keys and runs, in different orders."""
    rounds, names, keys = 40, [f"p{n}" for n in range(6)], [f"k{n}" for n in range(5)]
    deadlocks: list[str] = []
    fetch = ConnectionPool._fetch

    async def counted(self: ConnectionPool, text: str, values: tuple[Any, ...]) -> Any:
        try:
            return await fetch(self, text, values)
        except asyncpg.DeadlockDetectedError as error:
            deadlocks.append(f"{text}: {error.detail}")
            raise

    monkeypatch.setattr(ConnectionPool, "_fetch", counted)

    async def start(store: PostgresStore, n: int) -> None:
        for i in range(rounds):
            order = 1 if (n + i) % 2 else -1
            mode = ("existing", "replace")[i % 2]
            starts: list[Write] = [queued(f"s{n}-{i}-{k}", partition=names[k], dedupe=key, on_duplicate=mode)
                      for k, key in enumerate(keys)]  # fmt: skip
            plain = [queued(f"t{n}-{i}-{k}", partition=name) for k, name in enumerate(names)]
            await store.commit([*starts[::order], *plain[::order]])

    async def finish(store: PostgresStore, n: int) -> None:
        for i in range(rounds):
            order = 1 if (n + i) % 2 else -1
            ids = (await holders(store))[:12][::order]
            waiting = (await waiting_ids(store, limit=12))[5:9][::order]
            await store.commit([end(f"e{n}-{i}", id=id) for id in (*ids[::2], *waiting, *ids[1::2])])

    async def admit_some(store: PostgresStore, n: int) -> None:
        for i in range(rounds):
            order = 1 if (n + i) % 2 else -1
            version = (await view_of(store)).version
            takes = tuple(Take(partition=name, count=2, turn=i) for name in names[::order])
            writes: list[Write] = [admit(version, *takes), end(f"a{n}-{i}", id="missing")]
            await store.commit(writes[::order])

    async def test(store: PostgresStore) -> None:
        handles = (store, await opened(postgres_url), await opened(postgres_url))
        await store.commit([configure(partitioned=True)])
        work = (start, finish, admit_some)
        await asyncio.gather(*(work[n % 3](handles[n % len(handles)], n) for n in range(12)))
        assert deadlocks == []
        await check_counters(postgres_url)
        for each in handles[1:]:
            await each.close()

    on(postgres_url, test)


def test_start_whose_key_moved_is_repeated(postgres_url: str) -> None:
    """The run that has the key was locked by another transaction when the start got the key: the batch is repeated."""

    async def test(store: PostgresStore) -> None:
        await store.commit([configure(), queued("q0", dedupe="k")])
        async with applied_not_committed(postgres_url, [end(id="q0")]):
            replacing = asyncio.ensure_future(store.commit([queued("q1", dedupe="k", on_duplicate="replace")]))
            while not await query(postgres_url, "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
                assert not replacing.done(), "it must wait for the run that has the key"
        assert await replacing == [Created(owned=False)]
        assert await store.commit([queued("q2", dedupe="k", on_duplicate="replace")]) == [Joined("q1", replaced=True)]

    on(postgres_url, test)


# --- rules in the schema --------------------------------------------------------------------------------------------


def test_run_that_waits_cannot_be_due(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.commit([configure(), queued("q0")])
        with pytest.raises(asyncpg.CheckViolationError, match="runs_waiting_not_due"):
            await query(postgres_url, "UPDATE {schema}.runs SET wake_at = 1 WHERE id = 'q0'")

    on(postgres_url, test)


def test_hold_of_a_waiting_run_is_that_of_the_rules(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        ((stored,),) = await query(postgres_url, "SELECT {schema}.paused_in_queue()")
        assert stored.encode() == msgspec.json.encode(PAUSED_IN_QUEUE)

    on(postgres_url, test)


def test_queue_that_gets_partitions_counts_its_places(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.commit([configure(), *(queued(f"q{n}") for n in range(5)), queued("d", eligible_at=900.0)])
        assert await admit_now(store, 2) == ["q0", "q1"]
        assert await query(postgres_url, COUNTERS) == []
        version = (await view_of(store)).version
        (result,) = await store.commit([configure(base=version, partitioned=True)])
        assert result == Committed(version=version + 1)
        await check_counters(postgres_url)
        await store.commit([end(id="q0"), end(id="q2"), queued("q9", partition="x"), queued("q8")])
        await check_counters(postgres_url)
        await store.commit([configure(base=version + 1, partitioned=False)])
        await store.commit([queued("q7"), end(id="q1")])
        await check_counters(postgres_url)
        view = await view_of(store)
        assert sorted((each.partition, each.waiting, each.held) for each in view.partitions) == [
            ("", 4, 0),
            ("x", 1, 0),
        ]

    on(postgres_url, test)


def test_starts_during_a_change_of_counting_are_counted(postgres_url: str) -> None:
    """The start has read that its queue has no partitions; the change waits for the end of its transaction."""

    async def test(store: PostgresStore) -> None:
        await store.commit([configure(), queued("q0")])
        async with applied_not_committed(postgres_url, [queued("q1")]):
            changing = asyncio.ensure_future(store.commit([configure(base=1, partitioned=True)]))
            while not await query(postgres_url, "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
                assert not changing.done(), "it must wait for the start"
        assert await changing == [Committed(version=2)]
        ((_, partition, waiting, _, _),) = await query(postgres_url, COUNTERS)
        assert (partition, waiting) == ("", 2)

    on(postgres_url, test)


def test_unused_partitions_are_pruned(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.commit([configure(partitioned=True)])
        await store.commit([queued(name, partition=name) for name in ("ended", "state", "kept", "waits")])
        await store.commit([queued("delayed", partition="delayed", eligible_at=900.0)])
        await admit_now(store, take("state", state=b"window"), take("kept", state=b"window", keep_until=500.0))
        await store.commit([end(id=id) for id in ("ended", "state", "kept")])
        names = "SELECT partition FROM {schema}.partitions ORDER BY partition"
        await store.prune(300.0)
        assert [row[0] for row in await query(postgres_url, names)] == ["delayed", "kept", "state", "waits"]
        await store.prune(500.0)
        assert [row[0] for row in await query(postgres_url, names)] == ["delayed", "state", "waits"]
        assert await admit_now(store, take("delayed"), promote=1, now=900.0) == ["delayed"]

    on(postgres_url, test)


# --- cost -----------------------------------------------------------------------------------------------------------


def test_statements_of_queue_writes_use_indexes(postgres_url: str) -> None:
    """With plans made while tables are small: none scans a table, or reads rows that it does not need."""
    target, many = parse_url(postgres_url), 200
    ids = [f"q{n:03}" for n in range(many)]
    batches: list[list[Write]] = [
        [configure(), configure("parts", partitioned=True)],
        [queued("warm"), queued("warm-2", queue="parts", partition="x", dedupe="k")],
        [admit(1, 1, queue="q", promote=1), admit(1, take("x"), queue="parts")],
        [end(id="warm"), end(id="warm-2")],
        [queued(id, queue="parts", partition=f"p{n % 50}") for n, id in enumerate(ids)],
        [queued(f"plain-{id}") for id in ids],
        [queued(f"late-{id}", queue="parts", partition=f"p{n % 50}", eligible_at=150.0) for n, id in enumerate(ids)],
        [queued(f"key-{n}", queue="parts", partition="x", dedupe=f"k{n}") for n in range(20)],
        [queued(f"join-{n}", queue="parts", dedupe=f"k{n}", on_duplicate="replace") for n in range(20)],
        [admit(2, 100, queue="q"), admit(2, *(take(f"p{n}", 2) for n in range(50)), queue="parts", promote=100)],
        [end(id=id) for id in ids[:100]],
        [requeue_ended(1, id=id) for id in ids[:50]],
        [
            turn(0, owned=False, id=f"plain-{id}", patch=RunPatch(status=RunStatus.RUNNING, owner="a"))
            for id in ids[:100]
        ],
        [turn(1, id=f"plain-{id}", patch=succeeded(prune_at=200.0)) for id in ids[:100]],
    ]

    async def test(store: PostgresStore) -> None:
        plans: list[str] = []
        connection = await asyncpg.connect(target.dsn)
        connection.add_log_listener(lambda _, message: plans.append(str(message)))
        await connection.execute(EXPLAIN_ALL + "; SET auto_explain.log_analyze = on")
        for number, batch in enumerate(batches):
            await apply_batch(connection, target, batch)
            if number == 2:
                await connection.execute("ANALYZE")
        await connection.close()
        ours = [plan for plan in plans if "typeinfo_tree" not in plan]
        assert len(ours) > 100
        scanned = {table for plan in ours for table in re.findall(r"Seq Scan on (\w+)", plan)}
        assert scanned <= {"workers"}, "few rows"
        repeated = [(int(times), plan) for plan in ours for times in re.findall(r"loops=(\d+)", plan)]
        assert [plan for times, plan in repeated if times > 2 * many] == []
        skipped = [(int(rows), plan) for plan in ours for rows in re.findall(r"Rows Removed by[^:]*: (\d+)", plan)]
        assert [plan for rows, plan in skipped if rows > 2 * many] == []

    on(postgres_url, test)


READS = {
    "view": (queue_reads.QUEUE_VIEW, ("q", 200.0, 100)),
    "queues": (queue_reads.QUEUES, ()),
    "place": (queue_reads.PLACE, ("r-0001",)),
    "places ahead": (queue_reads.PLACES_AHEAD, ("r-0001", 1000)),
    "places": queue_reads.places_of("q", None, None, 100, False),
    "held places": queue_reads.places_of("q", "x", None, 100, True),
}


def test_reads_of_queues_use_indexes(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.commit([configure(partitioned=True), configure("other")])
        await store.commit([queued(f"r-{n:04}", partition=f"p{n % 300}") for n in range(3000)])
        connection = await asyncpg.connect(parse_url(postgres_url).dsn)
        schema = parse_url(postgres_url).quoted
        await connection.execute(f"ANALYZE {schema}.runs; ANALYZE {schema}.places; ANALYZE {schema}.partitions")
        await connection.execute("SET plan_cache_mode = force_generic_plan")
        for what, (text, values) in READS.items():
            statement = await connection.prepare(text.format(schema=schema))
            plan = str(await statement.explain(*values))
            scanned = re.findall(r"'Seq Scan'.{0,200}?'Relation Name': '(\w+)'", plan)
            assert set(scanned) <= {"queues"}, f"{what}\n{plan}"
        await connection.close()

    on(postgres_url, test)


# --- change hints ---------------------------------------------------------------------------------------------------


def test_hints_of_many_queues_reach_another_process(postgres_url: str) -> None:
    """More names than a notification can carry: its receiver is notified that anything may have changed."""

    async def test(store: PostgresStore) -> None:
        other = await opened(postgres_url)
        await store.commit([configure("one")])
        heard: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        other.on_change(heard.put_nowait)
        while not heard.empty():
            heard.get_nowait()
        await store.commit([queued("q0", queue="one")])
        async with asyncio.timeout(20):
            while queue_hint("one") not in (await heard.get() or ()):
                pass
            await store.commit([configure(f"queue-{'x' * 80}-{n}") for n in range(200)])
            while await heard.get() is not None:
                pass
        await other.close()

    on(postgres_url, test)


def test_change_hints_contain_names_only(postgres_url: str) -> None:
    """A turn that changes nothing for others has none: consumers read each as a name."""

    async def test(store: PostgresStore) -> None:
        heard: list[Any] = []
        store.on_change(heard.append)
        running = RunPatch(status=RunStatus.RUNNING, owner="a")
        await store.commit([turn(0, patch=running)])
        await store.commit([turn(1, patch=running, extras=TurnExtras(tags={"n": 1}))])
        await store.commit([turn(2, patch=running, extras=TurnExtras(tags={"n": 2})), run("other")])
        await asyncio.sleep(0)  # notifications are callbacks of the loop
        assert heard == [frozenset({"other"})]

    on(postgres_url, test)


def test_paused_waiting_run_is_not_retried(postgres_url: str) -> None:
    """Its hold is a mark of the queue, not one that a change of the code ends."""

    async def test(store: PostgresStore) -> None:
        await store.commit([configure(), queued("q0"), deliver("m", id="q0", kind="pause")])
        assert await store.retry_held([("flow", 1)], "paused", 300.0) == 0
        assert (await record(store, "q0")).held == PAUSED_IN_QUEUE
        assert await claim_ids(store, claim(now=400.0)) == []

    on(postgres_url, test)


def test_stale_admission_in_a_batch_does_not_affect_the_others(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.commit([configure(), queued("q0"), observe(id="r")])
        results = await store.commit([admit(9, 1), turn(0, patch=suspended(500.0)), queued("q1"), admit(1, 2)])
        assert [type(each) for each in results] == [Superseded, Committed, Created, Admitted]
        assert await holders(store) == ["q0", "q1"]
        assert (await summary_of(store)).waiting == 0

    on(postgres_url, test)
