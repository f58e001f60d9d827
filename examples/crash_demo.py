"""An order whose worker is killed in the middle with SIGKILL, and which goes on in another process: `make demo`.

Two kinds of process take part. A worker executes the workflow below; it is this file, started with `worker` and a
store. The director, which is this file without arguments, places the order, starts a worker, kills it, starts another
one, and then shows from the store what happened. All of them share nothing but a SQLite file.
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


# --- what a user of perdure writes: steps, and a workflow that calls them ------------------------------------------


@dataclass
class Order:
    id: str
    item: str
    cents: int
    ledger: str  # a file in which every step leaves a line when it is executed: the outside world of this demo


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
    await ctx.sleep(2.0)  # the warehouse packs; a durable sleep, which is where the worker will be killed
    label = await print_label(order, shelf)
    parcel = await hand_to_carrier(order, label)
    await send_email(order, receipt)
    return f"{parcel} is on its way"


async def work(order: Order) -> None:
    """Half a second of work, and one line in the ledger."""
    now = current_step()
    console.print(f"  [dim]process {os.getpid()}[/]  {now.name}")
    await asyncio.sleep(0.4)
    # A real step would now call a service, and pass it `now.idempotency_key`: should the process die after the call and
    # before its result is recorded, the step runs again with the same key, and the service can tell.
    write_line(order.ledger, f"{now.name} {os.getpid()}")


def write_line(ledger: str, line: str) -> None:
    with Path(ledger).open("a") as file:
        file.write(f"{line}\n")


def read_lines(ledger: Path) -> list[list[str]]:
    return [line.split() for line in ledger.read_text().splitlines()]


# --- the worker: executes whatever is due in the store, until it is told to stop -----------------------------------


async def worker(url: str) -> None:
    logging.getLogger("perdure").setLevel(logging.ERROR)  # it would say that it takes over from a dead worker; so do we
    await Worker(url, [fulfil]).run()


# --- the director ---------------------------------------------------------------------------------------------------


async def direct(folder: Path) -> None:
    url, ledger = f"sqlite:///{folder / 'shop.db'}", folder / "ledger.txt"
    async with Client(url) as client:
        run = await client.start(fulfil, Order("42", "teapot", 2400, str(ledger)), id="order-42")
        say(f"Order {run.id} is in the store. A worker starts:")
        first = start_worker(url)
        try:
            await until_asleep(run)
            await asyncio.sleep(0.3)  # it is in the middle of the order now, and of no step
            first.kill()
            first.wait()
            say(f"[bold red]SIGKILL[/] to process {first.pid}: gone in the middle of the order, without a last word.")
            for entry in await client.history(run.id):
                console.print(f"  in the store   {entry.name}: {entry.value if entry.value else entry.status}")
            say("Another worker starts on the same file:")
            second = start_worker(url)
            try:
                result = await run.result(timeout=60)
            finally:
                second.terminate()
                second.wait()
        finally:
            first.kill()
        say(f"[bold green]{await run.status()}[/]: {result}")
        await show_timeline(client, run, ledger, killed=first.pid)


def start_worker(url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "worker", url])


async def until_asleep(run: Run[str]) -> None:
    """Follow the run's history until its sleep has begun: everything before it is recorded, and no step is running."""
    async for entry in run.watch():
        if entry.kind == "sleep":
            return


async def show_timeline(client: Client, run: Run[str], ledger: Path, killed: int) -> None:
    """What the store and the ledger know, one line per entry; fails if any step was executed twice."""
    executions = read_lines(ledger)
    times = Counter(name for name, _ in executions)
    process = {name: int(pid) for name, pid in executions}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("entry", "result", "began", "process", "crash", "executed"):
        table.add_column(heading, justify="right" if heading == "began" else "left", no_wrap=True)
    created_at = (await run.describe()).created_at
    for entry in await client.history(run.id):
        began = f"{(entry.started_at - created_at).total_seconds():.1f} s"
        if entry.kind == "sleep":
            table.add_row(entry.name, "", began, "", "during", "", style="dim")
        else:
            pid = process[entry.name]
            when = "[yellow]before[/]" if pid == killed else "[green]after[/]"
            count = times[entry.name]
            table.add_row(entry.name, entry.value, began, str(pid), when, "once" if count == 1 else f"{count} times")
    console.print()
    console.print(table)
    if set(times.values()) != {1} or len(set(process.values())) != 2:
        sys.exit("this should not have happened: a step was executed twice, or all in one process")
    console.print(
        "No step ran twice: what was recorded before the crash was read back. Had the crash hit a step while it ran, "
        "that one step would have run again, with the same idempotency key as the first time.",
        style="dim",
    )


def say(what: str) -> None:
    console.print()
    console.print(what)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        asyncio.run(worker(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory(prefix="perdure-demo-") as folder:
            asyncio.run(direct(Path(folder)))
