"""Locations: the path that names each entry in a run. Pure text and counting.

    charge            the first `charge` of the workflow's own scope
    charge#1          the second
    charge[eu]        with key="eu"
    fetch_all/get#2   in the scope of a task
    ~timer#1          things that have no name of their own begin with a tilde

Names are escaped, so that no two paths collide and a tilde, slash or bracket in a name is never taken for structure.
"""

from __future__ import annotations

import random

from perdure.model.records import Entry


class Scope:
    """One sequence of asks: the workflow's own, or a task's. Numbers names and asks in order.

    `recorded` are the entries of this scope in history, by ordinal: replay must ask for them in that order.
    """

    __slots__ = ("_counts", "_randoms", "last_recorded", "ordinal", "path", "recorded")

    def __init__(self, path: str, recorded: dict[int, Entry]) -> None:
        self.path = path
        self.recorded = recorded
        self.last_recorded = max(recorded) if recorded else -1
        self.ordinal = 0
        self._counts: dict[str, int] = {}
        self._randoms: dict[str, random.Random] = {}

    def locate(self, segment: str) -> str:
        """The location of the next thing with this (escaped) segment."""
        count = self._counts.get(segment, 0)
        self._counts[segment] = count + 1
        if count:
            segment = f"{segment}#{count}"
        return f"{self.path}/{segment}" if self.path else segment

    def random(self, purpose: str, seed: str) -> random.Random:
        """A stream of random numbers that belongs to this scope alone."""
        found = self._randoms.get(purpose)
        if found is None:
            found = self._randoms[purpose] = random.Random(f"{seed}/{self.path}/{purpose}")
        return found
