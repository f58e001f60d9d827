"""The pause before another attempt of a whole run lasts as long as its policy says, despite messages."""

from typing import Any

from perdure import Context, EngineConfig, Retry, RunStatus, event, workflow
from tests.engine.store_matrix import on_every_store

PAUSE = Retry(max_attempts=3, initial=100.0, max_delay=100.0, jitter=0.0)
LONG = EngineConfig(sweep_interval=1000.0, lease=5000.0)


@event(consume=False)
class PauseNews:
    n: int


began: list[tuple[int, float]] = []


@workflow(retry=PAUSE)
async def pause_failing(ctx: Context) -> list[Any]:
    """Fails once, then receives two events."""
    began.append((ctx.generation, ctx.now().timestamp()))  # perdure: ignore
    if ctx.generation == 0:
        raise ValueError("not yet")
    first: PauseNews = await ctx.receive(PauseNews)
    second: PauseNews = await ctx.receive(PauseNews)
    return [first.n, second.n]


async def paused(h, engine, id="r"):
    """A run whose first attempt has failed just now."""
    began.clear()
    run = await engine.start(pause_failing, id=id)
    await h.settle()
    assert await run.status() is RunStatus.SUSPENDED
    assert [generation for generation, _ in began] == [0]
    return run


@on_every_store
async def test_message_does_not_shorten_the_retry_pause(h):
    engine = await h.engine(pause_failing)
    failed_at = h.clock.now()
    run = await paused(h, engine)
    await run.send(PauseNews(1))
    await engine.complete(await engine.deferred_token("r", "any"), 1)
    await h.clock.advance(99)
    assert len(began) == 1
    client = await h.client()
    await client.send("r", PauseNews(2))
    await h.clock.advance(0.5)
    assert len(began) == 1
    (wait,) = (await engine.describe("r")).waiting_for
    assert wait.kind == "retry"
    assert await h.run_to_end(run) == [1, 2]
    assert began[1] == (1, failed_at + 100.0)


@on_every_store
async def test_message_sent_before_a_failure_does_not_shorten_the_retry_pause(h):
    client = await h.client()
    began.clear()
    run = await client.start(pause_failing, id="r")
    await client.send("r", PauseNews(1))
    await client.send("r", PauseNews(2))
    engine = await h.engine(pause_failing)
    failed_at = h.clock.now()
    await h.settle()
    await h.clock.advance(99)
    assert [generation for generation, _ in began] == [0]
    assert await h.run_to_end(run) == [1, 2]
    assert began[1] == (1, failed_at + 100.0)
    await h.drive(engine.shutdown())


@on_every_store
async def test_worker_restart_does_not_shorten_the_retry_pause(h):
    engine = await h.engine(pause_failing)
    failed_at = h.clock.now()
    run = await paused(h, engine)
    await run.send(PauseNews(1))
    await h.crash(engine)
    second = await h.engine(pause_failing)
    await second.send("r", PauseNews(2))
    await h.clock.advance(50)
    assert len(began) == 1
    assert await h.run_to_end(second.get("r")) == [1, 2]
    assert began[1] == (1, failed_at + 100.0)


@on_every_store
async def test_resume_and_cancel_do_not_wait_for_the_retry_pause(h):
    engine = await h.engine(pause_failing, config=LONG)
    run = await paused(h, engine)
    await engine.resume("r")
    await h.settle()
    assert len(began) == 2
    assert await run.status() is RunStatus.SUSPENDED  # in its receive
    await run.send(PauseNews(1))
    await run.send(PauseNews(2))
    assert await h.run_to_end(run) == [1, 2]
    other = await paused(h, engine, "other")
    assert await engine.cancel("other")
    await h.settle()
    assert await other.status() is RunStatus.CANCELLED
