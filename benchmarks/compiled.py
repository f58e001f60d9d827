"""Perdure as its wheels have it: with the rooms that every step goes through compiled (hatch_build.py).

Built from the checkout into `.bench/`, once for each state of its source. Where that cannot be done it is measured as
it is checked out, and the results say so.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.peer_environments import PATIENCE, PLACE

SOURCE = ROOT / "src"


def compiled_source() -> tuple[Path, str]:
    """The folder to import perdure from, and what to say of it."""
    place = PLACE / f"compiled-{_state()}"
    if not place.exists():
        for older in PLACE.glob("compiled-*"):
            shutil.rmtree(older)
        wheels = place.with_suffix(".wheels")
        why_not = _build(wheels)
        if why_not is None:
            with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
                wheel.extractall(place)
        shutil.rmtree(wheels, ignore_errors=True)
        if why_not is not None:
            return SOURCE, f"not compiled: {why_not}"
    return place, "compiled, as in its wheels"


def _build(into: Path) -> str | None:
    """None, or why there is no wheel."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, "-w", str(into), str(ROOT)],
            env={**os.environ, "PERDURE_NATIVE": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    words = (done.stderr or done.stdout).strip().splitlines()
    return words[-1] if words else f"pip ended with {done.returncode}"


def _state() -> str:
    """Changes with what is compiled, how, and for which Python."""
    digest = hashlib.sha256(sys.version.encode())
    for path in [ROOT / "hatch_build.py", ROOT / "pyproject.toml", *sorted(SOURCE.rglob("*"))]:
        if path.is_file() and path.suffix != ".pyc":
            digest.update(path.relative_to(ROOT).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
