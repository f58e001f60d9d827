"""`replay`: check whether the current code can continue a recorded run. No step is executed.

Golden histories: export a run of each kind (`perdure export`, `engine.export_history`), store the files with the tests,
and replay them there. The check finds before a deployment what `perdure check` finds in a live store.
"""

from __future__ import annotations

import threading
from asyncio import events
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from perdure.admin.compatibility import IncompatibleRun, find_incompatibility
from perdure.client.run_export import parse_snapshot
from perdure.codec import JSON, Codec
from perdure.errors import HistoryDiverged, InvalidArgument, WorkflowMisuse
from perdure.model.records import SigningKey
from perdure.stores.results import Snapshot
from perdure.workflows.definition import Workflow

History = dict[str, Any] | str | bytes | PathLike[str] | Snapshot
"""The value of `export_history`, its JSON, or the path of a file that contains the JSON."""


def replay(history: History, workflow: Workflow[Any, Any], *, codec: Codec = JSON) -> None:
    """Check that this code requests the recorded calls, with the same arguments, in the same order.

    Raises `HistoryDiverged` otherwise, with the location, the recorded call, the requested call and the line; a note
    says how to make the change safe. Calls after the end of the history are new and no divergence. Raises
    `WorkflowMisuse` if the code cannot continue for another reason, and `InvalidArgument` for a history of another
    workflow or version. The tokens of deferreds are signed by a store and differ here; arguments of a workflow that
    reads one are not compared.
    """
    snapshot = _snapshot(history)
    record = snapshot.record
    if (record.workflow, record.version) != (workflow.name, workflow.version):
        raise InvalidArgument(
            f"run {record.id!r} is of {record.workflow} v{record.version} and not of {workflow.name} "
            f"v{workflow.version}: a run keeps its workflow and version, so replay it against those"
        )
    mismatch = _run_outside_task(lambda: _find_mismatch(snapshot, workflow, codec))
    if mismatch is not None:
        raise _error(mismatch, workflow)


def _snapshot(history: History) -> Snapshot:
    if isinstance(history, Snapshot):
        return history
    if isinstance(history, PathLike):
        history = Path(history).read_bytes()
    if isinstance(history, (str, bytes)):
        try:
            history = msgspec.json.decode(history)
        except msgspec.DecodeError as error:
            raise InvalidArgument(
                f"this is not an exported run: {error}; a file is given as a pathlib.Path, not as a string"
            ) from None
    return parse_snapshot(history)


class _UnknownKey:
    """Stand-in for a `SigningKey`, which no export contains. `used` records whether a token was signed with it."""

    number = 0
    created_at = 0.0

    def __init__(self) -> None:
        self.used = False

    @property
    def secret(self) -> bytes:
        self.used = True
        return b""


def _find_mismatch(snapshot: Snapshot, workflow: Workflow[Any, Any], codec: Codec) -> IncompatibleRun | None:
    definitions, key = {(workflow.name, workflow.version): workflow}, _UnknownKey()
    keys = (cast("SigningKey", key),)
    misfit = find_incompatibility(snapshot, definitions, codec, keys)
    if misfit is None or misfit.recorded != "other arguments" or not key.used:
        return misfit
    unmarked = tuple(replace(entry, fingerprint=None) for entry in snapshot.entries)
    return find_incompatibility(replace(snapshot, entries=unmarked), definitions, codec, keys)


def _error(mismatch: IncompatibleRun, workflow: Workflow[Any, Any]) -> Exception:
    code = workflow.fn.__code__
    line = mismatch.line or f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
    error: Exception
    if mismatch.kind == "diverged" and mismatch.recorded is not None and mismatch.asked is not None:
        error = HistoryDiverged(mismatch.location or "its beginning", mismatch.recorded, mismatch.asked, line)
        why = f": {mismatch.reason}" if mismatch.location is None else ""  # otherwise the error contains it
        error.add_note(f"run {mismatch.run_id!r} of {mismatch.workflow} v{mismatch.version}{why}")
    else:
        error = WorkflowMisuse(f"run {mismatch.run_id!r} cannot continue with this code: {mismatch.reason} (at {line})")
    error.add_note(mismatch.suggested_fix)
    return error


def _run_outside_task(work: Callable[[], IncompatibleRun | None]) -> IncompatibleRun | None:
    """Run `work` in a thread if called inside a task, because the runner needs a thread without a running loop."""
    if events._get_running_loop() is None:
        return work()
    found: list[IncompatibleRun | None] = []
    thread = threading.Thread(target=lambda: found.append(work()), name="perdure-replay")
    thread.start()
    thread.join()
    return found[0]
