"""Random programs: a tree defines what a run does, and `grow` executes it, with every primitive of perdure.

A node is `[kind, n, [parts]]`: plain data, so that it can be the payload of a run. `workflows` defines the workflows
that execute trees, with their options and versions; `reference_model` computes the expected outcome.
"""

import asyncio
import random
from datetime import UTC, datetime
from typing import Any

from perdure import (
    Break,
    Context,
    Continue,
    JoinError,
    PerdureError,
    RaceError,
    Retry,
    RunNotFound,
    RunTerminated,
    current_step,
    step,
)
from perdure.clock import sleep_on
from perdure.testing.clock import START
from tests.simulation.event_types import ALL, BROADCAST, TARGETED, Question
from tests.simulation.external_state import ExternalState

Node = list[Any]

RUNS = [f"r{n}" for n in range(6)]
FORKS = [f"f{n}" for n in range(3)]
BEHAVIOURS = ("ok", "ok", "slow", "flaky", "fails", "hangs", "stubborn")
THREE_ATTEMPTS = Retry(max_attempts=3, initial=0.3, jitter=0.0)


# --- steps


@step
async def undo(done: list[Any]) -> None:
    ExternalState.current().undone(done)
    await sleep_on(ExternalState.current().process, 0.01)


@step(name="sim.work", retry=THREE_ATTEMPTS, timeout=3.0)
async def work(n: int, behaviour: str, after: str | None) -> list[Any]:
    return await _body(n, behaviour, after)


@step(name="sim.undone", retry=THREE_ATTEMPTS, timeout=3.0, compensate=undo)
async def undone_work(n: int, behaviour: str, after: str | None) -> list[Any]:
    return await _body(n, behaviour, after)


@step(name="sim.once", at_most_once=True, retry=None)
async def work_once(n: int, after: str | None) -> list[Any]:
    return await _body(n, "slow", after)


@step(name="sim.wrote", retry=THREE_ATTEMPTS)
async def writing_work(n: int, after: str | None) -> list[Any]:
    current_step().write("steps", current_step().location)
    return await _body(n, "flaky", after)


async def _body(n: int, behaviour: str, after: str | None) -> list[Any]:
    state, attempt = ExternalState.current(), current_step()
    state.on_start(attempt, after)
    match behaviour:
        case "slow":
            await sleep_on(state.process, 0.2 * (1 + n % 4))
        case "flaky" if attempt.attempt < 2:
            raise ConnectionError("not yet")
        case "fails" if attempt.run_id not in state.repaired:
            raise ValueError("it never works")
        case "hangs" if attempt.run_id not in state.repaired:
            await sleep_on(state.process, 1_000.0)
        case "stubborn":
            try:
                await sleep_on(state.process, 0.3)
            except asyncio.CancelledError:
                await sleep_on(state.process, 0.5)
    return [n, attempt.location]


# --- execution


async def grow(ctx: Context, node: Node, after: str | None) -> Any:
    """Execute a tree. `after` is the location of a step whose result is known here."""
    kind, n, parts = node
    match kind:
        case "seq":
            return await _grow_in_sequence(ctx, parts, after)
        case "map":
            return await ctx.map(lambda i: work(i, "ok", after), range(n), concurrency=2)
        case "gather":
            return list(await asyncio.gather(*(grow(ctx, part, after) for part in parts)))
        case "join" | "race" | "scope" | "loop" | "within":
            return await _grow_block(ctx, node, after)
        case "child" | "started" | "detached":
            return await _grow_child(ctx, node)
        case "receive" | "batch" | "answer" | "send" | "broadcast" | "deferred":
            return await _grow_messages(ctx, node)
        case _:
            return await _grow_leaf(ctx, node, after)


async def _grow_in_sequence(ctx: Context, parts: list[Node], after: str | None) -> list[Any]:
    values = []
    for part in parts:
        values.append(await grow(ctx, part, after))
        after = location_of(values[-1]) or after
    return values


async def _grow_leaf(ctx: Context, node: Node, after: str | None) -> Any:
    kind, n, _ = node
    match kind:
        case "undone":
            return await undone_work(n, BEHAVIOURS[n % 4], after)
        case "once":
            return await work_once(n, after)
        case "wrote":
            return await writing_work(n, after)
        case "sleep":
            return await ctx.sleep(n / 2)
        case "until":
            return await ctx.sleep_until(datetime.fromtimestamp(START + 2 * n, UTC))
        case "lately":
            return await work(n, "fails" if ctx.generation == 0 else "ok", after)
        case "show":
            return await ctx.publish("shown", n)
        case "stream":
            return await ctx.stream("log").write(n)
        case "chance":
            drawn = f"ok {ctx.random.randrange(1000)} {ctx.now()}"  # a replay must draw the same
            return await work(n, drawn, after)
        case "register":
            ctx.on_rollback(undo, [n, "registered"])
            return None
        case "raise":
            raise LookupError("the workflow itself failed")
        case _:
            return await work(n, kind, after)


async def _grow_block(ctx: Context, node: Node, after: str | None) -> Any:
    kind, n, parts = node
    try:
        match kind:
            case "join":
                return list(await ctx.join(*(grow(ctx, part, after) for part in parts)))
            case "race":
                return list(await ctx.race(*(grow(ctx, part, after) for part in parts)))
            case "within":
                async with asyncio.timeout(1 + n):
                    return await grow(ctx, parts[0], after)
            case "scope":
                async with ctx.rollback_scope():
                    return await _grow_in_sequence(ctx, parts, after)
            case _:
                return await ctx.loop("loop", _loop(node), 0, commit_every=1 + n % 2, prune_every=1, keep=n % 2)
    except (JoinError, RaceError, PerdureError, TimeoutError, LookupError) as error:
        return type(error).__name__


def _loop(node: Node) -> Any:
    async def body(ctx: Context, count: int) -> Continue[int] | Break[Any]:
        value = await grow(ctx, node[2][0], None)
        return Continue(count + 1) if count < node[1] else Break([count, plain(value)])

    return body


async def _grow_child(ctx: Context, node: Node) -> Any:
    kind, n, parts = node
    flow = CHILDREN[n % len(CHILDREN)]
    if kind == "child":
        return await ctx.run_child(flow, parts)
    child = await ctx.start_child(flow, parts, detached=kind == "detached")
    if kind == "detached":
        return None
    outcome = await child.outcome()
    return [str(outcome.status), outcome.value]


async def _grow_messages(ctx: Context, node: Node) -> Any:
    kind, n, _ = node
    wanted = [each for i, each in enumerate(ALL) if n == 0 or (n >> (i % 4)) & 1]
    match kind:
        case "deferred":
            return await ctx.deferred(f"d{n % 3}", int)
        case "batch":
            events = await ctx.receive_batch(*wanted, max=3, timeout=float(n))
            return len([ExternalState.saw(ctx.run_id, each.n) for each in events])
        case "answer":
            request = await ctx.receive_request(Question, timeout=float(n))
            ExternalState.saw(ctx.run_id, request.value.n)
            await request.reply(f"re {request.value.n}")
            return "answered"
        case "send" | "broadcast":
            return await _send(ctx, node)
    try:
        return ExternalState.saw(ctx.run_id, (await ctx.receive(*wanted, timeout=None if n == 0 else float(n))).n)
    except TimeoutError:
        return "nothing"


async def _send(ctx: Context, node: Node) -> None:
    kind, n, _ = node
    number = f"{ctx.run_id}/{ctx.generation}/{ctx.uuid().hex[:8]}"
    try:
        if kind == "send":
            await ctx.send(RUNS[n % len(RUNS)], TARGETED[n % len(TARGETED)](number))
        else:
            await ctx.broadcast(BROADCAST[n % len(BROADCAST)](number))
    except (RunNotFound, RunTerminated):
        return


# --- generation

LEAVES = (
    *("ok", "slow", "flaky", "fails", "hangs", "stubborn", "undone", "undone", "once", "wrote", "sleep", "show"),
    *("stream", "chance", "register", "raise", "receive", "receive", "batch", "answer", "send", "broadcast"),
    *("deferred", "deferred", "map", "until", "lately"),
)
BLOCKS = ("seq", "seq", "join", "race", "race", "scope", "gather", "within")
FAMILY = ("child", "started", "detached")
CHILDREN = ("sim.tree", "sim.tree", "sim.tree", "sim.again", "sim.hasty", "sim.restless", "sim.patient", "sim.brief")
"""The names of the workflows of children."""


def draw_trees(rng: random.Random) -> list[Node]:
    """Return the random payload of a run, usually one tree."""
    return [_block(rng, "seq", 3) for _ in range(rng.choice((1, 1, 1, 2, 3)))]


def _draw(rng: random.Random, depth: int) -> Node:
    draw = rng.random()
    if depth <= 0 or draw < 0.55:
        return [rng.choice(LEAVES), rng.randrange(9), []]
    if draw < 0.63:
        return ["loop", rng.randrange(4), [_block(rng, "seq", depth - 1)]]
    if draw < 0.74:
        return [rng.choice(FAMILY), rng.randrange(len(CHILDREN)), [_block(rng, "seq", depth - 2)]]
    return _block(rng, rng.choice(BLOCKS), depth)


def _block(rng: random.Random, kind: str, depth: int) -> Node:
    parts = 1 if kind == "within" else rng.randrange(1, 4)
    return [kind, rng.randrange(4), [_draw(rng, depth - 1) for _ in range(parts)]]


# --- values: the result of a step is `[n, location]`; the reference model predicts only `n`


def location_of(value: Any) -> str | None:
    is_pair = isinstance(value, list) and len(value) == 2 and isinstance(value[0], int) and isinstance(value[1], str)
    return value[1] if is_pair and value[1].rpartition("/")[2].startswith("sim.") else None


def plain(value: Any) -> Any:
    """A value without locations."""
    if location_of(value) is not None:
        return value[0]
    return [plain(each) for each in value] if isinstance(value, list) else value
