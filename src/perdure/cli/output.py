"""Terminal output: tables and colours on a terminal, plain lines in a pipe, JSON. The only module that prints."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from perdure.admin.store_views import Progress
    from perdure.client.views import RunDescription

STATUS_COLOURS = {
    "pending": "cyan",
    "running": "blue",
    "suspended": "yellow",
    "held": "red",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "magenta",
}
ENTRY_COLOURS = {"pending": "yellow", "succeeded": "green", "failed": "red", "cancelled": "bright_black"}
COLUMN_GAP = 3
MIN_LAST_COLUMN = 10
SHOWN = 20  # items listed before a confirmation
PIPE_WIDTH = 10_000  # lines in a pipe are not cut


@cache
def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(stderr=stderr, highlight=False, soft_wrap=False, width=width, emoji=False)


def print_json(shape: Any, *, indent: bool = True) -> None:
    """Print one value as JSON, indented or on one line."""
    import msgspec

    data = msgspec.json.encode(shape, enc_hook=_to_json_value)
    text = (msgspec.json.format(data, indent=2) if indent else data).decode()
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def print_out(what: RenderableType) -> None:
    """Print a line or a rich renderable on stdout. Text may contain rich markup."""
    _print(console(), what)


def print_err(what: RenderableType) -> None:
    """Print on stderr what is not part of the result."""
    _print(console(stderr=True), what)


def _print(out: Console, what: RenderableType) -> None:
    """Print; in a pipe without the blanks with which rich pads lines."""
    if out.is_terminal:
        out.print(what)
        return
    with out.capture() as drawn:
        out.print(what)
    for line in drawn.get().splitlines():
        out.file.write(f"{line.rstrip()}\n")
    out.file.flush()


def errors_to(kind: str, message: str, advice: str, run_id: str | None, *, json: bool) -> None:
    message, advice = printable(message), printable(advice)
    if json:
        import msgspec

        shape = {"error": {"type": kind, "message": message, "run": run_id, "next": advice or None}}
        sys.stderr.write(msgspec.json.encode(shape).decode() + "\n")
        return
    from rich.text import Text

    print_err(Text.assemble(("error", "bold red"), ": ", message))
    if advice:
        print_err(Text.assemble(("  try", "bold"), ": ", advice))


def warn(message: str) -> None:
    """Print a note on stderr."""
    from rich.text import Text

    print_err(Text.assemble(("note", "bold yellow"), ": ", message))


def table_of(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = ()) -> Table:
    """Return a table. On a narrow terminal the last column is cut; in a pipe it is complete."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    fancy = console().is_terminal
    table = Table(box=box.SIMPLE_HEAD if fancy else None, pad_edge=False, show_edge=False, header_style="bold")
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    for heading in headings:
        side: Literal["right", "left"] = "right" if heading in right else "left"
        table.add_column(heading, justify=side, no_wrap=True, overflow="ellipsis")
    if fancy:
        _cut_last(headings, cells, console().width)
    for row in cells:
        table.add_row(*row)
    return table


def _cut_last(headings: Sequence[str], rows: Iterable[Sequence[Text]], width: int) -> None:
    """Cut the last column to the width. By default rich narrows all columns alike, which is unreadable."""
    rows = [row for row in rows if len(row) == len(headings)]
    others = [max([len(heading), *(row[at].cell_len for row in rows)]) for at, heading in enumerate(headings[:-1])]
    for row in rows:
        row[-1].truncate(max(MIN_LAST_COLUMN, width - sum(others) - COLUMN_GAP * len(others)), overflow="ellipsis")


@contextmanager
def progress(label: str, *, total: int | None = None) -> Iterator[Progress]:
    """Show a progress bar on stderr; nothing in a pipe."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda more: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda more: bar.advance(task, more)


def confirm(prompt: str) -> bool:
    """Ask at the terminal. Return False if stdin is not a terminal."""
    if not sys.stdin.isatty():
        return False
    import typer

    return typer.confirm(prompt, err=True)


# --- formatting -------------------------------------------------------------------------------------------------------


def coloured(status: str, colours: dict[str, str] = STATUS_COLOURS) -> Any:
    from rich.text import Text

    return Text(status, style=colours.get(status, ""))


def state_of(run: RunDescription) -> str:
    """Return the status of a run as people see it: a held run is `held`, not `suspended`."""
    return "held" if run.held is not None else run.status.value


def counted(count: int, what: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def literal(text: object) -> Any:
    """Return user text as is: square brackets in it are not markup."""
    from rich.text import Text

    return Text(printable(str(text)))


def printable(text: str) -> str:
    """Return text with bytes of the command line that are not UTF-8 written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def now() -> datetime:
    from perdure.clock import SYSTEM_CLOCK, to_datetime

    return to_datetime(SYSTEM_CLOCK.now())


def age(at: datetime | None) -> str:
    """Return how long ago a time was, such as `2m 05s ago`."""
    return "" if at is None else f"{length(max(timedelta(0), now() - at))} ago"


def length(took: timedelta) -> str:
    """Return a duration in at most two units: 34 ms, 1.5 s, 2m 05s, 3h 20m, 4d 2h."""
    seconds = took.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)}m {int(seconds % 60):02}s"
    if seconds < 86_400:
        return f"{int(seconds // 3600)}h {int(seconds % 3600 // 60):02}m"
    return f"{int(seconds // 86_400)}d {int(seconds % 86_400 // 3600)}h"


def short(value: Any, max_length: int = 60) -> str:
    """Return a payload as JSON on one line, cut to `max_length`."""
    import msgspec

    text = msgspec.json.encode(value, enc_hook=_to_json_value).decode()
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def _to_json_value(value: Any) -> Any:
    """Return a typed value of loaded code as JSON: a model as its dump, another object as text."""
    from perdure.codec.plain_values import to_plain

    try:
        return to_plain(value)
    except NotImplementedError:
        return str(value)
