"""Commands dead-letters ls, show, replay, rm."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli import options
from perdure.cli.output import SHOWN, age, counted, literal, print_err, print_json, print_out, progress, short, table_of
from perdure.cli.session import NOT_FOUND, CommandError, UsageError, confirm_or_exit, error_reporting, with_client
from perdure.cli.settings import existing_store, store_url

if TYPE_CHECKING:
    from perdure.admin.store_views import Progress
    from perdure.client.client import Client
    from perdure.client.views import DeadLetterView

PAGE = 500

Kind = Annotated[
    str | None,
    typer.Option(
        "--kind",
        metavar="KIND",
        help="Only of this kind: event, compensation, poison, expired_wait.",
        show_default=False,
    ),
]
Event = Annotated[str | None, typer.Option("--event", metavar="NAME", help="Only of this event.", show_default=False)]
LetterId = Annotated[str, typer.Argument(metavar="ID", help="The dead letter's id.", show_default=False)]

dead_letters = typer.Typer(no_args_is_help=True, help="List, show, replay and remove dead letters.")


@dead_letters.command("ls")
def list_dead_letters(
    kind: Kind = None,
    event: Event = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Dead letters per page.")] = 20,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="ID", help="Continue after this dead letter.", show_default=False),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """List dead letters, oldest first."""
    with error_reporting(json):
        found = with_client(
            existing_store(store_url(store)),
            lambda client: client.dead_letters(event, kind=kind, limit=limit, after=after),
        )
        more = found[-1].id if len(found) == limit else None
        if json:
            from perdure.cli.json_output import dead_letter_shape

            print_json({"dead_letters": [dead_letter_shape(letter) for letter in found], "next": more})
        else:
            _print_dead_letters(found)
            if more is not None:
                print_err(literal(f"More dead letters: repeat the command with --after {more}"))


@dead_letters.command("show", epilog="Example: perdure dead-letters show ID")
def show_dead_letter(id: LetterId, store: options.Store = None, json: options.Json = False) -> None:
    """Show one dead letter with its value."""
    with error_reporting(json):
        letter = with_client(existing_store(store_url(store)), lambda client: _find(client, id))
        from perdure.cli.json_output import dead_letter_shape

        shape = dead_letter_shape(letter)
        if json:
            print_json({"dead_letter": shape})
            return
        for name, value in shape.items():
            if value is not None:
                text = short(value, 2_000) if name == "value" else value
                print_out(literal(f"{name.replace('_', ' '):<16} {text}"))


@dead_letters.command("replay", epilog="Example: perdure dead-letters replay ID --to order-43")
def replay_dead_letter(
    id: LetterId,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="RUN", help="Send it to this run. Default: its topic.", show_default=False),
    ] = None,
    app: options.App = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Send an undelivered event again and remove its dead letter.

    With --app the options of the @event class of that name apply.
    """
    with error_reporting(json):
        from perdure.cli.target import code_is_named, load, parse_target

        if code_is_named(app):
            load(parse_target(app))
        if not with_client(existing_store(store_url(store)), lambda client: client.replay_dead_letter(id, to)):
            raise _not_found(id)
        if json:
            print_json({"id": id, "to": to})
        else:
            print_out(literal(f"Replayed {id} to " + (f"run {to}" if to is not None else "its topic")))


@dead_letters.command("rm", epilog="Example: perdure dead-letters rm --event Approved")
def remove_dead_letters(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Ids of dead letters.", show_default=False)
    ] = None,
    kind: Kind = None,
    event: Event = None,
    yes: options.Yes = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Remove dead letters: by id, or all of a kind or an event."""
    with error_reporting(json):
        if bool(ids) == bool(kind or event):
            raise UsageError("no dead letter is given", "use ids, or --kind and --event")
        url = existing_store(store_url(store))
        named = list(dict.fromkeys(ids or ())) or with_client(url, lambda client: _matching(client, kind, event))
        if len(named) > 1 and not yes:
            _print_dead_letters(with_client(url, lambda client: _first(client, named)), print_err)
            confirm_or_exit(f"remove these {len(named)} dead letters", len(named) - SHOWN)
        with progress("remove", total=len(named)) as more:
            removed = with_client(url, lambda client: _remove(client, named, more))
        if ids and not removed:
            raise _not_found(ids[0])
        if json:
            print_json({"removed": removed})
        else:
            print_out(f"Removed {counted(len(removed), 'dead letter')}")


async def _matching(client: Client, kind: str | None, event: str | None) -> list[str]:
    found: list[str] = []
    while True:
        after = found[-1] if found else None
        page = await client.dead_letters(event, kind=kind, limit=PAGE, after=after)
        found.extend(letter.id for letter in page)
        if len(page) < PAGE:
            return found


async def _remove(client: Client, ids: list[str], more: Progress) -> list[str]:
    removed = []
    for dead_letter_id in ids:
        if await client.remove_dead_letter(dead_letter_id):
            removed.append(dead_letter_id)
        more(1)
    return removed


async def _first(client: Client, ids: list[str]) -> list[DeadLetterView[Any]]:
    """Return the dead letters that are shown before the confirmation; unknown ids are left out."""
    from perdure.admin.store_views import find_dead_letter

    found = [await find_dead_letter(client, dead_letter_id) for dead_letter_id in ids[:SHOWN]]
    return [letter for letter in found if letter is not None]


async def _find(client: Client, dead_letter_id: str) -> DeadLetterView[Any]:
    from perdure.admin.store_views import find_dead_letter

    letter = await find_dead_letter(client, dead_letter_id)
    if letter is None:
        raise _not_found(dead_letter_id)
    return letter


def _not_found(dead_letter_id: str) -> CommandError:
    return CommandError(f"there is no dead letter {dead_letter_id!r}", "perdure dead-letters ls", code=NOT_FOUND)


def _print_dead_letters(letters: list[DeadLetterView[Any]], emit: Callable[[Any], None] = print_out) -> None:
    if not letters:
        emit("No dead letters found.")
        return
    rows = [
        (
            literal(each.id),
            each.kind,
            literal(each.event_name or each.original_target or ""),
            age(each.sent_at),
            literal(each.reason),
        )
        for each in letters
    ]
    emit(table_of(("dead letter", "kind", "of", "sent", "reason"), rows))
