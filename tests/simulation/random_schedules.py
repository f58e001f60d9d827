"""Schedules of a simulation: two with known time slots, random calls about them, and guarantee 11 at the end.

A time slot is fired once, skipped by a rule, or reported as missed. With overlap "allow" and catch_up "all", every slot
is fired. With overlap "skip", every slot is fired or counted as skipped, and no two of its runs are open at once.
"""

import random
from collections import Counter
from datetime import UTC, datetime

from perdure import Client, StoreError
from perdure.model.records import RunRecord
from perdure.schedules.slot_rule import slot_run_id
from perdure.testing.simulation.run_model import RunModel
from perdure.testing.simulation.simulation import Simulation
from perdure.workflows.schedules import Overlap
from tests.simulation.random_programs import Node
from tests.simulation.workflows import tree

EVERY, SKIPPING = "sim.every", "sim.skipping"
OVERLAPS: dict[str, Overlap] = {EVERY: "allow", SKIPPING: "skip"}
COUNT = 9
STARTS: list[Node] = [["seq", 0, [["ok", 1, []], ["slow", 2, []]]]]
ATTEMPTS = 20  # to declare a schedule while calls fail


def time_slots(simulation: Simulation) -> list[float]:
    """Return the slots of both schedules: one per second, within the fault phase."""
    first = int(simulation.began_at) + 3
    return [float(first + n) for n in range(COUNT)]


async def create_schedules(simulation: Simulation, client: Client) -> None:
    """Create the schedules. A repeated call finds what an earlier one has created."""
    at = [datetime.fromtimestamp(slot, UTC) for slot in time_slots(simulation)]
    for name, overlap in OVERLAPS.items():
        for _ in range(ATTEMPTS):
            try:
                await client.schedule(name, tree, STARTS, at=at, overlap=overlap, catch_up="all")
                break
            except (StoreError, TimeoutError):
                continue
        else:
            raise AssertionError(f"schedule {name} could not be created")


async def control_schedule(rng: random.Random, client: Client) -> str:
    """Pause and resume a schedule, or read it. A resume catches up, so no slot is lost."""
    name = rng.choice(tuple(OVERLAPS))
    match rng.choice(("pause", "resume", "resume", "see")):
        case "pause":
            await client.pause_schedule(name, "simulated")
            return f"pauses {name}"
        case "resume":
            await client.resume_schedule(name, catch_up=True)
            return f"resumes {name}"
        case _:
            return f"sees {(await client.get_schedule(name)).started} starts of {name}"


async def open_all_schedules(client: Client) -> None:
    """Resume all schedules, so that their slots are fired."""
    for name in OVERLAPS:
        await client.resume_schedule(name, catch_up=True)


async def check_slots(simulation: Simulation, client: Client, lives: list[tuple[RunModel, RunRecord]]) -> None:
    """Guarantee 11: every time slot was fired once, skipped or missed."""
    started = Counter(run.id for run, _ in lives)
    declared = {each.id for each in await client.schedules()}
    slots = time_slots(simulation)
    for name in sorted(declared.intersection(OVERLAPS)):
        ids = [slot_run_id(name, slot) for slot in slots]
        more_than_once = [run_id for run_id in ids if started[run_id] > 1]
        if more_than_once:
            simulation.checker.report(f"schedule {name} fired slots more than once: {more_than_once}")
        unknown = [run_id for run_id in started if run_id.startswith(f"{name}/") and run_id.count("/") == 1]
        if strange := sorted(set(unknown) - set(ids)):
            simulation.checker.report(f"schedule {name} started runs of no slot: {strange}")
        described = await client.get_schedule(name)
        counted = described.started + described.skipped + described.missed
        if counted != len(slots) or described.pending or described.conflicts:
            simulation.checker.report(f"schedule {name} has {len(slots)} slots, but counts {described}")
        if name == EVERY and (fired := sum(started[run_id] > 0 for run_id in ids)) != len(slots):
            simulation.checker.report(f"schedule {name} fired {fired} of its {len(slots)} slots")
