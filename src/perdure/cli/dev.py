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
from perdure.cli.workers import Concurrency, LifespanName, Pool

if TYPE_CHECKING:
    from perdure.cli.target import Target

SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}
STOP_TIMEOUT_SECONDS = 15.0
# -B: Python matches bytecode with a file by size and whole seconds, so a quick second edit could be ignored.
PROGRAM = [sys.executable, "-B", "-m", "perdure.cli"]


def dev(
    target: options.Target = None,
    pool: Pool = None,
    concurrency: Concurrency = None,
    lifespan: LifespanName = None,
    watch: Annotated[
        list[Path] | None,
        typer.Option(
            "--watch", metavar="FOLDER", help="Folders to watch. Default: that of the code.", show_default=False
        ),
    ] = None,
    lint: options.Lint = False,
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
        linter = [*PROGRAM, "lint", parsed.text] if lint else None
        worker = WorkerProcess(worker_command(parsed, pool, concurrency, lifespan), url, linter, json=json)
        asyncio.run(_dev(url, worker, folders, json=json))


def worker_command(target: Target, pool: str | None, concurrency: int | None, lifespan: str | None = None) -> list[str]:
    """Return the command of the worker, without the store: other users of the machine can read command lines."""
    command = [*PROGRAM, "worker", target.text, "--grace", "2", "--refuse-blocking"]
    if pool is not None:
        command += ["--pool", pool]
    if concurrency is not None:
        command += ["--concurrency", str(concurrency)]
    if lifespan is not None:
        command += ["--lifespan", lifespan]
    return command


# --- the worker process and its files ------------------------------------------------------------------


class WorkerProcess:
    """The worker's process. It exits when the code cannot be imported; the next change of a file starts it again.

    `linter` is a command whose findings are printed to stderr before each start. The worker reports import errors.
    """

    def __init__(self, command: list[str], url: str, linter: list[str] | None = None, *, json: bool) -> None:
        self._command = command
        self._linter = linter
        self._environment = {**os.environ, "PERDURE_STORE": url}
        self._stdout = sys.stderr if json else None  # the code's own output must not mix with JSON
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._linter is not None:
            subprocess.run(self._linter, stdout=sys.stderr, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        self._process = subprocess.Popen(
            self._command, stdout=self._stdout, stdin=subprocess.DEVNULL, env=self._environment
        )

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


async def _dev(url: str, worker: WorkerProcess, folders: list[Path], *, json: bool) -> None:
    import asyncio

    from perdure.client.client import Client

    reporter, stop = DevReporter(json=json), stop_event()
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
