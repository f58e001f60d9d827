"""Commands ls, show, watch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli import options
from perdure.cli.output import (
    age,
    coloured,
    console,
    length,
    literal,
    print_err,
    print_json,
    print_out,
    short,
    state_of,
    table_of,
)
from perdure.cli.parsing import query_of
from perdure.cli.session import DONE, FAILED, error_reporting, with_client
from perdure.cli.settings import existing_store, store_url

if TYPE_CHECKING:
    from perdure.admin.store_views import RejectedRequest
    from perdure.client.client import Client
    from perdure.client.views import HistoryEntry, RunDescription, RunList
    from perdure.model.queries import RunQuery


def ls(
    query: Annotated[
        str | None,
        typer.Argument(
            metavar="[QUERY]", help="A filter: 'status:failed tenant:acme amount>500 -region:us'.", show_default=False
        ),
    ] = None,
    status: options.Status = None,
    held: options.Held = False,
    waiting_for: options.WaitingFor = None,
    workflow: options.Workflow = None,
    tag: options.Tags = None,
    prefix: options.Prefix = None,
    parent: options.Parent = None,
    since: options.Since = None,
    until: options.Until = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Runs per page.")] = 20,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="NEXT", help="Continue after a page: its `next`.", show_default=False),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """List runs, newest first, in pages.

    QUERY is a filter (docs/search.md): `perdure ls 'status:failed tenant:acme amount>500 created>-2h'`.
    """
    with error_reporting(json):
        wanted = query_of(
            status,
            workflow,
            tag,
            prefix,
            parent,
            since,
            until,
            limit=limit,
            after=after,
            held=held,
            waiting_for=waiting_for,
            where=query,
        )
        page = with_client(existing_store(store_url(store)), lambda client: _read_page(client, wanted))
        if json:
            from perdure.cli.json_output import page_shape

            print_json(page_shape(page))
        else:
            print_runs(page)


async def _read_page(client: Client, query: RunQuery) -> RunList:
    """Return a full page: a store returns fewer runs when it has examined many."""
    from msgspec.structs import replace

    page = await client.runs(query)
    while page.next is not None and len(page) < query.limit:
        rest = await client.runs(replace(query, after=page.next, limit=query.limit - len(page)))
        page = dataclasses.replace(
            rest,
            runs=(*page.runs, *rest.runs),
            unreadable=(*page.unreadable, *rest.unreadable),
            scanned=page.scanned + rest.scanned,
        )
    return page


def show(
    id: options.RunId,
    trace: Annotated[bool, typer.Option("--trace", help="Print tracebacks in full.")] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Show one run: its state, why it waits, and its history as a tree with a timeline."""
    with error_reporting(json):
        run, history, rejected = with_client(existing_store(store_url(store)), lambda client: _read_all(client, id))
        if json:
            from perdure.cli.json_output import entry_shape, rejected_shape, run_shape

            entries, requests = map(entry_shape, history), map(rejected_shape, rejected)
            print_json({"run": run_shape(run), "history": list(entries), "rejected_requests": list(requests)})
        else:
            from perdure.cli.timeline import draw_rejected, draw_run

            print_out(draw_run(run, history, trace=trace))
            if rejected:
                print_out(draw_rejected(rejected))


def watch(id: options.RunId, store: options.Store = None, json: options.Json = False) -> None:
    """Follow a run until it ends; exits with 1 if it fails or is cancelled.

    On a terminal the view of `show`, updated live. In a pipe a line for each entry that changes. With --json one object
    per line: `{"entry": ...}`, and `{"run": ...}` at the end.
    """
    with error_reporting(json):
        url = existing_store(store_url(store))
        if json:
            follow = _follow_as_json
        elif console().is_terminal:
            follow = _follow_live
        else:
            follow = _follow_in_lines
        run = with_client(url, lambda client: follow(client, id))
    raise typer.Exit(DONE if run.status == "succeeded" else FAILED)


# --- following -----------------------------------------------------------------------------------------------------


async def _follow_as_json(client: Client, run_id: str) -> RunDescription:
    from perdure.cli.json_output import entry_shape, run_shape

    async for entry in client.watch(run_id):
        print_json({"entry": entry_shape(entry)}, indent=False)
    run = await client.describe(run_id)
    print_json({"run": run_shape(run)}, indent=False)
    return run


async def _follow_in_lines(client: Client, run_id: str) -> RunDescription:
    from perdure.cli.timeline import entry_line

    async for entry in client.watch(run_id):
        print_out(entry_line(entry))
        sys.stdout.flush()
    run = await client.describe(run_id)
    print_out(literal(f"{run.id} {run.status}" + (f": {short(run.result, 200)}" if run.status == "succeeded" else "")))
    return run


async def _follow_live(client: Client, run_id: str) -> RunDescription:
    """Redraw the view when an entry changes, and several times a second so that bars grow."""
    from rich.live import Live

    from perdure.cli.timeline import draw_run

    run, history = await _read(client, run_id)
    with Live(console=console(), refresh_per_second=8, get_renderable=lambda: draw_run(run, history, trace=False)):
        async for _ in client.watch(run_id):
            run, history = await _read(client, run_id)
        run, history = await _read(client, run_id)
    return run


async def _read(client: Client, run_id: str) -> tuple[RunDescription, list[HistoryEntry]]:
    return await client.describe(run_id), await client.history(run_id)


async def _read_all(client: Client, run_id: str) -> tuple[RunDescription, list[HistoryEntry], list[RejectedRequest]]:
    from perdure.admin.store_views import rejected_requests

    return *(await _read(client, run_id)), await rejected_requests(client, run_id)


# --- printing ------------------------------------------------------------------------------------------------------


def print_runs(page: RunList | Sequence[RunDescription], emit: Callable[[Any], None] = print_out) -> None:
    """Print runs as a table, with the option for the next page."""
    runs = list(page)
    for mark in getattr(page, "unreadable", ()):
        print_err(literal(f"Skipped: {mark}"))
    rows = [
        (
            literal(each.id),
            literal(_name(each)),
            coloured(state_of(each)),
            age(each.created_at),
            literal(outcome_of(each)),
        )
        for each in runs
    ]
    if not rows:
        emit("No runs found.")
        return
    emit(table_of(("run", "workflow", "status", "created", "outcome"), rows))
    more = getattr(page, "next", None)
    if more is not None:
        print_err(literal(f"More runs: repeat the command with --after {more}"))


def _name(run: RunDescription) -> str:
    return run.workflow if run.version == 1 else f"{run.workflow} v{run.version}"


def outcome_of(run: RunDescription) -> str:
    """Return the outcome of a run, or why it is held, on one line."""
    if run.held is not None:
        return f"{run.held.kind}: {run.held.reason}".splitlines()[0]
    if run.error is not None:
        return f"{run.error.type}: {run.error.message}".splitlines()[0]
    if run.result is not None:  # a list has no results
        return short(run.result)
    return "" if run.ended_at is None else f"after {length(run.ended_at - run.created_at)}"
