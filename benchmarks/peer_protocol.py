"""What an engine has to say of itself to be compared: one file in `peers/`, with a `PEER` and an adapter.

The file is read in two places: here, to learn how the engine is installed and what it can do, and in the engine's own
environment, where its adapter is opened. So it imports the engine's package inside functions only; and this module,
`chores` and `driving` import nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from benchmarks.harness import Setting

PEERS = Path(__file__).parent / "peers"


class Adapter(ABC):
    """An engine at work in this process (or in children of it), with the workflows of `chores` in it."""

    def __init__(self, variant: str, setting: Setting) -> None:
        self.variant = variant
        self.setting = setting

    @abstractmethod
    async def open(self) -> None:
        """Start it. What an earlier process left unfinished goes on."""

    @abstractmethod
    async def close(self) -> None:
        """Stop it."""

    @abstractmethod
    async def execute(self, workflow: str, number: int) -> int:
        """A run from its start to its result."""

    async def timed(self, workflow: str, number: int) -> float:
        """The seconds that a run takes; for engines in another process, as seen from there."""
        began = perf_counter()
        assert await self.execute(workflow, number) == number
        return perf_counter() - began

    async def start(self, workflow: str, number: int, id: str) -> None:
        """Have a run accepted for good, under an id by which another process can ask for it."""
        raise NotImplementedError

    async def result(self, id: str) -> int:
        """Wait for a run that was started, perhaps by a process that is dead."""
        raise NotImplementedError


@contextlib.contextmanager
def nothing_beside(setting: Setting) -> Iterator[None]:
    yield


@dataclass(frozen=True)
class Variant:
    """A way to use an engine. `needs` are servers (`postgres`, `redis`), `workloads` what is measured with it.

    `aside`: it is measured to be looked at, and no target is held against it.
    """

    title: str
    workloads: tuple[str, ...]
    needs: tuple[str, ...] = ()
    aside: bool = False


@dataclass(frozen=True)
class Peer:
    """An engine: what it is called, what to install, how it is opened, and what is known of it beforehand.

    Without `python` and `node` it runs in our own environment. The version is that of the first package named.
    `beside` runs what outlives the engine's process in a crash (a server of its own); one that is
    `embedded` has nothing of the kind in any variant. `cannot` says why workloads are
    left out, `settings` what somebody should know who reads the figures.
    """

    title: str
    adapter: Callable[[str, Setting], Adapter]
    variants: Mapping[str, Variant]
    settings: str
    python: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    beside: Callable[[Setting], contextlib.AbstractContextManager[None]] = nothing_beside
    embedded: bool = False
    cannot: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Entrant:
    """One variant of one peer, as it is named on the command line and in results: `dbos-sqlite`."""

    peer_name: str
    variant_name: str
    peer: Peer

    @property
    def name(self) -> str:
        return f"{self.peer_name}-{self.variant_name}" if self.variant_name else self.peer_name

    @property
    def variant(self) -> Variant:
        return self.peer.variants[self.variant_name]

    @property
    def title(self) -> str:
        return f"{self.peer.title}, {self.variant.title}" if self.variant.title else self.peer.title


def peer_names() -> list[str]:
    """Return the names of all peers: Perdure first, then the others in alphabetical order."""
    names = sorted(path.stem for path in PEERS.glob("*.py") if path.stem != "__init__")
    return sorted(names, key=lambda name: name != "perdure")


def peer(name: str) -> Peer:
    found: Peer = importlib.import_module(f"benchmarks.peers.{name}").PEER
    return found


def entrants() -> list[Entrant]:
    """Every variant of every peer."""
    return [Entrant(name, variant, peer(name)) for name in peer_names() for variant in peer(name).variants]


def chosen(words: list[str]) -> list[Entrant]:
    """Those whose name is one of the words or begins with one (`dbos`, `dbos-sqlite`); all, if there are none."""
    everyone = entrants()
    unknown = [word for word in words if not any(_fits(entrant, word) for entrant in everyone)]
    if unknown:
        raise SystemExit(f"no such engine: {', '.join(unknown)}; there are {', '.join(each.name for each in everyone)}")
    return [entrant for entrant in everyone if not words or any(_fits(entrant, word) for word in words)]


def _fits(entrant: Entrant, word: str) -> bool:
    return entrant.name == word or entrant.name.startswith(f"{word}-")
