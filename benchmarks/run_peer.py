"""One engine in one workload of the comparison: `python -m benchmarks.run_peer WORKLOAD ENGINE SETTING`.

Runs in the environment of that engine and prints the measures as JSON in its last line. Only the harness calls it, and
`recovery` for its two processes.
"""

import json
import logging
import sys

from benchmarks.event_loop import use_the_quick_loop
from benchmarks.harness import Setting
from benchmarks.measurements import measured, phase
from benchmarks.peer_protocol import chosen


def main(workload: str, name: str, text: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    use_the_quick_loop()
    [entrant] = [each for each in chosen([name]) if each.name == name]
    setting = Setting.from_json(text)
    if workload in ("before", "after"):
        phase(workload, entrant, setting)
    else:
        print(json.dumps(dict(measured(workload, entrant, setting))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
