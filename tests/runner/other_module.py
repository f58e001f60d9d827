"""A module beside that of the workflows under test, with a step, a function and a workflow of its own."""

from __future__ import annotations

from typing import Any

from perdure import Context, step, workflow

CALLED: list[Any] = []


@step
async def refund_elsewhere(what: Any) -> None:
    CALLED.append(["refund", what])


def undo_elsewhere(what: Any) -> None:
    CALLED.append(["undo", what])


@workflow(name="runner_other_module")
async def fails_elsewhere(ctx: Context) -> None:
    raise ValueError("no")
