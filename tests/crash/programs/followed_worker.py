"""A worker whose runs write when another process is known to follow them: `followed_worker URL LOG`.

Neither polls nor sweeps happen in the time of a test, so that only notifications reach and leave this process.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure import Context, EngineConfig, Worker, current_step, event, step, workflow
from perdure.client.store_urls import open_store
from perdure.clock import SYSTEM_CLOCK
from perdure.stores.followed_runs import FollowedRuns
from perdure.stores.sqlite import store as sqlite_store
from tests.crash.effect_log import effect

HOUR = 3600.0
CONFIG = EngineConfig(sweep_interval=HOUR, lease=HOUR, grace=0.2)
STORES: list[Any] = []


@event(name="followed.double")
class Double:
    number: int


@event(name="followed.stop")
class Stop:
    pass


def followed_runs() -> FollowedRuns:
    store = STORES[0]
    found: FollowedRuns = (
        store._followed_runs if isinstance(store, sqlite_store.SqliteStore) else (store._listener.followed_runs)
    )
    return found


async def until(holds: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(holds):
        await asyncio.sleep(0.005)


async def until_followed() -> None:
    run_id = current_step().run_id
    await until(lambda: followed_runs().is_followed_elsewhere(run_id))


@step
async def write_words(log: str, gates: str, words: list[str]) -> None:
    """Write each word when its file exists. The first one also waits until the run is followed."""
    effect(log, "begun")
    await until_followed()
    for word in words:
        await until((Path(gates) / word).exists)
        current_step().write("words", word)


@step
async def wait_until_followed(log: str) -> None:
    effect(log, "begun")
    await until_followed()


@workflow(name="followed.writer")
async def writer(ctx: Context, log: str, gates: str, words: list[str]) -> None:
    await write_words(log, gates, words)
    await ctx.receive(Stop)


@workflow(name="followed.doubler")
async def doubler(ctx: Context, log: str, requests: int) -> int:
    for _ in range(requests):
        request = await ctx.receive_request(Double)
        await wait_until_followed(log)
        await request.reply(2 * request.value.number)
    await ctx.receive(Stop)
    return requests


@workflow(name="followed.echo")
async def echo(ctx: Context, log: str) -> int:
    return (await ctx.receive(Double)).number


async def main(url: str) -> None:
    STORES.append(open_store(url, SYSTEM_CLOCK))
    await Worker(STORES[0], [writer, doubler, echo], config=CONFIG).run()


if __name__ == "__main__":
    sqlite_store.POLL_INTERVAL_SECONDS = HOUR
    # The module is imported twice: as the program, and by this name, under which the workflows are registered.
    from tests.crash.programs import followed_worker

    asyncio.run(followed_worker.main(sys.argv[1]))
