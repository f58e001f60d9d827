"""Rehearsal: would this code go on with the runs that are open? Replays their histories, and carries out nothing.

The gate before a deploy. A run is advanced as a worker would advance it, with `strict` and without any input; what the
turn asks for is thrown away. A run that would be held is a misfit, with the place, what is recorded, what is asked for,
the line, and the call that would make the change safe.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from perdure.admin.health_check import Progress, records_of
from perdure.client.client import Client
from perdure.codec import Codec
from perdure.errors import InvalidPayload
from perdure.execution.run_loader import build_run_start
from perdure.model.queries import RunQuery
from perdure.model.records import Entry, Hold, SigningKey
from perdure.runner.runner import Runner
from perdure.stores.results import Snapshot
from perdure.workflows.definition import Workflow
from perdure.workflows.tokens import KEYS

Definitions = Mapping[tuple[str, int], Workflow[Any, Any]]
CODE_HOLD_KINDS = ("diverged", "deadlock", "livelock", "internal_error")  # what the code is to blame for
_THING = re.compile(r"^(\w+) '(.*)'(, cancelled)?$")


@dataclass(frozen=True, slots=True)
class IncompatibleRun:
    """A run that this code could not go on with, and what would help."""

    run_id: str
    workflow: str
    version: int
    kind: str  # of the hold, or "no_version": the code has the workflow, but not this version of it
    reason: str
    location: str | None = None
    recorded: str | None = None
    asked: str | None = None
    line: str | None = None
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class CompatibilityReport:
    """How many runs fit, which do not, and how many are of workflows that the code does not have at all."""

    compatible: int
    misfits: tuple[IncompatibleRun, ...]
    unknown_workflows: Mapping[str, int]


async def check_compatibility(
    client: Client, definitions: Definitions, query: RunQuery | None = None, progress: Progress | None = None
) -> CompatibilityReport:
    """Replay every open run (of this query) against this code."""
    link, compatible = client._open, 0
    misfits: list[IncompatibleRun] = []
    unknown_workflows: Counter[str] = Counter()
    keys = tuple(await link.read(lambda: link.store.keys(KEYS, link.clock.now())))
    names = {name for name, _ in definitions}
    async for page in records_of(client, query):
        ours = [record.id for record in page if record.workflow in names]
        unknown_workflows.update(record.workflow for record in page if record.workflow not in names)
        for snapshot in await link.read(partial(link.store.load, ours)) if ours else ():
            if snapshot is None or snapshot.record.status.terminal:
                continue
            found = await _run_outside_task(partial(find_incompatibility, snapshot, definitions, link.codec, keys))
            misfits.extend([] if found is None else [found])
            compatible += found is None
        if progress is not None:
            progress(len(page))
    return CompatibilityReport(compatible, tuple(misfits), dict(unknown_workflows))


def find_incompatibility(
    snapshot: Snapshot, definitions: Definitions, codec: Codec, keys: tuple[SigningKey, ...] = ()
) -> IncompatibleRun | None:
    """What is wrong between a run and the code, or None."""
    record = snapshot.record
    definition = definitions.get((record.workflow, record.version))
    if definition is None:
        there = ", ".join(f"v{version}" for name, version in sorted(definitions) if name == record.workflow)
        reason = f"version {record.version} of {record.workflow} is not in this code, which has {there}"
        remedy = f"keep version {record.version} beside the new one until its runs have ended"
        return IncompatibleRun(record.id, record.workflow, record.version, "no_version", reason, remedy=remedy)
    held = _held(snapshot, definition, codec, keys)
    if held is None or held.kind not in CODE_HOLD_KINDS:
        return None
    return IncompatibleRun(
        record.id,
        record.workflow,
        record.version,
        held.kind,
        held.reason,
        held.location,
        held.recorded,
        held.asked,
        held.line,
        suggest_fix(held, snapshot.entries),
    )


def _held(
    snapshot: Snapshot, definition: Workflow[Any, Any], codec: Codec, keys: tuple[SigningKey, ...]
) -> Hold | None:
    start = build_run_start(snapshot, definition, codec, keys, strict=True)
    try:
        runner = Runner(start)
        try:
            # Not the present: nothing that has become due since is fired, so that only what is recorded is replayed.
            return runner.advance(start.first_executed_at).held
        finally:
            runner.close()
    except InvalidPayload as misfit:
        return Hold("diverged", str(misfit), recorded="the payload", asked="one of another type")
    except Exception as error:
        return Hold("internal_error", f"{type(error).__name__}: {error}")


async def _run_outside_task(work: Callable[[], IncompatibleRun | None]) -> IncompatibleRun | None:
    """A workflow's tasks are never run from inside a task of another loop."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[IncompatibleRun | None] = loop.create_future()

    def carry_out() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    loop.call_soon(carry_out)
    return await done


# --- what would help -----------------------------------------------------------------------------------------------


def suggest_fix(held: Hold, entries: Sequence[Entry]) -> str:
    """The call that would make the change safe, as well as it can be told from what was recorded and asked."""
    if held.kind != "diverged":
        return "the code cannot go on from here, with or without a guard: see the line"
    if held.recorded == "the payload":
        return "give the new parameter a default, or make this another version: @workflow(version=...)"
    if held.recorded == "other arguments":
        gate = f"{_name_at(held.location or '', entries)}-arguments"
        return f'keep the old arguments for old runs: if ctx.version("{gate}", latest=2) < 2: ...'
    recorded, asked = _thing(held.recorded, entries), _thing(held.asked, entries)
    if recorded is not None and (asked is None or _is_on_record(held.asked, entries)):
        kind, name = recorded
        second = "" if kind == "step" else f', "{kind}"'
        gone = f'if it is gone from the code, put ctx.removed("{name}"{second}) in its place'
        return f"{gone}; if it only comes later now, keep the old order"
    if asked is not None:
        return f'new runs only: if ctx.version("{asked[1]}", latest=2) >= 2: ... around the new {asked[0]} {asked[1]!r}'
    return 'guard the change: if ctx.version("a-name-for-it", latest=2) >= 2: ...'


def _thing(text: str | None, entries: Sequence[Entry]) -> tuple[str, str] | None:
    """The kind and name of what a hold speaks of: `step 'pages/~3/fetch#1'` is a step called fetch."""
    found = _THING.match(text or "")
    return None if found is None else (found[1], _name_at(found[2], entries))


def _is_on_record(text: str | None, entries: Sequence[Entry]) -> bool:
    """At this very location: the same step elsewhere, in a branch perhaps, is another one."""
    found = _THING.match(text or "")
    return found is not None and any((entry.kind, entry.location) == (found[1], found[2]) for entry in entries)


def _name_at(location: str, entries: Sequence[Entry]) -> str:
    for entry in entries:
        if entry.location == location:
            return entry.name
    return re.sub(r"(\[.*\]|#\d+)$", "", location.rpartition("/")[2])
