"""dev: a worker that is started again whenever the code changes, and a voice that tells what the runs do.

Two processes. This one never imports the user's code: it watches the files, and reads the store to tell what happens.
The other is `perdure worker`, in which the code lives, and which is ended and started anew when a file has changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli import options
from perdure.cli.fleet import Concurrency, Pool
from perdure.cli.output import plain, print_json, say
from perdure.cli.session import reported, told_to_stop
from perdure.cli.settings import DEV_STORE, shown_url, store_url

if TYPE_CHECKING:
    from perdure.cli.target import Target
    from perdure.client import Client
    from perdure.views import HistoryEntry, RunDescription

SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}
LOOK_EVERY = 0.4  # seconds
STOPPING = 15.0
TOLD_OF = 200  # runs at once


def dev(
    target: options.Target = None,
    pool: Pool = None,
    concurrency: Concurrency = None,
    watch: Annotated[
        list[Path] | None,
        typer.Option("--watch", metavar="FOLDER", help="Folders to watch; else that of the code.", show_default=False),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Run a worker that reloads when the code changes, and print what happens.

    The store is a SQLite file, perdure.db, unless one is named.
    """
    import asyncio

    from perdure.cli.target import parse_target

    with reported(json):
        url, parsed = store_url(store, default=DEV_STORE), parse_target(target)
        command = worker_command(parsed, url, pool, concurrency)
        if not json:
            say(plain(f"store {shown_url(url)}; watching {', '.join(map(str, watch or [parsed.folder]))}; Ctrl+C ends"))
        asyncio.run(_dev(url, command, watch or [parsed.folder], json=json))


def worker_command(target: Target, url: str, pool: str | None, concurrency: int | None) -> list[str]:
    command = [sys.executable, "-m", "perdure.cli", "worker", target.text, "--store", url, "--grace", "2"]
    if pool is not None:
        command += ["--pool", pool]
    if concurrency is not None:
        command += ["--concurrency", str(concurrency)]
    return command


# --- the worker, and the files that it is made of ------------------------------------------------------------------


class Child:
    """The worker's process. It may end by itself, because the code has a mistake: then a change starts it again."""

    def __init__(self, command: list[str], *, json: bool) -> None:
        self._command = command
        self._stdout = sys.stderr if json else None  # what the code prints is to be seen, but not among JSON
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=self._stdout, stdin=subprocess.DEVNULL)

    def ended(self) -> int | None:
        """The exit code of a process that has ended by itself, once."""
        if self._process is None or self._process.poll() is None:
            return None
        code, self._process = self._process.returncode, None
        return code

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOPPING)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def stamps(folders: list[Path]) -> dict[str, int]:
    """When each Python file was last changed."""
    found = {}
    for file in (each for folder in folders for each in _python_files(folder)):
        try:
            found[file] = Path(file).stat().st_mtime_ns
        except OSError:
            continue  # gone between two looks
    return found


def _python_files(folder: Path) -> Iterator[str]:
    for root, below, files in os.walk(folder):
        below[:] = [name for name in below if name not in SKIPPED and not name.startswith(".")]
        yield from (f"{root}{os.sep}{name}" for name in files if name.endswith(".py"))


async def _dev(url: str, command: list[str], folders: list[Path], *, json: bool) -> None:
    import asyncio

    from perdure.client import Client

    child, voice, stop = Child(command, json=json), Voice(json=json), told_to_stop()
    async with Client(url) as client:
        child.start()
        work = (stop.wait(), _tell(client, voice), _reload_on_change(child, folders, voice))
        tasks: list[asyncio.Task[object]] = [asyncio.create_task(each) for each in work]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # a defect of ours is to be seen
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(child.stop)


async def _reload_on_change(child: Child, folders: list[Path], voice: Voice) -> None:
    import asyncio

    before = await asyncio.to_thread(stamps, folders)
    async for _ in _ticks():
        code = child.ended()
        if code is not None:
            voice.worker("ended", f"with {code}; it starts again when a file changes")
        seen = await asyncio.to_thread(stamps, folders)
        changed = sorted(name for name in before.keys() | seen.keys() if before.get(name) != seen.get(name))
        if changed:
            before = seen
            voice.worker("reloads", ", ".join(Path(name).name for name in changed))
            await asyncio.to_thread(child.stop)
            child.start()


async def _ticks() -> AsyncIterator[None]:
    from perdure.clock import SYSTEM_CLOCK, pause

    while True:
        await pause(SYSTEM_CLOCK, LOOK_EVERY)
        yield


# --- telling -------------------------------------------------------------------------------------------------------


class Voice:
    """Says what happens, one line each."""

    def __init__(self, *, json: bool) -> None:
        self._json = json

    def worker(self, what: str, more: str) -> None:
        if self._json:
            print_json({"worker": what, "text": more}, indent=False)
        else:
            from rich.text import Text

            say(Text.assemble(("worker ", "bold cyan"), f"{what}: {more}"))

    def entry(self, run: RunDescription, entry: HistoryEntry) -> None:
        if self._json:
            from perdure.cli.shapes import entry_shape

            print_json({"run": run.id, "entry": entry_shape(entry)}, indent=False)
        else:
            from rich.text import Text

            from perdure.cli.timeline import entry_line

            say(Text.assemble((f"{run.id}  ", "bold"), entry_line(entry)))

    def run(self, run: RunDescription) -> None:
        if self._json:
            from perdure.cli.shapes import run_shape

            print_json({"run": run_shape(run)}, indent=False)
        else:
            from rich.text import Text

            from perdure.cli.output import STATUS_COLOURS

            waits = f" {'; '.join(map(str, run.waiting_for))}" if run.waiting_for else ""
            say(Text.assemble((f"{run.id}  ", "bold"), (run.status.value, STATUS_COLOURS[run.status]), waits))


async def _tell(client: Client, voice: Voice) -> None:
    """Follow every run that is open, from now on."""
    import asyncio

    from perdure.cli.output import now
    from perdure.inspection import OPEN
    from perdure.records import RunQuery

    begin, followed = now(), dict[str, asyncio.Task[None]]()
    async with asyncio.TaskGroup() as group:
        async for _ in _ticks():
            for run in await client.runs(RunQuery(status=OPEN, limit=TOLD_OF)):
                if run.id not in followed and len(followed) < TOLD_OF:
                    followed[run.id] = group.create_task(_follow(client, run, voice, begin))
            for run_id in [each for each, task in followed.items() if task.done()]:
                del followed[run_id]


async def _follow(client: Client, run: RunDescription, voice: Voice, begin: datetime) -> None:
    voice.run(await client.describe(run.id))
    async for entry in client.watch(run.id):
        if (entry.settled_at or entry.started_at) >= begin:
            voice.entry(run, entry)
    voice.run(await client.describe(run.id))
