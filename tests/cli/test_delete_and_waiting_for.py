"""perdure delete, perdure ls --waiting-for, and the reasons of perdure cancel and perdure pause."""

import asyncio

import pytest


@pytest.fixture
def working(shop):
    """A shop with a worker."""
    with shop.worker():
        yield shop


async def wait_until_held(client) -> None:
    while (await client.describe("naps-1")).held is None:
        await asyncio.sleep(0.02)


def ids(listed) -> list[str]:
    return [run["id"] for run in listed["runs"]]


def test_delete_removes_ended_runs_only(working):
    for number in (1, 2, 3):
        working.start("naps", None, "--id", f"naps-{number}")
        working.until(f"naps-{number}", "suspended")
    refused = working.run("delete", "naps-1", code=4)
    assert "terminate it first" in refused.stderr
    assert "perdure terminate naps-1" in refused.stderr
    assert "naps-9" in working.run("delete", "naps-9", code=3).stderr
    working.run("terminate", "naps-1", "naps-2", "--yes")
    assert working.run("delete", "naps-1").stdout == "Deleted run naps-1\n"
    assert ids(working.json("ls")) == ["naps-3", "naps-2"]
    deleted, open_run, unknown = working.json("delete", "naps-2", "naps-3", "naps-9", "--yes", code=3)["runs"]
    assert deleted == {"id": "naps-2", "done": True, "error": None}
    assert (open_run["done"], unknown["done"]) == (False, False)
    assert open_run["error"] == "run 'naps-3' cannot be deleted: it has not ended; terminate it first"
    assert "no run has the id 'naps-9'" in unknown["error"]
    assert ids(working.json("ls")) == ["naps-3"]


def test_delete_with_filters_selects_ended_runs(working):
    for number in (1, 2):
        working.start("naps", None, "--id", f"naps-{number}")
        working.until(f"naps-{number}", "suspended")
    working.run("terminate", "naps-1")
    assert working.json("delete", "--workflow", "naps") == {"runs": [{"id": "naps-1", "done": True, "error": None}]}
    assert ids(working.json("ls")) == ["naps-2"]
    assert "no run is given" in working.run("delete", code=2).stderr


def test_runs_are_listed_by_what_they_wait_for(working):
    working.start("naps", None, "--id", "sleeps")
    working.start("checkout", '{"id": "1", "cents": 1}', "--id", "order")
    working.start("review", '["tea", 3]', "--id", "tea")
    for run_id in ("sleeps", "order", "tea"):
        working.until(run_id, "suspended")
    assert ids(working.json("ls", "--waiting-for", "event:Approved")) == ["order"]
    assert ids(working.json("ls", "--waiting-for", "event:Paid")) == []
    assert ids(working.json("ls", "--waiting-for", "deferred:verdict")) == ["tea"]
    assert ids(working.json("ls", "--waiting-for", "timer")) == ["sleeps"]
    assert "order" in working.run("ls", "--waiting-for", "event").stdout
    refused = working.run("ls", "--waiting-for", "approval", code=2).stderr
    assert "waiting_for must be one of event, child, deferred, timer, retry, held" in refused


def test_reasons_of_cancel_and_pause_are_shown(working):
    working.start("naps", None, "--id", "naps-1")
    working.until("naps-1", "suspended")
    working.run("pause", "naps-1", "--reason", "the bank is closed")
    working.call(wait_until_held)
    shown = working.json("show", "naps-1")["run"]
    assert (shown["held"]["kind"], shown["held"]["reason"]) == ("paused", "paused: the bank is closed")
    assert ids(working.json("ls", "--waiting-for", "held:paused")) == ["naps-1"]
    working.run("cancel", "naps-1", "--reason", "not needed")
    assert working.until("naps-1", "cancelled")["cancel_reason"] == "not needed"
    entries = working.json("show", "naps-1")["history"]
    assert [entry["value"] for entry in entries if entry["kind"] == "cancel"] == ["not needed"]
