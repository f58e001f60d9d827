"""Source lines of user code, for reports of divergence, deadlock and changed arguments."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

_INSIDE = (f"{Path(__file__).resolve().parents[1]}{os.sep}", f"{Path(asyncio.__file__).parent}{os.sep}")


def caller_source_line() -> str | None:
    """Return the innermost line on the stack that is neither perdure's nor asyncio's nor anyio's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename.startswith(_INSIDE) or _is_of_anyio(frame)):
        frame = frame.f_back
    return None if frame is None else _line(frame)


def waiting_line(coro: Any) -> str | None:
    """Return the innermost line of user code at which a coroutine is suspended."""
    found: str | None = None
    while coro is not None:
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "ag_frame", None) or getattr(coro, "gi_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith(_INSIDE):
            found = _line(frame)
        coro = getattr(coro, "cr_await", None) or getattr(coro, "ag_await", None) or getattr(coro, "gi_yieldfrom", None)
    return found


def _is_of_anyio(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "anyio"


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
