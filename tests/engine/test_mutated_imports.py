"""Mutated exports: each is refused with a message, or the imported run ends, is held, or has no worker.

The mutations of a rich export are drawn from a seed. All that are accepted are imported into one store, resumed and
cancelled; then each run is in a state that a person can see and act on, and no function was called that the code of the
workflow does not name.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from perdure import RunStatus, RunTerminated
from perdure.admin.run_import import import_run
from perdure.errors import InvalidArgument
from perdure.model.records import RunRecord
from perdure.testing import Harness
from tests.engine.rich_run import CALLED, Order, export_of_rich_run, rich_child, rich_run
from tests.engine.store_matrix import on_every_store
from tests.repetitions import repetitions

Export = dict[str, Any]
Path = tuple[Any, ...]

VALUES: list[Any] = [
    None, "", "x", "a\0b", "\u2028", "os:system", "step:os:system", "function:undo", "~cancel", "pages/~3", "rich",
    "compensation", "step", "loop", "iteration", "rewind", "cancel", "timer", "failed", "cancelled", "pending",
    0, 1, -1, 7, 2**31, 2**53, 2**63, 10**30, 0.5, -0.5, 1e18, 1e300, True,
    [], {}, [[]], [None], {"a": 1}, {"$base64": "AAAA"}, {"$base64": "bnVsbA=="}, {"$base64": "!"}, "²", "x" * 3_000,
]  # fmt: skip


def paths_of(value: Any, path: Path = ()) -> list[Path]:
    """All paths into an export, of objects and of plain values."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths_of(inner, (*path, key))
    return found


def parent_of(data: Export, path: Path) -> Any:
    inner: Any = data
    for part in path[:-1]:
        inner = inner[part]
    return inner


def delete(data: Export, rng: random.Random) -> None:
    path = rng.choice(paths_of(data))
    del parent_of(data, path)[path[-1]]


def replace(data: Export, rng: random.Random) -> None:
    path = rng.choice(paths_of(data))
    parent_of(data, path)[path[-1]] = copy.deepcopy(rng.choice(VALUES))


def replace_in_entry(data: Export, rng: random.Random) -> None:
    entry = rng.choice(data["entries"])
    fields = ["location", "kind", "name", "status", "call_seq", "ordinal", "seq", "value", "error", "attempts"]
    field = rng.choice([*fields, "generation", "started_at", "settled_at", "due_at", "fingerprint", "detail"])
    entry[field] = copy.deepcopy(rng.choice(VALUES))


def garble(data: Export, rng: random.Random) -> None:
    texts = [path for path in paths_of(data) if isinstance(parent_of(data, path)[path[-1]], str)]
    path = rng.choice(texts)
    text = parent_of(data, path)[path[-1]]
    at = rng.randrange(len(text) + 1)
    parent_of(data, path)[path[-1]] = text[:at] + rng.choice("/~#[]%:.0x") + text[at + 1 :]


def swap_fields(data: Export, rng: random.Random) -> None:
    first, second = rng.sample(data["entries"], 2)
    field = rng.choice(["location", "kind", "name", "status", "seq", "ordinal", "call_seq", "value", "detail", "error"])
    first[field], second[field] = second.get(field), first.get(field)


def swap_types(data: Export, rng: random.Random) -> None:
    path = rng.choice(paths_of(data))
    value = parent_of(data, path)[path[-1]]
    changed: Any = str(value) if not isinstance(value, str) else [value]
    parent_of(data, path)[path[-1]] = changed


def shuffle(data: Export, rng: random.Random) -> None:
    rng.shuffle(data[rng.choice(["entries", "inbox"])])


def duplicate(data: Export, rng: random.Random) -> None:
    rows = data[rng.choice(["entries", "inbox"])]
    row = copy.deepcopy(rng.choice(rows))
    if rng.random() < 0.5 and "location" in row:
        row["location"] += rng.choice(["#1", "/x", "x", "/~1"])
    rows.insert(rng.randrange(len(rows) + 1), row)


def cut(data: Export, rng: random.Random) -> None:
    del data["entries"][rng.randrange(len(data["entries"])) :]


def add_message(data: Export, rng: random.Random) -> None:
    kind = rng.choice(["cancel", "resume", "event", "assignment", "child", "deferred", "x"])
    entry = rng.choice(data["entries"])
    message = {"id": "added", "kind": kind, "name": rng.choice(["verdict", "never", "Offer", "rich", "rich-child"])}
    target = f"{rng.choice([0, 1])}/{entry['location']}"
    data["inbox"].append({**message, "target": target, "body": copy.deepcopy(rng.choice(VALUES)), "offset": 1})


def set_status(data: Export, rng: random.Random) -> None:
    data["run"]["status"] = rng.choice(["pending", "running", "succeeded", "failed", "cancelled"])
    data["run"]["ended_at"] = 5.0
    data["run"]["result"] = copy.deepcopy(rng.choice(VALUES))


MUTATIONS: list[Callable[[Export, random.Random], None]] = [
    delete, replace, replace, replace_in_entry, replace_in_entry, replace_in_entry, garble, garble, swap_fields,
    swap_fields, swap_types, shuffle, duplicate, cut, add_message, set_status,
]  # fmt: skip


def mutated(export: Export, seed: int) -> Export:
    """A copy of an export with one to four mutations."""
    rng, data = random.Random(seed), copy.deepcopy(export)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
            rng.choice(MUTATIONS)(data, rng)  # cannot be applied if an earlier one took away what it changes
    return data


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLED.clear()
    monkeypatch.setattr("os.system", lambda command: CALLED.append(f"FOREIGN {command}"))


COUNTS = {"memory": (150, 8_000), "sqlite": (60, 1_000), "postgres": (40, 400), "redis": (40, 400)}


@pytest.mark.long
@on_every_store
async def test_mutated_export_is_refused_or_harmless(h, store_kind):
    async with Harness() as elsewhere:
        export = await export_of_rich_run(elsewhere)
    CALLED.clear()
    engine = await h.engine(rich_run, rich_child)
    modules = set(sys.modules)
    await engine.start(rich_run, Order("healthy"), id="healthy")
    accepted: list[str] = []
    refused = 0
    for seed in range(repetitions(*COUNTS[store_kind])):
        try:
            accepted.append(await import_run(engine, mutated(export, seed), run_id=f"m{seed}"))
        except InvalidArgument:
            refused += 1
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert refused > 10
    assert len(accepted) > 10
    await h.settle()
    assert not [line for line in CALLED if "healthy" not in line and "reserve a" not in line], "nothing runs unresumed"
    await use(h, engine, accepted)
    stranded = {run_id: state for run_id in accepted if (state := await stranded_state(h, engine, run_id))}
    assert stranded == {}
    assert not [line for line in CALLED if line.startswith("FOREIGN")]
    assert {name for name in set(sys.modules) - modules if not name.startswith(("perdure", "tests"))} == set()
    await engine.cancel("healthy")
    await h.clock.advance(30)
    assert await engine.status("healthy") is RunStatus.CANCELLED


async def use(h: Harness, engine: Any, accepted: list[str]) -> None:
    """Resume and cancel all runs, and give them time."""
    for run_id in accepted:
        with contextlib.suppress(RunTerminated):
            await engine.resume(run_id)
    await h.settle()
    await h.clock.advance(30)
    for run_id in accepted:
        await engine.cancel(run_id)
    await h.settle()
    await h.clock.advance(60)
    await h.settle()


async def stranded_state(h: Harness, engine: Any, run_id: str) -> Any:
    """Return what is wrong with a run after its cancel; None if it has ended, is held, or has no worker."""
    [record] = await h.store.records([run_id])
    assert isinstance(record, RunRecord)
    described = await engine.describe(run_id)
    await engine.history(run_id)
    await engine.export_history(run_id)
    if record.status.terminal or (record.held is not None and record.held.reason and record.owner is None):
        return None
    served = (record.workflow, record.version, record.pool) == ("rich.run", 1, "default")
    if not served and [reason.kind for reason in described.waiting_for][-1:] == ["no_worker"]:
        return None
    return record.status, record.owner, record.waits


@on_every_store
async def test_lists_and_health_check_work_with_mutated_imports(h):
    async with Harness() as elsewhere:
        export = await export_of_rich_run(elsewhere)
    engine = await h.engine(rich_run, rich_child)
    for seed in range(60):
        with contextlib.suppress(InvalidArgument):
            await import_run(engine, mutated(export, seed), run_id=f"m{seed}")
    assert len(await engine.runs()) > 10
