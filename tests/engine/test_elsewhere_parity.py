"""The tests of steps again, with every body executed by a worker of another pool (`elsewhere_plugin`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.elsewhere_plugin import DESELECTED, MODULES
from tests.repetitions import LONG

FOLDER = Path(__file__).parent
STORES = ("memory", "sqlite", "postgres", "redis") if LONG else ("memory",)


@pytest.mark.long
@pytest.mark.parametrize("store", STORES)
def test_steps_behave_alike_on_another_pool(store):
    files = [str(FOLDER / f"{module}.py") for module in MODULES]
    # Tests without a store are about declarations, and are the same with a pool.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.engine.elsewhere_plugin",
        "-p",
        "no:xdist",
        "-q",
        "-k",
        store,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([*command, *files], capture_output=True, text=True, env=environment, cwd=FOLDER.parents[1])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_every_deselected_test_exists_and_has_a_reason():
    sources = "".join((FOLDER / f"{module}.py").read_text() for module in MODULES)
    assert len(DESELECTED) == 12
    for name, reason in DESELECTED.items():
        assert f"def {name}(" in sources
        assert reason
