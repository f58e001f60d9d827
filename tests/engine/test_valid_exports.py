"""Every export of a run that perdure has executed can be imported, whatever has happened to the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure import RunStatus
from perdure.admin.import_checks import check_snapshot
from perdure.admin.run_import import import_run
from perdure.codec import JSON
from perdure.model.records import RunRecord
from perdure.stores.results import Snapshot
from perdure.testing import Harness
from tests.engine.rich_run import CALLED, Order, Paid, rich_child, rich_run
from tests.engine.store_matrix import on_every_store
from tests.runner.golden_histories import FOLDER, Golden


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_golden_histories_are_accepted_at_every_point(file: Path):
    record = RunRecord(id="r", workflow="w", version=1, input=b"{}", created_at=1.0, created_by="c", seed=1)
    for golden in msgspec.json.decode(file.read_bytes(), type=list[Golden]):
        for point in golden.points:
            check_snapshot(Snapshot(record, point.written, tuple(golden.rows[: point.written]), ()), JSON)


@on_every_store
async def test_run_is_imported_before_and_after_rewind_fork_and_cancel(h):
    engine = await h.engine(rich_run, rich_child)
    await engine.start(rich_run, Order("1"), id="rich")
    await engine.send("rich", Paid("ada"))
    copies: list[str] = []

    async def copy(run_id: str) -> None:
        copies.append(await import_run(engine, await engine.export_history(run_id), run_id=f"copy-{len(copies)}"))

    for _ in range(4):
        await copy("rich")
        await h.clock.advance(1)
    await h.clock.advance(10)
    for location in ("pages/~6/reserve", "Paid", "join/b/sleep", "sleep"):
        await engine.rewind("rich", location)
        await copy("rich")
        await h.clock.advance(10)
        await engine.send("rich", Paid("bob"))
        await h.settle()
        fork = await engine.fork("rich", location)
        await copy(fork.id)
        await h.clock.advance(10)
        await copy(fork.id)
        await copy("rich")
    await engine.cancel("rich")
    await copy("rich")
    await h.clock.advance(10)
    await copy("rich")
    await resume_all(h, engine, copies)


async def resume_all(h: Harness, engine: Any, copies: list[str]) -> None:
    """Resume the copies: the code that made their histories replays them."""
    CALLED.clear()
    for run_id in copies:
        if await engine.status(run_id) is RunStatus.SUSPENDED:
            await engine.resume(run_id)
    await h.settle()
    for run_id in copies:
        [record] = await h.store.records([run_id])
        assert isinstance(record, RunRecord)
        assert record.held is None, (run_id, record.held)
