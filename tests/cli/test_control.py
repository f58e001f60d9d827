"""Commands start, send, emit, complete, fail, cancel, terminate, resume, rewind, fork: effects and exit codes."""

import json

import pytest
import typer

from perdure.cli import session
from perdure.cli.json_output import ENTRY, RUN, WORKER
from perdure.client.store_urls import redact_password


@pytest.fixture
def working(shop_anywhere):
    """A shop with a worker."""
    with shop_anywhere.worker():
        yield shop_anywhere


def test_commands_drive_an_order_from_start_to_end(shop_everywhere):
    shop = shop_everywhere
    assert shop.json("migrate") == {"store": redact_password(shop.url), "migrated": True}
    assert shop.json("workers") == {"workers": []}
    with shop.worker():
        [worker] = shop.json("workers")["workers"]
        assert (list(worker), worker["alive"]) == (list(WORKER), True)
        _order(shop)
    assert [run["id"] for run in shop.json("ls", "--status", "succeeded")["runs"]] == ["order-8", "order-7"]
    assert shop.json("doctor")["healthy"]


def _order(working):
    assert working.start("checkout", '{"id": "7", "cents": 1}', "--id", "order-7") == "order-7"
    again = working.json("start", "checkout", '{"order": {"id": "7", "cents": 1}}', "--id", "order-7", "--app", "shop")
    assert (again["created"], again["run"]["id"]) == (False, "order-7")
    working.until("order-7", "suspended")
    shown = working.json("show", "order-7")
    assert (list(shown["run"]), list(shown["history"][0])) == (list(RUN), list(ENTRY))
    assert [entry["location"] for entry in shown["history"]] == [
        "charge",
        "join/left/ship",
        "join/right/ship",
        "Approved",
    ]
    assert working.json("send", "order-7", "Approved", '{"by": "ada"}', "--app", "shop") == {
        "run": "order-7",
        "event": "Approved",
    }
    assert working.until("order-7", "succeeded")["result"] == "receipt-7 approved by ada"
    assert working.run("terminate", "order-7", code=4).stderr.count("order-7") >= 2
    working.run("send", "order-7", "Approved", '{"by": "ada"}', code=4)

    assert working.json("rewind", "order-7", "Approved") == {"run": "order-7", "location": "Approved"}
    assert working.until("order-7", "succeeded")["generation"] == 1, "the event returned to the mailbox"
    assert working.json("fork", "order-7", "Approved", "--id", "order-8") == {
        "run": "order-8",
        "from": "order-7",
        "location": "Approved",
    }
    assert working.until("order-8", "succeeded")["result"] == "receipt-7 approved by ada"
    assert "'nowhere'" in working.run("rewind", "order-7", "nowhere", code=2).stderr


def test_start_with_wait_prints_the_result_after_complete_or_fail(working):
    working.start("review", '["tea", 3]', "--id", "tea")
    token = working.until("tea", "suspended")["published"]["token"]
    assert working.json("complete", token, '"good"') == {"completed": True}
    assert working.json("complete", token, '"bad"', code=4) == {"completed": False}
    assert working.run("complete", token, code=4).stderr
    assert working.run("start", "review", '["tea", 3]', "--id", "tea", "-a", "shop", "--wait").stdout == '"tea: good"\n'
    working.start("review", '{"title": "mud"}', "--id", "mud")
    token = working.until("mud", "suspended")["published"]["token"]
    assert working.json("fail", token, "no time") == {"completed": True}
    failed = working.run("start", "review", '{"title": "mud"}', "--id", "mud", "-a", "shop", "--wait", code=1)
    assert "no time" in failed.stderr
    assert "perdure show mud" in failed.stderr
    assert working.run("complete", "forged", "1", code=3).stderr


def test_emit_resume_and_cancel_report_what_they_did(working):
    working.start("checkout", '{"id": "1", "cents": 1}', "--id", "one")
    working.until("one", "suspended")
    assert working.json("emit", "Approved", '{"by": "all"}') == {"topic": "Approved", "woken": 1}
    working.until("one", "succeeded")
    assert "woke 0 runs" in working.run("emit", "Approved", '{"by": "late"}', "--app", "shop").stdout

    working.start("naps", None, "--id", "nap")
    working.until("nap", "suspended")
    assert working.run("resume", "nap").stdout == "Resumed run nap\n"
    assert working.json("cancel", "nap") == {"runs": [{"id": "nap", "done": True, "error": None}]}
    working.until("nap", "cancelled")


@pytest.mark.parametrize("target", ["shop:checkout", "shop.py:checkout", "./shop.py:one"])
def test_start_takes_a_target_with_a_workflow(shop, target):
    done = shop.json("start", target, '{"id": "7", "cents": 1}', "--id", "order-7")
    assert (done["created"], done["run"]["workflow"]) == (True, "checkout")


def test_start_refuses_a_target_with_several_workflows(shop):
    refused = shop.run("start", "shop:workflows", "{}", code=2).stderr
    assert "checkout, naps, review" in refused
    assert shop.json("ls")["runs"] == []


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (("start", "checkut", "{}"), 3, "checkout"),
        (("start", "checkout", '{"id": 1, "cents": 2}'), 2, "order.id"),
        (("start", "checkout", '{"id": "1", "cents": 2, "gift": true}', "--tag", "oops"), 2, "KEY=VALUE"),
        (("start", "review", "[1, 2, 3]"), 2, "title, pages"),
        (("start", "review", '{"titel": "x"}'), 2, "titel"),
        (("start", "review", "{"), 2, "JSON"),
        (("start", "review", '["x"]', "--delay", "later"), 2, "duration"),
    ],
)
def test_invalid_start_is_refused_with_a_message_and_stores_nothing(shop, args, code, word):
    assert word in shop.run(*args, "--app", "shop", code=code).stderr
    assert shop.json("ls")["runs"] == []


def test_start_with_another_payload_for_an_id_is_a_conflict(shop):
    shop.start("review", '["tea"]', "--id", "r")
    refused = shop.run("start", "review", '["mud"]', "--id", "r", "--app", "shop", code=4)
    assert "perdure show r" in refused.stderr


def test_workflow_published_by_a_worker_starts_by_name_without_the_code(working):
    (working.folder / "shop.py").unlink()
    assert (
        working.run("start", "review", '{"title": "tea", "pages": 2}', "--id", "tea", "--tag", "a=b").stdout == "tea\n"
    )
    assert working.until("tea", "suspended")["tags"] == {"a": "b"}
    assert not working.json("start", "review", '{"title": "tea", "pages": 2}', "--id", "tea")["created"]
    refused = working.run("start", "rewiew", "{}", code=3).stderr
    assert "checkout, naps, review" in refused
    refused = working.run("start", "review", '["tea", 2]', code=2).stderr
    assert "an object by parameter" in refused
    assert "--app" in refused
    refused = working.run("start", "review", '{"titel": "tea"}', "--id", "typo", code=2).stderr
    assert "'title' is missing" in refused, "the published schema checks the payload"
    working.run("show", "typo", code=3)


def test_start_by_name_without_a_worker_is_refused(shop):
    refused = shop.run("start", "checkout", "{}", code=3).stderr
    assert "no live worker has a workflow named 'checkout'" in refused
    assert "perdure worker TARGET" in refused
    assert shop.run("start", "checkout", "{}", "--store", "sqlite:///typo.db", code=3).stderr
    assert not (shop.folder / "typo.db").exists()


def test_start_reads_payload_from_stdin_and_applies_delay(shop):
    done = shop.run(
        "start", "review", "-", "-a", "shop.py", "--id", "r", "--delay", "1h30m", stdin='{"title": "t"}', code=0
    )
    assert done.stdout == "r\n"
    [reason] = [each for each in shop.json("show", "r")["run"]["waiting_for"] if each["kind"] == "no_worker"]
    assert "review" in reason["text"]


def test_cancel_of_several_runs_without_yes_is_refused_in_a_pipe(shop):
    for name in ("a", "b", "c"):
        shop.start("naps", None, "--id", name)
    refused = shop.run("cancel", "--workflow", "naps", code=2)
    for name in ("a", "b", "c", "--yes"):
        assert name in refused.stderr
    assert refused.stdout == ""
    shop.run("terminate", "a", "b", code=2)
    assert {run["status"] for run in shop.json("ls")["runs"]} == {"pending"}
    assert shop.run("cancel", "a", "b", "--yes").stdout == "Cancellation requested for 2 runs\n"
    done = shop.json("terminate", "--tag", "team=night", "--yes")
    assert done == {"runs": [{"id": "c", "done": True, "error": None}]}, "ended runs are not selected"
    assert {run["status"] for run in shop.json("ls")["runs"]} == {"cancelled"}
    mixed = json.loads(shop.run("cancel", "a", "unknown", "--yes", "--json", code=3).stdout)
    assert [each["done"] for each in mixed["runs"]] == [False, False]


@pytest.mark.parametrize(
    "args", [("cancel",), ("resume",), ("cancel", "a", "--workflow", "naps"), ("resume", "a", "--status", "suspended")]
)
def test_control_commands_need_either_ids_or_filters(shop, args):
    assert "--workflow" in shop.run(*args, code=2).stderr


def test_unreachable_server_is_an_error_after_the_timeout(monkeypatch, capsys):
    monkeypatch.setattr(session, "STORE_TIMEOUT_SECONDS", 0.2)

    async def never(client):
        raise AssertionError("the client must not open")

    with pytest.raises(typer.Exit) as ended, session.error_reporting(json=True):
        session.with_client("postgresql://ada:secret@127.0.0.1:1/shop", never)
    assert ended.value.exit_code == 1
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["message"].startswith("postgresql://ada:***@127.0.0.1:1/shop cannot be reached: ")
    assert error["next"] == "retry later"
