"""Command dev: a worker that restarts when the code changes, and a live report of all runs.

Two processes: this one watches the files and reports from the store; it never imports the user's code. The other one is
`perdure worker`, which imports the code and is restarted when a file changes. It refuses blocking calls in workflow
code, so that the mistake is reported where it is made.
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
from perdure.cli.dev_output import DevReporter, poll_ticks, report_runs
from perdure.cli.output import literal, print_out
from perdure.cli.session import error_reporting, stop_event
from perdure.cli.settings import store_url
from perdure.cli.workers import Concurrency, Pool

if TYPE_CHECKING:
    from perdure.cli.target import Target

SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}
STOP_TIMEOUT_SECONDS = 15.0


def dev(
    target: options.Target = None,
    pool: Pool = None,
    concurrency: Concurrency = None,
    watch: Annotated[
        list[Path] | None,
        typer.Option(
            "--watch", metavar="FOLDER", help="Folders to watch. Default: that of the code.", show_default=False
        ),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Run a worker that restarts when the code changes, and print what its runs do.

    The default store is the SQLite file perdure.db in the current folder.
    """
    import asyncio

    from perdure.cli.target import parse_target
    from perdure.client.store_urls import redact_password

    with error_reporting(json):
        url, parsed = store_url(store), parse_target(target)
        folders = watch or [parsed.folder]
        if not json:
            watched = ", ".join(map(str, folders))
            print_out(literal(f"Store {redact_password(url)}. Watching {watched}. Press Ctrl+C to stop."))
        asyncio.run(_dev(url, worker_command(parsed, url, pool, concurrency), folders, json=json))


def worker_command(target: Target, url: str, pool: str | None, concurrency: int | None) -> list[str]:
    # -B: Python matches bytecode with a file by size and whole seconds, so a quick second edit could be ignored.
    program = [sys.executable, "-B", "-m", "perdure.cli"]
    command = [*program, "worker", target.text, "--store", url, "--grace", "2", "--refuse-blocking"]
    if pool is not None:
        command += ["--pool", pool]
    if concurrency is not None:
        command += ["--concurrency", str(concurrency)]
    return command


# --- the worker process and its files ------------------------------------------------------------------


class WorkerProcess:
    """The worker's process. It exits when the code cannot be imported; the next change of a file starts it again."""

    def __init__(self, command: list[str], *, json: bool) -> None:
        self._command = command
        self._stdout = sys.stderr if json else None  # the code's own output must not mix with JSON
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=self._stdout, stdin=subprocess.DEVNULL)

    def ended(self) -> int | None:
        """Return the exit code, once, if the process ended without `stop`."""
        if self._process is None or self._process.poll() is None:
            return None
        code, self._process = self._process.returncode, None
        return code

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def stamps(folders: list[Path]) -> dict[str, int]:
    """Return the modification time of each Python file."""
    found = {}
    for file in (each for folder in folders for each in _python_files(folder)):
        try:
            found[file] = Path(file).stat().st_mtime_ns
        except OSError:
            continue  # deleted since the folder was listed
    return found


def _python_files(folder: Path) -> Iterator[str]:
    for root, below, files in os.walk(folder):
        below[:] = [name for name in below if name not in SKIPPED and not name.startswith(".")]
        yield from (f"{root}{os.sep}{name}" for name in files if name.endswith(".py"))


async def _dev(url: str, command: list[str], folders: list[Path], *, json: bool) -> None:
    import asyncio

    from perdure.client.client import Client

    worker, reporter, stop = WorkerProcess(command, json=json), DevReporter(json=json), stop_event()
    async with Client(url) as client:
        worker.start()
        jobs = (stop.wait(), report_runs(client, reporter), _reload_on_change(worker, folders, reporter))
        tasks: list[asyncio.Task[object]] = [asyncio.create_task(each) for each in jobs]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # raises if reporting or reloading failed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(worker.stop)


async def _reload_on_change(worker: WorkerProcess, folders: list[Path], reporter: DevReporter) -> None:
    import asyncio

    before = await asyncio.to_thread(stamps, folders)
    async for _ in poll_ticks():
        code = worker.ended()
        if code is not None:
            reporter.worker("exited", f"with code {code}; restarts when a file changes")
        seen = await asyncio.to_thread(stamps, folders)
        changed = sorted(name for name in before.keys() | seen.keys() if before.get(name) != seen.get(name))
        if changed:
            before = seen
            reporter.worker("reloading", ", ".join(Path(name).name for name in changed))
            await asyncio.to_thread(worker.stop)
            worker.start()
