"""Filters: every field and operator, pages under a filter, counts and bare pages."""

from __future__ import annotations

from msgspec.structs import replace

from perdure.model.filter_match import matches
from perdure.model.queries import RunQuery
from perdure.model.queue_records import Place, QueueSettings
from perdure.model.records import ErrorRecord, Hold, RunRecord, RunStatus, Wait
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import SCAN_LIMIT, Store
from perdure.stores.writes import ConfigureQueue, RunPatch, TagRun
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    claim,
    claim_ids,
    end,
    publish,
    refused,
    run,
    turn,
    waiting,
)
from perdure.testing.contract.tags import found
from perdure.testing.contract.waiting_runs import waits_for

BATCH = 1000


def failed(type: str, at: float) -> RunPatch:
    """Build the patch of a run that failed with this type of error."""
    return RunPatch(status=RunStatus.FAILED, error=ErrorRecord(type, "message"), ended_at=at)


async def page_ids(store: Store, query: RunQuery) -> list[list[str]]:
    """Return the ids of all pages; every page examines at most `SCAN_LIMIT` rows, and only the last has no cursor."""
    pages: list[list[str]] = []
    after = None
    while True:
        page = await store.runs(replace(query, after=after))
        pages.append([row.id for row in page.runs])
        assert len(page.runs) <= query.limit
        assert len(page.runs) <= page.scanned <= SCAN_LIMIT
        if page.next is None:
            return pages
        assert page.next != after, "the pages make no progress"
        after = page.next


class FilterCases(ContractCase):
    @case
    async def test_every_field_selects_runs(self, store: Store) -> None:
        await store.commit([run("new", created_at=1.0, parent="r_1", pool="gpu")])
        await store.commit([run("r_1", created_at=2.0, owner="a", version=2)])
        await store.commit([run("r-2", created_at=3.0, owner="b", workflow="other", tags={"status": "odd"})])
        await store.commit(
            [run("bad", created_at=4.0, owner="a"), turn(0, id="bad", patch=failed("TimeoutError", 50.0))]
        )
        await store.commit(
            [run("worse", created_at=5.0, owner="a"), turn(0, id="worse", patch=failed("Timeout", 60.0))]
        )
        await store.commit(waits_for("event", Wait("event", "0/x", "paid,refused"), created_at=6.0))
        await store.commit(waits_for("held", Wait("held"), created_at=7.0, held=Hold("diverged", "why")))
        await store.commit(waits_for("deferred", Wait("deferred", "0/x", "review"), created_at=8.0))
        everything = ["deferred", "held", "event", "worse", "bad", "r-2", "r_1", "new"]
        for where, ids in {
            "": everything,
            "status:failed": ["worse", "bad"],
            "status:*": everything,
            "-status:suspended -status:failed": ["r-2", "r_1", "new"],
            "workflow:other": ["r-2"],
            "-workflow:flow": ["r-2"],
            "version:2": ["r_1"],
            "version:02": ["r_1"],
            "version>1": ["r_1"],
            "version<2 pool:gpu": ["new"],
            "pool:*": everything,
            "parent:r_1": ["new"],
            "parent:*": ["new"],
            "held:*": ["held"],
            "held:diverged": ["held"],
            "held:poison": [],
            "-held:* status:suspended": ["deferred", "event"],
            "waiting:*": ["deferred", "held", "event"],
            "waiting:event": ["event"],
            "waiting:event:paid": ["event"],
            "waiting:event:refused": ["event"],
            "waiting:event:pai": [],
            "waiting:deferred:review": ["deferred"],
            "waiting:held:diverged": ["held"],
            "waiting:timer": [],
            "-waiting:event:paid waiting:*": ["deferred", "held"],
            "error:TimeoutError": ["bad"],
            "error:*": ["worse", "bad"],
            "-error:Timeout status:failed": ["bad"],
            "worker:a": ["r_1"],
            "worker:*": ["r-2", "r_1"],
            "-worker:a worker:*": ["r-2"],
            "worker:unknown": [],
            "r_": ["r_1"],
            "id:r": ["r-2", "r_1"],
            "-r": ["deferred", "held", "event", "worse", "bad", "new"],
            '"%"': [],
            "created>1970-01-01T00:00:05Z": ["deferred", "held", "event"],
            "created>=1970-01-01T00:00:05Z created<1970-01-01T00:00:07Z": ["event", "worse"],
            "created<=1970-01-01T00:00:01Z": ["new"],
            "ended>1970-01-01T00:00:50Z": ["worse"],
            "ended>=1970-01-01T00:00:50Z": ["worse", "bad"],
            "ended:*": ["worse", "bad"],
            "-ended<1970-01-01T00:00:51Z status:failed": ["worse"],
            "updated>1970-01-01T00:01:49Z updated<1970-01-01T00:01:51Z status:suspended": ["deferred", "held", "event"],
            "(workflow:other OR version:2 OR held:*)": ["held", "r-2", "r_1"],
            "-(workflow:other OR version:2) status:running": [],
            "(error:Timeout OR waiting:event:paid) -id:w": ["event"],
        }.items():
            assert await found(store, where) == ids, where

    @case
    async def test_tags_are_negated_joined_and_quoted(self, store: Store) -> None:
        tags = {
            "eu": {"region": "eu", "tenant": "acme inc", "n": 1},
            "uk": {"region": "uk", "n": 2},
            "us": {"region": "us", "tenant": "acme", "a b": 'q"\\'},
            "none": {},
            "empty": {"region": ""},
        }
        await store.commit([run(id, created_at=float(n), tags=each) for n, (id, each) in enumerate(tags.items())])
        for where, ids in {
            "region:*": ["empty", "us", "uk", "eu"],
            "-region:*": ["none"],
            'region:""': ["empty"],
            "-region:us": ["empty", "none", "uk", "eu"],
            "(region:eu OR region:uk)": ["uk", "eu"],
            "-(region:eu OR region:uk)": ["empty", "none", "us"],
            "(region:eu OR region:us) -tenant:acme": ["eu"],
            'tenant:"acme inc"': ["eu"],
            "tenant:acme": ["us"],
            "tenant:Acme": [],
            '"a b":"q\\"\\\\"': ["us"],
            "-n>1": ["empty", "none", "us", "eu"],
            "-n:* -region:*": ["none"],
            "(n>1 OR -tenant:*) -id:none": ["empty", "uk"],
            "(n:1 OR (region:us tenant:acme))": ["us", "eu"],
            "missing:*": [],
            "-missing:x region:uk": ["uk"],
        }.items():
            assert await found(store, where) == ids, where

    @case
    async def test_a_filter_is_combined_with_the_other_fields_of_a_query(self, store: Store) -> None:
        for n in range(8):
            tags = {"parity": n % 2, "tenant": "acme" if n < 6 else "umbrella"}
            await store.commit([run(f"r{n}", created_at=float(n), tags=tags, workflow="other" if n > 3 else "flow")])
        assert await found(store, "parity:1", workflow="other") == ["r7", "r5"]
        assert await found(store, "parity:1", workflow="other", tags={"tenant": "acme"}) == ["r5"]
        assert await found(store, "parity:1", created_after=1.0, created_before=5.0) == ["r3", "r1"]
        assert await found(store, "tenant:umbrella", id_prefix="r6", status="pending") == ["r6"]
        assert await found(store, "tenant:umbrella", status=("failed", "running")) == []

    @case
    async def test_a_run_that_waits_for_several_things_is_listed_once(self, store: Store) -> None:
        await store.commit(waiting("r", "paid", "refused", created_at=1.0))
        await store.commit([TagRun(run_id="r", tags={"a": 1, "b": 1})])
        await store.commit(waits_for("s", Wait("event", "0/x", "paid"), Wait("event", "0/y", "paid"), created_at=2.0))
        await store.commit([publish(topic="other")])
        assert await found(store, "(waiting:event:paid OR a:1 OR b:1)") == ["s", "r"]
        assert await found(store, "(a:1 OR b:1 OR a>0)") == ["r"]

    @case
    async def test_internal_runs_are_listed_only_on_request(self, store: Store) -> None:
        await store.commit([run("visible"), run("hidden", workflow="~bulk", created_at=101.0, tags={"a": 1})])
        assert await found(store) == ["visible"]
        assert await found(store, "a:1") == []
        assert await found(store, workflow="~bulk") == []
        assert await found(store, internal=True) == ["hidden", "visible"]
        assert await found(store, "workflow:~bulk", internal=True) == ["hidden"]
        assert await store.count(RunQuery(), 10) == 1

    @case
    async def test_counts_stop_at_their_cap_and_ignore_pages(self, store: Store) -> None:
        await store.commit([run(f"r{n}", tags={"n": n}) for n in range(12)])
        assert await store.count(RunQuery(), 100) == 12
        assert await store.count(RunQuery(), 12) == 12
        assert await store.count(RunQuery(), 5) == 5
        page = await store.runs(RunQuery(limit=2))
        assert await store.count(RunQuery(limit=2, after=page.next), 100) == 12
        assert await store.count(RunQuery(where="n>=9"), 100) == 3
        assert await store.count(RunQuery(status="failed"), 100) == 0
        await refused(store.count(RunQuery(), 0))

    @case
    async def test_bare_pages_have_no_payloads(self, store: Store) -> None:
        payload = b"x" * 1_000_000
        await store.commit([run(owner="a", input=payload, original_input=payload, tags={"a": 1}, parent="p")])
        ended = RunPatch(status=RunStatus.SUCCEEDED, result=payload, ended_at=110.0)
        await store.commit([turn(0, patch=ended), run("s", created_at=99.0, input=b"1")])
        page = await store.runs(RunQuery(limit=1), bare=True)
        (full,) = (await store.runs(RunQuery(limit=1))).runs
        assert full.input == payload
        assert page.runs == (replace(full, input=b"", original_input=None, result=None),)
        rest = await store.runs(RunQuery(limit=1, after=page.next), bare=True)
        assert [row.id for row in rest.runs] == ["s"]
        errors = RunPatch(status=RunStatus.FAILED, error=ErrorRecord("E", "why"), ended_at=111.0)
        await store.commit([run("f", created_at=101.0, owner="a"), turn(0, id="f", patch=errors)])
        listed = (await store.runs(RunQuery(where="error:E"), bare=True)).runs
        assert [row.error and (row.error.type, row.error.message) for row in listed] == [("E", "why")]


class QueueFilterCases(ContractCase):
    """Filters by the queue of a run."""

    @case
    async def test_the_queue_of_its_start_selects_a_run(self, store: Store) -> None:
        await store.commit([ConfigureQueue(name=name, base=0, declared=QueueSettings()) for name in ("emails", "sms")])
        await store.commit([replace(run("mail", created_at=1.0, tags={"a": 1}), place=Place(queue="emails"))])
        await store.commit(
            [replace(run("text", created_at=2.0), place=Place(queue="sms")), run("other", created_at=3.0)]
        )
        for where, ids in {
            "queue:emails": ["mail"],
            "queue:*": ["text", "mail"],
            "-queue:*": ["other"],
            "-queue:emails": ["other", "text"],
            "(queue:emails OR queue:sms) a:1": ["mail"],
            "queue:missing": [],
        }.items():
            assert await found(store, where) == ids, where
        await store.commit([end(id="mail")])
        assert await found(store, "queue:emails status:cancelled") == ["mail"], (
            "an ended run keeps the name of its queue"
        )


class FilterPageCases(ContractCase):
    @case
    async def test_pages_of_a_filter_have_no_gaps_or_repeats(self, store: Store) -> None:
        rows = [run(f"r{n:03d}", created_at=float(n // 5), tags={"n": n, "mod": n % 3}) for n in range(120)]
        await store.commit(rows)
        records = sorted((write.record for write in rows), key=lambda row: (row.created_at, row.id), reverse=True)
        wheres = (
            "mod:1",
            "n>20 n<=90",
            "-mod:0",
            "(mod:0 OR n>100)",
            "created>=1970-01-01T00:00:03Z mod:2",
            "r05",
            "n:7",
        )
        for where in wheres:
            for limit in (1, 7, 50):
                query = RunQuery(where=where, limit=limit)
                pages = await page_ids(store, query)
                assert [id for page in pages for id in page] == _expected(records, query), (where, limit)

    @case
    async def test_pages_stay_complete_while_runs_and_tags_are_added(self, store: Store) -> None:
        await store.commit([run(f"old{n:02d}", created_at=float(n), tags={"mod": n % 2}) for n in range(30)])
        query, listed = RunQuery(where="mod:1", limit=4), list[str]()
        for n in range(50):
            page = await store.runs(query)
            listed += [row.id for row in page.runs]
            if page.next is None:
                break
            await store.commit([run(f"new{n}", created_at=100.0 + n, tags={"mod": 1})])
            query = replace(query, after=page.next)
        assert listed == [f"old{n:02d}" for n in range(29, 0, -2)]

    @case
    async def test_a_page_that_examines_too_many_rows_returns_a_cursor(self, store: Store) -> None:
        total = SCAN_LIMIT + 2 * BATCH
        rows = [run(f"r{n:05d}", created_at=float(n), tags={} if n in (0, 1) else {"a": 1}) for n in range(total)]
        for first in range(0, total, BATCH):
            await store.commit(rows[first : first + BATCH])
        pages = await page_ids(store, RunQuery(where="-a:*", limit=10))
        assert [id for page in pages for id in page] == ["r00001", "r00000"]
        assert await store.count(RunQuery(where="-a:*"), 10) == 2
        assert await store.count(RunQuery(where="a:1"), total) == total - 2
        pages = await page_ids(store, RunQuery(where="a:1 -a:2", limit=SCAN_LIMIT))
        assert sum(map(len, pages)) == total - 2

    @case
    async def test_tags_that_a_turn_changed_are_found_at_the_age_of_the_run(self, store: Store) -> None:
        await store.commit([run(f"r{n}", created_at=float(n), tags={"a": "x"}) for n in range(5)])
        assert await claim_ids(store, claim(limit=3)) == ["r0", "r1", "r2"]
        for id in ("r2", "r0"):
            await store.commit([turn(0, id=id, extras=TurnExtras(tags={"a": "y"}))])
        assert await found(store, "a:y") == ["r2", "r0"]
        assert await found(store, "a:x") == ["r4", "r3", "r1"]
        assert await page_ids(store, RunQuery(where="a:y", limit=1)) == [["r2"], ["r0"]]


def _expected(records: list[RunRecord], query: RunQuery) -> list[str]:
    assert query.filter is not None
    return [row.id for row in records if matches(query.filter, row)]
