"""Streams of steps can be followed live and read from any offset; items of superseded attempts are marked."""

import asyncio
import threading

import pytest

from perdure import Context, InvalidPayload, Retry, RunNotFound, WorkflowMisuse, current_step, step, workflow
from perdure.stores.writes import AppendStream, SupersedeStream
from tests.engine.store_matrix import on_every_store
from tests.engine.store_setup import Stage


def writes(engine, kind):
    return [write for batch in engine.faults.committed for write in batch if isinstance(write, kind)]


async def collect(client, run_id, name="tokens", start=0, *, details=False):
    return [item async for item in client.read_stream(run_id, name, start, details=details)]


@step
async def speak(words: list[str]) -> int:
    for word in words:
        current_step().write("tokens", word)
    return len(words)


@workflow
async def streaming_speaker(ctx: Context, words: list[str]) -> int:
    return await speak(words)


@on_every_store
async def test_stream_items_are_readable_from_any_offset(h):
    engine = await h.engine(streaming_speaker)
    run = await engine.start(streaming_speaker, ["a", "b", "c"])
    assert await h.run_to_end(run) == 3
    assert await collect(engine, run.id) == ["a", "b", "c"]
    assert await collect(engine, run.id, start=2) == ["c"]
    assert await collect(engine, run.id, "others") == []
    first = (await collect(engine, run.id, details=True))[0]
    assert (first.offset, first.value, first.superseded) == (0, "a", False)
    assert (first.location, first.attempt, first.at.timestamp()) == ("speak", 1, h.clock.now())


@on_every_store
async def test_stream_items_of_one_iteration_are_one_write_before_the_result(h):
    engine = await h.engine(streaming_speaker)
    await h.run_to_end(await engine.start(streaming_speaker, ["a", "b", "c"]))
    kinds = [type(write).__name__ for batch in engine.faults.committed for write in batch]
    assert kinds == ["CreateRun", "AppendStream", "CommitTurn"]


@on_every_store
async def test_a_sync_step_writes_from_its_thread(h):
    @step
    def type_out(n: int) -> str:
        for i in range(n):
            current_step().write("tokens", i)
        return threading.current_thread().name

    @workflow
    async def streaming_typist(ctx: Context) -> str:
        return await type_out(100)

    engine = await h.engine(streaming_typist)
    run = await engine.start(streaming_typist)
    assert "perdure-step" in await h.run_to_end(run)
    assert await collect(engine, run.id) == list(range(100))


@on_every_store
async def test_stream_reader_follows_until_the_run_ends(h):
    go = asyncio.Event()

    @step
    async def slowly() -> None:
        current_step().write("tokens", 1)
        await go.wait()
        current_step().write("tokens", 2)

    @workflow
    async def streaming_slowly(ctx: Context) -> None:
        await slowly()

    engine = await h.engine(streaming_slowly)
    run = await engine.start(streaming_slowly)
    items = engine.read_stream(run.id, "tokens")
    assert await h.drive(anext(items)) == 1
    following = h.background(anext(items))
    await h.settle()
    assert not following.done()
    go.set()
    await h.settle()
    assert following.result() == 2
    assert await h.drive(anext(items, "the end")) == "the end"


@on_every_store
async def test_a_reader_in_another_process_follows_too(h):
    engine, client = await h.engine(streaming_speaker), await h.client()
    run = await engine.start(streaming_speaker, ["a", "b"], delay=30.0)
    reading = h.background(collect(client, run.id))
    await h.settle()
    assert not reading.done()
    await h.clock.advance(40)
    assert reading.result() == ["a", "b"]


@on_every_store
async def test_items_of_an_attempt_that_failed_are_marked(h):
    @step(retry=Retry(max_attempts=3, initial=1.0))
    async def stumble() -> None:
        attempt = current_step().attempt
        current_step().write("tokens", attempt)
        if attempt < 3:
            raise ValueError("again")

    @workflow
    async def streaming_stumbler(ctx: Context) -> None:
        await stumble()

    engine = await h.engine(streaming_stumbler)
    run = await engine.start(streaming_stumbler)
    await h.run_to_end(run)
    items = await collect(engine, run.id, details=True)
    assert [(each.value, each.attempt, each.superseded) for each in items] == [
        (1, 1, True),
        (2, 2, True),
        (3, 3, False),
    ]


@on_every_store
async def test_items_of_a_process_that_died_are_marked(h):
    @step
    async def die() -> str:
        current_step().write("tokens", h.clock.now())
        await asyncio.sleep(0 if len(h.executions) > 1 else 1e9)
        return "done"

    @workflow
    async def streaming_orphan(ctx: Context) -> str:
        return await die()

    first = await h.engine(streaming_orphan)
    run = await first.start(streaming_orphan)
    await h.settle()
    await h.crash(first)
    second = await h.engine(streaming_orphan)
    assert await h.drive(second.result(run.id)) == "done"
    items = await collect(second, run.id, details=True)
    assert [each.superseded for each in items] == [True, False]


@on_every_store
async def test_first_execution_of_a_step_marks_no_stream_items(h):
    engine, client = await h.engine(streaming_speaker), await h.client()
    run = await client.start(streaming_speaker, ["a"])
    await h.drive(client.result(run.id))
    assert len(writes(engine, AppendStream)) == 1
    assert writes(engine, SupersedeStream) == []


@on_every_store
async def test_superseded_step_body_writes_no_more_stream_items(h):
    release = threading.Event()
    late = threading.Event()

    @step(timeout=1.0, retry=None)
    def stubborn() -> None:
        current_step().write("tokens", "in time")
        with h.bodies.parked():
            release.wait(10)
        current_step().write("tokens", "late")
        late.set()

    @workflow
    async def streaming_stubborn(ctx: Context) -> str:
        try:
            await stubborn()
        except TimeoutError:
            return "timed out"
        except Exception as error:
            return type(error).__name__
        return "done"

    engine = await h.engine(streaming_stubborn)
    run = await engine.start(streaming_stubborn)
    assert await h.run_to_end(run) == "StepFailed"
    release.set()
    await asyncio.to_thread(late.wait, 10)
    await h.settle()
    assert await collect(engine, run.id) == ["in time"]


@on_every_store
async def test_unencodable_stream_item_is_refused_in_the_step(h):
    @step(raises=(InvalidPayload, WorkflowMisuse))
    async def wrong(name: str) -> None:
        current_step().write(name, object())

    @workflow
    async def streaming_wrong(ctx: Context) -> list[str]:
        seen = []
        for name in ("tokens", ""):
            try:
                await wrong(name)
            except (InvalidPayload, WorkflowMisuse) as error:
                seen.append(type(error).__name__)
        return seen

    engine = await h.engine(streaming_wrong)
    assert await h.run_to_end(await engine.start(streaming_wrong)) == ["InvalidPayload", "InvalidArgument"]


@on_every_store
async def test_reading_a_stream_needs_an_existing_run(h):
    client, stage = await h.client(), Stage(h)
    with pytest.raises(RunNotFound):
        await collect(client, "unknown")
    await stage.run("r")
    with pytest.raises(WorkflowMisuse):
        await collect(client, "r", start=-1)
