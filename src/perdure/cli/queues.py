"""Commands queues ls, show, pause, resume, resize, waiting, move, release, clear."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from perdure.cli import options
from perdure.cli.output import age, counted, literal, print_err, print_json, print_out, table_of
from perdure.cli.session import UsageError, confirm_or_exit, error_reporting, with_client
from perdure.cli.settings import existing_store, store_url

if TYPE_CHECKING:
    from perdure.client.client import Client
    from perdure.client.queue_views import QueueDescription, QueueLimits, WaitingRun

T = TypeVar("T")
NO_LIMIT = "none"

queues = typer.Typer(no_args_is_help=True, help="List, describe and control work queues.")


def _complete_name(incomplete: str) -> list[str]:
    """Return the queues of the store whose names begin with this, for the shell. Errors complete nothing."""
    try:
        url = store_url(os.environ.get("PERDURE_STORE"))  # a completion does not see --store
        found = with_client(existing_store(url), lambda client: client.queues())
    except Exception:
        return []
    return [each.name for each in found if each.name.startswith(incomplete)]


Name = Annotated[
    str, typer.Argument(metavar="QUEUE", help="The queue's name.", show_default=False, autocompletion=_complete_name)
]
Partition = Annotated[
    str | None, typer.Option("--partition", metavar="KEY", help="Only this partition.", show_default=False)
]
Priority = Annotated[
    int,
    typer.Option("--priority", metavar="N", min=-100, max=100, help="The new priority; smaller goes first."),
]


def _limit(name: str, help: str) -> Any:
    return typer.Option(f"--{name}", metavar="N", help=f"{help}; `none` removes the limit.", show_default=False)


@queues.command("ls", epilog="Example: perdure queues ls")
def list_queues(store: options.Store = None, json: options.Json = False) -> None:
    """List work queues with what waits, what holds slots and what limits each now."""
    with error_reporting(json):
        found = _call(store, lambda client: client.queues())
        if json:
            from perdure.cli.json_output import queue_shape

            print_json({"queues": [queue_shape(each) for each in found]})
        elif not found:
            print_out("No queues found.")
        else:
            headings = ("queue", "waiting", "held", "limits", "limited by", "oldest")
            print_out(table_of(headings, [_row(each) for each in found], right=("waiting", "held")))


@queues.command("show", epilog="Example: perdure queues show emails")
def show_queue(name: Name, store: options.Store = None, json: options.Json = False) -> None:
    """Describe one queue: its limits, what waits, who holds the slots, and what limits it now."""
    with error_reporting(json):
        found = _call(store, lambda client: client.queue(name).describe())
        if json:
            from perdure.cli.json_output import queue_shape

            print_json({"queue": queue_shape(found)})
            return
        for label, value in _lines(found):
            print_out(literal(f"{label:<18} {value}"))


@queues.command("pause", epilog="Example: perdure queues pause emails --reason 'the provider is down'")
def pause_queue(
    name: Name, reason: options.Reason = None, store: options.Store = None, json: options.Json = False
) -> None:
    """Admit no more runs of a queue until it is resumed. Runs that hold slots continue."""
    with error_reporting(json):
        _call(store, lambda client: client.queue(name).pause(reason or ""))
        _report({"queue": name, "paused": True}, f"Queue {name} paused", json=json)


@queues.command("resume", epilog="Example: perdure queues resume emails")
def resume_queue(name: Name, store: options.Store = None, json: options.Json = False) -> None:
    """Admit runs of a paused queue again."""
    with error_reporting(json):
        _call(store, lambda client: client.queue(name).resume())
        _report({"queue": name, "paused": False}, f"Queue {name} resumed", json=json)


@queues.command("resize", epilog="Example: perdure queues resize emails --concurrency 100 --rate 500/min")
def resize_queue(
    name: Name,
    concurrency: Annotated[str | None, _limit("concurrency", "Slots of the queue or partition")] = None,
    worker_concurrency: Annotated[
        str | None, _limit("worker-concurrency", "Runs that one worker executes at once")
    ] = None,
    rate: Annotated[str | None, _limit("rate", "Admissions, as 100/min (s, min, h, day)")] = None,
    partition_concurrency: Annotated[str | None, _limit("partition-concurrency", "Slots of each partition")] = None,
    partition_rate: Annotated[str | None, _limit("partition-rate", "Admissions of each partition")] = None,
    max_waiting: Annotated[str | None, _limit("max-waiting", "Approximate number of waiting runs")] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            "--partition",
            metavar="KEY",
            help="Change this partition only: --concurrency, --rate and --weight.",
            show_default=False,
        ),
    ] = None,
    weight: Annotated[
        int | None,
        typer.Option(
            "--weight", metavar="N", min=1, max=100, help="Runs per turn of the partition.", show_default=False
        ),
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Drop earlier overrides first.")] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Override limits of a queue until --reset. Limits that are not named stay as they are."""
    with error_reporting(json):
        given: dict[str, Any] = {
            "concurrency": _count("concurrency", concurrency),
            "worker_concurrency": _count("worker-concurrency", worker_concurrency),
            "rate": rate,
            "partition_concurrency": _count("partition-concurrency", partition_concurrency),
            "partition_rate": partition_rate,
            "max_waiting": _count("max-waiting", max_waiting),
            "weight": weight,
        }
        given = {option: value for option, value in given.items() if value is not None}
        given = {option: None if value == NO_LIMIT else value for option, value in given.items()}
        if partition is None and weight is not None:
            raise UsageError("--weight needs --partition", "name the partition")
        if partition is not None and (wrong := sorted(given.keys() - {"concurrency", "rate", "weight"})):
            option = wrong[0].replace("_", "-")
            raise UsageError(f"--{option} is not an option of one partition", "use --concurrency, --rate or --weight")

        def resize(client: Client) -> Awaitable[None]:
            queue = client.queue(name)
            return (queue if partition is None else queue.partition(partition)).resize(**given, reset=reset)

        _call(store, resize)
        what = f"Queue {name}" if partition is None else f"Partition {partition} of queue {name}"
        _report({"queue": name, "partition": partition}, f"{what} resized", json=json)


@queues.command("waiting", epilog="Example: perdure queues waiting emails --partition acme")
def list_waiting(
    name: Name,
    partition: Partition = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Runs per page.")] = 20,
    after: Annotated[
        str | None, typer.Option("--after", metavar="CURSOR", help="Continue after this place.", show_default=False)
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """List the runs that wait in a queue, by partition and in the order of their places."""
    with error_reporting(json):
        found = _call(store, lambda client: client.queue(name).waiting(partition, after, limit))
        more = found[-1].cursor if len(found) == limit else None
        if json:
            from perdure.cli.json_output import waiting_run_shape

            print_json({"waiting": [waiting_run_shape(each) for each in found], "next": more})
        elif not found:
            print_out("No waiting runs found.")
        else:
            print_out(_waiting_table(found))
            if more is not None:
                print_err(literal(f"More waiting runs: repeat the command with --after '{more}'"))


@queues.command("move", epilog="Example: perdure queues move emails order-42 --priority -10")
def move_run(
    name: Name, id: options.RunId, priority: Priority, store: options.Store = None, json: options.Json = False
) -> None:
    """Give a waiting run another priority."""
    with error_reporting(json):
        _call(store, lambda client: client.queue(name).move(id, priority=priority))
        _report({"run": id, "priority": priority}, f"Run {id} waits with priority {priority}", json=json)


@queues.command("release", epilog="Example: perdure queues release emails order-42")
def release_run(name: Name, id: options.RunId, store: options.Store = None, json: options.Json = False) -> None:
    """Free the slot of a run, which continues without it; or let a waiting run begin without a slot."""
    with error_reporting(json):
        _call(store, lambda client: client.queue(name).release(id))
        _report({"run": id, "queue": name}, f"Run {id} released from queue {name}", json=json)


@queues.command("clear", epilog="Example: perdure queues clear emails --partition acme")
def clear_queue(
    name: Name,
    partition: Partition = None,
    yes: options.Yes = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Cancel the runs that wait in a queue. Runs that hold slots continue."""
    with error_reporting(json):
        if not yes:
            described = _call(store, lambda client: client.queue(name).describe())
            of = "" if partition is None else f" of partition {partition}"
            confirm_or_exit(f"cancel the runs{of} that wait in queue {name} ({described.waiting} in all)", 0)
        cleared = _call(store, lambda client: client.queue(name).clear(partition))
        _report({"queue": name, "cancelled": cleared}, f"Cancelled {counted(cleared, 'waiting run')}", json=json)


def _call(store: str | None, call: Callable[[Client], Awaitable[T]]) -> T:
    return with_client(existing_store(store_url(store)), call)


def _report(shape: dict[str, Any], text: str, *, json: bool) -> None:
    if json:
        print_json(shape)
    else:
        print_out(literal(text))


def _count(option: str, text: str | None) -> int | str | None:
    """Return a number, `none`, or None if the option is not given."""
    if text is None or text == NO_LIMIT:
        return text
    if not text.isdecimal():
        raise UsageError(f"--{option} must be a whole number or `none`, not {text!r}", f"use --{option} 10")
    return int(text)


def _row(queue: QueueDescription) -> tuple[Any, ...]:
    oldest = "" if queue.oldest is None else age(queue.oldest.since)
    limits = ", ".join(_limits(queue.effective)) or "no limit"
    return literal(queue.name), str(queue.waiting), str(queue.held), literal(limits), queue.limited_by, oldest


def _limits(limits: QueueLimits) -> list[str]:
    given = {
        "concurrency": limits.concurrency,
        "per worker": limits.worker_concurrency,
        "rate": None if limits.rate is None else f"{limits.rate.limit} per {limits.rate.per} s",
        "per partition": limits.partition_concurrency,
        "partition rate": None
        if limits.partition_rate is None
        else f"{limits.partition_rate.limit} per {limits.partition_rate.per} s",
        "waiting": limits.max_waiting,
    }
    return [f"{name} {limit}" for name, limit in given.items() if limit is not None]


def _lines(queue: QueueDescription) -> list[tuple[str, str]]:
    holders, oldest, paused = queue.holders, queue.oldest, queue.paused
    lines = [
        ("queue", queue.name),
        ("limits", ", ".join(_limits(queue.effective)) or "no limit"),
        ("declared", ", ".join(_limits(queue.declared)) or "no limit"),
        ("limited by", queue.limited_by),
        ("waiting", f"{queue.waiting} in {counted(queue.partitions_waiting, 'partition')}"),
        ("held", f"{queue.held}: {holders.executing} executing, {holders.suspended} suspended, {holders.held} held"),
        ("admissions", f"{queue.admissions_last_minute} in the last minute"),
    ]
    if paused is not None:
        lines.append(
            ("paused", f"by {paused.by or 'unknown'} {age(paused.since)}: {paused.reason or 'no reason given'}")
        )
    if oldest is not None:
        lines.append(("oldest", f"{oldest.run_id}, priority {oldest.priority}, waits since {age(oldest.since)}"))
    if queue.next_admission_at is not None:
        lines.append(("next admission", f"{queue.next_admission_at:%Y-%m-%d %H:%M:%S} UTC"))
    return lines


def _waiting_table(found: list[WaitingRun]) -> Any:
    rows = [
        (literal(each.run_id), literal(each.partition), str(each.priority), age(each.since), _time(each))
        for each in found
    ]
    return table_of(("run", "partition", "priority", "since", "not before"), rows, right=("priority",))


def _time(waiting: WaitingRun) -> str:
    return "" if waiting.eligible_at is None else f"{waiting.eligible_at:%Y-%m-%d %H:%M:%S} UTC"
