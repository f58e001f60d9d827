"""Evicting a run that is suspended inside async generators: they are closed innermost first, without effects."""

import asyncio
import gc
import logging
from contextlib import aclosing
from typing import Any

import pytest

from perdure.runner import closing
from perdure.workflows.steps import step
from tests.runner.turn_driver import Play, note

REAL: list[Any] = []


@step
async def charge(what):
    """Step whose body must never run in these tests."""
    REAL.append(what)
    return what


@pytest.fixture(autouse=True)
def nothing_really_happens(monkeypatch):
    unraisable: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    REAL.clear()
    yield
    gc.collect()
    assert REAL == []
    assert unraisable == []


async def fetch():
    try:
        return await charge(1)
    finally:
        note("fetch")
        await charge("clean up fetch")


async def inner():
    try:
        yield await fetch()
    finally:
        note("inner")
        await charge("clean up inner")


async def outer():
    try:
        async for page in inner():
            yield page
    finally:
        note("outer")
        await charge("clean up outer")


async def in_one(ctx):
    async for _ in inner():
        pass


async def in_two(ctx):
    try:
        async for _ in outer():
            pass
    finally:
        note("main")


async def in_a_cycle(ctx):
    pages = outer()
    ring = [pages]
    ring.append(ring)
    async for _ in pages:
        pass


async def in_a_cycle_through_itself(ctx):
    async def pages():
        keep.append(found)
        try:
            yield await fetch()
        finally:
            await charge("clean up")

    keep: list[Any] = []
    found = pages()
    async for _ in found:
        pass


async def in_a_cycle_of_frames(ctx):
    async def one():
        async for page in two():
            yield page

    async def two():
        try:
            async for page in outer():
                yield page, generators
        finally:
            await charge("clean up two")

    generators = [one()]
    async for _ in generators[0]:
        pass


async def in_anext_with_a_default(ctx):
    await anext(outer(), None)


async def in_asend(ctx):
    pages = outer()
    await pages.asend(None)


async def in_a_task_of_its_own(ctx):
    await asyncio.ensure_future(anext(outer()))


async def in_several_tasks(ctx):
    await asyncio.gather(in_two(ctx), in_one(ctx), in_a_cycle(ctx))


async def between_pages(ctx):
    async def pages():
        try:
            yield 1
            yield 2
        finally:
            await charge("clean up")

    async for _ in pages():
        await charge("page")


async def between_pages_in_a_cycle(ctx):
    async def pages():
        try:
            yield ring
            yield 2
        finally:
            await charge("clean up")

    ring: list[Any] = [pages()]
    ring.append(ring)
    async for _ in ring[0]:
        await charge("page")


async def in_aclose(ctx):
    async def pages():
        try:
            yield 1
        finally:
            await fetch()

    async with aclosing(pages()) as found:
        await anext(found)


async def in_athrow(ctx):
    async def pages():
        try:
            yield 1
        except ValueError:
            await fetch()
            yield 2

    found = pages()
    await anext(found)
    await found.athrow(ValueError())


async def behind_a_coroutine_wrapper(ctx):
    class Waits:
        def __await__(self):
            return (yield from in_two(ctx).__await__())

    await Waits()


SHAPES = [
    found
    for name, found in list(globals().items())
    if asyncio.iscoroutinefunction(found) and name.startswith(("in_", "between_", "behind_"))
]


@pytest.mark.parametrize("fn", SHAPES, ids=lambda fn: fn.__name__)
def test_generators_of_an_evicted_run_execute_nothing(fn, caplog):
    caplog.set_level(logging.DEBUG)

    async def outside():
        Play(fn).begin().close()
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(outside())
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


@pytest.mark.parametrize("fn", SHAPES, ids=lambda fn: fn.__name__)
def test_run_with_generators_is_in_the_same_state_after_an_eviction(fn):
    play = Play(fn).begin()
    play.close()
    again = play.replayed_by(fn).begin()
    assert again.attempts == play.attempts
    again.close()


def test_generators_are_closed_innermost_first():
    assert Play(in_two).begin().close() == ["fetch", "inner", "outer", "main"]


def test_handlers_of_a_generator_that_keep_awaiting_are_retained(caplog):
    async def stubborn():
        while True:
            try:
                yield await charge(1)
            except BaseException:
                note("again")

    async def program(ctx):
        async for _ in stubborn():
            pass

    before = len(REAL)
    assert len(Play(program).begin().close()) >= closing.MAX_CLOSE_ATTEMPTS
    gc.collect()
    assert len(REAL) == before
    assert "stays in memory" in caplog.text


def test_error_in_the_handler_of_a_generator_is_logged_and_the_rest_is_closed(caplog):
    async def raising():
        try:
            yield await charge(1)
        finally:
            raise ValueError("of the generator")

    async def program(ctx):
        try:
            async for _ in raising():
                pass
        finally:
            note("main")

    assert Play(program).begin().close() == ["main"]
    assert "of the generator" in caplog.text
