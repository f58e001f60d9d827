"""start: a run of a workflow, checked by its code where that is at hand, or by the name that a worker has published."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli import options
from perdure.cli.output import console, literal, print_json, print_out, short
from perdure.cli.parsing import arguments_of, duration, json_value, tags_of
from perdure.cli.session import NOT_FOUND, UsageError, error_reporting, with_client
from perdure.cli.settings import existing_store, store_url

if TYPE_CHECKING:
    from rich.text import Text

    from perdure.client.client import Client, Run
    from perdure.client.views import RunDescription
    from perdure.workflows.definition import StartOptions

    Begin = Callable[[Client], Awaitable[Run[Any]]]


def start(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The workflow's name.", show_default=False)],
    payload: Annotated[
        str | None,
        typer.Argument(
            metavar="JSON",
            help="Its arguments: an object by parameter, a list in order; of a workflow with one parameter, its value. "
            "`-` reads it from stdin.",
            show_default=False,
        ),
    ] = None,
    id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The run's id; else a new one.", show_default=False)
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", "-t", metavar="KEY=VALUE", help="A tag of the run; may be repeated.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option("--delay", metavar="TIME", help="Begin later: 30s, 2h.", show_default=False)
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end and print its result.")] = False,
    app: options.App = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Start a run of a workflow.

    A run that has this id already, of the same workflow with the same payload, is observed. Workers execute it; the
    code is imported to check the payload. Without code at hand the name is one that a live worker has published, the
    payload an object by parameter, and the worker checks it.
    """
    from perdure.cli.target import code_is_named
    from perdure.workflows.definition import StartOptions

    with error_reporting(json):
        url = store_url(store)
        given = StartOptions(id=id, tags=tags_of(tag), delay=None if delay is None else duration(delay))
        if code_is_named(app):
            begin = _by_code(name, payload, given, app)
        else:
            url, begin = existing_store(url), _by_name(name, payload, given)
        created, run = with_client(url, lambda client: _begun(client, begin, wait))
        if json:
            from perdure.cli.json_output import run_shape

            print_json({"created": created, "run": run_shape(run)})
        elif wait:
            print_out(literal(short(run.result, 10_000)))
        else:
            print_out(literal(run.id) if not console().is_terminal else _started(run, created))


def _by_code(name: str, payload: str | None, given: StartOptions, app: str | None) -> Begin:
    from perdure.cli.target import by_name, load, parse_target
    from perdure.workflows.definition import BoundWorkflow

    workflow = by_name(load(parse_target(app)), name)
    args, kwargs = arguments_of(workflow, payload)
    return lambda client: client.start(BoundWorkflow(workflow, given), *args, **kwargs)


def _by_name(name: str, payload: str | None, given: StartOptions) -> Begin:
    """Nothing is known of the workflow but that somebody has it."""
    value = {} if payload is None else json_value(payload)
    if not isinstance(value, Mapping):
        raise UsageError(
            f"no code is at hand that knows the parameters of {name}, so its payload must be an object by parameter",
            """'{"order": {"id": "42"}}', or the code: --app TARGET""",
        )

    async def begin(client: Client) -> Run[Any]:
        from perdure.admin.health_check import published_workflows

        known = await published_workflows(client)
        if name not in known:
            there = f"they have {', '.join(known)}" if known else "there is none: perdure worker TARGET starts one"
            raise UsageError(
                f"no live worker has a workflow named {name!r}", f"{there}; --app TARGET names the code", NOT_FOUND
            )
        return await client.start(name, dict(value), id=given.id, tags=given.tags, delay=given.delay)

    return begin


async def _begun(client: Client, begin: Begin, wait: bool) -> tuple[bool, RunDescription]:
    run = await begin(client)
    if wait:
        await run.result()
    return run.created, await run.describe()


def _started(run: RunDescription, created: bool) -> Text:
    from rich.text import Text

    verb = "started" if created else "is there already:"
    return Text.assemble(
        f"{verb} run ", (run.id, "bold"), f" ({run.status})\n", (f"perdure watch {run.id}", "bright_black")
    )
