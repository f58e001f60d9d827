"""Command lint: find workflow code that may take another path on replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from perdure.cli import options
from perdure.cli.output import counted, literal, print_err, print_json, print_out
from perdure.cli.session import DONE, FAILED, error_reporting

if TYPE_CHECKING:
    from perdure.admin.lint import LintFinding


def lint(target: options.Target = None, json: options.Json = False) -> None:
    """Find calls in workflow code that differ between an execution and its replay, with what to use instead.

    Exits with 1 if there are any. A line that ends with `# perdure: ignore` is skipped.
    """
    from perdure.admin.lint import lint as find
    from perdure.cli.target import load, parse_target

    with error_reporting(json):
        found = find(load(parse_target(target)))
        if json:
            from perdure.cli.json_output import lint_shape

            print_json({"findings": [lint_shape(each) for each in found]})
        elif found:
            print_findings(found)
        else:
            print_out("No problems found.")
    raise typer.Exit(FAILED if found else DONE)


def print_findings(found: Sequence[LintFinding], *, to_stderr: bool = False) -> None:
    """Print one line per finding, and their number."""
    write = print_err if to_stderr else print_out
    for each in found:
        write(literal(f"{each.path}:{each.line}: {each.text} in workflow {each.workflow}: {each.remedy}"))
    write(counted(len(found), "problem"))
