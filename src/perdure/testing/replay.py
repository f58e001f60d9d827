"""`replay`: would today's code go on with a run that was recorded yesterday? Nothing is executed.

Golden histories: export a run of each kind (`perdure export`, `engine.export_history`), keep the files with the tests,
and replay them there. What `perdure check` finds in a live store this finds before anybody has deployed anything.
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
"""What `export_history` gives; the JSON of it; the path of a file with that in it."""


def replay(history: History, workflow: Workflow[Any, Any], *, codec: Codec = JSON) -> None:
    """Raise `HistoryDiverged` if this code does not ask for what is recorded, with the same arguments, in this order.

    The error has the location, what was recorded and what was asked, and the line; a note says what would make the
    change safe. What the code does after the end of the history is new, and no divergence. `WorkflowMisuse` if the
    code cannot go on for another reason, or the history is that of another workflow or version. The tokens of deferreds
    are signed by a store and differ here: in a workflow that reads one, arguments are not compared.
    """
    snapshot = _snapshot(history)
    record = snapshot.record
    if (record.workflow, record.version) != (workflow.name, workflow.version):
        raise InvalidArgument(
            f"run {record.id!r} is of {record.workflow} v{record.version} and not of {workflow.name} "
            f"v{workflow.version}: a run keeps its workflow and version, so replay it against those"
        )
    misfit = _outside_of_a_task(lambda: _misfit(snapshot, workflow, codec))
    if misfit is not None:
        raise _error(misfit, workflow)


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
                f"this is no exported run: {error}; a file is given as a pathlib.Path, not as a string"
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


def _misfit(snapshot: Snapshot, workflow: Workflow[Any, Any], codec: Codec) -> IncompatibleRun | None:
    definitions, key = {(workflow.name, workflow.version): workflow}, _UnknownKey()
    keys = (cast("SigningKey", key),)
    misfit = find_incompatibility(snapshot, definitions, codec, keys)
    if misfit is None or misfit.recorded != "other arguments" or not key.used:
        return misfit
    unmarked = tuple(replace(entry, fingerprint=None) for entry in snapshot.entries)
    return find_incompatibility(replace(snapshot, entries=unmarked), definitions, codec, keys)


def _error(misfit: IncompatibleRun, workflow: Workflow[Any, Any]) -> Exception:
    code = workflow.fn.__code__
    line = misfit.line or f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
    error: Exception
    if misfit.kind == "diverged" and misfit.recorded is not None and misfit.asked is not None:
        error = HistoryDiverged(misfit.location or "its beginning", misfit.recorded, misfit.asked, line)
        why = f": {misfit.reason}" if misfit.location is None else ""  # else the error has said it
        error.add_note(f"run {misfit.run_id!r} of {misfit.workflow} v{misfit.version}{why}")
    else:
        error = WorkflowMisuse(f"run {misfit.run_id!r} could not go on with this code: {misfit.reason} (at {line})")
    error.add_note(misfit.remedy)
    return error


def _outside_of_a_task(work: Callable[[], IncompatibleRun | None]) -> IncompatibleRun | None:
    """A workflow's tasks are never run from inside a task of another loop: an async test is one."""
    if events._get_running_loop() is None:
        return work()
    found: list[IncompatibleRun | None] = []
    thread = threading.Thread(target=lambda: found.append(work()), name="perdure-replay")
    thread.start()
    thread.join()
    return found[0]
