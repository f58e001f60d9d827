"""All chance from one seed: for the time of a simulation the sources of randomness are replaced by seeded ones."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def seeded(seed: object) -> Iterator[None]:
    """What perdure draws by lot, ids and pauses and keys, is determined by the seed within this block."""
    bytes_of = random.Random(f"{seed}/bytes").randbytes
    before = random.getstate()
    random.seed(f"{seed}/random")
    try:
        with mock.patch.object(os, "urandom", bytes_of), mock.patch.object(random, "_urandom", bytes_of):
            yield
    finally:
        random.setstate(before)


def seeded_random(*names: object) -> random.Random:
    """A source of its own for each purpose: what one of them is asked for does not change what another one gives."""
    return random.Random("/".join(map(str, names)))
