"""The bar chart of docs/performance.md: each engine in each comparison. Pure: results in, SVG out.

The scale is logarithmic, because engines differ by factors of a hundred. The number is next to each bar.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from benchmarks.harness import FigureResult, Result
from benchmarks.report import format_number

WIDTH, LABELS, NUMBERS = 880, 340, 110
BAR, GAP, HEADING = 14, 6, 34
TIMES = ("s", "ms")
OURS, THEIRS = "#2f6f4f", "#a9b0b7"
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#24292f}.h{font-weight:600;font-size:13px}"
    "@media(prefers-color-scheme:dark){text{fill:#d0d7de}}"
)


def build_chart(results: Sequence[Result]) -> str:
    """Return an SVG with one panel per compared measure."""
    parts: list[str] = []
    top = 0
    for heading, figures in _panels(results):
        lines, height = _panel(heading, figures, top)
        parts += lines
        top += height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 20}" role="img">',
            "<title>Perdure and other engines</title>",
            f"<style>{STYLE}</style>",
            *parts,
            f'<text x="0" y="{top + 14}">Bar lengths are logarithmic.</text>',
            "</svg>",
            "",
        ]
    )


def _panels(results: Sequence[Result]) -> Iterator[tuple[str, list[FigureResult]]]:
    for result in results:
        by_title: dict[str, list[FigureResult]] = {}
        for figure in result.figures:
            if figure.subject is not None:
                by_title.setdefault(figure.title.partition(": ")[0], []).append(figure)
        for title, figures in by_title.items():
            better = "less is better" if figures[0].unit in TIMES else "more is better"
            yield f"{result.workload}: {title} ({figures[0].unit}, {better})", figures


def _panel(heading: str, figures: Sequence[FigureResult], top: int) -> tuple[list[str], int]:
    lengths = _lengths({figure.title: figure.median for figure in figures})
    lines = [f'<text class="h" x="0" y="{top + 22}">{escape(heading)}</text>']
    for index, figure in enumerate(figures):
        y = top + HEADING + index * (BAR + GAP)
        colour = OURS if figure.subject is not None and figure.subject.startswith("perdure") else THEIRS
        end = LABELS + lengths[figure.title]
        label = escape(figure.title.partition(": ")[2])
        lines += [
            f'<text x="{LABELS - 8}" y="{y + 11}" text-anchor="end">{label}</text>',
            f'<rect x="{LABELS}" y="{y}" width="{lengths[figure.title]:.0f}" height="{BAR}" rx="2" fill="{colour}"/>',
            f'<text x="{end + 6:.0f}" y="{y + 11}">{format_number(figure.median)}</text>',
        ]
    return lines, HEADING + len(figures) * (BAR + GAP) + GAP


def _lengths(values: Mapping[str, float]) -> dict[str, float]:
    """Return bar lengths. The scale starts at half the smallest value, so that every bar is visible."""
    width = WIDTH - LABELS - NUMBERS
    logs = {title: math.log10(max(value, 1e-9)) for title, value in values.items()}
    least, most = min(logs.values()) - math.log10(2), max(logs.values())
    return {title: width * (value - least) / (most - least) for title, value in logs.items()}
