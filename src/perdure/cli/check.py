"""Command check: replay open runs against the code at hand before a deploy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from perdure.cli import options
from perdure.cli.lint import print_findings
from perdure.cli.output import counted, literal, print_json, print_out, progress
from perdure.cli.parsing import query_of
from perdure.cli.session import DONE, FAILED, error_reporting, with_client
from perdure.cli.settings import existing_store, store_url

if TYPE_CHECKING:
    from rich.text import Text

    from perdure.admin.compatibility import CompatibilityReport, IncompatibleRun

NAMED = 5


def check(
    target: options.Target = None,
    workflow: options.Workflow = None,
    tag: options.Tags = None,
    prefix: options.Prefix = None,
    lint: options.Lint = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Replay the history of every open run against the code at hand, without executing anything.

    Lists incompatible runs with location, line and the call that makes the change safe. Exits with 1 if there are any,
    or if --lint finds something.
    """
    from perdure.admin.compatibility import check_compatibility
    from perdure.admin.lint import lint as find
    from perdure.cli.target import load_unambiguous, parse_target

    with error_reporting(json):
        url = existing_store(store_url(store))
        # Python matches bytecode with a file by size and whole seconds: a later check could replay older code.
        sys.dont_write_bytecode = True
        definitions = {(each.name, each.version): each for each in load_unambiguous(parse_target(target))}
        query = query_of(None, workflow, tag, prefix)
        with progress("replay") as more:
            found = with_client(url, lambda client: check_compatibility(client, definitions, query, more))
        problems = find(definitions.values()) if lint else []
        if json:
            from perdure.cli.json_output import compatibility_shape, lint_shape

            shape = compatibility_shape(found)
            print_json({**shape, "findings": [lint_shape(each) for each in problems]} if lint else shape)
        else:
            if problems:
                print_findings(problems)
            _print(found)
    raise typer.Exit(FAILED if found.incompatible or problems else DONE)


def _print(found: CompatibilityReport) -> None:
    from rich.text import Text

    for group in _group(found.incompatible):
        print_out(_describe(group))
    for name, count in sorted(found.unknown_workflows.items()):
        print_out(literal(f"Skipped {counted(count, 'run')} of workflow {name} (not defined in this code)"))
    incompatible = len(found.incompatible)
    if incompatible:
        text = counted(incompatible, "incompatible run")
        print_out(Text.assemble((text, "bold red"), f", {found.compatible} compatible"))
    else:
        verb = "is" if found.compatible == 1 else "are"
        print_out(Text(f"{counted(found.compatible, 'open run')} {verb} compatible with this code", style="bold green"))


def _group(incompatible: Sequence[IncompatibleRun]) -> list[list[IncompatibleRun]]:
    """Group runs that differ only in their id: one change of the code caused them all."""
    groups: dict[object, list[IncompatibleRun]] = {}
    for run in incompatible:
        groups.setdefault(replace(run, run_id=""), []).append(run)
    return list(groups.values())


def _describe(group: list[IncompatibleRun]) -> Text:
    from rich.text import Text

    first = group[0]
    runs = ", ".join(each.run_id for each in group[:NAMED])
    more = f" and {len(group) - NAMED} more" if len(group) > NAMED else ""
    text = Text.assemble(("held ", "bold red"), (runs + more, "bold"), f"  {first.workflow} v{first.version}")
    facts = [("at", first.location), ("recorded", first.recorded), ("asked", first.asked), ("line", first.line)]
    if first.recorded is None:
        facts.insert(0, ("reason", first.reason))
    for name, value in facts:
        if value is not None:
            text.append(f"\n  {name:<9} ", "bright_black").append(value)
    return text.append(f"\n  {'fix':<9} ", "bright_black").append(first.suggested_fix, "green")
