"""The `perdure` command: an edge, for people at a terminal and for programs.

It speaks to the client layer and never to a store. Nothing heavy is imported before a command needs it: a room here
imports typer and words at the top, and the engine and rich inside its functions.

    app        the commands, put together
    options    options that many commands share
    settings   which store, which application: from options, the environment and pyproject.toml
    target     importing the code that holds the workflows
    session    a client for one command; errors and exit codes
    shapes     what `--json` prints: the documented shapes
    output     tables, lines and JSON: a terminal, a pipe, a program
    timeline   one run as a tree of locations with bars
"""

from __future__ import annotations


def main() -> None:
    """The console script."""
    from perdure.cli.app import app

    app(prog_name="perdure")
