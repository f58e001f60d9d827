"""`show` prints the last heartbeat of a running step."""

import asyncio

from perdure import Context, Engine, current_step, step, workflow
from tests.cli.cli_runner import Shop


def test_show_prints_the_last_heartbeat_of_a_running_step(shop: Shop) -> None:
    @step
    async def copy() -> None:
        current_step().heartbeat({"page": 7})
        await asyncio.Event().wait()

    @workflow(name="cli.copying")
    async def copying(ctx: Context) -> None:
        await copy()

    async def main() -> None:
        async with Engine(f"sqlite:///{shop.folder}/shop.db?synchronous=off", [copying]) as engine:
            await engine.start(copying, id="r")
            async for entry in engine.get("r").watch():
                if entry.heartbeat_at is not None:
                    break
            text = (await asyncio.to_thread(shop.run, "show", "r")).stdout
            [shown] = (await asyncio.to_thread(shop.json, "show", "r"))["history"]
            await engine.terminate("r")
        assert "page" in text
        assert "heartbeat" in text
        assert (shown["status"], shown["value"], shown["heartbeat"]) == ("pending", None, {"page": 7})
        assert shown["heartbeat_at"].endswith("Z")

    asyncio.run(main())
