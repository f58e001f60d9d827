"""Results for people: a table in the terminal, and the one in docs/performance.md. Pure but for the last function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness import FigureResult, Result

BEGIN = "<!-- figures: begin, made by `python -m benchmarks --markdown`; not typed -->"
END = "<!-- figures: end -->"
COLUMNS = ("figure", "median", "lowest to highest", "target")


def tables_of(result: Result) -> list[Table]:
    """What was measured; and below it, if anything, what was not and why."""
    table = Table(
        title=f"{result.workload}: {result.title}",
        caption=f"{len(result.rounds)} rounds; {sizes_of(result.sizes)}; {machine_of(result.machine)}",
        title_justify="left",
        caption_justify="left",
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "figure" else "right")
    for figure in result.figures:
        table.add_row(*row_of(figure), style=None if figure.met else "bold red")
    return [table, _missing(result)] if result.missing else [table]


def _missing(result: Result) -> Table:
    table = Table("not measured", "why", title=f"{result.workload}: missing", title_justify="left")
    for name, reason in result.missing.items():
        table.add_row(name, reason)
    return table


def markdown_of(results: Sequence[Result], chart: str) -> str:
    """What there is a target for; all workloads, each with where and when it was measured; what the engines are."""
    parts = [f"![The engines beside each other, as bars]({chart})\n"] if any(each.engines for each in results) else []
    parts += _standing(results)
    for result in results:
        lines = [f"### `{result.workload}`: {result.title}", ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "| --- | ---: | ---: | ---: |"]
        lines += ["| " + " | ".join(row_of(figure)) + " |" for figure in result.figures]
        if result.missing:
            lines += ["", "Not measured:", ""]
            lines += [f"- {name}: {reason}" for name, reason in result.missing.items()]
        lines += ["", f"Median of {len(result.rounds)} rounds ({sizes_of(result.sizes)}), {result.measured_at[:10]}."]
        lines += [f"{machine_of(result.machine)}.", ""]
        parts.append("\n".join(lines))
    engines = {name: described for result in results for name, described in result.engines.items()}
    if engines:
        parts.append("\n".join(["### The engines", "", *(f"- {each}." for each in engines.values()), ""]))
    return "\n".join(parts)


def _standing(results: Sequence[Result]) -> list[str]:
    """One table of what there is a target for, if there is any."""
    lines = ["### Where it stands", "", "| work | figure | median | target |", "| --- | --- | ---: | ---: |"]
    rows = [(result.workload, *row_of(figure)) for result in results for figure in result.figures]
    aims = [f"| `{work}` | {title} | {median} | {target} |" for work, title, median, _, target in rows if target]
    return ["\n".join([*lines, *aims, ""])] if aims else []


def row_of(figure: FigureResult) -> tuple[str, str, str, str]:
    unit = f" {figure.unit}" if figure.unit else ""
    spread = f"{number(figure.low)} to {number(figure.high)}"
    return figure.title, number(figure.median) + unit, spread, target_of(figure)


def target_of(figure: FigureResult) -> str:
    if figure.at_least is not None:
        text = f"at least {number(figure.at_least)}"
    elif figure.at_most is not None:
        text = f"at most {number(figure.at_most)}"
    else:
        return ""
    return text if figure.met else f"{text}, missed"


def number(value: float) -> str:
    """As many digits as mean something: three, or all before the point."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def sizes_of(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size:,}" for name, size in sizes.items())


def machine_of(machine: Mapping[str, Any]) -> str:
    commit = machine["commit"][:12] if machine["commit"] else "unknown"
    processor = f" ({machine['processor']})" if machine["processor"] else ""
    servers = machine.get("servers", {})
    stores = [f"SQLite {machine['sqlite']}"]
    stores += [f"PostgreSQL {servers['postgres']}"] if "postgres" in servers else []
    stores += [servers["redis"]] if "redis" in servers else []
    return (
        f"{machine['cores']} cores{processor}, {machine['system']}, {machine['python']}, {', '.join(stores)}, "
        f"commit {commit}"
    )


def put_between_markers(page: Path, text: str) -> None:
    """Replace what is between the markers of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no place for the figures; put these lines into it:\n{BEGIN}\n{END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")
