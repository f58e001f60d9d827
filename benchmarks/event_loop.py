"""The event loop that all Python processes of a benchmark use."""

from __future__ import annotations

import asyncio
import contextlib
import importlib


def use_uvloop_if_installed() -> None:
    """Use uvloop if it is installed, else asyncio's own loop. An application makes this choice for any engine."""
    with contextlib.suppress(ImportError):
        asyncio.set_event_loop_policy(importlib.import_module("uvloop").EventLoopPolicy())
