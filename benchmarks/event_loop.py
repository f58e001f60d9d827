"""The event loop that everything in Python is measured on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib


def use_the_quick_loop() -> None:
    """uvloop, which is an application's to choose whatever engine it uses; asyncio's own where there is none."""
    with contextlib.suppress(ImportError):
        asyncio.set_event_loop_policy(importlib.import_module("uvloop").EventLoopPolicy())
