"""The programs in README.md and docs/ run as printed, twice in a row.

Every block fenced as `python` is a program. It runs in its own interpreter, in an empty folder, and must not warn. It
then runs again in the same folder, against the store file of the first run. A `text` block right after the program is
the output of the first run. A block that cannot run alone is fenced as `py`, or has `<!-- not run: reason -->` in the
line above it.
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
    """Yield the blocks of a page that must run."""
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
def test_program_runs_twice_in_the_same_folder(page, program, tmp_path):
    script = tmp_path / "example.py"
    # Leading blank lines make a traceback show the line numbers of the page.
    script.write_text("\n" * (program.line - 1) + program.source, encoding="utf-8")
    where = f"{page.relative_to(ROOT)}, line {program.line}"
    first = run_script(script)
    assert first.returncode == 0, f"{where}:\n{first.stderr}"
    assert unexpected_lines(first.stderr) == []
    if program.output is not None:
        assert first.stdout == program.output
    second = run_script(script)
    assert second.returncode == 0, f"{where}, second run:\n{second.stderr}"
    assert unexpected_lines(second.stderr) == []


def unexpected_lines(stderr: str) -> list[str]:
    """Return the lines of stderr that are not log records about failures and holds, which some pages show."""
    return [line for line in stderr.splitlines() if not re.match(r"Run \S+(: step| failed|: dead letter| held)", line)]


def run_script(script: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in its own folder, with warnings as errors."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


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


GUARDED_SEND = """\
        if run.created:                    # False when you run the program again: the order exists
            await engine.send("order-42", Approved("ada"))
"""


def test_readme_shows_the_program_of_the_specification():
    """Character by character, except for the two lines that make it a script and the guard that allows a second run."""
    [taste] = programs((ROOT / "README.md").read_text(encoding="utf-8"))
    twice = TASTE.replace('        await engine.send("order-42", Approved("ada"))\n', GUARDED_SEND)
    assert taste.source == f"import asyncio\n{twice}\nasyncio.run(main())\n"
    assert taste.output == "receipt-42 approved by ada\n"


RULES_ONLY = {"composition": set(), "events": {"Ordering", "Expiry and limits", "Delivery guarantees"}}


@pytest.mark.parametrize("name", RULES_ONLY)
def test_every_section_of_a_feature_page_has_a_program(name):
    """Sections that only state rules are listed in RULES_ONLY."""
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    without = {section.partition("\n")[0] for section in sections if not list(programs(section))}
    assert without == RULES_ONLY[name]
    assert all(program.output for program in programs(page)), "every program shows its output"


def test_finds_python_blocks_with_the_output_that_directly_follows():
    page = """\
```python
print(1)
```

```text
1
```

Text.

```python
print(2)
```

Text.

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
