"""No exception strands a run: errors are injected at each call site that loads, claims, replays or repeats work."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from perdure import Context, step, workflow
from perdure.execution import coordinator as coordinator_module
from perdure.execution import run_loader as loader_module
from perdure.execution.admission import RunAdmission
from perdure.execution.coordinator import Coordinator
from perdure.execution.effect_runner import EffectRunner
from perdure.execution.run_cache import RunCache
from perdure.model.records import RunRecord
from perdure.stores.writes import CommitTurn
from perdure.testing import Harness
from tests.engine.store_matrix import STORES, on_every_store

GOOD = ("good-1", "good-2", "good-3")


@step
async def injected_step(number: int) -> int:
    return number + 1


@workflow
async def injected(ctx: Context) -> int:
    before = await injected_step(1)
    received = await ctx.receive("go")
    return await injected_step(before) + len(received)


async def hold_of(h: Harness, run_id: str) -> str | None:
    """Return the kind of the run's hold."""
    (record,) = await h.store.records([run_id])
    assert isinstance(record, RunRecord)
    return None if record.held is None else record.held.kind


def is_about(run_id: str, values: tuple[Any, ...]) -> bool:
    """Return whether a run, its record or its snapshot is among these arguments."""
    found = [getattr(value, "record", value) for value in values]
    return any(getattr(value, "id", None) == run_id for value in found)


def raise_for(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, run_id: str) -> None:
    """Let this function raise whenever it is called with this run."""
    original: Callable[..., Any] = getattr(owner, name)

    def injected_error(*args: Any, **kwargs: Any) -> Any:
        if is_about(run_id, args):
            raise RuntimeError(f"injected into {name}")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, injected_error)


# Every function that handles one run between its claim and its suspension.
RUN_SITES = {
    "decide": (RunAdmission, "decide"),
    "is_first_execution": (coordinator_module, "is_first_execution"),
    "build_run_start": (loader_module, "build_run_start"),
    "build_cached_run": (loader_module, "build_cached_run"),
    "add_messages": (loader_module, "add_messages"),
    "cache_add": (RunCache, "add"),
    "next_turn": (coordinator_module, "next_turn"),
    "build_turn_commit": (coordinator_module, "build_turn_commit"),
    "start_effects": (EffectRunner, "start"),
    "on_commit_result": (Coordinator, "_handle_commit_result"),
    "on_committed": (Coordinator, "_on_committed"),
    "after_commit": (Coordinator, "_after_commit"),
}


@pytest.mark.parametrize("site", RUN_SITES)
@pytest.mark.parametrize("start", ["created", "claimed"])
@pytest.mark.parametrize("store_kind", STORES)
def test_error_at_a_run_holds_that_run_and_no_other(site, start, store_kind, tmp_path, monkeypatch):
    if start == "created" and site in ("decide", "is_first_execution"):
        return  # a run that is created here is not admitted

    async def scenario(h: Harness) -> None:
        other = await h.engine(injected)
        if start == "claimed":
            for run_id in ("bad", *GOOD):
                await h.drive(other.start(injected.options(id=run_id)))
            await h.settle()
            await h.crash(other)
        engine = await h.engine(injected) if start == "claimed" else other
        await h.clock.advance(60)  # the dead worker is fenced: a later change of workers would retry the held run
        raise_for(monkeypatch, *RUN_SITES[site], run_id="bad")
        if start == "created":
            for run_id in ("bad", *GOOD):
                await h.drive(engine.start(injected.options(id=run_id)))
        for run_id in ("bad", *GOOD):
            await h.drive(engine.send(run_id, "go", "now"))
        assert [await h.drive(engine.result(run_id)) for run_id in GOOD] == [6] * 3
        await h.clock.advance(120)
        assert await hold_of(h, "bad") == "internal_error"

    asyncio.run(_on_store(store_kind, tmp_path, scenario))


async def _on_store(store_kind: str, tmp_path: Any, scenario: Callable[[Harness], Any]) -> None:
    from perdure.testing import VirtualClock
    from tests.engine.store_matrix import make_store

    clock = VirtualClock()
    async with Harness(make_store(store_kind, tmp_path, clock), clock=clock) as h:
        await scenario(h)


@on_every_store
async def test_load_that_raises_for_one_run_holds_it_and_loads_the_others(h):
    other = await h.engine(injected)
    for run_id in ("bad", *GOOD):
        await h.drive(other.start(injected.options(id=run_id)))
    await h.crash(other)
    engine = await h.engine(injected)
    await h.clock.advance(60)  # the dead worker is fenced: a later change of workers would retry the held run
    load = engine.faults.inner.load

    async def raising(ids):
        if "bad" in ids:
            raise KeyError("injected")
        return await load(ids)

    engine.faults.load = raising
    for run_id in ("bad", *GOOD):
        await h.drive(engine.send(run_id, "go", "now"))
    assert [await h.drive(engine.result(run_id)) for run_id in GOOD] == [6] * 3
    await h.clock.advance(120)
    assert await hold_of(h, "bad") == "internal_error"
    engine.faults.load = load
    await h.drive(engine.resume("bad"))
    assert await h.drive(engine.result("bad")) == 6


@on_every_store
async def test_inbox_that_cannot_be_read_holds_the_run(h):
    engine = await h.engine(injected)
    gate = asyncio.Event()

    @workflow(name="gated")
    async def gated(ctx: Context) -> str:
        await waits_for_gate()
        return str(await ctx.receive("go"))

    @step
    async def waits_for_gate() -> None:
        await gate.wait()

    engine = await h.engine(gated)
    await engine.start(gated.options(id="bad"))
    await h.settle()
    inbox = engine.faults.inner.inbox

    async def raising(run_id, after=0):
        raise KeyError("injected")

    engine.faults.inbox = raising
    await h.drive(engine.send("bad", "go", "now"))
    await h.settle()
    assert await hold_of(h, "bad") == "internal_error"
    engine.faults.inbox = inbox
    gate.set()
    await h.drive(engine.resume("bad"))
    assert await h.drive(engine.result("bad")) == "now"


# Calls of the store by the periodic tasks of a worker.
STORE_CALLS = (
    *("load", "claim", "owned", "owned_with_messages", "next_wake", "unfinalized", "unfinished_broadcasts"),
    *("workers", "renew", "release_runs", "remove_worker", "fence_worker", "prune", "keys", "commit"),
)


@pytest.mark.parametrize("call", STORE_CALLS)
@pytest.mark.parametrize("error", [KeyError("injected"), asyncio.CancelledError()], ids=["error", "cancelled"])
def test_defect_in_a_store_call_delays_runs_and_ends_no_task(call, error, tmp_path):
    async def scenario(h: Harness) -> None:
        dead = await h.engine(injected)
        for run_id in GOOD:
            await h.drive(dead.start(injected.options(id=run_id)))
        await h.crash(dead)
        engine = await h.engine(injected)
        # The second error of `load` would meet a single run, which is then held.
        original, left = getattr(engine.faults, call), [1 if call == "load" else 2]

        async def raising(*args: Any, **kwargs: Any) -> Any:
            result = await original(*args, **kwargs)  # executed, but the result is lost
            if left[0] and h.clock.now() >= since:
                left[0] -= 1
                raise error
            return result

        since = h.clock.now() + 1
        setattr(engine.faults, call, raising)
        client = await h.client()
        for run_id in GOOD:
            await h.drive(client.send(run_id, "go", "now"))
        assert engine._runtime is not None
        tasks = {task.name: task._task for task in engine._runtime._periodic_tasks}
        await h.clock.advance(400)
        assert [await h.drive(client.result(run_id)) for run_id in GOOD] == [6] * 3
        assert all(task is not None and not task.done() for task in tasks.values())

    asyncio.run(_on_store("memory", tmp_path, scenario))


@pytest.mark.parametrize("task_name", ["claim", "finalize", "broadcast", "lease", "takeover", "slow_steps", "keys"])
def test_periodic_task_that_raises_is_logged_counted_and_repeated(task_name, tmp_path, caplog):
    async def scenario(h: Harness) -> None:
        engine = await h.engine(injected)
        assert engine._runtime is not None
        (task,) = [each for each in engine._runtime._periodic_tasks if each.name == task_name]
        tick, left = task._tick, [2]

        async def raising(now: float) -> float | None:
            if left[0]:
                left[0] -= 1
                raise AssertionError("injected") if left[0] else asyncio.CancelledError()
            return await tick(now)

        task._tick = raising
        task.trigger()
        await h.clock.advance(30)
        assert engine._runtime.task_failures[task_name] == 2
        run = await engine.start(injected.options(id=GOOD[0]))
        await h.drive(engine.send(run.id, "go", "now"))
        assert await h.drive(run.result()) == 6

    asyncio.run(_on_store("memory", tmp_path, scenario))
    found = [each for each in caplog.records if f"Periodic task {task_name} raised" in each.getMessage()]
    assert [each.levelno for each in found] == [logging.ERROR] * 2


@on_every_store
async def test_run_that_its_worker_does_not_have_in_memory_is_loaded_again(h):
    engine = await h.engine(injected)
    await h.drive(engine.start(injected.options(id="stray")))
    await h.settle()
    assert engine._runtime is not None
    coordinator = engine._runtime.coordinator
    lost: list[Any] = []
    coordinator.on_runs_claimed = lambda runs, at=None: lost.extend(runs)
    await h.drive(engine.send("stray", "go", "now"))
    await h.settle()
    assert [run.id for run in lost] == ["stray"]
    del coordinator.on_runs_claimed
    assert await h.drive(engine.result("stray"), within=100) == 6


@on_every_store
async def test_runs_of_a_worker_whose_row_was_deleted_are_released(h):
    gate = asyncio.Event()

    @step
    async def waits() -> int:
        await gate.wait()
        return 6

    @workflow(name="released")
    async def released(ctx: Context) -> int:
        return await waits()

    engine = await h.engine(released)
    run = await engine.start(released.options(id="r"))
    await h.settle()
    await delete_worker(h, engine.worker)
    await h.clock.advance(20)
    gate.set()
    assert await h.drive(run.result(), within=100) == 6


async def delete_worker(h: Harness, worker_id: str) -> None:
    """Delete the row of a worker that still owns runs, as no call of the store does."""
    from tests.stores.damage import delete_worker_row

    await delete_worker_row(h.store, worker_id)


@on_every_store
async def test_load_during_the_reload_of_an_unstorable_turn_keeps_its_steps(h):
    """A turn cannot be stored, the run is reloaded with its inputs, and another load of the run starts meanwhile."""
    gate = asyncio.Event()

    @step
    async def slow() -> int:
        await gate.wait()
        return 1

    @step
    async def refused() -> str:
        return "refused"

    @workflow(name="reloaded")
    async def reloaded(ctx: Context) -> int:
        running = asyncio.create_task(slow())
        try:
            await refused()
        except Exception:
            return await running
        return 0

    engine = await h.engine(reloaded)
    engine.faults.refuse(
        lambda write: isinstance(write, CommitTurn) and any(b"refused" in (each.value or b"") for each in write.entries)
    )
    load, loading = engine.faults.inner.load, asyncio.Event()
    reload_may_return = asyncio.Event()

    async def delayed(ids):
        found = await load(ids)
        if not loading.is_set():
            loading.set()
            await reload_may_return.wait()
        return found

    engine.faults.load = delayed
    run = await engine.start(reloaded.options(id="r"))
    await loading.wait()
    assert engine._runtime is not None
    engine._runtime.coordinator.on_runs_found(["r"])
    await h.settle()
    reload_may_return.set()
    await h.settle()
    assert [location for location, _ in h.executed("r")].count("slow") == 1, "it was executing all the time"
    gate.set()
    assert await h.drive(run.result(), within=60) == 1
