"""Test `make demo`: a worker is killed, another process finishes the order, and no step runs twice."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "crash_demo.py"
BEFORE = ("reserve_stock", "charge_card")
AFTER = ("print_label", "hand_to_carrier", "send_email")


def test_demo_shows_which_steps_ran_before_the_crash_and_which_after():
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    plain = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(DEMO)],
        env={**plain, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout, "no colours when the output is a pipe"
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in done.stdout, "no column is truncated"

    shown = re.findall(r"^  process (\d+)  (\w+)$", done.stdout, re.MULTILINE)
    assert [name for _, name in shown] == [*BEFORE, *AFTER]
    [killed] = re.findall(r"SIGKILL to process (\d+)", done.stdout)
    [survivor] = {process for process, _ in shown} - {killed}
    rows = {
        name: (process, crash, times)
        for name, process, crash, times in re.findall(
            r"^ (\w+) .* (\d+) +(before|after) +(once|\d+ times) *$", done.stdout, re.MULTILINE
        )
    }
    assert rows == {
        **dict.fromkeys(BEFORE, (killed, "before", "once")),
        **dict.fromkeys(AFTER, (survivor, "after", "once")),
    }
    assert "No step ran twice" in done.stdout
