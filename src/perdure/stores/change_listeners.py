"""Telling those who listen that runs changed: late, twice or never does no harm, so nothing here is durable."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from perdure.model.records import ChangeCallback


class ChangeListeners:
    """The listeners of one store object. Each is called on the event loop on which it began to listen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[object, tuple[asyncio.AbstractEventLoop | None, ChangeCallback]] = {}

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def subscribe(self, hint: ChangeCallback) -> Callable[[], None]:
        """Add a listener; call what comes back to be rid of it."""
        key = object()
        with self._lock:
            self._listeners[key] = (_running_loop(), hint)

        def leave() -> None:
            with self._lock:
                self._listeners.pop(key, None)

        return leave

    def notify(self, run_ids: frozenset[str] | None) -> None:
        """Tell everyone; from any thread. None: any run may have changed."""
        with self._lock:
            listeners = list(self._listeners.values())
        here = _running_loop()
        for loop, hint in listeners:
            if loop is None:
                hint(run_ids)
            elif loop is here:
                loop.call_soon(hint, run_ids)
            else:
                _call_elsewhere(loop, hint, run_ids)


def _call_elsewhere(loop: asyncio.AbstractEventLoop, hint: ChangeCallback, run_ids: frozenset[str] | None) -> None:
    with contextlib.suppress(RuntimeError):  # its loop was closed: nobody listens there any more
        loop.call_soon_threadsafe(hint, run_ids)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
