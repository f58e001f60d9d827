"""Seeded randomness: replaces the sources of randomness by seeded ones during a simulation."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def seeded(seed: object) -> Iterator[None]:
    """Let the seed determine all random ids, backoffs and keys of perdure within this block."""
    bytes_of = random.Random(f"{seed}/bytes").randbytes
    before = random.getstate()
    random.seed(f"{seed}/random")
    try:
        with mock.patch.object(os, "urandom", bytes_of), mock.patch.object(random, "_urandom", bytes_of):
            yield
    finally:
        random.setstate(before)


def seeded_random(*names: object) -> random.Random:
    """Return a random generator for one purpose, independent of the generators of other purposes."""
    return random.Random("/".join(map(str, names)))
