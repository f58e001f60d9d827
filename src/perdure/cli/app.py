"""The commands of `perdure`, put together. Each is a function of a room beside this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from perdure.cli import check, demo, dev, doctor, runs
from perdure.cli import control as acting
from perdure.cli import dead_letters as letters
from perdure.cli import messages as telling
from perdure.cli import start as starting
from perdure.cli import transfer as moving
from perdure.cli import workers as fleet

RUNS, EVENTS, WORK, STORE = "Runs", "Events and deferreds", "Working", "The store"

app = typer.Typer(
    name="perdure",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Durable workflows: start runs, look at them, tell them what to do, execute them.\n\n"
    "A store is named with --store, PERDURE_STORE, or `store` under \\[tool.perdure] in pyproject.toml.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 conflict.",
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        from perdure.cli.output import say

        try:
            say(f"perdure {version('perdure')}")
        except PackageNotFoundError:
            say("perdure, not installed")
        raise typer.Exit


@app.callback()
def perdure(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What is common to all commands."""


EXAMPLES = {
    "dev": "perdure dev app.py",
    "worker": "perdure worker app.shop:workflows --store sqlite:///shop.db --concurrency 100",
    "check": "perdure check app.shop:workflows",
    "start": """perdure start checkout '{"id": "42", "cents": 999}' --id order-42 --app app.shop""",
    "ls": "perdure ls --status failed --since 2h",
    "show": "perdure show order-42 --trace",
    "watch": "perdure watch order-42",
    "cancel": "perdure cancel --workflow checkout --tag team=night",
    "terminate": "perdure terminate order-42",
    "resume": "perdure resume order-42",
    "rewind": "perdure rewind order-42 charge",
    "fork": "perdure fork order-42 charge --id order-42-again",
    "export": "perdure export order-42 -o order-42.json",
    "import": "perdure import order-42.json --store sqlite:///local.db",
    "send": """perdure send order-42 Approved '{"by": "ada"}'""",
    "emit": "perdure emit prices.changed '{}'",
    "complete": "perdure complete TOKEN '\"approved\"'",
    "fail": "perdure fail TOKEN 'nobody has answered'",
    "doctor": "perdure doctor --repair",
}
COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    WORK: {"dev": dev.dev, "worker": fleet.worker, "check": check.check, "demo": demo.demo},
    RUNS: {
        "start": starting.start,
        "ls": runs.ls,
        "show": runs.show,
        "watch": runs.watch,
        "cancel": acting.cancel,
        "terminate": acting.terminate,
        "resume": acting.resume,
        "rewind": acting.rewind,
        "fork": acting.fork,
        "export": moving.export,
        "import": moving.import_,
    },
    EVENTS: {"send": telling.send, "emit": telling.emit, "complete": telling.complete, "fail": telling.fail},
    STORE: {"workers": fleet.workers, "doctor": doctor.doctor, "migrate": fleet.migrate, "prune": fleet.prune},
}

for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        example = f"Example: {EXAMPLES[name]}" if name in EXAMPLES else None
        app.command(name, rich_help_panel=panel, epilog=example)(command)
    if panel == EVENTS:
        app.add_typer(letters.dead_letters, name="dead-letters", rich_help_panel=panel)
