"""Crashes at every commit on any store: of one workflow (`crash_on`) or of a script with several (`crash_script`)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

from perdure.testing import CrashReport, Harness, VirtualClock, crash_everywhere
from perdure.workflows.definition import Workflow
from tests.engine.store_matrix import another_handle, make_store
from tests.repetitions import crash_interval

Script = Callable[[Harness, Any], Awaitable[object]]


def crash_on(kind: str, folder: Path, workflow: Workflow[Any, Any], *args: Any, **options: Any) -> CrashReport:
    """Run `crash_everywhere` on new stores of this kind, each of which a second handle opens after the crash."""
    names, every = count(), crash_interval(kind)
    report = asyncio.run(
        crash_everywhere(
            workflow,
            *args,
            make_store=lambda clock: make_store(kind, folder, clock, f"store-{next(names)}"),
            reopen=another_handle,
            every=every,
            **options,
        )
    )
    # Timing decides how many writes share a commit, so that some executions end before their crash point.
    assert len(report.crashes) * every > 1.5 * report.commits
    return report


def crash_script(
    kind: str,
    folder: Path,
    workflows: Sequence[Any],
    script: Script,
    begin: Callable[[], object],
    within: float = 86_400.0,
) -> int:
    """Run `script(harness, engine)` until a crash at the n-th commit, for every n, and then again on another engine.

    The script checks the outcome by itself, and must be repeatable. Return the number of commits.
    """
    names, every = count(), crash_interval(kind)

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
        for n, side in islice(((n, side) for n in count(1) for side in ("before", "after")), 0, None, every):
            if not await crashed_at(n, side):
                return n - 1
        raise AssertionError("unreachable: the points have no end")

    return asyncio.run(everywhere())
