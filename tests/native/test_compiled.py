"""The compiled form of perdure: that it can be built, that it is what is imported, and that it behaves alike.

Needs a C compiler and Python's headers, which perdure itself does not: without them these tests are skipped, and the
summary says so. On the machine of CI they have to be there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]
HEADERS = Path(sysconfig.get_path("include")) / "Python.h"
ALIKE = [
    "tests/runner",
    "tests/client/test_invalid_input.py",
    "tests/engine/test_children.py",
    "tests/execution/test_committer.py",
    "tests/engine/test_compensation.py",
    "tests/engine/test_continue_as.py",
    "tests/engine/test_crash_at_every_commit.py",
    "tests/execution/test_external_effects.py",
    "tests/engine/test_run_timeouts.py",
    "tests/engine/test_loops.py",
    "tests/engine/test_recovery.py",
    "tests/engine/test_unstorable_turns.py",
    "tests/execution/test_run_cache.py",
    "tests/engine/test_rewind_and_fork.py",
    "tests/engine/test_shutdown.py",
    "tests/execution/test_step_executor.py",
    "tests/engine/test_store_unavailable.py",
]
SQLITE = [
    "tests/stores/test_model_equivalence.py",
    "tests/stores/sqlite/test_store.py",
    "tests/engine/test_crash_at_every_commit.py",
]
ROOMS = ("execution.coordinator", "runner.entry_tracker", "stores.sqlite.batch")
WHERE = f"import importlib; [print(importlib.import_module('perdure.' + room).__file__) for room in {ROOMS}]"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The folder of a wheel with everything compiled that is to be."""
    if shutil.which(COMPILER) is None or not HEADERS.exists():
        pytest.skip(f"nothing can be compiled here: install {COMPILER} and Python's headers ({HEADERS.name})")
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("compiled")
    command = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w"]
    run(*command, str(wheels), str(ROOT), cwd=folder, PERDURE_NATIVE="1")
    [wheel] = wheels.iterdir()
    assert "none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    return folder


def test_what_is_imported_is_compiled(compiled):
    places = run("-c", WHERE, cwd=compiled, PYTHONPATH=str(compiled)).split()
    assert [Path(each).suffix for each in places] == [sysconfig.get_config_var("EXT_SUFFIX")[-3:]] * len(ROOMS)


def test_it_behaves_alike(compiled):
    """The tests of the runner, and those of the engine that begin and end many runs, on the compiled one."""
    check(compiled, "not sqlite and not postgres and not redis", ALIKE)


def test_its_sqlite_store_behaves_alike(compiled):
    """The store's contract and its rules beside those of the memory store, and crashes around every commit."""
    check(compiled, "sqlite and not postgres and not redis", SQLITE)


def test_without_being_asked_nothing_is_compiled(tmp_path):
    run("pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT), cwd=tmp_path)
    [wheel] = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")


def check(compiled: Path, choice: str, tests: list[str]) -> None:
    path = ["-o", f"pythonpath={ROOT} {compiled}"]
    shown = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *path, "-k", choice, *tests, cwd=ROOT)
    assert " passed" in shown.splitlines()[-1]


def run(*command: str, cwd: Path, **variables: str) -> str:
    """What a Python command prints; `pip` is run as a module."""
    given = ["-m", *command] if command[0] == "pip" else list(command)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PERDURE_"))}
    done = subprocess.run(
        [sys.executable, *given],
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout
