"""From what is stored to a run in memory. Pure: what its runner is made of, and what is known of who executed it."""

from __future__ import annotations

from typing import Any

from perdure.codec import Codec
from perdure.codec.failures import error_to_record
from perdure.errors import InvalidPayload, StoreError
from perdure.execution.run_cache import CachedRun
from perdure.model.records import SigningKey
from perdure.model.turns import Input, MessageReceived, StepDone
from perdure.runner.runner import Runner, RunStart
from perdure.stores.results import Snapshot
from perdure.workflows.context import RunInfo
from perdure.workflows.definition import Workflow


def build_run_start(
    snapshot: Snapshot,
    definition: Workflow[Any, Any],
    codec: Codec,
    keys: tuple[SigningKey, ...],
    *,
    strict: bool = False,
    under_way: frozenset[str] = frozenset(),
) -> RunStart:
    """Everything that the run is replayed from. `under_way`: what is being done for it in this process, from before."""
    record = snapshot.record
    return RunStart(
        definition=definition,
        facts=RunInfo(
            id=record.id,
            workflow=record.workflow,
            version=record.version,
            generation=record.generation,
            tags=record.tags,
            parent=record.parent,
        ),
        input=record.input,
        seed=record.seed,
        first_executed_at=record.first_executed_at if record.first_executed_at is not None else record.created_at,
        history=snapshot.entries,
        deadline_at=record.deadline_at,
        codec=codec,
        strict=strict,
        under_way=under_way,
        run_attempt=record.run_attempt,
        epoch=record.epoch,
        keys=keys,
        waits=record.waits,
    )


def build_cached_run(snapshot: Snapshot, start: RunStart) -> CachedRun:
    """The run in memory, as its history has it."""
    return CachedRun(snapshot.record, start.definition, Runner(start), snapshot.position)


def is_first_execution(snapshot: Snapshot, claimed_at: float) -> bool:
    """Whether nobody has executed this generation before the claim: that sets `first_executed_at` then.

    Another may have begun it in the same instant, and died: then a recovery is counted, or there is a trace of a step.
    """
    record = snapshot.record
    begun_now = record.first_executed_at == claimed_at and record.recoveries == 0
    return begun_now and not any(entry.kind == "step" for entry in snapshot.entries)


def feed_inputs_singly(resident: CachedRun, inputs: list[Input]) -> None:
    """Let a revived run take the inputs of a turn that could not be stored, each in a turn of its own."""
    resident.seen = max((given.message.number for given in inputs if isinstance(given, MessageReceived)), default=0)
    resident.inputs = inputs
    resident.single_input_mode = True


def as_failure(given: Input, error: StoreError, codec: Codec) -> Input:
    """What is to happen instead of an input that leads to what the store cannot take: the step fails."""
    if isinstance(given, StepDone) and given.value is not None:
        refused = InvalidPayload(f"result of step {given.location}: the store cannot take it: {error}")
        return StepDone(given.location, given.attempt, error=error_to_record(refused, codec, location=given.location))
    return given
