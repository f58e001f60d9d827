"""The program itself: how it is called, what it loads, its version and completion."""

import ast
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest

from perdure.cli import demo
from tests.cli.cli_runner import ROOT

# What only some commands need: drivers, the engine, and what draws.
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
COMPLETION = "import sys, perdure.cli.app"  # is asked for with every press of the tab key


@pytest.mark.parametrize(("code", "heavy"), [(HELP, DRIVERS), (COMPLETION, DRIVERS + DRAWING)])
def test_help_loads_nothing_that_it_does_not_need(code, heavy):
    code += f"; print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    path = str(ROOT / "src")
    done = subprocess.run([sys.executable, "-c", code], cwd=path, check=True, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def test_it_speaks_to_clients_and_never_to_a_store():
    for file in (ROOT / "src" / "perdure" / "cli").glob("*.py"):
        names = {alias for node in ast.walk(ast.parse(file.read_text())) for alias in _imported(node)}
        assert not any(name == "perdure.stores" or name.startswith("perdure.stores.") for name in names), file


def _imported(node):
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_the_demo_goes_into_the_wheel_where_the_command_looks_for_it():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    [(source, place)] = wheel["force-include"].items()
    assert (ROOT / source).is_file()
    assert ROOT / "src" / place == demo.PLACES[0]
    assert ROOT / source == demo.PLACES[1]
    assert "src/perdure" in wheel["packages"]


def test_the_console_script_is_the_program(shop):
    [(name, place)] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].items()
    assert name == "perdure"
    module, _, function = place.partition(":")
    assert callable(getattr(import_module(module), function))
    script = f"import sys; from {module} import {function}; sys.argv = ['perdure', 'ls']; sys.exit({function}())"
    done = subprocess.run([sys.executable, "-c", script], cwd=shop.folder, env=shop.environment, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"no runs\n")


def test_help_groups_the_commands_and_tells_the_exit_codes(shop):
    text = shop.run("--help").stdout
    for words in ("Runs", "Events and deferreds", "Exit codes: 0 done", "dead-letters", "[tool.perdure]"):
        assert words in text
    assert "[tool.perdure]" in shop.run("ls", "--help").stdout


def test_version_and_completion(shop):
    assert shop.run("--version").stdout.startswith("perdure")
    asked = {"_PERDURE_COMPLETE": "complete_bash", "COMP_WORDS": "perdure do", "COMP_CWORD": "1"}
    assert shop.run(**asked).stdout.split() == ["doctor"]
    asked = {"_PERDURE_COMPLETE": "complete_bash", "COMP_WORDS": "perdure ls --status su", "COMP_CWORD": "3"}
    assert shop.run(**asked).stdout.split() == ["suspended", "succeeded"]


def test_without_a_command_help_is_shown(shop):
    done = shop.run(code=2)
    assert "Usage" in done.stdout + done.stderr
