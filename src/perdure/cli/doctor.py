"""Command doctor: check that every open run can make progress, and repair what cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli import options
from perdure.cli.output import SHOWN, counted, literal, print_err, print_json, print_out, progress
from perdure.cli.session import DONE, FAILED, confirm_or_exit, error_reporting, with_client
from perdure.cli.settings import existing_store, store_url

if TYPE_CHECKING:
    from rich.text import Text

    from perdure.admin.findings import Finding, HealthReport
    from perdure.client.client import Client

PROGRESS_REASONS = {
    "owner": "executing on a live worker",
    "due": "scheduled",
    "event": "waiting for an event",
    "deferred": "waiting for a deferred",
    "child": "waiting for another run",
    "queue": "waiting in a queue",
    "held": "held",
    "nothing": "stuck",
}


def doctor(
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair what can be repaired, and print what was done.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also read all histories of open runs, and all ended runs.")
    ] = False,
    app: options.App = None,
    yes: options.Yes = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Check the store: every open run must be able to make progress.

    Exits with 1 if an error is found (with --repair: if one remains). Warnings alone exit with 0. A repair that would
    cancel more than one run asks for confirmation. With --app, schedules that the code does not declare any more are
    reported.
    """
    from perdure.admin.health_check import check_health

    with error_reporting(json):
        url, repairs = existing_store(store_url(store)), list[str]()
        with progress("check") as more:
            found = with_client(
                url,
                lambda client: check_health(client, deep=deep, progress=more, declared_schedules=_declared(app)),
            )
        if repair and any(finding.repair for finding in found.findings):
            if not yes:
                _confirm_cancellations([finding for finding in found.findings if finding.repair == "cancel"])
            found, repairs = with_client(url, lambda client: _repair(client, found.findings, deep=deep))
        if json:
            from perdure.cli.json_output import health_report_shape

            print_json(health_report_shape(found, repairs))
        else:
            from perdure.client.store_urls import redact_password

            _print(found, repairs, redact_password(url), repair=repair)
    raise typer.Exit(FAILED if found.errors else DONE)


def _declared(app: str | None) -> set[str] | None:
    """Return the ids of the schedules that the given code declares; None without code."""
    if app is None:
        return None
    from perdure.cli.schedules import declared_ids
    from perdure.cli.target import load, parse_target

    return declared_ids(load(parse_target(app)))


def _confirm_cancellations(findings: Sequence[Finding]) -> None:
    """Ask before cancelling several runs. All other repairs only let runs continue."""
    if len(findings) > 1:
        for finding in findings[:SHOWN]:
            print_err(literal(f"  {finding.text}"))
        confirm_or_exit(f"cancel these {len(findings)} runs", len(findings) - SHOWN)


async def _repair(client: Client, findings: Sequence[Finding], *, deep: bool) -> tuple[HealthReport, list[str]]:
    """Repair, and return a new report and the actions."""
    from perdure.admin.health_check import check_health
    from perdure.admin.repair import repair

    actions = await repair(client, findings)
    return await check_health(client, deep=deep), actions


def _print(found: HealthReport, repairs: list[str], url: str, *, repair: bool) -> None:
    from rich.text import Text

    print_out(literal(f"{counted(found.open_runs, 'open run')} in {url}"))
    for reason, text in PROGRESS_REASONS.items():
        count = found.progress_reasons.get(reason, 0)
        if count:
            colour = "red" if reason == "nothing" else "green"
            print_out(Text.assemble((f"  {count:>7}", colour), f"  {text}"))
    for action in repairs:
        print_out(Text.assemble(("Repaired: ", "bold green"), action))
    for finding in found.findings:
        print_out(_finding(finding, repair))
    if not found.findings:
        print_out(Text("No problems found.", style="bold green"))
    elif not repair and any(finding.repair for finding in found.findings):
        print_out(Text("Run `perdure doctor --repair` to fix these.", style="bright_black"))


def _finding(finding: Finding, repair: bool) -> Text:
    from rich.text import Text

    colour = "bold red" if finding.severity == "error" else "bold yellow"
    then = f"with --repair: {finding.advice}" if finding.repair and not repair else finding.advice
    return Text.assemble((finding.severity, colour), f" {finding.text}\n", (f"      {then}", "bright_black"))
