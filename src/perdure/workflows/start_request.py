"""From a call of `start`, or a workflow that starts a child, to the record of a new run. Pure but for the dice."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from perdure.codec import Codec
from perdure.config import EngineConfig
from perdure.errors import InvalidArgument, InvalidPayload, RunConflict, WorkflowMisuse
from perdure.model.ids import keyed_run_id, new_run_id, new_token, shard_of
from perdure.model.records import RunRecord, WorkerRecord
from perdure.model.turns import StartChild
from perdure.model.validation import check_name, check_seconds
from perdure.workflows.definition import REGISTRY, BoundWorkflow, StartOptions, Workflow, check_tags


class StartRequest(Struct, frozen=True):
    """A checked request to start a run."""

    workflow: Workflow[Any, Any] | None  # None: started by name, and not imported in this process
    record: RunRecord


def find_workflow(target: Workflow[Any, Any] | str | Any) -> Workflow[Any, Any]:
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


def build_start_request(
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: StartOptions,
    *,
    codec: Codec,
    config: EngineConfig,
    now: float,
) -> StartRequest:
    """Check everything about a start before anything is stored."""
    if isinstance(target, BoundWorkflow):
        if options != StartOptions():
            raise InvalidArgument("give the options of a start once: to wf.options(...), not to start as well")
        options, target = target.start, target.workflow
    workflow = find_workflow(target)
    settings = workflow.settings
    payload = workflow.parameters.encode(codec, args, kwargs, what=f"payload of workflow {workflow.name!r}")
    if options.queue is not None:
        raise InvalidArgument("queues are not part of this version yet; leave out queue=")
    delay = 0.0 if options.delay is None else check_seconds("delay", options.delay)
    retention = settings.retention if options.retention is None else check_seconds("retention", options.retention)
    run_id = _run_id(workflow, args, kwargs, options.id, now)
    record = _new_record(workflow, run_id, payload, config, now, delay)
    tags = {**settings.tags, **check_tags(options.tags)}
    return StartRequest(workflow, replace(record, created_by=new_token(), tags=tags, retention=retention))


def build_start_request_by_name(
    name: str,
    args: tuple[Any, ...],
    options: StartOptions,
    workers: Sequence[WorkerRecord],
    *,
    codec: Codec,
    config: EngineConfig,
    now: float,
) -> StartRequest:
    """A start of a workflow that is not imported here and that a live worker has published, in its highest version.

    Nothing is known of it but its name: the payload is one dict by parameter name, written as it is and checked by the
    worker that takes the run up. Options of its definition (key, tags, retention, timeout) do not apply.
    """
    alive = [worker for worker in workers if not worker.fenced and worker.lease_until >= now]
    found = [(version, worker.pool) for worker in alive for known, version in worker.workflows if known == name]
    if not found:
        raise WorkflowMisuse(
            f"no workflow named {name!r} has been imported in this process, and no live worker has published one"
        )
    if len(args) > 1 or not all(isinstance(arg, Mapping) and all(isinstance(key, str) for key in arg) for arg in args):
        raise InvalidPayload(
            f"workflow {name!r} is not imported in this process: give its payload as one dict by parameter name, "
            f"start({name!r}, {{'order': ...}})"
        )
    if options.queue is not None:
        raise InvalidArgument("queues are not part of this version yet; leave out queue=")
    version, pool = max(found)
    run_id = new_run_id(now) if options.id is None else check_name("a run's id", options.id)
    record = RunRecord(
        id=run_id,
        workflow=name,
        version=version,
        input=codec.encode(dict(args[0]) if args else {}, what=f"payload of workflow {name!r}"),
        created_at=now,
        created_by=new_token(),
        seed=random.getrandbits(31),
        pool=pool,
        shard=shard_of(run_id, config.shards),
        tags=check_tags(options.tags),
        updated_at=now,
        wake_at=now + (0.0 if options.delay is None else check_seconds("delay", options.delay)),
        retention=None if options.retention is None else check_seconds("retention", options.retention),
    )
    return StartRequest(None, record)


def build_child_start_request(
    work: StartChild, workflow: Workflow[Any, Any], parent: str, config: EngineConfig, now: float
) -> StartRequest:
    """The run that a workflow asked for. Its id, payload and `created_by` were fixed when it was first asked for."""
    record = _new_record(workflow, work.run_id, work.input, config, now)
    return StartRequest(workflow, replace(record, created_by=work.created_by, parent=parent, attached=work.attached))


def _new_record(
    workflow: Workflow[Any, Any], run_id: str, payload: bytes, config: EngineConfig, now: float, delay: float = 0.0
) -> RunRecord:
    settings, starts_at = workflow.settings, now + delay
    return RunRecord(
        id=run_id,
        workflow=workflow.name,
        version=workflow.version,
        input=payload,
        created_at=now,
        created_by="",
        seed=random.getrandbits(31),
        pool=settings.pool,
        shard=shard_of(run_id, config.shards),
        tags=settings.tags,
        updated_at=now,
        wake_at=starts_at,
        deadline_at=None if settings.timeout is None else starts_at + settings.timeout,
        retention=settings.retention,
    )


def claimed_at_creation(record: RunRecord, owner: str) -> RunRecord:
    """Return the record of a new run that this worker owns from the start, so that it need not be claimed.

    Only the owner is sent. The store derives status and times, because it knows whether the worker is fenced.
    """
    return replace(record, owner=owner)


def check_same_run(order: StartRequest, existing: RunRecord, codec: Codec) -> None:
    """An existing id is observed if it is the same workflow with an equal payload, and a conflict otherwise."""
    mine = order.record
    started_as = existing.original_workflow or existing.workflow
    if started_as != mine.workflow:
        raise RunConflict(mine.id, f"another workflow ({started_as!r}, not {mine.workflow!r})")
    first = existing.input if existing.original_input is None else existing.original_input
    if not _equal_payloads(order.workflow, codec, first, mine.input):
        raise RunConflict(mine.id, "another payload")


def _equal_payloads(workflow: Workflow[Any, Any] | None, codec: Codec, a: bytes, b: bytes) -> bool:
    if workflow is not None:
        return workflow.parameters.equal(codec, a, b)
    return a == b or codec.canonical(codec.decode(a)) == codec.canonical(codec.decode(b))


def _run_id(
    workflow: Workflow[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], given: str | None, now: float
) -> str:
    if given is not None:
        return check_name("a run's id", given)
    if workflow.settings.idempotency_key is not None:
        return keyed_run_id(workflow.name, workflow.settings.idempotency_key(*args, **kwargs))
    return new_run_id(now)
