"""History: the recorded entries of a run, arranged for replay by scope and ordinal, and by order of completion.

Of a loop, only its last committed iteration and what follows is replayed; of one that has ended, nothing. What is kept
of earlier iterations is for people, and for a rewind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from perdure.model.locations import scope_of
from perdure.model.records import Entry, EntryStatus

ROWS_PER_PART = 1_000  # rows that are arranged without a pause
FAST_PATH_LENGTH = 32  # completions that one call of user code may pass through without a check for a pause
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
        "_below",
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

    def __init__(self, rows: Sequence[Entry] = ()) -> None:
        self.by_location: dict[str, Entry] = {}
        self._below: dict[str, list[str]] | None = None  # locations by the paths above them; built when needed
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
            for _ in self.arrange(rows):
                pass

    def arrange(self, rows: Sequence[Entry]) -> Iterator[None]:
        """Arrange the rows of an empty history. Yields now and then, so that a caller can do other work in between."""
        for part in _parts(rows):
            # An entry is written again when it changes: the last row of a location counts.
            self.by_location.update((row.location, row) for row in part)
            yield
        live = list(self.by_location.values())
        for part in _parts(live):
            self._arrange_marks(part)
            yield
        if self._loops:
            for part in _parts(live):
                self._find_iterations(part)
                yield
        for part in _parts(live):
            self._arrange_entries(part)
            yield
        self._arrange()

    def _arrange(self) -> None:
        """Put the completions in their order."""
        self._completions.sort(key=_completion_order)

    def _arrange_marks(self, entries: Sequence[Entry]) -> None:
        marks = [entry for entry in entries if entry.kind in ("compensation", "rewind", "loop")]
        self.compensation_records += tuple(entry for entry in marks if entry.kind == "compensation")
        self._loops.update((entry.location, entry) for entry in marks if entry.kind == "loop")
        for entry in marks:
            if entry.kind == "rewind":
                self.rewound[int(entry.name)] = entry.settled_at or 0.0
                earlier = self.first_executed_at
                self.first_executed_at = entry.started_at if earlier is None else min(earlier, entry.started_at)

    def _arrange_entries(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if self._loops and self.is_before_resume_point(entry.location):
                continue
            if entry.ordinal >= 0:
                self._scopes.setdefault(scope_of(entry.location), {})[entry.ordinal] = entry
            if entry.seq is not None:
                self._completions.append(entry)

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

    def completions_of(self, kind: str) -> Iterator[Entry]:
        """Return the entries of a kind that a replay completes: none of earlier iterations."""
        return (entry for entry in self._completions if entry.kind == kind)

    @property
    def next_completion(self) -> Entry | None:
        """The recorded completion to apply next."""
        return self._completions[self._cursor] if self._cursor < len(self._completions) else None

    @property
    def allows_fast_path(self) -> bool:
        """Whether the next completion may be applied inside the call that requests it.

        Now and then it is not: then the task waits, and the replay can be paused.
        """
        return self._cursor % FAST_PATH_LENGTH != 0

    def advance(self) -> None:
        """Move to the next completion."""
        self._cursor += 1

    def delete(self, path: str) -> None:
        """Remove the entries at and below a path. The cost does not depend on the number of other entries."""
        if not self.by_location:
            return
        for location in (path, *self._locations_below.pop(path, ())):
            self.by_location.pop(location, None)

    @property
    def _locations_below(self) -> dict[str, list[str]]:
        if self._below is None:
            self._below = _locations_below_paths(self.by_location)
        return self._below

    def below(self, path: str) -> list[Entry]:
        """Return the recorded entries below a path."""
        locations = self._locations_below.get(path, ())
        return [self.by_location[each] for each in locations if each in self.by_location]

    def take(self, path: str) -> list[Entry]:
        """Return the recorded entries at and below a path. They count as requested."""
        own = self.by_location.get(path)
        entries = [*self.below(path), *([own] if own is not None else [])]
        for entry in entries:
            self.scope(scope_of(entry.location)).pop(entry.ordinal, None)
        return entries

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


def _parts(rows: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    for start in range(0, len(rows), ROWS_PER_PART):
        yield rows[start : start + ROWS_PER_PART]


def _completion_order(entry: Entry) -> int:
    return entry.seq or 0


def _locations_below_paths(locations: Iterable[str]) -> dict[str, list[str]]:
    """Return the locations below each path."""
    below: dict[str, list[str]] = {}
    for location in locations:
        at = location.find("/")
        while at >= 0:
            below.setdefault(location[:at], []).append(location)
            at = location.find("/", at + 1)
    return below


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
