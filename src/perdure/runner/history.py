"""What was recorded of a run, arranged for replay: by scope and order of asking, and by order of completion.

Of a loop only what its last committed iteration and those after it recorded is replayed; of one that has ended,
nothing. What is kept of earlier iterations is for people, and for a rewind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from perdure.model.locations import scope_of
from perdure.model.records import Entry, EntryStatus

KINDS_KEPT_AFTER_PRUNING = ("start_child", "watch", "deferred")
"""Kinds of entries of which some stay when their iteration is pruned."""


class History:
    """A cursor over recorded completions, and the recorded entries of each scope.

    `iterations` are the last committed iteration of each loop, `kept_from` its first that has entries, `last_asked` the
    last thing that was asked for in it; `notes` are compensations that outlive what registered them;
    `rewound` are moments at which the history was cut back, by the completion (`seq`) after which it goes on,
    and `first_executed_at` is when a run that was cut back or forked had first begun.
    """

    __slots__ = (
        "_cursor",
        "_loops",
        "_scopes",
        "_settled",
        "by_location",
        "first_executed_at",
        "iterations",
        "kept_from",
        "last_asked",
        "notes",
        "rewound",
    )

    def __init__(self, rows: Sequence[Entry]) -> None:
        # A changed entry is written again: the latest row of a location counts.
        self.by_location: dict[str, Entry] = {row.location: row for row in rows}
        self._scopes: dict[str, dict[int, Entry]] = {}
        self._settled: list[Entry] = []
        self._cursor = 0
        self._loops: dict[str, Entry] = {}
        self.iterations: dict[str, int] = {}
        self.kept_from: dict[str, int] = {}
        self.last_asked: dict[str, Entry] = {}
        self.notes: tuple[Entry, ...] = ()
        self.rewound: dict[int, float] = {}
        self.first_executed_at: float | None = None
        if rows:
            self._arrange()

    def _arrange(self) -> None:
        live = list(self.by_location.values())
        self.notes = tuple(entry for entry in live if entry.kind == "compensation")
        marks = [entry for entry in live if entry.kind == "rewind"]
        self.rewound = {int(entry.name): entry.settled_at or 0.0 for entry in marks}
        self.first_executed_at = min((entry.started_at for entry in marks), default=None)
        self._loops = {entry.location: entry for entry in live if entry.kind == "loop"}
        if self._loops:
            self._look_at_iterations(live)
            live = [entry for entry in live if not self.is_before_resume_point(entry.location)]
        for entry in live:
            if entry.ordinal >= 0:
                self._scopes.setdefault(scope_of(entry.location), {})[entry.ordinal] = entry
        self._settled = [entry for entry in live if entry.seq is not None]
        self._settled.sort(key=lambda entry: entry.seq or 0)

    def _look_at_iterations(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            noted = entry.kind == "compensation"
            location = entry.location.partition("/")[2] if noted else entry.location
            for loop, iteration, rest in _iterations_around(location, self._loops):
                self.last_asked[loop] = max(entry, self.last_asked.get(loop, entry), key=lambda each: each.call_seq)
                if noted or entry.kind in KINDS_KEPT_AFTER_PRUNING:
                    continue
                self.kept_from[loop] = min(iteration, self.kept_from.get(loop, iteration))
                if not rest and entry.kind == "iteration" and entry.seq is not None:
                    self.iterations[loop] = max(iteration, self.iterations.get(loop, 0))

    def is_before_resume_point(self, location: str) -> bool:
        """Whether it is in a loop that has ended, or in an iteration before the last one that was committed."""
        return any(
            self._loops[loop].seq is not None or iteration < self.iterations.get(loop, 0)
            for loop, iteration, _ in _iterations_around(location, self._loops)
        )

    def past_deferreds(self) -> list[Entry]:
        """Deferreds that were settled where no replay comes by, in order: who waits for one again gets the same."""
        if not self._loops:
            return []
        found = [each for each in self.by_location.values() if each.kind == "deferred" and each.seq is not None]
        return sorted(
            (each for each in found if self.is_before_resume_point(each.location)), key=lambda each: each.seq or 0
        )

    def scope(self, path: str) -> dict[int, Entry]:
        """The recorded entries of a scope by ordinal. Handed out once: what is left at the end was never asked for."""
        return self._scopes.get(path, {})

    @property
    def next_settled(self) -> Entry | None:
        """The recorded completion that is to be applied next."""
        return self._settled[self._cursor] if self._cursor < len(self._settled) else None

    def advance(self) -> None:
        self._cursor += 1

    def unasked(self) -> Entry | None:
        """The earliest recorded entry that the replay has not asked for."""
        left = [entry for scope in self._scopes.values() for entry in scope.values()]
        return min(left, key=lambda entry: entry.call_seq, default=None)

    def kept_cancelled(self, pending: Sequence[str]) -> Entry | None:
        """A pending ask whose record says that the workflow had given it up."""
        for location in pending:
            entry = self.by_location.get(location)
            if entry is not None and entry.status is EntryStatus.CANCELLED:
                return entry
        return None


def _iterations_around(location: str, loops: Mapping[str, Entry]) -> Iterator[tuple[str, int, str]]:
    """The loops that a location is in: each with the number of the iteration, and the rest of the path."""
    at = location.find("/~")
    while at >= 0:
        loop = location[:at]
        if loop in loops:
            number, _, rest = location[at + 2 :].partition("/")
            if number.isdigit():
                yield loop, int(number), rest
        at = location.find("/~", at + 1)
