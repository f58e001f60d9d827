"""Measure one subject of one workload: `python -m benchmarks.run_subject WORKLOAD SUBJECT SETTING`.

Prints the measures as JSON in the last line. Started by `rounds.py` and `compare_commits.py`.
"""

import json
import logging
import sys

from benchmarks.event_loop import use_uvloop_if_installed
from benchmarks.harness import Setting, load_workload


def main(name: str, subject: str, setting: str) -> None:
    logging.basicConfig(level=logging.WARNING)  # to stderr: a retry or a warning invalidates the figure
    use_uvloop_if_installed()
    workload = load_workload(name)
    measure = workload.prepare if subject == "prepare" else workload.subjects[subject]
    assert measure is not None
    print(json.dumps(dict(measure(Setting.from_json(setting)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
