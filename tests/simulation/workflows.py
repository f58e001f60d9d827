"""The workflows that execute trees: one for each workflow option, two versions of one, and changed code of one.

`old_code` and `new_code` are the workflows of a worker before and after a deployment. Both have a second version of
`sim.grown`, to which the first one continues. The new code has another function for `sim.gated`, which calls a version
gate before its new step.
"""

from typing import Any

from perdure import Context, Retry, current_step, step, workflow
from perdure.workflows.definition import Workflow, WorkflowOptions
from tests.simulation.external_state import ExternalState
from tests.simulation.random_programs import Node, grow, plain, work

AGAIN = Retry(max_attempts=3, initial=0.5, jitter=0.0)
TIMEOUT, MAX_SUSPEND, RETENTION = 6.0, 4.0, 1.0  # seconds


async def grow_all(ctx: Context, parts: Any) -> Any:
    """Execute the first tree. Continue as new with the others, as the same workflow or as `sim.tree`."""
    ctx.on_exit(left)
    value = await grow(ctx, parts[0], None)
    if len(parts) > 1:
        await ctx.continue_as(parts[1:], workflow=tree if continues_as_tree(parts[0]) else None)
    return plain(value)


def continues_as_tree(part: Node) -> bool:
    """Return whether the run continues as `sim.tree` after this tree."""
    return bool(part[1] == 3)


async def left() -> None:
    ExternalState.current().left(current_step().run_id)


tree = workflow(name="sim.tree")(grow_all)
holding = workflow(name="sim.holding", suspend_on_failure=True)(grow_all)
again = workflow(name="sim.again", retry=AGAIN)(grow_all)
hasty = workflow(name="sim.hasty", timeout=TIMEOUT)(grow_all)
restless = workflow(name="sim.restless", max_suspend=MAX_SUSPEND)(grow_all)
brief = workflow(name="sim.brief", retention=RETENTION)(grow_all)
grown = workflow(name="sim.grown")(grow_all)


@workflow(name="sim.grown", version=2)
async def grown_again(ctx: Context, parts: Any) -> Any:
    value = await grow_all(ctx, parts)
    return ["version 2", await work(1, "ok", None), value]


@workflow(name="sim.gated")
async def gated(ctx: Context, parts: Any) -> Any:
    ctx.on_exit(left)
    before = await grow(ctx, parts[0], None)
    after = await grow(ctx, parts[-1], None)
    return [1, plain(before), plain(after)]


async def _gated(ctx: Context, parts: Any) -> Any:
    ctx.on_exit(left)
    before = await grow(ctx, parts[0], None)
    gate = ctx.version("gate", latest=2)
    if gate == 2:
        await new_work()
    after = await grow(ctx, parts[-1], None)
    return [gate, plain(before), plain(after)]


@step(name="sim.new")
async def new_work() -> None:
    ExternalState.current()


# The same name and version as `gated`, not registered: only workers that get it explicitly execute it.
gated_by_version: Workflow[Any, Any] = Workflow(_gated, "sim.gated", 1, WorkflowOptions())

STABLE: list[Workflow[Any, Any]] = [tree, holding, again, hasty, restless, brief, grown]
FLOWS: dict[str, Workflow[Any, Any]] = {flow.name: flow for flow in [*STABLE, gated]}
"""The workflows that clients start, by name."""


def old_code() -> list[Workflow[Any, Any]]:
    return [*STABLE, gated, grown_again]


def new_code() -> list[Workflow[Any, Any]]:
    return [*STABLE, gated_by_version, grown_again]


def code_of(name: str, version: int) -> Workflow[Any, Any]:
    """Return the definition that workers have after the deployment."""
    return next(flow for flow in new_code() if (flow.name, flow.version) == (name, version))
