"""dev: a worker that is started again whenever the code changes, and a voice that tells what the runs do.

Two processes. This one never imports the user's code: it watches the files, and reads the store to tell what happens.
The other is `perdure worker`, in which the code lives, and which is ended and started anew when a file has changed. It
refuses calls in workflow code that block, so that a mistake is found where it is made and not where it hurts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli import options
from perdure.cli.dev_output import DevReporter, _report_runs, _ticks
from perdure.cli.output import literal, print_out
from perdure.cli.session import error_reporting, stop_event
from perdure.cli.settings import DEV_STORE, store_url
from perdure.cli.workers import Concurrency, Pool

if TYPE_CHECKING:
    from perdure.cli.target import Target

SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}
STOPPING = 15.0


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
    from perdure.client.store_urls import redact_password

    with error_reporting(json):
        url, parsed = store_url(store, default=DEV_STORE), parse_target(target)
        folders = watch or [parsed.folder]
        if not json:
            watched = ", ".join(map(str, folders))
            print_out(literal(f"store {redact_password(url)}; watching {watched}; Ctrl+C ends"))
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


class WorkerProcess:
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

    child, voice, stop = WorkerProcess(command, json=json), DevReporter(json=json), stop_event()
    async with Client(url) as client:
        child.start()
        work = (stop.wait(), _report_runs(client, voice), _reload_on_change(child, folders, voice))
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


async def _reload_on_change(child: WorkerProcess, folders: list[Path], voice: DevReporter) -> None:
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


# --- telling -------------------------------------------------------------------------------------------------------
