"""DevReporter: what `perdure dev` prints about its worker and the runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from perdure.cli.output import print_json, print_out
from perdure.errors import RunNotFound

if TYPE_CHECKING:
    from perdure.client.client import Client
    from perdure.client.views import HistoryEntry, RunDescription

POLL_SECONDS = 0.4
MAX_FOLLOWED_RUNS = 200
MAX_CLOCK_DIFFERENCE = timedelta(seconds=2)  # between the process that starts a run and this one


class DevReporter:
    """Prints one line per event."""

    def __init__(self, *, json: bool) -> None:
        self._json = json

    def worker(self, what: str, more: str) -> None:
        if self._json:
            print_json({"worker": what, "text": more}, indent=False)
        else:
            from rich.text import Text

            print_out(Text.assemble(("worker ", "bold cyan"), f"{what}: {more}"))

    def entry(self, run: RunDescription, entry: HistoryEntry) -> None:
        if self._json:
            from perdure.cli.json_output import entry_shape

            print_json({"run": run.id, "entry": entry_shape(entry)}, indent=False)
        else:
            from rich.text import Text

            from perdure.cli.timeline import entry_line

            print_out(Text.assemble((f"{run.id}  ", "bold"), entry_line(entry)))

    def run(self, run: RunDescription) -> None:
        if self._json:
            from perdure.cli.json_output import run_shape

            print_json({"run": run_shape(run)}, indent=False)
        else:
            from rich.text import Text

            from perdure.cli.output import STATUS_COLOURS, state_of
            from perdure.cli.runs import outcome_of

            more = "; ".join(map(str, run.waiting_for)) or outcome_of(run)
            status = (state_of(run), STATUS_COLOURS[state_of(run)])
            print_out(Text.assemble((f"{run.id}  ", "bold"), status, f"  {more}" if more else ""))


async def report_runs(client: Client, reporter: DevReporter) -> None:
    """Follow every open run, and every run that starts from now on."""
    import asyncio

    from perdure.cli.output import now

    begin = polled_at = now()
    followed: dict[str, asyncio.Task[None]] = {}
    reported: dict[str, datetime] = {}  # followed runs -> when they were created
    async with asyncio.TaskGroup() as group:
        async for _ in poll_ticks():
            since, polled_at = max(begin, polled_at - MAX_CLOCK_DIFFERENCE), now()
            reported = {run_id: at for run_id, at in reported.items() if at >= since}
            for run in await _recent_runs(client, since):
                if run.id not in followed and (run.id not in reported or not run.status.terminal):
                    if len(followed) < MAX_FOLLOWED_RUNS:
                        followed[run.id] = group.create_task(_follow(client, run, reporter, begin))
                    reported[run.id] = run.created_at
            followed = {run_id: task for run_id, task in followed.items() if not task.done()}


async def _recent_runs(client: Client, since: datetime) -> list[RunDescription]:
    """Return open runs and recently created ones: a short run may start and end between two polls."""
    from perdure.admin.store_views import OPEN
    from perdure.model.queries import RunQuery

    queries = (RunQuery(status=OPEN, limit=MAX_FOLLOWED_RUNS), RunQuery(created_after=since, limit=MAX_FOLLOWED_RUNS))
    found = {run.id: run for query in queries for run in await client.runs(query)}
    return sorted(found.values(), key=lambda run: run.created_at)


async def _follow(client: Client, run: RunDescription, reporter: DevReporter, begin: datetime) -> None:
    with suppress(RunNotFound):  # it may be pruned as soon as it has ended
        if not run.status.terminal:
            reporter.run(await client.describe(run.id))
        async for entry in client.watch(run.id):
            if (entry.settled_at or entry.started_at) >= begin:
                reporter.entry(run, entry)
        reporter.run(await client.describe(run.id))


async def poll_ticks() -> AsyncIterator[None]:
    from perdure.clock import SYSTEM_CLOCK, sleep_on

    while True:
        await sleep_on(SYSTEM_CLOCK, POLL_SECONDS)
        yield
