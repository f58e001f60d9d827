"""Where peers are installed: a virtual environment and a folder of node modules for each, below `.bench/`.

Installed once, and again when their file names other packages; `make clean` does not remove them, deleting `.bench/`
does. Nothing is built into the project's own environment. Only the standard library: peers use this too.
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

PLACE = ROOT / ".bench"
PATIENCE = 900.0  # seconds for one installation


class NotInstallable(Exception):
    """A peer cannot be had on this machine. The message is the reason, for the report."""


def python_of(name: str, peer: Peer) -> str:
    """The interpreter that this peer runs with: ours, if it needs no packages."""
    return str(PLACE / name / "venv" / "bin" / "python") if peer.python else sys.executable


def node_program(name: str, program: str) -> Path:
    return PLACE / name / "node_modules" / ".bin" / program


def install(name: str, peer: Peer) -> str:
    """Install what the peer needs, if it is not there; the version of its first package, of each kind."""
    if not peer.python and not peer.node:
        return ""
    folder = PLACE / name
    wanted = json.dumps({"python": peer.python, "node": peer.node, "with": sys.version})
    done = folder / "installed.json"
    if not done.exists() or done.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if peer.python:
            _install_python(folder, peer.python)
        if peer.node:
            _install_node(folder, peer.node)
        done.write_text(wanted)
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
        raise NotInstallable("there is no npm on this machine")
    (folder / "package.json").write_text('{"private": true}')
    _run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *packages], folder)


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstallable(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise NotInstallable(f"{Path(command[0]).name} {command[1]} failed: {words[-1] if words else done.returncode}")


def _python_version(folder: Path, package: str) -> str:
    asked = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([folder / "venv" / "bin" / "python", "-c", asked], capture_output=True, text=True)
    return done.stdout.strip() or "of unknown version"


def _node_version(folder: Path, package: str) -> str:
    described = folder / "node_modules" / package / "package.json"
    version: str = json.loads(described.read_text())["version"]
    return version
