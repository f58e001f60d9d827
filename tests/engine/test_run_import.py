"""Importing a run: held in one commit, validated as a start, independent of the runs and topics of the store."""

from __future__ import annotations

import asyncio
import copy
import sys
from typing import Any

import pytest

from perdure import RunCancelled, RunConflict, RunStatus, StoreError, workflow
from perdure.admin.run_import import import_run
from perdure.errors import InvalidArgument
from perdure.testing import Harness
from perdure.testing.faults import FaultyStore
from perdure.testing.harness import on_virtual_time
from tests.engine.rich_run import CALLED, Order, export_of_rich_run, rich_child, rich_run
from tests.engine.store_matrix import on_every_store


@pytest.fixture(autouse=True)
def fresh() -> None:
    CALLED.clear()


async def exported(*, ends: bool = False) -> dict[str, Any]:
    async with Harness() as elsewhere:
        data = await export_of_rich_run(elsewhere, ends=ends)
    CALLED.clear()
    return data


@on_every_store
async def test_open_run_is_created_held_by_one_commit(h):
    data = await exported()
    client = await h.client()
    faults = client._session.store
    assert await import_run(client, data) == "rich"
    [batch] = faults.committed
    assert [type(write).__name__ for write in batch] == ["CreateRun", "CommitTurn"]
    described = await client.describe("rich")
    assert described.status is RunStatus.SUSPENDED
    assert [reason.kind for reason in described.waiting_for] == ["held"]
    assert await h.store.workers() == []


@pytest.mark.parametrize("call", ["join", "commit", "remove_worker"])
@pytest.mark.parametrize("side", ["before", "after"])
@on_every_store
async def test_process_that_is_killed_during_an_import_leaves_a_held_run_or_none(h, call, side):
    data = await exported()
    engine = await h.engine(rich_run, rich_child)
    client = await h.client()
    client._session.store.crash(1, side, call=call)
    importing = asyncio.ensure_future(import_run(client, data))
    await h.settle()
    assert client._session.store.crashed.is_set()
    while not importing.done():  # its `finally` calls the store too, which never returns
        importing.cancel()
        await asyncio.sleep(0)
    await h.clock.advance(700)
    await h.settle()
    [record] = await h.store.records(["rich"])
    assert record is None or (record.held is not None and record.held.kind == "imported")
    assert (record is None) == ((call, side) in [("join", "before"), ("join", "after"), ("commit", "before")])
    assert CALLED == []
    if record is not None:
        await engine.resume("rich")
        await engine.cancel("rich")
        with pytest.raises(RunCancelled):
            await h.run_to_end(engine.get("rich"), within=200_000)


@on_every_store
async def test_lost_result_of_the_commit_does_not_change_the_import(h):
    data = await exported()
    client = await h.client()
    client._session.store.lose_responses(1)
    assert await h.drive(import_run(client, data)) == "rich"
    assert (await client.describe("rich")).status is RunStatus.SUSPENDED


@on_every_store
async def test_import_whose_worker_is_fenced_meanwhile_executes_nothing(h):
    data = await exported()
    await h.engine(rich_run, rich_child)
    client = await h.client()
    join = h.store.join

    async def join_and_lose_the_lease(worker: Any) -> bool:
        joined = await join(worker)
        await h.store.fence_worker(worker.id)
        return joined

    client._session.store.join = join_and_lose_the_lease
    with pytest.raises(StoreError, match="fenced"):
        await import_run(client, data)
    await h.clock.advance(700)
    await h.settle()
    assert CALLED == []


@on_every_store
async def test_resumed_import_continues_and_is_rolled_back_when_cancelled(h):
    data = await exported()
    engine = await h.engine(rich_run, rich_child)
    await import_run(engine, data, run_id="copy")
    await h.clock.advance(60)
    assert CALLED == []
    await engine.resume("copy")
    await h.settle()
    await engine.cancel("copy")
    with pytest.raises(RunCancelled):
        await h.run_to_end(engine.get("copy"))
    undone = [f"undo {n}" for n in range(7)]
    assert [line for line in reversed(CALLED) if line.startswith("undo") and "exit" not in line] == undone
    assert CALLED[-1] == "undo exit"
    assert [line for line in CALLED if line.startswith("reserve")] == []


@on_every_store
async def test_ended_run_stays_ended_and_publishes_nothing(h):
    data = await exported(ends=True)
    data["inbox"].append({"id": "m", "kind": "event", "name": "Offer", "body": {"price": 1}, "policy": "broadcast"})
    engine = await h.engine(rich_run, rich_child)
    await import_run(engine, data)
    await h.clock.advance(60)
    assert await engine.result("rich") == "1"
    assert await h.store.topic("Offer") == []
    assert await engine.dead_letters() == []


@on_every_store
async def test_import_does_not_touch_other_runs_of_the_store(h):
    @workflow(name="rich.victim")
    async def victim(ctx):
        await ctx.sleep(100_000)

    data = await exported()
    engine = await h.engine(rich_run, rich_child, victim)
    await engine.start(victim, id="victim")
    await engine.start(rich_run, Order("2"), id="rich")
    await h.settle()
    entry = {"status": "pending", "call_seq": 900, "started_at": 1.0, "name": "victim"}
    data["entries"] += [
        {**entry, "location": "~stop/1/0", "kind": "stop"},
        {**entry, "location": "x/~watch", "kind": "watch"},
        {
            **entry,
            "location": "victim",
            "kind": "start_child",
            "status": "succeeded",
            "detail": {"id": "victim", "attached": True},
            "value": {"id": "victim", "created": True},
        },
    ]
    await import_run(engine, data, run_id="copy")
    await engine.resume("copy")
    await h.settle()
    await engine.cancel("copy")
    await h.settle()
    await engine.rewind("copy", "sleep")
    await h.clock.advance(60)
    await h.settle()
    assert await engine.status("victim") is RunStatus.SUSPENDED
    assert (await engine.status("rich"), await engine.status("rich-child")) != (None, RunStatus.CANCELLED)


@on_every_store
async def test_import_with_a_taken_id_changes_nothing(h):
    data = await exported(ends=True)
    engine = await h.engine(rich_run, rich_child)
    await import_run(engine, data)
    before = await h.store.load(["rich"])
    with pytest.raises(RunConflict):
        await import_run(engine, await exported())
    assert await h.store.load(["rich"]) == before


# --- what is refused


def changed(data: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    result = copy.deepcopy(data)
    inner: Any = result
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = to
    return result


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("run", "id"), ""),
        (("run", "id"), "a\nb"),
        (("run", "id"), "x" * 600),
        (("run", "id"), 5),
        (("run", "workflow"), ""),
        (("run", "workflow"), "\0"),
        (("run", "version"), 0),
        (("run", "version"), True),
        (("run", "version"), 10**30),
        (("run", "pool"), ""),
        (("run", "pool"), "a\tb"),
        (("run", "tags"), {"": "x"}),
        (("run", "tags"), {"team": "a\nb"}),
        (("run", "tags"), {"team": [5]}),
        (("run", "tags"), ["team"]),
        (("run", "generation"), -1),
        (("run", "generation"), 2**40),
        (("run", "created_at"), 1e300),
        (("run", "created_at"), -5),
        (("run", "deadline_at"), float("nan")),
        (("run", "retention"), float("inf")),
        (("run", "seed"), 10**5000),
        (("run", "input"), {"$base64": "AAAA"}),
        (("run", "status"), "succeeded"),
        (("run", "status"), "failed"),
        (("run", "status"), "lost"),
        (("entries",), None),
        (("entries",), {"a": 1}),
        (("entries",), "abc"),
        (("entries",), ["abc"]),
        (("entries", 0, "location"), ""),
        (("entries", 0, "location"), "a\0b"),
        (("entries", 0, "kind"), "marker"),
        (("entries", 0, "name"), ""),
        (("entries", 0, "status"), "failed"),
        (("entries", 0, "call_seq"), 2**70),
        (("entries", 0, "started_at"), 1e18),
        (("entries", 0, "value"), {"$base64": "/w=="}),
        (("inbox", 0, "id"), ""),
        (("inbox", 0, "kind"), "exec"),
        (("inbox", 0, "policy"), "exec"),
        (("inbox", 0, "name"), ""),
        (("inbox", 0, "sent_at"), 1e18),
        (("inbox", 0, "body"), {"$base64": "/w=="}),
    ],
    ids=lambda given: "huge" if isinstance(given, int) and given > 10**100 else str(given)[:40],
)
@pytest.mark.parametrize("given_id", [None, "other"])
def test_value_that_a_start_or_a_worker_would_refuse_is_refused(path, to, given_id):
    async def test(h: Harness) -> None:
        client = await h.client()
        data = changed(await exported(), *path, to=to)
        if given_id is not None and path == ("run", "id") and to != 5:
            return  # the id of the export is not used
        with pytest.raises(InvalidArgument):
            await import_run(client, data, run_id=given_id)
        assert await h.store.records(["rich", "other"]) == [None, None]
        assert isinstance(client._session.store, FaultyStore)
        assert client._session.store.commits == 0

    on_virtual_time(test)


@pytest.mark.parametrize(
    ("fn", "error"), [("os:system", "registered name"), ("shop:undo", "registered name"), ("", "registered name")]
)
def test_compensation_without_a_registered_name_is_refused(fn, error):
    async def test(h: Harness) -> None:
        data = await exported()
        [row, *_] = [each for each in data["entries"] if each["kind"] == "compensation"]
        row["detail"]["fn"] = fn
        client = await h.client()
        with pytest.raises(InvalidArgument, match=error):
            await import_run(client, data)

    on_virtual_time(test)


@on_every_store
async def test_hostile_compensation_in_a_registered_form_is_not_called(h, monkeypatch):
    monkeypatch.setattr("os.system", CALLED.append)
    data = await exported()
    for row in data["entries"]:
        if row["kind"] == "compensation":
            row["detail"]["fn"] = "step:os:system"
    engine = await h.engine(rich_run, rich_child)
    await import_run(engine, data)
    modules = set(sys.modules)
    await engine.resume("rich")
    await h.settle()
    await engine.cancel("rich")
    await h.clock.advance(100)
    await h.settle()
    [record] = await h.store.records(["rich"])
    assert record.held is not None
    assert record.held.kind == "diverged"
    assert "'step:os:system'" in record.held.reason
    assert ([line for line in CALLED if "loop" in line], set(sys.modules) - modules) == ([], set())
    assert await engine.terminate("rich")


@pytest.mark.parametrize("count", [2, 100_000])
def test_retained_iterations_of_a_loop_are_bounded(count):
    async def test(h: Harness) -> None:
        data = await exported()
        iterations = [each for each in data["entries"] if each["kind"] == "iteration"]
        last = max(iterations, key=lambda each: int(each["name"]))
        last["location"] = f"pages/~{int(last['name']) + count}"
        client = await h.client()
        if count > 2:
            with pytest.raises(InvalidArgument, match="iterations"):
                await import_run(client, data)
        else:
            await import_run(client, data)

    on_virtual_time(test)


def test_entries_with_the_same_order_are_refused():
    async def test(h: Harness) -> None:
        client = await h.client()
        for field in ("seq", "ordinal"):
            data = await exported()
            first, second = [
                each for each in data["entries"] if each["kind"] == "step" and "/" not in each["location"]
            ][:2]
            second[field] = first.get(field, -1)
            with pytest.raises(InvalidArgument, match=field):
                await import_run(client, data)

    on_virtual_time(test)
