"""A completion of the wrong type ends no run: it is refused, or it becomes a dead letter and the next one wins."""

import asyncio
from dataclasses import dataclass

import pytest

from perdure import Context, InvalidPayload, RunStatus, WorkflowMisuse, step, workflow
from perdure.clock import sleep_on
from perdure.workflows import deferreds
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import STORES, another_handle, everything_in, on_every_store

BAD, GOOD = {"by": "ada", "stars": "many"}, {"by": "ada", "stars": 5}


@dataclass
class Verdict:
    by: str
    stars: int


@step
async def prepare() -> None:
    pass


@workflow(name="rejected.review")
async def review(ctx: Context) -> str:
    verdict = ctx.deferred("verdict", Verdict)
    await prepare()
    given = await verdict
    return f"{given.stars} stars by {given.by}"


@pytest.fixture
def another_process(monkeypatch):
    """Let callers know as little about the types as a process that does not execute the runs."""
    monkeypatch.setattr(deferreds.DeclaredTypes, "find", lambda *key: ())


async def waiting(h, *, store=None):
    engine = await h.engine(review, store=store)
    run = await engine.start(review, id="r")
    await h.settle()
    return engine, run, await engine.deferred_token("r", "verdict")


async def rejected(h, engine):
    """Wait for the first dead letter."""
    while not await engine.dead_letters(kind="misfit"):
        await sleep_on(h.clock, 1.0)


@on_every_store
async def test_process_that_knows_the_type_refuses_the_value(h):
    engine, run, token = await waiting(h)
    client = await h.client(store=another_handle(h.store, h.clock))
    before = await everything_in(h.store, "r")
    for caller in (engine, client):
        with pytest.raises(InvalidPayload, match=r"deferred 'verdict'.*stars"):
            await caller.complete(token, BAD)
    assert await everything_in(h.store, "r") == before
    assert await engine.dead_letters() == []
    assert await client.complete(token, GOOD) is True
    assert await h.run_to_end(run) == "5 stars by ada"


@on_every_store
async def test_type_of_a_run_in_another_store_is_not_used(h):
    @workflow(name="rejected.review")
    async def other(ctx: Context) -> int:
        return await ctx.deferred("verdict", int)

    async with type(h)(clock=h.clock) as elsewhere:
        engine = await elsewhere.engine(other)
        await engine.start(other, id="r")
        await elsewhere.settle()
    client = await h.client()
    await client.start(review, id="r")
    token = await client.deferred_token("r", "verdict")
    assert await client.complete(token, GOOD) is True
    engine = await h.engine(review)
    assert await h.drive(engine.get("r").result()) == "5 stars by ada"


@on_every_store
async def test_run_rejects_the_value_and_waits_for_the_next_one(h, another_process):
    engine, run, token = await waiting(h)
    assert await engine.complete(token, BAD) is True
    await h.settle()
    assert await run.status() is RunStatus.SUSPENDED
    [reason] = (await run.describe()).waiting_for
    assert (reason.kind, reason.name) == ("deferred", "verdict")
    [letter] = await engine.dead_letters(kind="misfit")
    assert (letter.event_name, letter.value, letter.original_target) == ("verdict", BAD, "r")
    assert "stars" in letter.reason
    with pytest.raises(WorkflowMisuse, match="no event to replay"):
        await engine.replay_dead_letter(letter.id)
    assert await engine.complete(token, 17) is True
    await h.settle()
    assert len(await engine.dead_letters(kind="misfit")) == 2
    assert await engine.complete(token, GOOD) is True
    assert await engine.complete(token, {"by": "bob", "stars": 1}) is False
    assert await h.run_to_end(run) == "5 stars by ada"
    assert await engine.complete(token, GOOD) is False
    assert await engine.remove_dead_letter(letter.id) is True


@on_every_store
async def test_value_before_the_first_turn_is_rejected_by_the_first_turn(h):
    client = await h.client()
    await client.start(review, id="r")
    token = await client.deferred_token("r", "verdict")
    assert await client.complete(token, BAD) is True
    engine = await h.engine(review)
    await h.settle()
    assert await engine.status("r") is RunStatus.SUSPENDED
    assert [each.value for each in await engine.dead_letters()] == [BAD]
    assert await client.complete(token, GOOD) is True
    assert await h.drive(engine.get("r").result()) == "5 stars by ada"


@on_every_store
async def test_fitting_value_behind_one_that_the_run_has_not_checked_wins(h):
    """The run has not started: the later values are kept in case the first one does not fit."""
    client = await h.client()
    await client.start(review, id="r")
    token = await client.deferred_token("r", "verdict")
    assert await client.complete(token, BAD) is True
    assert await client.complete(token, 17) is False
    assert await client.complete(token, GOOD) is False
    assert await client.complete(token, GOOD) is False
    assert await client.complete(token, {"by": "bob", "stars": 1}) is False
    engine = await h.engine(review)
    assert await h.drive(engine.get("r").result()) == "5 stars by ada"
    assert [each.value for each in await engine.dead_letters(kind="misfit")] == [BAD, 17]
    assert await client.complete(token, GOOD) is False
    assert await h.store.inbox("r") == []


@on_every_store
async def test_failure_behind_a_value_that_does_not_fit_wins(h):
    @workflow(name="rejected.failing")
    async def failing(ctx: Context) -> str:
        try:
            return (await ctx.deferred("verdict", Verdict)).by
        except ValueError as error:
            return str(error)

    client = await h.client()
    await client.start(failing, id="r")
    token = await client.deferred_token("r", "verdict")
    assert await client.complete(token, BAD) is True
    assert await client.fail(token, ValueError("no time")) is False
    engine = await h.engine(failing)
    assert await h.drive(engine.get("r").result()) == "no time"


@on_every_store
async def test_fallbacks_are_bounded(h, monkeypatch):
    monkeypatch.setattr("perdure.client.deferreds.MAX_FALLBACKS", 3)
    client = await h.client()
    await client.start(review, id="r")
    token = await client.deferred_token("r", "verdict")
    for number in range(9):
        assert await client.complete(token, number) is (number == 0)
    assert len(await h.store.inbox("r")) == 4


@on_every_store
async def test_rejected_value_after_a_crash_is_a_dead_letter_once(h, another_process):
    engine, _, token = await waiting(h)
    client = await h.client(store=another_handle(h.store, h.clock))
    await h.crash(engine)
    assert await client.complete(token, BAD) is True
    second = await h.engine(review, store=another_handle(h.store, h.clock))
    await h.drive(rejected(h, second))
    await h.crash(second)
    third = await h.engine(review, store=another_handle(h.store, h.clock))
    await h.clock.advance(60)
    await h.settle()
    assert len(await third.dead_letters(kind="misfit")) == 1
    assert await client.complete(token, GOOD) is True
    assert await h.drive(third.get("r").result()) == "5 stars by ada"


@on_every_store
async def test_one_of_many_concurrent_completions_wins(h, another_process):
    engine, run, token = await waiting(h)
    client = await h.client(store=another_handle(h.store, h.clock))
    values = [BAD, {"by": "bob", "stars": 1}, 3, GOOD, BAD]
    results = await asyncio.gather(
        *(caller.complete(token, value) for value in values for caller in (engine, client)), return_exceptions=True
    )
    assert all(isinstance(each, bool) for each in results)
    await h.settle()
    if await run.status() is RunStatus.SUSPENDED:  # only completions that do not fit were stored
        assert await engine.complete(token, GOOD) is True
    assert await h.run_to_end(run) in ("5 stars by ada", "1 stars by bob")
    assert await engine.complete(token, GOOD) is False


@on_every_store
async def test_rewind_keeps_a_value_and_no_rejected_one(h, another_process):
    engine, run, token = await waiting(h)
    assert await engine.complete(token, BAD) is True
    await h.settle()
    assert await engine.complete(token, GOOD) is True
    assert await h.run_to_end(run) == "5 stars by ada"
    await engine.rewind("r", "verdict")
    assert await h.run_to_end(run) == "5 stars by ada"
    fork = await engine.fork("r", "verdict")
    assert await h.run_to_end(fork) == "5 stars by ada"
    assert len(await engine.dead_letters(kind="misfit")) == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_crash_at_every_commit_with_values_that_do_not_fit(kind, tmp_path, another_process):
    @workflow(name="rejected.several")
    async def several(ctx: Context) -> list[int]:
        await prepare()
        one, two = ctx.deferred("one", Verdict), ctx.deferred("two", Verdict)
        await ctx.sleep(5)
        return [(await one).stars, (await two).stars]

    async def send(engine):
        for name in ("one", "two"):
            token = await engine.deferred_token("crash-everywhere", name)
            await engine.complete(token, BAD)
            await engine.complete(token, [])
            await engine.complete(token, GOOD)

    report = crash_on(kind, tmp_path, several, drive=send)
    assert report.outcome == ("returned", [5, 5])
