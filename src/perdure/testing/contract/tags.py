"""Typed tags: their values come back unchanged, and their index changes in the commit that changes them."""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec.structs import replace

from perdure.model.queries import RunQuery
from perdure.model.records import RunStatus
from perdure.model.tags import TagValue
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, Created, RunMissing, Superseded
from perdure.stores.writes import ContinueAs, Predecessor, RewindRun, RunPatch, TagRun
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    claim,
    claim_ids,
    end,
    entry,
    finalize,
    load,
    record,
    refused,
    run,
    succeeded,
    suspended,
    turn,
)

NOON = datetime(2026, 11, 18, 12, 0, 0, 250_000, tzinfo=UTC)
VALUES: dict[str, TagValue] = {
    "text": "Bern",
    "empty": "",
    "owl": "🦉 \"'%_\\",
    "digits": "500",
    "word": "true",
    "int": 500,
    "negative": -3,
    "big": 2**53 + 1,
    "float": 0.1,
    "whole": 500.0,
    "yes": True,
    "no": False,
    "time": NOON,
}


async def found(store: Store, where: str | None = None, **fields: object) -> list[str]:
    """Return the ids of the runs that match, and check that `count` returns their number."""
    query = RunQuery(where=where, **fields)  # type: ignore[arg-type]
    ids = [row.id for row in (await store.runs(query)).runs]
    assert await store.count(query, 1000) == len(ids)
    return ids


class TagCases(ContractCase):
    @case
    async def test_values_come_back_with_their_types(self, store: Store) -> None:
        await store.commit([run(tags=VALUES), run("plain")])
        tags = (await record(store)).tags
        assert dict(tags) == VALUES
        assert {key: type(value) for key, value in tags.items()} == {key: type(value) for key, value in VALUES.items()}
        (listed,) = (await store.runs(RunQuery(id_prefix="r"))).runs
        assert listed.tags == tags
        assert (await load(store)).record.tags == tags
        assert dict((await record(store, "plain")).tags) == {}

    @case
    async def test_tags_of_a_query_equal_values_of_the_same_type(self, store: Store) -> None:
        values: dict[str, TagValue] = {"int": 1, "float": 1.5, "whole": 1.0, "text": "1", "yes": True, "time": NOON}
        await store.commit(
            [run(key, created_at=float(n), tags={"v": value}) for n, (key, value) in enumerate(values.items())]
        )
        expected: list[tuple[TagValue, list[str]]] = [
            (1, ["whole", "int"]),
            (1.0, ["whole", "int"]),
            (1.5, ["float"]),
            ("1", ["text"]),
            (True, ["yes"]),
            ("true", []),
            (NOON, ["time"]),
            (NOON.timestamp(), []),
        ]
        for value, ids in expected:
            assert await found(store, tags={"v": value}) == ids, value
        assert await found(store, "v:1") == ["text", "whole", "int"], "text of a filter has no type"
        assert await found(store, "v:true") == ["yes"]
        assert await found(store, "v:1.5") == ["float"]
        assert await found(store, "v:2026-11-18T12:00:00.250000Z") == ["time"]

    @case
    async def test_comparisons_select_numbers_and_times(self, store: Store) -> None:
        values: dict[str, TagValue] = {"a": -1, "b": 0, "c": 0.5, "d": 2**53, "text": "7", "yes": True, "none": ""}
        await store.commit(
            [run(key, created_at=float(n), tags={"v": value}) for n, (key, value) in enumerate(values.items())]
        )
        await store.commit([run("time", tags={"at": NOON})])
        for where, ids in {
            "v>0": ["d", "c"],
            "v>=0": ["d", "c", "b"],
            "v<0.5": ["b", "a"],
            "v<=0.5": ["c", "b", "a"],
            "v>-1 v<1e3": ["c", "b"],
            "v>0 v<=0": [],
            "v>=9007199254740992": ["d"],
            "at>2026-11-18": ["time"],
            "at>=2026-11-18T12:00:00.25Z at<=2026-11-18T12:00:00.25Z": ["time"],
            "at>2026-11-18T13:00:00.25+01:00": [],
            "-v>0 -v<=0": ["time", "none", "yes", "text"],
        }.items():
            assert await found(store, where) == ids, where

    @case
    async def test_a_turn_changes_tags_and_their_index(self, store: Store) -> None:
        await store.commit(
            [run(owner="a", tags={"stage": "new", "amount": 1}), run("s", owner="a", tags={"stage": "new"})]
        )
        change = turn(0, entry(), extras=TurnExtras(tags={"stage": "review", "amount": None, "vip": True}))
        assert await store.commit([change]) == [Committed()]
        assert dict((await record(store)).tags) == {"stage": "review", "vip": True}
        assert (await record(store)).owner == "a"
        assert await found(store, "stage:new") == ["s"]
        assert await found(store, "stage:review vip:*") == ["r"]
        assert await found(store, "amount:*") == []
        assert await store.commit([change]) == [Committed()], "repeated"
        late = turn(0, entry("x"), turn_id="late", extras=TurnExtras(tags={"stage": "late"}))
        assert await store.commit([late]) == [Superseded()]
        assert await found(store, "stage:review") == ["r"]
        both = turn(1, patch=suspended(500.0), extras=TurnExtras(tags={"stage": "waits"}))
        await store.commit([both])
        row = await record(store)
        assert (row.tags["stage"], row.status, row.wake_at) == ("waits", RunStatus.SUSPENDED, 500.0)
        ended = turn(2, owned=False, patch=succeeded(), extras=TurnExtras(tags={"stage": "done", "vip": None}))
        await store.commit([ended])
        assert dict((await record(store)).tags) == {"stage": "done"}
        assert await found(store, "stage:done status:succeeded") == ["r"]
        assert await found(store, "vip:*") == []

    @case
    async def test_tags_survive_a_restart_of_the_history(self, store: Store) -> None:
        await store.commit([run(owner="a", tags={"a": 1, "b": 2})])
        restart = ContinueAs(workflow="other", version=1, input=b"", first_executed_at=110.0)
        running = RunPatch(status=RunStatus.RUNNING, owner="a")
        await store.commit([turn(0, patch=running, continue_as=restart, extras=TurnExtras(tags={"b": 3, "c": "x"}))])
        assert dict((await record(store)).tags) == {"a": 1, "b": 3, "c": "x"}
        assert await found(store, "a:1 b:3 c:x workflow:other") == ["r"]
        assert await found(store, "workflow:flow") == []

    @case
    async def test_a_run_without_an_owner_is_tagged_from_outside(self, store: Store) -> None:
        await store.commit([run(tags={"a": 1})])
        tag = TagRun(run_id="r", tags={"a": None, "b": NOON})
        before = await record(store)
        assert await store.commit([tag, tag]) == [Committed(), Committed()]
        row = await record(store)
        assert dict(row.tags) == {"b": NOON}
        assert (row.status, row.wake_at, row.updated_at) == (before.status, before.wake_at, before.updated_at)
        assert (await load(store)).position == 0
        assert await found(store, "b:*") == ["r"]
        assert await claim_ids(store, claim()) == ["r"]
        assert await store.commit([TagRun(run_id="r", tags={"b": 2})]) == [Superseded()], "a worker executes it"
        assert await found(store, "b>2026-01-01") == ["r"]
        await store.commit([turn(0, patch=suspended(500.0))])
        assert await store.commit([TagRun(run_id="r", tags={"b": 2})]) == [Committed()]
        assert (await record(store)).wake_at == 500.0
        await store.commit([end()])
        assert await store.commit([TagRun(run_id="r", tags={"c": "after"})]) == [Committed()]
        assert await found(store, "b:2 c:after") == ["r"]
        assert await store.commit([TagRun(run_id="missing", tags={"b": 2})]) == [RunMissing()]
        await refused(store.commit([TagRun(run_id="r", tags={"b": b"bytes"})]))  # type: ignore[dict-item]

    @case
    async def test_a_rewind_keeps_tags_and_a_replacement_has_its_own(self, store: Store) -> None:
        await store.commit([run(owner="a", tags={"a": 1}), turn(0, entry(), patch=succeeded())])
        await store.commit([RewindRun(run_id="r", base=1, turn_id="rewind", now=120.0, dropped=("charge",))])
        assert await found(store, "a:1") == ["r"]
        await store.commit([end(), finalize(orphaned_children=True)])
        replacement = replace(run(created_by="again", tags={"b": 2}), replaces=Predecessor("call-r", 1))
        assert await store.commit([replacement]) == [Created(owned=False)]
        assert await found(store, "a:*") == []
        assert await found(store, "b:2") == ["r"]

    @case
    async def test_the_index_forgets_runs_that_are_deleted_or_pruned(self, store: Store) -> None:
        for id in ("r", "s"):
            await store.commit([run(id, owner="a", tags={"a": 1, "b": "x"})])
            await store.commit([turn(0, id=id, patch=succeeded(prune_at=200.0))])
        assert await store.delete_run("r") == Committed()
        assert await found(store, "a:1") == ["s"]
        assert await store.prune(200.0) == ["s"]
        for where in ("a:1", "a>0", "b:*", "b:x"):
            assert await found(store, where) == [], where
        await store.commit([run("r", created_by="later", tags={"b": "x"})])
        assert await found(store, "a:*") == [], "a new run of the id has only its own tags"
        assert await found(store, "b:x") == ["r"]
