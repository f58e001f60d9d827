"""Locations: scopes, numbers, keys and escaping."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import InvalidArgument
from perdure.model.locations import escape_segment, scope_of, segment_of
from perdure.runner.scopes import Scope
from tests.runner.turn_driver import Play
from tests.runner.workflows import fetch, helper


def asked(fn):
    """All locations of a run, in the order in which they were asked for."""
    play = Play(fn).run()
    entries = sorted(play.entries.values(), key=lambda entry: entry.call_seq)
    return [entry.location for entry in entries if entry.kind != "timer"]


def test_repeated_names_are_numbered_in_order():
    async def three(ctx):
        await fetch(1)
        await fetch(2)
        await fetch(3)

    assert asked(three) == ["fetch", "fetch#1", "fetch#2"]


def test_key_is_part_of_the_location_and_numbered_separately():
    async def keyed(ctx):
        await fetch.options(key="eu")(1)
        await fetch.options(key=7)(2)
        await fetch(3)
        await fetch.options(key="eu")(4)
        await fetch.options(name="other")(5)

    assert asked(keyed) == ["fetch[eu]", "fetch[7]", "fetch", "fetch[eu]#1", "other"]


def test_task_opens_a_scope_named_after_its_function():
    async def tasks(ctx):
        await asyncio.gather(helper(1), helper(2))

    assert asked(tasks) == ["helper/fetch", "helper#1/fetch"]


def test_explicit_task_name_is_the_name_of_its_scope():
    async def named(ctx):
        first = asyncio.create_task(helper(1), name="alpha")
        async with asyncio.TaskGroup() as group:
            group.create_task(helper(2), name="beta")
            group.create_task(helper(3))
        await first

    assert asked(named) == ["alpha/fetch", "beta/fetch", "helper/fetch"]


def test_name_set_before_the_task_runs_is_used():
    async def renamed(ctx):
        task = asyncio.create_task(helper(1))
        task.set_name("gamma")
        await task

    assert asked(renamed) == ["gamma/fetch"]


def test_empty_task_name_is_ignored():
    async def empty(ctx):
        await fetch(0)
        await asyncio.create_task(helper(1), name="")

    assert asked(empty) == ["fetch", "helper/fetch"]


def test_scopes_are_numbered_in_start_order():
    async def started(ctx):
        def make():
            return [asyncio.create_task(helper(number), name="same") for number in range(3)]

        first = make()
        first[0].cancel()
        await asyncio.gather(*first, return_exceptions=True)

    play = Play(started).begin()
    assert {location: step.call.args[0] for location, step in play.running.items()} == {
        "same#1/fetch": 1,
        "same#2/fetch": 2,
    }
    play.close()


def test_scopes_can_be_nested():
    async def nested(ctx):
        async def inner():
            await fetch(1)
            await asyncio.gather(helper(2), helper(3))

        await asyncio.create_task(inner())

    assert asked(nested) == ["inner/fetch", "inner/helper/fetch", "inner/helper#1/fetch"]


def test_task_of_a_step_call_opens_no_scope():
    async def plain(ctx):
        await asyncio.gather(fetch(1), fetch(2))
        await asyncio.create_task(fetch(3), name="ignored")
        async with asyncio.TaskGroup() as group:
            group.create_task(fetch(4))
        for each in asyncio.as_completed([fetch(5), ctx.sleep(5)]):
            await each

    assert asked(plain) == ["fetch", "fetch#1", "fetch#2", "fetch#3", "fetch#4", "sleep"]


def test_wait_for_runs_in_the_scope_of_its_caller():
    async def waiting(ctx):
        await asyncio.wait_for(fetch(1), 5)
        await asyncio.wait_for(helper(2), 5)
        await asyncio.wait_for(asyncio.create_task(helper(3)), 5)

    assert asked(waiting) == ["fetch", "fetch#1", "helper/fetch"]


def test_call_is_requested_when_it_is_awaited_not_when_it_is_created():
    async def late(ctx):
        second, first = fetch.options(name="second")(2), fetch.options(name="first")(1)
        await first
        await second

    assert asked(late) == ["first", "second"]


def test_task_and_step_with_the_same_name_do_not_collide():
    async def twins(ctx):
        await asyncio.create_task(helper(1), name="fetch")
        await fetch(2)

    assert asked(twins) == ["fetch/fetch", "fetch#1"]


def test_structural_characters_in_names_are_escaped():
    async def odd(ctx):
        await fetch.options(name="a/b#1[c]~%")(1)
        await fetch.options(name="x", key="]/[")(2)
        await asyncio.create_task(helper(3), name="~cancel/..")

    assert asked(odd) == ["a%2Fb%231%5Bc%5D%7E%25", "x[%5D%2F%5B]", "%7Ecancel%2F../fetch"]


def test_invalid_key_is_rejected():
    with pytest.raises(InvalidArgument, match="key"):
        fetch.options(key="")
    with pytest.raises(InvalidArgument, match="key"):
        fetch.options(key="a\nb")


names = st.text(min_size=1, max_size=6) | st.sampled_from(["a", "a#1", "a[b]", "~timer", "a/b", "%", "%2F", "#", "~"])
paths = st.lists(st.tuples(names, st.none() | names, st.integers(0, 3)), min_size=1, max_size=4)


def path_of(segments):
    """A path as scopes write it: the n-th thing of a name, perhaps with a key, in each of the scopes."""
    path = ""
    for name, key, number in segments:
        scope = Scope(path, {})
        segment = escape_segment(name) if key is None else f"{escape_segment(name)}[{escape_segment(key)}]"
        for _ in range(number):
            scope.locate(segment)
        path = scope.locate(segment)
    return path


@given(paths, paths)
def test_no_two_paths_collide(one, other):
    assert (path_of(one) == path_of(other)) == (one == other)


@given(paths)
def test_path_can_be_split_into_scope_and_segment(segments):
    path = path_of(segments)
    assert scope_of(path) == (path_of(segments[:-1]) if segments[:-1] else "")
    name, key, _ = segments[-1]
    assert segment_of(path) == (
        escape_segment(name) if key is None else f"{escape_segment(name)}[{escape_segment(key)}]"
    )


@given(names)
def test_escaped_name_never_starts_with_a_tilde(name):
    assert not escape_segment(name).startswith("~")
