"""The `perdure` command, for people at a terminal and for programs.

Commands use the client layer and never a store. To keep `perdure --help` fast, modules of this package import only
typer at the top; they import the engine and rich inside the functions that need them.

    app           the command tree
    options       options that several commands share
    settings      store and application, from options, environment and pyproject.toml
    target        import of the user's code
    session       a client for one command; exit codes and error reports
    json_output   what `--json` prints
    output        terminal output: tables, lines, JSON
    timeline      one run as a tree of locations with bars
"""

from __future__ import annotations


def main() -> None:
    """Run the command line; entry point of the console script."""
    from perdure.cli.app import app

    app(prog_name="perdure")
