"""The command line of the simulator.

    python -m tests.simulation --seeds 200             seeds 0 to 199, with the memory store
    python -m tests.simulation --store postgres        100 seeds, with a PostgreSQL server of its own
    python -m tests.simulation --seed 17 --trace       one seed, with its complete trace
    python -m tests.simulation --queues                runs in work queues, too
    python -m tests.simulation --schedules             time slots of schedules, too
    python -m tests.simulation --mutant NAME           the seed that detects a planted bug

The order of a set of strings differs between processes, so the command restarts itself with a fixed PYTHONHASHSEED. A
seed then defines one trace, on any machine.
"""

import argparse
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator

from perdure.testing.simulation.fault_plan import Plan, shrink
from perdure.testing.simulation.simulation import MakeStore
from tests.simulation.mutations import FLOW_OF_MUTANT, MUTANTS, PAUSES_OF_MUTANT, TREES_OF_MUTANT
from tests.simulation.queue_mutations import QUEUE_MUTANTS
from tests.simulation.random_clients import Program
from tests.simulation.random_programs import RUNS
from tests.simulation.run_seed import SeedResult, draw_pauses, simulate
from tests.simulation.schedule_mutations import SCHEDULE_MUTANTS
from tests.simulation.stores import memory, sqlite
from tests.simulation.workflows import FLOWS

ALL_MUTANTS = {**MUTANTS, **QUEUE_MUTANTS, **SCHEDULE_MUTANTS}
STORES = ("memory", "sqlite", "postgres")
TAIL = 60  # lines of the trace that a report contains


def main() -> None:
    if os.environ.get("PYTHONHASHSEED") != "0":
        again = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})
    options = _options()
    if options.mutant is not None:
        sys.exit(_detect_mutant(options))
    with _store(options.store) as make_store:
        failed = _simulate_all(options, make_store)
    sys.exit(1 if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulate seeds.")
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="simulate only this seed")
    parser.add_argument("--store", choices=STORES, default="memory")
    parser.add_argument("--flow", choices=sorted(FLOWS), help="use this workflow for all runs")
    parser.add_argument(
        "--mutant", choices=sorted(ALL_MUTANTS), help="plant this bug, and check that a seed detects it"
    )
    parser.add_argument("--queues", action="store_true", help="start runs into work queues, too")
    parser.add_argument("--schedules", action="store_true", help="fire the time slots of schedules, too")
    parser.add_argument("--trace", action="store_true", help="print the trace")
    parser.add_argument("--keep-going", action="store_true", help="continue after the first seed that fails")
    return parser.parse_args()


def _simulate_all(options: argparse.Namespace, make_store: MakeStore) -> int:
    seeds = range(options.start, options.start + options.seeds) if options.seed is None else [options.seed]
    counts: Counter[str] = Counter()
    failed = 0
    for seed in seeds:
        result = simulate(
            seed, make_store=make_store, only=options.flow, queues=options.queues, schedules=options.schedules
        )
        counts.update(result.counts)
        if options.trace:
            _print("\n".join(result.trace))
        if result.violations:
            failed += 1
            _report(result, options, make_store)
            if not options.keep_going:
                break
    _print(f"{len(seeds)} seeds, {failed} failed: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    return failed


def _detect_mutant(options: argparse.Namespace) -> int:
    """Simulate seeds with a planted bug until one fails. Return the exit code: 0 if the bug is detected."""
    pauses, trees = PAUSES_OF_MUTANT.get(options.mutant), TREES_OF_MUTANT.get(options.mutant)
    programs = None if trees is None else dict.fromkeys(RUNS, Program("sim.tree", trees))
    for seed in range(options.start, options.start + options.seeds):
        plan = None if pauses is None else draw_pauses(seed, pauses)
        with ALL_MUTANTS[options.mutant]():
            flow, queues = FLOW_OF_MUTANT.get(options.mutant), options.mutant in QUEUE_MUTANTS
            schedules = options.mutant in SCHEDULE_MUTANTS
            result = simulate(seed, plan, only=flow, programs=programs, queues=queues, schedules=schedules)
        if result.violations:
            _print(f"{options.mutant}: caught by seed {seed}: {result.violations[0]}")
            return 0
    _print(f"{options.mutant}: not caught by {options.seeds} seeds")
    return 1


def _report(result: SeedResult, options: argparse.Namespace, make_store: MakeStore) -> None:
    def fails(plan: Plan) -> bool:
        return bool(
            simulate(
                result.seed, plan, make_store, options.flow, queues=options.queues, schedules=options.schedules
            ).violations
        )

    smallest = shrink(result.plan, fails)
    again = simulate(
        result.seed, smallest, make_store, options.flow, queues=options.queues, schedules=options.schedules
    )
    _print(f"seed {result.seed} fails:")
    _print("\n".join(f"  - {each}" for each in result.violations[:10]))
    _print(f"with {len(smallest.faults)} of its {len(result.plan.faults)} faults it still does:")
    _print("\n".join(f"  - {fault}" for fault in smallest.faults) or "  (it fails without faults)")
    if not options.trace:
        first = next((at for at, line in enumerate(again.trace) if "VIOLATION" in line), len(again.trace))
        _print(
            "the trace up to the violation, with these faults:\n"
            + "\n".join(again.trace[max(0, first - TAIL) : first + 3])
        )
    store = "" if options.store == "memory" else f" --store {options.store}"
    flow = "" if options.flow is None else f" --flow {options.flow}"
    queues = (" --queues" if options.queues else "") + (" --schedules" if options.schedules else "")
    _print(f"full trace: python -m tests.simulation --seed {result.seed}{store}{flow}{queues} --trace")


@contextlib.contextmanager
def _store(name: str) -> Iterator[MakeStore]:
    if name == "memory":
        yield memory
    elif name == "sqlite":
        with sqlite() as make:
            yield make
    else:
        from tests.simulation.postgres_store import postgres  # needs the development tools

        with postgres() as make:
            yield make


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
