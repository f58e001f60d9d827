"""StepThreadPool: daemon threads for the bodies of sync steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

IDLE_SECONDS = 30.0


class StepThreadPool:
    """Runs each call in an idle thread, or in a new one. The executor bounds the number of calls.

    A body that outlives its timeout cannot be stopped. It keeps its thread, and the interpreter does not wait for the
    thread at exit.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._all = 0

    def run(self, call: Callable[[], None]) -> None:
        """Execute a call in a thread. The call must not raise."""
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                self._all += 1
                threading.Thread(target=self._work, name=f"perdure-step-{self._all}", daemon=True).start()
        self._calls.put(call)

    def close(self) -> None:
        """End idle threads."""
        with self._lock:
            for _ in range(self._idle):
                self._calls.put(None)
            self._idle = 0

    def _work(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:
                        self._idle -= 1
                        return
                continue
            if call is None:
                return
            call()
            with self._lock:
                self._idle += 1
