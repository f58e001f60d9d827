"""OpenReceives: the requests of a run that a message can complete, by what they wait for.

Finding the request for a message costs the same with one open receive or a thousand.
"""

from __future__ import annotations

from collections.abc import Iterable

from perdure.runner.pending import PendingEntry


class OpenReceives(dict[str, PendingEntry]):
    """Open receives and waits for deferreds by location, in order of request.

    `opened` are those that were added since the mailbox last looked for messages for them. A dict, because every turn
    checks whether there are any, and a method for that costs 0.1 us.
    """

    __slots__ = ("_by_deferred", "_by_name", "opened")

    def __init__(self) -> None:
        super().__init__()
        self._by_name: dict[str, dict[str, PendingEntry]] = {}
        self._by_deferred: dict[str, dict[str, PendingEntry]] = {}
        self.opened: list[PendingEntry] = []

    def add(self, pending: PendingEntry) -> None:
        """Add a request."""
        self[pending.location] = pending
        for group, name in self._groups(pending):
            group.setdefault(name, {})[pending.location] = pending
        self.opened.append(pending)

    def remove(self, location: str) -> None:
        """Remove a request that was completed or cancelled, if it is there."""
        pending = self.pop(location, None)
        if pending is None:
            return
        for group, name in self._groups(pending):
            del group[name][location]
            if not group[name]:
                del group[name]

    def _groups(self, pending: PendingEntry) -> Iterable[tuple[dict[str, dict[str, PendingEntry]], str]]:
        command = pending.command
        assert command is not None
        if command.deferred is not None:
            yield self._by_deferred, command.deferred
        elif command.wants is not None:
            for name in command.wants.types:
                yield self._by_name, name

    def take_opened(self) -> list[PendingEntry]:
        """Return the open requests that were added since the last call."""
        opened, self.opened = self.opened, []
        return [pending for pending in opened if self.get(pending.location) is pending]

    def at(self, target: str) -> PendingEntry | None:
        """Return the request that messages for this target are for."""
        pending = self.get(target.partition("/")[2])
        return pending if pending is not None and pending.target == target else None

    def first_for_event(self, name: str) -> PendingEntry | None:
        """Return the first receive that waits for events of this name."""
        return next(iter(self._by_name.get(name, {}).values()), None)

    def first_for_deferred(self, name: str) -> PendingEntry | None:
        """Return the first wait for the deferred of this name."""
        return next(iter(self._by_deferred.get(name, {}).values()), None)

    def take_all_for_deferred(self, name: str) -> list[str]:
        """Remove all waits for the deferred of this name and return their locations."""
        locations = list(self._by_deferred.get(name, ()))
        for location in locations:
            self.remove(location)
        return locations
