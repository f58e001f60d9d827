"""cancel, terminate, resume, rewind, fork: telling runs what to do.

What would touch more than one run shows which, and asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli import options
from perdure.cli.output import SHOWN, counted, literal, print_err, print_json, print_out, progress, warn
from perdure.cli.parsing import query_of
from perdure.cli.session import (
    CONFLICT,
    DONE,
    NOT_FOUND,
    UsageError,
    code_of,
    confirm_or_exit,
    error_reporting,
    with_client,
)
from perdure.cli.settings import existing_store, store_url
from perdure.errors import PerdureError
from perdure.model.records import RunStatus

if TYPE_CHECKING:
    from perdure.admin.health_check import Progress
    from perdure.client.client import Client
    from perdure.client.views import RunDescription
    from perdure.model.queries import RunQuery

    Act = Callable[[Client, str], Awaitable[None]]


@dataclass(frozen=True)
class Verb:
    """Something that is done to runs, by the name of its command."""

    name: str
    past: str
    act: Act
    among: str  # which runs filters choose among
    status: Sequence[RunStatus] | None = None  # of these, if no status is asked for


def command_of(verb: Verb, help: str) -> Callable[..., None]:
    """The command: for one run or for many, with the same options whatever is done to them."""

    def command(
        ids: options.RunIds = None,
        status: options.Status = None,
        workflow: options.Workflow = None,
        tag: options.Tags = None,
        prefix: options.Prefix = None,
        yes: options.Yes = False,
        store: options.Store = None,
        json: options.Json = False,
    ) -> None:
        with error_reporting(json):
            chosen = _chosen(verb, ids, status, workflow, tag, prefix)
            _act_on(chosen, verb, store, yes=yes, json=json)

    command.__doc__ = f"{help}\n\nTakes ids, or filters that choose among the runs that are {verb.among}."
    return command


def rewind(
    id: options.RunId, location: options.Location, store: options.Store = None, json: options.Json = False
) -> None:
    """Drop what a run did at a location and after it, and let it go on from there; it may have ended."""
    with error_reporting(json):
        with_client(existing_store(store_url(store)), lambda client: client.rewind(id, location))
        if json:
            print_json({"run": id, "location": location})
        else:
            print_out(literal(f"run {id} goes on from {location}"))


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
    with error_reporting(json):
        run = with_client(existing_store(store_url(store)), lambda client: client.fork(id, location, id=new_id))
        if json:
            print_json({"run": run.id, "from": id, "location": location})
        else:
            print_out(literal(run.id))


# --- what is done to one run ---------------------------------------------------------------------------------------


async def _cancel(client: Client, run_id: str) -> None:
    if not await client.cancel(run_id):
        await _refused(client, run_id)


async def _terminate(client: Client, run_id: str) -> None:
    if not await client.terminate(run_id):
        await _refused(client, run_id)


async def _resume(client: Client, run_id: str) -> None:
    await client.resume(run_id)


CANCEL = Verb("cancel", "asked to stop", _cancel, "open")
TERMINATE = Verb("terminate", "ended", _terminate, "open")
RESUME = Verb("resume", "driven on", _resume, "suspended", (RunStatus.SUSPENDED,))

cancel = command_of(CANCEL, "Ask runs to stop: their workflows are cancelled inside, and compensations run.")
terminate = command_of(TERMINATE, "End runs at once, without compensation.")
resume = command_of(RESUME, "Drive suspended runs on now; one that is held gets another chance.")


async def _refused(client: Client, run_id: str) -> None:
    """Say why: there is no such run, or it has ended."""
    from perdure.errors import RunNotFound, RunTerminated

    status = await client.status(run_id)
    if status is None:
        raise RunNotFound(run_id)
    raise RunTerminated(run_id, status)


# --- on one or many ------------------------------------------------------------------------------------------------


def _chosen(
    verb: Verb,
    ids: Sequence[str] | None,
    status: Sequence[RunStatus] | None,
    workflow: str | None,
    tag: Sequence[str] | None,
    prefix: str | None,
) -> list[str] | RunQuery:
    if ids:
        if workflow or tag or prefix or status:
            raise UsageError("ids and filters were given", "either ids, or --workflow, --tag, --prefix and --status")
        return list(dict.fromkeys(ids))
    if not (workflow or tag or prefix or status):
        raise UsageError("no run is named", "ids, or --workflow, --tag, --prefix and --status")
    return query_of(status or verb.status, workflow, tag, prefix)


def _act_on(chosen: list[str] | RunQuery, verb: Verb, store: str | None, *, yes: bool, json: bool) -> None:
    url = existing_store(store_url(store))
    ids = chosen if isinstance(chosen, list) else with_client(url, lambda client: _open_runs(client, chosen))
    if len(ids) > 1 and not yes:
        _show_and_ask(url, ids, verb.name)
    if len(ids) == 1 and isinstance(chosen, list):
        with_client(url, lambda client: verb.act(client, ids[0]))  # what goes wrong with it is what goes wrong
        outcomes: dict[str, PerdureError | None] = {ids[0]: None}
    else:
        with progress(verb.name, total=len(ids)) as more:
            outcomes = with_client(url, lambda client: _all(client, ids, verb.act, more))
    if json:
        done = [{"id": id, "done": error is None, "error": error and str(error)} for id, error in outcomes.items()]
        print_json({"runs": done})
    else:
        _tell(verb, outcomes)
    raise typer.Exit(_code(outcomes))


async def _open_runs(client: Client, query: RunQuery) -> list[str]:
    from perdure.admin.health_check import records_of

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

    print_runs(with_client(url, first), print_err)
    confirm_or_exit(f"{verb} these {len(ids)} runs", len(ids) - SHOWN)


def _tell(verb: Verb, outcomes: dict[str, PerdureError | None]) -> None:
    for run_id, error in outcomes.items():
        if error is not None:
            warn(str(error))
        elif len(outcomes) == 1:
            print_out(literal(f"run {run_id} was {verb.past}"))
    if len(outcomes) != 1:
        done = sum(error is None for error in outcomes.values())
        print_out(literal(f"{counted(done, 'run')} {'was' if done == 1 else 'were'} {verb.past}"))


def _code(outcomes: dict[str, PerdureError | None]) -> int:
    """The worst: a conflict is only in the way, one that is not found was meant."""
    codes = {DONE if error is None else code_of(error) for error in outcomes.values()}
    return next((code for code in (NOT_FOUND, CONFLICT) if code in codes), max(codes, default=DONE))
