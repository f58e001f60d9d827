"""What a workflow cannot do is refused with words that help; runs that cannot go on are held, with the line."""

import asyncio
import gc
import inspect
import signal
import warnings

import pytest

from tests.runner.turn_driver import Play
from tests.runner.workflows import fetch, helper


def loop():
    return asyncio.get_running_loop()


WORLD = {
    "to_thread": lambda: asyncio.to_thread(len, "x"),
    "run_in_executor": lambda: loop().run_in_executor(None, len, "x"),
    "open_connection": lambda: asyncio.open_connection("localhost", 1),
    "open_unix_connection": lambda: asyncio.open_unix_connection("/nowhere"),
    "start_server": lambda: asyncio.start_server(lambda r, w: None, "localhost", 0),
    "create_subprocess_exec": lambda: asyncio.create_subprocess_exec("true"),
    "create_subprocess_shell": lambda: asyncio.create_subprocess_shell("true"),
    "getaddrinfo": lambda: loop().getaddrinfo("localhost", 1),
    "getnameinfo": lambda: loop().getnameinfo(("127.0.0.1", 1)),
    "sock_connect": lambda: loop().sock_connect(None, None),
    "add_signal_handler": lambda: loop().add_signal_handler(signal.SIGTERM, print),
    "add_reader": lambda: loop().add_reader(0, print),
    "call_soon_threadsafe": lambda: loop().call_soon_threadsafe(print),
    "run_coroutine_threadsafe": lambda: asyncio.run_coroutine_threadsafe(helper(1), loop()),
    "stop": lambda: loop().stop(),
    "run_until_complete": lambda: loop().run_until_complete(helper(1)),
    "set_task_factory": lambda: loop().set_task_factory(None),
    "shutdown_default_executor": lambda: loop().shutdown_default_executor(),
}


@pytest.mark.parametrize("name", WORLD)
def test_blocking_and_external_calls_are_rejected(name):
    async def reaching(ctx):
        found = WORLD[name]()
        return await found if inspect.isawaitable(found) else found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a coroutine that asyncio made for what is refused
        play = Play(reaching).begin()
        gc.collect()
    assert play.failure.type == "WorkflowMisuse"
    assert "move it into a step" in play.failure.message


def test_run_continues_after_it_catches_a_workflow_misuse():
    async def reaching(ctx):
        try:
            await asyncio.to_thread(len, "x")
        except Exception as error:
            return type(error).__name__

    assert Play(reaching).begin().value == "WorkflowMisuse"


def test_asyncio_task_created_directly_is_rejected():
    async def direct(ctx):
        await asyncio.Task(helper(1))

    play = Play(direct).begin()
    assert play.failure.type == "WorkflowMisuse"
    assert "create_task" in play.failure.message


def test_eager_tasks_are_rejected():
    async def eager(ctx):
        await asyncio.eager_task_factory(loop(), helper(1))  # type: ignore[attr-defined,unused-ignore]

    async def by_option(ctx):
        await loop().create_task(helper(1), eager_start=True)

    came_with_3_12 = [eager] if hasattr(asyncio, "eager_task_factory") else []
    for fn in [by_option, *came_with_3_12]:
        play = Play(fn).begin()
        assert play.failure.type == "WorkflowMisuse"
        assert play.attempts == {}


@pytest.mark.parametrize("kind", ["generator", "set", "dict"])
def test_as_completed_rejects_unordered_collections(kind):
    async def unordered(ctx):
        coros = [helper(number) for number in range(3)]
        given = {"generator": (coro for coro in coros), "set": set(coros), "dict": dict.fromkeys(coros)}[kind]
        try:
            for each in asyncio.as_completed(given):
                await each
        finally:
            for coro in coros:
                coro.close()

    play = Play(unordered).begin()
    assert play.failure.type == "WorkflowMisuse"
    assert "list or tuple" in play.failure.message


def test_as_completed_accepts_a_tuple_and_tasks():
    async def ordered(ctx):
        first = [await each for each in asyncio.as_completed((helper(1), fetch(2)))]
        tasks = [asyncio.create_task(helper(number)) for number in range(3)]
        return first + [await each for each in asyncio.as_completed(tasks)]

    assert sorted(Play(ordered).run().value) == [0, 1, 1, 2, 2]


def test_wait_rejects_the_result_of_gather():
    """What `gather` gives hashes by its address, so that a set of it would be walked differently every time."""

    async def waiting(ctx):
        gathered = asyncio.gather(helper(1), helper(2))
        task = asyncio.create_task(helper(3))
        try:
            await asyncio.wait([gathered, task])  # type: ignore[type-var]
        finally:
            gathered.cancel()

    play = Play(waiting).begin()
    assert play.failure.type == "WorkflowMisuse"
    assert "gather" in play.failure.message


@pytest.mark.parametrize("kind", [asyncio.Event, asyncio.Queue, asyncio.Lock, asyncio.Condition])
def test_asyncio_objects_shared_between_runs_are_rejected(kind):
    shared = kind()

    async def waiting(ctx):
        match shared:
            case asyncio.Event():
                await shared.wait()
            case asyncio.Queue():
                await shared.get()
            case asyncio.Lock():
                await shared.acquire()
                await shared.acquire()
            case asyncio.Condition():
                async with shared:
                    await shared.wait()

    async def waiting_with_a_timer(ctx):
        async with asyncio.timeout(100):
            await waiting(ctx)

    first = Play(waiting_with_a_timer).begin()
    second = Play(waiting_with_a_timer, run_id="run-2").begin()
    assert first.alive
    assert second.failure.type == "WorkflowMisuse"
    assert "shared between runs" in second.failure.message
    first.close()


def test_waking_another_run_is_rejected():
    shared = asyncio.Event()

    async def waiting(ctx):
        async with asyncio.timeout(100):
            await shared.wait()

    async def setting(ctx):
        shared.set()

    first = Play(waiting).begin()
    second = Play(setting, run_id="run-2").begin()
    assert second.failure.type == "WorkflowMisuse"
    first.close()


def test_future_of_the_real_event_loop_is_rejected():
    async def outside():
        real = asyncio.get_running_loop().create_future()

        async def awaiting(ctx):
            await real

        return Play(awaiting).begin().failure

    failure = asyncio.run(outside())
    assert failure.type == "WorkflowMisuse"


def test_run_can_be_advanced_inside_a_real_event_loop():
    async def outside():
        real = asyncio.get_running_loop()
        play = Play(helper_twice).begin()
        assert asyncio.get_running_loop() is real
        play.complete()
        assert asyncio.get_running_loop() is real
        play.close()

    asyncio.run(outside())


async def helper_twice(ctx):
    await helper(1)
    await helper(2)


# --- runs that cannot go on


def line_of(fn, text):
    lines, first = inspect.getsourcelines(fn)
    number = next(index for index, line in enumerate(lines) if text in line)
    return f"{__file__}:{first + number} in {fn.__name__}"


def test_deadlocked_run_is_held_with_its_line():
    async def stuck(ctx):
        await fetch("a")
        await asyncio.Event().wait()

    play = Play(stuck).begin()
    play.complete("fetch")
    assert play.held.kind == "deadlock"
    assert play.held.line == line_of(stuck, "Event")
    assert [entry.location for entry in play.turn.entries] == ["fetch"]
    assert play.replayed_by(stuck).begin().held == play.held


def test_run_with_tasks_that_await_each_other_is_held():
    async def embrace(ctx):
        lock = asyncio.Lock()

        async def other():
            async with lock:
                pass

        async with lock:
            await asyncio.create_task(other())

    assert Play(embrace).begin().held.kind == "deadlock"


def test_spinning_run_is_held_with_its_line():
    async def spinning(ctx):
        await fetch("a")
        while True:
            await asyncio.sleep(0)

    play = Play(spinning).begin()
    play.complete("fetch")
    assert play.held.kind == "livelock"
    assert play.held.line == line_of(spinning, "sleep")
    assert play.turn.entries == ()


def test_run_that_spins_on_zero_sleeps_is_held(monkeypatch):
    monkeypatch.setattr("perdure.runner.event_loop.MAX_CALLBACKS", 1000)

    async def spinning(ctx):
        while True:
            await ctx.sleep(0)

    assert Play(spinning).begin().held.kind == "livelock"


def test_busy_run_is_not_held_for_spinning():
    async def busy(ctx):
        for _ in range(40_000):
            await asyncio.sleep(0)
        return "end"

    assert Play(busy).begin().value == "end"
