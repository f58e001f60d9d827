"""Version gates: how changed code replays the history of older code.

A gate is pinned per run: `ctx.version` returns the same number for as long as the run lives, and `ctx.removed` skips
the same entries. A pin is written with the next turn that is written anyway, so that a mere replay writes nothing.
"""

from __future__ import annotations

from perdure.model.locations import escape_segment, segment_of
from perdure.model.records import Entry, EntryStatus
from perdure.runner.entry_tracker import EntryTracker
from perdure.runner.event_loop import WorkflowLoop
from perdure.runner.history import History


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
        self._versions: dict[str, int] = {}
        self.pins: dict[str, Entry] = {}
        self.removed: set[str] = set()

    def pin_version(self, gate: str, latest: int, replaying: bool) -> int:
        """Return the version that this run has at a gate.

        A run that reaches the gate for the first time gets `latest`, or 1 if older code has passed here before: then
        the run is being replayed and its history has no pin.
        """
        self._entries.check_inside()
        location = f"~version/{escape_segment(gate)}"
        pinned = self._versions.get(location)
        if pinned is not None:
            return pinned
        record = self._history.by_location.get(location)
        if record is not None:
            pinned = int(record.name)
            self._entries.log.count_recorded(record)
        else:
            pinned = 1 if replaying else latest
            self._pin(location, "version", str(pinned), replaying)
        self._versions[location] = pinned
        return pinned

    def skip_removed(self, name: str, kind: str, replaying: bool) -> None:
        """Skip the entry that older code made at this point, if the run has one.

        That a run has none is pinned. Otherwise a later replay could mistake an entry of the new code for the removed
        one: it may have the same name, or it may be running and leave a gap at this ordinal.
        """
        self._entries.check_inside()
        scope = self._loop.scope()
        gate = scope.locate(f"~removed[{escape_segment(name)}]")
        absent = self._history.by_location.get(gate)
        if absent is not None:
            self._entries.log.count_recorded(absent)
            return
        record = scope.recorded.get(scope.ordinal)
        if record is not None and record.kind == kind and record.name == name:
            del scope.recorded[scope.ordinal]
            self.removed.add(record.location)
            scope.locate(segment_of(record.location))
        elif record is None and kind == "step" and scope.ordinal < scope.last_recorded:
            # A gap: the removed step was running, and so not recorded, when later entries were completed.
            scope.locate(escape_segment(name))
        else:
            self._pin(gate, "removed", name, replaying)
            return
        self._entries.log.next_call_seq()
        scope.ordinal += 1

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
