"""Commands export and import: a run keeps its history in another store."""

import json

import pytest

from perdure.client.run_export import export_snapshot, parse_snapshot
from perdure.errors import InvalidArgument
from perdure.model.records import Entry, EntryStatus, ErrorRecord, Message, RunRecord, RunStatus, Wait
from perdure.stores.results import Snapshot

RECORD = RunRecord(
    id="r",
    workflow="w",
    version=2,
    input=b'{"order": {"id": "1"}}',
    created_at=1.5,
    created_by="creator",
    seed=7,
    status=RunStatus.FAILED,
    owner="worker",
    shard=9,
    tags={"team": "day"},
    error=ErrorRecord("E", "m", "trace", "a", fields=b'{"parts":{}}', cause=ErrorRecord("C", "n")),
    waits=(Wait("event", "e", "paid"),),
    ended_at=3.0,
)
ENTRIES = (
    Entry("a", "step", "a", EntryStatus.SUCCEEDED, 1, 0, 1, b"null", fingerprint=b"\x00\xff", attempts=2),
    Entry("b", "step", "b", EntryStatus.SUCCEEDED, 2, 1, 2, b'{"$base64":"x"}', detail=b'["d"]'),
    Entry("c", "step", "c", EntryStatus.SUCCEEDED, 3, 2, 3, b"\xc1 no JSON"),
    Entry("d", "step", "d", EntryStatus.PENDING, 4, 3),
)
INBOX = (Message(id="m", kind="event", number=1, name="paid", body=b'{"by":"ada"}', expires_at=9.0),)


def test_parsed_export_equals_the_snapshot():
    written = json.loads(json.dumps(export_snapshot(Snapshot(RECORD, 4, ENTRIES, INBOX))))
    back = parse_snapshot(written)
    assert (back.entries, back.inbox) == (ENTRIES, INBOX)
    record = back.record
    assert (record.input, record.error, record.waits, record.tags) == (
        b'{"order":{"id":"1"}}',
        RECORD.error,
        RECORD.waits,
        {"team": "day"},
    )
    assert (record.owner, record.shard, record.created_by) == (None, 0, ""), "store-local fields are not exported"


def test_export_is_readable_json():
    written = export_snapshot(Snapshot(RECORD, 4, ENTRIES, INBOX))
    assert list(written) == ["perdure", "run", "entries", "inbox"]
    assert written["run"]["input"] == {"order": {"id": "1"}}
    assert written["entries"][0]["value"] is None
    assert "value" not in written["entries"][3], "a missing value differs from null"
    assert written["inbox"][0]["body"] == {"by": "ada"}


@pytest.mark.parametrize(
    "data", [None, [], {}, {"perdure": 2, "run": {}}, {"perdure": 1, "run": {"id": 5}}, {"perdure": 1, "run": []}]
)
def test_invalid_export_is_refused_with_a_message(data):
    with pytest.raises(InvalidArgument, match=r"export|format"):
        parse_snapshot(data)


def test_imported_open_run_is_held_until_resumed(shop_anywhere):
    shop = shop_anywhere
    with shop.worker():
        shop.start("checkout", '{"id": "1", "cents": 5}', "--id", "order")
        shop.until("order", "suspended")
        shop.run("send", "order", "Approved", '{"by": "ada"}')
        shop.until("order", "succeeded")
        shop.start("review", '["tea"]', "--id", "tea")
        token = shop.until("tea", "suspended")["published"]["token"]

        exported = json.loads(shop.run("export", "order").stdout)
        assert exported["run"]["result"] == "receipt-1 approved by ada"
        assert shop.json("export", "tea", "-o", "tea.json") == {"run": "tea", "file": "tea.json", "entries": 2}

        assert shop.run("import", "-", "--id", "copy", stdin=json.dumps(exported)).stdout == "copy\n"
        copy, order = shop.json("show", "copy"), shop.json("show", "order")
        assert copy["history"] == order["history"]
        assert (copy["run"]["status"], copy["run"]["result"]) == ("succeeded", order["run"]["result"])

        assert "perdure show tea" in shop.run("import", "tea.json", code=4).stderr
        assert shop.json("import", "tea.json", "--id", "tea-2") == {"run": "tea-2"}
        held = shop.json("show", "tea-2")["run"]
        assert (held["status"], [reason["kind"] for reason in held["waiting_for"]]) == ("suspended", ["held"])
        shop.run("resume", "tea-2")
        shop.run("complete", token, '"good"')
        shop.until("tea", "succeeded")

        async def complete(client):
            await client.complete(await client.deferred_token("tea-2", "verdict"), "fine")

        shop.call(complete)
        assert shop.until("tea-2", "succeeded")["result"] == "tea: fine"


@pytest.mark.parametrize(("content", "code"), [("{", 2), ("{}", 2), (None, 3)])
def test_import_of_an_invalid_file_is_refused(shop, content, code):
    if content is not None:
        (shop.folder / "x.json").write_text(content)
    assert "x.json" in shop.run("import", "x.json", code=code).stderr or content == "{}"
    shop.run("export", "unknown", code=3)
