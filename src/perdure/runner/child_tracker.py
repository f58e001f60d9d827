"""Nursery: attached children that were started in a loop and may be running still.

When the iteration that started one is pruned, its entry stays: a rewind must find the child to stop it. Only then does
the run ask to be told of its end (an entry of kind "watch" below the child's own, which is pending until that is
arranged); once told, both go. So a loop keeps as many entries as it has children that run.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from perdure.model.records import Entry, EntryStatus
from perdure.model.turns import ObserveRun
from perdure.runner.history import History
from perdure.runner.pending import PendingEntry
from perdure.runner.tasks import EntryFuture

PENDING, SUCCEEDED = EntryStatus.PENDING, EntryStatus.SUCCEEDED
WATCH = "watch"
CHILDREN = ("start_child", "result", "outcome")
"""The kinds of entries that tell of a child's start, or of its end."""


class ChildEntryRecorder(Protocol):
    """What of the ledger is needed here."""

    changed: dict[str, Entry]
    effects_to_start: dict[str, PendingEntry]
    running_count: int

    def next_ask(self) -> int: ...

    def forget(self, path: str) -> None: ...


class ChildTracker:
    """See the module's docstring."""

    __slots__ = ("_books", "_by_id", "_children", "_generation", "_loop", "watches")

    def __init__(self, books: ChildEntryRecorder, loop: Any, generation: int, history: History) -> None:
        self._books = books
        self._loop = loop
        self._generation = generation
        self._children: dict[str, Entry] = {}  # entries that have started them, by location
        self._by_id: dict[str, str] = {}
        self.watches: dict[str, PendingEntry] = {}  # by the location of the child's entry
        if history.iterations:
            self._take_up(history)

    def _take_up(self, history: History) -> None:
        """What no replay comes by: children of iterations that are past."""
        past = [entry for entry in history.by_location.values() if history.is_before_resume_point(entry.location)]
        for entry in past:
            self.note(entry)
        for entry in past:
            child = entry.location.rpartition("/")[0]
            if entry.kind == WATCH and child in self._children:
                self._send(child, PendingEntry.of(entry, EntryFuture(loop=self._loop), None, None))

    def note(self, entry: Entry) -> None:
        """A child was started, or its end was told to somebody who waited."""
        if entry.seq is None or entry.kind not in CHILDREN:
            return
        detail = msgspec.json.decode(entry.detail or b"{}")
        if entry.kind != "start_child":
            self._forget(self._by_id.get(detail.get("id")))
        elif detail.get("attached") and "/~" in entry.location:
            self._children[entry.location] = entry
            self._by_id[detail["id"]] = entry.location

    def _forget(self, location: str | None) -> None:
        """It has ended. If its iteration is gone already, so is the reason to keep its entry."""
        if location in self.watches:
            self._forget_child(location)
        elif location is not None:
            self._by_id.pop(_id_in(self._children.pop(location)), None)

    def keep_after_pruning(self, loop: str, end: int) -> None:
        """Iterations of a loop before this one were pruned: what is here of them stays, until its end is told."""
        below = f"{loop}/~"
        for location, child in self._children.items():
            iteration = location.removeprefix(below).partition("/")[0]
            if location.startswith(below) and int(iteration) < end:
                self._books.changed[location] = child
                self._watch(location, _id_in(child))

    def _watch(self, location: str, run_id: str) -> None:
        known = self.watches.get(location)
        if known is not None:
            self._books.changed[known.location] = known.entry(known.recorded or PENDING)
            return
        pending = PendingEntry(
            f"{location}/~{WATCH}",
            WATCH,
            run_id,
            self._books.next_ask(),
            -1,
            self._generation,
            self._loop.now,
            EntryFuture(loop=self._loop),
            None,
            None,
        )
        self._send(location, pending)
        self._books.changed[pending.location] = pending.entry(PENDING)

    def _send(self, location: str, pending: PendingEntry) -> None:
        self.watches[location] = pending
        if pending.recorded is not SUCCEEDED:
            pending.work = ObserveRun(pending.name, pending.target)
            self._books.effects_to_start[pending.location] = pending

    # --- what is told

    def errand_done(self, watch: str, *, ended: bool) -> bool:
        """The run has asked to be told, or has found out that there is nothing to wait for. False: that was not it."""
        location = watch.rpartition("/")[0]
        pending = self.watches.get(location)
        if pending is None or pending.location != watch:
            return False
        if ended:
            self._forget_child(location)
        else:
            if pending.under_way:
                pending.under_way = False
                self._books.running_count -= 1
            pending.recorded = SUCCEEDED
            self._books.changed[watch] = pending.entry(SUCCEEDED, settled_at=self._loop.now)
        return True

    def on_child_ended(self, target: str) -> bool:
        """The end of a child has come as mail. False: that was for somebody else."""
        location = target.partition("/")[2].rpartition("/")[0]
        pending = self.watches.get(location)
        if pending is None or pending.target != target:
            return False
        self._forget_child(location)
        return True

    def _forget_child(self, location: str) -> None:
        pending = self.watches.pop(location)
        if pending.under_way:  # its report is still to come
            pending.under_way = False
            self._books.running_count -= 1
        self._books.effects_to_start.pop(pending.location, None)
        self._by_id.pop(_id_in(self._children.pop(location)), None)
        self._books.forget(location)


def _id_in(entry: Entry) -> str:
    return str(msgspec.json.decode(entry.detail or b"{}").get("id", ""))
