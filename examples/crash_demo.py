"""Kill a worker with SIGKILL in the middle of an order, and finish the order in another process: `make demo`.

The demo has two kinds of processes. A worker executes the workflow below: this file, started with `worker` and a store
URL. The controller is this file without arguments. It starts the order and a worker, kills the worker, starts another
one, and prints what the store recorded. The processes share only a SQLite file.
"""

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from perdure import Client, Context, Run, Worker, current_step, step, workflow

console = Console(highlight=False)


# --- steps, and a workflow that calls them ------------------------------------------------------------------------


@dataclass
class Order:
    id: str
    item: str
    cents: int
    effect_log: str  # file to which every executed step appends a line: the outside world of this demo


@step
async def reserve_stock(order: Order) -> str:
    await work(order)
    return f"{order.item}, shelf 7"


@step
async def charge_card(order: Order) -> str:
    await work(order)
    return f"receipt {order.cents / 100:.2f}"


@step
async def print_label(order: Order, shelf: str) -> str:
    await work(order)
    return f"label: {shelf}"


@step
async def hand_to_carrier(order: Order, label: str) -> str:
    await work(order)
    return f"parcel {order.id}"


@step
async def send_email(order: Order, receipt: str) -> str:
    await work(order)
    return f"with {receipt}"


@workflow
async def fulfil(ctx: Context, order: Order) -> str:
    shelf = await reserve_stock(order)
    receipt = await charge_card(order)
    await ctx.sleep(2.0)  # the warehouse packs the item; the controller kills the worker during this durable sleep
    label = await print_label(order, shelf)
    parcel = await hand_to_carrier(order, label)
    await send_email(order, receipt)
    return f"{parcel} is on its way"


async def work(order: Order) -> None:
    """Simulate half a second of work and append a line to the effect log."""
    current = current_step()
    console.print(f"  [dim]process {os.getpid()}[/]  {current.name}")
    await asyncio.sleep(0.4)
    # A real step would call a service here and pass `current.idempotency_key`. If the process dies after the call and
    # before the result is recorded, the step runs again with the same key, and the service can detect the repetition.
    append_line(order.effect_log, f"{current.name} {os.getpid()}")


def append_line(effect_log: str, line: str) -> None:
    with Path(effect_log).open("a") as file:
        file.write(f"{line}\n")


def read_lines(effect_log: Path) -> list[list[str]]:
    return [line.split() for line in effect_log.read_text().splitlines()]


# --- the worker: executes due runs until it gets SIGTERM ------------------------------------------------------------


async def worker(url: str) -> None:
    logging.getLogger("perdure").setLevel(logging.ERROR)  # the controller prints the takeover itself
    await Worker(url, [fulfil]).run()


# --- the controller -------------------------------------------------------------------------------------------------


async def control(folder: Path) -> None:
    url, effect_log = f"sqlite:///{folder / 'shop.db'}", folder / "effects.txt"
    async with Client(url) as client:
        run = await client.start(fulfil, Order("42", "teapot", 2400, str(effect_log)), id="order-42")
        say(f"Started run {run.id}. Starting a worker:")
        first = start_worker(url)
        try:
            await wait_until_sleeping(run)
            await asyncio.sleep(0.3)  # the run is in its sleep; no step is executing
            first.kill()
            first.wait()
            say(f"[bold red]SIGKILL[/] to process {first.pid} in the middle of the order. Recorded in the store:")
            for entry in await client.history(run.id):
                console.print(f"  {entry.name}: {entry.value if entry.value else entry.status}")
            say("Starting another worker on the same file:")
            second = start_worker(url)
            try:
                result = await run.result(timeout=60)
            finally:
                second.terminate()
                second.wait()
        finally:
            first.kill()
        say(f"Run {run.id} [bold green]{await run.status()}[/]: {result}")
        await show_timeline(client, run, effect_log, killed_pid=first.pid)


def start_worker(url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "worker", url])


async def wait_until_sleeping(run: Run[str]) -> None:
    """Return when the run's sleep is recorded. All earlier steps are recorded then, and no step is executing."""
    async for entry in run.watch():
        if entry.kind == "sleep":
            return


async def show_timeline(client: Client, run: Run[str], effect_log: Path, killed_pid: int) -> None:
    """Print one line per entry, from the store and the effect log. Exit with an error if a step was executed twice."""
    executions = read_lines(effect_log)
    counts = Counter(name for name, _ in executions)
    process = {name: int(pid) for name, pid in executions}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("entry", "result", "start", "process", "crash", "executed"):
        table.add_column(heading, justify="right" if heading == "start" else "left", no_wrap=True)
    created_at = (await run.describe()).created_at
    for entry in await client.history(run.id):
        started = f"{(entry.started_at - created_at).total_seconds():.1f} s"
        if entry.kind == "sleep":
            table.add_row(entry.name, "", started, "", "during", "", style="dim")
        else:
            pid = process[entry.name]
            when = "[yellow]before[/]" if pid == killed_pid else "[green]after[/]"
            count = counts[entry.name]
            table.add_row(entry.name, entry.value, started, str(pid), when, "once" if count == 1 else f"{count} times")
    console.print()
    console.print(table)
    if set(counts.values()) != {1} or len(set(process.values())) != 2:
        sys.exit("Unexpected result: a step was executed twice, or all steps in one process")
    console.print(
        "No step ran twice: the second worker replayed the recorded results. If the crash had hit a running step, that "
        "step would have run again with the same idempotency key.",
        style="dim",
    )


def say(text: str) -> None:
    console.print()
    console.print(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        asyncio.run(worker(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory(prefix="perdure-demo-") as folder:
            asyncio.run(control(Path(folder)))
