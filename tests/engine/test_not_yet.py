"""What comes later is refused in words, never accepted and ignored."""

import pytest

from perdure import WorkflowMisuse, step, workflow


@pytest.mark.parametrize("option", [{"compensate": print}, {"pool": "gpu"}])
def test_options_of_steps_that_come_later_are_refused(option):
    with pytest.raises(WorkflowMisuse, match="not part of this version yet"):
        step(**option)

    @step
    async def work() -> None: ...

    with pytest.raises(WorkflowMisuse, match="not part of this version yet"):
        work.options(**option)


def test_suspending_on_failure_is_refused():
    with pytest.raises(WorkflowMisuse, match="not part of this version yet"):
        workflow(suspend_on_failure=True)
