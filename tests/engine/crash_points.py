"""A crash before and after every commit of a whole script, where `crash_everywhere` knows only of a single run."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from perdure.testing import Harness, VirtualClock
from tests.engine.store_matrix import another_handle, make_store

Script = Callable[[Harness, Any], Awaitable[object]]


def crash_script(
    kind: str,
    folder: Path,
    workflows: Sequence[Any],
    script: Script,
    begin: Callable[[], object],
    within: float = 86_400.0,
) -> int:
    """Run `script(harness, engine)` with a crash at the n-th commit, for every n, and then again with another engine.

    The script must bear to be begun again, and checks by itself. How many crashes there were.
    """
    names = count()

    async def crashed_at(n: int, side: Any) -> bool:
        begin()
        clock = VirtualClock()
        store = make_store(kind, folder, clock, f"store-{next(names)}")
        async with Harness(store, clock=clock) as h:
            first = await h.engine(*workflows)
            first.faults.crash(n, side)
            if await h.drive_until_crash(first, done(script(h, first)), within):
                return False
            await h.crash(first)
            second = await h.engine(*workflows, store=another_handle(store, clock))
            try:
                await h.drive(script(h, second), within)
            except BaseException as error:
                error.add_note(f"this was after a crash {side} commit {n}")
                raise
            return True

    async def done(work: Awaitable[object]) -> bool:
        await work
        return True

    async def everywhere() -> int:
        crashes = 0
        for side in ("before", "after"):
            n = 1
            while await crashed_at(n, side):
                n += 1
            crashes += n - 1
        return crashes

    return asyncio.run(everywhere())
