"""QueueGates: how many further runs of each queue with a limit per worker this worker may claim.

A run of such a queue has a gate, the queue's name, and is claimed only by it. The gate of a claimed run is known when
the run is loaded. Until then it counts for every gate, so that no limit is exceeded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from perdure.execution.run_cache import CachedRun

Gates = tuple[tuple[str, int], ...]


class QueueGates:
    """Counts the runs of this worker by gate.

    `limits` returns the limits per worker by queue, `former` queues that may have had one, `active` the runs that
    execute here, and `is_loading` whether a run is being loaded.
    """

    def __init__(
        self,
        *,
        limits: Callable[[], Mapping[str, int]],
        former: Callable[[], Iterable[str]],
        active: Callable[[], Iterable[CachedRun]],
        is_loading: Callable[[str], bool],
    ) -> None:
        self._limits = limits
        self._former = former
        self._active = active
        self._is_loading = is_loading
        self._claimed: set[str] = set()  # through a gate, while they are being loaded
        self.at_limit = False  # a gate had no free slot at the last count

    @property
    def is_loading(self) -> bool:
        """Whether runs that were claimed through a gate are being loaded."""
        self._claimed = {run_id for run_id in self._claimed if self._is_loading(run_id)}
        return bool(self._claimed)

    def count_free(self, free_slots: int, *, sweep: bool) -> Gates:
        """Return the gates that have free slots, with their numbers.

        With `sweep`, gates of queues without a limit are included: it was removed, and runs may still have the gate.
        """
        limits = self._limits()
        former = [name for name in self._former() if name not in limits] if sweep else []
        self.at_limit = False
        if not limits and not former:
            return ()
        loading = len(self._claimed) if self.is_loading else 0
        active = Counter(each.record.gate for each in self._active() if each.record.gate)
        free = {name: min(free_slots, limit - active[name] - loading) for name, limit in limits.items()}
        self.at_limit = any(count <= 0 for count in free.values())
        return (*((name, count) for name, count in free.items() if count > 0), *((name, free_slots) for name in former))

    def on_claimed(self, run_ids: Iterable[str]) -> None:
        """Note that these runs were claimed through a gate."""
        self._claimed.update(run_ids)
