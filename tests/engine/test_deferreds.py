"""Deferreds from outside: signed tokens, the first completion wins, and it may come at any time."""

import asyncio
import re
from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from perdure import Context, InvalidPayload, InvalidToken, RunFailed, RunNotFound, RunStatus, step, workflow
from perdure.model.ids import incarnation_of
from perdure.workflows.tokens import bind_epoch, make_token
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import STORES, another_handle, everything_in, on_every_store

TOKENS: list[str] = []


@pytest.fixture(autouse=True)
def forget():
    TOKENS.clear()


@dataclass
class Verdict:
    by: str
    stars: int


class Rejected(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@step
async def hand_out(token: str) -> None:
    TOKENS.append(token)


@workflow(name="deferreds.review")
async def review(ctx: Context) -> str:
    verdict = ctx.deferred("verdict", Verdict, raises=Rejected)
    await hand_out(verdict.token)
    try:
        given = await verdict
    except Rejected as rejected:
        return f"rejected: {rejected.reason}"
    assert isinstance(given, Verdict)
    return f"{given.stars} stars by {given.by}"


async def waiting_review(h, engine=None, id="r"):
    engine = engine or await h.engine(review)
    run = await engine.start(review, id=id)
    await h.settle()
    return engine, run


# --- values and failures


@on_every_store
async def test_deferred_delivers_a_typed_value(h):
    engine, run = await waiting_review(h)
    assert await run.status() is RunStatus.SUSPENDED
    [reason] = (await run.describe()).waiting_for
    assert (reason.kind, reason.name) == ("deferred", "verdict")
    assert await engine.complete(TOKENS[0], Verdict("ada", 5)) is True
    assert await h.run_to_end(run) == "5 stars by ada"


@on_every_store
async def test_typed_deferred_failure_is_raised_as_its_type(h):
    engine, run = await waiting_review(h)
    assert await engine.fail(TOKENS[0], Rejected("too short")) is True
    assert await h.run_to_end(run) == "rejected: too short"


@on_every_store
async def test_fail_with_a_text_fails_the_run_with_that_text(h):
    engine, run = await waiting_review(h)
    assert await engine.fail(TOKENS[0], "no time") is True
    with pytest.raises(RunFailed, match="no time"):
        await h.run_to_end(run)


@on_every_store
async def test_a_value_of_another_type_is_refused_with_the_field_and_the_deferred_stays_open(h):
    engine, run = await waiting_review(h)
    before = await everything_in(h.store, "r")
    with pytest.raises(InvalidPayload, match=r"stars"):
        await engine.complete(TOKENS[0], {"by": "ada", "stars": "many"})
    assert await everything_in(h.store, "r") == before
    assert await engine.complete(TOKENS[0], {"by": "ada", "stars": 4})
    assert await h.run_to_end(run) == "4 stars by ada"


@on_every_store
async def test_the_first_completion_wins(h):
    engine, run = await waiting_review(h)
    client = await h.client(store=another_handle(h.store, h.clock))
    answers = await asyncio.gather(
        engine.complete(TOKENS[0], Verdict("ada", 5)),
        client.complete(TOKENS[0], Verdict("bob", 1)),
        client.fail(TOKENS[0], "no"),
    )
    assert sorted(answers) == [False, False, True]
    with pytest.raises(RunFailed, match="no") if answers[2] else nullcontext():
        assert await h.run_to_end(run) == ("5 stars by ada" if answers[0] else "1 stars by bob")
    assert await engine.complete(TOKENS[0], Verdict("eve", 0)) is False
    assert await engine.fail(TOKENS[0], "late") is False


@on_every_store
async def test_deferreds_of_one_name_are_the_same(h):
    @workflow(name="deferreds.twice")
    async def twice(ctx: Context) -> list[int]:
        return [await ctx.deferred("n", int), await ctx.deferred("n", int)]

    engine = await h.engine(twice)
    run = await engine.start(twice, id="t")
    await h.settle()
    assert await engine.complete(await engine.deferred_token("t", "n"), 7)
    assert await h.run_to_end(run) == [7, 7]


# --- at any time


@on_every_store
async def test_completion_before_the_first_turn(h):
    client = await h.client()
    await client.start(review, id="r")
    assert await client.complete(await client.deferred_token("r", "verdict"), Verdict("ada", 4)) is True
    engine = await h.engine(review)
    assert await h.drive(engine.get("r").result()) == "4 stars by ada"


@on_every_store
async def test_completion_before_the_await(h):
    @workflow(name="deferreds.later")
    async def later(ctx: Context) -> str:
        verdict = ctx.deferred("verdict", Verdict)
        await ctx.sleep(100)
        return (await verdict).by

    engine = await h.engine(later)
    run = await engine.start(later, id="r")
    await h.settle()
    assert await engine.complete(await engine.deferred_token("r", "verdict"), Verdict("ada", 4))
    assert await h.run_to_end(run) == "ada"


@on_every_store
async def test_completion_while_the_run_is_being_suspended(h):
    """The completion is stored before the commit that suspends the run, which is delayed."""
    engine = await h.engine(review)
    client = await h.client(store=another_handle(h.store, h.clock))
    run = await engine.start(review, id="r")
    while not TOKENS:
        await asyncio.sleep(0)
    engine.faults.pause()
    completing = h.background(client.complete(TOKENS[0], Verdict("ada", 3)))
    while not completing.done():
        await asyncio.sleep(0.001)
    engine.faults.unblock()
    assert await h.run_to_end(run, 60.0) == "3 stars by ada"


@on_every_store
async def test_deferred_completed_without_a_worker_is_delivered_after_restart(h):
    engine, _ = await waiting_review(h)
    await h.crash(engine)
    client = await h.client(store=another_handle(h.store, h.clock))
    assert await client.complete(TOKENS[0], Verdict("ada", 2)) is True
    second = await h.engine(review, store=another_handle(h.store, h.clock))
    assert await h.drive(second.get("r").result()) == "2 stars by ada"
    assert len(TOKENS) == 1


@on_every_store
async def test_a_losing_wait_consumes_nothing(h):
    @workflow(name="deferreds.races")
    async def races(ctx: Context) -> list:
        verdict = ctx.deferred("verdict", Verdict)

        async def wait() -> Verdict:
            return await verdict

        first, _ = await ctx.race(wait=wait(), limit=ctx.sleep(10))
        return [first, (await verdict).by]

    engine = await h.engine(races)
    run = await engine.start(races, id="r")
    await h.clock.advance(20)
    await h.settle()
    await engine.complete(await engine.deferred_token("r", "verdict"), Verdict("ada", 1))
    assert await h.run_to_end(run) == ["limit", "ada"]


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_crash_at_every_commit_applies_each_completion_once(kind, tmp_path):

    @workflow(name="deferreds.several")
    async def several(ctx: Context) -> list:
        one, two = ctx.deferred("one", int), ctx.deferred("two", int)
        await hand_out(one.token)
        first = await one
        await ctx.sleep(10)
        try:
            await ctx.deferred("bad", int, raises=Rejected)
        except Rejected as rejected:
            word = rejected.reason
        return [first, await two, word]

    async def settle(engine):
        tokens = {name: await engine.deferred_token("crash-everywhere", name) for name in ("one", "two", "bad")}
        await engine.complete(tokens["two"], 2)
        await engine.complete(tokens["one"], 1)
        await engine.fail(tokens["bad"], Rejected("no"))
        assert await engine.complete(tokens["one"], 100) is False

    report = crash_on(kind, tmp_path, several, drive=settle)
    assert report.outcome == ("returned", [1, 2, "no"])


# --- tokens


@on_every_store
async def test_tokens_are_url_safe_and_computable(h):
    engine, _ = await waiting_review(h)
    assert re.fullmatch(r"[A-Za-z0-9_.~-]+", TOKENS[0])
    assert await engine.deferred_token("r", "verdict") == TOKENS[0]
    assert await engine.deferred_token("r", "other") != TOKENS[0]
    with pytest.raises(RunNotFound):
        await engine.deferred_token("unknown", "verdict")


@on_every_store
async def test_invalid_token_is_refused_and_changes_nothing(h):
    engine, _ = await waiting_review(h)
    token = TOKENS[0]
    keys = await h.store.keys("deferred", h.clock.now())
    other = type(keys[0])(keys[0].number, keys[0].created_at, b"another secret of another store!")
    before = await everything_in(h.store, "r")
    flipped = [token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :] for at in range(0, len(token), 5)]
    unknown = make_token(keys, "never started", 0, "verdict", at=h.clock.now())
    foreign = make_token([other], "r", 0, "verdict", at=h.clock.now())
    for bad in [*flipped, token[:-1], token + "x", "", "nonsense", "é", "x" * 100_000, foreign, unknown]:
        with pytest.raises(InvalidToken):
            await engine.complete(bad, Verdict("eve", 0))
        with pytest.raises(InvalidToken):
            await engine.fail(bad, "no")
    assert await everything_in(h.store, "r") == before


@on_every_store
async def test_key_rotation_keeps_old_tokens_valid_and_signs_new_ones(h):
    engine, run = await waiting_review(h)
    await engine.rotate_keys()
    await h.clock.advance(300)
    await h.settle()
    _, second = await waiting_review(h, engine, id="s")
    assert TOKENS[0] == await engine.deferred_token("r", "verdict"), "a run keeps its token"
    keys = await h.store.keys("deferred", h.clock.now())
    assert len(keys) == 2
    (record,) = await h.store.records(["s"])
    epoch = bind_epoch(0, incarnation_of(record.created_by))
    assert TOKENS[1] == make_token([keys[1]], "s", epoch, "verdict", at=h.clock.now())
    await h.crash(engine)
    other = await h.engine(review, store=another_handle(h.store, h.clock))
    for token in TOKENS[:2]:
        assert await other.complete(token, Verdict("ada", 5)) is True
    assert await h.drive(other.get(run.id).result()) == await h.drive(other.get(second.id).result())
    assert len(TOKENS) == 2


@on_every_store
async def test_a_token_belongs_to_one_generation_of_continuation(h):
    @workflow(name="deferreds.goes-on")
    async def goes_on(ctx: Context, again: bool) -> int:
        wanted = ctx.deferred("n", int)
        await hand_out(wanted.token)
        if again:
            await ctx.sleep(100)
            await ctx.continue_as(False)
        return await wanted

    engine = await h.engine(goes_on)
    run = await engine.start(goes_on, True, id="g")
    await h.settle()
    assert await engine.complete(TOKENS[0], 1), "for the first generation, which does not come to it"
    await h.clock.advance(101)
    await h.settle()
    assert TOKENS[0] != TOKENS[1]
    assert await engine.complete(TOKENS[0], 2) is False
    assert await engine.complete(TOKENS[1], 3) is True
    assert await h.run_to_end(run) == 3


@on_every_store
async def test_ended_run_accepts_no_event(h):
    engine, run = await waiting_review(h)
    await engine.terminate("r")
    assert await engine.complete(TOKENS[0], Verdict("ada", 5)) is False
    assert await run.status() is RunStatus.CANCELLED
