"""Evicting a run from memory: user code of any kind is closed, without effects or records."""

import asyncio
import contextvars
import gc
import logging
from contextlib import aclosing
from typing import Any

import pytest

from perdure.codec import JSON
from perdure.model.turns import StepDone
from perdure.runner import eviction as closing
from perdure.workflows.steps import step
from tests.runner.turn_driver import Play, note

REAL: list[Any] = []


@step
async def charge(what):
    """Step whose body must never run in these tests."""
    REAL.append(what)
    return what


@pytest.fixture(autouse=True)
def nothing_really_happens():
    REAL.clear()
    yield
    gc.collect()
    assert REAL == []


async def plain(ctx):
    await charge(1)


async def finally_sync(ctx):
    try:
        await charge(1)
    finally:
        note("finally")


async def finally_step(ctx):
    try:
        await charge(1)
    finally:
        await charge("clean up")


async def finally_steps_in_a_row(ctx):
    try:
        await charge(1)
    finally:
        try:
            await charge("clean up")
        finally:
            await charge("clean up more")


async def except_base_exception(ctx):
    try:
        await charge(1)
    except BaseException:
        note("swallowed")
    await charge("continues")


async def except_and_return(ctx):
    try:
        await charge(1)
    except BaseException:
        return "swallowed"


async def except_and_raise_other(ctx):
    try:
        await charge(1)
    except BaseException:
        raise ValueError("of the handler") from None


async def stubborn_step(ctx):
    while True:
        try:
            await charge(1)
        except BaseException:
            note("again")


async def stubborn_sleep(ctx):
    while True:
        try:
            await asyncio.sleep(1)
        except BaseException:
            note("again")


async def waits_once_more(ctx):
    while True:
        try:
            await asyncio.sleep(5)
        except BaseException:
            await asyncio.sleep(0)


async def stubborn_queue(ctx):
    queue: asyncio.Queue[int] = asyncio.Queue()
    beside = asyncio.create_task(plain(ctx))
    while not beside.done():
        try:
            await queue.get()
        except BaseException:
            note("again")


async def stubborn_task(ctx):
    async def other():
        await charge(1)

    while True:
        try:
            await asyncio.create_task(other())
        except BaseException:
            note("again")


async def stubborn_durable_sleep(ctx):
    while True:
        try:
            await ctx.sleep(5)
        except BaseException:
            note("again")


async def stubborn_zero_sleep(ctx):
    while True:
        try:
            await ctx.sleep(5)
        except BaseException:
            while True:
                try:
                    await ctx.sleep(0)
                except BaseException:
                    note("again")


async def finally_gather(ctx):
    try:
        await asyncio.gather(charge(1), charge(2))
    finally:
        await asyncio.gather(charge("clean"), charge("up"))


async def finally_task_group(ctx):
    async def member():
        try:
            await charge(1)
        finally:
            await charge("clean up")

    async with asyncio.TaskGroup() as group:
        group.create_task(member())
        group.create_task(member())


async def finally_timeout(ctx):
    try:
        async with asyncio.timeout(5):
            await charge(1)
    finally:
        async with asyncio.timeout(5):
            await charge("clean up")


async def shielded(ctx):
    try:
        await asyncio.shield(asyncio.create_task(finally_step(ctx)))
    finally:
        note("outer")


async def lock_is_released(ctx):
    lock = asyncio.Lock()

    async def waiter():
        async with lock:
            await charge("never")

    async with lock:
        task = asyncio.create_task(waiter())
        await charge(1)
    await task


async def async_generator_within(ctx):
    async def pages():
        try:
            for number in range(10):
                yield await charge(number)
        finally:
            await charge("clean up")

    async for _ in pages():
        pass


async def async_generator_begun_while_closing(ctx):
    async def pages():
        try:
            yield 1
            yield 2
        finally:
            await charge("clean up")

    try:
        await charge(1)
    finally:
        found = pages()
        await anext(found)
        del found


SHAPES = [found for name, found in list(globals().items()) if asyncio.iscoroutinefunction(found) and name != "charge"]


@pytest.mark.parametrize("fn", SHAPES, ids=lambda fn: fn.__name__)
def test_every_kind_of_handler_is_closed_without_effects(fn, caplog):
    play = Play(fn).begin()
    assert play.alive
    rows = list(play.rows)
    play.close()
    assert play.rows == rows
    again = play.replayed_by(fn).begin()
    assert again.attempts == play.attempts
    assert again.turn.wake_at == play.turn.wake_at
    again.close()


@pytest.mark.parametrize("fn", SHAPES, ids=lambda fn: fn.__name__)
def test_run_can_be_evicted_after_every_turn(fn):
    play = Play(fn).begin()
    for _ in range(3):
        if not play.alive or not play.choices():
            break
        if play.running:
            location = next(iter(play.running))
            attempt = play.running.pop(location).attempt
            play.advance(StepDone(location, attempt, value=JSON.encode(1)))
        else:
            play.advance(now=play.turn.wake_at)
        if play.alive:
            play = play.crash().begin()
    play.close()


STUBBORN = [fn for fn in SHAPES if fn.__name__.startswith("stubborn")]


@pytest.mark.parametrize("fn", STUBBORN, ids=lambda fn: fn.__name__)
def test_coroutine_that_cannot_be_closed_is_retained_and_logged(fn, caplog):
    before = len(closing.UNCLOSABLE)
    play = Play(fn).begin()
    play.close()
    assert len(closing.UNCLOSABLE) > before
    assert "stays in memory" in caplog.text
    assert play.facts.id in caplog.text


def test_handlers_see_generator_exit_and_durable_calls_raise():
    async def looking(ctx):
        try:
            await charge(1)
        except BaseException as error:
            note(type(error))
            try:
                await charge(2)
            except BaseException as refused:
                note(type(refused).__name__)
            try:
                asyncio.create_task(plain(ctx))  # noqa: RUF006
            except BaseException as refused:
                note(type(refused).__name__)
            try:
                await asyncio.sleep(1)
            except BaseException as refused:
                note(type(refused).__name__)
            raise

    play = Play(looking).begin()
    assert play.close() == [GeneratorExit, "Closed", "Closed", "Closed"]


def test_releasing_a_lock_in_a_handler_raises_nothing():
    async def locking(ctx):
        lock = asyncio.Lock()

        async def waiter():
            async with lock:
                note("never")

        try:
            async with lock:
                task = asyncio.create_task(waiter())
                await asyncio.sleep(0)
                await charge(1)
            await task
        except BaseException as error:
            note(type(error))
            raise

    play = Play(locking).begin()
    loop = play.runner.state.loop
    main = loop.main
    assert main is not None
    loop.live[main] = loop.live.pop(main)  # closed first, while the other one still waits
    assert play.close() == [GeneratorExit]


def test_errors_of_handlers_are_logged_and_ignored(caplog):
    play = Play(except_and_raise_other).begin()
    play.close()
    assert "ValueError('of the handler')" in caplog.text
    assert "run-1" in caplog.text


def test_eviction_without_errors_logs_nothing(caplog):
    for fn in (plain, finally_sync, finally_step, lock_is_released, finally_task_group):
        Play(fn).begin().close()
    assert caplog.text == ""


def test_tasks_are_closed_newest_first():
    async def three(ctx):
        async def member(name):
            try:
                await charge(name)
            finally:
                note(name)

        await asyncio.gather(*(member(name) for name in "abc"))

    assert Play(three).begin().close() == ["c", "b", "a"]


def test_handler_can_reset_a_context_variable_that_it_set(caplog):
    variable = contextvars.ContextVar("variable", default=0)

    async def member():
        token = variable.set(1)
        try:
            await charge(1)
        finally:
            variable.reset(token)
            note(variable.get())

    async def main(ctx):
        token = variable.set(5)
        try:
            await asyncio.gather(member(), member())
        finally:
            variable.reset(token)
            note(variable.get())

    assert Play(main).begin().close() == [5, 5, 0]
    assert caplog.text == ""


def test_handlers_see_no_closing_while_the_run_stays_in_memory():
    async def watching(ctx):
        try:
            await charge(1)
            await ctx.sleep(5)
        except BaseException as error:
            note(type(error))
            raise
        return "end"

    play = Play(watching).begin()
    play.advance()
    play.advance()
    assert play.notes == []
    play.close()


def test_closing_twice_has_no_further_effect():
    play = Play(finally_sync).begin()
    assert play.close() == ["finally"]
    assert play.close() == []


def test_runner_that_was_never_advanced_can_be_closed():
    Play(finally_sync).close()


def test_pending_calls_of_a_closed_run_do_not_warn(recwarn):
    async def prepared(ctx):
        calls = [charge(number) for number in range(3)]
        for call in calls:
            await call

    Play(prepared).begin().close()
    gc.collect()
    assert [str(warning.message) for warning in recwarn.list] == []


def test_run_that_is_garbage_collected_without_closing_runs_no_user_code():
    """The garbage collector would run its `finally` outside of the workflow, where a step is a plain call."""

    async def outside():
        play = Play(finally_step).begin()
        loop, run = play.runner.state.loop, play.facts
        del play
        gc.collect()
        await asyncio.sleep(0)
        assert REAL == []
        assert loop in closing.LIVE
        closing.close(loop, run)

    asyncio.run(outside())


def test_run_that_ended_or_was_closed_leaves_no_objects():
    async def ends(ctx):
        return 1

    before = set(closing.LIVE)
    Play(ends).begin()
    Play(plain).begin().close()
    assert set(closing.LIVE) == before


def test_closing_under_a_real_event_loop_does_not_affect_it():
    async def outside():
        real = asyncio.get_running_loop()
        for fn in SHAPES:
            Play(fn).begin().close()
            assert asyncio.get_running_loop() is real
        gc.collect()
        await asyncio.sleep(0)
        return asyncio.all_tasks()

    assert len(asyncio.run(outside())) == 1


# --- async generators


async def pages(count):
    try:
        for number in range(count):
            yield await charge(number)
    finally:
        note("closing")
        await charge("clean up")
        note("cleaned up")


def settle(play):
    """Complete all running steps without executing their bodies."""
    while play.alive and play.running:
        location, running = play.running.popitem()
        play.advance(StepDone(location, running.attempt, value=JSON.encode(running.call.args[0])))
    return play


def test_abandoned_async_generator_is_closed_without_durable_calls(caplog):
    async def dropping(ctx):
        async for page in pages(5):
            if page == 1:
                break
        await charge("after")
        return "end"

    play = settle(Play(dropping).begin())
    assert play.value == "end"
    assert play.notes == ["closing"]
    assert list(play.entries) == ["charge", "charge#1", "charge#2"]
    assert "async generator pages was not closed" in caplog.text
    assert play.replayed_by(dropping).begin().value == "end"


def test_async_generator_with_aclosing_can_make_durable_calls():
    async def closing_it(ctx):
        async with aclosing(pages(5)) as found:
            async for page in found:
                if page == 1:
                    break
        return "end"

    play = settle(Play(closing_it).begin())
    assert play.notes == ["closing", "cleaned up"]
    assert play.entries["charge#2"].value == b'"clean up"'


def test_exhausted_async_generator_can_make_durable_calls():
    async def exhausting(ctx):
        return [page async for page in pages(2)]

    play = settle(Play(exhausting).begin())
    assert play.value == [0, 1]
    assert play.notes == ["closing", "cleaned up"]


def test_async_generator_in_a_cycle_is_closed_by_the_garbage_collector_without_durable_calls():
    async def cyclic(ctx):
        found = pages(5)
        ring = [found]
        ring.append(ring)
        await anext(found)
        return "end"

    async def outside():
        play = settle(Play(cyclic).begin())
        assert play.value == "end"
        gc.collect()
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    logging.getLogger("perdure.workflow").setLevel(logging.CRITICAL)
    try:
        assert asyncio.run(outside()) == 1
    finally:
        logging.getLogger("perdure.workflow").setLevel(logging.NOTSET)
    assert REAL == []
