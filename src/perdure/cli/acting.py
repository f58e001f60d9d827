"""cancel, terminate, resume, rewind, fork: telling runs what to do.

What would touch more than one run shows which, and asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli import options
from perdure.cli.output import confirm, plain, print_json, progress, say, say_aside, warn
from perdure.cli.reading import query_of
from perdure.cli.session import CONFLICT, DONE, NOT_FOUND, Refusal, Usage, ask, code_of, reported
from perdure.cli.settings import existing_store, store_url
from perdure.errors import PerdureError

if TYPE_CHECKING:
    from perdure.client import Client
    from perdure.inspection import Progress
    from perdure.records import RunQuery, RunStatus
    from perdure.views import RunDescription

    Act = Callable[[Client, str], Awaitable[None]]

SHOWN = 20


def cancel(
    ids: options.RunIds = None,
    status: options.Status = None,
    workflow: options.Workflow = None,
    tag: options.Tags = None,
    prefix: options.Prefix = None,
    yes: options.Yes = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Ask runs to stop: their workflows are cancelled inside, and compensations run.

    Takes ids, or filters that choose among the runs that are open.
    """
    with reported(json):
        chosen = _chosen(ids, status, workflow, tag, prefix)
        _act_on(chosen, "cancel", _cancel, store, yes=yes, json=json)


def terminate(
    ids: options.RunIds = None,
    status: options.Status = None,
    workflow: options.Workflow = None,
    tag: options.Tags = None,
    prefix: options.Prefix = None,
    yes: options.Yes = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """End runs at once, without compensation.

    Takes ids, or filters that choose among the runs that are open.
    """
    with reported(json):
        chosen = _chosen(ids, status, workflow, tag, prefix)
        _act_on(chosen, "terminate", _terminate, store, yes=yes, json=json)


def resume(
    ids: options.RunIds = None,
    status: options.Status = None,
    workflow: options.Workflow = None,
    tag: options.Tags = None,
    prefix: options.Prefix = None,
    yes: options.Yes = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Drive suspended runs on now; one that is held gets another chance.

    Takes ids, or filters that choose among the runs that are suspended.
    """
    with reported(json):
        from perdure.records import RunStatus

        chosen = _chosen(ids, status or [RunStatus.SUSPENDED], workflow, tag, prefix)
        _act_on(chosen, "resume", _resume, store, yes=yes, json=json)


def rewind(
    id: options.RunId, location: options.Location, store: options.Store = None, json: options.Json = False
) -> None:
    """Drop what a run did at a location and after it, and let it go on from there; it may have ended."""
    with reported(json):
        ask(existing_store(store_url(store)), lambda client: client.rewind(id, location))
        if json:
            print_json({"run": id, "location": location})
        else:
            say(plain(f"run {id} goes on from {location}"))


def fork(
    id: options.RunId,
    location: options.Location,
    new_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The new run's id.", show_default=False)
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Start a new run with a copy of what this one did before a location."""
    with reported(json):
        run = ask(existing_store(store_url(store)), lambda client: client.fork(id, location, id=new_id))
        if json:
            print_json({"run": run.id, "from": id, "location": location})
        else:
            say(plain(run.id))


# --- what is done to one run ---------------------------------------------------------------------------------------


async def _cancel(client: Client, run_id: str) -> None:
    if not await client.cancel(run_id):
        await _refused(client, run_id)


async def _terminate(client: Client, run_id: str) -> None:
    if not await client.terminate(run_id):
        await _refused(client, run_id)


async def _resume(client: Client, run_id: str) -> None:
    await client.resume(run_id)


async def _refused(client: Client, run_id: str) -> None:
    """Say why: there is no such run, or it has ended."""
    from perdure.errors import RunNotFound, RunTerminated

    status = await client.status(run_id)
    if status is None:
        raise RunNotFound(run_id)
    raise RunTerminated(run_id, status)


# --- on one or many ------------------------------------------------------------------------------------------------


def _chosen(
    ids: Sequence[str] | None,
    status: Sequence[RunStatus] | None,
    workflow: str | None,
    tag: Sequence[str] | None,
    prefix: str | None,
) -> list[str] | RunQuery:
    if ids:
        if workflow or tag or prefix:
            raise Usage("ids and filters were given", "either ids, or --workflow, --tag, --prefix and --status")
        return list(dict.fromkeys(ids))
    if not (workflow or tag or prefix or status):
        raise Usage("no run is named", "ids, or --workflow, --tag, --prefix and --status")
    return query_of(status, workflow, tag, prefix)


def _act_on(chosen: list[str] | RunQuery, verb: str, act: Act, store: str | None, *, yes: bool, json: bool) -> None:
    url = existing_store(store_url(store))
    ids = chosen if isinstance(chosen, list) else ask(url, lambda client: _open_runs(client, chosen))
    if len(ids) > 1 and not yes:
        _show_and_ask(url, ids, verb)
    if len(ids) == 1 and isinstance(chosen, list):
        ask(url, lambda client: act(client, ids[0]))  # what goes wrong with it is what goes wrong
        outcomes: dict[str, PerdureError | None] = {ids[0]: None}
    else:
        with progress(verb, total=len(ids)) as more:
            outcomes = ask(url, lambda client: _all(client, ids, act, more))
    if json:
        done = [{"id": id, "done": error is None, "error": error and str(error)} for id, error in outcomes.items()]
        print_json({"runs": done})
    else:
        _tell(verb, outcomes)
    raise typer.Exit(_code(outcomes))


async def _open_runs(client: Client, query: RunQuery) -> list[str]:
    from perdure.inspection import records_of

    return [record.id async for page in records_of(client, query) for record in page if not record.status.terminal]


async def _all(client: Client, ids: Sequence[str], act: Act, more: Progress) -> dict[str, PerdureError | None]:
    outcomes: dict[str, PerdureError | None] = {}
    for run_id in ids:
        try:
            await act(client, run_id)
            outcomes[run_id] = None
        except PerdureError as error:
            outcomes[run_id] = error
        more(1)
    return outcomes


def _show_and_ask(url: str, ids: Sequence[str], verb: str) -> None:
    from perdure.cli.runs import print_runs

    async def first(client: Client) -> list[RunDescription]:
        from perdure.errors import RunNotFound

        found = []
        for run_id in ids[:SHOWN]:
            try:
                found.append(await client.describe(run_id))
            except RunNotFound:
                warn(f"no run has the id {run_id!r}")
        return found

    print_runs(ask(url, first), say_aside)
    if len(ids) > SHOWN:
        warn(f"and {len(ids) - SHOWN} more")
    if not confirm(f"{verb} these {len(ids)} runs?"):
        raise Refusal(f"{verb} would touch {len(ids)} runs, and nothing was done", "the same with --yes", code=2)


def _tell(verb: str, outcomes: dict[str, PerdureError | None]) -> None:
    past = {"cancel": "asked to stop", "terminate": "ended", "resume": "driven on"}[verb]
    for run_id, error in outcomes.items():
        if error is not None:
            warn(str(error))
        elif len(outcomes) == 1:
            say(plain(f"run {run_id} was {past}"))
    if len(outcomes) != 1:
        say(plain(f"{sum(error is None for error in outcomes.values())} runs were {past}"))


def _code(outcomes: dict[str, PerdureError | None]) -> int:
    """The worst: a conflict is only in the way, one that is not found was meant."""
    codes = {DONE if error is None else code_of(error) for error in outcomes.values()}
    return next((code for code in (NOT_FOUND, CONFLICT) if code in codes), max(codes, default=DONE))
