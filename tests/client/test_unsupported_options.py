"""Options of later versions are refused with an error message, never accepted and ignored."""

import pytest

from perdure import WorkflowMisuse, step


def test_pool_of_a_step_is_refused():
    with pytest.raises(WorkflowMisuse, match="not supported in this version"):
        step(pool="gpu")

    @step
    async def work() -> None: ...

    with pytest.raises(WorkflowMisuse, match="not supported in this version"):
        work.options(pool="gpu")
