"""The rounds of a workload: every subject once, each in a fresh process; then again.

Nobody pays for his neighbours: what a subject has left to write is on the disk before the next one begins, and each
round begins with another engine.

A subject of ours that fails ends the measurement. A peer that cannot be installed, needs a server that is not there, or
fails, is left out, and the result says why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import ROOT, Measures, Round, Setting, Sizes, Workload, workload
from benchmarks.peer_environments import NotInstallable, install, python_of
from benchmarks.peer_protocol import Entrant
from benchmarks.servers import Hosts

SOURCE = ROOT / "src"
PATIENCE = 900.0  # seconds until a subject is given up


class SubjectFailed(Exception):
    """A process of a measurement failed. The message is its last line; `output` all of it."""

    def __init__(self, output: str) -> None:
        words = [line for line in output.strip().splitlines() if line.strip()]
        super().__init__(words[-1] if words else "no output")
        self.output = output


@dataclass
class Rig:
    """What all workloads of one command share: where, on which servers, with which engines."""

    data: Path
    hosts: Hosts
    entrants: Sequence[Entrant]
    rounds: int
    scale: float
    progress: Callable[[str], None]
    versions: dict[str, str] = field(default_factory=dict)
    """Of the peers that are installed."""
    not_installed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What was measured, by whom, and why not by others."""

    sizes: Sizes
    rounds: Sequence[Round]
    entrants: Sequence[Entrant]
    missing: Mapping[str, str]


def measure(name: str, rig: Rig) -> Outcome:
    """Run all rounds of a workload, with its files in a folder below `rig.data` that is removed in the end."""
    chosen = workload(name)
    missing: dict[str, str] = {}
    entrants = list(_ready(name, chosen, rig, missing))
    subjects = dict(_own(chosen, rig, missing))
    measured: list[dict[str, Measures]] = []
    with ExitStack() as afterwards:
        folder = Path(afterwards.enter_context(TemporaryDirectory(dir=rig.data, prefix=f"{name}-")))
        course = Course(name, rig, chosen.sized(rig.scale), folder, chosen.one_place)
        if chosen.prepare is not None:
            course.urls = afterwards.enter_context(rig.hosts.fresh(_servers_of(subjects)))
            course.prepare()
        for number in range(1, rig.rounds + 1):
            course.number = number
            measured.append({**course.engines(entrants, missing), **course.subjects(subjects)})
    for each in measured:
        for failed in missing:
            each.pop(failed, None)
    return Outcome(course.sizes, measured, entrants, missing)


@dataclass
class Course:
    """One workload on its way through its rounds."""

    name: str
    rig: Rig
    sizes: Sizes
    folder: Path
    one_place: bool
    urls: Mapping[str, str] | None = None
    """What `prepare` has filled, for all rounds; None: each subject gets servers that nobody has used."""
    number: int = 0

    @property
    def prepared(self) -> Path:
        return self.folder / "prepared"

    def prepare(self) -> None:
        self.rig.progress(f"{self.name}: preparing")
        self.prepared.mkdir()
        self._ours("prepare", Setting(self.prepared, self.prepared, self.sizes, self.urls or {}))

    def engines(self, entrants: list[Entrant], missing: dict[str, str]) -> dict[str, Measures]:
        """Every engine once; one of the peers that fails is struck off the list."""
        measured = {}
        for entrant in _rotated(entrants, self.number - 1):
            self._tell(entrant.name)
            python = python_of(entrant.peer_name, entrant.peer)
            try:
                with self._round_folder() as own, self.rig.hosts.fresh(entrant.variant.needs) as urls:
                    setting = Setting(own, self.prepared, self.sizes, urls)
                    measured[entrant.name] = _run(python, "run_peer", self.name, entrant.name, setting)
            except SubjectFailed as error:
                if entrant.peer_name == "perdure":
                    raise SystemExit(f"{self.name}, {entrant.name}: failed\n{error.output}") from error
                missing[entrant.name] = f"failed in round {self.number}: {error}"
                entrants.remove(entrant)
        return measured

    def subjects(self, subjects: Mapping[str, tuple[str, ...]]) -> dict[str, Measures]:
        """The workload's own."""
        measured = {}
        with self._round_folder() as own, ExitStack() as afterwards:
            shared = self.urls
            if shared is None and self.one_place:
                shared = afterwards.enter_context(self.rig.hosts.fresh(_servers_of(subjects)))
            for subject, needs in subjects.items():
                self._tell(subject)
                with nullcontext(shared) if shared is not None else self.rig.hosts.fresh(needs) as urls:
                    measured[subject] = self._ours(subject, Setting(own, self.prepared, self.sizes, urls))
        return measured

    def _ours(self, subject: str, setting: Setting) -> Measures:
        try:
            return _run(sys.executable, "run_subject", self.name, subject, setting)
        except SubjectFailed as error:
            raise SystemExit(f"{self.name}, {subject}: failed\n{error.output}") from error

    @contextmanager
    def _round_folder(self) -> Iterator[Path]:
        with TemporaryDirectory(dir=self.folder, prefix="round-") as own:
            yield Path(own)

    def _tell(self, subject: str) -> None:
        self.rig.progress(f"{self.name}: round {self.number} of {self.rig.rounds}, {subject}")


def _rotated(entrants: Sequence[Entrant], by: int) -> list[Entrant]:
    first = by % max(1, len(entrants))
    return [*entrants[first:], *entrants[:first]]


def _ready(name: str, chosen: Workload, rig: Rig, missing: dict[str, str]) -> Iterator[Entrant]:
    """The engines that take part in this workload here."""
    if not chosen.compared:
        return
    for entrant in rig.entrants:
        if name not in entrant.variant.workloads:
            if (reason := entrant.peer.cannot.get(name)) is not None:
                missing[entrant.name] = reason
        elif (reason := _installed(entrant, rig)) is not None or (reason := rig.hosts.need(entrant.variant.needs)):
            missing[entrant.name] = reason
        else:
            yield entrant


def _installed(entrant: Entrant, rig: Rig) -> str | None:
    """None, or why not. Tried once per command."""
    name = entrant.peer_name
    if name not in rig.versions and name not in rig.not_installed:
        try:
            rig.versions[name] = install(name, entrant.peer)
            rig.progress(f"{name} is here: {rig.versions[name] or 'as it is checked out'}")
        except NotInstallable as error:
            rig.not_installed[name] = f"not installed: {error}"
    return rig.not_installed.get(name)


def _own(chosen: Workload, rig: Rig, missing: dict[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The workload's own subjects, with the servers that each needs."""
    names = {each.variant_name for each in rig.entrants if each.peer_name == "perdure"}
    for subject in chosen.subjects:
        needs = chosen.needs.get(subject, ())
        if not set(needs) <= names:
            continue  # that store was not asked for
        if (reason := rig.hosts.need(needs)) is not None:
            missing[subject] = reason
        else:
            yield subject, needs


def _servers_of(subjects: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple({server for needs in subjects.values() for server in needs})


def _run(python: str, module: str, name: str, subject: str, setting: Setting) -> Measures:
    """The measures that a subject prints in its last line."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(SOURCE), os.environ.get("PYTHONPATH")]))
    os.sync()
    try:
        done = subprocess.run(
            [python, "-m", f"benchmarks.{module}", name, subject, setting.to_json()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired as error:
        raise SubjectFailed(f"not done after {PATIENCE:.0f} seconds") from error
    if done.returncode != 0:
        raise SubjectFailed(done.stdout + done.stderr)
    measures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measures
