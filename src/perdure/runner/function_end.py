"""FunctionEnd: what happens when the workflow function has returned, raised, continued as another, or was halted.

Its outcome is kept, remaining tasks are cancelled, and the cleanup starts (cleanup.py). The run ends when the cleanup
has ended; only then is the outcome part of a turn.
"""

from __future__ import annotations

import logging
from contextvars import Context as VariableContext

from perdure.model.turns import Cancelled, Continued, Failed, Outcome, Succeeded
from perdure.runner.cleanup import run_cleanup
from perdure.runner.context_api import ContextApi
from perdure.runner.outcomes import failure_outcome, task_outcome
from perdure.runner.state import RunnerState
from perdure.runner.tasks import WorkflowTask

LOGGER = logging.getLogger("perdure.workflow")


class FunctionEnd:
    """See the module's docstring."""

    __slots__ = ("_api", "_state")

    def __init__(self, state: RunnerState, api: ContextApi) -> None:
        self._state = state
        self._api = api

    def cancel_tasks(self) -> bool:
        """Keep the outcome of the function and cancel tasks that still run, with their steps.

        False if the run is held: then the function has not ended.
        """
        state = self._state
        entries, loop, main = state.entries, state.loop, state.main
        if main is None or entries.held is not None:
            return False
        state.function_outcome = self._outcome(main)
        loop.halted = False
        entries.end()
        entries.deadlines.end_all()
        for task in list(loop.live):
            if not task.done() and task not in entries.cleanup_tasks:
                task.cancel()
        loop.callbacks = 0
        state.cancelling_tasks = True
        return True

    def start_cleanup(self) -> bool:
        """Run the handlers of the cancelled tasks, then start the cleanup. Return whether there is one to run.

        The run does not wait for the handlers. If the loop is paused meanwhile, the next call continues.
        """
        state = self._state
        loop, main, outcome = state.loop, state.main, state.function_outcome
        assert main is not None
        assert outcome is not None
        self._run_cancel_handlers()
        if loop.paused:
            return False
        state.cancelling_tasks = False
        if loop.spinning:  # tasks that ignore their cancellation do not delay the cleanup
            loop.ready.clear()
            loop.callbacks = 0
        if state.exit is not None and main.done() and not main.cancelled():
            main.exception()  # marks it as retrieved: asyncio would log it otherwise
        if self._create_cleanup_task(outcome):
            return True
        if not main.done():
            loop.halted = True  # an exception handler of the function awaits something that never completes
        return False

    def _outcome(self, main: WorkflowTask) -> Outcome:
        state = self._state
        definition, codec = state.start.definition, state.start.codec
        if state.exit is not None:
            return failure_outcome(state.exit, definition, codec)
        if state.continued is not None and state.stop_reason is None:
            return state.continued
        if state.stop_reason == "cancel":
            return Cancelled(state.cancel_reason)
        return task_outcome(main, definition, codec, state.stop_reason)

    def _run_cancel_handlers(self) -> None:
        try:
            self._state.loop.drain(to_the_end=True)
        except SystemExit:
            info = self._state.info
            LOGGER.warning(
                "Run %s: task raised SystemExit after the workflow returned; ignored",
                info.id,
                extra={"run_id": info.id, "workflow": info.workflow},
            )

    def _create_cleanup_task(self, outcome: Outcome) -> bool:
        """Create the task of the cleanup, as the new main task. False if there is nothing to clean up."""
        state = self._state
        entries = state.entries
        continues = isinstance(outcome, Continued)
        unsuccessful = not continues and not isinstance(outcome, Succeeded)
        will_retry = isinstance(outcome, Failed) and outcome.retryable and self._has_attempts_left()
        rollbacks = [task for task in entries.cleanup_tasks if not task.done()]
        needed = not continues and (entries.compensations or (unsuccessful and state.may_have_children))
        if not rollbacks and not needed:
            return False
        run_exit_hooks = not continues and not will_retry
        cleanup = run_cleanup(self._api, rollbacks, compensate=unsuccessful, run_exit_hooks=run_exit_hooks)
        entries.add_cleanup_task(state.loop.start_main(cleanup, "~cleanup", VariableContext()))
        return True

    def _has_attempts_left(self) -> bool:
        start = self._state.start
        retry = start.definition.settings.retry
        return retry is not None and start.run_attempt < retry.max_attempts
