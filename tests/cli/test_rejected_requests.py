"""`perdure show` of a run that has rejected requests: by its workflow, and before they were delivered."""

import asyncio

import pytest

from perdure import Client, Context, Engine, RequestRejected, event, workflow
from tests.cli.cli_runner import shape_of


@event
class Bid:
    cents: int


@workflow
async def cli_auction(ctx: Context) -> int:
    while True:
        bid = await ctx.receive_request(Bid, accept=lambda bid: bid.cents > 0)
        if bid.value.cents >= 100:
            await bid.reply("sold")
            return bid.value.cents
        await bid.fail(ValueError("too low"))


def test_show_lists_rejected_requests(shop):
    url = shop.url.replace("sqlite:///", f"sqlite:///{shop.folder}/")

    async def bid() -> None:
        async with Engine(url, workflows=[cli_auction]) as engine:
            await engine.start(cli_auction, id="auction")
            for number in range(11):
                with pytest.raises(RequestRejected):
                    await engine.request("auction", Bid(0), 30, event_id=f"bid-{number}")
            with pytest.raises(RequestRejected):
                await engine.request("auction", Bid(5), 30, event_id="low")
            assert await engine.request("auction", Bid(100), 30) == "sold"
            await engine.result("auction")

    asyncio.run(bid())
    text = shop.run("show", "auction").stdout
    assert "rejected requests (the last 10 of 12)" in text
    lines = [line.split() for line in text.partition("rejected requests")[2].splitlines()[1:]]
    assert [line[2:4] for line in lines] == [["Bid", f"bid-{n}"] for n in range(2, 11)] + [["Bid", "low"]]
    assert lines[-1][4:] == ["ValueError:", "too", "low"]
    assert "Bid:reject" in text.partition("rejected requests")[0]

    shown = shape_of(shop.json("show", "auction"))["rejected_requests"]
    assert len(shown) == 12
    assert shown[-1] == {
        "event_id": "low",
        "event_name": "Bid",
        "at": "TIME",
        "type": "ValueError",
        "message": "too low",
    }
    assert shown[0]["type"] == "RequestRejected"


def test_show_of_a_run_without_rejections_has_no_such_section(shop):
    async def start(client: Client) -> None:
        await client.start(cli_auction, id="quiet")

    shop.call(start)
    assert "rejected requests" not in shop.run("show", "quiet").stdout
