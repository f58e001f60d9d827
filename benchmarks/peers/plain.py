"""Perdure as it is without a compiler: what the same source does as Python."""

from __future__ import annotations

from benchmarks.peer_protocol import Peer, Variant
from benchmarks.peers.perdure import Perdure

_ALL = ("noop10", "latency", "recovery", "fanout")
PEER = Peer(
    title="Perdure, not compiled",
    adapter=Perdure,
    variants={
        "sqlite": Variant("SQLite", _ALL, aside=True),
        "postgres": Variant("PostgreSQL", _ALL, needs=("postgres",), aside=True),
        "redis": Variant("Redis", _ALL, needs=("redis",), aside=True),
    },
    settings="the same, as it is checked out; defaults",
)
