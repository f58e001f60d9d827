"""From a call of `start` to the record of a new run: what to check, which id, which payload. Pure but for the dice."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from perdure.codec import Codec
from perdure.config import EngineConfig
from perdure.definition import REGISTRY, BoundWorkflow, StartOptions, Workflow, check_tags
from perdure.errors import InvalidArgument, RunConflict, WorkflowMisuse
from perdure.ids import keyed_run_id, new_run_id, new_token, shard_of
from perdure.names import check_name, check_seconds
from perdure.records import RunRecord


class Order(Struct, frozen=True):
    """A checked request to start a run."""

    workflow: Workflow[Any, Any]
    record: RunRecord


def workflow_named(target: Workflow[Any, Any] | str | Any) -> Workflow[Any, Any]:
    """The definition that a caller means."""
    if isinstance(target, Workflow):
        return target
    if isinstance(target, str):
        found = REGISTRY.latest(check_name("a workflow's name", target))
        if found is None:
            raise WorkflowMisuse(f"no workflow named {target!r} has been imported in this process")
        return found
    raise WorkflowMisuse(f"start takes a @workflow function or its name, not {target!r}")


def start_options(given: Mapping[str, Any]) -> StartOptions:
    """The options of one start; what is none of them was probably meant for the workflow."""
    unknown = set(given) - set(StartOptions.__struct_fields__)
    if unknown:
        raise InvalidArgument(
            f"start has no option {', '.join(sorted(unknown))}; a workflow's own keyword arguments go through "
            "start(wf.options(id=...), *args, **kwargs)"
        )
    return StartOptions(**given)


def order_of(
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: StartOptions,
    *,
    codec: Codec,
    config: EngineConfig,
    now: float,
) -> Order:
    """Check everything about a start before anything is stored."""
    if isinstance(target, BoundWorkflow):
        if options != StartOptions():
            raise InvalidArgument("give the options of a start once: to wf.options(...), not to start as well")
        options, target = target.start, target.workflow
    workflow = workflow_named(target)
    settings = workflow.settings
    payload = workflow.parameters.encode(codec, args, kwargs, what=f"payload of workflow {workflow.name!r}")
    if options.queue is not None:
        raise InvalidArgument("queues are not part of this version yet; leave out queue=")
    delay = 0.0 if options.delay is None else check_seconds("delay", options.delay)
    retention = settings.retention if options.retention is None else check_seconds("retention", options.retention)
    run_id = _run_id(workflow, args, kwargs, options.id, now)
    starts_at = now + delay
    record = RunRecord(
        id=run_id,
        workflow=workflow.name,
        version=workflow.version,
        input=payload,
        created_at=now,
        created_by=new_token(),
        seed=random.getrandbits(31),
        pool=settings.pool,
        shard=shard_of(run_id, config.shards),
        tags={**settings.tags, **check_tags(options.tags)},
        updated_at=now,
        wake_at=starts_at,
        deadline_at=None if settings.timeout is None else starts_at + settings.timeout,
        retention=retention,
    )
    return Order(workflow, record)


def check_same_run(order: Order, existing: RunRecord, codec: Codec) -> None:
    """An existing id is observed if it is the same workflow with an equal payload, and a conflict otherwise."""
    mine = order.record
    started_as = existing.first_workflow or existing.workflow
    if started_as != mine.workflow:
        raise RunConflict(mine.id, f"another workflow ({started_as!r}, not {mine.workflow!r})")
    first = existing.input if existing.first_input is None else existing.first_input
    if not order.workflow.parameters.equal(codec, first, mine.input):
        raise RunConflict(mine.id, "another payload")


def _run_id(
    workflow: Workflow[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], given: str | None, now: float
) -> str:
    if given is not None:
        return check_name("a run's id", given)
    if workflow.settings.idempotency_key is not None:
        return keyed_run_id(workflow.name, workflow.settings.idempotency_key(*args, **kwargs))
    return new_run_id(now)
