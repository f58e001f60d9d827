"""Rejected requests: by the workflow (`request.fail`) and before they are delivered (`accept`)."""

import asyncio
import contextlib
import sqlite3
from typing import Any

import pytest

from perdure import Break, Context, Continue, EngineConfig, RequestRejected, WorkflowMisuse, event, step, workflow
from tests.engine.crash_points import crash_script
from tests.engine.store_matrix import STORES, another_handle, on_every_store

LONG = EngineConfig(sweep_interval=1000.0, lease=5000.0)  # nothing in these tests is found by a sweep


@event
class Withdrawal:
    cents: int


@event
class Note:
    text: str


@step
async def rejection_log(text: str) -> str:
    return text


def positive(given: Withdrawal) -> None:
    if given.cents <= 0:
        raise ValueError(f"{given.cents} cents is not an amount")


@workflow
async def rejecting_account(ctx: Context, cents: int) -> int:
    """An account that pays until it is empty."""
    while cents:
        request = await ctx.receive_request(Withdrawal)
        if request.value.cents > cents:
            await request.fail(ValueError(f"only {cents} cents are left"))
            continue
        cents -= request.value.cents
        await request.reply(cents)
    return cents


async def rejection(h: Any, requested: Any) -> tuple[str, str]:
    """Return type and message of the rejection of a request."""
    with pytest.raises(RequestRejected) as caught:
        await h.drive(requested)
    return caught.value.type, caught.value.message


# --- by the workflow


@on_every_store
async def test_caller_of_a_failed_request_gets_type_and_message_of_the_error(h):
    engine = await h.engine(rejecting_account, config=LONG)
    run = await engine.start(rejecting_account, 10)
    for caller in (engine, await h.client()):
        with pytest.raises(RequestRejected) as caught:
            await h.drive(caller.request(run.id, Withdrawal(11), 60))
        error = caught.value
        assert (error.run_id, error.type, error.message) == (run.id, "ValueError", "only 10 cents are left")
        assert str(error) == f"run {run.id!r} rejected the request: ValueError: only 10 cents are left"
        assert isinstance(error.__cause__, ValueError)
    assert await h.drive(engine.request(run.id, Withdrawal(10), 60)) == 0
    assert await h.run_to_end(run) == 0
    entries = [(each.kind, each.name, each.status, each.value) for each in await engine.history(run.id)]
    assert entries[1] == (
        "reject",
        "Withdrawal",
        "succeeded",
        {"type": "ValueError", "message": "only 10 cents are left"},
    )


@on_every_store
async def test_request_can_fail_with_a_text(h):
    @workflow
    async def rejecting_with_text(ctx: Context) -> None:
        await (await ctx.receive_request(Note)).fail("closed on Sundays")

    engine = await h.engine(rejecting_with_text, config=LONG)
    run = await engine.start(rejecting_with_text)
    with pytest.raises(RequestRejected, match=r"rejected the request: closed on Sundays$") as caught:
        await h.drive(engine.request(run.id, Note("open?"), 60))
    assert (caught.value.type, caught.value.message) == ("RequestRejected", "closed on Sundays")


@on_every_store
async def test_second_response_is_refused_and_the_caller_keeps_the_first(h):
    @workflow
    async def responding_twice(ctx: Context) -> list[str]:
        refused = []
        for first, second in ((0, 0), (0, 1), (1, 0), (1, 1)):
            request = await ctx.receive_request(Note)
            responses = (lambda r=request: r.reply("first"), lambda r=request: r.fail("first"))
            await responses[first]()
            try:
                await responses[second]()
            except WorkflowMisuse as error:
                refused.append(str(error).replace(request.event_id, "id"))
        return refused

    engine = await h.engine(responding_twice, config=LONG)
    run = await engine.start(responding_twice)
    assert await h.drive(engine.request(run.id, Note("1"), 60)) == "first"
    assert await h.drive(engine.request(run.id, Note("2"), 60)) == "first"
    assert await rejection(h, engine.request(run.id, Note("3"), 60)) == ("RequestRejected", "first")
    assert await rejection(h, engine.request(run.id, Note("4"), 60)) == ("RequestRejected", "first")
    expected = "request 'Note' (id) has its response already: call reply or fail once for each request"
    assert await h.run_to_end(run) == [expected] * 4


@on_every_store
async def test_failing_a_plain_event_has_no_reader(h):
    engine = await h.engine(rejecting_account, config=LONG)
    run = await engine.start(rejecting_account, 10)
    await run.send(Withdrawal(11))
    await run.send(Withdrawal(10))
    assert await h.run_to_end(run) == 0
    assert await h.store.published(run.id) == []


@on_every_store
async def test_rejection_reaches_a_caller_that_repeats_its_request_after_the_run_has_ended(h):
    engine = await h.engine(rejecting_account, config=LONG)
    run = await engine.start(rejecting_account, 10)
    first = await rejection(h, engine.request(run.id, Withdrawal(11), 60, event_id="w-1"))
    await run.send(Withdrawal(10))
    await h.run_to_end(run)
    client = await h.client(store=another_handle(h.store, h.clock))
    assert await rejection(h, client.request(run.id, Withdrawal(11), 60, event_id="w-1")) == first


@on_every_store
async def test_request_fails_with_an_exception_or_a_text_only(h):
    @workflow
    async def failing_with_a_number(ctx: Context) -> str:
        request: Any = await ctx.receive_request(Note)
        with pytest.raises(WorkflowMisuse) as caught:
            await request.fail(5)
        await request.reply("fine")
        return str(caught.value)

    engine = await h.engine(failing_with_a_number, config=LONG)
    run = await engine.start(failing_with_a_number)
    assert await h.drive(engine.request(run.id, Note("x"), 60)) == "fine"
    assert "with an exception or a text, not with" in await h.run_to_end(run)


@on_every_store
async def test_request_stays_open_if_its_reply_cannot_be_encoded(h):
    @workflow
    async def replying_nonsense(ctx: Context) -> None:
        request = await ctx.receive_request(Note)
        try:
            await request.reply(object())
        except Exception as error:
            await request.fail(error)

    engine = await h.engine(replying_nonsense, config=LONG)
    run = await engine.start(replying_nonsense)
    kind, _ = await rejection(h, engine.request(run.id, Note("x"), 60))
    assert kind == "InvalidPayload"


# --- before delivery


@workflow
async def accepting_account(ctx: Context, timeout: float | None = None) -> Any:
    try:
        request = await ctx.receive_request(Withdrawal, accept=positive, timeout=timeout)
    except TimeoutError:
        return "timeout"
    await rejection_log("next line")
    await request.reply("paid")
    return request.value.cents


@on_every_store
async def test_rejected_request_does_not_reach_the_next_line(h):
    engine = await h.engine(accepting_account, config=LONG)
    run = await engine.start(accepting_account)
    for cents in (0, -1):
        caught = await rejection(h, engine.request(run.id, Withdrawal(cents), 60))
        assert caught == ("ValueError", f"{cents} cents is not an amount")
    assert h.executed() == []
    assert [(each.kind, each.status) for each in await engine.history(run.id)] == [("receive_request", "pending")]
    assert await engine.status(run.id) == "suspended"
    assert await h.drive(engine.request(run.id, Withdrawal(1), 60)) == "paid"
    assert await h.run_to_end(run) == 1
    assert await engine.dead_letters() == []


@on_every_store
async def test_rejects_do_not_extend_the_timeout(h):
    engine = await h.engine(accepting_account, config=LONG)
    run = await engine.start(accepting_account, 30)
    started = h.clock.now()
    for _ in range(4):
        await rejection(h, engine.request(run.id, Withdrawal(0), 60))
        await h.clock.advance(6)
    assert await h.run_to_end(run) == "timeout"
    assert h.clock.now() - started <= 31


@on_every_store
async def test_flood_of_rejected_broadcasts_does_not_extend_the_timeout(h):
    engine = await h.engine(accepting_account, config=LONG)
    run = await engine.start(accepting_account, 10)
    for _ in range(20):
        await h.drive(engine.broadcast(Withdrawal(0)))
    await h.clock.advance(11)
    assert await h.run_to_end(run, within=1) == "timeout"


@on_every_store
async def test_accept_sees_the_state_of_the_workflow(h):
    @workflow
    async def accepting_by_balance(ctx: Context, cents: int) -> int:
        def covered(given: Withdrawal) -> bool:
            return given.cents <= cents

        while cents:
            request = await ctx.receive_request(Withdrawal, accept=covered)
            cents -= request.value.cents
            await request.reply(cents)
        return cents

    engine = await h.engine(accepting_by_balance, config=LONG)
    run = await engine.start(accepting_by_balance, 10)
    assert await h.drive(engine.request(run.id, Withdrawal(6), 60)) == 4
    assert await rejection(h, engine.request(run.id, Withdrawal(6), 60)) == ("RequestRejected", "rejected by covered")
    assert await h.drive(engine.request(run.id, Withdrawal(4), 60)) == 0


@on_every_store
async def test_replay_calls_accept_for_no_decided_message(h):
    calls: list[int] = []

    def counted(given: Withdrawal) -> bool:
        calls.append(given.cents)
        return given.cents > 0

    @workflow
    async def accepting_counted(ctx: Context) -> list[int]:
        got = []
        for _ in range(3):
            request = await ctx.receive_request(Withdrawal, accept=counted)
            got.append(request.value.cents)
            await request.reply()
        return got

    first = await h.engine(accepting_counted, config=LONG)
    run = await first.start(accepting_counted)
    client = await h.client()
    for cents in (0, 1, 0, 2):
        asked = h.background(client.request(run.id, Withdrawal(cents), 60))
        await h.drive(asyncio.wait([asked]))
        asked.exception()
    assert calls == [0, 1, 0, 2]
    worker = first.worker
    await h.crash(first)
    await h.store.fence_worker(worker)
    second = await h.engine(accepting_counted, store=another_handle(h.store, h.clock))
    assert await h.drive(second.request(run.id, Withdrawal(3), 6000)) is None
    assert await h.drive(second.result(run.id)) == [1, 2, 3]
    assert calls == [0, 1, 0, 2, 3]


POLICY = {"open": False}


@workflow
async def accepting_by_policy(ctx: Context) -> str:
    request = await ctx.receive_request(Note, accept=lambda note: POLICY["open"])
    await request.reply("accepted")
    return request.value.text


@on_every_store
async def test_undecided_request_is_decided_by_the_present_code_after_a_crash(h):
    POLICY["open"] = False
    first = await h.engine(accepting_by_policy)
    run = await first.start(accepting_by_policy)
    await h.settle()
    client = await h.client()
    asked = h.background(client.request(run.id, Note("hi"), 6000))
    first.faults.crash(1, "before")  # the commit that would reject it
    await h.drive(first.faults.crashed.wait())
    await h.crash(first)
    assert not asked.done()
    POLICY["open"] = True
    await h.engine(accepting_by_policy, store=another_handle(h.store, h.clock))
    assert await h.drive(asked) == "accepted"


@on_every_store
async def test_decided_rejection_stays_when_the_code_changes(h):
    POLICY["open"] = False
    first = await h.engine(accepting_by_policy)
    run = await first.start(accepting_by_policy)
    await h.settle()
    client = await h.client()
    asked = h.background(client.request(run.id, Note("hi"), 6000))
    first.faults.crash(1, "after")
    await h.drive(first.faults.crashed.wait())
    await h.crash(first)
    POLICY["open"] = True
    second = await h.engine(accepting_by_policy, store=another_handle(h.store, h.clock))
    assert (await rejection(h, asked))[0] == "RequestRejected"
    assert await h.drive(second.request(run.id, Note("again"), 6000)) == "accepted"


@workflow
async def accepting_at_crashes(ctx: Context) -> list[int]:
    got = []
    for _ in range(2):
        request = await ctx.receive_request(Withdrawal, accept=positive)
        got.append(request.value.cents)
        await (request.reply("paid") if request.value.cents < 10 else request.fail("too much"))
        await rejection_log("paid")
    return got


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_rejections_happen_once_at_any_crash(kind, tmp_path):
    async def script(h: Any, engine: Any) -> None:
        run = await engine.start(accepting_at_crashes, id="account")
        outcomes = []
        for number, cents in enumerate((0, 5, -3, 10)):
            try:
                outcomes.append(await engine.request("account", Withdrawal(cents), 6000, event_id=f"w-{number}"))
            except RequestRejected as error:
                outcomes.append(error.message)
        assert outcomes == ["0 cents is not an amount", "paid", "-3 cents is not an amount", "too much"]
        assert await run.result() == [5, 10]
        kinds = [each.kind for each in await engine.history("account")]
        assert kinds == ["receive_request", "reply", "step", "receive_request", "reject", "step"]

    crash_script(kind, tmp_path, [accepting_at_crashes], script, lambda: None)


# --- in races and loops


@on_every_store
async def test_rejected_request_does_not_end_a_race(h):
    @workflow
    async def accepting_race(ctx: Context) -> Any:
        winner, value = await ctx.race(
            paid=ctx.receive_request(Withdrawal, accept=positive), note=ctx.receive_request(Note), limit=ctx.sleep(100)
        )
        assert value is not None
        return winner, value.value

    engine = await h.engine(accepting_race, config=LONG)
    run = await engine.start(accepting_race)
    assert (await rejection(h, engine.request(run.id, Withdrawal(0), 60)))[0] == "ValueError"
    await run.send(Note("won"))
    assert await h.run_to_end(run) == ["note", {"text": "won"}]


@on_every_store
async def test_join_of_receives_with_accept_gets_the_accepted_requests(h):
    @workflow
    async def accepting_join(ctx: Context) -> Any:
        got = await ctx.join(*(ctx.receive_request(Withdrawal, accept=positive) for _ in range(2)))
        for request in got:
            await request.reply()
        return [request.value.cents for request in got]

    engine = await h.engine(accepting_join, config=LONG)
    run = await engine.start(accepting_join)
    requests = [h.background(engine.request(run.id, Withdrawal(cents), 60)) for cents in (0, 1, -1, 2)]
    results = await h.drive(asyncio.gather(*requests, return_exceptions=True))
    assert [isinstance(each, RequestRejected) for each in results] == [True, False, True, False]
    assert await h.run_to_end(run) == [1, 2]


@on_every_store
async def test_rejects_do_not_grow_the_history(h, store_kind):
    @workflow
    async def accepting_loop(ctx: Context) -> int:
        async def body(ctx: Context, total: int) -> Any:
            request = await ctx.receive_request(Withdrawal, accept=positive)
            await request.reply()
            total += request.value.cents
            return Break(total) if request.value.cents == 100 else Continue(total)

        return await ctx.loop("payments", body, state=0, prune_every=2, keep=2)

    engine = await h.engine(accepting_loop, config=LONG)
    run = await engine.start(accepting_loop)
    for _ in range(200):
        await rejection(h, engine.request(run.id, Withdrawal(0), 60))
    assert await _stored_rows(h.store, store_kind, run.id) < 80
    assert len(await engine.history(run.id)) <= 3
    for _ in range(10):
        await rejection(h, engine.request(run.id, Withdrawal(0), 60))
        await h.drive(engine.request(run.id, Withdrawal(1), 60))
    assert len(await engine.history(run.id)) < 25
    await run.send(Withdrawal(100))
    assert await h.run_to_end(run) == 110


async def _stored_rows(store: Any, kind: str, run_id: str) -> int:
    """Return the number of stored rows of a history, with those of turns without entries if the store shows them."""
    match kind:
        case "memory":
            return len(store._state.runs[run_id].rows)
        case "sqlite":
            with contextlib.closing(sqlite3.connect(store._path)) as connection:
                return int(connection.execute("SELECT count(*) FROM entries").fetchone()[0])
        case _:
            return len((await store.load([run_id]))[0].entries)


# --- events that are no requests, and values that do not fit


@on_every_store
async def test_rejected_plain_event_becomes_a_dead_letter(h):
    engine = await h.engine(accepting_account, config=LONG)
    run = await engine.start(accepting_account)
    await run.send(Withdrawal(0), event_id="sent")
    await h.drive(engine.broadcast(Withdrawal(-1), event_id="broadcast"))
    await h.drive(engine.broadcast(Withdrawal(3)))
    assert await h.run_to_end(run) == 3
    found = await engine.dead_letters(Withdrawal)
    assert [(each.kind, each.event_id, each.reason) for each in found] == [
        ("event", "sent", "rejected by the run: ValueError: 0 cents is not an amount"),
        ("event", "broadcast", "rejected by the run: ValueError: -1 cents is not an amount"),
    ]


@on_every_store
async def test_caller_whose_request_does_not_fit_gets_a_rejection(h):
    engine = await h.engine(accepting_account, config=LONG)
    run = await engine.start(accepting_account)
    kind, message = await rejection(h, engine.request(run.id, "Withdrawal", 60, payload={"cents": "many"}))
    assert kind == "InvalidPayload"
    assert "cents" in message
    assert len(await engine.dead_letters()) == 1
    assert await h.drive(engine.request(run.id, "Withdrawal", 60, payload={"cents": 2})) == "paid"


# --- functions that cannot decide


@on_every_store
async def test_accept_must_be_a_plain_function(h):
    async def later(given: Withdrawal) -> bool:
        return True

    @workflow
    async def accepting_wrongly(ctx: Context) -> list[str]:
        wrong: list[Any] = [later, rejection_log, 5]
        refused = []
        for each in wrong:
            try:
                await ctx.receive_request(Withdrawal, accept=each)
            except WorkflowMisuse as error:
                refused.append(str(error).partition(", not")[0])
        return refused

    engine = await h.engine(accepting_wrongly, config=LONG)
    run = await engine.start(accepting_wrongly)
    assert await h.run_to_end(run) == ["accept must be a plain function of the event"] * 3


@on_every_store
async def test_function_that_cannot_decide_lets_no_request_pass(h):
    @workflow
    async def accepting_with_defects(ctx: Context) -> int:
        def defective(given: Withdrawal) -> Any:
            match given.cents:
                case 1:
                    return "yes"
                case 2:
                    return ctx.random.random()
                case 3:
                    return rejection_log("a step")
                case 4:
                    raise SystemExit(1)
            return True

        return (await ctx.receive_request(Withdrawal, accept=defective)).value.cents

    engine = await h.engine(accepting_with_defects, config=LONG)
    run = await engine.start(accepting_with_defects)
    kinds = [(await rejection(h, engine.request(run.id, Withdrawal(n), 60)))[0] for n in (1, 2, 3, 4)]
    assert kinds == ["WorkflowMisuse", "WorkflowMisuse", "WorkflowMisuse", "SystemExit"]
    assert h.executed() == []
    await run.send(Withdrawal(5))
    assert await h.run_to_end(run) == 5
