"""Commands migrate and prune."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.cli import options
from perdure.cli.output import SHOWN, counted, literal, print_err, print_json, print_out, progress
from perdure.cli.session import confirm_or_exit, error_reporting, with_client
from perdure.cli.settings import existing_store, store_url

if TYPE_CHECKING:
    from perdure.admin.store_views import Progress, Prunable
    from perdure.client.client import Client

PAGE_SIZE = 500


def migrate(store: options.Store = None, json: options.Json = False) -> None:
    """Create the store, or migrate it to the schema of this version. Opening a store does the same."""
    from perdure.client.store_urls import redact_password

    with error_reporting(json):
        url = store_url(store)
        with_client(url, _only_open)
        if json:
            print_json({"store": redact_password(url), "migrated": True})
        else:
            print_out(literal(f"{redact_password(url)} is up to date"))


async def _only_open(client: Client) -> None:
    """Do nothing: opening the client migrates the store."""


def prune(yes: options.Yes = False, store: options.Store = None, json: options.Json = False) -> None:
    """Delete finished runs after their retention, and expired data. Workers do the same once a minute."""
    with error_reporting(json):
        url = existing_store(store_url(store))
        with progress("scan") as more:
            due = with_client(url, lambda client: _due(client, more))
        if due.count > 1 and not yes:
            _show_and_confirm(due)
        with progress("prune", total=due.count) as more:
            pruned = with_client(url, lambda client: _prune(client, more))
        if json:
            print_json({"pruned": pruned})
        else:
            print_out(f"Pruned {counted(pruned, 'run')}")


def _show_and_confirm(due: Prunable) -> None:
    from perdure.cli.runs import print_runs

    print_runs(due.first, print_err)
    confirm_or_exit(f"delete these {due.count} finished runs with their histories", due.count - len(due.first))


async def _due(client: Client, more: Progress) -> Prunable:
    from perdure.admin.store_views import prunable

    return await prunable(client, first=SHOWN, progress=more)


async def _prune(client: Client, more: Progress) -> int:
    from perdure.admin.repair import prune as prune_page

    pruned = 0
    while page := await prune_page(client, PAGE_SIZE):
        pruned += page
        more(page)
    return pruned
