"""Two definitions of one workflow name and version: an error where one must be chosen, and never silently unserved."""

import asyncio
import logging

import pytest

from perdure import RunStatus, Worker, WorkflowMisuse
from perdure.workflows.definition import REGISTRY
from tests.engine.store_matrix import on_every_store
from tests.engine.test_registry import defined_in


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_definitions", {})


def unserved(caplog) -> list[logging.LogRecord]:
    return [each for each in caplog.records if "cannot be executed here" in each.getMessage()]


@on_every_store
async def test_run_that_needs_one_of_two_definitions_is_logged_once_when_it_is_due(h, caplog):
    one = defined_in("shop.orders", "one")
    defined_in("shop.returns", "two")
    engine = await h.engine()
    client = await h.client()
    run = await client.start(one, id="t")
    await h.clock.advance(60)
    assert await run.status() is RunStatus.PENDING
    (record,) = unserved(caplog)
    assert record.levelno == logging.ERROR
    assert "shop.orders.twice and shop.returns.twice" in record.getMessage()
    assert (vars(record)["run_id"], vars(record)["workflow"]) == ("t", "twice")
    assert await h.run_to_end(await engine.start(one, id="t")) == "one"  # named by the object


@on_every_store
async def test_engine_opens_if_the_run_has_ended_or_belongs_to_another_pool(h):
    one = defined_in("shop.orders", "one")
    engine = await h.engine(one)
    await h.run_to_end(await engine.start(one))
    await engine.start(one, id="open")
    await h.settle()
    defined_in("shop.returns", "two")
    await h.engine(pool="other")
    with pytest.raises(WorkflowMisuse, match="run 'open' needs it"):
        await h.engine()
    await h.run_to_end(engine.get("open"))
    await h.engine()


def test_worker_without_a_list_refuses_two_definitions():
    defined_in("shop.orders", "one")
    defined_in("shop.returns", "two")

    async def main() -> None:
        async with Worker("memory://"):
            pass

    with pytest.raises(WorkflowMisuse, match=r"shop.orders.twice and shop.returns.twice; name one"):
        asyncio.run(main())
    with pytest.raises(WorkflowMisuse, match=r"shop.orders.twice and shop.returns.twice"):
        asyncio.run(Worker("memory://").run())


def test_worker_with_a_list_refuses_two_definitions_by_their_modules():
    one, two = defined_in("shop.orders", "one"), defined_in("shop.returns", "two")
    with pytest.raises(WorkflowMisuse, match=r"in the list twice: shop.orders.twice and shop.returns.twice"):
        Worker("memory://", [one, two])
