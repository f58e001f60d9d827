"""Tags of whole workflows: typed, changed by the run and from outside, searchable at once, equal on every replay."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from perdure import Break, Context, Continue, InvalidArgument, RunNotFound, RunQuery, step, workflow
from perdure.execution.store_writes import tag_message
from perdure.model.records import RunRecord
from perdure.stores.writes import CommitTurn, CreateRun, DeliverMessage
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import STORES, on_every_store

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)
TYPED: dict[str, Any] = {"tenant": "acme", "amount": 500, "rate": 0.5, "vip": True, "due": NOON}
SEEN: list[dict[str, Any]] = []
HOLD: dict[str, asyncio.Event] = {}


@pytest.fixture(autouse=True)
def _clean():
    SEEN.clear()
    HOLD.clear()


async def ids(client, where="", **fields):
    return [run.id for run in await client.runs(RunQuery(where=where, **fields))]


@step
async def review(n: int) -> int:
    return n


@workflow(name="tags.review", tags={"kind": "review", "level": 1})
async def reviewed(ctx: Context, amount: int) -> dict[str, Any]:
    SEEN.append(dict(ctx.tags))  # perdure: ignore
    await ctx.tag(stage="first", amount=amount)
    await review(1)
    SEEN.append(dict(ctx.tags))  # perdure: ignore
    await ctx.sleep(60)
    await ctx.tag({"stage": "second", "a b": NOON}, level=None)
    await ctx.sleep(60)
    await ctx.tag(stage=None)
    SEEN.append(dict(ctx.tags))  # perdure: ignore
    return {key: str(value) for key, value in ctx.tags.items()}


START = {"kind": "review", "level": 1, "tenant": "acme"}
FIRST = {**START, "stage": "first", "amount": 999}
SECOND = {"kind": "review", "tenant": "acme", "stage": "second", "amount": 999, "a b": NOON}
LAST = {key: value for key, value in SECOND.items() if key != "stage"}


@workflow(name="tags.slow")
async def slow(ctx: Context, n: int) -> int:
    await review(n)
    await ctx.sleep(100)
    await ctx.tag(seen=n)
    return n


@on_every_store
async def test_tags_of_a_start_are_typed_and_searchable(h):
    engine = await h.engine(reviewed)
    run = await engine.start(reviewed, 1, tags=TYPED, delay=60)
    described = await engine.describe(run.id)
    assert described.tags == {"kind": "review", "level": 1, **TYPED}
    assert [type(described.tags[key]) for key in TYPED] == [type(value) for value in TYPED.values()]
    wheres = ("tenant:acme", "amount>499 amount<=500", "vip:true", "due>2026-11-18", "level:1 kind:review", "rate:0.5")
    for where in wheres:
        assert await ids(engine, where) == [run.id], where
    assert await ids(engine, tags={"amount": 500.0, "vip": True}) == [run.id]
    assert await ids(engine, "-tenant:acme") == []
    override = await engine.start(reviewed, 1, tags={"level": 2}, delay=60)
    assert await ids(engine, "level:2") == [override.id], "the tags of a start win over those of its workflow"


@on_every_store
async def test_a_run_changes_its_tags_and_sees_the_same_ones_on_every_replay(h):
    engine = await h.engine(reviewed)
    await engine.start(reviewed, 999, id="r", tags={"tenant": "acme"})
    await h.settle()
    assert (await engine.describe("r")).tags == FIRST
    assert await ids(engine, "stage:first amount>500") == ["r"]
    await h.crash(engine)
    engine = await h.engine(reviewed)
    await h.clock.advance(61)
    await h.settle()
    assert (await engine.describe("r")).tags == SECOND
    assert await ids(engine, '"a b">2026-01-01 -level:*') == ["r"]
    await h.crash(engine)
    engine = await h.engine(reviewed)
    assert await h.run_to_end(engine.get("r")) == {key: str(value) for key, value in LAST.items()}
    assert (await engine.describe("r")).tags == LAST
    assert await ids(engine, "stage:*") == []
    assert [seen for seen in SEEN if seen not in (START, FIRST, LAST)] == []
    assert len(SEEN) >= 5, "the function was replayed"
    assert (await engine.history("r"))[0].value == {"stage": "first", "amount": 999}


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_tags_survive_a_crash_at_every_commit(kind, tmp_path):
    crash_on(kind, tmp_path, reviewed, 999)
    assert all(seen in ({**START, "tenant": ""}, *_without_tenant()) for seen in SEEN), SEEN


def _without_tenant():
    return [{key: value for key, value in tags.items() if key != "tenant"} for tags in (START, FIRST, LAST)]


@on_every_store
async def test_a_suspended_or_ended_run_is_tagged_at_once(h):
    engine = await h.engine(slow)
    client = await h.client()
    run = await engine.start(slow, 7, id="r", tags={"old": 1})
    await h.settle()
    turns = (await h.store.load(["r"]))[0].position
    await client.tag("r", {"a b": NOON}, stage="review", old=None)
    assert await ids(client, 'stage:review "a b":* -old:*') == ["r"]
    assert (await h.store.load(["r"]))[0].position == turns, "no turn was needed"
    assert await h.run_to_end(run) == 7
    assert (await engine.describe("r")).tags == {"a b": NOON, "stage": "review", "seen": 7}
    await run.tag(stage="archived")
    assert await ids(client, "stage:archived status:succeeded") == ["r"]


@step(name="tags.wait")
async def wait(run_id: str) -> None:
    await HOLD.setdefault(run_id, asyncio.Event()).wait()


@workflow(name="tags.busy")
async def busy(ctx: Context) -> str:
    await wait(ctx.run_id)
    await ctx.tag(stage="own")
    return str(ctx.tags.get("stage"))


@on_every_store
async def test_a_run_that_a_worker_executes_is_tagged_by_its_next_turn(h):
    engine = await h.engine(busy)
    client = await h.client()
    run = await engine.start(busy, id="r")
    await h.settle()
    assert (await h.store.records(["r"]))[0].owner is not None
    await client.tag("r", stage="outside", amount=3)
    await engine.tag("r", amount=4)
    await h.clock.advance(10)
    await h.settle()
    assert await ids(engine, "stage:outside amount>3 status:running") == ["r"]
    HOLD["r"].set()
    assert await h.run_to_end(run) == "own"
    assert (await engine.describe("r")).tags == {"stage": "own", "amount": 4}


@on_every_store
async def test_a_change_that_the_last_turn_did_not_see_is_applied_after_the_end(h):
    engine = await h.engine(slow)
    run = await engine.start(slow, 1, id="r")
    await h.settle()
    commit = engine.faults.commit
    late = tag_message({"late": True}, h.clock.now())

    async def commit_after_a_message(batch):
        if any(isinstance(write, CommitTurn) and write.patch and write.patch.status.terminal for write in batch):
            await h.store.commit([DeliverMessage(run_id="r", message=late, now=h.clock.now())])
        return await commit(batch)

    engine.faults.commit = commit_after_a_message
    assert await h.run_to_end(run) == 1
    await h.clock.advance(10)
    await h.settle()
    assert (await engine.describe("r")).tags == {"seen": 1, "late": True}


@on_every_store
async def test_invalid_changes_are_refused_and_change_nothing(h):
    engine = await h.engine(slow)
    many = {f"k{n}": n for n in range(32)}
    await engine.start(slow, 1, id="r", tags={"a": 1}, delay=60)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "given no tags"),
        ({"perdure.slot": "x"}, "reserved"),
        ({"": 1}, "key is empty"),
        ({"a": b"x"}, "must be text, a number"),
        ({"a": "x" * 513}, "513 characters"),
        (many, "at most 32 tags, not 33"),
        ({f"k{n}": "é" * 300 for n in range(14)}, "at most 8192 bytes"),
    ]
    for tags, words in wrong:
        with pytest.raises(InvalidArgument, match=words):
            await engine.tag("r", tags)
        if tags:
            with pytest.raises(InvalidArgument, match=words):
                await engine.start(slow, 1, id="new", tags={"b": 1, **tags})
    with pytest.raises(RunNotFound):
        await engine.tag("missing", a=1)
    assert (await engine.describe("r")).tags == {"a": 1}
    assert await ids(engine) == ["r"]
    with pytest.raises(InvalidArgument, match="reserved"):
        workflow(name="tags.refused", tags={"perdure.slot": "x"})


@on_every_store
async def test_a_workflow_that_sets_invalid_tags_fails_without_changing_any(h):
    @workflow(name="tags.wrong")
    async def wrong(ctx: Context) -> list[str]:
        refused = []
        for tags in ({"perdure.x": 1}, {}, {f"k{n}": n for n in range(33)}):
            try:
                await ctx.tag(tags)
            except InvalidArgument as error:
                refused.append(str(error))
        return refused

    engine = await h.engine(wrong)
    refused = await h.run_to_end(await engine.start(wrong, id="r"))
    assert [text.split(",")[0].split(";")[0][:30] for text in refused] == [
        "tags that begin with 'perdure.",
        "tag was given no tags",
        "a run has at most 32 tags",
    ]
    assert (await engine.describe("r")).tags == {}


@on_every_store
async def test_a_rewind_keeps_tags_and_a_fork_has_those_of_its_history(h):
    @workflow(name="tags.again")
    async def again(ctx: Context, n: int) -> list[str]:
        SEEN.append(dict(ctx.tags))
        await ctx.tag({f"n{n}": n})
        await review(n)
        return sorted(ctx.tags)

    engine = await h.engine(again)
    assert await h.run_to_end(await engine.start(again, 1, id="r")) == ["n1"]
    await engine.tag("r", outside=1)
    await engine.rewind("r", "review")
    assert await h.run_to_end(engine.get("r")) == ["n1", "outside"]
    assert (await engine.describe("r")).tags == {"n1": 1, "outside": 1}
    fork = await engine.fork("r", "tag", id="f")
    assert (await engine.describe("f")).tags == {"outside": 1}, "before the change that the fork repeats"
    assert await h.run_to_end(fork) == ["n1", "outside"]


@on_every_store
async def test_changes_in_a_loop_are_seen_after_a_replay_of_its_last_iteration(h):
    @workflow(name="tags.loop")
    async def looping(ctx: Context) -> int:
        async def body(ctx: Context, n: int) -> Any:
            before = ctx.tags.get("n")
            assert before == (None if n == 0 else n - 1), (before, n)
            await ctx.tag(n=n)
            await ctx.sleep(10)
            return Break(n) if n == 5 else Continue(n + 1)

        return await ctx.loop("turns", body, 0)

    engine = await h.engine(looping)
    run = await engine.start(looping, id="r")
    for _ in range(3):
        await h.clock.advance(15)
        await h.settle()
        await h.crash(engine)
        engine = await h.engine(looping)
    assert await h.run_to_end(engine.get(run.id)) == 5
    assert (await engine.describe("r")).tags == {"n": 5}


@on_every_store
async def test_a_run_that_continues_as_new_keeps_its_tags(h):
    @workflow(name="tags.generations")
    async def generations(ctx: Context, n: int) -> list[str]:
        SEEN.append(dict(ctx.tags))
        await ctx.tag({f"n{n}": n})
        if n < 3:
            await ctx.continue_as(n=n + 1)
        await ctx.sleep(10)
        return sorted(ctx.tags)

    engine = await h.engine(generations)
    run = await engine.start(generations, 1, id="r")
    await h.settle()
    await h.crash(engine)
    engine = await h.engine(generations)
    assert await h.run_to_end(engine.get(run.id)) == ["n1", "n2", "n3"]
    assert {} in SEEN
    assert {"n1": 1} in SEEN
    assert all(seen == {"n1": 1, "n2": 2} for seen in SEEN if len(seen) > 1)


@on_every_store
async def test_internal_runs_cannot_be_tagged_rewound_or_forked(h):
    engine = await h.engine(slow)
    now = h.clock.now()
    hidden = RunRecord(id="i", workflow="~bulk", version=1, input=b"{}", created_at=now, created_by="x", seed=1)
    await h.store.commit([CreateRun(hidden)])
    for call in (engine.tag("i", a=1), engine.rewind("i", "x"), engine.fork("i", "x")):
        with pytest.raises(InvalidArgument, match="perdure's own"):
            await call
    assert await ids(engine) == []
    assert await ids(engine, internal=True) == ["i"]
    with pytest.raises(InvalidArgument, match="reserve"):
        workflow(name="~mine")(slow.fn)
