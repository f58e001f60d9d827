"""What was recorded of a run, arranged for replay: by scope and order of asking, and by order of completion."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.records import Entry, EntryStatus
from perdure.runner.locations import scope_of


class History:
    """A cursor over recorded completions, and the recorded entries of each scope."""

    __slots__ = ("_cursor", "_scopes", "_settled", "by_location")

    def __init__(self, rows: Sequence[Entry]) -> None:
        # A changed entry is written again: the latest row of a location counts.
        self.by_location: dict[str, Entry] = {row.location: row for row in rows}
        self._scopes: dict[str, dict[int, Entry]] = {}
        self._settled: list[Entry] = []
        self._cursor = 0
        if rows:
            self._arrange()

    def _arrange(self) -> None:
        for entry in self.by_location.values():
            if entry.ordinal >= 0:
                self._scopes.setdefault(scope_of(entry.location), {})[entry.ordinal] = entry
        self._settled = [entry for entry in self.by_location.values() if entry.seq is not None]
        self._settled.sort(key=lambda entry: entry.seq or 0)

    def scope(self, path: str) -> dict[int, Entry]:
        """The recorded entries of a scope by ordinal. Handed out once: what is left at the end was never asked for."""
        return self._scopes.get(path, {})

    @property
    def next_settled(self) -> Entry | None:
        """The recorded completion that is to be applied next."""
        return self._settled[self._cursor] if self._cursor < len(self._settled) else None

    def step_on(self) -> None:
        self._cursor += 1

    def unasked(self) -> Entry | None:
        """The earliest recorded entry that the replay has not asked for."""
        left = [entry for scope in self._scopes.values() for entry in scope.values()]
        return min(left, key=lambda entry: entry.asked, default=None)

    def kept_cancelled(self, pending: Sequence[str]) -> Entry | None:
        """A pending ask whose record says that the workflow had given it up."""
        for location in pending:
            entry = self.by_location.get(location)
            if entry is not None and entry.status is EntryStatus.CANCELLED:
                return entry
        return None
