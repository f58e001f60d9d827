"""Runs of several kinds for the chaos tests, with their expected outcomes.

Every step leaves one line in the effect log when it starts, with its position in its run. The log shows
what is recorded: a later step of a run starts only after the earlier ones are recorded.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from perdure import Context, CriticalError, event, step, workflow
from tests.crash.effect_log import effect

PAUSE = 0.05  # seconds that a step takes


@event(name="chaos-item")
class Item:
    n: int


@step(name="touch")
async def touch(log: str, place: str) -> str:
    effect(log, place)
    await asyncio.sleep(PAUSE)
    return place


@step(name="touch-in-thread")
def touch_in_thread(log: str, place: str) -> str:
    effect(log, place)
    time.sleep(PAUSE)
    return place


async def untouch(place: str, log: str) -> None:
    effect(log, f"undo-{place}")


@step(name="break-down")
async def break_down(log: str, place: str) -> None:
    effect(log, place)
    raise CriticalError("it was to be")


@workflow
async def chaos_listener(ctx: Context, log: str) -> list[int]:
    """Receives two items from the driver and one from another run, in any order."""
    await touch(log, "0")
    found = [(await ctx.receive(Item, timeout=600)).n for _ in range(3)]
    await touch(log, "1")
    return sorted(found)


@workflow
async def chaos_chain(ctx: Context, log: str, listener: str) -> str:
    places = [await touch(log, "0"), await touch_in_thread(log, "1"), await touch(log, "2")]
    await ctx.send(listener, Item(2))
    return "".join([*places, await touch(log, "3")])


@workflow
async def chaos_naps(ctx: Context, log: str) -> str:
    places = [await touch(log, "0")]
    await ctx.sleep(0.4)
    places.append(await touch(log, "1"))
    await ctx.sleep(1.5)
    return "".join([*places, await touch(log, "2")])


@workflow
async def chaos_leaf(ctx: Context, log: str) -> str:
    return await touch(log, "0") + await touch(log, "1")


@workflow
async def chaos_family(ctx: Context, log: str) -> str:
    first = await touch(log, "0")
    leaves = await asyncio.gather(
        *(ctx.run_child(chaos_leaf, log, id=f"{ctx.run_id}-leaf-{name}") for name in ("x", "y"))
    )
    return first + "".join(leaves) + await touch(log, "1")


@workflow
async def chaos_undo(ctx: Context, log: str) -> None:
    for place in ("0", "1"):
        await touch(log, place)
        ctx.on_rollback(untouch, place, log)
    await break_down(log, "2")


@dataclass(frozen=True)
class Planned:
    """One run: its start call, its expected outcome, and its expected effects in order."""

    id: str
    workflow: Any
    args: tuple[Any, ...]
    status: str
    result: Any
    places: tuple[str, ...]


def plan(numbers: range, log: str) -> list[Planned]:
    """Runs of each shape in turn. A listener precedes the chain that sends to it."""
    runs = []
    for number in numbers:
        id = f"run-{number}"
        match number % 5:
            case 0:
                runs.append(Planned(id, chaos_listener, (log,), "succeeded", [0, 1, 2], ("0", "1")))
            case 1:
                args = (log, f"run-{number - 1}")
                runs.append(Planned(id, chaos_chain, args, "succeeded", "0123", ("0", "1", "2", "3")))
            case 2:
                runs.append(Planned(id, chaos_naps, (log,), "succeeded", "012", ("0", "1", "2")))
            case 3:
                runs.append(Planned(id, chaos_family, (log,), "succeeded", "001011", ("0", "1")))
            case 4:
                undone = ("0", "1", "2", "undo-1", "undo-0")
                runs.append(Planned(id, chaos_undo, (log,), "failed", None, undone))
    return runs


def leaves(runs: list[Planned]) -> list[Planned]:
    """Return the ids of the children of these runs."""
    return [
        Planned(f"{run.id}-leaf-{name}", chaos_leaf, run.args, "succeeded", "01", ("0", "1"))
        for run in runs
        if run.workflow is chaos_family
        for name in ("x", "y")
    ]
