"""Blocking guard: refuse calls in workflow code that block or reach the outside past the event loop.

The loop (event_loop.py) refuses asyncio's own entry points. The interpreter announces direct calls as audit events:
sleeping, name resolution, connections, processes, threads, changes of files. In workflow code they raise
`WorkflowMisuse`; steps, threads and all other code are not affected. Python before 3.13 does not announce `time.sleep`.
There the function is replaced, and a name that was imported before is not covered.

The guard is installed only on request (`perdure dev`, `perdure.testing`): an audit hook cannot be removed, and every
audit event of the process passes through it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from asyncio import events
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from threading import RLock
from types import FrameType
from typing import Any

from perdure.errors import WorkflowMisuse

REFUSED = frozenset(
    {
        "time.sleep",
        "socket.connect",
        "socket.bind",
        "socket.getaddrinfo",
        "socket.gethostbyaddr",
        "socket.gethostbyname",
        "socket.sendmsg",
        "socket.sendto",
        "sqlite3.connect",
        "subprocess.Popen",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.system",
        "_thread.start_new_thread",  # from Python 3.12 on
        "_thread.start_joinable_thread",
        "open",  # only for writing: modules and source lines are read at any time
        "os.link",
        "os.mkdir",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.symlink",
        "os.truncate",
        "shutil.copyfile",
        "shutil.move",
        "shutil.rmtree",
    }
)
SHOWN = dict.fromkeys(("_thread.start_new_thread", "_thread.start_joinable_thread"), "threading.Thread.start")
UNANNOUNCED = () if sys.version_info >= (3, 13) else (("time", "sleep"),)
LIBRARY = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")
# Modules whose calls are tolerated: imports, log lines and debuggers do not change what a workflow does.
TOLERATED = ("importlib", "zipimport", "logging", "linecache", "warnings", "pdb", "bdb")


@contextlib.contextmanager
def blocking_refused() -> Iterator[None]:
    """Refuse blocking calls in workflow code of the whole process. May be nested."""
    with _GUARD.lock:
        _GUARD.open()
    try:
        yield
    finally:
        with _GUARD.lock:
            _GUARD.close()


class _Guard:
    """The state of the guard: one per process, like the audit hook and the replaced functions."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.times = 0
        self._hooked = False
        self._replaced: list[tuple[Any, str, Any]] = []

    def open(self) -> None:
        self.times += 1
        if not self._hooked:
            sys.addaudithook(_audited)
            self._hooked = True
        if self.times == 1:
            for module, name in UNANNOUNCED:
                self._replace(import_module(module), name)

    def close(self) -> None:
        self.times -= 1
        if self.times == 0:
            while self._replaced:
                module, name, original = self._replaced.pop()
                setattr(module, name, original)

    def _replace(self, module: Any, name: str) -> None:
        original = getattr(module, name)
        self._replaced.append((module, name, original))
        setattr(module, name, _announced(f"{module.__name__}.{name}", original))


_GUARD = _Guard()


def _announced(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        _audited(what, args)
        return original(*args)

    return call


def _audited(event: str, args: tuple[Any, ...]) -> None:
    if event not in REFUSED or not _GUARD.times or not hasattr(events._get_running_loop(), "perdure_run"):
        return
    if event == "open" and not _writes(args):
        return
    frames = list(_workflow_frames(sys._getframe(1)))
    if not any(_module(frame).partition(".")[0] in TOLERATED for frame in frames):
        at = f" (at {_line(frames)})" if frames else ""
        raise WorkflowMisuse(f"{SHOWN.get(event, event)}() cannot be called in a workflow: move it into a step{at}")


def _writes(args: tuple[Any, ...]) -> bool:
    flags = args[2] if len(args) > 2 else None
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _workflow_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames from the announced call up to the runner."""
    while frame is not None and (_module(frame) == __name__ or not _module(frame).startswith("perdure.runner.")):
        if _module(frame) != __name__:
            yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _line(frames: Sequence[FrameType]) -> str:
    """Return the innermost line outside of the standard library."""
    own = (frame for frame in frames if not frame.f_code.co_filename.startswith(LIBRARY))
    frame = next(own, frames[0])
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
