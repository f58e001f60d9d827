"""Commands send, emit, complete, fail: events and deferreds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli import options
from perdure.cli.output import counted, literal, print_json, print_out
from perdure.cli.parsing import json_value
from perdure.cli.session import CONFLICT, CommandError, error_reporting, with_client
from perdure.cli.settings import existing_store, store_url

if TYPE_CHECKING:
    from perdure.client.client import Client

EventName = Annotated[str, typer.Argument(metavar="EVENT", help="The name of the event or topic.", show_default=False)]
Value = Annotated[
    str | None,
    typer.Argument(metavar="JSON", help="The value; `-` reads stdin.", show_default=False),
]
Token = Annotated[str, typer.Argument(metavar="TOKEN", help="The deferred's token.", show_default=False)]


def send(
    id: options.RunId,
    event: EventName,
    value: Value = None,
    event_id: options.EventId = None,
    app: options.App = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Send an event to a run.

    With --app the value is checked against the @event class of that name, and its options apply.
    """
    with error_reporting(json):
        what, payload = _event(event, value, app)
        url = existing_store(store_url(store))
        with_client(url, lambda client: client.send(id, what, payload, event_id=event_id))
        if json:
            print_json({"run": id, "event": event})
        else:
            print_out(literal(f"Sent {event} to run {id}"))


def emit(
    topic: EventName,
    value: Value = None,
    event_id: options.EventId = None,
    app: options.App = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Publish an event to a topic and print how many runs it woke.

    With --app the value is checked against the @event class of that name, and its options apply.
    """
    with error_reporting(json):
        what, payload = _event(topic, value, app)

        async def publish(client: Client) -> int:
            if isinstance(what, str):
                return await client.emit(what, payload, event_id=event_id)
            return await client.broadcast(what, event_id=event_id)

        woken = with_client(existing_store(store_url(store)), publish)
        if json:
            print_json({"topic": topic, "woken": woken})
        else:
            print_out(literal(f"Published {topic}; woke {counted(woken, 'run')}"))


def complete(token: Token, value: Value = None, store: options.Store = None, json: options.Json = False) -> None:
    """Complete a deferred with a value. The first completion wins; exits with 4 if it was completed before."""
    with error_reporting(json):
        given = None if value is None else json_value(value)
        _report(with_client(existing_store(store_url(store)), lambda client: client.complete(token, given)), json)


def fail(
    token: Token,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="What went wrong.", show_default=False)],
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Fail a deferred with an error. The first completion wins; exits with 4 if it was completed before."""
    with error_reporting(json):
        _report(with_client(existing_store(store_url(store)), lambda client: client.fail(token, message)), json)


def _report(first: bool, json: bool) -> None:
    if json:
        print_json({"completed": first})
        if not first:
            raise typer.Exit(CONFLICT)
    elif first:
        print_out("Deferred completed.")
    else:
        raise CommandError("Deferred already completed, or no longer awaited", code=CONFLICT)


def _event(name: str, value: str | None, app: str | None) -> tuple[Any, Any]:
    """Return the event to send: an instance of its class if the code is named, else its name and the value."""
    given = None if value is None else json_value(value)
    from perdure.cli.target import code_is_named, load, parse_target

    if not code_is_named(app):
        return name, given
    load(parse_target(app))
    return typed_event(name, given)


def typed_event(name: str, value: Any) -> tuple[Any, Any]:
    """Return an instance of the @event class of this name in the loaded code, else the name and the value."""
    from perdure.cli.target import event_type
    from perdure.codec import JSON

    kind = event_type(name)
    if kind is None:
        return name, value
    return JSON.decode(JSON.encode({} if value is None else value), kind, what=f"event {name!r}"), None
