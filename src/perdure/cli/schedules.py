"""Commands schedules ls, show, pause, resume, trigger, backfill, delete, preview, prune."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli import options
from perdure.cli.output import SHOWN, age, counted, literal, print_err, print_json, print_out, short, table_of
from perdure.cli.parsing import time_of
from perdure.cli.session import UsageError, confirm_or_exit, error_reporting, with_client
from perdure.cli.settings import existing_store, store_url

if TYPE_CHECKING:
    from datetime import datetime

    from perdure.client.client import Client
    from perdure.client.schedule_views import ScheduleDescription
    from perdure.workflows.definition import Workflow

PAGE = 500


class OverlapChoice(StrEnum):
    """What a run does while the last one is open. An enumeration, so that the shell completes the values."""

    SKIP = "skip"
    QUEUE = "queue"
    LATEST = "latest"
    CANCEL = "cancel"
    TERMINATE = "terminate"
    ALLOW = "allow"


class BackfillOverlapChoice(StrEnum):
    """How the runs of a backfill overlap."""

    QUEUE = "queue"
    SKIP = "skip"
    ALLOW = "allow"


def complete_schedule_id(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the ids of schedules for the shell: those that begin with the given text; none if there is no store."""
    try:
        url = existing_store(store_url(ctx.params.get("store")))
        found = with_client(url, lambda client: client.schedules(limit=PAGE))
    except (Exception, SystemExit):  # completion must print nothing but ids
        return []
    return [each.id for each in found if each.id.startswith(incomplete)]


ScheduleId = Annotated[
    str,
    typer.Argument(metavar="ID", help="The schedule's id.", show_default=False, autocompletion=complete_schedule_id),
]

schedules = typer.Typer(no_args_is_help=True, help="List, inspect and control schedules.")


@schedules.command("ls")
def list_schedules(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Schedules per page.")] = 20,
    after: Annotated[
        str | None, typer.Option("--after", metavar="ID", help="Continue after this schedule.", show_default=False)
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """List schedules by id, with their next time slot."""
    with error_reporting(json):
        url = existing_store(store_url(store))
        found = with_client(url, lambda client: client.schedules(after=after, limit=limit))
        more = found[-1].id if len(found) == limit else None
        if json:
            from perdure.cli.json_output import schedule_shape

            print_json({"schedules": [schedule_shape(each) for each in found], "next": more})
            return
        _print_schedules(found)
        if more is not None:
            print_err(literal(f"More schedules: repeat the command with --after {more}"))


@schedules.command("show", epilog="Example: perdure schedules show nightly")
def show_schedule(id: ScheduleId, store: options.Store = None, json: options.Json = False) -> None:
    """Show a schedule: its rule, next time slots, last outcomes and counters."""
    with error_reporting(json):
        found = with_client(existing_store(store_url(store)), lambda client: client.get_schedule(id))
        from perdure.cli.json_output import schedule_shape

        if json:
            print_json({"schedule": schedule_shape(found)})
        else:
            _print_schedule(found)


@schedules.command("pause", epilog="Example: perdure schedules pause nightly --reason 'the bank is closed'")
def pause_schedule(
    id: ScheduleId, reason: options.Reason = None, store: options.Store = None, json: options.Json = False
) -> None:
    """Fire no time slot until the schedule is resumed."""
    with error_reporting(json):
        with_client(existing_store(store_url(store)), lambda client: client.pause_schedule(id, reason or ""))
        _report(json, f"Paused schedule {id}", id=id, paused=True)


@schedules.command("resume", epilog="Example: perdure schedules resume nightly --catch-up")
def resume_schedule(
    id: ScheduleId,
    catch_up: Annotated[bool, typer.Option("--catch-up", help="Start the time slots of the pause.")] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """End the pause of a schedule."""
    with error_reporting(json):
        with_client(existing_store(store_url(store)), lambda client: client.resume_schedule(id, catch_up))
        _report(json, f"Resumed schedule {id}", id=id, paused=False)


@schedules.command("trigger", epilog="Example: perdure schedules trigger nightly")
def trigger_schedule(
    id: ScheduleId,
    overlap: Annotated[
        OverlapChoice | None,
        typer.Option("--overlap", metavar="RULE", help="Instead of the schedule's overlap rule.", show_default=False),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Start a run now, beside the rule."""
    with error_reporting(json):
        rule: Any = None if overlap is None else overlap.value
        run = with_client(existing_store(store_url(store)), lambda client: client.trigger_schedule(id, rule))
        text = f"Started run {run.id}" if run.created else f"Run {run.id} is open, so no run was started"
        _report(json, text, id=id, run=run.id, created=run.created)


@schedules.command("backfill", epilog="Example: perdure schedules backfill nightly 7d 1d")
def backfill_schedule(
    id: ScheduleId,
    start: Annotated[
        str, typer.Argument(metavar="START", help="First time: 7d, 2h, or 2026-01-31T12:00Z.", show_default=False)
    ],
    end: Annotated[str, typer.Argument(metavar="END", help="Time before which it ends.", show_default=False)],
    overlap: Annotated[
        BackfillOverlapChoice, typer.Option("--overlap", metavar="RULE", help="queue, skip or allow.")
    ] = BackfillOverlapChoice.QUEUE,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Start the runs of past time slots that have none. A worker does this, in pages."""
    with error_reporting(json):
        times = (time_of(start), time_of(end))
        rule: Any = overlap.value
        url = existing_store(store_url(store))
        run = with_client(url, lambda client: client.backfill_schedule(id, *times, overlap=rule))
        _report(json, f"Started backfill {run.id}; perdure watch {run.id}", id=id, run=run.id)


@schedules.command("delete", epilog="Example: perdure schedules delete nightly --yes")
def delete_schedule(
    id: ScheduleId, yes: options.Yes = False, store: options.Store = None, json: options.Json = False
) -> None:
    """Delete a schedule. Runs that it has started continue."""
    with error_reporting(json):
        url = existing_store(store_url(store))
        found = with_client(url, lambda client: client.get_schedule(id))
        if not yes:
            _print_schedules([found], print_err)
            confirm_or_exit("delete this schedule")
        deleted = with_client(url, lambda client: client.delete_schedule(id))
        _report(json, f"Deleted schedule {id}", id=id, deleted=deleted)


@schedules.command("preview", epilog="Example: perdure schedules preview '30 2 * * *' --tz Europe/Berlin")
def preview_schedule(
    rule: Annotated[
        list[str], typer.Argument(metavar="CRON", help="Cron expressions, or a schedule's id.", show_default=False)
    ],
    tz: Annotated[str, typer.Option("--tz", metavar="ZONE", help="The time zone of the expressions.")] = "UTC",
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=10_000, help="Time slots.")] = 10,
    after: Annotated[
        str | None, typer.Option("--after", metavar="TIME", help="2026-01-31T12:00Z. Default: now.", show_default=False)
    ] = None,
    json: options.Json = False,
) -> None:
    """Print the next time slots of a rule. Reads no store."""
    from perdure.schedules.cron import check_cron, explain_cron
    from perdure.workflows.schedules import preview

    with error_reporting(json):
        slots = preview(cron=rule, tz=tz, count=count, after=None if after is None else time_of(after))
        if json:
            print_json({"slots": [_iso(slot) for slot in slots]})
            return
        for text in rule:
            print_err(literal(explain_cron(check_cron(text))))
        for slot in slots:
            print_out(literal(f"{slot:%a %Y-%m-%d %H:%M:%S %z}"))


@schedules.command("prune", epilog="Example: perdure schedules prune --app app.shop")
def prune_schedules(
    app: options.App = None, yes: options.Yes = False, store: options.Store = None, json: options.Json = False
) -> None:
    """Delete the declared schedules that the code of --app does not declare any more."""
    with error_reporting(json):
        from perdure.cli.target import code_is_named, load, parse_target

        if not code_is_named(app):
            raise UsageError("no code is named", "use --app, or `app` under [tool.perdure]")
        declared = declared_ids(load(parse_target(app)))
        url = existing_store(store_url(store))
        found = with_client(url, lambda client: _undeclared(client, declared))
        if found and not yes:
            _print_schedules(found[:SHOWN], print_err)
            confirm_or_exit(f"delete {counted(len(found), 'schedule')}", len(found) - SHOWN)
        deleted = with_client(url, lambda client: _delete(client, [each.id for each in found]))
        _report(json, f"Deleted {counted(len(deleted), 'schedule')}", deleted=deleted)


def declared_ids(workflows: list[Workflow[Any, Any]]) -> set[str]:
    """Return the ids of the schedules that these workflows declare."""
    return {each.name for each in workflows if each.settings.schedule is not None}


async def _delete(client: Client, ids: list[str]) -> list[str]:
    return [schedule_id for schedule_id in ids if await client.delete_schedule(schedule_id)]


async def _undeclared(client: Client, declared: set[str]) -> list[ScheduleDescription]:
    from perdure.admin.schedule_checks import find_undeclared

    return await find_undeclared(client, declared)


def _report(json: bool, text: str, **shape: Any) -> None:
    if json:
        print_json(shape)
    else:
        print_out(literal(text))


def _print_schedules(found: list[ScheduleDescription], emit: Callable[[Any], None] = print_out) -> None:
    if not found:
        emit("No schedules found.")
        return
    rows = [
        (literal(each.id), literal(each.workflow), literal(_next_of(each)), str(each.started), literal(each.rule))
        for each in found
    ]
    emit(table_of(("schedule", "workflow", "next", "started", "rule"), rows, right=("started",)))


def _next_of(schedule: ScheduleDescription) -> str:
    if schedule.paused is not None:
        return "paused"
    return _iso(schedule.next_slots[0]) if schedule.next_slots else "ended"


def _print_schedule(schedule: ScheduleDescription) -> None:
    counters = ("started", "skipped", "missed", "conflicts", "triggered")
    lines = [
        ("id", schedule.id),
        ("workflow", f"{schedule.workflow} {short(schedule.input)}"),
        ("rule", schedule.rule),
        ("overlap", schedule.overlap),
        ("catch up", schedule.catch_up),
        ("queue", schedule.queue),
        ("declared by", schedule.declared_by),
        ("note", schedule.note or None),
        ("counters", ", ".join(f"{getattr(schedule, name)} {name}" for name in counters)),
    ]
    if schedule.paused is not None:
        reason = f": {schedule.paused.reason}" if schedule.paused.reason else ""
        lines.append(("paused", f"by {schedule.paused.by} since {_iso(schedule.paused.since)}{reason}"))
    lines += [("next", _iso(slot)) for slot in schedule.next_slots]
    for name, value in lines:
        if value is not None:
            print_out(literal(f"{name:<12} {value}"))
    if schedule.recent:
        rows = [
            (literal(_iso(each.slot)), each.outcome, str(each.count), age(each.slot), literal(each.run_id or ""))
            for each in reversed(schedule.recent)
        ]
        print_out(table_of(("time slot", "outcome", "slots", "age", "run"), rows, right=("slots",)))


def _iso(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")
