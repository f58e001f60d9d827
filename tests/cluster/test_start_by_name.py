"""Starting a workflow by name that this process has not imported and a live worker has published."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from perdure import Context, InvalidPayload, RunConflict, RunStatus, WorkflowMisuse, workflow
from perdure.stores.writes import PutDocument
from perdure.workflows.definition import REGISTRY
from perdure.workflows.publications import KIND
from tests.engine.store_matrix import on_every_store


@dataclass
class Parcel:
    grams: int


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_definitions", dict(REGISTRY._definitions))


def published_elsewhere(version: int = 1, pool: str = "default"):
    """Return a workflow that is not in the registry, as if only another process had imported it."""

    @workflow(name="ship_parcel", version=version, pool=pool)
    async def ship_parcel(ctx: Context, parcel: Parcel, express: bool = False) -> str:
        return f"v{ctx.version('v', latest=version)} {parcel.grams} {express}"

    del REGISTRY._definitions["ship_parcel", version]
    return ship_parcel


@on_every_store
async def test_payload_is_a_dict_by_parameter_name(h):
    await h.engine(published_elsewhere())
    client = await h.client()
    run = await client.start("ship_parcel", {"parcel": {"grams": 7}, "express": True}, id="p", tags={"to": "ada"})
    assert run.created
    assert await h.run_to_end(run, 3) == "v1 7 True"
    assert (await run.describe()).tags == {"to": "ada"}


@on_every_store
async def test_highest_published_version_is_started_in_its_pool(h):
    first = await h.engine(published_elsewhere(), published_elsewhere(3, pool="fast"), pool="fast")
    await h.engine(published_elsewhere(2))
    client = await h.client()
    run = await client.start("ship_parcel", {"parcel": {"grams": 1}})
    assert await h.run_to_end(run, 3) == "v3 1 False"
    await h.drive(first.shutdown())
    run = await client.start("ship_parcel", {"parcel": {"grams": 1}})
    assert await h.run_to_end(run, 3) == "v2 1 False"


@on_every_store
async def test_existing_id_is_the_same_run_or_a_conflict(h):
    await h.engine(published_elsewhere())
    client = await h.client()
    await client.start("ship_parcel", {"parcel": {"grams": 7}}, id="p")
    again = await client.start("ship_parcel", {"parcel": {"grams": 7}}, id="p")
    assert not again.created
    with pytest.raises(RunConflict):
        await client.start("ship_parcel", {"parcel": {"grams": 8}}, id="p")


@on_every_store
async def test_rejected_start_by_name_creates_no_run(h):
    client = await h.client()
    with pytest.raises(WorkflowMisuse, match="no live worker has published"):
        await client.start("ship_parcel", {"parcel": {"grams": 7}}, id="p")
    engine = await h.engine(published_elsewhere())
    for wrong in ((Parcel(7),), (7, True), ({1: 2},)):
        with pytest.raises(InvalidPayload, match="one dict by parameter name"):
            await client.start("ship_parcel", *wrong, id="p")
    assert await client.status("p") is None
    await h.drive(engine.shutdown())
    with pytest.raises(WorkflowMisuse, match="no live worker has published"):
        await client.start("ship_parcel", {"parcel": {"grams": 7}}, id="p")


@on_every_store
async def test_payload_that_does_not_match_is_refused(h):
    await h.engine(published_elsewhere())
    client = await h.client()
    with pytest.raises(InvalidPayload, match="parcel: 'grams' is missing"):
        await client.start("ship_parcel", {"parcel": {"pounds": 7}})
    assert (await client.runs()).runs == ()


@on_every_store
async def test_payload_that_does_not_match_holds_the_run_of_a_worker_that_has_published_no_schema(h):
    await h.engine(published_elsewhere())
    client = await h.client()
    (document,) = await h.store.documents(KIND)
    await h.store.commit([PutDocument(kind=KIND, id=document.id, base=document.version, body=None, write_id="delete")])
    run = await client.start("ship_parcel", {"parcel": {"pounds": 7}})
    await h.clock.advance(1)
    assert await run.status() is RunStatus.SUSPENDED
    assert any("grams" in reason.text for reason in (await run.describe()).waiting_for)


@on_every_store
async def test_worker_of_another_pool_does_not_execute_a_run(h):
    @workflow(pool="slow")
    async def of_slow_pool(ctx: Context) -> int:
        return 1

    engine = await h.engine(of_slow_pool)
    client = await h.client()
    run = await client.start(of_slow_pool)
    await h.clock.advance(1)
    for each in (engine, client):
        assert [reason.kind for reason in (await each.describe(run.id)).waiting_for] == ["no_worker"]
