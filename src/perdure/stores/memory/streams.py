"""Outputs of a run in the memory store: its streams and published values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from msgspec.structs import replace

from perdure.model.records import PublishedValue, StreamItem
from perdure.stores import semantics as rules


class RunOutputs:
    """The streams and published values of one run."""

    def __init__(self) -> None:
        self._streams: dict[str, list[StreamItem]] = defaultdict(list)
        self._written_at: dict[str, list[tuple[str, int]]] = defaultdict(list)  # by location: stream and offset
        self._values: dict[str, PublishedValue] = {}
        self.written: Counter[str] = Counter()  # items so far, by writer

    def append(self, items: Iterable[StreamItem]) -> None:
        """Append items at the next offsets of their streams."""
        for item in items:
            stream = self._streams[item.stream]
            self._written_at[item.location].append((item.stream, len(stream)))
            stream.append(replace(item, offset=len(stream)))
            self.written[item.writer] += 1

    def restart(self) -> None:
        """Start a new epoch: items written so far are not superseded, because locations of the new history differ."""
        self._written_at.clear()

    def supersede(self, location: str, writer: str | None = None) -> None:
        """Mark the items written at this location, except those of this writer."""
        for stream, offset in self._written_at.get(location, ()):
            item = self._streams[stream][offset]
            if writer is None or item.writer != writer:
                self._streams[stream][offset] = replace(item, superseded=True)

    def publish(self, value: PublishedValue) -> None:
        """Replace the value of this key."""
        self._values[value.key] = value

    def delete_expired(self, key: str, now: float) -> None:
        """Delete the value of this key if it has expired."""
        value = self._values.get(key)
        if value is not None and rules.expired(value.expires_at, now):
            del self._values[key]

    def stream(self, name: str, start: int, limit: int) -> list[StreamItem]:
        """Return items of this stream from offset `start`."""
        return self._streams[name][start : start + limit] if name in self._streams else []

    def values(self) -> list[PublishedValue]:
        """Return the published values by key."""
        return [self._values[key] for key in sorted(self._values)]
