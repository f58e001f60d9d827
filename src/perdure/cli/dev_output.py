"""What `perdure dev` prints about runs."""

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

LOOK_EVERY = 0.4  # seconds
TOLD_OF = 200  # runs at once


CLOCKS_DIFFER = timedelta(seconds=2)  # at most, between who starts a run and this process


class DevReporter:
    """Says what happens, one line each."""

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

            from perdure.cli.output import STATUS_COLOURS
            from perdure.cli.runs import outcome_of

            more = "; ".join(map(str, run.waiting_for)) or outcome_of(run)
            status = (run.status.value, STATUS_COLOURS[run.status])
            print_out(Text.assemble((f"{run.id}  ", "bold"), status, f"  {more}" if more else ""))


async def _report_runs(client: Client, voice: DevReporter) -> None:
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
            for run in await _recent_runs(client, since):
                if run.id not in followed and (run.id not in told or not run.status.terminal):
                    if len(followed) < TOLD_OF:
                        followed[run.id] = group.create_task(_follow(client, run, voice, begin))
                    told[run.id] = run.created_at
            followed = {run_id: task for run_id, task in followed.items() if not task.done()}


async def _recent_runs(client: Client, since: datetime) -> list[RunDescription]:
    """Open runs, and what was started of late: a short run may begin and end between two looks."""
    from perdure.admin.health_check import OPEN
    from perdure.model.queries import RunQuery

    queries = (RunQuery(status=OPEN, limit=TOLD_OF), RunQuery(created_after=since, limit=TOLD_OF))
    found = {run.id: run for query in queries for run in await client.runs(query)}
    return sorted(found.values(), key=lambda run: run.created_at)


async def _follow(client: Client, run: RunDescription, voice: DevReporter, begin: datetime) -> None:
    with suppress(RunNotFound):  # it may be pruned as soon as it has ended
        if not run.status.terminal:
            voice.run(await client.describe(run.id))
        async for entry in client.watch(run.id):
            if (entry.settled_at or entry.started_at) >= begin:
                voice.entry(run, entry)
        voice.run(await client.describe(run.id))


async def _ticks() -> AsyncIterator[None]:
    from perdure.clock import SYSTEM_CLOCK, sleep_on

    while True:
        await sleep_on(SYSTEM_CLOCK, LOOK_EVERY)
        yield
