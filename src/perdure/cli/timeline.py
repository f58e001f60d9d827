"""Draw one run: its state, why it waits, and its history as a tree of locations with a bar for each entry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from perdure.cli.output import ENTRY_COLOURS, STATUS_COLOURS, age, length, now, short, state_of, table_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from perdure.admin.store_views import RejectedRequest
    from perdure.client.views import HistoryEntry, RunDescription
    from perdure.workflows.types import ErrorView

BAR = 24
MAX_REJECTED = 10
MARKS = {"succeeded": "✓", "failed": "✗", "cancelled": "~", "pending": "…"}


@dataclass(slots=True)
class Node:
    """A node of the tree: a scope, an entry, or both."""

    segment: str
    entry: HistoryEntry | None = None
    below: dict[str, Node] = field(default_factory=dict)


def draw_run(run: RunDescription, history: Sequence[HistoryEntry], *, trace: bool) -> RenderableType:
    """Return everything that `show` prints."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [draw_head(run)]
    if run.waiting_for:
        parts += [Text(), Text("waiting for", style="bold"), *(_line("  ", str(each)) for each in run.waiting_for)]
    if run.drift:
        drift = ", ".join(run.drift)
        parts += [Text(), Text(f"arguments differ from the recorded ones: {drift}", style="yellow")]
    if history:
        parts += [Text(), draw_history(run, history)]
    for location, error in _errors(run, history):
        parts += [Text(), *draw_error(location, error, trace=trace)]
    return Group(*parts)


def draw_head(run: RunDescription) -> Table:
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 2))
    head.add_column(style="bold", no_wrap=True)
    head.add_column(overflow="fold")
    status = Text(state_of(run), style=f"bold {STATUS_COLOURS[state_of(run)]}")
    head.add_row("run", Text(run.id, style="bold"))
    head.add_row("workflow", Text(f"{run.workflow} v{run.version}"))
    head.add_row("status", status)
    head.add_row("input", Text(short(run.input, 400)))
    if run.status == "succeeded":
        head.add_row("result", Text(short(run.result, 400)))
    for name, value in _facts(run):
        head.add_row(name, Text(value))
    return head


def draw_history(run: RunDescription, history: Sequence[HistoryEntry]) -> Table:
    """Return a table with an indented row per entry. Bars share one scale, from the first entry to now."""
    from rich.text import Text

    begin = min(entry.started_at for entry in history)
    end = max([run.ended_at or now(), *(entry.settled_at or begin for entry in history)])
    rows = []
    for guide, node in _rows(tree_of(history)):
        name = Text.assemble((guide, "bright_black"), (node.segment, "bright_black" if node.entry is None else ""))
        rows.append([name] if node.entry is None else [name, *_cells(node.entry, begin, end)])
    return table_of(("location", "kind", "attempts", "took", "timeline", "value"), rows, right=("attempts", "took"))


def draw_error(location: str | None, error: ErrorView, *, trace: bool) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    where = "" if location is None else f" at {location}"
    yield Text.assemble(("✗ ", "red"), (error.type, "bold red"), f"{where}: {error.message}")
    if error.dropped:
        yield Text(f"  not recorded: {', '.join(error.dropped)}", style="bright_black")
    lines = error.traceback.rstrip().splitlines()
    if trace and lines:
        yield Padding(Text("\n".join(lines), style="dim"), (0, 0, 0, 2))
    elif lines:
        yield Text(f"  traceback of {len(lines)} lines: use --trace", style="bright_black")


def draw_rejected(rejected: Sequence[RejectedRequest]) -> RenderableType:
    """Return the latest rejected requests, with their number if there are more."""
    from rich.console import Group
    from rich.text import Text

    shown = rejected[-MAX_REJECTED:]
    count = f" (the last {MAX_REJECTED} of {len(rejected)})" if len(rejected) > len(shown) else ""
    lines = (
        f"{each.at:%Y-%m-%d %H:%M:%S}  {each.event_name}  {each.event_id}  {each.type}: {each.message}"
        for each in shown
    )
    return Group(Text(), Text(f"rejected requests{count}", style="bold"), *(_line("  ", line) for line in lines))


def entry_line(entry: HistoryEntry) -> Any:
    """Return an entry on one line, for pipes and for `dev`."""
    from rich.text import Text

    took = "" if entry.settled_at is None else length(entry.settled_at - entry.started_at)
    attempts = f" (attempt {entry.attempts})" if entry.attempts > 1 else ""
    mark, colour = MARKS[entry.status], ENTRY_COLOURS[entry.status]
    error = "" if entry.error is None else f"  {entry.error.type}: {entry.error.message}".splitlines()[0]
    return Text.assemble(
        f"{(entry.settled_at or entry.started_at):%H:%M:%S}  ",
        (f"{mark} {entry.status.value:<9}", colour),
        f"  {entry.location}  ",
        (f"{entry.kind}{attempts}  {took}", "bright_black"),
        (error, "red"),
    )


def tree_of(history: Sequence[HistoryEntry]) -> dict[str, Node]:
    """Arrange entries by the segments of their locations, each level in order of first request."""
    roots: dict[str, Node] = {}
    for entry in history:
        level = roots
        *scopes, last = entry.location.split("/")
        for segment in scopes:
            level = level.setdefault(segment, Node(segment)).below
        level.setdefault(last, Node(last)).entry = entry
    return roots


def bar_of(entry: HistoryEntry, begin: datetime, end: datetime, width: int = BAR) -> tuple[int, int]:
    """Return the first cell of an entry's bar and its length, at least one cell."""
    whole = max((end - begin) / timedelta(seconds=1), 1e-9)
    start = (entry.started_at - begin) / timedelta(seconds=1) / whole
    stop = ((entry.settled_at or end) - begin) / timedelta(seconds=1) / whole
    first = min(int(start * width), width - 1)
    return first, max(1, min(round(stop * width), width) - first)


def _cells(entry: HistoryEntry, begin: datetime, end: datetime) -> list[Any]:
    from rich.text import Text

    colour = ENTRY_COLOURS[entry.status]
    first, cells = bar_of(entry, begin, end)
    bar = Text.assemble(("·" * first, "bright_black"), ("━" * cells, colour))
    bar.append("·" * (BAR - first - cells), "bright_black")
    took = "…" if entry.settled_at is None else length(entry.settled_at - entry.started_at)
    attempts = str(entry.attempts) if entry.attempts else ""
    return [Text(f"{MARKS[entry.status]} {entry.kind}", style=colour), attempts, took, bar, Text(_value_of(entry))]


def _value_of(entry: HistoryEntry) -> str:
    """Return the value of an entry, the type of its error, and the last heartbeat of a step that is not done."""
    value = entry.error.type if entry.error is not None else "" if entry.value is None else short(entry.value)
    if entry.heartbeat_at is None:
        return value
    details = "" if entry.heartbeat is None else f" {short(entry.heartbeat)}"
    return f"{value}  heartbeat{details}, {age(entry.heartbeat_at)}".strip()


def _rows(level: dict[str, Node], guide: str = "") -> Iterator[tuple[str, Node]]:
    nodes = list(level.values())
    for node in nodes:
        last = node is nodes[-1]
        yield (guide + ("└─ " if last else "├─ ") if guide or len(level) else guide), node
        yield from _rows(node.below, guide + ("   " if last else "│  "))


def _facts(run: RunDescription) -> Iterator[tuple[str, str]]:
    if run.tags:
        yield "tags", "  ".join(f"{key}={value}" for key, value in run.tags.items())
    if run.parent is not None:
        yield "parent", run.parent
    yield "created", f"{run.created_at:%Y-%m-%d %H:%M:%S} UTC, {age(run.created_at)}"
    if run.ended_at is not None:
        yield "ended", f"{age(run.ended_at)}, after {length(run.ended_at - run.created_at)}"
    if run.cancel_pending or run.cancel_reason is not None:
        reason = "" if run.cancel_reason is None else f": {run.cancel_reason}"
        yield "cancel", f"{'pending' if run.cancel_pending else 'requested'}{reason}"
    if run.held is not None and run.held.line is not None:
        yield "held at", run.held.line
    if run.owner is not None:
        yield "owner", run.owner
    if run.generation:
        yield "generation", str(run.generation)
    if run.recoveries:
        yield "recoveries", str(run.recoveries)
    for key, value in run.published.items():
        yield "published", f"{key} = {short(value)}"


def _errors(run: RunDescription, history: Sequence[HistoryEntry]) -> Iterator[tuple[str | None, ErrorView]]:
    for entry in history:
        if entry.error is not None:
            yield entry.location, entry.error
    if run.error is not None:
        yield None, run.error


def _line(indent: str, text: str) -> Any:
    from rich.text import Text

    return Text(indent + text)
