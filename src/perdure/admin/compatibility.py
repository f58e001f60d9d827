"""Check whether this code can continue the open runs of a store, for `perdure check` before a deploy.

It replays the history of each run as a worker would, with `strict` and without input, and executes nothing: the turn is
discarded. A run that a worker would hold is incompatible. It is reported with the location, the recorded entry, the
requested one, the source line, and the call that would make the change safe.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from perdure.admin.store_views import Progress, records_of
from perdure.client.client import Client
from perdure.codec import Codec
from perdure.errors import InvalidPayload
from perdure.execution.catalog import Catalog
from perdure.execution.run_loader import build_run_start
from perdure.model.queries import RunQuery
from perdure.model.records import Entry, Hold, SigningKey
from perdure.runner.runner import Runner
from perdure.stores.results import Snapshot
from perdure.workflows.definition import Workflow, WorkflowLookup
from perdure.workflows.tokens import KEYS

Definitions = Mapping[tuple[str, int], Workflow[Any, Any]]
CODE_HOLD_KINDS = ("diverged", "deadlock", "livelock", "internal_error")  # holds that the code causes
_ENTRY_TEXT = re.compile(r"^(\w+) '(.*)'(, cancelled)?$")


@dataclass(frozen=True, slots=True)
class IncompatibleRun:
    """A run that this code cannot continue, and a suggested fix."""

    run_id: str
    workflow: str
    version: int
    kind: str  # kind of the hold, or "no_version": the code has the workflow, but not this version of it
    reason: str
    location: str | None = None
    recorded: str | None = None
    asked: str | None = None
    line: str | None = None
    suggested_fix: str = ""


@dataclass(frozen=True, slots=True)
class CompatibilityReport:
    """The number of compatible runs, the incompatible ones, and the number of runs per workflow not in the code."""

    compatible: int
    incompatible: tuple[IncompatibleRun, ...]
    unknown_workflows: Mapping[str, int]


async def check_compatibility(
    client: Client, definitions: Definitions, query: RunQuery | None = None, progress: Progress | None = None
) -> CompatibilityReport:
    """Replay every open run that matches the query against this code."""
    session, compatible = client._session, 0
    incompatible: list[IncompatibleRun] = []
    unknown_workflows: Counter[str] = Counter()
    keys = tuple(await session.read(lambda: session.store.keys(KEYS, session.clock.now())))
    names = {name for name, _ in definitions}
    async for page in records_of(client, query):
        known = [record.id for record in page if record.workflow in names]
        unknown_workflows.update(record.workflow for record in page if record.workflow not in names)
        for snapshot in await session.read(partial(session.store.load, known)) if known else ():
            if not isinstance(snapshot, Snapshot) or snapshot.record.status.terminal:
                continue
            found = await _run_outside_task(partial(find_incompatibility, snapshot, definitions, session.codec, keys))
            incompatible.extend([] if found is None else [found])
            compatible += found is None
        if progress is not None:
            progress(len(page))
    return CompatibilityReport(compatible, tuple(incompatible), dict(unknown_workflows))


def find_incompatibility(
    snapshot: Snapshot, definitions: Definitions, codec: Codec, keys: tuple[SigningKey, ...] = ()
) -> IncompatibleRun | None:
    """Return why this code cannot continue a run; None if it can."""
    record = snapshot.record
    definition = definitions.get((record.workflow, record.version))
    if definition is None:
        existing = ", ".join(f"v{version}" for name, version in sorted(definitions) if name == record.workflow)
        reason = f"version {record.version} of {record.workflow} is not in this code, which has {existing}"
        fix = f"keep version {record.version} beside the new one until its runs have ended"
        return IncompatibleRun(record.id, record.workflow, record.version, "no_version", reason, suggested_fix=fix)
    held = _replay(snapshot, definition, Catalog(definitions.values()), codec, keys)
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


def _replay(
    snapshot: Snapshot,
    definition: Workflow[Any, Any],
    workflows: WorkflowLookup,
    codec: Codec,
    keys: tuple[SigningKey, ...],
) -> Hold | None:
    """Replay a run and return the hold that results, if any."""
    start = build_run_start(snapshot, definition, codec, keys, workflows=workflows, strict=True)
    try:
        runner = Runner(start)
        try:
            # With the time of the first execution no timer fires, so that only recorded entries are replayed.
            turn = runner.advance(start.first_executed_at)
            return turn.held if turn is not None else None
        finally:
            runner.close()
    except InvalidPayload as error:
        return Hold("diverged", str(error), recorded="the payload", asked="one of another type")
    except Exception as error:
        return Hold("internal_error", f"{type(error).__name__}: {error}")


async def _run_outside_task(work: Callable[[], IncompatibleRun | None]) -> IncompatibleRun | None:
    """Call from the event loop itself: a workflow's tasks cannot run inside a task of another loop."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[IncompatibleRun | None] = loop.create_future()

    def call() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    loop.call_soon(call)
    return await done


# --- suggested fix -------------------------------------------------------------------------------------------------


def suggest_fix(held: Hold, entries: Sequence[Entry]) -> str:
    """Return the call that would make the change safe, derived from the recorded and the requested entry."""
    if held.kind != "diverged":
        return "no version gate helps, because the code cannot continue from here; see the line"
    if held.recorded == "the payload":
        return "give the new parameter a default, or make this another version: @workflow(version=...)"
    if held.recorded == "other arguments":
        gate = f"{_name_at(held.location or '', entries)}-arguments"
        return f'keep the old arguments for old runs: if ctx.version("{gate}", latest=2) < 2: ...'
    recorded, requested = _parse_entry(held.recorded, entries), _parse_entry(held.asked, entries)
    if recorded is not None and (requested is None or _is_recorded(held.asked, entries)):
        kind, name = recorded
        second = "" if kind == "step" else f', "{kind}"'
        removed = f'if the code no longer has it, call ctx.removed("{name}"{second}) there'
        return f"{removed}; if it only comes later now, keep the old order"
    if requested is not None:
        kind, name = requested
        return f'new runs only: if ctx.version("{name}", latest=2) >= 2: ... around the new {kind} {name!r}'
    return 'guard the change: if ctx.version("a-name-for-it", latest=2) >= 2: ...'


def _parse_entry(text: str | None, entries: Sequence[Entry]) -> tuple[str, str] | None:
    """Return kind and name of the entry in a hold's text: `step 'pages/~3/fetch#1'` is a step called fetch."""
    found = _ENTRY_TEXT.match(text or "")
    return None if found is None else (found[1], _name_at(found[2], entries))


def _is_recorded(text: str | None, entries: Sequence[Entry]) -> bool:
    """Return whether the history has the entry at its location; the same step at another location does not count."""
    found = _ENTRY_TEXT.match(text or "")
    return found is not None and any((entry.kind, entry.location) == (found[1], found[2]) for entry in entries)


def _name_at(location: str, entries: Sequence[Entry]) -> str:
    for entry in entries:
        if entry.location == location:
            return entry.name
    return re.sub(r"(\[.*\]|#\d+)$", "", location.rpartition("/")[2])
