"""Command start: start a run by the workflow's code, or by the name that a live worker has published."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from perdure.cli import options
from perdure.cli.output import console, literal, print_json, print_out, short
from perdure.cli.parsing import arguments_of, duration, json_value, tags_of
from perdure.cli.session import NOT_FOUND, UsageError, error_reporting, with_client
from perdure.cli.settings import existing_store, store_url

if TYPE_CHECKING:
    from rich.text import Text

    from perdure.client.client import Client
    from perdure.client.run_handle import Run
    from perdure.client.views import RunDescription
    from perdure.workflows.definition import Workflow
    from perdure.workflows.start_options import StartKeywords, StartOptions

    Begin = Callable[[Client], Awaitable[Run[Any]]]


class IfExistsChoice(StrEnum):
    """What `start` does if the id is taken. An enumeration, so that the shell completes the values."""

    OBSERVE = "observe"
    REJECT = "reject"
    RESTART_ENDED = "restart_ended"
    RESTART = "restart"


Timeout = Annotated[
    str | None,
    typer.Option(
        "--timeout",
        metavar="TIME",
        help="Fail the run after this time: 30s, 2h. Default: the workflow's.",
        show_default=False,
    ),
]
IfExistsOption = Annotated[
    IfExistsChoice,
    typer.Option(
        "--if-exists",
        metavar="WHAT",
        help="If the id is taken: observe, reject, restart_ended (restart an ended run) or restart (also an open run, "
        "which is terminated).",
    ),
]


class OnDuplicateChoice(StrEnum):
    """What `start` does if the dedupe key is taken."""

    EXISTING = "existing"
    REPLACE = "replace"
    REFUSE = "refuse"


Queue = Annotated[
    str | None,
    typer.Option(
        "--queue",
        "-q",
        metavar="NAME",
        help="Wait in this work queue; an empty name bypasses the queue of the workflow.",
        show_default=False,
    ),
]
Priority = Annotated[
    int | None,
    typer.Option(
        "--priority", metavar="N", min=-100, max=100, help="Smaller is admitted first. Default: 0.", show_default=False
    ),
]
Partition = Annotated[
    str | None,
    typer.Option("--partition", metavar="KEY", help="The partition of the queue.", show_default=False),
]
Dedupe = Annotated[
    str | None,
    typer.Option("--dedupe", metavar="KEY", help="Join the open run of the queue with this key.", show_default=False),
]
OnDuplicate = Annotated[
    OnDuplicateChoice | None,
    typer.Option(
        "--on-duplicate",
        metavar="WHAT",
        help="If the key is taken: existing (the default), replace (the payload of a waiting run) or refuse.",
        show_default=False,
    ),
]
MaxWait = Annotated[
    str | None,
    typer.Option(
        "--max-wait",
        metavar="TIME",
        help="Cancel the run if it is not admitted in this time: 30s, 2h.",
        show_default=False,
    ),
]
FirstMessages = Annotated[
    list[str] | None,
    typer.Option(
        "--send",
        metavar="EVENT=JSON",
        help="A first message of the run, stored with it; may be repeated.",
        show_default=False,
    ),
]


def start(
    name: Annotated[
        str,
        typer.Argument(
            metavar="WORKFLOW", help="module:workflow, file.py:workflow, or a workflow's name.", show_default=False
        ),
    ],
    payload: Annotated[
        str | None,
        typer.Argument(
            metavar="JSON",
            help="The payload: an object by parameter, a list in order, or the value of a single parameter. "
            "`-` reads stdin.",
            show_default=False,
        ),
    ] = None,
    id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The run's id. Default: a new one.", show_default=False)
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", "-t", metavar="KEY=VALUE", help="A tag of the run; may be repeated.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option("--delay", metavar="TIME", help="Start after this time: 30s, 2h.", show_default=False)
    ] = None,
    timeout: Timeout = None,
    if_exists: IfExistsOption = IfExistsChoice.OBSERVE,
    send: FirstMessages = None,
    queue: Queue = None,
    priority: Priority = None,
    partition: Partition = None,
    dedupe: Dedupe = None,
    on_duplicate: OnDuplicate = None,
    max_wait: MaxWait = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end of the run and print its result.")] = False,
    app: options.App = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Start a run of a workflow.

    Workers execute the run. If a run with this id, workflow and payload exists, the command observes it, unless
    --if-exists says otherwise, and sends it the messages of --send.
    With `module:workflow`, --app or a configured app, the code is imported and checks the payload. Otherwise the name
    must be published by a live worker, and the payload must be an object by parameter.
    """
    from perdure.cli.target import by_name, code_is_named, load, parse_target
    from perdure.workflows.start_options import StartOptions

    with error_reporting(json):
        url = store_url(store)
        given = StartOptions(
            id=id,
            tags=tags_of(tag),
            delay=None if delay is None else duration(delay),
            timeout=None if timeout is None else duration(timeout),
            if_exists=if_exists.value,
            queue=UNSET if queue is None else queue or None,
            priority=priority,
            partition=partition,
            dedupe=dedupe,
            on_duplicate=None if on_duplicate is None else on_duplicate.value,
            max_wait=None if max_wait is None else duration(max_wait),
        )
        messages = [_message_of(text) for text in send or ()]
        if app is None and ":" in name:
            begin = _start_workflow(_only_workflow(name), payload, given, messages)
        elif code_is_named(app):
            begin = _start_workflow(by_name(load(parse_target(app)), name), payload, given, messages)
        else:
            url, begin = existing_store(url), _start_by_name(name, payload, given, messages)
        created, run = with_client(url, lambda client: _start(client, begin, wait))
        if json:
            from perdure.cli.json_output import run_shape

            print_json({"created": created, "run": run_shape(run)})
        elif wait:
            print_out(literal(short(run.result, 10_000)))
        else:
            print_out(literal(run.id) if not console().is_terminal else _started(run, created))


def _only_workflow(target: str) -> Workflow[Any, Any]:
    """Return the workflow that a target such as `app.shop:checkout` names."""
    from perdure.cli.target import load, parse_target

    workflows = load(parse_target(target))
    if len(workflows) > 1:
        names = ", ".join(sorted(each.name for each in workflows))
        raise UsageError(f"{target} is a list of workflows: {names}", "name one, with --app TARGET")
    return workflows[0]


def _message_of(text: str) -> tuple[str, Any]:
    """Parse EVENT=JSON, or EVENT alone for an event without a value."""
    name, equals, value = text.partition("=")
    if not name:
        raise UsageError(f"{text!r} is not a message", """use --send EVENT=JSON: --send 'Approved={"by": "ada"}'""")
    return name, json_value(value) if equals else None


def _start_workflow(
    workflow: Workflow[Any, Any], payload: str | None, given: StartOptions, messages: list[tuple[str, Any]]
) -> Begin:
    from perdure.cli.messages import typed_event
    from perdure.workflows.definition import BoundWorkflow

    args, kwargs = arguments_of(workflow, payload)
    typed = (typed_event(name, value) for name, value in messages)
    send = [{"event": event, "payload": value} for event, value in typed]
    return lambda client: client.start(BoundWorkflow(workflow, replace(given, send=send)), *args, **kwargs)


def _start_by_name(name: str, payload: str | None, given: StartOptions, messages: list[tuple[str, Any]]) -> Begin:
    """Start a workflow of which only the published name is known."""
    value = {} if payload is None else json_value(payload)
    if not isinstance(value, Mapping):
        raise UsageError(
            f"the code of {name} is not given, so its payload must be an object by parameter",
            """use '{"order": {"id": "42"}}', or name the code: module:workflow or --app TARGET""",
        )

    async def begin(client: Client) -> Run[Any]:
        from perdure.admin.store_views import published_workflows

        known = await published_workflows(client)
        if name not in known:
            published = f"they have {', '.join(known)}" if known else "no worker is running: perdure worker TARGET"
            raise UsageError(
                f"no live worker has a workflow named {name!r}",
                f"{published}; or name the code: module:workflow or --app TARGET",
                NOT_FOUND,
            )
        return await client.start(name, dict(value), **_keywords(given, messages))

    return begin


def _keywords(given: StartOptions, messages: list[tuple[str, Any]]) -> StartKeywords:
    """Return options as keyword arguments."""
    keywords: StartKeywords = {
        "id": given.id,
        "tags": given.tags,
        "delay": given.delay,
        "timeout": given.timeout,
        "if_exists": given.if_exists,
        "send": messages,
        "priority": given.priority,
        "partition": given.partition,
        "dedupe": given.dedupe,
        "on_duplicate": given.on_duplicate,
        "max_wait": given.max_wait,
    }
    if not isinstance(given.queue, UnsetType):
        keywords["queue"] = given.queue
    return keywords


async def _start(client: Client, begin: Begin, wait: bool) -> tuple[bool, RunDescription]:
    run = await begin(client)
    if wait:
        await run.result(raise_if_held=True)
    return run.created, await run.describe()


def _started(run: RunDescription, created: bool) -> Text:
    from rich.text import Text

    verb = "Started" if created else "Already exists:"
    return Text.assemble(
        f"{verb} run ", (run.id, "bold"), f" ({run.status})\n", (f"perdure watch {run.id}", "bright_black")
    )
