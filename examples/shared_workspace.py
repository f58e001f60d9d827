"""Call agents concurrently and write their results to one shared folder, one at a time.

Usage: `python shared_workspace.py FOLDER`. Three agents read the text files of a folder, and each adds a section to one
report in it. Model calls are slow, so they run concurrently. A write reads the report, changes it and writes it back;
two concurrent writes would lose a section, so a lock serializes them.

The lock is a plain `asyncio.Lock`. Inside a workflow it is durable, because the recorded history determines which task
gets it and in which order. After a crash the replay grants it in the same order. There is no lock file to clean up.

Kill the program at any time and start it again on the same folder: the run continues.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from perdure import Context, Engine, current_step, step, workflow

ROLES = ["structure", "style", "facts"]
REPORT = "report.md"


# --- steps: everything that touches the disk or calls an agent ------------------------------------------------------


@step
def read_inputs(workspace: str) -> dict[str, str]:
    """Return the contents of every text file in the workspace, by name."""
    return {path.name: path.read_text() for path in sorted(Path(workspace).glob("*.txt"))}


@step
async def call_agent(role: str, files: dict[str, str]) -> str:
    """Simulate a model call: slow, expensive and not repeatable."""
    log(f"calling the agent for {role}")
    await asyncio.sleep(0.3)
    return f"Review of {role}: {len(files)} files, {sum(map(len, files.values()))} characters, no findings."


@step
def add_section(workspace: str, title: str, text: str) -> int:
    """Add a section to the shared report and return the number of sections. Idempotent.

    A step runs again if a crash comes before its result is recorded. So an existing section of this title is replaced.
    """
    report = Path(workspace, REPORT)
    sections = read_sections(report)
    time.sleep(0.2)  # a concurrent write in this interval would be lost
    sections[title] = text
    write_sections(report, sections)
    log(f"wrote section {title!r}")
    return len(sections)


# --- workflow -------------------------------------------------------------------------------------------------------


@workflow
async def write_report(ctx: Context, workspace: str) -> str:
    files = await read_inputs(workspace)
    report_lock = asyncio.Lock()

    async def contribute(role: str) -> str:
        finding = await call_agent(role, files)
        async with report_lock:
            await add_section(workspace, role, finding)
        return finding

    findings = await ctx.join({role: contribute(role) for role in ROLES}, name="agents")
    summary = f"{len(findings)} agents read {len(files)} files."
    await add_section(workspace, "summary", summary)
    return summary


# --- the report: a file with a heading above each section ----------------------------------------------------------


def read_sections(report: Path) -> dict[str, str]:
    blocks = report.read_text().split("## ")[1:] if report.exists() else []
    return {title: text.strip() for title, _, text in (block.partition("\n") for block in blocks)}


def write_sections(report: Path, sections: dict[str, str]) -> None:
    draft = report.with_suffix(".draft")
    draft.write_text("".join(f"## {title}\n{text}\n\n" for title, text in sections.items()))
    draft.replace(report)  # atomic: a crash leaves the old report or the new one


def log(text: str) -> None:
    print(f"  {current_step().location}: {text}", flush=True)


# --- program --------------------------------------------------------------------------------------------------------


async def main(workspace: Path) -> None:
    async with Engine(f"sqlite:///{workspace / 'runs.db'}") as engine:
        run = await engine.start(write_report, str(workspace), id="report")
        print("Started a new report:" if run.created else "Continuing an existing report:", flush=True)
        print(await run.result(timeout=60))
    print()
    print((workspace / REPORT).read_text().strip())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(Path(sys.argv[1]).resolve()))
    else:
        with tempfile.TemporaryDirectory(prefix="perdure-workspace-") as folder:
            Path(folder, "one.txt").write_text("First text.\n")
            Path(folder, "two.txt").write_text("Second text.\n")
            asyncio.run(main(Path(folder).resolve()))
