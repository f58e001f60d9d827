"""dev: a worker that is started again whenever the code changes, and a voice that tells what the runs do.

Two processes. This one never imports the user's code: it watches the files, and reads the store to tell what happens.
The other is `perdure worker`, in which the code lives, and which is ended and started anew when a file has changed. It
refuses calls in workflow code that block, so that a mistake is found where it is made and not where it hurts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli import options
from perdure.cli.output import plain, print_json, say
from perdure.cli.session import reported, told_to_stop
from perdure.cli.settings import DEV_STORE, store_url
from perdure.cli.workers import Concurrency, Pool
from perdure.errors import RunNotFound

if TYPE_CHECKING:
    from perdure.cli.target import Target
    from perdure.client.client import Client
    from perdure.client.views import HistoryEntry, RunDescription

SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}
LOOK_EVERY = 0.4  # seconds
STOPPING = 15.0
TOLD_OF = 200  # runs at once
CLOCKS_DIFFER = timedelta(seconds=2)  # at most, between who starts a run and this process


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
    from perdure.client.store_urls import without_password

    with reported(json):
        url, parsed = store_url(store, default=DEV_STORE), parse_target(target)
        folders = watch or [parsed.folder]
        if not json:
            watched = ", ".join(map(str, folders))
            say(plain(f"store {without_password(url)}; watching {watched}; Ctrl+C ends"))
        asyncio.run(_dev(url, worker_command(parsed, url, pool, concurrency), folders, json=json))


def worker_command(target: Target, url: str, pool: str | None, concurrency: int | None) -> list[str]:
    program = [sys.executable, "-m", "perdure.cli"]
    command = [*program, "worker", target.text, "--store", url, "--grace", "2", "--refuse-blocking"]
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

    from perdure.client.client import Client

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
            from perdure.cli.json_output import entry_shape

            print_json({"run": run.id, "entry": entry_shape(entry)}, indent=False)
        else:
            from rich.text import Text

            from perdure.cli.timeline import entry_line

            say(Text.assemble((f"{run.id}  ", "bold"), entry_line(entry)))

    def run(self, run: RunDescription) -> None:
        if self._json:
            from perdure.cli.json_output import run_shape

            print_json({"run": run_shape(run)}, indent=False)
        else:
            from rich.text import Text

            from perdure.cli.output import STATUS_COLOURS
            from perdure.cli.runs import outcome_of

            more = "; ".join(map(str, run.waiting_for)) or outcome_of(run)
            status = (run.status.value, STATUS_COLOURS[run.status])
            say(Text.assemble((f"{run.id}  ", "bold"), status, f"  {more}" if more else ""))


async def _tell(client: Client, voice: Voice) -> None:
    """Follow every run that is open, and those that were over before anybody looked, from now on."""
    import asyncio

    from perdure.cli.output import now

    begin = looked_at = now()
    followed: dict[str, asyncio.Task[None]] = {}
    told: dict[str, datetime] = {}  # runs that were followed, by when they were created
    async with asyncio.TaskGroup() as group:
        async for _ in _ticks():
            since, looked_at = max(begin, looked_at - CLOCKS_DIFFER), now()
            told = {run_id: at for run_id, at in told.items() if at >= since}
            for run in await _news(client, since):
                if run.id not in followed and (run.id not in told or not run.status.terminal):
                    if len(followed) < TOLD_OF:
                        followed[run.id] = group.create_task(_follow(client, run, voice, begin))
                    told[run.id] = run.created_at
            followed = {run_id: task for run_id, task in followed.items() if not task.done()}


async def _news(client: Client, since: datetime) -> list[RunDescription]:
    """Open runs, and what was started of late: a short run may begin and end between two looks."""
    from perdure.admin.health_check import OPEN
    from perdure.model.records import RunQuery

    queries = (RunQuery(status=OPEN, limit=TOLD_OF), RunQuery(created_after=since, limit=TOLD_OF))
    found = {run.id: run for query in queries for run in await client.runs(query)}
    return sorted(found.values(), key=lambda run: run.created_at)


async def _follow(client: Client, run: RunDescription, voice: Voice, begin: datetime) -> None:
    with suppress(RunNotFound):  # it may be pruned as soon as it has ended
        if not run.status.terminal:
            voice.run(await client.describe(run.id))
        async for entry in client.watch(run.id):
            if (entry.settled_at or entry.started_at) >= begin:
                voice.entry(run, entry)
        voice.run(await client.describe(run.id))
