"""Version gates: how changed code replays the history of older code.

A gate is pinned per run, or per iteration of a loop: `ctx.version` returns the same number for as long as the run or
the iteration lives, and `ctx.removed` skips the same entries. A pin is written with the next turn that is written
anyway, so that a mere replay writes nothing.
"""

from __future__ import annotations

from perdure.model.locations import escape_segment, segment_of
from perdure.model.records import Entry, EntryStatus
from perdure.runner.entry_tracker import EntryTracker
from perdure.runner.event_loop import WorkflowLoop
from perdure.runner.history import History
from perdure.runner.scopes import Scope

BLOCKS = ("join", "race", "map", "scope")
"""What has entries below its path, and no entry of its own in the order of its scope."""


class VersionGates:
    """Pins versions of a run and skips entries that its code no longer makes.

    `pins` are entries to write, `removed` the locations of recorded entries that were skipped: their completions are
    applied to nothing.
    """

    __slots__ = ("_entries", "_generation", "_history", "_loop", "_versions", "pins", "removed")

    def __init__(self, entries: EntryTracker, history: History, loop: WorkflowLoop, generation: int) -> None:
        self._entries = entries
        self._history = history
        self._loop = loop
        self._generation = generation
        self._versions: dict[str, dict[str, int]] = {}  # by path of the iteration ("" outside of loops) and gate
        self.pins: dict[str, Entry] = {}
        self.removed: set[str] = set()

    def pin_version(self, gate: str, latest: int, replaying: bool) -> int:
        """Return the version that this run, or the present iteration of its loop, has at a gate.

        A run that reaches the gate for the first time gets `latest`, or 1 if older code has passed here before: then
        the run is being replayed and its history has no pin.
        """
        self._entries.check_inside()
        iterations = self._loop.iterations.around(self._loop.scope().path)
        path = iterations[-1] if iterations else ""
        versions = self._versions.setdefault(path, {})
        pinned = versions.get(gate)
        if pinned is not None:
            return pinned
        segment = f"~version/{escape_segment(gate)}"
        location = f"{path}/{segment}" if path else segment
        record = self._history.by_location.get(location)
        if record is None and path and replaying:
            record = self._pin_of_run(segment, iterations[0])
        if record is not None:
            pinned = int(record.name)
            self._entries.log.count_recorded(record)
        else:
            pinned = 1 if replaying else latest
            self._pin(location, "version", str(pinned), replaying)
        versions[gate] = pinned
        return pinned

    def _pin_of_run(self, location: str, outermost: str) -> Entry | None:
        """Return the pin of an older version of perdure, which pinned gates in loops per run, if it has one.

        Such a pin was made when the outermost loop had started. An earlier one is of a gate outside of the loop.
        """
        record = self._history.by_location.get(location)
        loop = self._history.by_location.get(outermost.rpartition("/")[0])
        made_in_loop = record is not None and loop is not None and record.call_seq >= loop.call_seq
        return record if made_in_loop else None

    def leave_iteration(self, path: str) -> None:
        """Release the versions of an iteration that has ended."""
        self._versions.pop(path, None)

    def delete_pins(self, path: str) -> None:
        """Do not write the pins of a pruned iteration."""
        below = f"{path}/"
        for location in [each for each in self.pins if each.startswith(below)]:
            del self.pins[location]

    def skip_removed(self, name: str, kind: str, replaying: bool) -> None:
        """Skip the entry that older code made at this point, if the run has one, and everything below it.

        That a run has none is pinned. Otherwise a later replay could mistake an entry of the new code for the removed
        one: it may have the same name, or it may be running and leave a gap at this ordinal.
        """
        self._entries.check_inside()
        scope = self._loop.scope()
        gate = scope.locate(f"~removed[{escape_segment(name)}]")
        absent = self._history.by_location.get(gate)
        if absent is not None:
            self._entries.log.count_recorded(absent)
        elif not (self._skip_block(scope, name) if kind in BLOCKS else self._skip_entry(scope, name, kind)):
            self._pin(gate, "removed", name, replaying)

    def _skip_entry(self, scope: Scope, name: str, kind: str) -> bool:
        """Skip a recorded entry, or a gap that it has left. Return whether there was one."""
        record = scope.recorded.get(scope.ordinal)
        if record is not None and record.kind == kind and record.name == name:
            scope.locate(segment_of(record.location))
            self._skip_all(record.location)
        elif record is None and kind == "step" and scope.ordinal < scope.last_recorded:
            # A gap: the removed step was running, and so not recorded, when later entries were completed.
            scope.locate(escape_segment(name))
            self._entries.log.next_call_seq()
        else:
            return False
        scope.ordinal += 1
        return True

    def _skip_block(self, scope: Scope, name: str) -> bool:
        """Skip the recorded entries of a block. Return whether there were any.

        A block without a record has started nothing but steps, which are not recorded yet: it counts as not reached.
        """
        path = scope.peek(escape_segment(name))
        if not self._history.below(path):
            return False
        scope.locate(escape_segment(name))
        self._skip_all(path)
        return True

    def _skip_all(self, path: str) -> None:
        """Account for the records at and below a path."""
        for entry in self._history.take(path):
            self.removed.add(entry.location)
            self._entries.on_removed(entry)

    def take_pins(self) -> tuple[Entry, ...]:
        """Return the pins to write with this turn."""
        pins = tuple(self.pins.values())
        self.pins.clear()
        return pins

    def _pin(self, location: str, kind: str, name: str, replaying: bool) -> None:
        log, now = self._entries.log, self._loop.now
        # A replay must not count the pin: the recorded entries after it were numbered without it.
        call_seq = log.call_seq if replaying else log.next_call_seq()
        self.pins[location] = Entry(
            location,
            kind,
            name,
            EntryStatus.SUCCEEDED,
            call_seq,
            generation=self._generation,
            started_at=now,
            settled_at=now,
        )
