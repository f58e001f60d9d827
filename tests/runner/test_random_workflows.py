"""Random programs of join, race, map, loop, scope, sleep, receive, child, deferred, gate and step, with replays.

A random tree defines a workflow; a seeded random generator defines the order of its inputs. After every turn the run is
replayed from its written entries: it must have the same state and write nothing. At random turns the test continues
with the replayed run.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from perdure import Break, Context, Continue, JoinError, PerdureError, RaceError, step, workflow
from tests.runner.crash_after_every_turn import check_replay
from tests.runner.turn_driver import Play

EVENTS = ("red", "green")


@dataclass(frozen=True)
class Node:
    kind: str
    number: int = 0
    parts: tuple[Node, ...] = ()


@step(retry=None)
async def tree_step(number: int) -> int:
    if number == 7:
        raise ValueError("seven")
    return number


@step(retry=None, compensate=tree_step)
async def tree_step_with_undo(number: int) -> int:
    return number


@workflow
async def tree_child(ctx: Context, number: int) -> str:
    return f"child {number}"


async def grow(ctx: Context, node: Node) -> Any:
    """Execute a tree and return its value."""
    match node.kind:
        case "step":
            return await tree_step(node.number)
        case "compensated":
            return await tree_step_with_undo(node.number)
        case "sleep":
            return await ctx.sleep(node.number)
        case "receive":
            return await _receive(ctx, node.number)
        case "child":
            return await ctx.run_child(tree_child, node.number)
        case "started":
            return (await (await ctx.start_child(tree_child, node.number)).outcome()).value
        case "show":
            return await ctx.publish("number", node.number)
        case "send":
            return await ctx.send("other-run", "red", node.number)
        case "seq":
            return [await grow(ctx, part) for part in node.parts]
        case "map":
            return await ctx.map(tree_step, range(node.number), concurrency=2)
        case "gate":
            return [ctx.version(f"gate {node.number}", latest=2), await tree_step(0)]
        case "deferred":
            return await _await_deferred(ctx, node.number)
        case _:
            return await _grow_block(ctx, node)


async def _receive(ctx: Context, number: int) -> Any:
    names = EVENTS if number == 0 else (EVENTS[number % 2],)
    try:
        return await ctx.receive(*names, timeout=number or None)
    except TimeoutError:
        return "nothing"


async def _await_deferred(ctx: Context, number: int) -> Any:
    try:
        return await ctx.deferred(f"deferred {number % 2}", int, timeout=number)
    except TimeoutError:
        return "late"


async def _grow_block(ctx: Context, node: Node) -> Any:
    try:
        match node.kind:
            case "join":
                return list(await ctx.join(*(grow(ctx, part) for part in node.parts)))
            case "race":
                return list(await ctx.race(*(grow(ctx, part) for part in node.parts)))
            case "named":
                with ctx.scope("named"):
                    return await asyncio.gather(*(grow(ctx, part) for part in node.parts))
            case "scope":
                async with ctx.rollback_scope():
                    return [await grow(ctx, part) for part in node.parts]
            case _:
                return await ctx.loop("loop", _body(node), 0, commit_every=1 + node.number % 2, prune_every=1, keep=1)
    except (JoinError, RaceError, PerdureError) as error:
        return type(error).__name__


def _body(node: Node) -> Any:
    async def body(ctx: Context, count: int) -> Continue[int] | Break[Any]:
        value = await grow(ctx, node.parts[0])
        return Continue(count + 1) if count + 1 < node.number else Break([count, value])

    return body


small = st.integers(0, 8)
leaves = st.one_of(
    st.builds(
        Node, st.sampled_from(["step", "compensated", "sleep", "child", "started", "show", "send", "gate"]), small
    ),
    st.builds(Node, st.just("deferred"), small),
    st.builds(Node, st.just("receive"), st.integers(0, 3)),
    st.builds(Node, st.just("map"), st.integers(0, 4)),
)


def blocks(parts: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    many = st.lists(parts, min_size=1, max_size=3).map(tuple)
    return st.one_of(
        st.builds(Node, st.sampled_from(["join", "race", "race", "seq", "scope", "named"]), st.just(0), many),
        st.builds(Node, st.just("loop"), st.integers(1, 4), parts.map(lambda part: (part,))),
    )


trees = st.recursive(leaves, blocks, max_leaves=6)


LOOP_OF_CHILDREN = Node("loop", 2, (Node("seq", 0, (Node("step"), Node("child"))),))


@example(tree=Node("join", 0, (LOOP_OF_CHILDREN,)), seed=0, cancel_at=13)  # the child's entry is pruned by the cancel
@given(tree=trees, seed=st.integers(0, 2**32), cancel_at=st.none() | st.integers(0, 30))
def test_random_program_replays_from_every_prefix_of_its_history(tree, seed, cancel_at):
    async def program(ctx):
        return await grow(ctx, tree)

    randomness = random.Random(seed)
    play = Play(program, seed=seed).begin()
    turns = 0
    while play.alive and turns < 1_000:
        if turns < 60 or randomness.random() < 0.1:
            check_replay(play)
        if randomness.random() < 0.1:
            play = play.crash().begin()
        turns += 1
        if turns == cancel_at:
            play.cancel()
            continue
        choices = [*play.choices(), *EVENTS]
        choice = randomness.choice(choices)
        if choice in EVENTS:
            play.send(choice, turns)
        else:
            play.move(choice)
    assert not play.alive, f"the program did not end: {play.turn}"
    assert play.turn.held is None, play.turn.held
