"""doctor: does every open run have a reason to go on, and is anything stuck? With --repair, mend it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli import options
from perdure.cli.output import SHOWN, counted, plain, print_json, progress, say, say_aside
from perdure.cli.session import DONE, FAILED, agree_to, ask, reported
from perdure.cli.settings import existing_store, store_url

if TYPE_CHECKING:
    from rich.text import Text

    from perdure.admin.health_check import Examination, Finding
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
    from perdure.admin.health_check import examine

    with reported(json):
        url, deeds = existing_store(store_url(store)), list[str]()
        with progress("examine") as more:
            found = ask(url, lambda client: examine(client, deep=deep, progress=more))
        if repair and any(finding.mends for finding in found.findings):
            if not yes:
                _ask_to_cancel([finding for finding in found.findings if finding.mends == "cancel"])
            found, deeds = ask(url, lambda client: _mended(client, found.findings, deep=deep))
        if json:
            from perdure.cli.json_output import examination_shape

            print_json(examination_shape(found, deeds))
        else:
            from perdure.client.store_urls import without_password

            _print(found, deeds, without_password(url), repair=repair)
    raise typer.Exit(FAILED if found.errors else DONE)


def _ask_to_cancel(findings: Sequence[Finding]) -> None:
    """All other repairs only let runs go on."""
    if len(findings) > 1:
        for finding in findings[:SHOWN]:
            say_aside(plain(f"  {finding.text}"))
        agree_to(f"cancel these {len(findings)} runs", len(findings) - SHOWN)


async def _mended(client: Client, findings: Sequence[Finding], *, deep: bool) -> tuple[Examination, list[str]]:
    """What is left after the repair, and what was done."""
    from perdure.admin.health_check import examine
    from perdure.admin.repair import mend

    deeds = await mend(client, findings)
    return await examine(client, deep=deep), deeds


def _print(found: Examination, deeds: list[str], url: str, *, repair: bool) -> None:
    from rich.text import Text

    say(plain(f"{counted(found.open_runs, 'open run')} in {url}"))
    for ground, words in GROUNDS.items():
        count = found.grounds.get(ground, 0)
        if count:
            colour = "red" if ground == "nothing" else "green"
            say(Text.assemble((f"  {count:>7}", colour), f"  {words}"))
    for deed in deeds:
        say(Text.assemble(("mended ", "bold green"), deed))
    for finding in found.findings:
        say(_finding(finding, repair))
    if not found.findings:
        say(Text("all is well", style="bold green"))
    elif not repair and any(finding.mends for finding in found.findings):
        say(Text("perdure doctor --repair mends what can be mended", style="bright_black"))


def _finding(finding: Finding, repair: bool) -> Text:
    from rich.text import Text

    colour = "bold red" if finding.severity == "error" else "bold yellow"
    then = f"with --repair: {finding.advice}" if finding.mends and not repair else finding.advice
    return Text.assemble((finding.severity, colour), f" {finding.text}\n", (f"      {then}", "bright_black"))
