"""start, send, emit, complete, fail, cancel, terminate, resume, rewind, fork: what they do and how they end."""

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


def test_an_order_from_start_to_end(shop_everywhere):
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
    assert working.until("order-7", "succeeded")["generation"] == 1, "its event was given back to it"
    assert working.json("fork", "order-7", "Approved", "--id", "order-8") == {
        "run": "order-8",
        "from": "order-7",
        "location": "Approved",
    }
    assert working.until("order-8", "succeeded")["result"] == "receipt-7 approved by ada"
    assert "'nowhere'" in working.run("rewind", "order-7", "nowhere", code=2).stderr


def test_waiting_for_the_result(working):
    working.start("review", '["tea", 3]', "--id", "tea")
    token = working.until("tea", "suspended")["published"]["token"]
    assert working.json("complete", token, '"good"') == {"settled": True}
    assert working.json("complete", token, '"bad"', code=4) == {"settled": False}
    assert working.run("complete", token, code=4).stderr
    assert working.run("start", "review", '["tea", 3]', "--id", "tea", "-a", "shop", "--wait").stdout == '"tea: good"\n'
    working.start("review", '{"title": "mud"}', "--id", "mud")
    token = working.until("mud", "suspended")["published"]["token"]
    assert working.json("fail", token, "no time") == {"settled": True}
    failed = working.run("start", "review", '{"title": "mud"}', "--id", "mud", "-a", "shop", "--wait", code=1)
    assert "no time" in failed.stderr
    assert "perdure show mud" in failed.stderr
    assert working.run("complete", "forged", "1", code=3).stderr


def test_emit_says_how_many_it_woke_and_resume_and_cancel_do_their_work(working):
    working.start("checkout", '{"id": "1", "cents": 1}', "--id", "one")
    working.until("one", "suspended")
    assert working.json("emit", "Approved", '{"by": "all"}') == {"topic": "Approved", "woken": 1}
    working.until("one", "succeeded")
    assert "woke 0 runs" in working.run("emit", "Approved", '{"by": "nobody"}', "--app", "shop").stdout

    working.start("naps", None, "--id", "nap")
    working.until("nap", "suspended")
    assert working.run("resume", "nap").stdout == "run nap was driven on\n"
    assert working.json("cancel", "nap") == {"runs": [{"id": "nap", "done": True, "error": None}]}
    working.until("nap", "cancelled")


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
def test_what_cannot_be_started_is_refused_in_words_and_leaves_nothing(shop, args, code, word):
    assert word in shop.run(*args, "--app", "shop", code=code).stderr
    assert shop.json("ls")["runs"] == []


def test_another_payload_under_the_same_id_is_a_conflict(shop):
    shop.start("review", '["tea"]', "--id", "r")
    refused = shop.run("start", "review", '["mud"]', "--id", "r", "--app", "shop", code=4)
    assert "perdure show r" in refused.stderr


def test_what_a_worker_has_is_started_by_name_without_the_code(working):
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
    working.run("start", "review", '{"titel": "tea"}', "--id", "typo")
    [reason] = working.until("typo", "suspended")["waiting_for"]
    assert "title" in reason["text"], "the worker has checked it"


def test_without_code_and_without_workers_nothing_can_be_started(shop):
    refused = shop.run("start", "checkout", "{}", code=3).stderr
    assert "no live worker has a workflow named 'checkout'" in refused
    assert "perdure worker TARGET" in refused
    assert shop.run("start", "checkout", "{}", "--store", "sqlite:///typo.db", code=3).stderr
    assert not (shop.folder / "typo.db").exists()


def test_a_payload_may_come_from_stdin_and_a_delay_is_kept(shop):
    done = shop.run(
        "start", "review", "-", "-a", "shop.py", "--id", "r", "--delay", "1h30m", stdin='{"title": "t"}', code=0
    )
    assert done.stdout == "r\n"
    [reason] = [each for each in shop.json("show", "r")["run"]["waiting_for"] if each["kind"] == "no_worker"]
    assert "review" in reason["text"]


def test_what_touches_several_runs_asks_and_a_pipe_cannot_answer(shop):
    for name in ("a", "b", "c"):
        shop.start("naps", None, "--id", name)
    refused = shop.run("cancel", "--workflow", "naps", code=2)
    for name in ("a", "b", "c", "--yes"):
        assert name in refused.stderr
    assert refused.stdout == ""
    shop.run("terminate", "a", "b", code=2)
    assert {run["status"] for run in shop.json("ls")["runs"]} == {"pending"}
    assert shop.run("cancel", "a", "b", "--yes").stdout == "2 runs were asked to stop\n"
    done = shop.json("terminate", "--tag", "team=night", "--yes")
    assert done == {"runs": [{"id": "c", "done": True, "error": None}]}, "those that have ended are not chosen"
    assert {run["status"] for run in shop.json("ls")["runs"]} == {"cancelled"}
    mixed = json.loads(shop.run("cancel", "a", "nobody", "--yes", "--json", code=3).stdout)
    assert [each["done"] for each in mixed["runs"]] == [False, False]


@pytest.mark.parametrize(
    "args", [("cancel",), ("resume",), ("cancel", "a", "--workflow", "naps"), ("resume", "a", "--status", "suspended")]
)
def test_it_must_be_clear_which_runs_are_meant(shop, args):
    assert "--workflow" in shop.run(*args, code=2).stderr


def test_a_server_that_is_not_there_is_an_error_and_not_a_wait(monkeypatch, capsys):
    monkeypatch.setattr(session, "AWAY", 0.2)

    async def never(client):
        raise AssertionError("it was not opened")

    with pytest.raises(typer.Exit) as ended, session.error_reporting(json=True):
        session.with_client("postgresql://ada:secret@127.0.0.1:1/shop", never)
    assert ended.value.exit_code == 1
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["message"].startswith("postgresql://ada:***@127.0.0.1:1/shop cannot be reached: ")
    assert error["next"] == "the same command again, later"
