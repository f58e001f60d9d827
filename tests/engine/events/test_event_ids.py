"""An event keeps its id on every path, and no id that a user chooses collides with an internal one."""

from typing import Any

from perdure import Context, EngineConfig, RunStatus, event, workflow
from tests.engine.store_matrix import on_every_store

LONG = EngineConfig(sweep_interval=1000.0, lease=5000.0)  # nothing in these tests is found by a sweep


@event(on_target_terminated="dead_letter")
class Named:
    n: int


@event(on_target_terminated="broadcast")
class Passed:
    n: int


@workflow
async def identity_reader(ctx: Context, *names: str) -> list[Any]:
    """The ids and values of one event of each of these names."""
    asked = [await ctx.receive_request(name) for name in names]
    return [(each.event_id, each.value) for each in asked]


@workflow
async def identity_typed(ctx: Context) -> int:
    named: Named = await ctx.receive(Named)
    return named.n


@workflow
async def identity_target(ctx: Context) -> None:
    await ctx.receive("end")


@on_every_store
async def test_receiver_sees_the_senders_event_id_for_mailbox_and_topic(h):
    engine = await h.engine(identity_reader, config=LONG)
    run = await engine.start(identity_reader, "a", "b", "c")
    await h.settle()
    await engine.send(run.id, "a", 1, event_id="has_messages")
    await h.settle()
    await engine.emit("b", 2, event_id="emitted")
    await h.settle()
    await engine.emit("c", 3)
    (a, b, c) = await h.run_to_end(run)
    assert (a, b) == (["has_messages", 1], ["emitted", 2])
    assert c[0]
    assert not c[0].startswith(("topic/", "event/"))


@on_every_store
async def test_topic_event_of_the_wrong_type_becomes_a_dead_letter_with_its_own_id(h):
    engine = await h.engine(identity_typed, config=LONG)
    run = await engine.start(identity_typed)
    await h.settle()
    await engine.emit("Named", "no object", event_id="misfit-7")
    await h.settle()
    (letter,) = await engine.dead_letters(Named)
    assert (letter.event_id, letter.original_target) == ("misfit-7", run.id)
    assert await run.status() is RunStatus.SUSPENDED


@on_every_store
async def test_an_event_keeps_its_id_through_a_dead_letter_and_its_replay(h):
    engine = await h.engine(identity_target, identity_reader, config=LONG)
    first = await engine.start(identity_target, id="first")
    await first.send(Named(1), event_id="paid-7")
    await first.send("end")
    await h.settle()
    second = await engine.start(identity_target, id="second")
    for to in ("second", None):
        (letter,) = await engine.dead_letters()
        assert letter.event_id == "paid-7"
        assert await engine.replay_dead_letter(letter.id, to=to)
        if to is not None:
            await second.send("end")
            await h.settle()
    assert await h.run_to_end(await engine.start(identity_reader, "Named")) == [["paid-7", {"n": 1}]]


@on_every_store
async def test_an_event_that_moves_to_its_topic_keeps_its_id(h):
    engine = await h.engine(identity_target, identity_reader, config=LONG)
    run = await engine.start(identity_target)
    await run.send(Passed(1), event_id="paid-7")
    await run.send("end")
    await h.settle()
    assert await h.run_to_end(await engine.start(identity_reader, "Passed")) == [["paid-7", {"n": 1}]]


@on_every_store
async def test_reply_is_found_by_request_id_although_a_topic_event_has_the_same_id(h):
    @workflow
    async def identity_answers(ctx: Context) -> None:
        for _ in range(2):
            asked = await ctx.receive_request("question")
            await asked.reply(f"about {asked.value}")

    engine = await h.engine(identity_answers, config=LONG)
    run = await engine.start(identity_answers)
    await h.settle()
    await engine.emit("question", "the topic's", event_id="q")
    await h.settle()
    asking = h.background(engine.request(run.id, "question", 60, payload="mine", event_id="q"))
    await h.run_to_end(run)
    assert await asking == "about mine"


INTERNAL = (
    "cancel/r",
    "resume/r",
    "deferred/0/review",
    "child/c/0/0/child",
    "topic/news/1",
    "undelivered/r/1/1.0",
    "letter/r",
    "sent/r/0/news",
    "event/r",
)


@on_every_store
async def test_ids_that_look_internal_are_ordinary_ids(h):
    """An event of a user is never treated as a duplicate of an internal one, and never suppresses one."""

    @workflow
    async def identity_crowded(ctx: Context) -> list[Any]:
        has_messages = [await ctx.receive("mail") for _ in INTERNAL]
        await ctx.send(ctx.run_id, "own", "sent")
        own = await ctx.receive("own")
        news = [await ctx.receive("news") for _ in range(len(INTERNAL) + 1)]
        review = await ctx.deferred("review", str)
        return [has_messages, own, news, review]

    engine = await h.engine(identity_crowded, config=LONG)
    run = await engine.start(identity_crowded, id="r")
    await h.settle()
    for each in INTERNAL:
        await run.send("mail", each, event_id=each)
        await engine.emit("news", each, event_id=each)
    for each in ("sent/r/0/own", "r/0/own"):  # the internal id of the workflow's own send
        await run.send("unread", event_id=each)
    await engine.emit("news", "last")
    assert await engine.complete(await engine.deferred_token("r", "review"), "reviewed") is True
    has_messages, own, news, review = await h.run_to_end(run)
    assert (has_messages, own, review) == ([*INTERNAL], "sent", "reviewed")
    assert news == [*INTERNAL, "last"]


@on_every_store
async def test_event_id_like_a_cancel_id_does_not_block_cancellation(h):
    engine = await h.engine(identity_target, config=LONG)
    before = await engine.start(identity_target, id="before")
    await h.settle()
    await before.cancel()
    await h.settle()
    (cancelled,) = [
        write.message.id
        for batch in engine.faults.committed
        for write in batch
        if getattr(write, "message", None) is not None and write.message.kind == "cancel"
    ]
    run = await engine.start(identity_target, id="after")
    await h.settle()
    await run.send("unread", event_id=cancelled.replace("before", "after"))
    assert await run.cancel()
    await h.settle()
    assert await run.status() is RunStatus.CANCELLED


@on_every_store
async def test_reused_event_id_loses_no_dead_letter(h):
    """Two invalid payloads with one id, the second after the id has expired, are two dead letters."""
    config = EngineConfig(event_retention=100.0)
    engine = await h.engine(identity_typed, config=config)
    run = await engine.start(identity_typed)
    await h.settle()
    for n in range(2):
        await run.send("Named", {"m": n}, event_id="same")
        await h.clock.advance(500)
    assert [letter.value for letter in await engine.dead_letters()] == [{"m": 0}, {"m": 1}]


@on_every_store
async def test_reused_run_id_loses_no_dead_letter(h):
    """Messages of a pruned run, and of a new run with the same id, are two dead letters."""
    engine = await h.engine(identity_target, config=EngineConfig(run_retention=10.0))
    for n in range(2):
        run = await engine.start(identity_target, id="again")
        await run.send(Named(n), event_id="same")
        await run.send("end")
        await h.clock.advance(100)
        assert await engine.status("again") is None
    assert [letter.value for letter in await engine.dead_letters()] == [{"n": 0}, {"n": 1}]
