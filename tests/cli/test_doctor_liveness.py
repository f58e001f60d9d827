"""`doctor` proves liveness: each way in which a run waits for ever without a word is an error that names the run."""

import asyncio

import apsw
import pytest

from perdure import Context, RunStatus, StoreError, step, workflow
from perdure.admin.health_check import check_health
from perdure.admin.repair import repair
from perdure.admin.run_progress import find_wait_cycles
from perdure.model.queries import RunQuery
from perdure.testing import Harness
from tests.engine.store_matrix import on_every_store
from tests.stores.damage import damage_run, delete_subscriptions


@step
async def checked_step() -> int:
    return 1


@workflow(name="checked.receives")
async def receives(ctx: Context) -> str:
    await checked_step()
    return str(await ctx.receive("go"))


@workflow(name="checked.awaits")
async def awaits(ctx: Context, run_id: str) -> None:
    await ctx.run_child(awaits, ctx.run_id, id=run_id)  # that run waits for this one


@workflow(name="checked.parent")
async def parent(ctx: Context) -> None:
    await ctx.run_child(receives, id="open")


@workflow(name="checked.stuck")
async def deadlocked(ctx: Context) -> None:
    await asyncio.get_running_loop().create_future()


async def errors(h: Harness, client, *, deep: bool = False) -> list[tuple[str, str | None]]:
    report = await h.drive(check_health(client, deep=deep))
    return [(finding.kind, finding.subject) for finding in report.findings if finding.severity == "error"]


@on_every_store
async def test_healthy_runs_of_a_live_worker_are_no_findings(h):
    engine = await h.engine(receives)
    await h.drive(engine.start(receives.options(id="r")))
    await h.clock.advance(600)
    assert (await h.drive(check_health(engine, deep=True))).findings == ()


@on_every_store
async def test_held_run_is_an_error_with_its_reason(h):
    engine = await h.engine(deadlocked)
    await h.drive(engine.start(deadlocked.options(id="r")))
    await h.settle()
    report = await h.drive(check_health(engine))
    [finding] = report.findings
    assert (finding.kind, finding.severity, finding.subject) == ("held", "error", "r")
    assert "(deadlock): nothing can wake this run" in finding.text
    assert "perdure resume r" in finding.advice
    assert report.progress_reasons == {"held": 1}


@on_every_store
async def test_run_that_its_live_owner_does_not_execute_is_found_and_released(h):
    engine = await h.engine(receives)
    await h.drive(engine.start(receives.options(id="r")))
    await h.settle()
    coordinator = engine._runtime.coordinator
    coordinator.on_runs_claimed = lambda runs, at=None: None  # a defect: the worker drops what it claims
    coordinator.on_runs_found = lambda run_ids, claimed_at=None, positions=None: None
    await h.drive(engine.send("r", "go", "now"))
    await h.settle()
    client = await h.client()
    assert await errors(h, client) == [], "it may need a while"
    await h.clock.advance(150)
    assert await errors(h, client) == [("stalled", "r")]
    del coordinator.on_runs_claimed, coordinator.on_runs_found
    found = await h.drive(check_health(client))
    assert await h.drive(repair(client, found.findings)) == [f"released run r of worker {engine.worker}"]
    assert await h.drive(client.result("r")) == "now"


@on_every_store
async def test_long_step_of_a_live_owner_is_no_stall(h):
    gate = asyncio.Event()

    @step
    async def long() -> None:
        await gate.wait()

    @workflow(name="checked.long")
    async def runs_long(ctx: Context) -> None:
        await long()

    engine = await h.engine(runs_long)
    run = await engine.start(runs_long.options(id="r"))
    await h.clock.advance(1_000)
    assert await errors(h, engine) == []
    gate.set()
    await h.drive(run.result())


@on_every_store
async def test_runs_that_wait_for_each_other_or_themselves_are_found(h):
    engine = await h.engine(awaits, receives, parent)
    await h.drive(engine.start(parent.options(id="fine")))
    for run_id, awaited in (("a", "b"), ("b", "a"), ("self", "self")):
        await h.drive(engine.start(awaits.options(id=run_id, delay=1), awaited))
    await h.clock.advance(10)
    report = await h.drive(check_health(engine))
    assert [(each.kind, each.text) for each in report.findings] == [
        ("wait_cycle", "Runs a, b wait for each other"),
        ("wait_cycle", "Run self waits for itself"),
    ]


def test_wait_cycles_of_a_graph():
    def cycles(**waits: str) -> list[tuple[str, ...]]:
        return find_wait_cycles({run_id: frozenset(awaited.split()) for run_id, awaited in waits.items()})

    assert cycles(a="b", b="c", c="a") == [("a", "b", "c")]
    assert cycles(a="b", b="outside") == []
    assert cycles(a="a outside") == [], "the other run may end"
    assert cycles(a="a") == [("a",)]
    assert cycles(a="b", b="b") == [("b",)]


@on_every_store
async def test_lost_subscription_is_found_and_the_run_subscribes_again(h, store_kind):
    if store_kind == "memory":
        return  # nothing outside of the store can delete its subscriptions
    engine = await h.engine(receives)
    await h.drive(engine.start(receives.options(id="r")))
    await h.settle()
    assert await errors(h, engine) == []
    await delete_subscriptions(h.store, "r")
    assert await errors(h, engine) == [("lost_subscription", "r")]
    found = await h.drive(check_health(engine))
    assert await h.drive(repair(engine, found.findings)) == ["run r will subscribe again"]
    await h.settle()
    assert await errors(h, engine) == []
    assert await h.drive(engine.emit("go", "now")) == 1
    assert await h.drive(engine.result("r")) == "now"
    assert h.executed("r") == [("checked_step", 1)], "a recorded step does not run again"


# What makes the row of a run unreadable, by store.
DAMAGES = {"sqlite": ("tags", "{"), "postgres": ("error", "{"), "redis": ("tags", b"\xff")}


@on_every_store
async def test_unreadable_run_is_named_and_skipped_and_holds_no_other_run_up(h, store_kind):
    if store_kind == "memory":
        return  # its rows are records
    engine = await h.engine(receives)
    ids = [f"r{number}" for number in range(30)]
    for run_id in ids:
        await h.drive(engine.start(receives.options(id=run_id)))
    await h.settle()
    await h.crash(engine)
    await damage_run(h.store, "r7", *DAMAGES[store_kind])
    client = await h.client()
    page = await client.runs(RunQuery(limit=20))
    other = await client.runs(RunQuery(limit=20, after=page.next))
    assert sorted(run.id for run in (*page, *other)) == sorted(set(ids) - {"r7"})
    assert [mark.id for mark in (*page.unreadable, *other.unreadable)] == ["r7"]
    assert ("unreadable", "r7") in await errors(h, client)
    with pytest.raises(StoreError, match="run 'r7' cannot be read"):
        await client.describe("r7")
    second = await h.engine(receives)
    for run_id in ids:
        await h.drive(client.send(run_id, "go", "now"))
    results = [await h.drive(client.result(run_id), within=200) for run_id in ids if run_id != "r7"]
    assert results == ["now"] * 29
    assert await h.store.owned(second.worker) == [], "r7 is held and has no owner"
    assert await h.drive(client.terminate("r7"))
    assert await errors(h, client) == []


@on_every_store
async def test_hold_of_another_format_is_replaced_and_the_run_can_be_resumed(h, store_kind):
    """A note that cannot be decoded left its run `running` under a live owner for ever."""
    if store_kind not in ("sqlite", "postgres"):
        return  # Redis stores hold, waits and result in one field: see the test above
    engine = await h.engine(receives)
    await h.drive(engine.start(receives.options(id="r")))
    await h.settle()
    await h.crash(engine)
    await damage_run(h.store, "r", "held", '{"note": 1}')
    other = await h.engine(receives)
    await h.clock.advance(60)  # the dead worker is fenced: a later change of workers would retry the held run
    await h.drive(other.send("r", "go", "now"))
    assert ("unreadable", "r") in await errors(h, other)
    await h.drive(other.resume("r"))
    await h.clock.advance(60)
    (record,) = await h.store.records(["r"])
    assert record.status is RunStatus.SUSPENDED
    assert record.held is not None
    assert record.held.kind == "internal_error"
    assert "column held" in record.held.reason
    await h.drive(other.resume("r"))
    assert await h.drive(other.result("r")) == "now"


def test_command_names_the_unreadable_run_and_lists_skip_it(shop):
    shop.start("naps", None, "--id", "nap")
    shop.start("naps", None, "--id", "broken")
    connection = apsw.Connection(str(shop.folder / "shop.db"))
    connection.execute("UPDATE runs SET tags = '{' WHERE id = 'broken'")
    connection.close()
    assert "Run broken cannot be read: column tags" in shop.run("doctor", code=1).stdout
    listed = shop.run("ls")
    assert "nap" in listed.stdout
    assert "broken" not in listed.stdout
    assert "Skipped: run 'broken' cannot be read (column tags" in listed.stderr
    page = shop.json("ls")
    assert [run["id"] for run in page["runs"]] == ["nap"]
    assert [(mark["id"], "column tags" in mark["reason"]) for mark in page["unreadable"]] == [("broken", True)]
