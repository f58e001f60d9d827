"""RunFaults: holds a run that raised while this worker loaded, replayed or advanced it.

The cause is a row that cannot be decoded or a defect of perdure. Without a hold the run would stay `running` under a
live owner that does not execute it, and no other worker would take it over. The other runs of the worker continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from perdure.errors import StoreError
from perdure.execution.store_session import StoreSession
from perdure.execution.turn_commit import build_hold_commit
from perdure.model.records import Hold
from perdure.stores.results import Committed, WriteResult

LOGGER = logging.getLogger("perdure.execution")
ALL_MESSAGES = 2**53 - 1  # as the last message that a hold has seen: only a later cancel or resume wakes the run


class RunFaults:
    """The faults of one worker's runs.

    `worker` returns the id of this worker. `on_rejected` is called with the id of a run whose hold the store rejects,
    because a turn of it was committed meanwhile or this worker no longer owns it.
    """

    def __init__(self, session: StoreSession, worker: Callable[[], str], on_rejected: Callable[[str], None]) -> None:
        self.count = 0
        self._session = session
        self._worker = worker
        self._on_rejected = on_rejected

    def hold(
        self, run_id: str, position: int, cause: Exception | str, *, seen: int = ALL_MESSAGES, workflow: str = ""
    ) -> None:
        """Log the cause and hold the run at this position of its history."""
        self.count += 1
        error = cause if isinstance(cause, Exception) else None
        reason = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        extra = {"run_id": run_id, "workflow": workflow, "worker": self._worker()}
        LOGGER.error("Run %s held: %s; fix the cause, then resume the run", run_id, reason, exc_info=error, extra=extra)
        hold = Hold("internal_error", reason)
        write = build_hold_commit(run_id, position, seen, hold, self._worker(), self._session.clock.now())
        self._session.committer.submit(write, lambda result: self._on_result(run_id, result))

    def _on_result(self, run_id: str, result: WriteResult | StoreError) -> None:
        self._session.waiters.notify((run_id,))
        if isinstance(result, StoreError):
            extra = {"run_id": run_id, "worker": self._worker()}
            LOGGER.error(
                "Run %s could not be held and stays with worker %s: %s; see `perdure doctor`",
                run_id,
                self._worker(),
                result,
                extra=extra,
            )
        elif not isinstance(result, Committed):
            self._on_rejected(run_id)
