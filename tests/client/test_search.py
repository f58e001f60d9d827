"""Lists, counts and pages of a client: filters with relative times, bare rows, waiting reasons, internal runs."""

from datetime import timedelta
from typing import Any

import pytest

from perdure import Context, InvalidArgument, RunNotFound, RunQuery, step, workflow
from perdure.admin.store_views import workers_of
from perdure.model.records import RunRecord
from perdure.stores.writes import CreateRun
from tests.engine.store_matrix import another_handle, on_every_store


@step
async def echo(n: int) -> int:
    return n


@workflow(name="search.quick")
async def quick(ctx: Context, n: int) -> int:
    return await echo(n)


@workflow(name="search.waits")
async def waits(ctx: Context) -> None:
    await ctx.receive("approved")


def new_run(id: str, workflow: str, **fields: Any) -> CreateRun:
    given = {"version": 1, "input": b"{}", "created_at": 1.0, "created_by": id, "seed": 1, **fields}
    return CreateRun(RunRecord(id=id, workflow=workflow, **given))


async def ids(client, where="", **fields):
    return [run.id for run in await client.runs(RunQuery(where=where, **fields))]


@on_every_store
async def test_relative_times_are_those_of_the_store_at_the_call(h):
    engine = await h.engine(quick)
    for n in range(3):
        await h.run_to_end(await engine.start(quick, n, id=f"r{n}"))
        await h.clock.advance(3600)
    assert await ids(engine, "created>-90m") == ["r2"]
    assert await ids(engine, "created<=-90m created>-150m") == ["r1"]
    query = RunQuery(where="ended<-2.5h")
    assert [run.id for run in await engine.runs(query)] == ["r0"]
    await h.clock.advance(3600)
    assert [run.id for run in await engine.runs(query)] == ["r1", "r0"], "the query is not bound to its first call"
    assert await engine.count(query) == 2


@on_every_store
async def test_a_list_reads_no_payloads_and_shows_why_runs_wait(h):
    engine = await h.engine(quick, waits)
    await h.run_to_end(await engine.start(quick, 7, id="done"))
    await engine.start(waits, id="waits")
    await h.settle()
    await h.store.commit([new_run("sealed", "other", created_at=h.clock.now() - 1, input=b"\xff\x00")])
    page = await (await h.client(store=another_handle(h.store, h.clock))).runs()
    shown = {run.id: run for run in page}
    assert page.unreadable == ()
    assert (shown["done"].input, shown["done"].result, shown["done"].status) == (None, None, "succeeded")
    assert [reason.kind for reason in shown["waits"].waiting_for] == ["event"]
    assert [reason.kind for reason in shown["sealed"].waiting_for] == ["no_worker"]
    assert (await engine.describe("done")).result == 7
    assert page.scanned >= 3


@on_every_store
async def test_counts_have_a_cap(h):
    engine = await h.engine(waits)
    for n in range(7):
        await engine.start(waits, id=f"r{n}", tags={"n": n})
    assert await engine.count() == 7
    assert await engine.count(RunQuery(where="n>=5")) == 2
    assert await engine.count(RunQuery(limit=1), cap=3) == 3
    for wrong in ({"cap": 0}, {"cap": "x"}, {"query": "n>5"}):
        with pytest.raises(InvalidArgument):
            await engine.count(**wrong)


@on_every_store
async def test_a_history_is_read_in_pages(h):
    @workflow(name="search.long")
    async def long(ctx: Context) -> None:
        for n in range(5):
            await echo(n)
        await ctx.sleep(timedelta(seconds=5))

    engine = await h.engine(long)
    await engine.start(long, id="r")
    await h.settle()
    first = await engine.history("r", limit=2)
    assert [entry.value for entry in first] == [0, 1]
    second = await engine.history("r", after=first[-1].position, limit=2)
    assert [entry.value for entry in second] == [2, 3]
    await h.run_to_end(engine.get("r"))
    rest = await engine.history("r", after=second[-1].position, limit=100)
    assert [entry.location for entry in rest if entry.status == "succeeded"] == ["echo#4", "sleep"]
    assert await engine.history("r", after=rest[-1].position, limit=1) == []
    assert {entry.position for entry in await engine.history("r")} <= {
        each.position for each in (*first, *second, *rest)
    }
    with pytest.raises(RunNotFound):
        await engine.history("missing", limit=1)
    for wrong in ({"limit": 0}, {"after": -1}, {"limit": "x"}):
        with pytest.raises(InvalidArgument):
            await engine.history("r", **wrong)


@on_every_store
async def test_the_runs_of_a_worker_are_counted_and_not_read(h):
    engine = await h.engine(waits)
    client = await h.client()
    owned = [new_run("r", "search.waits", owner=engine.worker), new_run("i", "~bulk", owner=engine.worker)]
    await h.store.commit(owned)
    counting = h.faulty()
    client._session.store_session.store = counting
    (view,) = await workers_of(client)
    assert (view.id, view.runs) == (engine.worker, 2)
    assert counting.calls["owned"] == 0
    assert counting.calls["count"] == 1
