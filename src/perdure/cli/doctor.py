"""doctor: does every open run have a reason to go on, and is anything stuck? With --repair, mend it."""

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

    from perdure.admin.health_check import Finding, HealthReport
    from perdure.client.client import Client

GROUNDS = {
    "owner": "a live worker is at it",
    "due": "due at a known time",
    "event": "waits for an event",
    "deferred": "waits for a deferred",
    "child": "waits for another run",
    "held": "held, with a reason",
    "nothing": "nothing will wake it",
}


def doctor(
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended, and say what was done.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read every open run's history too, for large values.")] = False,
    yes: options.Yes = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Examine the store: every open run must have something that makes it go on.

    Exits with 1 if an error is found (and left, with --repair); warnings alone are 0. A repair that would cancel more
    than one run asks first.
    """
    from perdure.admin.health_check import check_health

    with error_reporting(json):
        url, deeds = existing_store(store_url(store)), list[str]()
        with progress("examine") as more:
            found = with_client(url, lambda client: check_health(client, deep=deep, progress=more))
        if repair and any(finding.repair for finding in found.findings):
            if not yes:
                _ask_to_cancel([finding for finding in found.findings if finding.repair == "cancel"])
            found, deeds = with_client(url, lambda client: _mended(client, found.findings, deep=deep))
        if json:
            from perdure.cli.json_output import examination_shape

            print_json(examination_shape(found, deeds))
        else:
            from perdure.client.store_urls import redact_password

            _print(found, deeds, redact_password(url), repair=repair)
    raise typer.Exit(FAILED if found.errors else DONE)


def _ask_to_cancel(findings: Sequence[Finding]) -> None:
    """All other repairs only let runs go on."""
    if len(findings) > 1:
        for finding in findings[:SHOWN]:
            print_err(literal(f"  {finding.text}"))
        confirm_or_exit(f"cancel these {len(findings)} runs", len(findings) - SHOWN)


async def _mended(client: Client, findings: Sequence[Finding], *, deep: bool) -> tuple[HealthReport, list[str]]:
    """What is left after the repair, and what was done."""
    from perdure.admin.health_check import check_health
    from perdure.admin.repair import repair

    deeds = await repair(client, findings)
    return await check_health(client, deep=deep), deeds


def _print(found: HealthReport, deeds: list[str], url: str, *, repair: bool) -> None:
    from rich.text import Text

    print_out(literal(f"{counted(found.open_runs, 'open run')} in {url}"))
    for ground, words in GROUNDS.items():
        count = found.progress_reasons.get(ground, 0)
        if count:
            colour = "red" if ground == "nothing" else "green"
            print_out(Text.assemble((f"  {count:>7}", colour), f"  {words}"))
    for deed in deeds:
        print_out(Text.assemble(("mended ", "bold green"), deed))
    for finding in found.findings:
        print_out(_finding(finding, repair))
    if not found.findings:
        print_out(Text("all is well", style="bold green"))
    elif not repair and any(finding.repair for finding in found.findings):
        print_out(Text("perdure doctor --repair mends what can be mended", style="bright_black"))


def _finding(finding: Finding, repair: bool) -> Text:
    from rich.text import Text

    colour = "bold red" if finding.severity == "error" else "bold yellow"
    then = f"with --repair: {finding.advice}" if finding.repair and not repair else finding.advice
    return Text.assemble((finding.severity, colour), f" {finding.text}\n", (f"      {then}", "bright_black"))
