"""Comparison of Perdure with other engines: the compared measure of a workload, and its figures.

A ratio is how many times better Perdure is: higher throughput or shorter duration. It is computed within a round,
between a Perdure store and the alternatives that a user of that store has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.harness import Figure, Round
from benchmarks.peer_protocol import Entrant


@dataclass(frozen=True)
class Comparison:
    """A measure that engines are compared by. `targets`: the minimum ratio by Perdure store and peer."""

    measure: str
    title: str
    unit: str
    more_is_better: bool = True
    targets: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def figures(self, entrants: Sequence[Entrant]) -> Iterator[Figure]:
        """Yield the value of each engine, then the ratios."""
        for each in entrants:
            yield Figure(f"{self.title}: {each.title}", self.unit, partial(self._value, each.name), subject=each.name)
        for ours in (each for each in entrants if each.peer_name == "perdure"):
            for theirs in (each for each in entrants if is_alternative(ours, each)):
                target = self.targets.get((ours.variant_name, theirs.peer_name))
                yield Figure(
                    f"{self.title}: {ours.title} against {theirs.title}",
                    "x",
                    partial(self._times_better, ours.name, theirs.name),
                    at_least=None if theirs.variant.has_no_target else target,
                )

    def _value(self, name: str, measured: Round) -> float:
        return measured[name][self.measure]

    def _times_better(self, ours: str, theirs: str, measured: Round) -> float:
        ratio = self._value(ours, measured) / self._value(theirs, measured)
        return ratio if self.more_is_better else 1 / ratio


def is_alternative(ours: Entrant, theirs: Entrant) -> bool:
    """Return whether the figures compare these two engines.

    Perdure on SQLite is compared with engines that need no PostgreSQL server, Perdure on a server with engines that
    have one, and Perdure on Redis with Perdure on PostgreSQL.
    """
    if theirs.peer_name == "perdure":
        return (ours.variant_name, theirs.variant_name) == ("redis", "postgres")
    if ours.variant_name == "sqlite":
        return "postgres" not in theirs.variant.needs
    return "sqlite" not in theirs.variant_name and not theirs.peer.embedded
