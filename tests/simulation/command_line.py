"""The command line of the simulator.

    python -m tests.simulation --seeds 200             seeds 0 to 199, on memory
    python -m tests.simulation --seed 17 --trace       exactly that one, and all that happened
    python -m tests.simulation --mutant NAME           how many seeds it takes to catch a planted bug

Sets of strings have another order in each process unless Python is told otherwise, so that it starts itself anew with
a fixed one: then a seed is one course, on any machine.
"""

import argparse
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator

from perdure.testing.simulation.fault_plan import Plan, shrink
from perdure.testing.simulation.simulation import MakeStore
from tests.simulation.mutations import AMONG, MUTANTS
from tests.simulation.run_seed import Course, simulate
from tests.simulation.stores import memory, sqlite
from tests.simulation.workflows import FLOWS

TAIL = 60  # lines of a trace that are shown without being asked for


def main() -> None:
    if os.environ.get("PYTHONHASHSEED") != "0":
        again = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})
    options = _options()
    if options.mutant is not None:
        sys.exit(_hunt(options))
    with _store(options.store) as make_store:
        failed = _play_all(options, make_store)
    sys.exit(1 if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulate seeds.")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="just this one")
    parser.add_argument("--store", choices=("memory", "sqlite"), default="memory")
    parser.add_argument("--flow", choices=sorted(FLOWS), help="let all runs be of this workflow")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant this bug, and see that it is found")
    parser.add_argument("--trace", action="store_true", help="print everything that happened")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    return parser.parse_args()


def _play_all(options: argparse.Namespace, make_store: MakeStore) -> int:
    seeds = range(options.start, options.start + options.seeds) if options.seed is None else [options.seed]
    counts: Counter[str] = Counter()
    failed = 0
    for seed in seeds:
        course = simulate(seed, make_store=make_store, only=options.flow)
        counts.update(course.counts)
        if options.trace:
            _say("\n".join(course.trace))
        if course.broken:
            failed += 1
            _report(course, options, make_store)
            if not options.keep_going:
                break
    _say(f"{len(seeds)} seeds, {failed} failed: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    return failed


def _hunt(options: argparse.Namespace) -> int:
    """Seeds with a planted bug, until one of them fails as it must; gives an exit code."""
    for seed in range(options.start, options.start + options.seeds):
        with MUTANTS[options.mutant]():
            course = simulate(seed, only=AMONG.get(options.mutant))
        if course.broken:
            _say(f"{options.mutant}: caught by seed {seed}: {course.broken[0]}")
            return 0
    _say(f"{options.mutant}: not caught by {options.seeds} seeds")
    return 1


def _report(course: Course, options: argparse.Namespace, make_store: MakeStore) -> None:
    def fails(plan: Plan) -> bool:
        return bool(simulate(course.seed, plan, make_store, options.flow).broken)

    smallest = shrink(course.plan, fails)
    again = simulate(course.seed, smallest, make_store, options.flow)
    _say(f"seed {course.seed} fails:")
    _say("\n".join(f"  - {each}" for each in course.broken[:10]))
    _say(f"with {len(smallest.faults)} of its {len(course.plan.faults)} faults it still does:")
    _say("\n".join(f"  - {fault}" for fault in smallest.faults) or "  (none are needed)")
    if not options.trace:
        first = next((at for at, line in enumerate(again.trace) if "BROKEN" in line), len(again.trace))
        _say("what happened before, with those faults:\n" + "\n".join(again.trace[max(0, first - TAIL) : first + 3]))
    store = "" if options.store == "memory" else f" --store {options.store}"
    flow = "" if options.flow is None else f" --flow {options.flow}"
    _say(f"again, in full: python -m tests.simulation --seed {course.seed}{store}{flow} --trace")


@contextlib.contextmanager
def _store(name: str) -> Iterator[MakeStore]:
    if name == "memory":
        yield memory
    else:
        with sqlite() as make:
            yield make


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
