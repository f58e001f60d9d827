"""`perdure start` with --if-exists, --timeout and --send, on every store."""

from collections.abc import Iterator

import pytest

from tests.cli.cli_runner import Shop

ORDER = '{"id": "7", "cents": 1}'
START = ("checkout", ORDER, "--id", "order-7")


@pytest.fixture
def working(shop_everywhere: Shop) -> Iterator[Shop]:
    """A shop with a worker."""
    with shop_everywhere.worker():
        yield shop_everywhere


def test_start_sends_first_messages_and_restarts(working: Shop):
    assert working.start(*START, "--send", 'Approved={"by": "ada"}') == "order-7"
    assert working.until("order-7", "succeeded")["result"] == "receipt-7 approved by ada"
    refused = working.run("start", *START, "--app", "shop", "--if-exists", "reject", code=4).stderr
    assert "already exists" in refused
    ended = working.run("start", *START, "--app", "shop", "--send", 'Approved={"by": "eve"}', code=4).stderr
    assert "succeeded" in ended
    other = ("checkout", '{"id": "8", "cents": 1}', "--id", "order-7", "--app", "shop")
    again = working.json("start", *other, "--if-exists", "restart_ended")
    assert (again["created"], again["run"]["generation"]) == (True, 1)
    working.until("order-7", "suspended")
    again = working.json("start", *other, "--if-exists", "restart", "--send", 'Approved={"by": "eve"}')
    assert (again["created"], again["run"]["generation"]) == (True, 2)
    assert working.until("order-7", "succeeded")["result"] == "receipt-8 approved by eve"


def test_start_by_published_name_takes_the_same_options(working: Shop):
    started = working.json(
        "start", "checkout", f'{{"order": {ORDER}}}', "--id", "a", "--send", 'Approved={"by": "ada"}'
    )
    assert started["created"]
    working.until("a", "succeeded")
    working.run("start", "checkout", f'{{"order": {ORDER}}}', "--id", "a", "--if-exists", "reject", code=4)
    failed = working.json("start", "naps", "--id", "n", "--timeout", "0.2s")
    assert failed["created"]
    assert working.until("n", "failed")["error"]["type"] == "TimeoutError"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--if-exists", "replace"), "restart_ended"),
        (("--timeout", "soon"), "not a duration"),
        (("--timeout", "0s"), "more than zero"),
        (("--send", '={"by": "ada"}'), "EVENT=JSON"),
        (("--send", "Approved={"), "not valid JSON"),
        (("--send", 'Approved={"by": 5}'), "Approved"),
    ],
)
def test_invalid_options_are_refused_and_nothing_is_started(shop: Shop, options: tuple[str, ...], message: str):
    shop.create_store()
    assert message in shop.run("start", *START, "--app", "shop", *options, code=2).stderr
    assert shop.json("ls")["runs"] == []


def test_values_of_if_exists_are_completed(shop: Shop):
    completed = shop.run(
        _PERDURE_COMPLETE="complete_bash", COMP_WORDS="perdure start --if-exists ", COMP_CWORD="3"
    ).stdout
    assert set(completed.split()) == {"observe", "reject", "restart_ended", "restart"}
