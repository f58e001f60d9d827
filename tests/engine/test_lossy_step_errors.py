"""A step error in `raises` with an attribute that cannot be encoded: retried, and delivered without that attribute."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from perdure import (
    Context,
    EngineConfig,
    InvalidPayload,
    Retry,
    RunFailed,
    StepFailed,
    current_step,
    step,
    workflow,
)
from perdure.clock import sleep_on
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import STORES, another_handle, on_every_store

RETRY = Retry(max_attempts=3, initial=10, jitter=0)
SEEN: list[list[Any]] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    SEEN.clear()


class Response:
    """Like a response of an HTTP client: it cannot be encoded."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.lock = threading.Lock()


class StatusError(Exception):
    def __init__(self, message: str, *, response: Response, body: str = "") -> None:
        super().__init__(message)
        self.response = response
        self.status = response.status
        self.body = body
        self.headers = {"retry-after": "3"}


class UnavailableError(StatusError):
    def __str__(self) -> str:
        return f"unavailable: {self.response.status}"


@step(retry=RETRY, raises=StatusError)
async def fetch(status: int, size: int = 0) -> str:
    kind = StatusError if status == 500 else UnavailableError
    raise kind("server error", response=Response(status), body="x" * size)


@step(retry=RETRY, raises=StatusError)
def fetch_in_a_thread(status: int, size: int = 0) -> str:
    if current_step().attempt < 3:
        raise StatusError("server error", response=Response(status))
    return "third time lucky"


@workflow(name="lossy.fetches", raises=StatusError)
async def fetches(ctx: Context, status: int, size: int = 0, then: str = "return") -> list[Any]:
    try:
        await fetch(status, size)
    except (StepFailed, InvalidPayload) as wrong:
        return [type(wrong).__name__]
    except StatusError as error:
        attributes = sorted(vars(error))
        SEEN.append([type(error).__name__, str(error), error.status, error.headers, attributes])  # perdure: ignore
        await ctx.sleep(60)
        if then == "raise":
            raise
    return SEEN[-1]


FIELDS = ["body", "headers", "status"]


@on_every_store
async def test_error_is_retried_and_arrives_without_the_attribute_live_and_on_replay(h):
    first = await h.engine(fetches)
    await first.start(fetches, 500, id="x")
    await h.drive(sleep_on(h.clock, 40))
    assert len(SEEN) == 1, "after retries in 10 and 20 seconds"
    await h.crash(first)
    second = await h.engine(fetches, store=another_handle(h.store, h.clock))
    expected = ["StatusError", "server error", 500, {"retry-after": "3"}, FIELDS]
    assert await h.drive(second.result("x")) == expected
    assert [expected, expected] == SEEN
    assert h.executed("x") == [("fetch", 1), ("fetch", 2), ("fetch", 3)]
    entry = (await second.history("x"))[0]
    assert entry.error is not None
    assert (entry.attempts, entry.error.type, entry.error.message) == (3, "StatusError", "server error")
    assert entry.error.dropped == ("response",)
    assert entry.error.fields == {"status": 500, "body": "", "headers": {"retry-after": "3"}}


@on_every_store
async def test_message_that_depends_on_the_attribute_is_kept(h):
    engine = await h.engine(fetches)
    seen = await h.run_to_end(await engine.start(fetches, 503))
    assert seen[:3] == ["UnavailableError", "unavailable: 503", 503]


@on_every_store
async def test_run_that_does_not_catch_the_error_fails_with_it(h):
    engine = await h.engine(fetches)
    with pytest.raises(RunFailed) as caught:
        await h.drive(engine.execute(fetches, 503, 0, "raise", id="x"))
    cause: Any = caught.value.__cause__
    assert isinstance(cause, UnavailableError)
    assert (str(cause), cause.status, hasattr(cause, "response")) == ("unavailable: 503", 503, False)
    outcome: Any = await engine.poll("x")
    assert (outcome.error.type, outcome.error.message) == ("UnavailableError", "unavailable: 503")
    assert outcome.error.fields["status"] == 503


@on_every_store
async def test_sync_step_succeeds_at_a_later_attempt(h):
    @workflow(name="lossy.thread")
    async def in_thread(ctx: Context) -> str:
        return await fetch_in_a_thread(500)

    engine = await h.engine(in_thread)
    assert await h.run_to_end(await engine.start(in_thread, id="x")) == "third time lucky"
    (entry,) = await engine.history("x")
    assert entry.attempts == 3


@on_every_store
async def test_attribute_over_the_limit_is_dropped(h):
    engine = await h.engine(fetches, config=EngineConfig(max_payload_bytes=1_000))
    seen = await h.run_to_end(await engine.start(fetches, 500, 2_000, id="x"))
    assert seen == ["StatusError", "server error", 500, {"retry-after": "3"}, ["headers", "status"]]
    entry = (await engine.history("x"))[0]
    assert entry.error is not None
    assert (entry.attempts, entry.error.dropped) == (3, ("response", "body"))


@on_every_store
async def test_error_of_a_workflow_may_hold_what_cannot_be_encoded(h):
    @workflow(name="lossy.direct", raises=StatusError, retry=Retry(max_attempts=2, initial=1))
    async def direct(ctx: Context) -> None:
        raise StatusError("direct", response=Response(500))

    engine = await h.engine(direct)
    with pytest.raises(RunFailed) as caught:
        await h.drive(engine.execute(direct, id="x"))
    assert (caught.value.type, str(caught.value.__cause__)) == ("StatusError", "direct")
    described = await engine.describe("x")
    assert described.error is not None
    assert (described.generation, described.error.dropped) == (1, ("response",)), "retried"


@on_every_store
async def test_deferred_fails_with_an_error_that_cannot_be_encoded(h):
    @workflow(name="lossy.deferred")
    async def defers(ctx: Context) -> list[Any]:
        try:
            await ctx.deferred("verdict", str, raises=StatusError)
        except StatusError as error:
            return [str(error), error.status, hasattr(error, "response")]
        return []

    engine = await h.engine(defers)
    await engine.start(defers, id="x")
    assert await engine.fail(await engine.deferred_token("x", "verdict"), StatusError("no", response=Response(500)))
    assert await h.drive(engine.result("x")) == ["no", 500, False]


@pytest.mark.parametrize("store_kind", STORES)
def test_crash_at_every_commit_changes_nothing(store_kind, tmp_path):
    report = crash_on(store_kind, tmp_path, fetches, 503, id="x")
    assert report.outcome[1][:3] == ["UnavailableError", "unavailable: 503", 503]
