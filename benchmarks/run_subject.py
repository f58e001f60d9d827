"""One subject of one workload, in this process: `python -m benchmarks.run_subject WORKLOAD SUBJECT SETTING`.

Prints its measures as JSON. Only the harness calls it.
"""

import json
import logging
import sys

from benchmarks.event_loop import use_the_quick_loop
from benchmarks.harness import Setting, workload


def main(name: str, subject: str, setting: str) -> None:
    logging.basicConfig(level=logging.WARNING)  # to stderr: an engine that retries or complains spoils the figure
    use_the_quick_loop()
    chosen = workload(name)
    measured = chosen.prepare if subject == "prepare" else chosen.subjects[subject]
    assert measured is not None
    print(json.dumps(dict(measured(Setting.from_json(setting)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
