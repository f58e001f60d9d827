"""Simulation of one seed: generate a fault plan and programs, run workers and clients, and check all guarantees."""

import asyncio
import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure import Client, EngineConfig, Retry
from perdure.testing.simulation.event_loop import SimulatedLoop, Spinning
from perdure.testing.simulation.fault_plan import FAULT_PHASE_SECONDS, Fault, Plan, draw_plan
from perdure.testing.simulation.randomness import seeded, seeded_random
from perdure.testing.simulation.simulation import Deploy, MakeStore, Simulation
from tests.simulation.external_state import ExternalState
from tests.simulation.final_checks import check_end
from tests.simulation.liveness_checks import check_quiet, nudge, on_its_way
from tests.simulation.random_clients import Caller, Program, Responses, all_records
from tests.simulation.random_programs import RUNS, draw_trees
from tests.simulation.random_queues import declare_queues, open_all_queues
from tests.simulation.random_schedules import open_all_schedules
from tests.simulation.stores import memory
from tests.simulation.workflows import FLOWS, new_code, old_code

WORKERS = ("w0", "w1", "w2")
CLIENTS = ("c0", "c1")
QUIESCENT_SECONDS = 4.0
MAX_QUIESCENT_WAITS = 40
ROUNDS = 25  # of sending open runs the input that they wait for


@dataclass
class SeedResult:
    """The result of a seed. `violations` is empty if all guarantees held."""

    seed: int
    plan: Plan
    violations: list[str]
    trace: list[str]
    counts: dict[str, int] = field(default_factory=dict)


def simulate(
    seed: int,
    plan: Plan | None = None,
    make_store: MakeStore = memory,
    only: str | None = None,
    *,
    programs: Mapping[str, Program] | None = None,
    restarts: bool = False,
    queues: bool = False,
    schedules: bool = False,
) -> SeedResult:
    """Simulate one seed, with its own fault plan and programs or given ones; `only`: use this workflow for all runs.

    With `restarts`, clients restart runs too. With `queues`, they start runs into work queues, and control these. With
    `schedules`, workers fire the slots of schedules, which clients pause and resume.
    """
    if plan is None:
        rng = seeded_random(seed, "plan")
        plan = draw_plan(rng, WORKERS[: 2 + seed % 2], CLIENTS, RUNS)
    loop, lines = SimulatedLoop(), list[str]()
    logging.disable(logging.CRITICAL)  # all errors are planned
    gc.disable()  # the time of a collection would change the trace
    try:
        with seeded(seed), asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(
                _simulate(
                    seed,
                    plan,
                    make_store,
                    only,
                    programs,
                    lines,
                    restarts=restarts,
                    queues=queues,
                    schedules=schedules,
                )
            )
    except Spinning as error:
        return SeedResult(seed, plan, [str(error)], [*lines, f"VIOLATION: {error}"])
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


def draw_pauses(seed: int, pauses: int) -> Plan:
    """Return a random plan of pauses, each longer than a lease."""
    rng, workers = seeded_random(seed, "pauses"), WORKERS[: 2 + seed % 2]
    times = [round(rng.uniform(0.0, FAULT_PHASE_SECONDS), 3) for _ in range(pauses)]
    return Plan(tuple(Fault("paused", rng.choice(workers), at=at, amount=4.0) for at in times))


async def _simulate(
    seed: int,
    plan: Plan,
    make_store: MakeStore,
    only: str | None,
    programs: Mapping[str, Program] | None,
    lines: list[str],
    *,
    restarts: bool,
    queues: bool,
    schedules: bool,
) -> SeedResult:
    deploy = _deploy(seeded_random(seed, "deploy"), WORKERS[: 2 + seed % 2], only)
    declared = declare_queues() if queues else []
    simulation = Simulation(seed, plan, make_store, deploy, _config(seeded_random(seed, "config")), declared)
    simulation.lines = lines
    state, responses = ExternalState(simulation), Responses()
    rng = seeded_random(seed, "programs")
    programs = {run_id: _program(rng, deploy, only) for run_id in RUNS} | dict(programs or {})
    callers = [
        Caller(
            simulation,
            name,
            seeded_random(seed, name),
            programs,
            responses,
            restarts=restarts,
            queues=queues,
            schedules=schedules,
        )
        for name in CLIENTS
    ]
    for name in WORKERS[: 2 + seed % 2]:
        simulation.start_worker(name)
    simulation.damage_rows()
    try:
        await asyncio.gather(*(caller.run(FAULT_PHASE_SECONDS) for caller in callers))
        await simulation.heal()
        if queues:
            await open_all_queues(callers[0].client)
        if schedules:
            await open_all_schedules(callers[0].client)
        await _check_quiescent(simulation, state, responses, callers)
    except Exception as error:
        simulation.checker.report(f"{type(error).__name__}: {error}")
        if not isinstance(error, AssertionError):
            raise
    finally:
        for follower in responses.followers:
            await follower.stop()
        await simulation.close()
    violations = [*simulation.checker.violations, *responses.violations]
    return SeedResult(seed, plan, violations, simulation.lines, _counts(simulation, responses))


def _counts(simulation: Simulation, responses: Responses) -> dict[str, int]:
    """Return how often each kind of event happened, to show that the simulation covers it."""
    markers = {
        "deaths": " dies",
        "pauses": " is frozen",
        "takeovers": " is fenced",
        "turns": "  CommitTurn",
        "refused turns": "-> Superseded",
        "rewinds": "  RewindRun",
        "forks": ": forked",
        "imports": " imported as ",
        "wrong clocks": "the clock of ",
        "unreadable rows": "row unreadable",
        "pruned runs": " is pruned",
        "lost results": " lost",
    }
    counts = {what: sum(marker in line for line in simulation.lines) for what, marker in markers.items()}
    return {
        "runs": len(simulation.checker.models) + len(simulation.checker.pruned_runs),
        "bodies": len(simulation.bodies),
        "calls": responses.calls,
        "refused calls": responses.refused,
        "followers": len(responses.followers),
        "admissions": simulation.checker.queue_model.admissions,
        **counts,
    }


async def _check_quiescent(
    simulation: Simulation, state: ExternalState, responses: Responses, callers: list[Caller]
) -> None:
    """After the fault phase every run ends or waits for external input. Send the input until all runs have ended."""
    client = callers[0].client
    for round in range(ROUNDS):
        await _let_time_pass(client)
        if simulation.checker.violations:
            return
        open_runs = await check_quiet(simulation, client)
        if not open_runs:
            break
        await nudge(simulation, state, client, open_runs, round)
    else:
        simulation.checker.report(f"runs that do not end: {sorted(record.id for record in open_runs)}")
    await check_end(simulation, state, responses, client)


async def _let_time_pass(client: Client) -> None:
    """Wait until all open runs wait for external input. Recovery may take several sweeps or a lease."""
    for _ in range(MAX_QUIESCENT_WAITS):
        await asyncio.sleep(QUIESCENT_SECONDS)
        if not any(on_its_way(record) for record in await all_records(client)):
            break
    await asyncio.sleep(QUIESCENT_SECONDS)


def _deploy(rng: Any, workers: Sequence[str], only: str | None) -> Deploy:
    """Return a random deployment of new code, rolling or on all workers at once.

    A version gate does not support old code that runs after new code.
    """
    at = {name: rng.choice((0.0, rng.uniform(1.0, FAULT_PHASE_SECONDS), FAULT_PHASE_SECONDS)) for name in workers}
    return Deploy(old_code(), new_code(), rng.random() < 0.5 and only != "sim.gated", at)


def _program(rng: Any, deploy: Deploy, only: str | None) -> Program:
    """Return a random program, usually of `sim.tree`."""
    flow = rng.choice((*["sim.tree"] * 5, *FLOWS))
    if flow == "sim.gated" and deploy.rolling:
        flow = "sim.grown"
    return Program(only or flow, draw_trees(rng))


def _config(rng: Any) -> EngineConfig:
    return EngineConfig(
        lease=3.0,
        sweep_interval=1.0,
        shards=4,
        max_recoveries=10_000,
        resident_runs=rng.choice((2, 5, 10_000)),
        store_retry=Retry(max_attempts=rng.choice((3, 8)), initial=0.05, max_delay=0.5),
    )
