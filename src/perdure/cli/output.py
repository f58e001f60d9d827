"""Output: tables and colours on a terminal, plain lines in a pipe, JSON for programs. The only room that prints."""

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

    from perdure.admin.health_check import Progress

STATUS_COLOURS = {
    "pending": "cyan",
    "running": "blue",
    "suspended": "yellow",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "magenta",
}
ENTRY_COLOURS = {"pending": "yellow", "succeeded": "green", "failed": "red", "cancelled": "bright_black"}
GAP = 3  # between two columns
MIN_LAST = 10
SHOWN = 20  # of many things about which a question is asked
WIDE = 10_000  # of a pipe: who reads there cuts lines himself


@cache
def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDE
    return Console(stderr=stderr, highlight=False, soft_wrap=False, width=width, emoji=False)


def print_json(shape: Any, *, indent: bool = True) -> None:
    """One value; on one line where several follow each other."""
    import msgspec

    data = msgspec.json.encode(shape)
    text = (msgspec.json.format(data, indent=2) if indent else data).decode()
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def print_out(what: RenderableType) -> None:
    """A line, or something that rich can draw; text may have rich's markup in it."""
    _print(console(), what)


def print_err(what: RenderableType) -> None:
    """On stderr: not part of the answer."""
    _print(console(stderr=True), what)


def _print(out: Console, what: RenderableType) -> None:
    """In a pipe without the blanks with which rich fills its lines."""
    if out.is_terminal:
        out.print(what)
        return
    with out.capture() as drawn:
        out.print(what)
    for line in drawn.get().splitlines():
        out.file.write(f"{line.rstrip()}\n")
    out.file.flush()


def errors_to(kind: str, message: str, advice: str, run_id: str | None, *, json: bool) -> None:
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
    """A remark that is not part of the answer."""
    from rich.text import Text

    print_err(Text.assemble(("note", "bold yellow"), ": ", message))


def table_of(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = ()) -> Table:
    """Columns with headings. On a narrow terminal the last column is cut, a pipe gets all of it."""
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
    """Left to itself rich would make all columns narrow alike, and nothing could be read."""
    rows = [row for row in rows if len(row) == len(headings)]
    others = [max([len(heading), *(row[at].cell_len for row in rows)]) for at, heading in enumerate(headings[:-1])]
    for row in rows:
        row[-1].truncate(max(MIN_LAST, width - sum(others) - GAP * len(others)), overflow="ellipsis")


@contextmanager
def progress(label: str, *, total: int | None = None) -> Iterator[Progress]:
    """A bar on stderr while something takes long; nothing in a pipe."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda more: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda more: bar.advance(task, more)


def confirm(question: str) -> bool:
    """Ask whoever sits at the terminal; False if nobody does."""
    if not sys.stdin.isatty():
        return False
    import typer

    return typer.confirm(question, err=True)


# --- words -------------------------------------------------------------------------------------------------------


def coloured(status: str, colours: dict[str, str] = STATUS_COLOURS) -> Any:
    from rich.text import Text

    return Text(status, style=colours.get(status, ""))


def counted(count: int, what: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def literal(text: object) -> Any:
    """Text of users, in which square brackets are no markup."""
    from rich.text import Text

    return Text(str(text))


def now() -> datetime:
    from perdure.clock import SYSTEM_CLOCK, to_datetime

    return to_datetime(SYSTEM_CLOCK.now())


def age(at: datetime | None) -> str:
    """How long ago, as people say it."""
    return "" if at is None else f"{length(max(timedelta(0), now() - at))} ago"


def length(took: timedelta) -> str:
    """A duration in two units at most: 34 ms, 1.5 s, 2m 05s, 3h 20m, 4d 2h."""
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


def short(value: Any, most: int = 60) -> str:
    """A payload on one line."""
    import msgspec

    text = msgspec.json.encode(value).decode()
    return text if len(text) <= most else f"{text[: most - 1]}…"
