"""What an engine must define to be compared: one file in `peers/`, with a `PEER` and an adapter.

The file is imported in two environments: in the project's, to read how the engine is installed and what it supports,
and in the engine's own, where its adapter is opened. It therefore imports the engine's package inside functions only.
This module, `step_bodies` and `measurements` import only the standard library.
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
from benchmarks.step_bodies import QueuedRuns

PEERS = Path(__file__).parent / "peers"


class Adapter(ABC):
    """An engine in this process (or in child processes) that has the workflows of `step_bodies`."""

    def __init__(self, variant: str, setting: Setting) -> None:
        self.variant = variant
        self.setting = setting
        self.queued = QueuedRuns()

    @abstractmethod
    async def open(self) -> None:
        """Start the engine. Unfinished runs of an earlier process continue."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine."""

    @abstractmethod
    async def execute(self, workflow: str, number: int) -> int:
        """Start a run and return its result."""

    async def timed(self, workflow: str, number: int) -> float:
        """Return the seconds of a run. An engine in another process is timed in that process."""
        started_at = perf_counter()
        assert await self.execute(workflow, number) == number
        return perf_counter() - started_at

    async def start(self, workflow: str, number: int, id: str) -> None:
        """Start a run durably, under an id that another process can use to wait for it."""
        raise NotImplementedError

    async def enqueue(self, queue: str, number: int) -> None:
        """Start a run of `one_step` durably in a queue of `QUEUES`; the adapter counts in `queued` when it executes."""
        raise NotImplementedError

    async def result(self, id: str) -> int:
        """Return the result of a run that may have been started by a dead process."""
        raise NotImplementedError


@contextlib.contextmanager
def no_external_process(setting: Setting) -> Iterator[None]:
    """For engines without a server of their own."""
    yield


@dataclass(frozen=True)
class Variant:
    """A way to use an engine. `needs` names servers (`postgres`, `redis`), `workloads` what is measured with it.

    `has_no_target`: the variant is measured for information only.
    """

    title: str
    workloads: tuple[str, ...]
    needs: tuple[str, ...] = ()
    has_no_target: bool = False


@dataclass(frozen=True)
class Peer:
    """An engine: its title, its packages, its adapter and its capabilities.

    Without `python` and `node` packages it runs in the project's environment. Its version is that of the first package.
    `external_process` runs what survives a crash of the engine's process (its own server). An `embedded` engine has no
    such process in any variant. `unsupported` has the reasons for missing workloads. `settings` describes the
    configuration for readers of the figures.
    """

    title: str
    adapter: Callable[[str, Setting], Adapter]
    variants: Mapping[str, Variant]
    settings: str
    python: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    external_process: Callable[[Setting], contextlib.AbstractContextManager[None]] = no_external_process
    embedded: bool = False
    unsupported: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Entrant:
    """One variant of one peer. Its name on the command line and in results is, for example, `dbos-sqlite`."""

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


def load_peer(name: str) -> Peer:
    """Return the peer that this file of `peers/` defines."""
    found: Peer = importlib.import_module(f"benchmarks.peers.{name}").PEER
    return found


def all_entrants() -> list[Entrant]:
    """Return every variant of every peer."""
    return [Entrant(name, variant, load_peer(name)) for name in peer_names() for variant in load_peer(name).variants]


def select_entrants(words: list[str]) -> list[Entrant]:
    """Return the entrants whose name or prefix is one of the words (`dbos`, `dbos-sqlite`); without words, all.

    Raises SystemExit for a word that matches no entrant.
    """
    known = all_entrants()
    unknown = [word for word in words if not any(_matches(entrant, word) for entrant in known)]
    if unknown:
        names = ", ".join(each.name for each in known)
        raise SystemExit(f"unknown engine: {', '.join(unknown)}; use one of {names}")
    return [entrant for entrant in known if not words or any(_matches(entrant, word) for word in words)]


def _matches(entrant: Entrant, word: str) -> bool:
    return entrant.name == word or entrant.name.startswith(f"{word}-")
