"""Agents that think side by side and write to one shared folder, one at a time: `python shared_workspace.py FOLDER`.

Three agents read the files of a folder, and each adds a section to one report in it. Thinking takes long, so they do it
in parallel. Writing means reading the report, changing it and writing it back, so two at once would lose a section: a
lock lets one in at a time. The lock is a plain `asyncio.Lock`. Inside a workflow it is as durable as everything else,
because who got it and in which order follows from the recorded history: after a crash the replay hands it out the same
way, and nobody has to find out whose lock file that was.

Kill the program at any moment and start it again on the same folder: it goes on from there.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from perdure import Context, Engine, current_step, step, workflow

ROLES = ["structure", "style", "facts"]
REPORT = "report.md"


# --- the steps: all that touches the disk, or an agent -------------------------------------------------------------


@step
def read_inputs(workspace: str) -> dict[str, str]:
    """Every text in the workspace, by name."""
    return {path.name: path.read_text() for path in sorted(Path(workspace).glob("*.txt"))}


@step
async def ask_agent(role: str, files: dict[str, str]) -> str:
    """Stands for a call of a model, which is slow, costs money and answers differently each time."""
    say(f"the agent for {role} is thinking")
    await asyncio.sleep(0.3)
    return f"As for {role}: {len(files)} files, {sum(map(len, files.values()))} characters, nothing to add."


@step
def add_section(workspace: str, title: str, text: str) -> int:
    """Add a section to the report, which others write too; how many there are now.

    A step may be executed again if a crash comes before its result is recorded. So a section that is there already is
    replaced and not added a second time.
    """
    report = Path(workspace, REPORT)
    sections = read_sections(report)
    time.sleep(0.2)  # whoever else writes in between would be undone
    sections[title] = text
    write_sections(report, sections)
    say(f"section {title!r} is written")
    return len(sections)


# --- the workflow: who does what, and when -------------------------------------------------------------------------


@workflow
async def write_report(ctx: Context, workspace: str) -> str:
    files = await read_inputs(workspace)
    writing = asyncio.Lock()

    async def contribute(role: str) -> str:
        finding = await ask_agent(role, files)
        async with writing:
            await add_section(workspace, role, finding)
        return finding

    findings = await ctx.join({role: contribute(role) for role in ROLES}, name="agents")
    summary = f"{len(findings)} agents have read {len(files)} files."
    await add_section(workspace, "summary", summary)
    return summary


# --- the report is a file with a heading above each section --------------------------------------------------------


def read_sections(report: Path) -> dict[str, str]:
    blocks = report.read_text().split("## ")[1:] if report.exists() else []
    return {title: text.strip() for title, _, text in (block.partition("\n") for block in blocks)}


def write_sections(report: Path, sections: dict[str, str]) -> None:
    draft = report.with_suffix(".draft")
    draft.write_text("".join(f"## {title}\n{text}\n\n" for title, text in sections.items()))
    draft.replace(report)  # at once, so that a crash leaves no half of it


def say(what: str) -> None:
    print(f"  {current_step().location}: {what}", flush=True)


# --- the program ---------------------------------------------------------------------------------------------------


async def main(workspace: Path) -> None:
    async with Engine(f"sqlite:///{workspace / 'runs.db'}") as engine:
        run = await engine.start(write_report, str(workspace), id="report")
        print("A new report:" if run.created else "This report was begun before:", flush=True)
        print(await run.result(timeout=60))
    print()
    print((workspace / REPORT).read_text().strip())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(Path(sys.argv[1]).resolve()))
    else:
        with tempfile.TemporaryDirectory(prefix="perdure-workspace-") as folder:
            Path(folder, "one.txt").write_text("Once upon a time there was a file.\n")
            Path(folder, "two.txt").write_text("And then there was another one.\n")
            asyncio.run(main(Path(folder).resolve()))
