"""Commands ls, show, watch, workers, over a store in which a worker has executed runs."""

import json

import pytest

from tests.cli.cli_runner import Shop, shape_of


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store with a waiting, a failed and a succeeded run; its worker has stopped."""
    shop = Shop(tmp_path_factory.mktemp("stocked"))
    with shop.worker():
        shop.start("checkout", '{"id": "1", "cents": 999}', "--id", "waits", "--tag", "team=day")
        shop.start("checkout", '{"order": {"id": "2", "cents": -1}}', "--id", "fails")
        shop.start("checkout", '{"id": "3", "cents": 5}', "--id", "done")
        shop.until("waits", "suspended")
        shop.until("fails", "failed")
        shop.run("send", "done", "Approved", '{"by": "ada"}')
        shop.until("done", "succeeded")
        seen = shop.json("workers")
    return shop, seen


@pytest.fixture
def stocked(made):
    return made[0]


def test_ls_prints_a_table_newest_first(stocked):
    lines = stocked.run("ls").stdout.splitlines()
    assert lines[0].split() == ["run", "workflow", "status", "created", "outcome"]
    assert [line.split()[:3] for line in lines[1:]] == [
        ["done", "checkout", "succeeded"],
        ["fails", "checkout", "failed"],
        ["waits", "checkout", "suspended"],
    ]
    assert "after" in lines[1], "a list reads no results"
    assert "StepFailed" in lines[2]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--status", "failed"), ["fails"]),
        (("--status", "failed", "--status", "succeeded"), ["done", "fails"]),
        (("--workflow", "naps"), []),
        (("--tag", "team=day"), ["waits"]),
        (("--tag", "team=day", "--tag", "status=x"), []),
        (("--prefix", "fa"), ["fails"]),
        (("status:failed",), ["fails"]),
        (("team:day created>-2h",), ["waits"]),
        (("(status:failed OR waiting:event:Approved)", "--limit", "1"), ["fails"]),
        (("error:StepFailed", "--workflow", "checkout"), ["fails"]),
        (("do",), ["done"]),
        (("created>-2h", "--tag", "team=night"), []),
        (("--since", "1h"), ["done", "fails", "waits"]),
        (("--until", "1h"), []),
        (("--since", "2020-01-31T12:00Z", "--parent", "unknown"), []),
    ],
)
def test_ls_filters(stocked, options, found):
    assert [run["id"] for run in stocked.json("ls", *options)["runs"]] == found


def test_ls_takes_a_filter_that_begins_with_a_minus_after_two(stocked):
    found = json.loads(stocked.run("ls", "--json", "--", "-team:* -status:failed").stdout)
    assert [run["id"] for run in found["runs"]] == ["done"]


def test_ls_names_the_position_of_a_wrong_filter(stocked):
    assert "at position 16:" in stocked.run("ls", "status:failed a=1", code=2).stderr


def test_ls_continues_after_a_page(stocked):
    seen: list[str] = []
    after: list[str] = []
    while True:
        page = stocked.json("ls", "--limit", "2", *after)
        seen += [run["id"] for run in page["runs"]]
        if page["next"] is None:
            break
        after = ["--after", page["next"]]
    assert seen == ["done", "fails", "waits"]
    assert "--after" in stocked.run("ls", "--limit", "2").stderr


def test_show_prints_waiting_reasons_and_the_tree(stocked):
    text = stocked.run("show", "waits").stdout
    assert "event Approved" in text
    assert "no live worker has workflow checkout" in text
    lines = [line.rstrip() for line in text.splitlines()]
    tree = lines[next(number for number, line in enumerate(lines) if line.startswith("location")) + 1 :]
    assert [line.split("  ✓")[0].split("  …")[0].rstrip() for line in tree[:6]] == [
        "├─ charge",
        "├─ join",
        "│  ├─ left",
        "│  │  └─ ship",
        "│  └─ right",
        "│     └─ ship",
    ]
    assert "━" in tree[0]


def test_show_prints_tracebacks_only_with_trace(stocked):
    short, full = stocked.run("show", "fails").stdout, stocked.run("show", "fails", "--trace").stdout
    assert "ValueError at charge: nothing to charge" in short
    assert "--trace" in short
    assert "Traceback" not in short
    assert 'raise ValueError("nothing to charge")' in full


def test_watch_in_a_pipe_prints_a_line_per_entry_and_exits_with_the_outcome(stocked):
    lines = stocked.run("watch", "done").stdout.splitlines()
    assert [line.split()[3] for line in lines[:3]] == ["charge", "join/left/ship", "join/right/ship"]
    assert lines[-1] == 'done succeeded: "receipt-3 approved by ada"'
    assert stocked.run("watch", "fails", code=1).stdout.splitlines()[-1] == "fails failed"


def test_watch_with_json_prints_an_object_per_line(stocked):
    lines = [json.loads(line) for line in stocked.run("watch", "done", "--json").stdout.splitlines()]
    assert [next(iter(line)) for line in lines[-2:]] == ["entry", "run"]
    assert lines[-1]["run"]["status"] == "succeeded"


RUN = {
    "id": "waits",
    "workflow": "checkout",
    "version": 1,
    "status": "suspended",
    "input": {"order": {"id": "1", "cents": 999}},
    "result": None,
    "error": None,
    "parent": None,
    "tags": {"team": "day"},
    "created_at": "TIME",
    "updated_at": "TIME",
    "ended_at": None,
    "generation": 0,
    "recoveries": 0,
    "owner": None,
    "waiting_for": [
        {"kind": "event", "text": "event Approved", "location": "Approved", "name": "Approved", "until": None},
        {
            "kind": "no_worker",
            "text": "no live worker has workflow checkout v1",
            "location": None,
            "name": "checkout v1",
            "until": None,
        },
    ],
    "drift": [],
    "published": {},
    "held": None,
    "cancel_reason": None,
    "cancel_pending": False,
    "queue": None,
    "partition": "",
    "priority": 0,
}
ENTRY = {
    "location": "charge",
    "kind": "step",
    "name": "charge",
    "status": "succeeded",
    "value": "receipt-1",
    "error": None,
    "attempts": 1,
    "seq": 1,
    "started_at": "TIME",
    "settled_at": "TIME",
    "heartbeat": None,
    "heartbeat_at": None,
}


def test_json_of_show(stocked):
    shown = shape_of(stocked.json("show", "waits"))
    assert list(shown) == ["run", "history", "rejected_requests"]
    assert shown["rejected_requests"] == []
    assert shown["run"] == RUN
    assert shown["history"][0] == ENTRY
    assert list(shown["run"]) == list(RUN), "fields are in this order"


def test_json_of_a_failed_run(stocked):
    error = shape_of(stocked.json("show", "fails"))["run"]["error"]
    assert {**error, "cause": None} == {
        "type": "StepFailed",
        "message": "step charge failed after 1 attempt: ValueError: nothing to charge",
        "traceback": "TRACEBACK",
        "location": "charge",
        "cause": None,
        "fields": {},
        "dropped": [],
    }


def test_json_of_ls(stocked):
    page = shape_of(stocked.json("ls", "--limit", "1", "--prefix", "waits"))
    assert page == {"runs": [{**RUN, "input": None}], "next": None, "unreadable": []}, "a list has no payloads"


def test_json_of_workers(made):
    stocked, seen = made
    [worker] = shape_of(seen)["workers"]
    assert worker["id"].startswith("w-")
    assert {**worker, "id": "", "host": ""} == {
        "id": "",
        "pool": "default",
        "alive": True,
        "runs": 0,
        "pid": "PID",
        "host": "",
        "started_at": "TIME",
        "lease_until": "TIME",
        "workflows": [
            {"name": "checkout", "version": 1},
            {"name": "review", "version": 1},
            {"name": "naps", "version": 1},
        ],
    }
    assert stocked.run("workers").stdout == "No workers found.\n"


def test_unknown_run_is_not_found(stocked):
    done = stocked.run("show", "unknown", code=3)
    assert "no run has the id 'unknown'" in done.stderr
    assert "perdure ls" in done.stderr
    error = json.loads(stocked.run("show", "unknown", "--json", code=3).stderr)["error"]
    assert (error["type"], error["run"], error["next"]) == ("RunNotFound", "unknown", "perdure ls --prefix unknown")


def test_ls_does_not_create_a_missing_file(stocked):
    done = stocked.run("ls", "--store", "sqlite:///typo.db", code=3)
    assert "perdure migrate" in done.stderr
    assert not (stocked.folder / "typo.db").exists()


@pytest.mark.parametrize(
    "wrong", [("ls", "--status", "odd"), ("ls", "--since", "soon"), ("ls", "--tag", "team"), ("show",), ("shwo",)]
)
def test_invalid_arguments_are_usage_errors(stocked, wrong):
    assert stocked.run(*wrong, code=2).stderr
