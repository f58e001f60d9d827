"""The code in README.md and docs/ runs as it is written.

Every block that is fenced as `python` is a program: it runs alone, in an empty folder, in a Python of its own, and
may not warn. A `text` block right after it is what it prints. A block that cannot run alone is fenced as `py`, or has
`<!-- not run: reason -->` in the line above it.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>.*?) -->\n+)?"
    r"^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```[ ]*$"
    r"(?:\n+```text\n(?P<output>.*?)^```[ ]*$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Program:
    line: int
    source: str
    output: str | None


def programs(text: str) -> Iterator[Program]:
    """The blocks of a page that must run."""
    for block in _BLOCK.finditer(text):
        if block["language"] == "python" and not (block["reason"] or "").strip():
            line = text.count("\n", 0, block.start("body")) + 1
            yield Program(line, block["body"], block["output"])


CASES = [
    pytest.param(page, program, id=f"{page.relative_to(ROOT)}:{program.line}")
    for page in PAGES
    for program in programs(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "program"), CASES)
def test_a_program_of_the_docs_runs(page, program, tmp_path):
    script = tmp_path / "example.py"
    # Blank lines before it, so that a traceback shows the line of the page.
    script.write_text("\n" * (program.line - 1) + program.source, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{page.relative_to(ROOT)}, line {program.line}:\n{done.stderr}"
    assert done.stderr == ""
    if program.output is not None:
        assert done.stdout == program.output


TASTE = """\
from dataclasses import dataclass
from perdure import Context, Engine, Retry, event, step, workflow

@dataclass
class Order:
    id: str
    cents: int

@event
class Approved:
    by: str

@step(retry=Retry(max_attempts=5))
async def charge(order: Order) -> str:
    return f"receipt-{order.id}"

@workflow
async def checkout(ctx: Context, order: Order) -> str:
    approval = await ctx.receive(Approved, timeout=3600)
    receipt = await charge(order)          # durable: recorded once, replayed ever after
    await ctx.sleep(0.1)
    return f"{receipt} approved by {approval.by}"

async def main():
    async with Engine("sqlite:///shop.db") as engine:
        run = await engine.start(checkout, Order("42", 999), id="order-42")
        await engine.send("order-42", Approved("ada"))
        print(await run.result())
"""


def test_the_taste_of_the_readme_is_the_promised_one():
    """Character by character, but for the two lines that make a script of it."""
    [taste] = programs((ROOT / "README.md").read_text(encoding="utf-8"))
    assert taste.source == f"import asyncio\n{TASTE}\nasyncio.run(main())\n"
    assert taste.output == "receipt-42 approved by ada\n"


@pytest.mark.parametrize("name", ["composition", "events"])
def test_every_feature_has_a_program(name):
    """Each section of these pages that introduces something shows it; those that state rules are named here."""
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    without = {section.partition("\n")[0] for section in sections if not list(programs(section))}
    assert without == ({"Order", "Expiry and limits", "Why no event is lost or doubled"} if name == "events" else set())
    assert all(program.output for program in programs(page)), "and says what it prints"


def test_which_blocks_are_programs():
    page = """\
```python
print(1)
```

```text
1
```

Words.

```python
print(2)
```

Words.

```text
not its output
```

```py
fragment
```

<!-- not run: needs a server -->
```python
print(3)
```

<!-- not run:  -->
```python
print(4)
```
"""
    assert list(programs(page)) == [
        Program(2, "print(1)\n", "1\n"),
        Program(12, "print(2)\n", None),
        Program(32, "print(4)\n", None),
    ]
