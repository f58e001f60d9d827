"""Options and arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from perdure.model.records import RunStatus

Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        "-s",
        metavar="URL",
        envvar="PERDURE_STORE",
        help="URL of the store. Default: `store` under \\[tool.perdure], else sqlite:///perdure.db.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, as described in docs/cli.md.")]
App = Annotated[
    str | None,
    typer.Option(
        "--app",
        "-a",
        metavar="TARGET",
        help="The code: module, module:attribute or file.py. Default: `app` under \\[tool.perdure].",
        show_default=False,
    ),
]
Lint = Annotated[bool, typer.Option("--lint", help="Report code that may take another path on replay, as `lint` does.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

RunId = Annotated[str, typer.Argument(metavar="ID", help="The run's id.", show_default=False)]
RunIds = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of runs.", show_default=False)]
Location = Annotated[
    str,
    typer.Argument(
        metavar="LOCATION", help="The location of an entry, as printed by `perdure show`.", show_default=False
    ),
]
Target = Annotated[
    str | None,
    typer.Argument(
        metavar="TARGET",
        help="The code: app.shop, app.shop:workflows or app.py. Default: `app` under \\[tool.perdure].",
        show_default=False,
    ),
]

Status = Annotated[
    list[RunStatus] | None,
    typer.Option(
        "--status",
        metavar="STATUS",
        help="Only runs in this status: pending, running, suspended, succeeded, failed, cancelled; may be repeated.",
    ),
]
Held = Annotated[bool, typer.Option("--held", help="Only held runs.")]
WaitingFor = Annotated[
    str | None,
    typer.Option(
        "--waiting-for",
        metavar="KIND[:NAME]",
        help="Only runs that wait for this: event:Approved, child:ID, deferred:NAME, timer, retry, held.",
        show_default=False,
    ),
]
Reason = Annotated[
    str | None,
    typer.Option("--reason", metavar="TEXT", help="Why; shown with the run and in its history.", show_default=False),
]
Workflow = Annotated[
    str | None, typer.Option("--workflow", "-w", metavar="NAME", help="Only runs of this workflow.", show_default=False)
]
Tags = Annotated[
    list[str] | None, typer.Option("--tag", "-t", metavar="KEY=VALUE", help="Only runs with this tag; may be repeated.")
]
Prefix = Annotated[
    str | None,
    typer.Option("--prefix", metavar="TEXT", help="Only runs whose id begins with this.", show_default=False),
]
Parent = Annotated[
    str | None, typer.Option("--parent", metavar="ID", help="Only children of this run.", show_default=False)
]
Since = Annotated[
    str | None,
    typer.Option(
        "--since", metavar="WHEN", help="Only runs created since: 2h, 7d, or 2026-01-31T12:00Z.", show_default=False
    ),
]
Until = Annotated[
    str | None,
    typer.Option(
        "--until", metavar="WHEN", help="Only runs created before: 2h, 7d, or 2026-01-31T12:00Z.", show_default=False
    ),
]
EventId = Annotated[
    str | None,
    typer.Option("--event-id", metavar="ID", help="Makes the send idempotent.", show_default=False),
]
