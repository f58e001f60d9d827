"""Time, randomness and what a context knows: the same on every replay."""

import asyncio
import logging
from datetime import UTC, datetime, timedelta

import pytest

from perdure.clock import to_datetime
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.records import EntryStatus
from perdure.workflows.context import current_context
from tests.runner.turn_driver import BEGUN_AT, Play, note
from tests.runner.workflows import fetch


def test_now_is_the_time_of_the_last_completion():
    async def looking(ctx):
        times = [ctx.now()]
        await fetch("a")
        times.append(ctx.now())
        await ctx.sleep(10)
        times.append(ctx.now())
        note(times)
        await fetch("b")

    play = Play(looking).begin()
    play.complete("fetch", now=BEGUN_AT + 5)
    play.advance(now=BEGUN_AT + 40)
    expected = [[to_datetime(BEGUN_AT), to_datetime(BEGUN_AT + 5), to_datetime(BEGUN_AT + 40)]]
    assert play.notes == expected
    play.now += 1000
    again = play.crash().begin()
    assert again.notes == expected
    again.close()


def test_now_never_decreases():
    async def looking(ctx):
        await asyncio.gather(fetch("a"), fetch("b"))
        return ctx.now().timestamp()

    play = Play(looking).begin()
    play.complete("fetch", now=BEGUN_AT + 100)
    play.now = BEGUN_AT + 50  # another worker's clock, or a bad one
    play.complete("fetch#1")
    assert play.value == BEGUN_AT + 100


def test_random_numbers_and_uuids_are_the_same_on_replay():
    async def rolling(ctx):
        found = [ctx.random.random(), str(ctx.uuid()), ctx.random.randrange(100), str(ctx.uuid())]
        note(found)
        await fetch("a")
        note(ctx.random.random())
        await ctx.sleep(5)
        note(ctx.random.random())
        return found

    play = Play(rolling).run()
    again = play.replayed_by(rolling).begin()
    assert again.notes == play.notes
    assert len(set(play.notes[0])) == 4


def test_random_numbers_belong_to_their_scope():
    """What one task draws does not depend on how often another one has drawn."""

    async def drawing(ctx):
        async def draw(count):
            await fetch(count)
            return [ctx.random.random() for _ in range(count)]

        return await asyncio.gather(draw(1), draw(3))

    first, second = Play(drawing).begin(), Play(drawing).begin()
    first.complete("draw/fetch")
    first.complete("draw#1/fetch")
    second.complete("draw#1/fetch")
    second.complete("draw/fetch")
    assert first.value == second.value
    assert first.value[0][0] != first.value[1][0]


def test_random_numbers_depend_on_run_and_epoch():
    async def rolling(ctx):
        return [ctx.random.random(), str(ctx.uuid())]

    plays = [Play(rolling), Play(rolling, epoch=1), Play(rolling, seed=8)]
    values = [play.begin().value for play in plays]
    assert len({value[0] for value in values}) == len({value[1] for value in values}) == 3


def test_random_numbers_are_the_same_in_a_rewound_or_forked_history():
    async def rolling(ctx):
        return [ctx.random.random(), str(ctx.uuid())]

    plays = [Play(rolling), Play(rolling, generation=1), Play(rolling, run_id="fork")]
    values = [play.begin().value for play in plays]
    assert values[0] == values[1] == values[2]


# --- sleeping


def test_deadline_of_a_sleep_is_fixed_when_it_is_first_awaited():
    async def sleeping(ctx):
        await ctx.sleep(timedelta(minutes=1))
        return "awake"

    play = Play(sleeping).begin()
    (entry,) = play.turn.entries
    assert (entry.kind, entry.status, entry.due_at) == ("sleep", EntryStatus.PENDING, BEGUN_AT + 60)
    assert play.waits == [("sleep", BEGUN_AT + 60)]
    play.now += 50
    play = play.crash().begin()
    assert play.turn.wake_at == BEGUN_AT + 60
    play.advance(now=BEGUN_AT + 59.9)
    assert play.alive
    play.advance(now=BEGUN_AT + 60)
    assert play.value == "awake"


def test_sleep_until_wakes_at_the_given_time():
    async def sleeping(ctx):
        await ctx.sleep_until(to_datetime(BEGUN_AT + 30))
        return ctx.now().timestamp()

    play = Play(sleeping).begin()
    assert play.turn.wake_at == BEGUN_AT + 30
    play.advance(now=BEGUN_AT + 30)
    assert play.value == BEGUN_AT + 30


@pytest.mark.parametrize(
    "sleep",
    [
        lambda ctx: ctx.sleep(0),
        lambda ctx: ctx.sleep_until(to_datetime(BEGUN_AT)),
        lambda ctx: ctx.sleep_until(to_datetime(1)),
    ],
)
def test_sleep_of_zero_or_until_the_past_returns_at_once(sleep):
    async def sleeping(ctx):
        await sleep(ctx)
        return "awake"

    play = Play(sleeping).begin()
    assert play.value == "awake"
    assert play.rows == []


@pytest.mark.parametrize("duration", [-1, float("nan"), "5", None, True, 1e12])
def test_invalid_duration_is_rejected(duration):
    async def sleeping(ctx):
        await ctx.sleep(duration)

    assert Play(sleeping).begin().failure.type == "InvalidArgument"


def test_naive_datetime_is_rejected():
    async def sleeping(ctx):
        with pytest.raises(InvalidArgument, match="aware"):
            ctx.sleep_until(datetime(2030, 1, 1))  # noqa: DTZ001
        with pytest.raises(InvalidArgument):
            ctx.sleep_until(5)
        return "refused"

    assert Play(sleeping).begin().value == "refused"
    assert datetime.now(UTC).tzinfo is not None


def test_asyncio_sleep_is_durable_and_recorded_when_it_ends():
    async def sleeping(ctx):
        await asyncio.sleep(60)
        await fetch("a")
        return "awake"

    play = Play(sleeping).begin()
    assert play.turn.entries == ()
    assert play.turn.wake_at == BEGUN_AT + 60
    play = play.crash().begin()
    play.advance(now=BEGUN_AT + 61)
    assert play.entries["~timer"].kind == "timer"
    play = play.crash().begin()
    play.complete("fetch")
    assert play.value == "awake"


def test_results_are_applied_before_due_timers():
    async def deciding(ctx):
        try:
            async with asyncio.timeout(10):
                return await fetch("result")
        except TimeoutError:
            return "too late"

    play = Play(deciding).begin()
    play.complete("fetch", now=BEGUN_AT + 60)
    assert play.value == "result"
    play = Play(deciding).begin()
    late = play.outcome_of_body("fetch")
    play.advance(now=BEGUN_AT + 60)
    assert play.value == "too late"
    assert play.cancelled == ["fetch"]
    assert late.value is not None


def test_timers_with_the_same_due_time_fire_in_order_of_creation():
    async def alarms(ctx):
        order = []

        async def one(name, sleep):
            await sleep
            order.append(name)

        sleeps = [ctx.sleep(30), asyncio.sleep(30), asyncio.sleep(20), ctx.sleep(30), ctx.sleep(20)]
        await asyncio.gather(*(one(number, sleep) for number, sleep in enumerate(sleeps)))
        return order

    play = Play(alarms).begin()
    play.advance(now=BEGUN_AT + 100)
    assert play.value == [2, 4, 0, 1, 3]
    play = Play(alarms).begin().crash().begin()
    play.advance(now=BEGUN_AT + 100)
    assert play.value == [2, 4, 0, 1, 3]


def test_cancelled_timer_does_not_wake_the_run():
    async def in_time(ctx):
        async with asyncio.timeout(10):
            await fetch("a")
        await fetch("b")

    play = Play(in_time).begin()
    assert play.turn.wake_at == BEGUN_AT + 10
    play.complete("fetch")
    assert play.turn.wake_at is None
    play.close()


def test_loop_time_is_the_time_of_the_workflow():
    async def looking(ctx):
        first = asyncio.get_running_loop().time()
        await ctx.sleep(10)
        return [first, asyncio.get_running_loop().time()]

    assert Play(looking).run().value == [BEGUN_AT, BEGUN_AT + 10]


# --- what a context knows


def test_context_describes_its_run():
    async def looking(ctx):
        return [ctx.run_id, ctx.workflow, dict(ctx.tags), ctx.parent, ctx.generation, current_context() is ctx]

    assert Play(looking, generation=2).begin().value == ["run-1", "looking", {"team": "blue"}, None, 2, True]


def test_current_context_is_rejected_outside_of_a_workflow():
    with pytest.raises(WorkflowMisuse):
        current_context()


def test_log_is_silent_during_replay():
    async def talking(ctx):
        ctx.log.warning("before")
        await fetch("a")
        ctx.log.warning("after")
        await ctx.sleep(5)
        ctx.log.warning("at the end")

    messages = []

    class Listener(logging.Handler):
        def emit(self, record):
            messages.append((record.getMessage(), record.run_id, record.location))

    logger = logging.getLogger("perdure.workflow")
    listener = Listener()
    logger.addHandler(listener)
    try:
        play = Play(talking).begin()
        play.complete("fetch")
        play = play.crash().begin()
        play.advance(now=play.turn.wake_at)
    finally:
        logger.removeHandler(listener)
    assert messages == [("before", "run-1", ""), ("after", "run-1", ""), ("at the end", "run-1", "")]


def test_replaying_is_true_while_history_is_applied():
    async def looking(ctx):
        note(ctx.replaying)
        await fetch("a")
        note(ctx.replaying)
        await fetch("b")
        note(ctx.replaying)

    play = Play(looking).begin()
    play.complete("fetch")
    assert play.notes == [False, False]
    play = play.crash().begin()
    play.complete("fetch#1")
    assert play.notes == [True, True, False]


@pytest.mark.parametrize(
    "use",
    [
        lambda ctx: ctx.sleep(5).send(None),
        lambda ctx: ctx.random.random(),
        lambda ctx: ctx.uuid(),
        lambda ctx: ctx.version("gate", latest=2),
        lambda ctx: ctx.removed("gone"),
    ],
)
def test_context_is_rejected_outside_of_its_workflow(use):
    contexts = []

    async def leaking(ctx):
        contexts.append(ctx)
        await ctx.sleep(100)

    async def stealing(ctx):
        with pytest.raises(WorkflowMisuse, match="outside of its workflow"):
            use(contexts[0])
        return "refused"

    play = Play(leaking).begin()
    with pytest.raises(WorkflowMisuse, match="outside of its workflow"):
        use(contexts[0])
    assert Play(stealing).begin().value == "refused"
    assert play.advance().entries == ()
    play.close()
