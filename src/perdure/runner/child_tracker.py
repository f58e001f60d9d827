"""ChildTracker: whether a run may have children, and which of those that loops have started may still be running.

A run that fails or is cancelled stops its attached children. It may have some if its history contains the entry of one.
Live and on replay the same entries count, so that both request the stop or both do not. Entries of pruned iterations do
not count, except those that are kept.

When the iteration that started a child is pruned, the entry of the child stays: a rewind must find the child to stop
it. From then on the run observes the end of the child, by an entry of kind "watch" below the child's own. The watch is
pending until the observation is arranged. When the child ends, both entries are deleted. A loop therefore keeps as many
entries as it has running children.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from perdure.model.records import Entry, EntryStatus
from perdure.model.turns import ObserveRun, StartChild
from perdure.runner.attempt_tracker import AttemptTracker
from perdure.runner.entry_log import EntryLog
from perdure.runner.event_loop import WorkflowLoop
from perdure.runner.history import History
from perdure.runner.pending import PendingEntry
from perdure.runner.tasks import EntryFuture

PENDING, SUCCEEDED = EntryStatus.PENDING, EntryStatus.SUCCEEDED
WATCH = "watch"
STARTS_CHILD = ("child", "start_child")
CHILDREN = ("start_child", "result", "outcome")
"""The kinds of entries that record the start or the end of a child."""


class ChildTracker:
    """See the module's docstring. `watches` are keyed by the location of the child's entry."""

    __slots__ = ("_attempts", "_by_id", "_children", "_log", "_loop", "_started_at", "watches")

    def __init__(self, log: EntryLog, attempts: AttemptTracker, loop: WorkflowLoop, history: History) -> None:
        self._log = log
        self._attempts = attempts
        self._loop = loop
        self._children: dict[str, Entry] = {}  # the entries that started children, by location
        self._by_id: dict[str, str] = {}
        self.watches: dict[str, PendingEntry] = {}
        self._started_at: dict[str, None] = {}  # locations of all entries in the history that start children
        for entry in history.by_location.values():
            if entry.kind in STARTS_CHILD or (entry.kind == "step" and _has_internal_run(entry)):
                self._started_at[entry.location] = None
        if history.iterations:
            self._load(history)

    def _load(self, history: History) -> None:
        """Load children of iterations that no replay enters again."""
        past = [entry for entry in history.by_location.values() if history.is_before_resume_point(entry.location)]
        for entry in past:
            self.note(entry)
        for entry in past:
            child = entry.location.rpartition("/")[0]
            if entry.kind == WATCH and child in self._children:
                self._observe(child, PendingEntry.from_record(entry, EntryFuture(loop=self._loop), None, None))

    @property
    def may_exist(self) -> bool:
        """Whether this generation of the run may have attached children."""
        return bool(self._started_at)

    def on_requested(self, location: str) -> None:
        """Note that a child was requested at this location."""
        self._started_at[location] = None

    def note(self, entry: Entry) -> None:
        """Note that a child was started, or that a task has received its result."""
        if entry.seq is None or entry.kind not in CHILDREN:
            return
        detail = msgspec.json.decode(entry.detail or b"{}")
        if entry.kind != "start_child":
            self._on_result_received(self._by_id.get(detail.get("id")))
        elif detail.get("attached") and "/~" in entry.location:
            self._children[entry.location] = entry
            self._by_id[detail["id"]] = entry.location

    def _on_result_received(self, location: str | None) -> None:
        if location in self.watches:
            self._delete_child(location)
        elif location is not None:  # its iteration still exists, and keeps the entry
            self._by_id.pop(_child_id(self._children.pop(location)), None)

    def keep_after_pruning(self, loop: str, end: int) -> None:
        """Keep the children of pruned iterations of a loop (those before `end`) until their ends are known."""
        below = f"{loop}/~"
        pruned = [
            location
            for location in self._started_at
            if location.startswith(below) and int(location.removeprefix(below).partition("/")[0]) < end
        ]
        for location in pruned:
            child = self._children.get(location)
            if child is None:
                del self._started_at[location]
            else:
                self._log.record(child)
                self._watch(location, _child_id(child))

    def _watch(self, location: str, run_id: str) -> None:
        known = self.watches.get(location)
        if known is not None:
            self._log.record(known.to_entry(known.recorded or PENDING))
            return
        pending = self._log.new_unordered(f"{location}/~{WATCH}", WATCH, run_id, EntryFuture(loop=self._loop))
        self._observe(location, pending)
        self._log.record_pending(pending)

    def _observe(self, location: str, pending: PendingEntry) -> None:
        self.watches[location] = pending
        if pending.recorded is not SUCCEEDED:
            pending.action = ObserveRun(pending.name, pending.target)
            self._attempts.schedule_effect(pending)

    def on_effect_done(self, watch: str, *, ended: bool) -> bool:
        """Handle the result of a watch's external effect: the child is observed, or has `ended` already.

        False if no watch is at this location.
        """
        location = watch.rpartition("/")[0]
        pending = self.watches.get(location)
        if pending is None or pending.location != watch:
            return False
        if ended:
            self._delete_child(location)
        else:
            if pending.running:
                self._attempts.end(pending)
            pending.recorded = SUCCEEDED
            self._log.record(pending.to_entry(SUCCEEDED, settled_at=self._loop.now))
        return True

    def on_child_ended(self, target: str, run_id: str) -> bool:
        """Handle the message that a child has ended. False if it is not addressed to a watch."""
        location = target.partition("/")[2].rpartition("/")[0]
        pending = self.watches.get(location)
        if pending is None or pending.target != target:
            return False
        if run_id == pending.name:  # otherwise it is a child of an earlier run with the id of this one
            self._delete_child(location)
        return True

    def _delete_child(self, location: str) -> None:
        self._attempts.drop_effect(self.watches.pop(location))
        self._by_id.pop(_child_id(self._children.pop(location)), None)
        self._started_at.pop(location, None)
        self._log.delete(location)


def _has_internal_run(entry: Entry) -> bool:
    return entry.detail is not None and b'"attached":' in entry.detail


def _child_id(entry: Entry) -> str:
    return str(msgspec.json.decode(entry.detail or b"{}").get("id", ""))


def match_recorded_child(pending: PendingEntry, action: StartChild, describe: Callable[[StartChild], bytes]) -> bool:
    """Compare a requested child with the recorded one. Return whether the entry has changed and must be recorded.

    After a rewind and in a fork the child has another id. That id is recorded before the child starts, so that the
    next rewind finds it.
    """
    child = msgspec.json.decode(pending.detail or b"{}")
    if action.fallback_id is not None and child.get("id") == action.fallback_id:
        action = pending.action = replace(action, run_id=action.fallback_id, fallback_id=None)
    if child.get("id") != action.run_id:
        pending.detail = describe(action)
        return True
    if not child.get("attached"):
        pending.action = replace(action, attached=False)  # the run existed before, as the recorded start says
    return False
