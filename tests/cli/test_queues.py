"""`perdure queues` and the options of `perdure start` about queues."""

import pytest

from perdure.client.client import Client
from perdure.execution.queue_declarations import create_queue
from perdure.model.queue_records import QueueSettings
from tests.cli.cli_runner import Shop


@pytest.fixture
def queued(shop: Shop) -> Shop:
    """A shop with queues and waiting runs, without a worker."""

    async def declare(client: Client) -> None:
        session = client._session.store_session
        await create_queue(session, "naps", QueueSettings(concurrency=1))
        await create_queue(session, "split", QueueSettings(partitioned=True, partition_concurrency=1))

    shop.call(declare)
    shop.start("naps", None, "--id", "n1", "--queue", "naps")
    shop.start("naps", None, "--id", "n2", "-q", "naps", "--priority", "-5", "--dedupe", "k")
    return shop


def test_list_and_show(queued: Shop):
    found = {each["name"]: each for each in queued.json("queues", "ls")["queues"]}
    assert set(found) == {"naps", "split"}
    assert (found["naps"]["waiting"], found["naps"]["limited_by"]) == (2, "no_worker")
    assert found["naps"]["declared"]["concurrency"] == 1
    shown = queued.json("queues", "show", "naps")["queue"]
    assert shown["oldest"]["run_id"] == "n2"
    assert shown["holders"] == {"executing": 0, "suspended": 0, "held": 0, "held_runs": []}
    assert "naps" in queued.run("queues", "ls").stdout
    assert "concurrency 1" in queued.run("queues", "show", "naps").stdout
    run = queued.json("show", "n2")["run"]
    assert (run["queue"], run["priority"]) == ("naps", -5)
    assert run["waiting_for"][0]["kind"] == "queue"


def test_start_options(queued: Shop):
    joined = queued.json("start", "naps", "--app", "shop", "--queue", "naps", "--dedupe", "k")
    assert (joined["created"], joined["run"]["id"]) == (False, "n2")
    refused = queued.run(
        "start", "naps", "--app", "shop", "-q", "naps", "--dedupe", "k", "--on-duplicate", "refuse", code=4
    )
    assert "dedupe key 'k'" in refused.stderr
    assert queued.start("naps", None, "--id", "s1", "-q", "split", "--partition", "a", "--max-wait", "1h") == "s1"
    assert "is partitioned" in queued.run("start", "naps", "--app", "shop", "-q", "split", code=2).stderr
    unknown = queued.run("start", "naps", "--app", "shop", "-q", "unknown", code=2)
    assert "declare WorkQueue('unknown')" in unknown.stderr


def test_waiting_move_release_and_clear(queued: Shop):
    waiting = queued.json("queues", "waiting", "naps")
    assert [each["run_id"] for each in waiting["waiting"]] == ["n2", "n1"]
    first = queued.json("queues", "waiting", "naps", "--limit", "1")
    following = queued.json("queues", "waiting", "naps", "--after", first["next"])
    assert [each["run_id"] for each in following["waiting"]] == ["n1"]
    assert queued.json("queues", "move", "naps", "n1", "--priority", "-10") == {"run": "n1", "priority": -10}
    assert [each["run_id"] for each in queued.json("queues", "waiting", "naps")["waiting"]] == ["n1", "n2"]
    assert "n1" in queued.run("queues", "waiting", "naps").stdout
    queued.run("queues", "release", "naps", "n1")
    assert queued.json("queues", "clear", "naps", "--yes") == {"queue": "naps", "cancelled": 1}
    assert queued.json("show", "n2")["run"]["status"] == "cancelled"
    assert queued.run("queues", "waiting", "naps").stdout == "No waiting runs found.\n"


def test_pause_resume_and_resize(queued: Shop):
    queued.run("queues", "pause", "naps", "--reason", "closed")
    paused = queued.json("queues", "show", "naps")["queue"]
    assert (paused["paused"]["reason"], paused["limited_by"]) == ("closed", "paused")
    queued.run("queues", "resume", "naps")
    queued.run("queues", "resize", "naps", "--concurrency", "none", "--rate", "5/min")
    resized = queued.json("queues", "show", "naps")["queue"]
    assert resized["override"] == {"concurrency": None, "rate": {"limit": 5, "per": 60.0}}
    queued.run("queues", "resize", "naps", "--reset")
    assert queued.json("queues", "show", "naps")["queue"]["override"] == {}
    queued.run("queues", "resize", "split", "--partition", "a", "--concurrency", "3", "--weight", "2")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("show", "unknown"), 3, "no work queue of this store has the name 'unknown'"),
        (("resize", "naps"), 2, "nothing to change"),
        (("resize", "naps", "--concurrency", "x"), 2, "must be a whole number or `none`"),
        (("resize", "naps", "--weight", "2"), 2, "--weight needs --partition"),
        (("resize", "split", "--partition", "a", "--max-waiting", "3"), 2, "not an option of one partition"),
        (("move", "naps", "missing", "--priority", "1"), 3, "missing"),
        (("release", "split", "n1"), 2, "has no place or slot in queue 'split'"),
        (("clear", "naps"), 2, "--yes"),
    ],
)
def test_wrong_uses(queued: Shop, args, code, message):
    assert message in queued.run("queues", *args, code=code).stderr


def test_queue_names_are_completed(queued: Shop):
    completed = queued.run(_PERDURE_COMPLETE="complete_bash", COMP_WORDS="perdure queues show ", COMP_CWORD="3").stdout
    assert set(completed.split()) == {"naps", "split"}
