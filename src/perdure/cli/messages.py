"""send, emit, complete, fail: events and deferreds."""

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

EventName = Annotated[str, typer.Argument(metavar="EVENT", help="The event's name, or a topic's.", show_default=False)]
Value = Annotated[
    str | None,
    typer.Argument(metavar="JSON", help="The value; `-` reads it from stdin.", show_default=False),
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
    """Put an event into a run's mailbox.

    With --app the value is checked against the @event class of that name, whose options hold.
    """
    with error_reporting(json):
        what, payload = _event(event, value, app)
        url = existing_store(store_url(store))
        with_client(url, lambda client: client.send(id, what, payload, event_id=event_id))
        if json:
            print_json({"run": id, "event": event})
        else:
            print_out(literal(f"sent {event} to run {id}"))


def emit(
    topic: EventName,
    value: Value = None,
    event_id: options.EventId = None,
    app: options.App = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Put an event into a topic; says how many runs it woke.

    With --app the value is checked against the @event class of that name, whose options hold.
    """
    with error_reporting(json):
        what, payload = _event(topic, value, app)

        async def question(client: Client) -> int:
            if isinstance(what, str):
                return await client.emit(what, payload, event_id=event_id)
            return await client.broadcast(what, event_id=event_id)

        woken = with_client(existing_store(store_url(store)), question)
        if json:
            print_json({"topic": topic, "woken": woken})
        else:
            print_out(literal(f"sent {topic}; it woke {counted(woken, 'run')}"))


def complete(token: Token, value: Value = None, store: options.Store = None, json: options.Json = False) -> None:
    """Give a deferred its value. The first to settle it wins: exits with 4 if it was settled before."""
    with error_reporting(json):
        given = None if value is None else json_value(value)
        _settled(with_client(existing_store(store_url(store)), lambda client: client.complete(token, given)), json)


def fail(
    token: Token,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="What went wrong.", show_default=False)],
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Make a deferred raise an error. The first to settle it wins: exits with 4 if it was settled before."""
    with error_reporting(json):
        _settled(with_client(existing_store(store_url(store)), lambda client: client.fail(token, message)), json)


def _settled(first: bool, json: bool) -> None:
    if json:
        print_json({"settled": first})
        if not first:
            raise typer.Exit(CONFLICT)
    elif first:
        print_out("settled")
    else:
        raise CommandError("the deferred was settled before, or its run has gone on without it", code=CONFLICT)


def _event(name: str, value: str | None, app: str | None) -> tuple[Any, Any]:
    """The event to send: of its class where the code is at hand, else its name and a value."""
    given = None if value is None else json_value(value)
    from perdure.cli.target import code_is_named, event_type, load, parse_target

    if not code_is_named(app):
        return name, given
    from perdure.codec import JSON

    load(parse_target(app))
    kind = event_type(name)
    if kind is None:
        return name, given
    return JSON.decode(JSON.encode({} if given is None else given), kind, what=f"event {name!r}"), None
