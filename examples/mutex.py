"""A mutex between runs, itself a run: `python mutex.py`.

Runs on any worker that use one scarce thing (a printer, a test device, a rate-limited account) send `Acquire` to the
mutex and wait for `Granted`. The mutex grants in the order of the requests. A lease protects it from an owner that
never releases: after `LEASE_SECONDS` it grants to the next one.

All state of the mutex is in its run: a crash of any worker loses neither the owner nor the waiting runs.
"""

import asyncio

from perdure import Context, Engine, current_step, event, step, workflow

MUTEX = "printer"
LEASE_SECONDS = 60.0


@event
class Acquire:
    run_id: str


@event
class Granted:
    pass


@event
class Release:
    run_id: str


@event
class Stop:
    pass


@workflow
async def mutex(ctx: Context) -> int:
    """Grant the mutex to one run after the other. Return how often it was granted."""
    granted = 0
    while isinstance(request := await ctx.receive(Acquire, Stop), Acquire):
        await ctx.send(request.run_id, Granted())
        granted += 1
        try:
            async with asyncio.timeout(LEASE_SECONDS):  # durable, like everything that waits in a workflow
                while (await ctx.receive(Release)).run_id != request.run_id:
                    pass  # a late release of an owner whose lease has expired
        except TimeoutError:
            ctx.log.warning("The lease of %s has expired", request.run_id)
    return granted


@workflow
async def print_document(ctx: Context, title: str) -> str:
    await ctx.send(MUTEX, Acquire(ctx.run_id))
    await ctx.receive(Granted)
    pages = await print_pages(title)
    await ctx.send(MUTEX, Release(ctx.run_id))
    return f"{title}: {pages} pages"


@step
async def print_pages(title: str) -> int:
    print(f"  printing {title} for {current_step().run_id}")
    await asyncio.sleep(0.05)
    print(f"  finished {title}")
    return len(title)


async def main() -> None:
    async with Engine("sqlite:///printer.db") as engine:
        lock = await engine.start(mutex, id=MUTEX)
        titles = ["report", "invoice", "poster"]
        runs = [await engine.start(print_document, title, id=f"print-{title}") for title in titles]
        for run in runs:
            print(await run.result(timeout=60))
        if not (await lock.status()).terminal:
            await lock.send(Stop())
        print(f"granted {await lock.result(timeout=60)} times")


if __name__ == "__main__":
    asyncio.run(main())
