"""Held runs on the command line: ls --held, resume --held, pause, pending cancels; two definitions of a workflow."""

import json

import pytest

HELD = """
import asyncio
from perdure import Context, workflow

@workflow
async def stuck(ctx: Context) -> None:
    await asyncio.get_running_loop().create_future()

@workflow
async def naps(ctx: Context) -> None:
    await ctx.sleep(86_400)

workflows = [stuck, naps]
"""


@pytest.fixture
def held_shop(shop):
    (shop.folder / "shop.py").write_text(HELD)
    return shop


def wait_until_held(shop, *ids: str) -> None:
    async def wait(client) -> None:
        import asyncio

        while not all([(await client.describe(id)).held for id in ids]):
            await asyncio.sleep(0.02)

    shop.call(wait)


def test_held_runs_are_listed_shown_and_resumed(held_shop):
    shop = held_shop
    with shop.worker():
        for n in range(2):
            shop.start("stuck", None, "--id", f"stuck-{n}")
        shop.start("naps", None, "--id", "naps")
        shop.until("naps", "suspended")
        wait_until_held(shop, "stuck-0", "stuck-1")

        listed = shop.run("ls").stdout.splitlines()
        assert [("held" in line, "suspended" in line) for line in listed[1:]] == [
            (False, True),
            (True, False),
            (True, False),
        ]
        assert "deadlock: nothing can wake this run" in listed[-1]
        found = shop.json("ls", "--held")["runs"]
        assert [run["id"] for run in found] == ["stuck-1", "stuck-0"]
        assert {run["status"] for run in found} == {"suspended"}
        held = found[0]["held"]
        assert list(held) == ["kind", "reason", "location", "line", "recorded", "asked"]
        assert (held["kind"], held["reason"]) == ("deadlock", "nothing can wake this run")
        assert "shop.py" in held["line"]
        shown = shop.run("show", "stuck-0").stdout
        assert "status    held" in shown
        assert "shop.py:7 in stuck" in shown

        resumed = shop.json("resume", "--held", "--yes")["runs"]
        assert sorted(each["id"] for each in resumed) == ["stuck-0", "stuck-1"]
        assert shop.run("resume", "--held", "--workflow", "naps").stdout == "Resumed 0 runs\n"
        shop.run("resume", "stuck-0", "--held", code=2)


def test_paused_run_shows_its_reason_and_a_cancel_is_pending_without_a_worker(held_shop):
    shop = held_shop
    with shop.worker():
        shop.start("naps", None, "--id", "naps")
        shop.until("naps", "suspended")
        assert shop.run("pause", "naps", "--reason", "the bank is closed").stdout == "Pause requested for run naps\n"
        wait_until_held(shop, "naps")
    assert "paused: the bank is closed" in shop.run("show", "naps").stdout
    shop.run("cancel", "naps", "--reason", "not needed")
    assert "pending: not needed" in shop.run("show", "naps").stdout
    run = shop.json("show", "naps")["run"]
    assert (run["cancel_pending"], run["cancel_reason"]) == (True, "not needed")
    with shop.worker():
        run = shop.until("naps", "cancelled")
    assert (run["cancel_pending"], run["cancel_reason"], run["held"]) == (False, "not needed", None)


def test_commands_refuse_two_definitions_of_one_workflow(shop):
    (shop.folder / "returns.py").write_text(HELD)
    (shop.folder / "shop.py").write_text(f"import returns\n{HELD}")
    for command in (("worker", "shop"), ("check", "shop")):
        failed = shop.run(*command, code=2)
        assert "workflow 'stuck' version 1 is defined in returns.stuck and shop.stuck" in failed.stderr
    error = json.loads(shop.run("start", "naps", "--app", "shop", "--json", code=2).stderr)["error"]
    assert "returns.naps and shop.naps" in error["message"]
    assert shop.run("start", "shop:naps", "--id", "named").stdout.strip() == "named"
