"""`ctx.scope`: entries are placed below a name that the user owns, whatever tasks the code in the block opens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Break, Context, Continue, current_context
from tests.runner.crash_after_every_turn import run_with_crashes
from tests.runner.turn_driver import Play, note
from tests.runner.workflows import fetch

SEEDS = range(12)


class FirstRelease:
    """A third-party library whose tasks are named after its private functions."""

    async def call(self, urls: list[str]) -> list[Any]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._request(url)) for url in urls]
        return [task.result() for task in tasks]

    async def _request(self, url: str) -> Any:
        first = await fetch(url)
        return [first, await fetch(f"{url}/2")]


class SecondRelease(FirstRelease):
    """The library with its private function renamed, and with an explicit name for its tasks."""

    async def call(self, urls: list[str]) -> list[Any]:
        tasks = [asyncio.create_task(self._send(url), name=f"request {url}") for url in urls]
        return list(await asyncio.gather(*tasks))

    async def _send(self, url: str) -> Any:
        first = await fetch(url)
        return [first, await fetch(f"{url}/2")]


def uses(library: FirstRelease) -> Any:
    async def run(ctx: Context) -> Any:
        with ctx.scope("library"):
            found = await library.call(["a", "b"])
        await fetch("after")
        return found

    return run


def test_entries_of_all_tasks_in_the_block_are_below_its_name():
    play = Play(uses(FirstRelease())).run()
    assert list(play.entries) == ["library/fetch", "library/fetch#1", "library/fetch#2", "library/fetch#3", "fetch"]


@pytest.mark.parametrize("completed", range(5))
def test_renaming_a_private_function_of_a_library_does_not_hold_a_living_run(completed):
    play = Play(uses(FirstRelease())).begin()
    for _ in range(completed):
        play.complete()
    play.close()
    later = play.replayed_by(uses(SecondRelease())).run()
    assert later.value == Play(uses(FirstRelease())).run().value


def test_without_a_block_the_renamed_function_diverges():
    """The control: the tasks of the library open scopes by the names of its functions."""

    def bare(library: FirstRelease) -> Any:
        async def run(ctx: Context) -> Any:
            return await library.call(["a", "b"])

        return run

    play = Play(bare(FirstRelease())).begin()
    play.complete()
    assert list(play.entries) == ["_request/fetch"]
    play.close()
    assert play.replayed_by(bare(SecondRelease())).begin().held.kind == "diverged"


def test_repeated_names_are_numbered_and_blocks_nest():
    async def nested(ctx: Context) -> None:
        for _ in range(2):
            with ctx.scope("outer"):
                await fetch(1)
                with ctx.scope("in/ner"):
                    await asyncio.gather(_private(), _private())
                await fetch(2)
        await fetch(3)

    assert list(Play(nested).run().entries) == [
        "outer/fetch",
        "outer/in%2Fner/fetch",
        "outer/in%2Fner/fetch#1",
        "outer/fetch#1",
        "outer#1/fetch",
        "outer#1/in%2Fner/fetch",
        "outer#1/in%2Fner/fetch#1",
        "outer#1/fetch#1",
        "fetch",
    ]


async def _private() -> Any:
    return await fetch("private")


async def _scoped(name: str) -> Any:
    with current_context().scope(name):
        return await asyncio.gather(_private(), asyncio.create_task(_private()))


def test_branches_and_iterations_keep_their_scopes_inside_and_around_a_block():
    async def body(ctx: Context, n: int) -> Any:
        await asyncio.gather(_scoped("in loop"), _private())
        return Continue(n + 1) if n < 1 else Break(n)

    async def run(ctx: Context) -> None:
        await ctx.join(a=_scoped("x"), b=_scoped("x"))
        with ctx.scope("lib"):
            await ctx.join(a=_private(), b=asyncio.create_task(_private()))
            await ctx.map(fetch, [1], name="each")
            await ctx.loop("pages", body, 0)
            await ctx.sleep(1)

    play = run_with_crashes(run)
    assert sorted(each for each, entry in play.entries.items() if entry.kind == "step") == sorted(
        [
            *("join/a/x/fetch", "join/a/x/fetch#1", "join/b/x/fetch", "join/b/x/fetch#1"),
            *("lib/join/a/fetch", "lib/fetch", "lib/each/~0/fetch"),
            *(f"lib/pages/~{n}/in loop/fetch{number}" for n in range(2) for number in ("", "#1")),
            *(f"lib/pages/~{n}/fetch" for n in range(2)),
        ]
    )
    assert play.entries["lib/sleep"].kind == "sleep"


def test_task_that_outlives_the_block_stays_in_its_scope():
    async def late() -> Any:
        await fetch("in the block")
        await fetch("after the block")

    async def run(ctx: Context) -> None:
        with ctx.scope("block"):
            task = asyncio.create_task(late())
            await fetch(1)
        await fetch(2)
        await task

    assert sorted(Play(run).run().entries) == ["block/fetch", "block/fetch#1", "block/fetch#2", "fetch"]


def test_the_scope_ends_when_the_block_raises():
    async def run(ctx: Context) -> None:
        try:
            with ctx.scope("block"):
                await fetch(1)
                raise ValueError("no")
        except ValueError:
            await fetch(2)

    assert list(Play(run).run().entries) == ["block/fetch", "fetch"]


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_with_many_tasks_replay_after_every_turn(seed):
    async def worker(ctx: Context, n: int) -> Any:
        await fetch(n)
        if n % 2:
            await ctx.sleep(n)
        with ctx.scope("part"):
            try:
                async with asyncio.timeout(3):
                    await asyncio.gather(_private(), _private())
            except TimeoutError:
                note("late")
        return (await fetch(-n), ctx.random.randint(0, 9))

    async def run(ctx: Context) -> Any:
        with ctx.scope("lib"):
            together = asyncio.gather(*(worker(ctx, n) for n in range(3)))
            raced = await ctx.race(a=worker(ctx, 5), b=worker(ctx, 6))
            return [await together, raced]

    play = run_with_crashes(run, seed=seed)
    assert len(play.value) == 2
    assert all(each.startswith("lib/") for each in play.entries)


@pytest.mark.parametrize("name", ["", 5, None])
def test_invalid_name_is_rejected(name):
    async def wrong(ctx: Context) -> None:
        with ctx.scope(name):
            pass

    assert Play(wrong).begin().failure.type == "InvalidArgument"


def test_block_in_a_callback_is_rejected():
    async def run(ctx: Context) -> None:
        def callback() -> None:
            try:
                ctx.scope("block")
            except Exception as error:
                note(type(error).__name__)

        asyncio.get_running_loop().call_soon(callback)
        await ctx.sleep(1)

    play = Play(run).begin()
    assert play.notes == ["WorkflowMisuse"]
    play.close()
