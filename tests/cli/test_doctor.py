"""Guarantee 5 over a store: each way in which an open run may be stuck is found, and repaired where it can be."""

import apsw
import pytest

from perdure import Context, EngineConfig, workflow
from perdure.admin.findings import Finding
from perdure.admin.health_check import check_health
from perdure.admin.repair import prune, repair
from perdure.admin.run_progress import StoreState, progress_reason
from perdure.admin.store_views import Prunable, prunable, workers_of
from perdure.cli.json_output import FINDING
from perdure.model.records import (
    Entry,
    EntryStatus,
    Hold,
    Message,
    RunRecord,
    RunStatus,
    Subscription,
    TopicEvent,
    Wait,
    WorkerRecord,
)
from perdure.model.turns import TurnExtras
from perdure.stores.writes import CommitTurn, CreateRun, DeliverMessage, EndRun, ObserveRunEnd, PublishEvent, RunPatch
from tests.engine.store_matrix import on_every_store

NOW = 1000.0
EVENT, CHILD = Wait("event", "e", "paid"), Wait("child", "c", "kid")


@workflow(name="inspected")
async def inspected(ctx: Context) -> None:
    await ctx.sleep(1)


def row(run_id: str = "r", **fields) -> RunRecord:
    given = {"workflow": "inspected", "version": 1, "input": b"{}", "created_at": NOW, "created_by": run_id, "seed": 1}
    return RunRecord(id=run_id, **{**given, **fields})


def worker(worker_id: str, lease_until: float, **fields) -> WorkerRecord:
    pairs = (("inspected", 1),)
    return WorkerRecord(
        id=worker_id, pool="default", workflows=pairs, lease_until=lease_until, started_at=NOW, pid=1, **fields
    )


STATE = StoreState(
    NOW, {"alive": worker("alive", NOW + 1), "late": worker("late", NOW - 1)}, frozenset({"unfinalized"})
)
KIDS = {
    "open": row("open"),
    "notified": row("notified", status=RunStatus.FAILED),
    "unfinalized": row("unfinalized", status=RunStatus.SUCCEEDED),
    "missing": None,
}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"owner": "alive"}, "owner"),
        ({"owner": "late"}, "no owner"),
        ({"owner": "unheard-of"}, "no owner"),
        ({"wake_at": NOW + 5}, "due"),
        ({"held": Hold("deadlock", "because")}, "held"),
        ({"waits": (EVENT,)}, "event"),
        ({"waits": (Wait("event", "e", "unread"),)}, "no wake-up for an unread event"),
        ({"waits": (Wait("deferred", "d", "verdict"),)}, "deferred"),
        ({"waits": (Wait("child", "c", "open"),)}, "child"),
        ({"waits": (Wait("child", "c", "unfinalized"),)}, "child"),
        ({"waits": (Wait("child", "c", "notified"),)}, "no notification of the end of a child"),
        ({"waits": (Wait("child", "c", "missing"),)}, "no notification of the end of a child"),
        ({"waits": (Wait("timer", "t", until=NOW + 5),)}, "no reason to continue"),
        ({}, "no reason to continue"),
    ],
)
def test_progress_reason_of_an_open_run(fields, reason):
    assert progress_reason(row(**fields), STATE, KIDS, frozenset({"unread"})) == reason


async def kinds(client) -> set[tuple[str, str]]:
    return {(finding.kind, finding.severity) for finding in (await check_health(client)).findings}


async def committed(client, *writes) -> None:
    for write in writes:
        await client._session.store.commit([write])


async def suspended(client, run_id: str, *waits: Wait, **fields) -> None:
    """A suspended run whose worker was removed."""
    store, now = client._session.store, client._session.clock.now()
    maker = WorkerRecord(id=f"maker-{run_id}", pool="x", workflows=(), lease_until=now + 60, started_at=now)
    await store.join(maker)
    record = row(run_id, owner=maker.id, **fields)
    patch = RunPatch(status=RunStatus.SUSPENDED, waits=waits)
    extras = TurnExtras(
        subscribe=tuple(
            Subscription(f"0/{wait.location}", (wait.name or "",)) for wait in waits if wait.kind == "event"
        )
    )
    turn = CommitTurn(
        run_id=run_id, base=0, turn_id="t", worker=maker.id, owned=True, now=now, patch=patch, extras=extras
    )
    await committed(client, CreateRun(record), turn)
    await store.remove_worker(maker.id)


@on_every_store
async def test_healthy_store_has_no_findings(h):
    client = await h.client()
    await suspended(client, "e", EVENT)
    found = await check_health(client)
    assert (found.open_runs, dict(found.progress_reasons), found.findings) == (1, {"event": 1}, ())


@on_every_store
async def test_stuck_run_is_found_and_resumed(h):
    client = await h.client()
    await suspended(client, "stuck", Wait("timer", "t", until=5.0))
    await suspended(client, "lonely", Wait("child", "c", "pruned-since"))
    found = await check_health(client)
    assert [(finding.kind, finding.subject) for finding in found.findings if finding.severity == "error"] == [
        ("stuck", "lonely"),
        ("stuck", "stuck"),
    ]
    assert found.progress_reasons == {"nothing": 2}
    assert sorted(await repair(client, found.findings)) == ["resumed run lonely", "resumed run stuck"]
    assert (await check_health(client)).errors == 0


@on_every_store
async def test_run_with_an_awaited_unread_event_is_stuck_unless_due(h):
    client = await h.client()
    store, now = client._session.store, client._session.clock.now()
    await suspended(client, "m", EVENT)
    await committed(client, DeliverMessage(run_id="m", message=Message(id="1", kind="event", name="paid"), now=now))
    assert ("stuck", "error") not in await kinds(client), "the message has made it due"
    [record] = await store.records(["m"])
    assert record is not None
    state = StoreState(now)
    quiet = row("m", waits=(EVENT,), status=RunStatus.SUSPENDED)
    assert progress_reason(quiet, state, {}, frozenset({"paid"})) == "no wake-up for an unread event"


@on_every_store
async def test_runs_of_dead_workers_are_found_and_released(h):
    client = await h.client()
    store, now = client._session.store, client._session.clock.now()
    for name in ("w1", "w2"):
        await store.join(worker(name, now + 10))
    for name in ("a", "b"):
        await committed(client, CreateRun(row(name, owner="w1", created_at=now)))
    assert await kinds(client) == set()
    await h.clock.advance(20)
    assert await kinds(client) == {("expired_lease", "error"), ("dead_worker", "warning")}
    assert [(view.id, view.alive, view.runs) for view in await workers_of(client)] == [
        ("w1", False, 2),
        ("w2", False, 0),
    ]
    actions = await repair(client, (await check_health(client)).findings)
    assert sorted(actions) == [
        "removed dead worker w1 and released 2 runs",
        "removed dead worker w2 and released 0 runs",
    ]
    assert await kinds(client) == {("no_worker", "warning")}
    assert await workers_of(client) == []
    assert [record.recoveries for record in await store.records(["a", "b"]) if record] == [1, 1]


@on_every_store
async def test_runs_of_an_unknown_worker_are_found_and_released(h, monkeypatch):
    """A store keeps the row of a worker that owns runs, so the test hides the row."""
    client = await h.client()
    store, now = client._session.store, client._session.clock.now()

    async def no_workers() -> list[WorkerRecord]:
        return []

    await store.join(worker("w1", now + 10))
    await committed(client, CreateRun(row("a", owner="w1")))
    monkeypatch.setattr(store, "workers", no_workers)
    found = await check_health(client)
    assert [(finding.kind, finding.subject) for finding in found.findings] == [("orphaned_runs", "w1")]
    assert await repair(client, found.findings) == ["released 1 run of unknown worker w1"]
    assert await kinds(client) == {("no_worker", "warning")}


@on_every_store
async def test_repair_does_not_remove_a_worker_that_renewed_its_lease(h):
    client = await h.client()
    store, now = client._session.store, client._session.clock.now()
    await store.join(worker("w1", now + 10))
    await committed(client, CreateRun(row("a", owner="w1", created_at=now)))
    await h.clock.advance(20)
    found = await check_health(client)
    await store.renew(worker("w1", client._session.clock.now() + 10))
    assert await repair(client, found.findings) == ["worker w1 has renewed its lease and was not changed"]
    assert await kinds(client) == set()


@on_every_store
async def test_due_runs_that_no_worker_claims_are_found(h):
    client = await h.client()
    now = client._session.clock.now()
    await committed(client, CreateRun(row("late", created_at=now, wake_at=now)))
    assert await kinds(client) == {("no_worker", "warning")}
    await h.clock.advance(100)
    await client._session.store.join(worker("w", client._session.clock.now() + 10))
    assert await kinds(client) == {("overdue", "warning")}


@on_every_store
async def test_unfinalized_runs_are_found_and_finalized(h):
    client = await h.client()
    store, now = client._session.store, client._session.clock.now()
    await suspended(client, "parent", CHILD)
    await committed(
        client,
        CreateRun(row("kid", created_at=now)),
        ObserveRunEnd(run_id="kid", observer="parent", target="0:c"),
        EndRun(run_id="kid", turn_id="t", now=now),
    )
    found = await check_health(client)
    assert found.progress_reasons == {"child": 1}
    assert found.errors == 0, "a worker has not had a minute"
    await h.clock.advance(100)
    assert ("unfinalized", "error") in await kinds(client)
    assert "finalized 1 run" in await repair(client, (await check_health(client)).findings)
    assert [message.kind for message in await store.inbox("parent")] == ["child"]
    assert ("unfinalized", "error") not in await kinds(client)


@on_every_store
async def test_unfinished_broadcasts_are_found_and_finished(h):
    client = await h.client()
    store, now = client._session.store, client._session.clock.now()
    maker = WorkerRecord(id="maker", pool="x", workflows=(), lease_until=now + 600, started_at=now)
    await store.join(maker)
    for name in ("a", "b", "c"):
        extras = TurnExtras(subscribe=(Subscription("0/e", ("news",)),))
        patch = RunPatch(status=RunStatus.SUSPENDED, waits=(Wait("event", "e", "news"),))
        turn = CommitTurn(
            run_id=name, base=0, turn_id="t", worker="maker", owned=True, now=now, patch=patch, extras=extras
        )
        await committed(client, CreateRun(row(name, owner="maker")), turn)
    event = TopicEvent(topic="news", id="n", body=b"1", sent_at=now, consume=False)
    await committed(client, PublishEvent(event=event, now=now, page=1))
    await h.clock.advance(100)
    found = await check_health(client)
    assert ("unfinished_broadcast", "error") in {(each.kind, each.severity) for each in found.findings}
    assert "finished 1 broadcast" in await repair(client, found.findings)
    assert [len(await store.inbox(name)) for name in ("a", "b", "c")] == [1, 1, 1]


@on_every_store
async def test_large_payloads_and_skewed_clocks_are_found(h):
    client = await h.client()
    store, now = client._session.store, client._session.clock.now()
    await suspended(client, "big", EVENT, input=b'"' + b"x" * 1_000_000 + b'"')
    await suspended(client, "future", EVENT, created_at=now + 100)
    ahead = WorkerRecord(id="w", pool="p", workflows=(), lease_until=now + 1000, started_at=now + 500)
    await store.join(ahead)
    assert {(finding.kind, finding.subject) for finding in (await check_health(client)).findings} == {
        ("large_payload", "big"),
        ("clock_skew", None),
        ("clock_skew", "w"),
    }


@on_every_store
async def test_deep_check_finds_large_values_in_histories(h):
    client = await h.client()
    store, now = client._session.store, client._session.clock.now()
    await store.join(worker("w1", now + 10))
    large = Entry("load", "step", "load", EntryStatus.SUCCEEDED, 1, 0, 1, b'"' + b"x" * 1_000_000 + b'"')
    await committed(client, CreateRun(row("r", owner="w1", created_at=now), (large,)))
    assert await kinds(client) == set()
    [finding] = (await check_health(client, deep=True)).findings
    assert (finding.kind, finding.subject) == ("large_payload", "r")
    assert "at load" in finding.text


@on_every_store
async def test_nearly_full_mailbox_is_found(h):
    client = await h.client()
    now = client._session.clock.now()
    client._session.config = EngineConfig(max_pending_events=5)
    await suspended(client, "m", EVENT)
    for number in range(4):
        message = Message(id=str(number), kind="event", name="unread")
        await committed(client, DeliverMessage(run_id="m", message=message, now=now))
    [finding] = [each for each in (await check_health(client)).findings if each.kind == "mailbox_nearly_full"]
    assert finding.subject == "m"
    assert "4 unread events; its mailbox holds at most 5" in finding.text


@on_every_store
async def test_worker_whose_clock_is_ahead_of_the_others_is_found(h):
    client = await h.client()
    store, now = client._session.store, client._session.clock.now()
    await store.join(worker("ahead", now + 300))
    assert await kinds(client) == set(), "alone it may have a long lease"
    await store.join(worker("b", now + 15))
    [finding] = (await check_health(client)).findings
    assert (finding.kind, finding.subject) == ("clock_skew", "ahead")
    assert "285.0 s later" in finding.text


@on_every_store
async def test_child_that_outlived_its_parent_is_found_and_cancelled(h):
    client = await h.client()
    now = client._session.clock.now()
    await committed(client, CreateRun(row("mother", created_at=now)), EndRun(run_id="mother", turn_id="t", now=now))
    await repair(client, [Finding("unfinalized", "error", "", "", "mother", "finalize")])
    await suspended(client, "kid", EVENT, parent="mother", attached=True)
    found = await check_health(client)
    assert [(finding.kind, finding.subject) for finding in found.findings] == [("orphan_child", "kid")]
    await repair(client, found.findings)
    assert await client.status("kid") is RunStatus.CANCELLED or await client._session.store.inbox("kid")


@on_every_store
async def test_prune_deletes_runs_whose_retention_is_over(h):
    client = await h.client()
    now = client._session.clock.now()
    for name in ("a", "b"):
        end = EndRun(run_id=name, turn_id="t", now=now, prune_after=50.0)
        await committed(client, CreateRun(row(name, created_at=now, retention=50.0)), end)
    assert (await prunable(client, first=1), await prune(client, 10)) == (Prunable(0, ()), 0)
    await h.clock.advance(60)
    due = await prunable(client, first=1)
    assert (due.count, len(due.first)) == (2, 1)
    assert await prune(client, 10) == 2
    assert await client.status("a") is None


def test_the_program_says_it_and_exits_for_a_monitor(shop_anywhere):
    shop = shop_anywhere
    shop.start("naps", None, "--id", "nap")
    report = shop.json("doctor")
    assert (report["healthy"], report["open_runs"], report["progress_reasons"], report["repairs"]) == (
        True,
        1,
        {"due": 1},
        [],
    )
    assert list(report) == ["healthy", "at", "open_runs", "progress_reasons", "findings", "repairs"]
    [finding] = report["findings"]
    assert (list(finding), finding["kind"]) == (list(FINDING), "no_worker")
    shop.call(lambda client: suspended(client, "stuck"))
    text = shop.run("doctor", code=1).stdout
    assert "stuck" in text
    assert "stuck" in text
    assert "--repair" in text
    repaired = shop.run("doctor", "--repair", "--deep").stdout
    assert "Repaired: resumed run stuck" in repaired
    assert shop.json("prune") == {"pruned": 0}
    assert shop.json("terminate", "nap", "stuck", "--yes")["runs"][1]["done"]

    async def outlive(client):
        await committed(client, *(CreateRun(row(name, retention=0.0)) for name in ("old", "older")))
        for name in ("old", "older"):
            await committed(client, EndRun(run_id=name, turn_id="t", now=NOW, prune_after=0.0))

    shop.call(outlive)
    asked = shop.run("prune", code=2).stderr
    for word in ("old", "older", "inspected", "--yes"):
        assert word in asked
    assert shop.json("prune", "--yes") == {"pruned": 2}


def test_a_repair_that_would_cancel_several_runs_asks(shop):
    async def orphan(client):
        now = client._session.clock.now()
        await committed(client, CreateRun(row("mother", created_at=now)), EndRun(run_id="mother", turn_id="t", now=now))
        await repair(client, [Finding("unfinalized", "error", "", "", "mother", "finalize")])
        for name in ("kid", "twin"):
            await suspended(client, name, EVENT, parent="mother", attached=True, created_at=now)

    shop.call(orphan)
    asked = shop.run("doctor", "--repair", code=2)
    for word in ("kid", "twin", "--yes"):
        assert word in asked.stderr
    assert {run["status"] for run in shop.json("ls", "--parent", "mother")["runs"]} == {"suspended"}
    assert "requested cancellation of run kid" in shop.run("doctor", "--repair", "--yes").stdout


def test_a_schema_of_a_later_version_is_refused(shop):
    connection = apsw.Connection(str(shop.folder / "shop.db"))
    connection.pragma("user_version", 999)
    connection.close()
    assert "upgrade perdure" in shop.run("doctor", code=1).stderr
