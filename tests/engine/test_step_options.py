"""The options of a step: the same for `@step`, `options()` and `ctx.step`."""

import asyncio
import inspect
from dataclasses import fields
from typing import Any, get_overloads

import pytest

from perdure import Context, Retry, RunFailed, StepFailed, current_step, step, workflow
from perdure.errors import InvalidArgument
from perdure.testing import TestEngine
from perdure.workflows.steps import Step, StepKeywords, StepOptions

VALUES: dict[str, Any] = {
    "retry": Retry(max_attempts=2),
    "timeout": 3.0,
    "retry_on_timeout": True,
    "heartbeat_timeout": 2.0,
    "raises": (KeyError,),
    "compensate": print,
    "at_most_once": True,
    "context": "inherit",
}
TESTED_ELSEWHERE = {"pool", "queue"}  # in test_steps_elsewhere.py


def keywords(fn: Any) -> set[str]:
    """Return the names of the options that a function takes, those of its TypedDict included."""
    found = inspect.signature(fn).parameters.values()
    named = {each.name for each in found if each.kind is inspect.Parameter.KEYWORD_ONLY}
    return named | (set(StepKeywords.__annotations__) if "Unpack[StepKeywords]" in str(fn.__annotations__) else set())


def test_signatures_take_every_option():
    per_step = {each.name for each in fields(StepOptions)} - {"key"}
    assert {"compensate", *StepKeywords.__annotations__} == per_step
    decorators = [keywords(each) for each in get_overloads(step)]
    assert set().union(*decorators) == {"name", *per_step}
    for each in get_overloads(Context.step):
        assert keywords(each) == {"key", *per_step}
    assert keywords(Step.options) == {"name", "key", *per_step}


def test_every_option_has_a_value_in_this_test():
    assert {each.name for each in fields(StepOptions)} == {"key", *VALUES, *TESTED_ELSEWHERE}


@pytest.mark.parametrize("option", VALUES)
def test_every_option_is_taken_alike(option):
    async def body() -> str:
        return "done"

    given = {option: VALUES[option]}
    decorated = step(**given)(body)
    overridden = step(body).options(**given)
    taken = []

    @workflow
    async def calls(ctx: Context) -> None:
        call: Any = ctx.step("body", body, **given)
        taken.append(call.step.settings)
        await call

    async def main():
        async with TestEngine([calls]) as engine:
            await engine.execute(calls)

    asyncio.run(main())
    assert getattr(taken[0], option) == VALUES[option]
    assert decorated.settings == overridden.settings == taken[0]


def run(definition):
    async def main():
        async with TestEngine([definition]) as engine:
            return await engine.execute(definition, id="r"), [each.location for each in await engine.history("r")]

    return asyncio.run(main())


def test_context_step_takes_a_key_raises_and_an_error_of_its_own():
    class Declined(Exception):
        def __init__(self, cents: int) -> None:
            super().__init__(cents)
            self.cents = cents

    async def pay(cents: int) -> int:
        if cents > 5:
            raise Declined(cents)
        return current_step().attempt

    @workflow
    async def pays(ctx: Context) -> list[Any]:
        seen: list[Any] = [await ctx.step("pay", pay, 3, key=1, at_most_once=True, retry=None)]
        try:
            await ctx.step("pay", pay, 9, key="b", raises=Declined, retry=None)
        except Declined as declined:
            seen.append(declined.cents)
        return seen

    assert run(pays) == ([1, 9], ["pay[1]", "pay[b]"])


def test_context_step_retries_a_timeout_if_that_is_requested():
    attempts = []

    async def slow() -> str:
        attempts.append(current_step().attempt)
        if len(attempts) == 1:
            await asyncio.Event().wait()
        return "done"

    @workflow
    async def waits(ctx: Context) -> str:
        return await ctx.step("slow", slow, timeout=5, retry_on_timeout=True)

    assert run(waits) == ("done", ["slow"])
    assert attempts == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colour": "red"}, "ctx.step has no option colour"),
        ({"name": "other"}, "ctx.step has no option name"),
        ({"retry": 3}, "retry must be a Retry or None"),
        ({"context": "copy"}, "must be 'empty' or 'inherit'"),
        ({"raises": "ValueError"}, "raises must be an exception type"),
        ({"timeout": -1}, "timeout"),
        ({"pool": "gpu"}, "step 'body' is not declared with a pool or queue"),
    ],
)
def test_context_step_refuses_unknown_and_invalid_options(options, message):
    @workflow
    async def refused(ctx: Context) -> None:
        await ctx.step("body", print, **options)

    with pytest.raises(RunFailed, match=message):
        run(refused)


def test_decorator_and_options_refuse_unknown_options():
    unknown: dict[str, Any] = {"colour": "red"}
    key: dict[str, Any] = {"key": "k"}
    with pytest.raises(InvalidArgument, match="@step has no option colour"):
        step(**unknown)
    with pytest.raises(InvalidArgument, match=r"options\(\) has no option colour"):
        step(print).options(**unknown)
    with pytest.raises(InvalidArgument, match=r"@step has no option key, .* use options\(key="):
        step(**key)


def test_step_without_attempts_left_fails_with_the_options_of_the_call():
    async def fails() -> None:
        raise ConnectionError

    @workflow
    async def calls(ctx: Context) -> int:
        try:
            await ctx.step("fails", fails, retry=Retry(max_attempts=2, initial=0))
        except StepFailed as failed:
            return failed.attempts
        return 0

    assert run(calls)[0] == 2
