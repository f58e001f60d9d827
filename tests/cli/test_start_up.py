"""The program itself: how it is called, what it loads, its version and completion."""

import subprocess
import sys
import tomllib
from importlib import import_module

from tests.cli.kit import ROOT

HEAVY = ("apsw", "rich.table", "rich.live", "rich.progress", "asyncpg", "redis", "perdure.store.sqlite", "pydantic")


def test_help_loads_nothing_that_it_does_not_need():
    code = f"import sys, perdure.cli.app; print([name for name in {HEAVY} if name in sys.modules])"
    path = str(ROOT / "src")
    loaded = subprocess.run([sys.executable, "-c", code], cwd=path, check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "[]"


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
