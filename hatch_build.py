"""The build of the wheel, and of its compiled form: `PERDURE_NATIVE=1 pip install .` (docs/adr/0010).

The rooms that every step of every run goes through are compiled by mypyc to extension modules, from the same source,
which is installed beside them. Without that variable nothing is compiled and no compiler is needed: perdure is the
same, only slower.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
SWITCH = "PERDURE_NATIVE"
NEEDS = ["mypy~=2.4.1", "msgspec>=0.19", "setuptools>=77"]

# What a step passes through and nothing else. Compiled code checks the types of what it is given, so these are rooms
# that get typed values from others of ours: not those that judge what a user gives (theirs are the better words), nor
# those that take rows from a driver (whose flags are 0 and 1). Nor those that define a Struct which is decoded: its
# annotations do not outlive compiling. What derives from asyncio's classes gains nothing.
ROOMS = [
    "workflows/step_context.py",
    "clock.py",
    "codec/__init__.py",
    "execution/committer.py",
    "execution/coordinator.py",
    "execution/step_executor.py",
    "execution/run_cache.py",
    "execution/turn_commit.py",
    "runner/timers.py",
    "runner/completions.py",
    "runner/turn_extras.py",
    "runner/context_api.py",
    "runner/history.py",
    "runner/entry_tracker.py",
    "runner/scopes.py",
    "runner/mailbox.py",
    "runner/turn_builder.py",
    "runner/pending.py",
    "runner/runner.py",
    "runner/inputs.py",
    "stores/sqlite/batch.py",
    "stores/sqlite/rows.py",
]


def compile_rooms(into: Path) -> list[Path]:
    """Compile the rooms; the extension modules, at their places below `into`."""
    from mypyc.build import mypycify
    from setuptools import Distribution  # type: ignore[import-untyped]

    before = Path.cwd()
    os.chdir(ROOT)  # the type checker's settings are there
    try:
        with tempfile.TemporaryDirectory() as scratch:
            modules = mypycify(
                ["--ignore-missing-imports", f"--cache-dir={scratch}/types"]
                + [str(Path("src", "perdure", room)) for room in ROOMS],
                opt_level="3",
                debug_level="0",
                target_dir=scratch,
                group_name="perdure",
            )
            command: Any = Distribution({"name": "perdure", "ext_modules": modules}).get_command_obj("build_ext")
            command.build_lib = str(into)
            command.build_temp = scratch
            command.parallel = os.cpu_count()
            command.ensure_finalized()
            command.run()
    finally:
        os.chdir(before)
    return sorted(path for path in into.rglob("*") if path.suffix in (".so", ".pyd"))


class NativeHook(BuildHookInterface[Any]):
    """Adds the compiled rooms to the wheel, if they are asked for."""

    def dependencies(self) -> list[str]:
        return NEEDS if self._wanted else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self._wanted or version == "editable":
            return
        self._folder = Path(tempfile.mkdtemp())
        for path in compile_rooms(self._folder):
            build_data["force_include"][str(path)] = str(path.relative_to(self._folder))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if (folder := getattr(self, "_folder", None)) is not None:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def _wanted(self) -> bool:
        return self.target_name == "wheel" and os.environ.get(SWITCH, "") not in ("", "0")
