"""Steps: attempts and retry delays are durable, errors and results are recorded, late results are ignored."""

import asyncio
import contextvars
from dataclasses import dataclass
from typing import Any

import pytest

from perdure.codec import JSON
from perdure.codec.failures import error_to_record
from perdure.errors import CriticalError, InvalidArgument, RollbackError, StepFailed, StepInterrupted, WorkflowMisuse
from perdure.model.records import EntryStatus
from perdure.model.turns import StepDone
from perdure.retry import Retry
from perdure.runner.runner import Runner, RunStart
from perdure.workflows.steps import step
from tests.runner.turn_driver import BEGUN_AT, Play, execute, note

FIXED = Retry(max_attempts=3, initial=10, factor=3, jitter=0)


class Declined(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"declined: {reason}")
        self.code = code
        self.reason = reason


class FraudSuspected(Declined):
    pass


def always(error):
    async def body(*args):
        raise error

    return body


async def once(ctx, call):
    """Await one step and return its result or error."""
    try:
        return await call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def play_of(body, **options):
    made = step(name="charge", **options)(body)

    async def one(ctx):
        return await once(ctx, made)

    return Play(one).begin()


# --- attempts


def test_failed_attempt_records_attempt_count_and_next_due_time():
    play = play_of(always(ValueError("no")), retry=FIXED)
    turn = play.complete("charge", now=BEGUN_AT + 2)
    (entry,) = turn.entries
    assert (entry.status, entry.attempts, entry.due_at) == (EntryStatus.PENDING, 1, BEGUN_AT + 12)
    assert entry.error is not None
    assert entry.error.message == "no"
    assert (turn.busy, turn.wake_at) == (False, BEGUN_AT + 12)
    assert [(wait.kind, wait.location, wait.name, wait.until) for wait in turn.waits] == [
        ("retry", "charge", "charge", BEGUN_AT + 12)
    ]
    play.close()


def test_workflow_sees_a_failure_after_all_attempts_failed():
    play = play_of(always(ValueError("no")), retry=FIXED)
    due = []
    while play.alive:
        play.complete("charge")
        if play.alive:
            due.append(play.turn.wake_at)
            play.advance(now=play.turn.wake_at)
    assert due == [BEGUN_AT + 10, BEGUN_AT + 10 + 30]
    assert play.value == "StepFailed: step charge failed after 3 attempts: ValueError: no"
    assert play.entries["charge"].attempts == 3


def test_restart_during_a_retry_delay_keeps_attempt_count_and_due_time():
    play = play_of(always(ValueError("no")), retry=FIXED)
    play.complete("charge")
    play = play.crash().begin()
    assert (play.attempts, play.turn.wake_at, play.turn.entries) == ({}, BEGUN_AT + 10, ())
    play.advance(now=BEGUN_AT + 9.9)
    assert play.attempts == {}
    play.advance(now=BEGUN_AT + 10)
    assert play.attempts == {"charge": 2}
    play.close()


@pytest.mark.parametrize("exposed", [False, True])
def test_interrupted_attempt_is_repeated_under_the_same_number(exposed):
    play = play_of(always(ValueError("no")), retry=FIXED)
    if exposed:
        play.expose("charge")
        assert play.entries["charge"].status is EntryStatus.PENDING
    for attempt in (1, 2, 3):
        for _ in range(3):
            play = play.crash().begin()
            assert play.attempts == {"charge": attempt}
            if exposed:
                play.expose("charge")
        play.complete("charge")
        if play.alive:
            play.advance(now=play.turn.wake_at)
    assert "after 3 attempts" in play.value


def test_running_step_is_recorded_once():
    play = play_of(always(ValueError("no")), retry=FIXED)
    assert len(play.expose("charge", "unknown").entries) == 1
    assert play.expose("charge").entries == ()
    play.close()


def test_retry_none_means_one_attempt():
    play = play_of(always(ValueError("no")), retry=None)
    play.complete("charge")
    assert "after 1 attempt: ValueError" in play.value


def test_step_without_options_has_four_attempts():
    play = play_of(always(ValueError("no")))
    tries = 0
    while play.alive:
        play.complete("charge")
        tries += 1
        if play.alive:
            play.advance(now=play.turn.wake_at)
    assert tries == 4


def test_delay_function_gets_the_number_of_the_failed_attempt():
    play = play_of(always(ValueError("no")), retry=Retry(max_attempts=3, delay=lambda attempt: attempt * 100))
    play.complete("charge")
    assert play.turn.wake_at == BEGUN_AT + 100
    play.advance(now=play.turn.wake_at)
    play.complete("charge")
    assert play.turn.wake_at == BEGUN_AT + 100 + 200
    play.close()


def test_delay_function_that_raises_ends_the_attempts(caplog):
    play = play_of(always(ValueError("no")), retry=Retry(delay=lambda attempt: 1 / 0))
    play.complete("charge")
    assert "after 1 attempt: ValueError: no" in play.value
    assert "Retry.delay of step charge raised" in caplog.text


def test_jitter_is_the_same_on_every_replay_and_differs_between_attempts_and_runs():
    def due(seed):
        made = step(name="charge", retry=Retry(initial=10, factor=1, jitter=0.5))(always(ValueError("no")))

        async def one(ctx):
            await made()

        play, found = Play(one, seed=seed).begin(), []
        for _ in range(3):
            play.complete("charge")
            found.append(round((play.turn.wake_at or 0) - play.now, 6))
            play.advance(now=play.turn.wake_at)
        play.close()
        return found

    assert due(1) == due(1)
    assert due(1) != due(2)
    assert len(set(due(1))) == 3
    assert all(5 <= delay <= 15 for delay in due(1) + due(2))


def test_resume_ends_the_retry_delay():
    play = play_of(always(ValueError("no")), retry=FIXED)
    play.complete("charge")
    turn = play.resume()
    assert turn.consumed == (1,)
    assert play.attempts == {"charge": 2}
    play.complete("charge")
    assert play.turn.wake_at == BEGUN_AT + 30  # Nothing remains of the retry delay.
    play.close()


def test_critical_errors_are_not_retried():
    play = play_of(always(CriticalError("stop")), retry=FIXED)
    play.complete("charge")
    assert "after 1 attempt: CriticalError" in play.value


def test_rollback_errors_are_not_retried_and_no_step_failed():
    play = play_of(always(RollbackError("back")), retry=FIXED)
    play.complete("charge")
    assert play.value == "RollbackError: back"


def test_errors_outside_of_the_retry_policy_are_not_retried():
    play = play_of(always(ValueError("no")), retry=Retry(retry_on=OSError))
    play.complete("charge")
    assert "after 1 attempt" in play.value


# --- errors


def failure_of(call):
    """Return the exceptions that a workflow sees, live and on replay."""
    seen = []

    async def one(ctx):
        try:
            await call()
        except Exception as error:
            error.add_note("seen")
            seen.append(error)

    play = Play(one).begin()
    play.complete("charge")
    play.replayed_by(one).begin()
    return seen


def test_step_failed_describes_the_last_error():
    live, replayed = failure_of(step(name="charge", retry=None)(always(KeyError("gone"))))
    for error in (live, replayed):
        assert type(error) is StepFailed
        assert (error.location, error.attempts, error.type) == ("charge", 1, "KeyError")
        assert error.message == "'gone'"
        assert isinstance(error.cause, KeyError)
        assert error.__cause__ is error.cause
    assert live is not replayed


def test_exception_notes_are_not_duplicated_on_replay():
    live, replayed = failure_of(step(name="charge", retry=None)(always(ValueError("no"))))
    assert live.__notes__ == replayed.__notes__ == ["seen"]


@pytest.mark.parametrize("raised", [Declined(51, "no funds"), FraudSuspected(7, "odd")], ids=lambda e: type(e).__name__)
def test_errors_in_raises_keep_their_type(raised):
    for error in failure_of(step(name="charge", retry=None, raises=Declined)(always(raised))):
        assert type(error) is type(raised)
        assert error is not raised
        assert (error.code, error.reason, str(error)) == (raised.code, raised.reason, str(raised))


def test_errors_not_in_raises_become_step_failed():
    for error in failure_of(step(name="charge", retry=None, raises=Declined)(always(ValueError("no")))):
        assert type(error) is StepFailed


def test_replay_takes_the_same_branch_even_if_the_step_would_now_succeed():
    works: list[bool] = []

    @step(retry=None)
    async def charge():
        if not works:
            raise ValueError("not yet")
        return "fine"

    async def one(ctx):
        result = await once(ctx, charge)
        await ctx.sleep(10)
        return result

    play = Play(one).begin()
    play.complete("charge")
    works.append(True)
    play = play.crash().run()
    assert "not yet" in play.value


@pytest.mark.parametrize("raises", [(), (Exception,)])
def test_stop_iteration_fails_the_step(raises):
    def body():
        raise StopIteration(3)

    for error in failure_of(step(name="charge", retry=None, raises=raises)(body)):
        assert type(error) is StepFailed
        assert error.type == "StopIteration"


def test_error_whose_str_raises_is_recorded():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    (live, _) = failure_of(step(name="charge", retry=None)(always(Mute())))
    assert "Mute" in live.message


# --- results


def test_each_await_returns_a_new_object():
    kept = []

    @step
    async def numbers() -> list[int]:
        kept.append([1])
        return kept[-1]

    async def appending(ctx):
        found = await numbers()
        found.append(2)
        await ctx.sleep(5)
        return found

    play = Play(appending).begin()
    play.complete("numbers")
    assert kept == [[1]]
    assert play.crash().run().value == [1, 2]


def test_result_has_its_annotated_type():
    @dataclass
    class Receipt:
        number: int

    @step
    async def charge() -> Receipt:
        return Receipt(42)

    async def typed(ctx):
        note(await charge())

    play = Play(typed).run()
    assert play.notes == [Receipt(42)]
    assert play.replayed_by(typed).begin().notes == [Receipt(42)]


def test_result_is_encoded_and_decoded_on_first_execution_too():
    @step
    async def pair():
        return (1, 2)

    async def untyped(ctx):
        note(await pair())

    assert Play(untyped).run().notes == [[1, 2]]


def test_sync_functions_can_be_steps():
    @step
    def charge(number: int) -> int:
        return number + 1

    async def one(ctx):
        return await charge(1) + await ctx.step("plain", lambda: 5)

    play = Play(one).run()
    assert play.value == 7
    assert list(play.entries) == ["charge", "plain"]


def test_late_result_is_ignored():
    play = play_of(always(ValueError("no")), retry=FIXED)
    late = play.outcome_of_body("charge")
    play.complete("charge")
    assert play.advance(late).entries == ()
    assert play.advance(StepDone("charge", 1, value=JSON.encode("late"))).entries == ()
    assert play.advance(StepDone("charge", 2, value=JSON.encode("not begun"))).entries == ()
    play.advance(now=play.turn.wake_at)
    assert play.advance(StepDone("charge", 1, value=JSON.encode("late"))).entries == ()
    assert play.attempts == {"charge": 2}
    play.close()


def test_result_of_an_unknown_step_is_ignored():
    play = play_of(always(ValueError("no")))
    assert play.advance(StepDone("other", 1, value=JSON.encode(1))).entries == ()
    play.close()


def test_result_of_a_cancelled_step_is_ignored():
    @step
    async def charge():
        return 1

    async def giving_up(ctx):
        task = asyncio.create_task(charge())
        await ctx.sleep(1)
        task.cancel()
        await ctx.sleep(1)
        return "end"

    play = Play(giving_up).begin()
    late = play.outcome_of_body("charge")
    play.advance(now=play.turn.wake_at)
    assert play.cancelled == ["charge"]
    assert play.advance(late).entries == ()
    assert play.entries["charge"].status is EntryStatus.CANCELLED
    play.close()


def test_timeout_reported_by_the_executor_fails_the_step():
    play = play_of(always(ValueError("no")), retry=FIXED, timeout=5)
    error = error_to_record(TimeoutError("took longer than 5"), JSON)
    play.advance(StepDone("charge", 1, error=error, retryable=False))
    assert play.value == "StepFailed: step charge failed after 1 attempt: TimeoutError: took longer than 5"


def test_step_requested_and_cancelled_in_one_turn_never_starts():
    @step
    async def charge():
        return 1

    async def hasty(ctx):
        before, begun = asyncio.create_task(charge()), asyncio.create_task(charge())
        before.cancel()
        await asyncio.sleep(0)
        begun.cancel()
        await ctx.sleep(5)
        return "end"

    play = Play(hasty).begin()
    assert (play.attempts, play.cancelled) == ({}, [])
    assert play.crash().run().value == "end"


# --- at most once


@step(at_most_once=True, retry=FIXED)
async def launch():
    raise ValueError("misfire")


async def launching(ctx):
    return await once(ctx, launch)


def test_at_most_once_attempt_is_recorded_before_the_body_starts():
    play = Play(launching).begin()
    (entry,) = play.turn.entries
    assert (entry.status, entry.attempts) == (EntryStatus.PENDING, 1)
    assert play.attempts == {"launch": 1}
    play.complete("launch")
    turn = play.advance(now=play.turn.wake_at)
    assert [(entry.attempts, entry.due_at) for entry in turn.entries] == [(2, None)]
    assert play.attempts == {"launch": 2}
    play.close()


def test_crash_in_an_at_most_once_body_raises_step_interrupted_without_a_rerun():
    play = Play(launching).begin().crash().begin()
    assert play.attempts == {}
    assert play.value.startswith("StepInterrupted: step launch failed after 1 attempt")
    assert play.replayed_by(launching).begin().value == play.value


def test_crash_during_a_retry_delay_does_not_interrupt_the_step():
    play = Play(launching).begin()
    play.complete("launch")
    play = play.crash().begin()
    assert play.alive
    play.advance(now=play.turn.wake_at)
    assert play.attempts == {"launch": 2}
    assert "after 2 attempts" in play.crash().begin().value


def test_step_interrupted_is_a_subclass_of_step_failed():
    seen = []

    async def looking(ctx):
        try:
            await launch()
        except StepInterrupted as error:
            seen.append(error)

    Play(looking).begin().crash().begin()
    assert isinstance(seen[0], StepFailed)
    assert (seen[0].location, seen[0].attempts) == ("launch", 1)


def test_several_interrupted_steps_can_cancel_each_other():
    async def group(ctx):
        seen = []
        try:
            async with asyncio.TaskGroup() as members:
                members.create_task(launch())
                members.create_task(launch())
        except* StepInterrupted as errors:
            seen = [error.location for error in errors.exceptions if isinstance(error, StepInterrupted)]
        await ctx.sleep(5)
        return seen

    play = Play(group).begin()
    assert len(play.attempts) == 2
    play = play.crash().run()
    assert play.value == ["launch"]
    assert play.entries["launch#1"].status is EntryStatus.CANCELLED


def test_step_that_still_runs_in_this_process_is_not_interrupted():
    play = Play(launching).begin()
    running = play.running["launch"]
    start = RunStart(
        definition=play.definition,
        facts=play.facts,
        input=b"{}",
        seed=play.seed,
        first_executed_at=BEGUN_AT,
        history=tuple(play.rows),
        under_way=frozenset({"launch"}),
    )
    play.close()
    runner = Runner(start)
    turn = runner.advance(play.now)
    assert turn is not None
    assert (turn.effects, turn.busy) == ((), True)
    turn = runner.advance(play.now, [execute(running)])
    assert turn is not None
    assert turn.wake_at == BEGUN_AT + 10
    runner.close()


# --- calls


def test_context_variables_of_the_caller_are_not_visible_in_the_run():
    variable = contextvars.ContextVar("variable", default="none")

    async def reading(ctx):
        first = variable.get()
        variable.set("of the workflow")
        return first

    variable.set("of the caller")
    play = Play(reading).begin()
    assert play.value == "none"
    assert variable.get() == "of the caller"


def test_context_variables_persist_through_a_run():
    variable = contextvars.ContextVar("variable", default="none")

    async def setting(ctx):
        variable.set("mine")
        await ctx.sleep(5)

        async def task():
            variable.set("of the task")

        await asyncio.create_task(task())
        return variable.get()

    assert Play(setting).run().value == "mine"


def test_call_that_is_never_awaited_warns():
    @step
    async def charge():
        return 1

    async def forgetful(ctx):
        charge()  # type: ignore[unused-coroutine]
        return "end"

    with pytest.warns(RuntimeWarning, match="charge: a durable call was never awaited"):
        Play(forgetful).begin()


def test_call_can_be_awaited_only_once():
    @step
    async def charge():
        return 1

    async def twice(ctx):
        call = charge()
        await call
        try:
            await call
        except RuntimeError as error:
            first = str(error)
        try:
            await asyncio.create_task(call)
        except RuntimeError as error:
            return [first, str(error)]

    assert all("only once" in message for message in Play(twice).run().value)


def test_call_has_the_interface_of_a_coroutine():
    @step
    async def charge():
        return 1

    async def looking(ctx):
        call: Any = charge()
        found = [asyncio.iscoroutine(call), call.__name__, hash(call) == hash(call)]
        call.close()
        return found

    assert Play(looking).begin().value == [True, "charge", True]


def test_step_outside_of_a_workflow_calls_its_function():
    @step
    async def twice(number: int) -> int:
        return number * 2

    @step
    def half(number: int) -> int:
        return number // 2

    async def outside():
        return [await twice(4), await half(4)]

    assert asyncio.run(outside()) == [8, 2]
    assert half.fn(6) == 3


def test_step_does_not_copy_attributes_of_its_function():
    def body():
        return 1

    vars(body).update(name="other", settings=None)
    made = step(body)
    assert (made.name, made.settings.timeout) == ("body", None)


def test_options_change_a_step_for_one_call():
    made = step(name="charge", timeout=5)(always(ValueError("no")))
    changed = made.options(name="other", key=3, retry=None, timeout=None, at_most_once=True)
    settings = changed.settings
    assert (changed.name, settings.key, settings.retry, settings.timeout) == ("other", "3", None, None)
    assert settings.at_most_once
    assert (made.name, made.settings.timeout, made.settings.at_most_once) == ("charge", 5, False)


@pytest.mark.parametrize(
    "options",
    [{"timeout": 0}, {"timeout": -1}, {"retry": 3}, {"raises": ValueError("x")}, {"key": "x"}, {"compensate": 1}],
)
def test_invalid_options_are_rejected(options):
    with pytest.raises(InvalidArgument):
        step(**options)


def test_generators_are_rejected_as_steps():
    def generator():
        yield 1

    with pytest.raises(WorkflowMisuse, match="generator"):
        step(generator)


def test_idempotency_key_is_the_same_on_every_attempt_and_replay():
    play = play_of(always(ValueError("no")), retry=FIXED)
    keys = {play.running["charge"].idempotency_key}
    play.complete("charge")
    play.advance(now=play.turn.wake_at)
    keys.add(play.running["charge"].idempotency_key)
    keys.add(play.crash().begin().running["charge"].idempotency_key)
    assert keys == {"run-1/0/charge"}
