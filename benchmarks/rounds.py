"""The rounds of a workload. A round measures every subject once, each in a new process.

Subjects are isolated: pending writes are flushed to disk before the next subject starts, and each round starts with
another engine.

A failing subject of perdure ends the measurement. A peer is left out if it cannot be installed, needs a server that is
missing, or fails; the result has the reason.
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

from benchmarks.harness import ROOT, Measures, Round, Setting, Sizes, Workload, load_workload
from benchmarks.peer_environments import NotInstallable, install, python_path
from benchmarks.peer_protocol import Entrant
from benchmarks.servers import BenchmarkServers

SOURCE = ROOT / "src"
SUBJECT_TIMEOUT_SECONDS = 900.0


class SubjectFailed(Exception):
    """The process of a subject failed. The message is the last line of its output; `output` has all lines."""

    def __init__(self, output: str) -> None:
        lines = [line for line in output.strip().splitlines() if line.strip()]
        super().__init__(lines[-1] if lines else "no output")
        self.output = output


@dataclass
class Session:
    """What all workloads of one command share: folder, servers, engines and sizes."""

    data: Path
    servers: BenchmarkServers
    entrants: Sequence[Entrant]
    rounds: int
    scale: float
    progress: Callable[[str], None]
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the installed peers."""
    not_installed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The measured rounds, their entrants, and the reasons for missing subjects."""

    sizes: Sizes
    rounds: Sequence[Round]
    entrants: Sequence[Entrant]
    missing: Mapping[str, str]


def measure(name: str, session: Session) -> Outcome:
    """Run all rounds of a workload. Its files are in a temporary folder below `session.data`."""
    workload = load_workload(name)
    missing: dict[str, str] = {}
    entrants = list(_available_entrants(name, workload, session, missing))
    subjects = dict(_available_subjects(workload, session, missing))
    measured: list[dict[str, Measures]] = []
    with ExitStack() as afterwards:
        folder = Path(afterwards.enter_context(TemporaryDirectory(dir=session.data, prefix=f"{name}-")))
        rounds = WorkloadRounds(name, session, workload.sized(session.scale), folder, workload.shares_servers)
        if workload.prepare is not None:
            rounds.urls = afterwards.enter_context(session.servers.fresh(_servers_of(subjects)))
            rounds.prepare()
        for number in range(1, session.rounds + 1):
            rounds.number = number
            measured.append({**rounds.engines(entrants, missing), **rounds.subjects(subjects)})
    for each in measured:
        for failed in missing:
            each.pop(failed, None)
    return Outcome(rounds.sizes, measured, entrants, missing)


@dataclass
class WorkloadRounds:
    """Measures one workload, round by round."""

    name: str
    session: Session
    sizes: Sizes
    folder: Path
    shares_servers: bool
    urls: Mapping[str, str] | None = None
    """The servers that `prepare` has filled, for all rounds. None: each subject gets unused servers."""
    number: int = 0

    @property
    def prepared(self) -> Path:
        return self.folder / "prepared"

    def prepare(self) -> None:
        self.session.progress(f"{self.name}: preparing")
        self.prepared.mkdir()
        self._measure_subject("prepare", Setting(self.prepared, self.prepared, self.sizes, self.urls or {}))

    def engines(self, entrants: list[Entrant], missing: dict[str, str]) -> dict[str, Measures]:
        """Measure every engine once. A peer that fails is removed from the list."""
        measured = {}
        for entrant in _rotated(entrants, self.number - 1):
            self._report_progress(entrant.name)
            python = python_path(entrant.peer_name, entrant.peer)
            try:
                with self._round_folder() as own, self.session.servers.fresh(entrant.variant.needs) as urls:
                    setting = Setting(own, self.prepared, self.sizes, urls)
                    measured[entrant.name] = _run(python, "run_peer", self.name, entrant.name, setting)
            except SubjectFailed as error:
                if entrant.peer_name == "perdure":
                    raise SystemExit(f"{self.name}, {entrant.name}: failed\n{error.output}") from error
                missing[entrant.name] = f"failed in round {self.number}: {error}"
                entrants.remove(entrant)
        return measured

    def subjects(self, subjects: Mapping[str, tuple[str, ...]]) -> dict[str, Measures]:
        """Measure the workload's own subjects once."""
        measured = {}
        with self._round_folder() as own, ExitStack() as afterwards:
            shared = self.urls
            if shared is None and self.shares_servers:
                shared = afterwards.enter_context(self.session.servers.fresh(_servers_of(subjects)))
            for subject, needs in subjects.items():
                self._report_progress(subject)
                with nullcontext(shared) if shared is not None else self.session.servers.fresh(needs) as urls:
                    measured[subject] = self._measure_subject(subject, Setting(own, self.prepared, self.sizes, urls))
        return measured

    def _measure_subject(self, subject: str, setting: Setting) -> Measures:
        try:
            return _run(sys.executable, "run_subject", self.name, subject, setting)
        except SubjectFailed as error:
            raise SystemExit(f"{self.name}, {subject}: failed\n{error.output}") from error

    @contextmanager
    def _round_folder(self) -> Iterator[Path]:
        with TemporaryDirectory(dir=self.folder, prefix="round-") as own:
            yield Path(own)

    def _report_progress(self, subject: str) -> None:
        self.session.progress(f"{self.name}: round {self.number} of {self.session.rounds}, {subject}")


def _rotated(entrants: Sequence[Entrant], by: int) -> list[Entrant]:
    first = by % max(1, len(entrants))
    return [*entrants[first:], *entrants[:first]]


def _available_entrants(name: str, workload: Workload, session: Session, missing: dict[str, str]) -> Iterator[Entrant]:
    """Yield the engines that can be measured in this workload; record the reasons for the others."""
    if not workload.compared:
        return
    for entrant in session.entrants:
        if name not in entrant.variant.workloads:
            if (reason := entrant.peer.unsupported.get(name)) is not None:
                missing[entrant.name] = reason
        elif (reason := _install_error(entrant, session)) is not None or (
            reason := session.servers.ensure_started(entrant.variant.needs)
        ):
            missing[entrant.name] = reason
        else:
            yield entrant


def _install_error(entrant: Entrant, session: Session) -> str | None:
    """Install the peer, once per command. Return None, or the reason for a failure."""
    name = entrant.peer_name
    if name not in session.versions and name not in session.not_installed:
        try:
            session.versions[name] = install(name, entrant.peer)
            session.progress(f"{name} is installed: {session.versions[name] or 'the checked-out source'}")
        except NotInstallable as error:
            session.not_installed[name] = f"not installed: {error}"
    return session.not_installed.get(name)


def _available_subjects(
    workload: Workload, session: Session, missing: dict[str, str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the workload's own subjects with the servers that each needs; record the reasons for missing ones."""
    names = {each.variant_name for each in session.entrants if each.peer_name == "perdure"}
    for subject in workload.subjects:
        needs = workload.needs.get(subject, ())
        if not set(needs) <= names:
            continue  # the store of this subject was not selected
        if (reason := session.servers.ensure_started(needs)) is not None:
            missing[subject] = reason
        else:
            yield subject, needs


def _servers_of(subjects: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple({server for needs in subjects.values() for server in needs})


def _run(python: str, module: str, name: str, subject: str, setting: Setting) -> Measures:
    """Measure a subject in a new process. Return the measures that it prints in its last line."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(SOURCE), os.environ.get("PYTHONPATH")]))
    os.sync()
    try:
        done = subprocess.run(
            [python, "-m", f"benchmarks.{module}", name, subject, setting.to_json()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=SUBJECT_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise SubjectFailed(f"timeout after {SUBJECT_TIMEOUT_SECONDS:.0f} seconds") from error
    if done.returncode != 0:
        raise SubjectFailed(done.stdout + done.stderr)
    measures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measures
