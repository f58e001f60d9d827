"""check: would the runs that are open go on with this code? The gate before a deploy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from perdure.cli import options
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
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Replay every open run's history against the code at hand, without executing anything.

    Lists the runs that would be held, with the place, the line and the call that would make the change safe. Exits with
    1 if there is any.
    """
    from perdure.admin.compatibility import check_compatibility
    from perdure.cli.target import load, parse_target

    with error_reporting(json):
        url = existing_store(store_url(store))
        definitions = {(each.name, each.version): each for each in load(parse_target(target))}
        asked = query_of(None, workflow, tag, prefix)
        with progress("replay") as more:
            found = with_client(url, lambda client: check_compatibility(client, definitions, asked, more))
        if json:
            from perdure.cli.json_output import rehearsal_shape

            print_json(rehearsal_shape(found))
        else:
            _print(found)
    raise typer.Exit(FAILED if found.misfits else DONE)


def _print(found: CompatibilityReport) -> None:
    from rich.text import Text

    for alike in _alike(found.misfits):
        print_out(_misfit(alike))
    for name, count in sorted(found.unknown_workflows.items()):
        print_out(literal(f"passed over: {count} of workflow {name}, which is not in this code"))
    held = len(found.misfits)
    if held:
        print_out(Text.assemble((f"{held} would be held", "bold red"), f", {found.compatible} would go on"))
    else:
        print_out(
            Text.assemble(
                (
                    f"{counted(found.compatible, 'open run')} fit{'s' if found.compatible == 1 else ''} this code",
                    "bold green",
                )
            )
        )


def _alike(misfits: Sequence[IncompatibleRun]) -> list[list[IncompatibleRun]]:
    """Those that differ in nothing but the run: one change of the code holds them all."""
    found: dict[object, list[IncompatibleRun]] = {}
    for misfit in misfits:
        found.setdefault(replace(misfit, run_id=""), []).append(misfit)
    return list(found.values())


def _misfit(alike: list[IncompatibleRun]) -> Text:
    from rich.text import Text

    misfit = alike[0]
    runs = ", ".join(each.run_id for each in alike[:NAMED])
    more = f" and {len(alike) - NAMED} more" if len(alike) > NAMED else ""
    text = Text.assemble(("held ", "bold red"), (runs + more, "bold"), f"  {misfit.workflow} v{misfit.version}")
    facts = [("at", misfit.location), ("recorded", misfit.recorded), ("asked", misfit.asked), ("line", misfit.line)]
    if misfit.recorded is None:
        facts.insert(0, ("reason", misfit.reason))
    for name, value in facts:
        if value is not None:
            text.append(f"\n  {name:<9} ", "bright_black").append(value)
    return text.append(f"\n  {'fix':<9} ", "bright_black").append(misfit.remedy, "green")
