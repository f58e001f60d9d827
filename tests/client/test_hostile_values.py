"""Every public call with hostile values for each of its parameters: an error of perdure, and nothing is stored.

The calls and their parameters are read from the classes, so that a new one fails here until it is in the tables.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from perdure import Client, Context, Debounce, Engine, EngineConfig, Rate, Retry, RunQuery, WorkQueue, step, workflow
from perdure.client.run_handle import Run
from perdure.errors import InvalidArgument, PerdureError
from perdure.testing import Harness
from perdure.workflows.start_options import StartOptions
from tests.client import hostile_values as hostile
from tests.engine.store_matrix import on_every_store


@step
async def work() -> str:
    return "done"


@workflow(name="hostile.waits")
async def waits(ctx: Context, n: Any = 0) -> Any:
    await work()
    await ctx.publish("key", 1)
    return await ctx.receive("never")


RATES: tuple[Any, ...] = (*hostile.NAMES, Rate, "0/s", "1/fortnight", "1/s/s", "-1/s", "9999999999/s")
LIMIT_NAMES = ("concurrency", "worker_concurrency", "partition_concurrency", "max_waiting")
BY_NAME: Mapping[str, tuple[Any, ...]] = {
    "run_id": (*hostile.NAMES, None),
    "location": (*hostile.LONG_TEXTS, None, "unknown", "work/~" + "9" * 5000 + "/x", "~rewind/1", "/", "//", "~0"),
    "id": hostile.NAMES,
    "query": (5, "x", object(), hostile.DEEP, {"status": "running"}, hostile.Unprintable()),
    "name": (*hostile.NAMES, None),
    "start": (*hostile.COUNTS, None),
    "event": hostile.EVENTS,
    "payload": hostile.PAYLOADS,
    "event_id": hostile.NAMES,
    "timeout": hostile.DURATIONS,
    "grace": hostile.DURATIONS,
    "topic": (*hostile.NAMES, None),
    "token": (*hostile.NAMES, None, "forged", "AAAA" * 100, "x" * 10_000),
    "value": hostile.PAYLOADS,
    "error": hostile.ERRORS,
    "kind": hostile.NAMES,
    "limit": hostile.LIMITS,
    "after": hostile.LONG_TEXTS,
    "dead_letter_id": (*hostile.LONG_TEXTS, None),
    "to": hostile.NAMES,
    "reason": hostile.NAMES,
    "key": hostile.NAMES,
    "cap": hostile.POSITIVE_COUNTS,
    "end": hostile.TIMES,
    "overlap": hostile.NAMES,
    "by": hostile.NAMES,
    "partition": tuple(each for each in hostile.NAMES if each != ""),
    "priority": (*hostile.OBJECTS, "1", 1.5, True, hostile.NAN, hostile.HUGE, 101, -101),
    "rate": RATES,
    "partition_rate": RATES,
    **dict.fromkeys(LIMIT_NAMES, hostile.POSITIVE_COUNTS),
}
UNCHECKED = ("details", "raise_if_held", "type", "reset", "catch_up")  # used as a flag or annotation, whatever it is
BY_CALL: Mapping[tuple[str, str], tuple[Any, ...]] = {
    ("broadcast", "event"): (*hostile.EVENTS, "a name"),
    ("history", "after"): hostile.COUNTS,
    ("dead_letters", "event"): tuple(each for each in hostile.EVENTS if each is not None),
    ("pause", "reason"): tuple(each for each in hostile.NAMES if each not in ("", "x" * 513)),
    ("pause_schedule", "reason"): tuple(each for each in hostile.NAMES if each not in ("", "x" * 513)),
    ("backfill_schedule", "start"): hostile.TIMES,
    ("partition", "key"): tuple(each for each in hostile.NAMES if each != ""),
}
VALID: Mapping[str, Any] = {
    "run_id": "known",
    "id": "nightly",
    "start": datetime(2026, 1, 1, tzinfo=UTC),
    "end": datetime(2026, 1, 2, tzinfo=UTC),
    "location": "work",
    "name": "log",
    "event": "topic",
    "topic": "topic",
    "token": "x",
    "error": "failed",
    "dead_letter_id": "1",
    "timeout": 0,
    "value": 1,
    "priority": 1,
    "key": "partition",
}
START_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "id": hostile.NAMES,
    "tags": hostile.TAGS,
    "queue": hostile.NAMES,
    "delay": hostile.DURATIONS,
    "retention": hostile.DURATIONS,
    "timeout": hostile.DURATIONS,
    "if_exists": (*hostile.NAMES, "maybe"),
    "send": (5, "x", [5], [object()], hostile.DEEP),
    "priority": (*hostile.COUNTS, 0, 101, -101),  # also without a queue
    "partition": hostile.NAMES,
    "dedupe": hostile.NAMES,
    "on_duplicate": (*hostile.NAMES, "existing"),
    "debounce": (*hostile.NAMES, Debounce),
    "max_wait": hostile.DURATIONS,
}
WORKFLOWS = (
    5,
    None,
    object(),
    hostile.Unprintable(),
    hostile.DEEP,
    "",
    "nul\0",
    "unknown",
    "x" * 513,
    len,
    waits.fn,
    work,
)
ROUND_TRIPS = 2000  # no call is made more often than that in one test


async def start_known(h: Harness) -> tuple[Any, Run[Any]]:
    engine = await h.engine(waits, queues=[WorkQueue("hostile.queue", partition_concurrency=1)])
    run = await engine.start(waits, id="known")
    await h.settle()
    return engine, run


def calls_of(owner: Any) -> Iterator[tuple[str, inspect.Signature]]:
    """Yield the public methods of an object that have parameters to check."""
    for name in sorted(set(dir(owner)) - {"open", "start", "execute", "tag", "schedule", "preview"}):
        method = None if name.startswith("_") else getattr(owner, name)
        if inspect.ismethod(method):
            yield name, inspect.signature(method)


def hostile_calls(owner: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield every call of an object with one hostile value, with a description."""
    for name, signature in calls_of(owner):
        required = {
            each.name: VALID[each.name]
            for each in signature.parameters.values()
            if each.default is inspect.Parameter.empty
        }
        for parameter in signature.parameters:
            if parameter in UNCHECKED:
                continue
            for value in BY_CALL.get((name, parameter), BY_NAME[parameter]):
                given = {**required, parameter: value}
                yield f"{name}({parameter}={hostile.describe(value)})", partial(getattr(owner, name), **given)


async def finish(outcome: Any) -> Any:
    if isinstance(outcome, AsyncIterator):
        return await anext(outcome)
    return await outcome if inspect.isawaitable(outcome) else outcome


async def failures_of(calls: Iterator[tuple[str, Callable[[], Any]]]) -> list[str]:
    """Make the calls; return those that did not raise an error of perdure."""
    found = []
    for text, call in calls:
        try:
            result = await finish(call())
        except PerdureError:
            continue
        except Exception as error:
            found.append(f"{text} raised {type(error).__name__}: {hostile.describe(error)}")
        else:
            found.append(f"{text} returned {hostile.describe(result)}")
    return found


async def stored(engine: Any) -> Any:
    """Return what is stored, as far as calls of a client can change it."""
    store = engine.faults
    runs = [record.id for record in (await store.runs(RunQuery())).runs]
    return len(store.committed), runs, await store.load(runs), await store.dead_letters(), await store.workers()


@pytest.mark.parametrize("kind", ["engine", "client", "run", "queue"])
@on_every_store
async def test_every_call_refuses_hostile_values_and_stores_nothing(h, kind):
    engine, run = await start_known(h)
    owners = {"engine": engine, "client": await h.client(), "run": run, "queue": engine.queue("hostile.queue")}
    owner = owners[kind]
    before = await stored(engine)
    assert await failures_of(hostile_calls(owner)) == []
    assert await stored(engine) == before
    assert await engine.status("known") == "suspended", "the engine still works"


@on_every_store
async def test_tag_refuses_hostile_values_and_stores_nothing(h):
    engine, run = await start_known(h)
    before = await stored(engine)

    def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
        for value in (*hostile.NAMES, None):
            yield f"tag({hostile.describe(value)}, a=1)", partial(engine.tag, value, a=1)
        for value in (*(each for each in hostile.TAGS if each != {"a": None}), {}, {"perdure.x": 1}):
            yield f"tag('known', {hostile.describe(value)})", partial(engine.tag, "known", value)
            yield f"run.tag({hostile.describe(value)})", partial(run.tag, value)
        yield "tag('known')", partial(engine.tag, "known")

    assert await failures_of(calls()) == []
    assert await stored(engine) == before


@pytest.mark.parametrize("call", ["start", "execute"])
@on_every_store
async def test_start_and_execute_refuse_hostile_values_and_store_nothing(h, call):
    engine, _ = await start_known(h)
    before = await stored(engine)

    def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
        method = getattr(engine, call)
        for target in WORKFLOWS:
            yield f"{call}({hostile.describe(target)})", partial(method, target)
        for payload in hostile.PAYLOADS:
            yield f"{call}(waits, {hostile.describe(payload)})", partial(method, waits, payload)
        for option in StartOptions.__struct_fields__:
            for value in START_OPTIONS[option]:
                text = f"{call}(waits, {option}={hostile.describe(value)})"
                yield text, partial(method, waits, **{option: value})
        yield f"{call}(waits, colour=5)", lambda: method(waits, colour=5)
        yield f"{call}(waits, 1, 2)", lambda: method(waits, 1, 2)

    assert await failures_of(calls()) == []
    assert await stored(engine) == before


@on_every_store
async def test_runs_refuses_hostile_queries(h):
    engine, _ = await start_known(h)

    def query(field: str, value: Any) -> Any:
        return engine.runs(RunQuery(**{field: value}))

    def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
        for field in RunQuery.__struct_fields__:
            for value in hostile.QUERY_FIELDS[field]:
                text = f"RunQuery({field}={hostile.describe(value)})"
                yield text, partial(query, field, value)

    assert await failures_of(calls()) == []


def test_wrong_number_of_arguments_is_a_type_error():
    client = Client("memory://")
    for owner in (client, Engine("memory://"), client.get("x")):
        for name, signature in calls_of(owner):
            with pytest.raises(TypeError):
                getattr(owner, name)(**dict.fromkeys(signature.parameters, 1), one_too_many=1)


@pytest.mark.parametrize("kind", [Engine, Client])
def test_constructors_refuse_hostile_values(kind):
    given: dict[str, tuple[Any, ...]] = {"config": (5, {}, hostile.DEEP, hostile.Unprintable())}
    if kind is Engine:
        given |= {
            "workflows": (5, [5], [work], hostile.DEEP, [waits.fn], hostile.Unprintable()),
            "pool": (*hostile.NAMES, None),
            "concurrency": hostile.POSITIVE_COUNTS,
        }
    for url in (*hostile.TEXTS, None, "://", "sqlite:///a\0b.db", "sqlite:///a%00b.db", "sqlite:///a#b.db"):
        with pytest.raises(InvalidArgument):
            kind(url)
    for option, values in given.items():
        for value in values:
            with pytest.raises(PerdureError):
                kind("memory://", **{option: value})


def test_values_of_the_configuration_are_checked():
    durations = ("lease", "sweep_interval", "timer_resolution", "event_retention", "run_retention", "grace")
    counts = (
        *("shards", "resident_runs", "max_concurrent_steps", "max_recoveries", "max_pending_events"),
        "max_payload_bytes",
    )
    for option in durations:
        for value in hostile.DURATIONS:
            with pytest.raises(InvalidArgument, match=option):
                EngineConfig(**{option: value})
    for option in counts:
        for value in hostile.POSITIVE_COUNTS:
            with pytest.raises(InvalidArgument, match=option):
                EngineConfig(**{option: value})
    for option in ("factor", "jitter"):
        for value in (*hostile.OBJECTS, "1", -1, hostile.NAN, hostile.INFINITY, hostile.HUGE, True):
            with pytest.raises(InvalidArgument, match=option):
                Retry(**{option: value})
