"""Which worker admits the runs of a queue: rendezvous hashing of the queue's name over the live workers. Pure.

The choice only saves double work. Any worker may admit the runs of any queue.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

SCORE_BYTES = 8


def choose_admitter(queue: str, workers: Iterable[str]) -> str | None:
    """Return the worker that admits the runs of this queue; None without workers."""
    return max(workers, key=lambda worker: (_score(queue, worker), worker), default=None)


def _score(queue: str, worker: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{queue}\0{worker}".encode(), digest_size=SCORE_BYTES).digest())
