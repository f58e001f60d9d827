"""Workers publish schema and options of their workflows; a process that has not imported them starts runs by name."""

import dataclasses
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal

import pytest

from perdure import Context, InvalidArgument, InvalidPayload, WorkQueue, step, workflow
from perdure.stores.writes import PutDocument
from perdure.workflows.definition import Workflow, WorkflowOptions
from perdure.workflows.publications import KIND, decode_publication
from tests.engine.store_matrix import on_every_store


@dataclasses.dataclass
class Item:
    sku: str
    count: int = 1


@dataclasses.dataclass
class Order:
    id: str
    items: list[Item]
    price: Decimal
    kind: Literal["new", "used"] = "new"
    at: datetime | None = None


@step
async def ship(order_id: str) -> str:
    return order_id


@pytest.fixture
def published():
    """A workflow that the worker has, and that callers by name do not know."""

    @workflow(name="published.order", timeout=600, retention=3600, tags={"kind": "order", "level": 2}, pool="default")
    async def order(ctx: Context, order: Order, gift: bool = False) -> Any:
        return {"id": await ship(order.id), "gift": gift, "items": len(order.items)}

    return order


async def only_by_name(h, *workflows):
    """Return an engine with these workflows, and a client for which they are not imported."""
    engine = await h.engine(*workflows)
    client = await h.client()
    client._session.known_types.latest = lambda name: None
    return engine, client


GOOD = {"id": "o1", "items": [{"sku": "a"}], "price": "1.50"}


@on_every_store
async def test_a_start_by_name_applies_the_published_options(h, published):
    _, client = await only_by_name(h, published)
    run = await client.start("published.order", {"order": GOOD}, tags={"level": 3, "vip": True}, delay=5)
    (record,) = await h.store.records([run.id])
    assert record.tags == {"kind": "order", "level": 3, "vip": True}
    assert (record.retention, record.deadline_at) == (3600.0, record.created_at + 605.0)
    assert await h.run_to_end(run) == {"id": "o1", "gift": False, "items": 1}
    own = await client.start("published.order", order=GOOD, gift=True, timeout=60, retention=10)
    (record,) = await h.store.records([own.id])
    assert (record.retention, record.deadline_at) == (10.0, record.created_at + 60.0)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({}, "'order' is missing"),
        ({"order": GOOD, "colour": 1}, "colour: is unknown; known are 'gift', 'order'"),
        ({"order": "o1"}, "order: must be an object, not 'o1'"),
        ({"order": {**GOOD, "items": {}}}, "order.items: must be a list"),
        ({"order": {**GOOD, "items": [{"sku": 1}]}}, r"order.items\[0\].sku: must be a string, not 1"),
        ({"order": {**GOOD, "items": [{"sku": "a", "count": 1.5}]}}, "count: must be a whole number, not 1.5"),
        ({"order": {**GOOD, "items": [{"sku": "a", "count": True}]}}, "count: must be a whole number, not True"),
        ({"order": {**GOOD, "kind": "old"}}, "order.kind: must be one of 'new', 'used'"),
        ({"order": {**GOOD, "at": []}}, "order.at: matches none of its types"),
        ({"order": GOOD, "gift": 1}, "gift: must be a boolean, not 1"),
        ({"order": {"id": "o1", "items": []}}, "order: 'price' is missing"),
    ],
)
@on_every_store
async def test_a_payload_that_does_not_match_the_published_schema_is_refused(h, published, payload, words):
    engine, client = await only_by_name(h, published)
    with pytest.raises(InvalidPayload, match=words):
        await client.start("published.order", payload)
    assert (await engine.runs()).runs == ()


@on_every_store
async def test_what_python_accepts_matches_the_schema(h, published):
    _, client = await only_by_name(h, published)
    for order in (
        Order("o1", [Item("a")], Decimal("1.5"), at=datetime(2026, 1, 1, tzinfo=UTC)),
        {**GOOD, "price": 1.5, "at": "2026-01-01T00:00:00Z"},
        {**GOOD, "items": [{"sku": "a", "count": 2, "note": "more"}]},
    ):
        run = await client.start("published.order", {"order": order})
        assert (await h.run_to_end(run))["items"] == 1


@on_every_store
async def test_documents_are_written_only_if_they_change(h, published):
    first = await h.engine(published)
    await h.engine(published)
    (document,) = await h.store.documents(KIND)
    assert document.id == "published.order@1"
    read = decode_publication(document.body)
    assert (read.timeout, read.retention, read.read_tags()) == (600.0, 3600.0, {"kind": "order", "level": 2})
    assert first.faults.calls["publish"] == 1
    await h.clock.advance(60)
    await h.settle()
    assert first.faults.calls["publish"] == 1
    assert (await h.store.documents(KIND)) == [document], "the second worker has written nothing"

    changed_code = Workflow[Any, Any](published.fn, published.name, 1, WorkflowOptions(timeout=700.0))
    await h.engine(changed_code)
    (changed,) = await h.store.documents(KIND)
    assert changed.version != document.version
    assert decode_publication(changed.body).timeout == 700.0


@on_every_store
async def test_a_workflow_that_is_started_later_is_published_too(h, published):
    engine = await h.engine()
    before = {document.id for document in await h.store.documents(KIND, limit=1000)}
    assert "published.order@1" in before, "an engine without a list publishes all that is imported"

    @workflow(name="published.later")
    async def later(ctx: Context) -> None: ...

    await h.run_to_end(await engine.start(later))
    await h.clock.advance(60)
    await h.settle()
    assert await h.store.document(KIND, "published.later@1") is not None


@on_every_store
async def test_a_workflow_with_an_idempotency_key_needs_an_id_by_name(h):
    @workflow(name="published.keyed", idempotency_key=lambda n: f"key-{n}")
    async def keyed(ctx: Context, n: int) -> int:
        return n

    engine, client = await only_by_name(h, keyed)
    with pytest.raises(InvalidArgument, match="use id="):
        await client.start("published.keyed", n=1)
    assert (await engine.runs()).runs == ()
    assert await h.run_to_end(await client.start("published.keyed", {"n": 1}, id="own")) == 1
    assert (await engine.start(keyed, 1)).id != "own"


@on_every_store
async def test_the_published_queue_applies(h):
    emails = WorkQueue("published.emails", concurrency=1)

    @workflow(name="published.queued", queue=emails)
    async def queued(ctx: Context) -> str:
        return "sent"

    _, client = await only_by_name(h, queued)
    run = await client.start("published.queued")
    assert (await h.store.records([run.id]))[0].queue == "published.emails"
    assert await h.run_to_end(run) == "sent"
    bypassed = await client.start("published.queued", queue=None)
    assert (await h.store.records([bypassed.id]))[0].queue is None


@on_every_store
async def test_a_type_without_a_schema_is_checked_by_the_worker(h):
    @workflow(name="published.union")
    async def union(ctx: Context, /, a: Item | Order, **more: int) -> str:
        return type(a).__name__

    _, client = await only_by_name(h, union)
    document = await h.store.document(KIND, "published.union@1")
    assert document is not None
    assert decode_publication(document.body).parameters["properties"]["a"] == {}
    run = await client.start("published.union", {"a": {"$type": "Item", "sku": "x"}, "more": {"extra": 2}})
    assert await h.run_to_end(run) == "Item"


@on_every_store
async def test_a_worker_that_has_published_nothing_can_be_started_by_name(h, published):
    engine, client = await only_by_name(h, published)
    (document,) = await h.store.documents(KIND)
    delete = PutDocument(kind=KIND, id=document.id, base=document.version, body=None, write_id="x")
    await h.store.commit([delete])
    run = await client.start("published.order", {"order": GOOD})
    assert (await engine.describe(run.id)).tags == {}
    assert (await h.run_to_end(run))["id"] == "o1"
