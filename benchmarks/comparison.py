"""Perdure beside its peers: which measure of a workload is compared, and the figures that come of it.

A ratio says how many times better Perdure is (faster, or sooner done), whichever way the measure points. It is computed
within a round, between a store of Perdure's and what a user of that store would take instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.harness import Figure, Round
from benchmarks.peer_protocol import Entrant


@dataclass(frozen=True)
class Comparison:
    """`targets`: by store of Perdure's and peer, how many times better it should be at least."""

    measure: str
    title: str
    unit: str
    more_is_better: bool = True
    targets: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def figures(self, entrants: Sequence[Entrant]) -> Iterator[Figure]:
        """What each of them did, then the ratios."""
        for each in entrants:
            yield Figure(f"{self.title}: {each.title}", self.unit, partial(self._value, each.name), subject=each.name)
        for ours in (each for each in entrants if each.peer_name == "perdure"):
            for theirs in (each for each in entrants if rivals(ours, each)):
                yield Figure(
                    f"{self.title}: {ours.title} against {theirs.title}",
                    "x",
                    partial(self._times_better, ours.name, theirs.name),
                    at_least=None if theirs.variant.aside else self.targets.get((ours.variant_name, theirs.peer_name)),
                )

    def _value(self, name: str, measured: Round) -> float:
        return measured[name][self.measure]

    def _times_better(self, ours: str, theirs: str, measured: Round) -> float:
        ratio = self._value(ours, measured) / self._value(theirs, measured)
        return ratio if self.more_is_better else 1 / ratio


def rivals(ours: Entrant, theirs: Entrant) -> bool:
    """SQLite beside what needs no server of ours, servers beside what has one; and Redis beside PostgreSQL."""
    if theirs.peer_name == "perdure":
        return (ours.variant_name, theirs.variant_name) == ("redis", "postgres")
    if ours.variant_name == "sqlite":
        return "postgres" not in theirs.variant.needs
    return "sqlite" not in theirs.variant_name and not theirs.peer.embedded
