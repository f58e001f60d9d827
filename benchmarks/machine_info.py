"""The machine of a measurement, as far as it can be determined without errors, and the memory of a process."""

from __future__ import annotations

import gc
import os
import platform
import resource
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import apsw

from benchmarks.harness import ROOT

DRIVERS = ("asyncpg", "redis")


def collect_machine_info() -> dict[str, Any]:
    """Return cores, versions and commit. No names of hosts, users or folders: results may be published."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "sqlite": apsw.sqlite_lib_version(),
        "apsw": apsw.apsw_version(),
        **{driver: version for driver in DRIVERS if (version := _version(driver)) is not None},
        "commit": _commit(ROOT / ".git"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def process_memory_bytes() -> int:
    """Return the memory of this process, or its peak if the system does not report the current value."""
    gc.collect()
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _commit(git: Path) -> str | None:
    """Return the checked-out commit, read from files, so that git need not be installed."""
    try:
        if git.is_file():  # a worktree: the file names its git directory
            git = (git.parent / git.read_text().partition("gitdir:")[2].strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        common = git / "commondir"
        folders = [git, (git / common.read_text().strip()).resolve()] if common.exists() else [git]
        return next(filter(None, (_read_ref(folder, name) for folder in folders)), None)
    except OSError:
        return None


def _read_ref(folder: Path, name: str) -> str | None:
    if (folder / name).exists():
        return (folder / name).read_text().strip()
    packed = folder / "packed-refs"
    if not packed.exists():
        return None
    pairs = (line.split() for line in packed.read_text().splitlines() if not line.startswith(("#", "^")))
    return next((pair[0] for pair in pairs if pair[1:] == [name]), None)
