"""One seed: draw a plan and programs, let workers and clients live through it, then see what has become of it all."""

import asyncio
import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure import Client, EngineConfig, Retry
from perdure.testing.simulation.event_loop import SimulatedLoop, Spinning
from perdure.testing.simulation.fault_plan import STORM, Plan, draw_plan
from perdure.testing.simulation.randomness import seeded, seeded_random
from perdure.testing.simulation.simulation import Deploy, MakeStore, Simulation
from tests.simulation.external_state import Stage
from tests.simulation.final_checks import check_end
from tests.simulation.liveness_checks import check_quiet, nudge, on_its_way
from tests.simulation.random_clients import Caller, Program, Seen, all_records
from tests.simulation.random_programs import RUNS, draw_trees
from tests.simulation.stores import memory
from tests.simulation.workflows import FLOWS, new_code, old_code

WORKERS = ("w0", "w1", "w2")
CLIENTS = ("c0", "c1")
CALM = 4.0  # seconds
LONG = 40  # times that
ROUNDS = 25  # how often runs that wait for the world get what they wait for


@dataclass
class Course:
    """What came of a seed. `broken` is empty if all guarantees held."""

    seed: int
    plan: Plan
    broken: list[str]
    trace: list[str]
    counts: dict[str, int] = field(default_factory=dict)


def simulate(seed: int, plan: Plan | None = None, make_store: MakeStore = memory, only: str | None = None) -> Course:
    """Play one seed, with its own plan of faults or with a given one; `only`: all runs are of this workflow."""
    if plan is None:
        chance = seeded_random(seed, "plan")
        plan = draw_plan(chance, WORKERS[: 2 + seed % 2], CLIENTS)
    loop, lines = SimulatedLoop(), list[str]()
    logging.disable(logging.CRITICAL)  # what goes wrong goes wrong on purpose
    gc.disable()  # what is collected late or early must make no difference
    try:
        with seeded(seed), asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(_play(seed, plan, make_store, only, lines))
    except Spinning as error:
        return Course(seed, plan, [str(error)], [*lines, f"BROKEN: {error}"])
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


async def _play(seed: int, plan: Plan, make_store: MakeStore, only: str | None, lines: list[str]) -> Course:
    deploy = _deploy(seeded_random(seed, "deploy"), WORKERS[: 2 + seed % 2], only)
    world = Simulation(seed, plan, make_store, deploy, _config(seeded_random(seed, "config")))
    world.lines = lines
    stage, seen = Stage(world), Seen()
    chance = seeded_random(seed, "programs")
    programs = {run_id: _program(chance, deploy, only) for run_id in RUNS}
    callers = [Caller(world, name, seeded_random(seed, name), programs, seen) for name in CLIENTS]
    for name in WORKERS[: 2 + seed % 2]:
        world.start_worker(name)
    try:
        await asyncio.gather(*(caller.live(STORM) for caller in callers))
        await world.heal()
        await _calm(world, stage, seen, callers)
    except Exception as error:
        world.witness.breaks(f"{type(error).__name__}: {error}")
        if not isinstance(error, AssertionError):
            raise
    finally:
        await world.close()
    return Course(seed, plan, [*world.witness.violations, *seen.broken], world.lines, _counts(world, seen))


def _counts(world: Simulation, seen: Seen) -> dict[str, int]:
    """How far it came: a simulator in which nothing happens finds nothing."""
    said = {
        "deaths": " dies",
        "pauses": " is frozen",
        "takeovers": " is declared gone",
        "turns": "  CommitTurn",
        "refused turns": "-> Superseded",
        "rewinds": "  RewindRun",
        "forks": ": forked",
        "pruned runs": " is pruned",
        "answers lost": " lost",
    }
    counts = {what: sum(words in line for line in world.lines) for what, words in said.items()}
    return {
        "runs": len(world.witness.models) + len(world.witness.departed),
        "bodies": len(world.bodies),
        "calls": seen.calls,
        "refused calls": seen.refused,
        **counts,
    }


async def _calm(world: Simulation, stage: Stage, seen: Seen, callers: list[Caller]) -> None:
    """After the storm: in time every run ends, or waits for something that has not come. Then it gets that."""
    client = callers[0].client
    for round in range(ROUNDS):
        await _let_time_pass(client)
        if world.witness.violations:
            return
        open_runs = await check_quiet(world, client)
        if not open_runs:
            break
        await nudge(world, stage, client, open_runs, round)
    else:
        world.witness.breaks(f"runs that do not end: {sorted(record.id for record in open_runs)}")
    await check_end(world, stage, seen, client)


async def _let_time_pass(client: Client) -> None:
    """Until all who are open wait for the world, or for very long: some things take a few sweeps or a lease."""
    for _ in range(LONG):
        await asyncio.sleep(CALM)
        if not any(on_its_way(record) for record in await all_records(client)):
            break
    await asyncio.sleep(CALM)


def _deploy(chance: Any, workers: Sequence[str], only: str | None) -> Deploy:
    """Code changes once: here and there at some moment, or everywhere at once.

    What a gate protects is not safe from old code that comes after new code.
    """
    at = {name: chance.choice((0.0, chance.uniform(1.0, STORM), STORM)) for name in workers}
    return Deploy(old_code(), new_code(), chance.random() < 0.5 and only != "sim.gated", at)


def _program(chance: Any, deploy: Deploy, only: str | None) -> Program:
    """Mostly a plain one."""
    flow = chance.choice((*["sim.tree"] * 5, *FLOWS))
    if flow == "sim.gated" and deploy.rolling:
        flow = "sim.grown"
    return Program(only or flow, draw_trees(chance))


def _config(chance: Any) -> EngineConfig:
    return EngineConfig(
        lease=3.0,
        sweep_interval=1.0,
        shards=4,
        max_recoveries=10_000,
        resident_runs=chance.choice((2, 5, 10_000)),
        store_retry=Retry(max_attempts=chance.choice((3, 8)), initial=0.05, max_delay=0.5),
    )
