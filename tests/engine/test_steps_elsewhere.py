"""Steps with a pool: their bodies execute on the workers of that pool, and the workflow sees no difference."""

import asyncio
from dataclasses import dataclass

import pytest

from perdure import (
    Context,
    CriticalError,
    Engine,
    EngineConfig,
    Retry,
    RunQuery,
    RunStatus,
    StepFailed,
    StepInterrupted,
    WorkflowMisuse,
    current_step,
    step,
    workflow,
)
from perdure.errors import InvalidArgument, InvalidPayload
from perdure.testing import Harness
from tests.engine.store_matrix import another_handle, on_every_store


@dataclass
class Image:
    name: str
    size: int


class Refused(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"refused with {code}")
        self.code = code


SEEN: list[tuple[str, str, str, int, str]] = []
FAILURES: list[BaseException] = []
STARTED: list[asyncio.Event] = []
CANCELLED: list[str] = []


@step(pool="gpu")
async def render(image: Image, scale: float = 1.0) -> Image:
    now = current_step()
    SEEN.append((now.run_id, now.workflow, now.location, now.attempt, now.idempotency_key))
    return Image(image.name, int(image.size * scale))


@step(pool="gpu")
def render_in_thread(image: Image) -> Image:
    now = current_step()
    SEEN.append((now.run_id, now.workflow, now.location, now.attempt, now.idempotency_key))
    return image


@step(pool="gpu", retry=Retry(max_attempts=3, initial=10, jitter=0), raises=Refused)
async def flaky(failures: int) -> str:
    now = current_step()
    SEEN.append((now.run_id, now.workflow, now.location, now.attempt, now.idempotency_key))
    if now.attempt <= failures:
        raise FAILURES[0] if FAILURES else ValueError(f"attempt {now.attempt}")
    return f"attempt {now.attempt}"


@step(pool="gpu")
async def endless() -> None:
    STARTED[0].set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        CANCELLED.append(current_step().location)
        raise


@pytest.fixture(autouse=True)
def _clear():
    for each in (SEEN, FAILURES, STARTED, CANCELLED):
        each.clear()


async def gpu_worker(h: Harness, **options) -> Engine:
    """Return an engine that executes steps of the pool "gpu" only."""
    return await h.engine(nothing, pool="gpu", store=another_handle(h.store, h.clock), **options)


@workflow
async def nothing(ctx: Context) -> None:
    pass


@workflow
async def thumbnails(ctx: Context, names: list[str]) -> list[int]:
    images = [await render(Image(name, 100), scale=0.5) for name in names]
    return [each.size for each in images]


@on_every_store
async def test_a_body_executes_on_a_worker_of_the_pool(h):
    engine = await h.engine(thumbnails)
    await gpu_worker(h)
    run = await engine.start(thumbnails, ["a", "b"], id="order")
    assert await h.run_to_end(run) == [50, 50]
    assert {each.engine for each in h.executions} == {2}
    assert SEEN == [
        ("order", "thumbnails", "render", 1, "order/0/render"),
        ("order", "thumbnails", "render#1", 1, "order/0/render#1"),
    ]
    entries = await h.drive(engine.history("order"))
    assert [(each.kind, each.location, each.attempts, each.value) for each in entries] == [
        ("step", "render", 1, Image("a", 50)),
        ("step", "render#1", 1, Image("b", 50)),
    ]


@on_every_store
async def test_a_thread_body_executes_on_a_worker_of_the_pool(h):
    @workflow
    async def one(ctx: Context) -> Image:
        return await render_in_thread(Image("a", 3))

    engine = await h.engine(one)
    await gpu_worker(h)
    assert await h.run_to_end(await engine.start(one, id="r")) == Image("a", 3)
    assert SEEN == [("r", "one", "render_in_thread", 1, "r/0/render_in_thread")]


@on_every_store
async def test_internal_runs_are_hidden_and_retained_for_an_hour(h):
    engine = await h.engine(thumbnails)
    await gpu_worker(h)
    await h.run_to_end(await engine.start(thumbnails, ["a"], id="order"))
    assert [each.id for each in await h.drive(engine.runs())] == ["order"]
    internal = await h.drive(engine.runs(RunQuery(internal=True)))
    assert [(each.id, each.workflow, each.parent) for each in internal] == [
        ("order/0/render", "~step/render", "order"),
        ("order", "thumbnails", None),
    ]
    await h.clock.advance(3700)
    await h.settle()
    assert [each.id for each in await h.drive(engine.runs(RunQuery(internal=True)))] == ["order"]


@on_every_store
async def test_a_waiting_run_says_that_no_worker_has_the_step(h):
    engine = await h.engine(thumbnails)
    run = await engine.start(thumbnails, ["a"], id="order")
    await h.settle()
    described = await h.drive(run.describe())
    assert described.status is RunStatus.SUSPENDED
    assert [(each.kind, each.name) for each in described.waiting_for] == [
        ("step", "order/0/render"),
        ("no_worker", "render"),
    ]
    await gpu_worker(h)
    assert await h.run_to_end(run) == [50]


@on_every_store
async def test_retries_and_backoff_are_those_of_a_local_step(h):
    @workflow
    async def retried(ctx: Context) -> str:
        return await flaky(2)

    engine = await h.engine(retried)
    await gpu_worker(h)
    before = h.clock.now()
    assert await h.run_to_end(await engine.start(retried, id="r")) == "attempt 3"
    assert h.clock.now() - before >= 30
    assert [(each[2], each[3], each[4]) for each in SEEN] == [("flaky", n, "r/0/flaky") for n in (1, 2, 3)]
    [entry] = await h.drive(engine.history("r"))
    assert (entry.attempts, entry.value) == (3, "attempt 3")


@on_every_store
async def test_an_exhausted_step_fails_like_a_local_one(h):
    @workflow
    async def failing(ctx: Context) -> tuple[str, int, str, str]:
        with pytest.raises(StepFailed) as raised:
            await flaky(5)
        error = raised.value
        return error.location, error.attempts, error.type, error.message

    engine = await h.engine(failing)
    await gpu_worker(h)
    assert await h.run_to_end(await engine.start(failing, id="r")) == ("flaky", 3, "ValueError", "attempt 3")


@on_every_store
async def test_typed_and_critical_errors_arrive_as_declared(h):
    @workflow
    async def refused(ctx: Context) -> int:
        with pytest.raises(Refused) as raised:
            await flaky(5)
        return raised.value.code

    FAILURES.append(Refused(7))
    engine = await h.engine(refused)
    await gpu_worker(h)
    assert await h.run_to_end(await engine.start(refused, id="r")) == 7
    assert len(SEEN) == 3
    SEEN.clear()
    FAILURES[:] = [CriticalError("no")]

    @workflow
    async def critical(ctx: Context) -> str:
        with pytest.raises(StepFailed) as raised:
            await flaky(5)
        return raised.value.type

    other = await h.engine(critical)
    assert await h.run_to_end(await other.start(critical, id="c")) == "CriticalError"
    assert len(SEEN) == 1


@on_every_store
async def test_arguments_that_do_not_fit_fail_the_call(h):
    @workflow
    async def wrong(ctx: Context) -> str:
        with pytest.raises(InvalidPayload, match="size"):
            await render(Image("a", "large"))  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await render()  # type: ignore[call-arg]
        return "caught"

    engine = await h.engine(wrong)
    assert await h.run_to_end(await engine.start(wrong, id="r")) == "caught"
    assert await h.drive(engine.history("r")) == []


@step(pool="gpu", retry=Retry(max_attempts=2, initial=1, jitter=0))
async def large(text: str) -> int:
    now = current_step()
    if now.attempt == 1:
        now.heartbeat("h" * 15_000)
        raise ValueError("e" * 15_000)
    return len(text)


@on_every_store
async def test_arguments_near_the_limit_are_refused_or_arrive(h):
    """What earlier attempts have left is dropped if the request is too large with it."""

    @workflow
    async def near(ctx: Context) -> int:
        with pytest.raises(InvalidPayload, match="arguments of step 'large'"):
            await large("x" * 15_000)
        return await large("x" * 10_000)

    config = EngineConfig(max_payload_bytes=20_000)
    engine = await h.engine(near, config=config)
    await gpu_worker(h, config=config)
    assert await h.run_to_end(await engine.start(near, id="r")) == 10_000


@on_every_store
async def test_a_cancelled_run_cancels_the_body(h):
    @workflow
    async def waits(ctx: Context) -> None:
        await endless()

    STARTED.append(asyncio.Event())
    engine = await h.engine(waits)
    await gpu_worker(h)
    run = await engine.start(waits, id="r")
    await h.drive(STARTED[0].wait())
    assert await h.drive(run.cancel())
    await _ends(h, engine, "r", RunStatus.CANCELLED)
    await _ends(h, engine, "r/0/endless", RunStatus.CANCELLED)
    assert CANCELLED == ["endless"]


@on_every_store
async def test_the_loser_of_a_race_is_cancelled(h):
    @workflow
    async def races(ctx: Context) -> str:
        winner, _ = await ctx.race(work=endless(), limit=ctx.sleep(5))
        return winner

    STARTED.append(asyncio.Event())
    engine = await h.engine(races)
    await gpu_worker(h)
    assert await h.run_to_end(await engine.start(races, id="r")) == "limit"
    await _ends(h, engine, "r/0/race/work/endless", RunStatus.CANCELLED)
    assert len(CANCELLED) == 1


async def _ends(h: Harness, engine: Engine, run_id: str, status: RunStatus) -> None:
    await h.clock.advance(60)
    assert await h.drive(engine.status(run_id)) is status


@on_every_store
async def test_a_crash_of_either_worker_repeats_no_recorded_result(h):
    @workflow
    async def pair(ctx: Context) -> list[int]:
        first = await render(Image("a", 1))
        await ctx.sleep(5)
        second = await render(Image("b", 2))
        return [first.size, second.size]

    engine = await h.engine(pair)
    worker = await gpu_worker(h)
    run_id = (await engine.start(pair, id="r")).id
    await h.clock.advance(2)
    await h.settle()
    await h.crash(engine)
    await h.crash(worker)
    second = await h.engine(pair)
    await gpu_worker(h)
    assert await h.drive(second.result(run_id)) == [1, 2]
    assert [each[2] for each in SEEN] == ["render", "render#1"]


@on_every_store
async def test_a_rewound_step_executes_again_under_another_id(h):
    engine = await h.engine(thumbnails)
    await gpu_worker(h)
    run = await engine.start(thumbnails, ["a", "b"], id="order")
    await h.run_to_end(run)
    await h.drive(engine.rewind("order", "render#1"))
    assert await h.run_to_end(run) == [50, 50]
    assert [each[4] for each in SEEN] == ["order/0/render", "order/0/render#1", "order/1/render#1"]


@on_every_store
async def test_a_step_that_holds_its_run_gets_new_attempts_elsewhere(h):
    @workflow(suspend_on_failure=True)
    async def holding(ctx: Context) -> str:
        return await flaky(3 if len(SEEN) < 3 else 0)

    engine = await h.engine(holding)
    await gpu_worker(h)
    run = await engine.start(holding, id="r")
    await h.clock.advance(100)
    assert (await h.drive(run.describe())).held is not None
    assert len(SEEN) == 3
    await h.drive(engine.resume("r"))
    await h.clock.advance(60)
    assert SEEN[3][3] == 1
    internal = await h.drive(engine.runs(RunQuery(internal=True, parent="r")))
    assert {each.id for each in internal} >= {"r/0/flaky", "r/0/flaky#2", "r/0/flaky#3", "r/0/flaky#4"}


@step(pool="gpu", retry=None)
async def copies() -> int:
    now = current_step()
    SEEN.append((now.run_id, str(now.last_heartbeat), now.location, now.attempt, now.idempotency_key))
    if now.last_heartbeat is None:
        now.heartbeat({"page": 3})
        await asyncio.Event().wait()
    return int(now.last_heartbeat["page"])


@on_every_store
async def test_another_worker_of_the_pool_gets_the_heartbeat_after_a_crash(h):
    @workflow
    async def copying(ctx: Context) -> int:
        return await copies()

    engine = await h.engine(copying)
    worker = await gpu_worker(h)
    run = await engine.start(copying, id="r")
    await h.clock.advance(5)
    await h.crash(worker)
    await gpu_worker(h)
    assert await h.run_to_end(run) == 3
    assert [(each[1], each[3]) for each in SEEN] == [("None", 1), ("{'page': 3}", 1)]


@step(pool="gpu", at_most_once=True)
async def once() -> None:
    SEEN.append((current_step().run_id, "", current_step().location, current_step().attempt, ""))
    await asyncio.Event().wait()


@on_every_store
async def test_a_crash_in_an_at_most_once_body_raises_step_interrupted(h):
    @workflow
    async def only_once(ctx: Context) -> str:
        with pytest.raises(StepInterrupted):
            await once()
        return "interrupted"

    engine = await h.engine(only_once)
    worker = await gpu_worker(h)
    run = await engine.start(only_once, id="r")
    await h.clock.advance(5)
    await h.crash(worker)
    await gpu_worker(h)
    assert await h.run_to_end(run) == "interrupted"
    assert len(SEEN) == 1


@on_every_store
async def test_a_crash_of_the_calling_worker_does_not_repeat_the_body(h):
    @workflow
    async def waits(ctx: Context) -> int:
        return await seven()

    engine = await h.engine(waits)
    await gpu_worker(h)
    run_id = (await engine.start(waits, id="r")).id
    await h.clock.advance(2)
    await h.crash(engine)
    second = await h.engine(waits)
    await h.clock.advance(60)
    assert await h.drive(second.result(run_id)) == 7
    assert len(SEEN) == 1


@step(pool="gpu")
async def seven() -> int:
    SEEN.append((current_step().run_id, "", current_step().location, current_step().attempt, ""))
    return 7


def test_what_no_other_process_can_find_is_refused():
    with pytest.raises(InvalidArgument, match="inside a function"):

        @step(pool="gpu")
        async def local() -> None: ...

    with pytest.raises(InvalidArgument, match="is a method"):

        class Service:
            @step(pool="gpu")
            async def method(self) -> None: ...

    with pytest.raises(InvalidArgument, match="not declared with a pool or queue"):
        step(_plain).options(pool="gpu")
    with pytest.raises(InvalidArgument, match="context"):
        step(pool="gpu", context="inherit")(_plain)


async def _plain() -> None: ...


@on_every_store
async def test_writing_to_a_stream_is_refused_with_a_reason(h):
    @workflow
    async def streaming(ctx: Context) -> str:
        with pytest.raises(StepFailed) as raised:
            await writes()
        return raised.value.message

    engine = await h.engine(streaming)
    await gpu_worker(h)
    assert "executes on another worker" in await h.run_to_end(await engine.start(streaming, id="r"))


@step(pool="gpu", retry=None)
async def writes() -> None:
    with pytest.raises(WorkflowMisuse) as raised:
        current_step().write("log", "line")
    raise ValueError(str(raised.value))
