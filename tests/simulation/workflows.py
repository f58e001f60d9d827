"""The workflows that grow trees: one for each option that a workflow has, two versions of one, and code that changes.

`old_code` and `new_code` are what a worker has before and after a deploy. The new code has a further version of
`sim.grown`, to which the old one continues, and another function for `sim.gated`, which asks by a gate whether it may
do something new.
"""

from typing import Any

from perdure import Context, Retry, current_step, step, workflow
from perdure.workflows.definition import Workflow, WorkflowOptions
from tests.simulation.external_state import Stage
from tests.simulation.random_programs import Node, grow, plain, work

AGAIN = Retry(max_attempts=3, initial=0.5, jitter=0.0)
TIMEOUT, MAX_SUSPEND, RETENTION = 6.0, 4.0, 1.0  # seconds


async def grow_all(ctx: Context, parts: Any) -> Any:
    """Grow the first tree; if there are more, continue with the others, as the same workflow or as another one."""
    ctx.on_exit(left)
    value = await grow(ctx, parts[0], None)
    if len(parts) > 1:
        await ctx.continue_as(parts[1:], workflow=tree if goes_over(parts[0]) else None)
    return plain(value)


def goes_over(part: Node) -> bool:
    """Whether the run continues as a plain `sim.tree` after this tree."""
    return bool(part[1] == 3)


async def left() -> None:
    Stage.current().left(current_step().run_id)


tree = workflow(name="sim.tree")(grow_all)
patient = workflow(name="sim.patient", suspend_on_failure=True)(grow_all)
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
    Stage.current()


# The same name and version from another place: nobody but a worker that is given it knows of it.
gated_anew: Workflow[Any, Any] = Workflow(_gated, "sim.gated", 1, WorkflowOptions())

STABLE: list[Workflow[Any, Any]] = [tree, patient, again, hasty, restless, brief, grown]
FLOWS: dict[str, Workflow[Any, Any]] = {flow.name: flow for flow in [*STABLE, gated]}
"""What clients start, by name."""


def old_code() -> list[Workflow[Any, Any]]:
    return [*STABLE, gated]


def new_code() -> list[Workflow[Any, Any]]:
    return [*STABLE, gated_anew, grown_again]


def code_of(name: str, version: int) -> Workflow[Any, Any]:
    """The definition that workers have in the end."""
    return next(flow for flow in new_code() if (flow.name, flow.version) == (name, version))
