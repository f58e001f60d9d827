"""Validate a start, from a client or a parent workflow, and build the record of the new run.

Pure except for random ids and seeds. This module knows no store and reads no clock; callers pass the time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from perdure.codec import Codec
from perdure.config import EngineConfig
from perdure.errors import InvalidArgument, InvalidPayload, QueueFull, RunConflict, WorkflowMisuse
from perdure.model.ids import keyed_run_id, new_creation_id, new_run_id, new_token, shard_of
from perdure.model.queue_records import Place
from perdure.model.records import Message, RunRecord, WorkerRecord
from perdure.model.tags import Tags, TagValue
from perdure.model.turns import StartChild
from perdure.model.validation import check_name, check_seconds, check_tags, describe_value, refuse_reserved_tags
from perdure.workflows.definition import REGISTRY, BoundWorkflow, Workflow
from perdure.workflows.events import build_message, encode_event
from perdure.workflows.publications import PublishedWorkflow
from perdure.workflows.queue_placement import Placement, Started, build_placement
from perdure.workflows.start_options import IfExists, StartOptions


class StartRequest(Struct, frozen=True):
    """A validated request to start a run. `messages` are its first messages, numbered from 1.

    With a `placement` the run waits in a queue.
    """

    workflow: Workflow[Any, Any] | None  # None: started by name, without the definition in this process.
    record: RunRecord
    if_exists: IfExists = "observe"
    messages: tuple[Message, ...] = ()
    placement: Placement | None = None

    @property
    def place(self) -> Place | None:
        """The place in a queue that the run requests."""
        return None if self.placement is None else self.placement.place


def find_workflow(target: Workflow[Any, Any] | str | Any) -> Workflow[Any, Any]:
    """Return the definition for a `@workflow` function or a name. Raises `WorkflowMisuse` if there is none."""
    if isinstance(target, Workflow):
        return target
    if isinstance(target, str):
        name = check_name("a workflow's name", target)
        found = REGISTRY.latest(name)
        if found is None:
            raise WorkflowMisuse(f"no workflow named {name!r} is imported in this process")
        return found
    raise WorkflowMisuse(f"start must be given a @workflow function or its name, not {describe_value(target)}")


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
    """Validate a start and return the request. Nothing is stored."""
    is_bound = isinstance(target, BoundWorkflow)
    if isinstance(target, BoundWorkflow):
        options, target = target.start, target.workflow
    workflow = find_workflow(target)
    settings = workflow.settings
    if kwargs and not is_bound and (unknown := workflow.parameters.find_unknown(kwargs)):
        raise InvalidArgument(
            f"start has no option {', '.join(unknown)}, and workflow {workflow.name!r} has no parameter of this name; "
            "use an option of start or a parameter of the workflow"
        )
    payload = workflow.parameters.encode(codec, args, kwargs, what=f"payload of workflow {workflow.name!r}")
    delay = 0.0 if options.delay is None else check_seconds("delay", options.delay)
    retention = settings.retention if options.retention is None else check_seconds("retention", options.retention)
    timeout = settings.timeout if options.timeout is None else check_timeout(options.timeout)
    placement = None
    if settings.queue is not None or options.has_place:
        has_key = settings.idempotency_key is not None
        started = Started(workflow.name, settings.queue, args, kwargs, has_key, timeout is not None)
        placement = build_placement(options, started, now, delay)
    starts_at = now + delay if placement is None else placement.starts_at
    run_id = _run_id(workflow, args, kwargs, options.id, now)
    record = _new_record(workflow, run_id, payload, config, now, delay)
    record = replace(
        record,
        created_by=new_creation_id(),
        tags=_check_tags(options.tags, settings.tags),
        retention=retention,
        deadline_at=None if timeout is None else starts_at + timeout,
    )
    messages = build_first_messages(options.send, codec, config, now) if options.send else ()
    return _with_place(StartRequest(workflow, record, options.if_exists, messages), placement)


def build_start_request_by_name(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: StartOptions,
    executed: tuple[int, str],
    published: PublishedWorkflow,
    *,
    codec: Codec,
    config: EngineConfig,
    now: float,
) -> StartRequest:
    """Return a request for a workflow that is not imported in this process, in a version and pool that a worker has.

    The payload is one dict by parameter name, or keyword arguments. It is checked with the schema that the workers have
    published, and completely by the worker that executes the run. The published tags, retention, timeout and queue
    apply. A workflow with an idempotency key needs an id, because its key function is not known here.
    """
    payloads = (*args, kwargs) if kwargs else args
    if len(payloads) > 1 or not all(map(_is_object, payloads)):
        raise InvalidPayload(
            f"workflow {name!r} is not imported in this process: use one dict by parameter name as its payload, "
            f"start({name!r}, {{'order': ...}})"
        )
    what, payload = f"payload of workflow {name!r}", dict(payloads[0]) if payloads else {}
    published.check_payload(payload, what)
    delay = 0.0 if options.delay is None else check_seconds("delay", options.delay)
    timeout = published.timeout if options.timeout is None else check_timeout(options.timeout)
    has_key = published.has_idempotency_key
    started = Started(name, published.queue, has_idempotency_key=has_key, has_timeout=timeout is not None)
    has_place = options.has_place or published.queue is not None
    placement = build_placement(options, started, now, delay) if has_place else None
    starts_at = now + delay if placement is None else placement.starts_at
    if options.id is None and has_key:
        raise InvalidArgument(
            f"workflow {name!r} has an idempotency_key, which is not imported in this process; use id= with the id "
            "that the key would give"
        )
    version, pool = executed
    run_id = new_run_id(now) if options.id is None else check_name("a run's id", options.id)
    record = RunRecord(
        id=run_id,
        workflow=name,
        version=version,
        input=codec.encode(payload, what=what),
        created_at=now,
        created_by=new_creation_id(),
        seed=random.getrandbits(31),
        pool=pool,
        shard=shard_of(run_id, config.shards),
        tags=_check_tags(options.tags, published.read_tags()),
        updated_at=now,
        wake_at=starts_at,
        deadline_at=None if timeout is None else starts_at + timeout,
        retention=published.retention if options.retention is None else check_seconds("retention", options.retention),
    )
    messages = build_first_messages(options.send, codec, config, now) if options.send else ()
    return _with_place(StartRequest(None, record, options.if_exists, messages), placement)


def find_executed(name: str, workers: Sequence[WorkerRecord], now: float) -> tuple[int, str]:
    """Return the highest version of a workflow that a live worker has, and its pool. Raises `WorkflowMisuse`."""
    live = [worker for worker in workers if not worker.fenced and worker.lease_until >= now]
    found = [(version, worker.pool) for worker in live for known, version in worker.workflows if known == name]
    if not found:
        raise WorkflowMisuse(
            f"no workflow named {name!r} is imported in this process, and no live worker has published one"
        )
    return max(found)


def _with_place(request: StartRequest, placement: Placement | None) -> StartRequest:
    """Return the request with the place of its run, which is not due until it is admitted."""
    return request if placement is None else replace(request, **_placed(request.record, placement))


def _placed(record: RunRecord, placement: Placement) -> dict[str, Any]:
    place = placement.place
    if record.deadline_at is not None:
        expires_at = record.deadline_at if place.expires_at is None else min(place.expires_at, record.deadline_at)
        place = replace(place, expires_at=expires_at)
    queued = replace(
        record, queue=place.queue, partition=place.partition, priority=place.priority, waiting=True, wake_at=None
    )
    return {"record": queued, "placement": replace(placement, place=place)}


def _is_object(payload: Any) -> bool:
    return isinstance(payload, Mapping) and all(isinstance(key, str) for key in payload)


def build_first_messages(events: Sequence[Any], codec: Codec, config: EngineConfig, now: float) -> tuple[Message, ...]:
    """Return the events of `send=` as messages, in order. Raises what `send` raises for an invalid event.

    An item is an event, a pair of name and payload, or a dict with the arguments `event`, `payload` and `event_id` of
    `send`. `QueueFull` if there are more events of one name than a mailbox takes. Items with an `event_id` that occurs
    before are dropped, as a repeated send is.
    """
    messages: dict[str, Message] = {}
    for item in events:
        event, payload, event_id = _read_sent_event(item)
        options, body = encode_event(event, payload, codec)
        name = new_token() if event_id is None else check_name("an event's id", event_id)
        message = build_message(options, body, event_id=name, sent_at=now)
        messages.setdefault(message.id, replace(message, number=len(messages) + 1))
    for event_name, count in Counter(message.name for message in messages.values()).items():
        if count > config.max_pending_events:
            raise QueueFull(
                f"send has {count} events of {event_name!r}; the mailbox of a run takes {config.max_pending_events}"
            )
    return tuple(messages.values())


def _read_sent_event(item: Any) -> tuple[Any, Any, str | None]:
    """Return event, payload and event id of one item of `send=`."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        return item[0], item[1], None
    if isinstance(item, dict) and "event" in item and item.keys() <= {"event", "payload", "event_id"}:
        return item["event"], item.get("payload"), item.get("event_id")
    return item, None, None


def check_timeout(timeout: float | timedelta) -> float:
    """Return the timeout of a run in seconds; it must be positive, as that of a workflow."""
    return check_seconds("timeout", timeout, zero=False)


def build_child_start_request(
    action: StartChild, workflow: Workflow[Any, Any], parent: RunRecord, config: EngineConfig, now: float
) -> StartRequest:
    """Return the request for a child run. Id, payload and `created_by` are those of the first request."""
    record = _new_record(workflow, action.run_id, action.input, config, now)
    record = replace(
        record,
        created_by=action.created_by,
        parent=parent.id,
        attached=action.attached,
        ancestor_queues=ancestor_queues(parent) if action.attached else (),
    )
    placement = None if action.place is None else Placement(action.place, now, None, True)
    return _with_place(StartRequest(workflow, record), placement)


def ancestor_queues(parent: RunRecord) -> tuple[str, ...]:
    """Return the queues in which this run or an ancestor holds a slot, for its attached children."""
    own = () if parent.queue is None or parent.queue in parent.ancestor_queues else (parent.queue,)
    return (*parent.ancestor_queues, *own)


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


def _check_tags(given: Tags | None, of_workflow: Tags) -> dict[str, TagValue]:
    """Return the tags of a new run: those of its workflow and of this start, which win."""
    checked = check_tags(given)
    refuse_reserved_tags(checked)
    return check_tags({**of_workflow, **checked}) if checked else dict(of_workflow)


def claimed_at_creation(record: RunRecord, owner: str) -> RunRecord:
    """Return the record of a new run that this worker owns from the start, so that it need not be claimed.

    Only the owner is sent. The store derives status and times, because it knows whether the worker is fenced.
    """
    return replace(record, owner=owner)


def check_same_workflow(request: StartRequest, existing: RunRecord) -> None:
    """Raise `RunConflict` unless the existing run was started as the workflow of the request."""
    started_as = existing.original_workflow or existing.workflow
    if started_as != request.record.workflow:
        raise RunConflict(existing.id, f"another workflow ({started_as!r}, not {request.record.workflow!r})")


def check_same_run(request: StartRequest, existing: RunRecord, codec: Codec) -> None:
    """Raise `RunConflict` unless the existing run has the same workflow and an equal payload as the request."""
    new = request.record
    check_same_workflow(request, existing)
    original_input = existing.input if existing.original_input is None else existing.original_input
    if not _equal_payloads(request.workflow, codec, original_input, new.input):
        raise RunConflict(new.id, "another payload")


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
