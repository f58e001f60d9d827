"""History: the recorded entries of a run, arranged for replay by scope and ordinal, and by order of completion.

Of a loop, only its last committed iteration and what follows is replayed; of one that has ended, nothing. What is kept
of earlier iterations is for people, and for a rewind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from perdure.model.locations import scope_of
from perdure.model.records import Entry, EntryStatus

KINDS_KEPT_AFTER_PRUNING = ("start_child", "watch", "deferred")
"""Kinds of entries of which some stay when their iteration is pruned."""


class History:
    """A cursor over recorded completions, and the recorded entries of each scope.

    iterations             the last committed iteration of each loop
    kept_from              the first iteration of each loop that has entries
    last_requested         the last entry that was requested in each loop
    compensation_records   compensations that outlive the entries that registered them
    rewound                times of rewinds, by the completion (`seq`) after which the history continues
    first_executed_at      when a run that was rewound or forked was first executed
    """

    __slots__ = (
        "_completions",
        "_cursor",
        "_loops",
        "_scopes",
        "by_location",
        "compensation_records",
        "first_executed_at",
        "iterations",
        "kept_from",
        "last_requested",
        "rewound",
    )

    def __init__(self, rows: Sequence[Entry]) -> None:
        # An entry is written again when it changes: the last row of a location counts.
        self.by_location: dict[str, Entry] = {row.location: row for row in rows}
        self._scopes: dict[str, dict[int, Entry]] = {}
        self._completions: list[Entry] = []
        self._cursor = 0
        self._loops: dict[str, Entry] = {}
        self.iterations: dict[str, int] = {}
        self.kept_from: dict[str, int] = {}
        self.last_requested: dict[str, Entry] = {}
        self.compensation_records: tuple[Entry, ...] = ()
        self.rewound: dict[int, float] = {}
        self.first_executed_at: float | None = None
        if rows:
            self._arrange()

    def _arrange(self) -> None:
        live = list(self.by_location.values())
        self.compensation_records = tuple(entry for entry in live if entry.kind == "compensation")
        marks = [entry for entry in live if entry.kind == "rewind"]
        self.rewound = {int(entry.name): entry.settled_at or 0.0 for entry in marks}
        self.first_executed_at = min((entry.started_at for entry in marks), default=None)
        self._loops = {entry.location: entry for entry in live if entry.kind == "loop"}
        if self._loops:
            self._find_iterations(live)
            live = [entry for entry in live if not self.is_before_resume_point(entry.location)]
        for entry in live:
            if entry.ordinal >= 0:
                self._scopes.setdefault(scope_of(entry.location), {})[entry.ordinal] = entry
        self._completions = [entry for entry in live if entry.seq is not None]
        self._completions.sort(key=lambda entry: entry.seq or 0)

    def _find_iterations(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            compensation = entry.kind == "compensation"
            location = entry.location.partition("/")[2] if compensation else entry.location
            for loop, iteration, rest in _iterations_around(location, self._loops):
                self.last_requested[loop] = max(
                    entry, self.last_requested.get(loop, entry), key=lambda each: each.call_seq
                )
                if compensation or entry.kind in KINDS_KEPT_AFTER_PRUNING:
                    continue
                self.kept_from[loop] = min(iteration, self.kept_from.get(loop, iteration))
                if not rest and entry.kind == "iteration" and entry.seq is not None:
                    self.iterations[loop] = max(iteration, self.iterations.get(loop, 0))

    def is_before_resume_point(self, location: str) -> bool:
        """Return whether a location is in a loop that has ended, or before its last committed iteration."""
        return any(
            self._loops[loop].seq is not None or iteration < self.iterations.get(loop, 0)
            for loop, iteration, _ in _iterations_around(location, self._loops)
        )

    def past_deferreds(self) -> list[Entry]:
        """Return completed deferreds before the resume point, in order: a later wait gets the same result."""
        if not self._loops:
            return []
        found = [each for each in self.by_location.values() if each.kind == "deferred" and each.seq is not None]
        return sorted(
            (each for each in found if self.is_before_resume_point(each.location)), key=lambda each: each.seq or 0
        )

    def scope(self, path: str) -> dict[int, Entry]:
        """Return the recorded entries of a scope by ordinal. Requests remove them: what is left was not requested."""
        return self._scopes.get(path, {})

    @property
    def next_completion(self) -> Entry | None:
        """The recorded completion to apply next."""
        return self._completions[self._cursor] if self._cursor < len(self._completions) else None

    def advance(self) -> None:
        """Move to the next completion."""
        self._cursor += 1

    def first_unrequested(self) -> Entry | None:
        """Return the earliest recorded entry that the replay has not requested."""
        left = [entry for scope in self._scopes.values() for entry in scope.values()]
        return min(left, key=lambda entry: entry.call_seq, default=None)

    def find_cancelled(self, pending: Sequence[str]) -> Entry | None:
        """Return the record of a pending request that the workflow had cancelled."""
        for location in pending:
            entry = self.by_location.get(location)
            if entry is not None and entry.status is EntryStatus.CANCELLED:
                return entry
        return None


def _iterations_around(location: str, loops: Mapping[str, Entry]) -> Iterator[tuple[str, int, str]]:
    """Yield the loops around a location, each with the number of the iteration and the rest of the path."""
    at = location.find("/~")
    while at >= 0:
        loop = location[:at]
        if loop in loops:
            number, _, rest = location[at + 2 :].partition("/")
            if number.isdigit():
                yield loop, int(number), rest
        at = location.find("/~", at + 1)
