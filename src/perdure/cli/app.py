"""The command tree of `perdure`. Each command is a function in a module of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from perdure.cli import (
    check,
    control,
    dead_letters,
    demo,
    dev,
    doctor,
    lint,
    maintenance,
    messages,
    queues,
    runs,
    schedules,
    start,
    transfer,
    workers,
)

RUNS, EVENTS, WORK, STORE = "Runs", "Events and deferreds", "Development and workers", "Store"

app = typer.Typer(
    name="perdure",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Durable workflows: execute, start, inspect and control runs.\n\n"
    "The store is --store, PERDURE_STORE, `store` under \\[tool.perdure] in pyproject.toml, or else sqlite:///perdure.db.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 conflict.",
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import PackageNotFoundError, version

        from perdure.cli.output import print_out

        try:
            print_out(f"perdure {version('perdure')}")
        except PackageNotFoundError:
            print_out("perdure, not installed")
        raise typer.Exit


@app.callback()
def perdure(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


EXAMPLES = {
    "dev": "perdure dev app.py",
    "worker": "perdure worker app.shop:workflows --store sqlite:///shop.db --concurrency 100",
    "check": "perdure check app.shop:workflows",
    "lint": "perdure lint app.py",
    "start": """perdure start app.shop:checkout '{"id": "42", "cents": 999}' --id order-42""",
    "ls": "perdure ls --status failed --since 2h",
    "show": "perdure show order-42 --trace",
    "watch": "perdure watch order-42",
    "cancel": "perdure cancel --workflow checkout --tag team=night",
    "terminate": "perdure terminate order-42",
    "pause": "perdure pause order-42 --reason 'the bank is closed'",
    "resume": "perdure resume --held --workflow checkout",
    "delete": "perdure delete order-42",
    "rewind": "perdure rewind order-42 charge",
    "fork": "perdure fork order-42 charge --id order-42-again",
    "export": "perdure export order-42 -o order-42.json",
    "import": "perdure import order-42.json --store sqlite:///local.db",
    "send": """perdure send order-42 Approved '{"by": "ada"}'""",
    "emit": "perdure emit prices.changed '{}'",
    "complete": "perdure complete TOKEN '\"approved\"'",
    "fail": "perdure fail TOKEN 'no response'",
    "doctor": "perdure doctor --repair",
}
COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    WORK: {"dev": dev.dev, "worker": workers.worker, "check": check.check, "lint": lint.lint, "demo": demo.demo},
    RUNS: {
        "start": start.start,
        "ls": runs.ls,
        "show": runs.show,
        "watch": runs.watch,
        "cancel": control.cancel,
        "terminate": control.terminate,
        "pause": control.pause,
        "resume": control.resume,
        "delete": control.delete,
        "rewind": control.rewind,
        "fork": control.fork,
        "export": transfer.export,
        "import": transfer.import_,
    },
    EVENTS: {"send": messages.send, "emit": messages.emit, "complete": messages.complete, "fail": messages.fail},
    STORE: {
        "workers": workers.workers,
        "doctor": doctor.doctor,
        "migrate": maintenance.migrate,
        "prune": maintenance.prune,
    },
}

for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        example = f"Example: {EXAMPLES[name]}" if name in EXAMPLES else None
        app.command(name, rich_help_panel=panel, epilog=example)(command)
    if panel == RUNS:
        app.add_typer(schedules.schedules, name="schedules", rich_help_panel=panel)
    if panel == EVENTS:
        app.add_typer(dead_letters.dead_letters, name="dead-letters", rich_help_panel=panel)
    if panel == RUNS:
        app.add_typer(queues.queues, name="queues", rich_help_panel=panel)
