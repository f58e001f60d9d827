"""Start runs: ids, identity, payloads, options."""

import asyncio
import gc
import uuid
from dataclasses import dataclass
from datetime import timedelta

import pytest

from perdure import Context, InvalidPayload, RunConflict, RunStatus, StoreError, WorkflowMisuse, step, workflow
from perdure.model.ids import keyed_run_id, new_run_id
from perdure.stores.writes import CreateRun
from tests.engine.store_matrix import another_handle, on_every_store


@dataclass
class Order:
    id: str
    cents: int


CALLS: list[str] = []


@step
async def note(what: str) -> str:
    CALLS.append(what)
    return what


@workflow
async def order(ctx: Context, order: Order, gift: bool = False) -> str:
    return await note(f"{order.id}/{gift}")


@workflow
async def other(ctx: Context, order: Order, gift: bool = False) -> str:
    return await note("other")


@workflow(idempotency_key=lambda order: order.id)
async def keyed(ctx: Context, order: Order) -> str:
    return await note(order.id)


GATES: list[asyncio.Event] = []  # one for each test, as it belongs to its loop


@step
async def pass_gate(n: int) -> int:
    await GATES[-1].wait()
    return n


@workflow
async def gated(ctx: Context, n: int) -> int:
    return await pass_gate(n)


@workflow
async def waits_for_gate(ctx: Context) -> str:
    await ctx.receive("go")
    return "passed"


@pytest.fixture(autouse=True)
def forget_calls():
    CALLS.clear()


@on_every_store
async def test_new_run_gets_a_time_ordered_id(h):
    engine = await h.engine(order)
    first = await engine.start(order, Order("a", 1))
    await h.clock.advance(0.01)
    second = await engine.start(order, Order("a", 1))
    assert first.created
    assert second.created
    assert first.id < second.id


def test_new_id_is_a_uuid_of_version_7():
    ids = [uuid.UUID(new_run_id(1.7e9)) for _ in range(100)]
    assert {(id.version, id.variant, id.int >> 80) for id in ids} == {(7, uuid.RFC_4122, 1_700_000_000_000)}
    assert len(set(ids)) == 100
    assert [new_run_id(now)[:13] for now in (0.0, 2.0**40)] == ["00000000-0000", "e8000000-0000"]


@on_every_store
async def test_starts_with_the_same_id_and_payload_observe_one_run(h):
    engine = await h.engine(order)
    first = await engine.start(order, Order("a", 1), id="o")
    again = await engine.start(order, Order("a", 1), id="o")
    assert (first.created, again.created) == (True, False)
    assert await h.run_to_end(again) == "a/False"
    late = await engine.start(order, Order("a", 1), id="o")
    assert not late.created
    assert await late.result() == "a/False"
    assert CALLS == ["a/False"]


@on_every_store
async def test_concurrent_starts_across_engines_create_one_run(h):
    one = await h.engine(order)
    two = await h.engine(order, store=another_handle(h.store, h.clock))
    client = await h.client()
    runs = await h.drive(
        asyncio.gather(*(each.start(order, Order("a", 1), id="o") for each in (one, two, client) for _ in range(5)))
    )
    assert sum(run.created for run in runs) == 1
    assert await h.drive(asyncio.gather(*(run.result() for run in runs))) == ["a/False"] * 15
    assert CALLS == ["a/False"]


@on_every_store
async def test_execute_starts_or_observes_and_returns_the_result(h):
    engine = await h.engine(order)
    both = asyncio.gather(engine.execute(order, Order("a", 1), id="o"), engine.execute(order, Order("a", 1), id="o"))
    assert await h.drive(both) == ["a/False", "a/False"]
    assert CALLS == ["a/False"]


@on_every_store
async def test_execute_observes_a_run_that_has_ended_or_waits_here(h):
    engine = await h.engine(order, waits_for_gate)
    assert await h.drive(engine.execute(order, Order("a", 1), id="o")) == "a/False"
    assert await h.drive(engine.execute(order, Order("a", 1), id="o"), within=1) == "a/False"
    first = await engine.start(waits_for_gate, id="p")
    second = h.background(engine.execute(waits_for_gate, id="p"))
    await h.settle()
    await engine.send("p", "go")
    assert [await h.run_to_end(first), await h.drive(second)] == ["passed", "passed"]
    assert CALLS == ["a/False"]


@on_every_store
async def test_execute_with_another_payload_raises_run_conflict(h):
    engine = await h.engine(order)
    await h.drive(engine.execute(order, Order("a", 1), id="o"))
    with pytest.raises(RunConflict, match=r"'o' already exists with another payload"):
        await h.drive(engine.execute(order, Order("a", 2), id="o"), within=1)


@on_every_store
async def test_execute_does_not_return_the_result_of_another_run_with_its_id(h):
    engine = await h.engine(gated)
    GATES.append(asyncio.Event())
    first = await engine.start(gated, 1, id="g")
    await h.settle()
    engine.faults.pause()
    GATES[-1].set()
    await h.settle()  # the commit that ends it is in flight
    again = h.background(asyncio.gather(*(engine.execute(gated, n, id="g") for n in (1, 2)), return_exceptions=True))
    await h.settle()
    engine.faults.unblock()
    assert await h.run_to_end(first) == 1
    same, conflict = await h.drive(again)
    assert same == 1
    assert isinstance(conflict, RunConflict)


@on_every_store
async def test_execute_raises_the_error_of_the_store(h):
    engine = await h.engine(order)
    engine.faults.refuse(lambda write: isinstance(write, CreateRun))
    with pytest.raises(StoreError, match="planned"):
        await h.drive(engine.execute(order, Order("a", 1)), within=1)
    assert (await engine.runs()).runs == ()


@on_every_store
async def test_cancelled_execute_logs_no_unretrieved_store_error(h, caplog):
    engine = await h.engine(order)
    engine.faults.pause()
    engine.faults.refuse(lambda write: isinstance(write, CreateRun))
    waiting = h.background(engine.execute(order, Order("a", 1)))
    await h.settle()
    waiting.cancel()
    await h.settle()
    engine.faults.unblock()
    await h.settle()
    del waiting
    gc.collect()
    assert "never retrieved" not in caplog.text


@on_every_store
async def test_start_with_another_payload_or_workflow_raises_run_conflict(h):
    engine = await h.engine(order, other)
    await engine.start(order, Order("a", 1), id="o")
    with pytest.raises(RunConflict, match=r"'o' already exists with another payload"):
        await engine.start(order, Order("a", 2), id="o")
    with pytest.raises(RunConflict, match="another workflow"):
        await engine.start(other, Order("a", 1), id="o")
    await h.settle()
    assert CALLS == ["a/False"]


@on_every_store
async def test_payloads_are_compared_as_values_and_options_are_ignored(h):
    engine = await h.engine(order)
    await engine.start(order, Order("a", 1), id="o", tags={"x": "1"})
    again = await engine.start(order.options(id="o", tags={"x": "2"}, delay=5), Order(cents=1, id="a"), gift=False)
    assert not again.created
    assert (await again.describe()).tags == {"x": "1"}


@on_every_store
async def test_keyword_arguments_are_passed_through_options(h):
    engine = await h.engine(order)
    run = await engine.start(order.options(id="kw"), Order("a", 1), gift=True)
    assert await h.run_to_end(run) == "a/True"
    assert run.id == "kw"


@on_every_store
async def test_run_id_contains_a_readable_idempotency_key(h):
    engine = await h.engine(keyed)
    run = await engine.start(keyed, Order("42", 1))
    assert run.id == "keyed:42"
    again = await engine.start(keyed, Order("42", 1))
    assert not again.created
    with pytest.raises(RunConflict):
        await engine.start(keyed, Order("42", 2))


@pytest.mark.parametrize("key", ["x" * 300, "tab\there", "", "line\nbreak", "\ud800"])
@on_every_store
async def test_run_id_contains_the_hash_of_an_unreadable_idempotency_key(h, key):
    @workflow(name="hashed", idempotency_key=lambda n: key)
    async def hashed(ctx: Context, n: int) -> int:
        return n

    engine = await h.engine(hashed)
    run = await engine.start(hashed, 1)
    assert run.id.startswith("hashed:")
    assert run.id.isprintable()
    assert len(run.id) < 60
    assert (await engine.start(hashed, 1)).id == run.id


@on_every_store
async def test_idempotency_key_must_be_a_string(h):
    @workflow(name="badly_keyed", idempotency_key=lambda n: n)
    async def badly_keyed(ctx: Context, n: int) -> int:
        return n

    engine = await h.engine(badly_keyed)
    with pytest.raises(ValueError, match="must return a string"):
        await engine.start(badly_keyed, 1)
    assert engine.faults.commits == 0


@on_every_store
async def test_invalid_payload_is_refused_with_its_path_and_nothing_is_stored(h):
    engine = await h.engine(order)
    with pytest.raises(InvalidPayload, match="cents"):
        await engine.start(order, Order("a", "much"), id="bad")  # type: ignore[arg-type]
    with pytest.raises(InvalidPayload, match="order"):
        await engine.start(order, id="bad")
    with pytest.raises(InvalidPayload):
        await engine.start(order, Order("a", 1), True, "extra", id="bad")
    assert engine.faults.commits == 0
    assert await engine.status("bad") is None
    assert (await engine.runs()).runs == ()


@on_every_store
async def test_unknown_start_option_is_refused(h):
    engine = await h.engine(order)
    with pytest.raises(WorkflowMisuse, match="no option colour"):
        await engine.start(order, Order("a", 1), colour="red")
    with pytest.raises(InvalidPayload, match="id"):
        await engine.start(order.options(id="x"), Order("a", 1), id="y")
    with pytest.raises(WorkflowMisuse, match="@workflow"):
        await engine.start(note, "x")
    assert engine.faults.commits == 0


@on_every_store
async def test_start_by_name(h):
    engine = await h.engine(order)
    run = await engine.start("order", Order("a", 1), id="by-name")
    assert await h.run_to_end(run) == "a/False"
    with pytest.raises(WorkflowMisuse, match="no workflow named 'nonesuch'"):
        await engine.start("nonesuch", 1)


@on_every_store
async def test_delayed_run_starts_after_its_delay(h):
    engine = await h.engine(order)
    run = await engine.start(order, Order("a", 1), id="later", delay=timedelta(minutes=1))
    assert await run.status() is RunStatus.PENDING
    await h.clock.advance(59)
    assert CALLS == []
    (reason,) = (await run.describe()).waiting_for
    assert reason.kind == "start"
    await h.clock.advance(1.1)
    assert CALLS == ["a/False"]
    assert await run.result() == "a/False"


@on_every_store
async def test_tags_of_workflow_and_start_are_merged(h):
    @workflow(tags={"team": "shop", "kind": "x"})
    async def tagged(ctx: Context) -> dict[str, object]:
        return dict(ctx.tags)

    engine = await h.engine(tagged)
    run = await engine.start(tagged, tags={"kind": "y"})
    assert await h.run_to_end(run) == {"team": "shop", "kind": "y"}


@on_every_store
async def test_run_waits_for_a_worker_if_the_engine_does_not_have_its_workflow(h):
    engine = await h.engine(other)
    run = await engine.start(order, Order("a", 1), id="o")
    await h.clock.advance(60)
    assert await run.status() is RunStatus.PENDING
    (reason,) = (await run.describe()).waiting_for
    assert reason.kind == "no_worker"
    assert "order v1" in str(reason)
    await h.engine(order)
    assert await h.run_to_end(run) == "a/False"


@on_every_store
async def test_worker_executes_a_run_that_a_client_starts(h):
    client = await h.client()
    run = await client.start(order, Order("a", 1))
    await h.clock.advance(60)
    assert CALLS == []
    await h.engine(order)
    assert await h.run_to_end(run) == "a/False"


@on_every_store
async def test_run_id_is_taken_until_the_run_is_pruned(h):
    engine = await h.engine(order)
    run = await engine.start(order, Order("a", 1), id="o", retention=100)
    await h.run_to_end(run)
    await h.clock.advance(50)
    assert not (await engine.start(order, Order("a", 1), id="o")).created
    await h.clock.advance(200)
    assert await engine.status("o") is None
    assert (await engine.start(order, Order("b", 9), id="o")).created


def test_ids_of_idempotency_keys_are_unique_per_workflow():
    assert keyed_run_id("a:b", "c") != keyed_run_id("a", "b:c")
    assert keyed_run_id("a", "") != keyed_run_id("b", "")
