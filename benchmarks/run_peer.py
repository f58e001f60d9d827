"""Measure one engine in one workload: `python -m benchmarks.run_peer WORKLOAD ENGINE SETTING`.

Runs in the environment of the engine and prints the measures as JSON in the last line. Started by `rounds.py`,
`compare_commits.py`, and `recovery` for its two processes.
"""

import json
import logging
import sys

from benchmarks.event_loop import use_uvloop_if_installed
from benchmarks.harness import Setting
from benchmarks.measurements import measure_engine, run_phase
from benchmarks.peer_protocol import select_entrants


def main(workload: str, name: str, text: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    use_uvloop_if_installed()
    [entrant] = [each for each in select_entrants([name]) if each.name == name]
    setting = Setting.from_json(text)
    if workload in ("before", "after"):
        run_phase(workload, entrant, setting)
    else:
        print(json.dumps(dict(measure_engine(workload, entrant, setting))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
