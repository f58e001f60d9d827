"""Commands dead-letters ls, show, replay, rm."""

import asyncio

import pytest

from tests.cli.cli_runner import POLL, shape_of


@pytest.fixture
def dead(shop_anywhere):
    """A store with three dead letters: events that a terminated run had not read."""
    shop = shop_anywhere
    shop.start("naps", None, "--id", "late")
    for number in range(3):
        by = f'{{"by": "{number}"}}'
        shop.run("send", "late", "Approved", by, "--app", "shop", "--event-id", f"e{number}")
    shop.run("terminate", "late")

    async def three(client):
        while len(await client.dead_letters()) < 3:
            await asyncio.sleep(POLL)

    with shop.worker():
        shop.call(three)
        shop.start("checkout", '{"id": "1", "cents": 1}', "--id", "taker")
        shop.until("taker", "suspended")
    return shop


def test_dead_letters_are_listed_shown_replayed_and_removed(dead):
    page = dead.json("dead-letters", "ls", "--limit", "2")
    assert len(page["dead_letters"]) == 2
    rest = dead.json("dead-letters", "ls", "--after", page["next"])
    first, second, third = [letter["id"] for letter in page["dead_letters"] + rest["dead_letters"]]
    assert shape_of(page["dead_letters"][0]) == {
        "id": first,
        "kind": "event",
        "reason": "the run ended without receiving it",
        "event_id": "e0",
        "event_name": "Approved",
        "value": {"by": "0"},
        "original_target": "late",
        "target_status": "cancelled",
        "target_ended_at": "TIME",
        "sent_at": "TIME",
    }
    assert dead.json("dead-letters", "show", first) == {"dead_letter": page["dead_letters"][0]}
    assert '{"by":"0"}' in dead.run("dead-letters", "show", first).stdout
    assert first in dead.run("dead-letters", "ls", "--event", "Approved", "--kind", "event").stdout

    assert dead.json("dead-letters", "replay", first, "--to", "taker") == {"id": first, "to": "taker"}
    dead.run("dead-letters", "replay", first, "--to", "taker", code=3)
    dead.run("dead-letters", "replay", second, "--to", "unknown", code=3)

    dead.run("dead-letters", "rm", code=2)
    refused = dead.run("dead-letters", "rm", "--kind", "event", code=2).stderr
    for shown in (second, third, "Approved", "--yes"):
        assert shown in refused
    assert dead.json("dead-letters", "rm", "--kind", "event", "--yes") == {"removed": [second, third]}
    assert "perdure dead-letters ls" in dead.run("dead-letters", "rm", third, code=3).stderr
    assert dead.run("dead-letters", "ls").stdout == "No dead letters found.\n"
    with dead.worker():
        assert dead.until("taker", "succeeded")["result"] == "receipt-1 approved by 0"
