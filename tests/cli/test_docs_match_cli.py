"""docs/cli.md documents every command, option and JSON field, and nothing else."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer.main

from perdure import RunStatus
from perdure.cli import json_output
from perdure.cli.app import app
from tests.cli.cli_runner import ROOT, TIMEOUT_SECONDS

PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
SECTIONS = {
    heading.split("[")[0].rstrip(" ID"): text
    for heading, text in re.findall(r"^### `perdure ([^`]+)`\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
}


SHAPES = (
    *("run", "hold", "reason", "entry", "error", "dead letter", "worker", "finding", "lint finding"),
    *("incompatible run", "rejected request", "queue", "queue limits", "queue pause", "slot holders", "waiting run"),
    *("schedule", "schedule pause", "slot"),
)
GROUPS = ("dead-letters", "queues", "schedules")
PROGRAM: Any = typer.main.get_command(app)


def commands(group: Any = PROGRAM, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", command


def section(name: str) -> str:
    found = [text for heading, text in SECTIONS.items() if heading == name or heading.startswith(f"{name} ")]
    assert len(found) == 1, f"{name} has {len(found)} sections"
    return found[0]


def test_every_command_has_a_section_and_every_section_a_command():
    names = [name for name, _ in commands()]
    for name in names:
        section(name)
    assert len(SECTIONS) == len(names)


def test_every_option_is_documented_with_its_command():
    missing = [
        f"perdure {name} {option}"
        for name, command in commands()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("-") and not re.search(rf"(?<![\w-]){option}(?![\w-])", section(name))
    ]
    assert [each for each in missing if not each.endswith((" --help", " -h"))] == []


def test_global_options_are_documented():
    options = [option for parameter in PROGRAM.params for option in parameter.opts]
    assert [option for option in options if option not in PAGE] == []


def test_every_option_and_command_has_a_help_text():
    silent = [
        f"{name} {parameter.name}"
        for name, command in commands()
        for parameter in command.params
        if not getattr(parameter, "help", None)
    ]
    assert silent == []
    assert [name for name, command in commands() if not command.help] == []


def test_sections_name_only_options_that_exist():
    unknown = [
        f"perdure {name} {option}"
        for name, command in commands()
        for option in re.findall(r"`(--?[a-z][a-z-]*)", section(name))
        if option not in [each for parameter in command.params for each in parameter.opts]
    ]
    assert unknown == []


COMMAND_LINE = re.compile(r"^\$ perdure ([^\n#]*)|`perdure ((?!COMMAND)[^`]+)`", re.MULTILINE)


def test_command_lines_in_the_docs_are_valid():
    """The command exists and has the options."""
    known = dict(commands())
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for line in COMMAND_LINE.finditer(page.read_text(encoding="utf-8")):
            words = (line[1] or line[2]).split()
            name = " ".join(words[:2]) if words[0] in GROUPS else words[0]
            if words[0].startswith("-") or name in GROUPS:
                continue
            assert name in known, f"{page.name}: {line[0]}"
            options = {each for parameter in known[name].params for each in parameter.opts} | {"--help"}
            wrong = [word for word in words if re.fullmatch(r"--[a-z-]+|-[a-z]", word) and word not in options]
            assert wrong == [], f"{page.name}: {line[0]}"


def test_json_fields_are_documented():
    table = PAGE.partition("| value | fields |")[2]
    for name in SHAPES:
        [line] = re.findall(rf"^\| {name} \|(.*)\|$", table, re.MULTILINE)
        without_values = re.sub(r"\([^)]*\)", "", line)
        assert tuple(re.findall(r"`(\w+)`", without_values)) == getattr(json_output, name.upper().replace(" ", "_")), (
            name
        )
    assert [status for status in RunStatus if f"`{status}`" not in section("ls")] == []


def test_json_output_of_every_command_is_documented():
    table = PAGE.partition("| command | prints |")[2].partition("| value | fields |")[0]
    rows = {
        name for cells in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(.*?)`", cells)
    }
    assert rows == {name for name, command in commands() if any("--json" in each.opts for each in command.params)}


def test_exit_codes_are_documented():
    assert [code for code in "01234" if f"| {code} | " not in PAGE] == []


def test_every_command_with_arguments_has_an_example():
    for name, command in commands():
        takes_something = any(not parameter.opts[0].startswith("-") for parameter in command.params)
        if takes_something:
            assert f"perdure {name}" in (command.epilog or ""), name


def test_first_example_works_as_printed_in_an_empty_folder_twice(tmp_path):
    """The program and the commands at the top of the page, with `perdure dev` in a second terminal."""
    program = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    lines = re.findall(r"^\$ (perdure [^\n]*)$", re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)[0], re.MULTILINE)
    background, *commands_to_run = [shlex.split(line)[1:] for line in lines]
    assert background[0] == "dev"
    (tmp_path / "app.py").write_text(program)
    printed = ""
    for id in ("order-42", "order-43"):
        with running(tmp_path, background):
            for words in commands_to_run:
                printed = run(tmp_path, [word.replace("order-42", id) for word in words])
    assert "No problems found." in printed


@contextmanager
def running(folder: Path, words: list[str]) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "perdure.cli", *words], cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        while "Worker started" not in process.stdout.readline():
            assert process.poll() is None
        yield
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_SECONDS)


def run(folder: Path, words: list[str]) -> str:
    command = [sys.executable, "-m", "perdure.cli", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PERDURE_STORE"}
    return {**inherited, "PYTHONPATH": str(ROOT / "src")}
