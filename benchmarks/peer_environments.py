"""Installation of peers: one virtual environment and one folder of node modules per peer, below `.bench/`.

A peer is installed once, and again when its file names other packages. `make clean` keeps the installations; delete
`.bench/` to remove them. Nothing is installed into the environment of the project. Imports only the standard library:
peers use this module too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import ROOT

if TYPE_CHECKING:
    from benchmarks.peer_protocol import Peer

ENVIRONMENTS = ROOT / ".bench"
INSTALL_TIMEOUT_SECONDS = 900.0


class NotInstallable(Exception):
    """A peer cannot be installed on this machine. The message is the reason, for the report."""


def python_path(name: str, peer: Peer) -> str:
    """Return the interpreter of this peer; the current one if the peer needs no packages."""
    return str(ENVIRONMENTS / name / "venv" / "bin" / "python") if peer.python else sys.executable


def node_program_path(name: str, program: str) -> Path:
    return ENVIRONMENTS / name / "node_modules" / ".bin" / program


def install(name: str, peer: Peer) -> str:
    """Install the packages of the peer if they are missing. Return the versions of its main packages."""
    if not peer.python and not peer.node:
        return ""
    folder = ENVIRONMENTS / name
    required = json.dumps({"python": peer.python, "node": peer.node, "with": sys.version})
    done = folder / "installed.json"
    if not done.exists() or done.read_text() != required:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if peer.python:
            _install_python(folder, peer.python)
        if peer.node:
            _install_node(folder, peer.node)
        done.write_text(required)
    return ", ".join(
        [f"{package} {_python_version(folder, package)}" for package in peer.python[:1]]
        + [f"{package} {_node_version(folder, package)}" for package in peer.node[:1]]
    )


def _install_python(folder: Path, packages: Sequence[str]) -> None:
    _run([sys.executable, "-m", "venv", str(folder / "venv")], folder)
    python = str(folder / "venv" / "bin" / "python")
    _run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages], folder)


def _install_node(folder: Path, packages: Sequence[str]) -> None:
    if shutil.which("npm") is None:
        raise NotInstallable("npm is not installed")
    (folder / "package.json").write_text('{"private": true}')
    _run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *packages], folder)


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstallable(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise NotInstallable(f"{Path(command[0]).name} {command[1]} failed: {lines[-1] if lines else done.returncode}")


def _python_version(folder: Path, package: str) -> str:
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([folder / "venv" / "bin" / "python", "-c", program], capture_output=True, text=True)
    return done.stdout.strip() or "(unknown version)"


def _node_version(folder: Path, package: str) -> str:
    manifest = folder / "node_modules" / package / "package.json"
    version: str = json.loads(manifest.read_text())["version"]
    return version
