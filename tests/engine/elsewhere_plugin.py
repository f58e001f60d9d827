"""A pytest plugin: execute the steps of engine tests on the workers of another pool.

`python -m pytest -p tests.engine.elsewhere_plugin tests/engine/test_retry_limits.py` gives every `@step` the pool
"other", steps defined inside of tests included, and adds a worker of this pool beside the engines of a `Harness`. Tests
that are about the worker of the body itself, or about what cannot travel, are deselected with a reason (`DESELECTED`).
"""

import itertools
from typing import Any

import pytest

from perdure import Context, workflow
from perdure.testing import harness as harness_module
from perdure.workflows import steps
from perdure.workflows.steps import REMOTE_STEPS, Step

POOL = "other"

MODULES = (
    "test_retry_limits",
    "test_heartbeats",
    "test_typed_errors",
    "test_lossy_step_errors",
    "test_rollback_errors",
    "test_suspend_on_failure",
    "test_unannotated_results",
    "test_compensation",
)
"""The tests of steps in tests/engine that execute on a `Harness`."""

_OWN_ROWS = "reads the rows of all runs in the store; the rows of an attempt are in its internal run"
_CRASH = "crashes the worker of the run, which does not execute the body"
_COMMITS = "counts the commits of a local step"
DESELECTED = {
    "test_an_invalid_retry_after_is_logged_and_ignored": "the log line names the internal run",
    "test_the_next_attempt_gets_the_last_heartbeat_of_the_failed_one": _OWN_ROWS,
    "test_a_failed_run_keeps_no_heartbeat": _OWN_ROWS,
    "test_poll_gives_type_message_and_fields": _OWN_ROWS,
    "test_a_running_step_shows_its_last_heartbeat": "the heartbeat is shown for the internal run",
    "test_heartbeats_are_written_once_per_second_and_keep_one_row": _COMMITS,
    "test_another_worker_hands_over_the_heartbeat_after_a_crash": _CRASH,
    "test_the_late_heartbeat_of_a_fenced_worker_changes_nothing": _CRASH,
    "test_attribute_over_the_limit_is_dropped": "its limit of 2,000 bytes is smaller than a request",
    "test_max_elapsed_continues_across_crashes": _CRASH,
    "test_max_elapsed_counts_from_the_start_of_an_interrupted_first_attempt": _CRASH,
    "test_an_at_most_once_step_that_a_crash_interrupts_is_not_executed_again": _CRASH,
}
"""Part of a test's id -> why it is not executed with a pool."""

_numbers = itertools.count(1)
_build_step_options = steps.build_step_options
_engine = harness_module.Harness.engine


def _build_options(taken_by: str, options: Any) -> Any:
    if taken_by == "@step" and options.get("context") != "inherit":
        options = {"pool": POOL, **options}
    return _build_step_options(taken_by, options)


def _declare(step: Step[Any, Any]) -> None:
    """Declare a step wherever it is defined: all engines of a test are in one process."""
    if step.is_remote:
        step.declared_name = f"{step.name}.{next(_numbers)}"
        REMOTE_STEPS._definitions.setdefault((step.declared_name, step.version), {})[step.origin] = step
        REMOTE_STEPS.revision += 1


@workflow
async def unused(ctx: Context) -> None:
    pass


async def _engine_with_other_pool(self: Any, *workflows: Any, **options: Any) -> Any:
    engine = await _engine(self, *workflows, **options)
    if not hasattr(self, "other_worker"):
        self.other_worker = None
        given = {name: value for name, value in options.items() if name in ("lifespan", "config")}
        self.other_worker = await _engine(self, unused, pool=POOL, **given)
    return engine


def pytest_configure(config: pytest.Config) -> None:
    steps.build_step_options = _build_options
    steps._declare_remote = _declare
    harness_module.Harness.engine = _engine_with_other_pool  # type: ignore[method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselected = [item for item in items if any(part in item.nodeid for part in DESELECTED)]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]
