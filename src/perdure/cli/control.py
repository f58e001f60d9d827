"""Commands cancel, terminate, pause, resume, delete, rewind, fork.

A command that would change more than one run lists them and asks for confirmation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
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
    from perdure.admin.store_views import Progress
    from perdure.client.client import Client
    from perdure.client.views import RunDescription
    from perdure.model.queries import RunQuery

    ApplyToRun = Callable[[Client, str], Awaitable[None]]
    ApplyWithReason = Callable[[Client, str, str | None], Awaitable[None]]


@dataclass(frozen=True)
class Action:
    """An action on runs, with the name of its command."""

    name: str
    done: str  # the report, with a place for the runs: "Resumed {}"
    apply: ApplyToRun
    selectable: str  # the runs that filters select from
    status: Sequence[RunStatus] | None = None  # the statuses selected when no --status is given


def build_command(action: Action, help: str) -> Callable[..., None]:
    """Build the command of an action. All of them have the same arguments and options."""

    def command(
        ids: options.RunIds = None,
        status: options.Status = None,
        held: options.Held = False,
        workflow: options.Workflow = None,
        tag: options.Tags = None,
        prefix: options.Prefix = None,
        yes: options.Yes = False,
        store: options.Store = None,
        json: options.Json = False,
    ) -> None:
        with error_reporting(json):
            selected = _select(action, ids, status, workflow, tag, prefix, held=held)
            _apply_to(selected, action, store, yes=yes, json=json)

    command.__doc__ = f"{help}\n\nTakes run ids, or filters that select {action.selectable} runs."
    return command


def build_command_with_reason(action: Action, apply: ApplyWithReason, help: str) -> Callable[..., None]:
    """Build the command of an action that takes a reason: `apply` gets it."""

    def command(
        ids: options.RunIds = None,
        reason: options.Reason = None,
        status: options.Status = None,
        held: options.Held = False,
        workflow: options.Workflow = None,
        tag: options.Tags = None,
        prefix: options.Prefix = None,
        yes: options.Yes = False,
        store: options.Store = None,
        json: options.Json = False,
    ) -> None:
        with error_reporting(json):
            selected = _select(action, ids, status, workflow, tag, prefix, held=held)
            with_reason = replace(action, apply=lambda client, run_id: apply(client, run_id, reason))
            _apply_to(selected, with_reason, store, yes=yes, json=json)

    command.__doc__ = f"{help}\n\nTakes run ids, or filters that select {action.selectable} runs."
    return command


def rewind(
    id: options.RunId, location: options.Location, store: options.Store = None, json: options.Json = False
) -> None:
    """Drop the entries of a run from a location on, and continue it from there. The run may have ended."""
    with error_reporting(json):
        with_client(existing_store(store_url(store)), lambda client: client.rewind(id, location))
        if json:
            print_json({"run": id, "location": location})
        else:
            print_out(literal(f"Run {id} rewound to {location}"))


def fork(
    id: options.RunId,
    location: options.Location,
    new_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The new run's id.", show_default=False)
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Start a new run with a copy of the history before a location."""
    with error_reporting(json):
        run = with_client(existing_store(store_url(store)), lambda client: client.fork(id, location, id=new_id))
        if json:
            print_json({"run": run.id, "from": id, "location": location})
        else:
            print_out(literal(run.id))


# --- actions on one run ---------------------------------------------------------------------------------------


async def _cancel(client: Client, run_id: str, reason: str | None = None) -> None:
    if not await client.cancel(run_id, reason):
        await _raise_for_refusal(client, run_id)


async def _pause(client: Client, run_id: str, reason: str | None = None) -> None:
    await client.pause(run_id, reason)


async def _terminate(client: Client, run_id: str) -> None:
    if not await client.terminate(run_id):
        await _raise_for_refusal(client, run_id)


async def _resume(client: Client, run_id: str) -> None:
    await client.resume(run_id)


async def _delete(client: Client, run_id: str) -> None:
    await client.delete(run_id)


CANCEL = Action("cancel", "Cancellation requested for {}", _cancel, "open")
TERMINATE = Action("terminate", "Terminated {}", _terminate, "open")
PAUSE = Action("pause", "Pause requested for {}", _pause, "open")
RESUME = Action("resume", "Resumed {}", _resume, "suspended", (RunStatus.SUSPENDED,))
ENDED = tuple(status for status in RunStatus if status.terminal)
DELETE = Action("delete", "Deleted {}", _delete, "ended", ENDED)

cancel = build_command_with_reason(
    CANCEL, _cancel, "Request cancellation: it is raised in the workflow, and compensations run."
)
pause = build_command_with_reason(
    PAUSE, _pause, "Hold runs until they are resumed. Steps that execute finish; no other step starts."
)
terminate = build_command(TERMINATE, "End runs at once, without compensation.")
resume = build_command(RESUME, "Resume suspended runs now. A held run gets another attempt.")
delete = build_command(DELETE, "Delete ended runs and all that they own. Their dead letters and children stay.")


async def _raise_for_refusal(client: Client, run_id: str) -> None:
    """Raise why the run could not be changed: it does not exist, or it has ended."""
    from perdure.errors import RunNotFound, RunTerminated

    status = await client.status(run_id)
    if status is None:
        raise RunNotFound(run_id)
    raise RunTerminated(run_id, status)


# --- one or many runs ------------------------------------------------------------------------------------------------


def _select(
    action: Action,
    ids: Sequence[str] | None,
    status: Sequence[RunStatus] | None,
    workflow: str | None,
    tag: Sequence[str] | None,
    prefix: str | None,
    *,
    held: bool,
) -> list[str] | RunQuery:
    filters = "use ids, or --workflow, --tag, --prefix, --status and --held"
    if ids:
        if workflow or tag or prefix or status or held:
            raise UsageError("ids and filters cannot be combined", filters)
        return list(dict.fromkeys(ids))
    if not (workflow or tag or prefix or status or held):
        raise UsageError("no run is given", filters)
    return query_of(status or action.status, workflow, tag, prefix, held=held)


def _apply_to(selected: list[str] | RunQuery, action: Action, store: str | None, *, yes: bool, json: bool) -> None:
    url = existing_store(store_url(store))
    if isinstance(selected, list):
        ids = selected
    else:
        ids = with_client(url, lambda client: _matching(client, selected, action))
    if len(ids) > 1 and not yes:
        _show_and_confirm(url, ids, action.name)
    if len(ids) == 1 and isinstance(selected, list):
        with_client(url, lambda client: action.apply(client, ids[0]))  # a single run: its error is the command's error
        outcomes: dict[str, PerdureError | None] = {ids[0]: None}
    else:
        with progress(action.name, total=len(ids)) as more:
            outcomes = with_client(url, lambda client: _apply_to_all(client, ids, action.apply, more))
    if json:
        done = [{"id": id, "done": error is None, "error": error and str(error)} for id, error in outcomes.items()]
        print_json({"runs": done})
    else:
        _report(action, outcomes)
    raise typer.Exit(_code(outcomes))


async def _matching(client: Client, query: RunQuery, action: Action) -> list[str]:
    """Return the ids of runs that match: ended ones to delete, open ones for every other action."""
    from perdure.admin.store_views import records_of

    ended = action is DELETE
    return [record.id async for page in records_of(client, query) for record in page if record.status.terminal is ended]


async def _apply_to_all(
    client: Client, ids: Sequence[str], apply: ApplyToRun, more: Progress
) -> dict[str, PerdureError | None]:
    outcomes: dict[str, PerdureError | None] = {}
    for run_id in ids:
        try:
            await apply(client, run_id)
            outcomes[run_id] = None
        except PerdureError as error:
            outcomes[run_id] = error
        more(1)
    return outcomes


def _show_and_confirm(url: str, ids: Sequence[str], action: str) -> None:
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
    confirm_or_exit(f"{action} these {len(ids)} runs", len(ids) - SHOWN)


def _report(action: Action, outcomes: dict[str, PerdureError | None]) -> None:
    for run_id, error in outcomes.items():
        if error is not None:
            warn(str(error))
        elif len(outcomes) == 1:
            print_out(literal(action.done.format(f"run {run_id}")))
    if len(outcomes) != 1:
        done = sum(error is None for error in outcomes.values())
        print_out(literal(action.done.format(counted(done, "run"))))


def _code(outcomes: dict[str, PerdureError | None]) -> int:
    """Return the exit code: not found wins over conflict, conflict over any other error."""
    codes = {DONE if error is None else code_of(error) for error in outcomes.values()}
    return next((code for code in (NOT_FOUND, CONFLICT) if code in codes), max(codes, default=DONE))
