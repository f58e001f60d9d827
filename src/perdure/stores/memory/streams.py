"""What a run of the memory store shows to others while it goes on: its streams, and values under keys."""

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
        for item in items:
            stream = self._streams[item.stream]
            self._written_at[item.location].append((item.stream, len(stream)))
            stream.append(replace(item, offset=len(stream)))
            self.written[item.writer] += 1

    def begin_anew(self) -> None:
        """What was written so far stays as it is: the locations of the run's new history are others."""
        self._written_at.clear()

    def supersede(self, location: str, writer: str | None = None) -> None:
        """Mark what was written at this location, but for what this writer wrote."""
        for stream, offset in self._written_at.get(location, ()):
            item = self._streams[stream][offset]
            if writer is None or item.writer != writer:
                self._streams[stream][offset] = replace(item, superseded=True)

    def publish(self, value: PublishedValue) -> None:
        self._values[value.key] = value

    def forget_expired(self, key: str, now: float) -> None:
        value = self._values.get(key)
        if value is not None and rules.expired(value.expires_at, now):
            del self._values[key]

    def stream(self, name: str, start: int, limit: int) -> list[StreamItem]:
        return self._streams[name][start : start + limit] if name in self._streams else []

    def values(self) -> list[PublishedValue]:
        return [self._values[key] for key in sorted(self._values)]
