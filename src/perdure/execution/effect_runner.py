"""EffectRunner: starts and cancels what the turns of runs request: step bodies and external effects.

The coordinator calls it after the turn is committed, never before: an effect of a turn that the store rejects must not
happen.
"""

from __future__ import annotations

from perdure.execution.external_effects import ExternalEffects
from perdure.execution.run_cache import CachedRun
from perdure.execution.step_executor import StepExecutor
from perdure.model.turns import CancelStep, ExternalEffect, RunStep, Turn


class EffectRunner:
    """The step bodies and external effects that execute in this process."""

    def __init__(self, executor: StepExecutor, external: ExternalEffects) -> None:
        self.executor = executor
        self.external = external

    @property
    def is_busy(self) -> bool:
        return bool(self.executor.busy or self.external.busy)

    def start(self, cached: CachedRun, turn: Turn, now: float, *, draining: bool) -> None:
        """Start the effects of a committed turn. While the worker drains, only at-most-once steps start."""
        for effect in turn.effects:
            match effect:
                case RunStep():
                    # An at-most-once attempt is recorded as started: without its body it would count as interrupted.
                    if not draining or effect.call.step.settings.at_most_once:
                        elsewhere = not cached.never_executed_elsewhere and cached.may_have_run(effect.attempt)
                        self.executor.start(cached.id, cached.record.workflow, effect, now, elsewhere)
                case CancelStep(location):
                    self.executor.cancel(cached.id, location)
                case ExternalEffect():
                    if not draining:  # the next owner derives it again by replay
                        self.external.start(cached.record, effect)
        cached.turns += 1

    def running_locations(self, run_id: str) -> frozenset[str]:
        """Return the locations of the run's steps and external effects that execute in this process."""
        return self.executor.running_locations(run_id) | self.external.running_locations(run_id)

    def cancel_all(self, run_id: str) -> None:
        """Cancel the run's steps and external effects in this process."""
        self.executor.cancel_all(run_id)
        self.external.cancel_all(run_id)
