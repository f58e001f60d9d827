"""Change hints to listeners in this process. Hints are best effort, so nothing here is durable."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from perdure.model.records import ChangeCallback


class ChangeListeners:
    """The listeners of one store object. Each is called on the event loop on which it subscribed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[object, tuple[asyncio.AbstractEventLoop | None, ChangeCallback]] = {}

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def subscribe(self, callback: ChangeCallback) -> Callable[[], None]:
        """Add a listener. Return a function that removes it; calling that twice does no harm."""
        key = object()
        with self._lock:
            self._listeners[key] = (running_loop(), callback)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.pop(key, None)

        return unsubscribe

    def notify(self, run_ids: frozenset[str] | None) -> None:
        """Notify all listeners that these runs changed; None: any run may have. Callable from any thread."""
        with self._lock:
            listeners = list(self._listeners.values())
        current = running_loop()
        for loop, callback in listeners:
            if loop is None:
                callback(run_ids)
            elif loop is current:
                loop.call_soon(callback, run_ids)
            else:
                _call_on_loop(loop, callback, run_ids)


def _call_on_loop(loop: asyncio.AbstractEventLoop, callback: ChangeCallback, run_ids: frozenset[str] | None) -> None:
    with contextlib.suppress(RuntimeError):  # the listener's loop is closed
        loop.call_soon_threadsafe(callback, run_ids)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop of this thread; None outside of one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
