"""Stores that earlier versions recorded are opened, migrated and continued by this one."""

from __future__ import annotations

import asyncio
import json

import pytest

from perdure.model.queries import RunQuery
from perdure.testing import Harness, VirtualClock
from perdure.testing.clock import START
from tests.golden_stores.backends import BACKENDS, FOLDER, path_of
from tests.golden_stores.record import migration_hashes
from tests.golden_stores.workflows import (
    ALL,
    DOCUMENT,
    LATER_RESULTS,
    QUEUED_RESULTS,
    RESULTS,
    Unread,
    cancel_work,
    continue_all,
)

WITHOUT_LATER_RUNS = ("2026-11-liveness", "2026-11-redesign")
WITHOUT_QUEUES = ("2026-11-contract", *WITHOUT_LATER_RUNS)
NAMES = sorted(path.name for path in FOLDER.iterdir())


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_golden_store_is_opened_and_all_its_runs_continue(name, kind, tmp_path):
    async def scenario():
        clock, backend = VirtualClock(START + 60), BACKENDS[kind]
        store = backend.make(tmp_path, clock)
        await backend.restore(store, path_of(name, kind).read_bytes())
        async with Harness(store, clock=clock) as harness:
            engine = await harness.engine(*ALL)
            results = await harness.drive(continue_all(engine), within=86_400)
            later = {each: LATER_RESULTS[each] for each in LATER_RESULTS if name not in WITHOUT_LATER_RUNS}
            queued = {} if name in WITHOUT_QUEUES else QUEUED_RESULTS
            assert results == RESULTS | later | queued
            await check_search(harness.store, has_typed_tags=bool(queued))
            assert await engine.published("golden.ended") == {"progress": 100}
            assert [item async for item in engine.read_stream("golden.ended", "log")] == ["one", "two"]
            [unread] = await engine.dead_letters(Unread)
            assert unread.event_id == "unread"
            undone = [entry for entry in await engine.history("golden.compensating") if entry.name == cancel_work.name]
            assert [entry.value for entry in undone] == ["flight reserved cancelled"]

    asyncio.run(scenario())


async def check_search(store, *, has_typed_tags):
    """Check that runs are found by tags, which were text in the first stores, and that the document is read."""
    found = await store.runs(RunQuery(tags={"golden": "yes"}))
    assert sorted(record.id for record in found.runs) == sorted(set(RESULTS) - {"golden.generations"})
    if has_typed_tags:
        search = RunQuery(where="tenant:acme amount>=500 urgent:true due>2026-12-01 workflow:golden.queued")
        assert sorted(record.id for record in (await store.runs(search)).runs) == sorted(QUEUED_RESULTS)
        document = await store.document(DOCUMENT.kind, DOCUMENT.id)
        assert (document.body, document.due_at) == (DOCUMENT.body, DOCUMENT.due_at)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_migrations_are_unchanged(name):
    recorded = json.loads((FOLDER / name / "migrations.json").read_text())
    for kind, hashes in migration_hashes().items():
        assert hashes[: len(recorded[kind])] == recorded[kind], f"{kind}: add a migration instead of changing one"
