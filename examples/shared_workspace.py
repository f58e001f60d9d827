"""Let several runs work in one folder, one at a time: `python shared_workspace.py FOLDER`.

Each run takes the lock of the folder, reads the text files, calls three agents concurrently, and writes a report. The
lock is durable, like the run:

- `acquire_lock` is a step that puts the token of a deferred into a queue; the first token in the queue holds the lock.
  The token is the same after every crash and replay, so a repeated step takes the lock once.
- A run that has to wait awaits the deferred. It is suspended meanwhile and needs no process.
- `release_lock` is registered with `ctx.on_exit`, so it runs however the run ends: with a result, with an error, by a
  cancel, or after a crash. It completes the deferred of the next run in the queue.

Kill the program at any time and start it again on the same folder: the runs continue.
"""

import asyncio
import sqlite3
import sys
import tempfile
from pathlib import Path

from perdure import Client, Context, Engine, current_step, step, workflow

ROLES = ["structure", "style", "facts"]
TASKS = ["first", "second", "third"]


# --- steps: the lock -------------------------------------------------------------------------------------------------


@step
def acquire_lock(workspace: str, token: str) -> bool:
    """Queue up for the lock. Return whether this token holds it now."""
    with open_locks(workspace) as locks:
        locks.execute("INSERT OR IGNORE INTO queue (token) VALUES (?)", (token,))
        return first_in_queue(locks) == token


@step
async def release_lock(workspace: str, token: str) -> None:
    """Remove the token from the queue, and wake the run whose token is the first now."""
    with open_locks(workspace) as locks:
        locks.execute("DELETE FROM queue WHERE token = ?", (token,))
        following = first_in_queue(locks)
    if following is not None:
        async with Client(store_url(workspace)) as client:
            await client.complete(following, True)  # a second completion changes nothing


def open_locks(workspace: str) -> sqlite3.Connection:
    """Return a connection to the queue of the workspace, in a transaction that excludes other processes."""
    locks = sqlite3.connect(Path(workspace, "locks.db"), timeout=30)
    locks.execute("CREATE TABLE IF NOT EXISTS queue (position INTEGER PRIMARY KEY, token TEXT UNIQUE)")
    locks.execute("BEGIN IMMEDIATE")
    return locks


def first_in_queue(locks: sqlite3.Connection) -> str | None:
    row = locks.execute("SELECT token FROM queue ORDER BY position LIMIT 1").fetchone()
    return row and str(row[0])


# --- steps: files and agents -----------------------------------------------------------------------------------------


@step
def read_inputs(workspace: str) -> dict[str, str]:
    """Return the contents of every text file in the workspace, by name."""
    return {path.name: path.read_text() for path in sorted(Path(workspace).glob("*.txt"))}


@step
async def call_agent(role: str, files: dict[str, str]) -> str:
    """Simulate a model call: slow, expensive and not repeatable."""
    log(f"calling the agent for {role}")
    await asyncio.sleep(0.1)
    return f"{role}: {len(files)} files, {sum(map(len, files.values()))} characters, no findings"


@step
def write_report(workspace: str, task: str, text: str) -> str:
    """Write the report of a task. A repeated step writes the same file again."""
    report = Path(workspace, f"report-{task}.md")
    draft = report.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(report)  # atomic: a crash leaves the old report or the new one
    log(f"wrote {report.name}")
    return report.name


def log(text: str) -> None:
    print(f"  {current_step().run_id}, {current_step().location}: {text}", flush=True)


# --- workflow --------------------------------------------------------------------------------------------------------


@workflow
async def review_workspace(ctx: Context, workspace: str, task: str) -> str:
    lock = ctx.deferred("workspace lock", bool)
    ctx.on_exit(release_lock, workspace, lock.token)
    if not await acquire_lock(workspace, lock.token):
        await lock

    files = await read_inputs(workspace)
    findings = await ctx.join({role: call_agent(role, files) for role in ROLES}, name="agents")
    return await write_report(workspace, task, "\n".join(findings.values()))


# --- program ---------------------------------------------------------------------------------------------------------


def store_url(workspace: str) -> str:
    return f"sqlite:///{Path(workspace, 'runs.db')}"


async def main(workspace: str) -> None:
    async with Engine(store_url(workspace)) as engine:
        runs = [await engine.start(review_workspace, workspace, task, id=f"review-{task}") for task in TASKS]
        print("Started new runs:" if runs[0].created else "Continuing existing runs:", flush=True)
        for run in runs:
            print(await run.result(timeout=60))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(str(Path(sys.argv[1]).resolve())))
    else:
        with tempfile.TemporaryDirectory(prefix="perdure-workspace-") as folder:
            Path(folder, "one.txt").write_text("First text.\n")
            Path(folder, "two.txt").write_text("Second text.\n")
            asyncio.run(main(str(Path(folder).resolve())))
