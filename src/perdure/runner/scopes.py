"""Scopes: the sequences of requests in a run, and the locations they give to entries.

    charge            the first `charge` of the root scope
    charge#1          the second
    charge[eu]        with key="eu"
    fetch_all/get#2   in the scope of a task
    ~timer#1          entries without a name of their own start with a tilde

Names are escaped: no two paths collide, and a tilde, slash or bracket in a name is never mistaken for structure.
"""

from __future__ import annotations

import random

from perdure.model.records import Entry


class Scope:
    """The sequence of requests of the workflow function or of a task. Counts names and requests.

    `recorded` are the entries of this scope in the history, by ordinal: a replay must request them in that order.
    A `shared` scope is one of `ctx.scope`, or inside one: the tasks that are opened in it open no scopes of their own.
    Their entries are numbered in the order of the requests of all these tasks, which is the same on every replay.
    """

    __slots__ = ("_counts", "_randoms", "last_recorded", "ordinal", "path", "recorded", "shared")

    def __init__(self, path: str, recorded: dict[int, Entry], *, shared: bool = False) -> None:
        self.path = path
        self.shared = shared
        self.recorded = recorded
        self.last_recorded = max(recorded) if recorded else -1
        self.ordinal = 0
        self._counts: dict[str, int] = {}
        self._randoms: dict[str, random.Random] = {}

    def locate(self, segment: str) -> str:
        """Return the location of the next entry with this escaped segment."""
        count = self._counts.get(segment, 0)
        self._counts[segment] = count + 1
        if count:
            segment = f"{segment}#{count}"
        return f"{self.path}/{segment}" if self.path else segment

    def peek(self, segment: str) -> str:
        """Return the location that `locate` would return, without counting it."""
        location = self.locate(segment)
        self._counts[segment] -= 1
        return location

    def random(self, purpose: str, seed: str) -> random.Random:
        """Return the random number generator of this scope for a purpose."""
        found = self._randoms.get(purpose)
        if found is None:
            found = self._randoms[purpose] = random.Random(f"{seed}/{self.path}/{purpose}")
        return found
