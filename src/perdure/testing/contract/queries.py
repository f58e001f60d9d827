"""Queries, change hints, and values that must come back unchanged."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from perdure.model.queries import RunQuery
from perdure.model.records import EntryStatus, ErrorRecord, Hold, RunStatus
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, Superseded
from perdure.stores.writes import EndRun, RunPatch
from perdure.testing.contract.builders import (
    SHARDS,
    ContractCase,
    accepted_or_refused,
    case,
    claim,
    claim_ids,
    deliver,
    entry,
    load,
    record,
    refused,
    run,
    succeeded,
    suspended,
    turn,
)

MEBIBYTE = 1 << 20
PAYLOADS = (
    None,
    b"",
    b"null",
    b"0",
    b'""',
    '{"name":"Grüße, 世界 🦉\u2028"}'.encode(),
    "\ufeffmark".encode(),
    b"a\x00b",
    b"\xff\xfe\x00",
    b"\xed\xa0\x80",  # a lone surrogate, not valid UTF-8
    bytes(range(256)),
    b'"' + b"x" * MEBIBYTE + b'"',
    b"\xff" * MEBIBYTE,
)


class QueryCases(ContractCase):
    @case
    async def test_runs_are_listed_newest_first(self, store: Store) -> None:
        await store.commit([run("b", created_at=1.0), run("c", created_at=2.0), run("a", created_at=1.0)])
        page = await store.runs(RunQuery())
        assert [row.id for row in page.runs] == ["c", "b", "a"]
        assert page.next is None
        assert page.runs[0] == await record(store, "c")

    @case
    async def test_held_runs_are_selected_by_kind_while_they_are_suspended(self, store: Store) -> None:
        for n, kind in enumerate(("diverged", "paused", "diverged", None, "diverged")):
            held = None if kind is None else Hold(kind, "why", fingerprints=("abc",))
            await store.commit([run(f"r{n}", created_at=float(n), owner="a")])
            await store.commit([turn(0, id=f"r{n}", patch=suspended(500.0 + n, held=held))])
        page = await store.runs(RunQuery(held=True, limit=3))
        assert [row.id for row in page.runs] == ["r4", "r2", "r1"]
        assert page.runs[0].held == Hold("diverged", "why", fingerprints=("abc",))
        rest = await store.runs(RunQuery(held=True, limit=3, after=page.next))
        assert ([row.id for row in rest.runs], rest.next) == (["r0"], None)
        assert [row.id for row in (await store.runs(RunQuery(held="paused"))).runs] == ["r1"]
        assert [row.id for row in (await store.runs(RunQuery(held="diverged", id_prefix="r2"))).runs] == ["r2"]
        assert (await store.runs(RunQuery(held="poison"))).runs == ()
        assert (await store.runs(RunQuery(held=True, status="running"))).runs == ()
        assert await claim_ids(store, claim(now=502.0)) == ["r0", "r1", "r2"]  # executed again: no longer held
        await store.commit([EndRun(run_id="r4", turn_id="end", now=503.0)])
        assert (await store.runs(RunQuery(held=True))).runs == ()
        while await store.release_runs("a", 504.0, recovered=True):
            pass
        assert (await store.runs(RunQuery(held=True))).runs == ()

    @case
    async def test_a_turn_can_make_its_worker_the_owner_of_a_held_run(self, store: Store) -> None:
        held = Hold("diverged", "why")
        await store.commit([run(owner="a"), turn(0, patch=suspended(held=held))])
        taken, late = (
            turn(1, worker=worker, owned=False, patch=RunPatch(status=RunStatus.RUNNING, owner=worker, held=held))
            for worker in ("b", "a")
        )
        assert await store.commit([taken, late]) == [Committed(), Superseded()]
        row = await record(store)
        assert (row.owner, row.status, row.held, row.wake_at) == ("b", RunStatus.RUNNING, held, None)
        assert (await store.runs(RunQuery(held=True))).runs == ()
        assert await store.owned("b") == ["r"]
        assert await store.retry_held([("flow", 1)], "diverged", 20.0) == 0

    @case
    async def test_an_empty_store_has_an_empty_page(self, store: Store) -> None:
        page = await store.runs(RunQuery())
        assert (page.runs, page.next) == ((), None)

    @case
    async def test_runs_are_filtered_by_every_query_field(self, store: Store) -> None:
        await store.commit(
            [
                run("x-1", created_at=1.0, tags={"city": "Bern", "tier": "1"}),
                run("x-2", created_at=2.0, workflow="other", tags={"city": "Bern"}),
                run("x_3", created_at=3.0, parent="x-1"),
                run("y", created_at=4.0, owner="a"),
                EndRun(run_id="x-1", turn_id="end", now=9.0),
            ]
        )
        expected: list[tuple[RunQuery, list[str]]] = [
            (RunQuery(status=RunStatus.CANCELLED), ["x-1"]),
            (RunQuery(status=(RunStatus.CANCELLED, RunStatus.RUNNING)), ["y", "x-1"]),
            (RunQuery(status=()), []),
            (RunQuery(workflow="other"), ["x-2"]),
            (RunQuery(tags={"city": "Bern"}), ["x-2", "x-1"]),
            (RunQuery(tags={"city": "Bern", "tier": "1"}), ["x-1"]),
            (RunQuery(tags={"city": "Ber"}), []),
            (RunQuery(tags={"tier": "2"}), []),
            (RunQuery(tags={}), ["y", "x_3", "x-2", "x-1"]),
            (RunQuery(parent="x-1"), ["x_3"]),
            (RunQuery(id_prefix="x_"), ["x_3"]),
            (RunQuery(id_prefix="x"), ["x_3", "x-2", "x-1"]),
            (RunQuery(id_prefix="%"), []),
            (RunQuery(created_after=2.0), ["y", "x_3", "x-2"]),
            (RunQuery(created_before=2.0), ["x-1"]),
            (RunQuery(created_after=2.0, created_before=3.0, workflow="other"), ["x-2"]),
        ]
        for query, ids in expected:
            assert [row.id for row in (await store.runs(query)).runs] == ids, query

    @case
    async def test_pages_have_no_gaps_or_repeats_while_runs_are_added(self, store: Store) -> None:
        ids = {f"old-{n:02d}" for n in range(25)}
        await store.commit([run(id, created_at=float(n // 4)) for n, id in enumerate(sorted(ids))])
        query, listed, page_no = RunQuery(limit=4), list[str](), 0
        while True:
            page = await store.runs(query)
            listed += [row.id for row in page.runs]
            await store.commit([run(f"new-{page_no}", created_at=50.0 + page_no)])
            page_no += 1
            if page.next is None:
                break
            query = RunQuery(limit=4, after=page.next)
        assert listed == sorted(listed, key=lambda id: (int(id[4:]) // 4, id), reverse=True)
        assert len(listed) == 25
        assert set(listed) == ids

    @case
    async def test_a_page_that_ends_exactly_at_the_last_run_is_the_last(self, store: Store) -> None:
        await store.commit([run(f"r{n}") for n in range(4)])
        first = await store.runs(RunQuery(limit=2))
        assert first.next is not None
        last = await store.runs(RunQuery(limit=2, after=first.next))
        assert (len(last.runs), last.next) == (2, None)

    @case
    async def test_an_invalid_cursor_or_limit_is_refused(self, store: Store) -> None:
        for cursor in ("", "nonsense", "ÿ", "W10=", "WzEsMl0="):
            assert "cursor" in str(await refused(store.runs(RunQuery(after=cursor))))
        await refused(store.runs(RunQuery(limit=0)))

    @case
    async def test_another_number_of_shards_is_refused(self, store: Store) -> None:
        again = await self.again(store)
        assert str(SHARDS) in str(await refused(again.open(shards=SHARDS + 1)))
        assert await store.records(["r"]) == [None], "the first handle still works"

    @case
    async def test_now_returns_a_time_that_does_not_decrease(self, store: Store) -> None:
        first = await store.now()
        assert await store.now() >= first > 0


class ChangeHintCases(ContractCase):
    @case
    async def test_listeners_are_notified_of_runs_that_are_due_have_messages_or_ended(self, store: Store) -> None:
        changes: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        unsubscribe = store.on_change(changes.put_nowait)

        async def wait_for(id: str) -> None:
            while (ids := await asyncio.wait_for(changes.get(), 10)) is not None and id not in ids:
                pass

        await store.commit([run("due")])
        await wait_for("due")
        await store.commit([run(owner="a"), deliver()])
        await wait_for("r")
        await store.commit([turn(0, seen=1, patch=suspended(500.0))])
        await wait_for("r")
        await store.commit([turn(1, owned=False, patch=succeeded())])
        await wait_for("r")
        await claim_ids(store, claim("a"))
        await store.release_runs("a", 150.0, recovered=False)
        await wait_for("due")
        unsubscribe()
        unsubscribe()

    @case
    async def test_a_change_through_another_handle_notifies_listeners(self, store: Store) -> None:
        other = await self.second(store)
        notified = asyncio.Event()
        unsubscribe = store.on_change(lambda ids: notified.set() if ids is None or "due" in ids else None)
        for n in range(500):  # a change hint may be lost, and listening may start late
            await other.commit([run("due", created_by="x"), deliver(f"m{n}", id="due")])
            try:
                await asyncio.wait_for(notified.wait(), 0.1)
                break
            except TimeoutError:
                continue
        unsubscribe()
        assert notified.is_set()


class ValueCases(ContractCase):
    @case
    async def test_payloads_come_back_unchanged(self, store: Store) -> None:
        for n, payload in enumerate(PAYLOADS):
            id = f"r{n}"
            step = entry(value=payload, fingerprint=payload, detail=payload)
            create = run(id, owner="a", input=payload or b"", original_input=payload)
            await store.commit([create, deliver(id=id, body=payload), turn(0, step, id=id, seen=1)])
            await store.commit([turn(1, id=id, patch=replace(succeeded(), result=payload))])
            snapshot = await load(store, id)
            assert snapshot.entries == (step,)
            assert snapshot.inbox[0].body == payload
            row = snapshot.record
            assert (row.input, row.original_input, row.result) == (payload or b"", payload, payload)

    @case
    async def test_every_field_of_an_entry_comes_back(self, store: Store) -> None:
        full = entry(
            "join/~2/charge#1[key \"x\" 'y']",
            3,
            name="chargé 🦉",
            status=EntryStatus.FAILED,
            ordinal=5,
            seq=9,
            error=ErrorRecord("E", "mess\nage", "trace", "here", "m.E", b"\xff", ErrorRecord("C", "")),
            attempts=4,
            generation=2,
            started_at=1.25,
            settled_at=1.5,
            due_at=1e12,
            fingerprint=b"\x01",
            detail=b"{}",
        )
        await store.commit([run(owner="a"), turn(0, full, entry("plain", 4, value=None, status=EntryStatus.PENDING))])
        assert (await load(store)).entries[0] == full
        assert (await store.history("r"))[0].entry == full

    @case
    async def test_similar_unicode_ids_are_distinct(self, store: Store) -> None:
        ids = ["é", "e\u0301", "E", "e", "🦉", "a b", "a'b", 'a"b', "a%b", "a_b", "x" * 512, "Ω", "\uff11"]
        await store.commit([run(id) for id in ids])
        assert [(await record(store, id)).id for id in ids] == ids
        assert sorted(await claim_ids(store, claim())) == sorted(ids)

    @case
    async def test_invalid_text_comes_back_unchanged_or_is_refused(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        for base, location in enumerate(("a\x00b", "\ud800")):
            position = (await load(store)).position
            if await accepted_or_refused(store.commit([turn(position, entry(location, base))])):
                assert (await load(store)).entries[-1].location == location
            else:
                assert (await load(store)).position == position

    @case
    async def test_a_long_history_is_loaded_whole_and_in_order(self, store: Store) -> None:
        await store.commit([run(owner="a")])
        entries = [entry(f"s#{n}", n, seq=n) for n in range(2000)]
        for base in range(0, 2000, 500):
            await store.commit([turn(base, *entries[base : base + 500])])
        snapshot = await load(store)
        assert (snapshot.position, list(snapshot.entries)) == (2000, entries)
