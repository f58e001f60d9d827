"""The program itself: entry points, imports, version, completion."""

import ast
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest

from perdure.cli import demo
from tests.cli.cli_runner import ROOT

# Imports that only some commands need: drivers, the engine, rich.
DRIVERS = (
    "apsw",
    "asyncpg",
    "redis",
    "pydantic",
    "perdure.stores",
    "perdure.execution",
    "perdure.client.client",
    "perdure.runner",
)
DRAWING = ("rich.table", "rich.live", "rich.progress")
HELP = "import sys; from perdure.cli.app import app; app(['--help'], standalone_mode=False)"
COMPLETION = "import sys, perdure.cli.app"  # runs at every press of the tab key


@pytest.mark.parametrize(("code", "heavy"), [(HELP, DRIVERS), (COMPLETION, DRIVERS + DRAWING)])
def test_help_and_completion_import_no_heavy_module(code, heavy):
    code += f"; print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    path = str(ROOT / "src")
    done = subprocess.run([sys.executable, "-c", code], cwd=path, check=True, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def test_cli_does_not_import_stores():
    for file in (ROOT / "src" / "perdure" / "cli").glob("*.py"):
        names = {alias for node in ast.walk(ast.parse(file.read_text())) for alias in _imported(node)}
        assert not any(name == "perdure.stores" or name.startswith("perdure.stores.") for name in names), file


def _imported(node):
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_wheel_contains_the_demo_program():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    [(source, target)] = wheel["force-include"].items()
    assert (ROOT / source).is_file()
    assert ROOT / "src" / target == demo.CANDIDATES[0]
    assert ROOT / source == demo.CANDIDATES[1]
    assert "src/perdure" in wheel["packages"]


def test_console_script_runs_the_program(shop):
    [(name, entry_point)] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].items()
    assert name == "perdure"
    module, _, function = entry_point.partition(":")
    assert callable(getattr(import_module(module), function))
    script = f"import sys; from {module} import {function}; sys.argv = ['perdure', 'ls']; sys.exit({function}())"
    done = subprocess.run([sys.executable, "-c", script], cwd=shop.folder, env=shop.environment, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"No runs found.\n")


def test_help_groups_commands_and_lists_exit_codes(shop):
    help_text = shop.run("--help").stdout
    for text in ("Runs", "Events and deferreds", "Exit codes: 0 done", "dead-letters", "[tool.perdure]"):
        assert text in help_text
    assert "[tool.perdure]" in shop.run("ls", "--help").stdout


def test_version_and_completion(shop):
    assert shop.run("--version").stdout.startswith("perdure")
    asked = {"_PERDURE_COMPLETE": "complete_bash", "COMP_WORDS": "perdure do", "COMP_CWORD": "1"}
    assert shop.run(**asked).stdout.split() == ["doctor"]
    asked = {"_PERDURE_COMPLETE": "complete_bash", "COMP_WORDS": "perdure ls --status su", "COMP_CWORD": "3"}
    assert shop.run(**asked).stdout.split() == ["suspended", "succeeded"]


def test_help_is_shown_without_a_command(shop):
    done = shop.run(code=2)
    assert "Usage" in done.stdout + done.stderr
