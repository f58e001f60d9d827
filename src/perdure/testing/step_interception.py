"""Interception of step attempts: inspect each attempt before an executor starts it, and replace it if needed.

For tests only. The executor has no hook of its own; `intercept_steps` wraps its `start` method on one instance.
"""

from __future__ import annotations

from collections.abc import Callable

from perdure.execution.step_executor import StepExecutor
from perdure.model.turns import RunStep

Interceptor = Callable[[str, RunStep], RunStep]


def intercept_steps(executor: StepExecutor, interceptor: Interceptor) -> None:
    """Call `interceptor` with run id and step before each attempt; the executor starts the step that it returns.

    The interceptor added last is called first.
    """
    start = executor.start

    def start_intercepted(
        run_id: str, workflow: str, step: RunStep, now: float, may_have_run_elsewhere: bool = False
    ) -> None:
        start(run_id, workflow, interceptor(run_id, step), now, may_have_run_elsewhere)

    executor.start = start_intercepted  # type: ignore[method-assign]
