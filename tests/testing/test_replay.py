"""replay: a recorded history against changed code, without executing anything."""

import asyncio
import json
from datetime import timedelta

import pytest

from perdure import Context, HistoryDiverged, WorkflowMisuse, event, step, workflow
from perdure.errors import InvalidArgument
from perdure.testing import TestEngine, replay
from tests.testing.async_runner import with_engine

EXECUTED: list[str] = []


@event
class ReplayPaid:
    cents: int


@step
async def replay_reserve(item: str) -> str:
    EXECUTED.append(item)
    return f"{item} reserved"


@step
async def replay_ship(item: str) -> str:
    EXECUTED.append(item)
    return f"{item} shipped"


@workflow(name="replay.order")
async def order(ctx: Context, item: str) -> str:
    await replay_reserve(item)
    await ctx.receive(ReplayPaid, timeout=timedelta(days=1))
    await ctx.join(a=replay_ship(item), b=ctx.sleep(3600))
    return item


def recorded(*, ended: bool) -> dict[str, object]:
    async def main() -> dict[str, object]:
        async with TestEngine() as engine:
            run = await engine.start(order, "lamp")
            await engine.settle()
            if ended:
                await run.send(ReplayPaid(5))
                await run.result()
            return await engine.export_history(run.id)

    return asyncio.run(main())


@pytest.fixture(params=[True, False], ids=["ended", "in the middle"])
def history(request):
    found = recorded(ended=request.param)
    EXECUTED.clear()
    yield found
    assert EXECUTED == [], "nothing is executed"


def test_recorded_code_replays_from_every_export_form(history, tmp_path):
    text = json.dumps(history)
    file = tmp_path / "order.json"
    file.write_text(text)
    for form in (history, text, text.encode(), file):
        replay(form, order)


def test_crash_everywhere_works_in_an_async_test(history):
    async def main() -> None:
        replay(history, order)
        with pytest.raises(HistoryDiverged):
            replay(history, hasty())

    asyncio.run(main())


def hasty():
    @workflow(name="replay.order")
    async def order_without_reserving(ctx: Context, item: str) -> str:
        await ctx.receive(ReplayPaid, timeout=timedelta(days=1))
        return await replay_ship(item)

    return order_without_reserving


def test_changed_order_is_divergence_with_location_and_line(history):
    with pytest.raises(HistoryDiverged) as diverged:
        replay(history, hasty())
    error = diverged.value
    assert (error.location, error.recorded) == ("ReplayPaid", "step 'replay_reserve'")
    assert error.line is not None
    assert "test_replay.py" in error.line
    assert error.line.endswith("in order_without_reserving")
    assert any("replay.order v1" in note for note in error.__notes__)
    assert 'ctx.removed("replay_reserve")' in error.__notes__[-1]


def test_changed_arguments_are_divergence(history):
    @workflow(name="replay.order")
    async def louder(ctx: Context, item: str) -> str:
        await replay_reserve(item.upper())
        return item

    with pytest.raises(HistoryDiverged, match="other arguments"):
        replay(history, louder)


def test_missing_entry_at_the_end_is_divergence_with_the_workflow_line():
    @workflow(name="replay.order")
    async def short(ctx: Context, item: str) -> str:
        await replay_reserve(item)
        return item

    with pytest.raises(HistoryDiverged, match=r"test_replay.py:\d+ in short"):
        replay(recorded(ended=True), short)


def test_request_past_the_end_of_the_history_is_new(history):
    @workflow(name="replay.order")
    async def longer(ctx: Context, item: str) -> str:
        await order(ctx, item)
        await replay_ship("another")
        return item

    replay(history, longer)


def test_change_behind_a_version_gate_is_compatible(history):
    @workflow(name="replay.order")
    async def guarded(ctx: Context, item: str) -> str:
        if ctx.version("check", latest=2) >= 2:
            await replay_ship("before all")
        return await order(ctx, item)

    replay(history, guarded)


def test_changed_payload_type_is_divergence_with_the_field(history):
    @workflow(name="replay.order")
    async def wants_more(ctx: Context, item: str, colour: str) -> str:
        return item

    with pytest.raises(HistoryDiverged) as diverged:
        replay(history, wants_more)
    assert "colour" in diverged.value.__notes__[0]


def test_spinning_workflow_is_reported_with_the_reason(history):
    @workflow(name="replay.order")
    async def spins(ctx: Context, item: str) -> str:
        await replay_reserve(item)
        while True:
            await asyncio.sleep(0)

    with pytest.raises((WorkflowMisuse, HistoryDiverged), match=r"spin|replay"):
        replay(history, spins)


def test_another_workflow_or_version_is_refused(history):
    @workflow(name="replay.order", version=2)
    async def second(ctx: Context, item: str) -> str:
        return item

    with pytest.raises(InvalidArgument, match="a run keeps its workflow and version"):
        replay(history, second)


@pytest.mark.parametrize("junk", ["order.json", b"\xff", "{}", {"perdure": 1}])
def test_invalid_history_is_refused(junk):
    with pytest.raises(InvalidArgument, match="exported run"):
        replay(junk, order)


# --- tokens, which only the store can sign


@step
async def replay_mail(token: str, word: str) -> None:
    pass


@workflow(name="replay.review")
async def review(ctx: Context) -> str:
    decision = ctx.deferred("review", str)
    await replay_mail(decision.token, "please")
    return await decision


@with_engine
async def test_token_as_an_argument_does_not_diverge(engine):
    run = await engine.start(review)
    await engine.settle()
    history = await engine.export_history(run.id)
    replay(history, review)

    @workflow(name="replay.review")
    async def changed(ctx: Context) -> str:
        decision = ctx.deferred("review", str)
        await replay_mail.options(name="other")(decision.token, "please")
        return await decision

    with pytest.raises(HistoryDiverged, match="other"):
        replay(history, changed)
