"""Mutations: each plants a bug that breaks one guarantee of perdure, and the simulator must detect it.

`mock.patch.object` raises AttributeError if a patched name no longer exists, so that no mutation can lose its effect by
a rename.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

from msgspec.structs import replace

from perdure.client import rewind
from perdure.cluster.membership import Membership
from perdure.errors import StoreError
from perdure.execution import coordinator, turn_commit
from perdure.execution.claimer import Claimer
from perdure.execution.committer import Committer
from perdure.execution.finalizer import FinalizationPlan
from perdure.execution.stray_runs import StrayRunFinder
from perdure.model.records import Message, RunStatus
from perdure.model.turns import RunStep
from perdure.runner import function_end, limits
from perdure.runner.cleanup import run_cleanup
from perdure.runner.context_api import ContextApi
from perdure.runner.history import History
from perdure.runner.inputs import InputApplier
from perdure.runner.runner import Runner
from perdure.runner.turn_builder import TurnBuilder
from perdure.runner.versioning import VersionGates
from perdure.stores import semantics as rules
from perdure.stores.memory import turns as memory_turns
from perdure.stores.memory.runs import MemoryRuns
from perdure.stores.results import AlreadyEnded, Superseded
from perdure.stores.writes import CommitTurn

Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def start_effects_before_commit() -> Any:
    """Start the effects of a turn when it is submitted, not when it is committed."""
    submit = Committer.submit

    def submit_after_effects(self: Committer, write: Any, on_result: Any, **options: bool) -> None:
        func = on_result.func if isinstance(on_result, partial) else None
        if isinstance(write, CommitTurn) and getattr(func, "__name__", "") == "_on_commit_result":
            cached, turn, commit, taken = on_result.args
            coordinator: Any = func
            coordinator.__self__._effects.start(cached, turn, write.now, draining=False)
            on_result = partial(on_result.func, cached, replace(turn, effects=()), commit, taken)
        submit(self, write, on_result, **options)

    return mock.patch.object(Committer, "submit", submit_after_effects)


def skip_the_position_check() -> Any:
    """Commit a turn at any position of the history."""

    def refuse(turn: Any, run: Any, alive: bool) -> Any:
        if run.status.terminal:
            return AlreadyEnded(run.status)
        owned = run.owner == turn.worker or (run.owner is None and not turn.owned)
        return None if alive and owned else Superseded()

    return mock.patch.object(rules, "refuse_turn", refuse)


def skip_the_owner_check() -> Any:
    """Commit a turn of any worker, if its position is correct."""

    def refuse(turn: Any, run: Any, alive: bool) -> Any:
        if run.status.terminal:
            return AlreadyEnded(run.status)
        return None if turn.base == run.position else Superseded()

    return mock.patch.object(rules, "refuse_turn", refuse)


def overwrite_wake_at() -> Any:
    """Set `wake_at` as the commit requests, although the run has unread messages."""
    return mock.patch.object(rules, "wake_after", lambda patch, now, unseen: patch.wake_at)


def drop_messages_on_suspend() -> Any:
    """Drop the unread messages of a run that suspends."""
    build_turn_commit = turn_commit.build_turn_commit

    def build_without_messages(cached: Any, turn: Any, *rest: Any) -> Any:
        commit = build_turn_commit(cached, turn, *rest)
        if commit is None or commit.patch is None or commit.patch.status is not RunStatus.SUSPENDED:
            return commit
        mailbox = cached.runner.state.mailbox
        unread = [each.number for queue in mailbox._by_name.values() for each in queue]
        mailbox._by_name.clear()
        return replace(commit, consumed=(*commit.consumed, *unread))

    return mock.patch.object(coordinator, "build_turn_commit", build_without_messages)


def skip_the_generation_check() -> Any:
    """Apply messages of an earlier generation to the current one."""
    apply_message = InputApplier._apply_message

    def apply_any(self: Any, message: Message, now: float) -> None:
        location = (message.target or "").partition("/")[2]
        pending = self._entries.pending.get(location)
        if message.kind in ("child", "assignment") and pending is not None:
            message = replace(message, target=pending.target)
        elif message.kind == "deferred":
            message = replace(message, id=f"deferred/{self._state.start.epoch}/{message.name}")
        apply_message(self, message, now)

    return mock.patch.object(InputApplier, "_apply_message", apply_any)


@contextlib.contextmanager
def emit_effects_during_replay() -> Iterator[None]:
    """Execute the steps that a replay requests, although they are recorded."""
    replay, take_effects = Runner._replay, TurnBuilder._take_effects
    again: dict[int, list[RunStep]] = {}

    def replay_and_collect(self: Any, now: float) -> None:
        state = self.state
        requested = list(state.entries.attempts.to_start.values())
        replay(self, now)
        again[id(state)] = [
            RunStep(
                each.location, each.attempt, each.name, each.call, f"{state.info.id}/{each.generation}/{each.location}"
            )
            for each in requested
            if each.location not in state.entries.pending
        ]

    def take_more_effects(self: Any) -> Any:
        return (*again.pop(id(self._state), ()), *take_effects(self))

    with (
        mock.patch.object(Runner, "_replay", replay_and_collect),
        mock.patch.object(TurnBuilder, "_take_effects", take_more_effects),
    ):
        yield


def apply_completions_out_of_order() -> Any:
    """Let a replay apply completions in the order of their requests."""
    arrange = History._arrange

    def arrange_wrongly(self: History) -> None:
        arrange(self)
        self._completions.sort(key=lambda entry: entry.call_seq)

    return mock.patch.object(History, "_arrange", arrange_wrongly)


def treat_lost_result_as_failure() -> Any:
    """Do not retry a batch after a retryable error or a lost result."""

    async def commit_once(self: Any, batch: Sequence[Any]) -> list[Any]:
        try:
            return list(zip(batch, await self._store.commit([write for write, _, _ in batch]), strict=True))
        except StoreError as error:
            return [(queued, error) for queued in batch]

    return mock.patch.object(Committer, "_commit", commit_once)


@contextlib.contextmanager
def ignore_lost_claims() -> Iterator[None]:
    """Do not look up the claimed runs after the result of a claim was lost, neither at once nor later."""

    async def find_none(self: Any, now: float) -> None:
        return None

    with (
        mock.patch.object(Claimer, "_on_claim_lost"),
        mock.patch.object(StrayRunFinder, "tick", find_none),
    ):
        yield


def never_fence_expired_workers() -> Any:
    """Do not fence a worker whose lease has expired."""

    async def fence_if_dead(self: Any, worker: Any, now: float) -> bool:
        return bool(worker.fenced)

    return mock.patch.object(Membership, "_fence_if_dead", fence_if_dead)


def commit_repeated_turns_again() -> Any:
    """Let the store commit a repeated turn again, at the current position."""
    commit_turn = memory_turns.commit_turn

    def commit_again(state: Any, turn: Any) -> Any:
        run = state.runs.get(turn.run_id)
        if run is not None and run.turn_at(turn.base + 1) == turn.turn_id and not run.record.status.terminal:
            return commit_turn(state, replace(turn, base=run.position, turn_id=f"{turn.turn_id}/again"))
        return commit_turn(state, turn)

    return mock.patch("perdure.stores.memory.writes.commit_turn", commit_again)


def drop_dead_letters() -> Any:
    """Unread events of a run that has ended are ticked off, and none is kept."""
    build = FinalizationPlan.build_finalize_run
    return mock.patch.object(FinalizationPlan, "build_finalize_run", lambda self: replace(build(self), dead_letters=()))


def attach_children_to_forks() -> Any:
    """Attach the children of the original run to a fork."""
    return mock.patch.object(rewind, "as_detached_child", lambda row: row)


def retry_without_compensation() -> Any:
    """Retry a failed run without compensating its steps."""

    def compensate_last_attempt_only(run: Any, rolling: Any, *, compensate: bool, run_exit_hooks: bool) -> Any:
        return run_cleanup(run, rolling, compensate=compensate and run_exit_hooks, run_exit_hooks=run_exit_hooks)

    return mock.patch.object(function_end, "run_cleanup", compensate_last_attempt_only)


def ignore_limits() -> Any:
    """Ignore the timeout and the longest suspension of a run."""
    return mock.patch.object(limits, "next_limit", return_value=None)


def drop_version_pins() -> Any:
    """Do not record the version that a gate returned."""
    return mock.patch.object(VersionGates, "take_pins", return_value=())


def fail_instead_of_hold() -> Any:
    """Let an exhausted step fail, although its workflow holds the run on failure."""
    return mock.patch.object(InputApplier, "_hold_on_exhausted", return_value=False)


def continue_in_the_old_version() -> Any:
    """Continue a run as new in its current version."""
    successor = ContextApi._successor

    def own(self: Any, workflow: Any) -> Any:
        return self._state.start.definition if workflow is None else successor(self, workflow)

    return mock.patch.object(ContextApi, "_successor", own)


def prune_before_retention() -> Any:
    """Prune ended runs before their retention has passed."""
    prune = MemoryRuns.prune
    return mock.patch.object(MemoryRuns, "prune", lambda self, now, limit: prune(self, now + 1.0, limit))


MUTANTS: dict[str, Mutant] = {
    mutant.__name__: mutant
    for mutant in (
        start_effects_before_commit,
        skip_the_position_check,
        skip_the_owner_check,
        overwrite_wake_at,
        drop_messages_on_suspend,
        skip_the_generation_check,
        emit_effects_during_replay,
        apply_completions_out_of_order,
        treat_lost_result_as_failure,
        ignore_lost_claims,
        never_fence_expired_workers,
        commit_repeated_turns_again,
        drop_dead_letters,
        attach_children_to_forks,
        retry_without_compensation,
        ignore_limits,
        drop_version_pins,
        fail_instead_of_hold,
        continue_in_the_old_version,
        prune_before_retention,
    )
}

FLOW_OF_MUTANT: dict[str, str] = {
    "retry_without_compensation": "sim.again",
    "ignore_limits": "sim.hasty",
    "drop_version_pins": "sim.gated",
    "fail_instead_of_hold": "sim.holding",
    "continue_in_the_old_version": "sim.grown",
    "prune_before_retention": "sim.brief",
}
"""The workflow that detects a mutation of a single workflow option."""

PAUSES_OF_MUTANT: dict[str, int] = {"skip_the_owner_check": 6}
"""How many pauses a seed has that detects a mutation of what happens after a pause."""

TREES_OF_MUTANT: dict[str, list[Any]] = {
    "attach_children_to_forks": [["seq", 0, [["started", 0, [["seq", 0, [["ok", 1, []]]]]], ["receive", 0, []]]]],
}
"""What all runs execute in a seed that detects a mutation: a child, and a wait at which a client may fork the run."""
