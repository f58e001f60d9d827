"""Planted bugs: each breaks one rule that perdure stands on, and the simulator has to find it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

from msgspec.structs import replace

from perdure.client import rewind as rewinding
from perdure.cluster.membership import Membership
from perdure.errors import StoreError
from perdure.execution import coordinator as coordinator_room
from perdure.execution import turn_commit as turns_room
from perdure.execution.claimer import Claimer
from perdure.execution.committer import Committer
from perdure.execution.finalizer import FinalizationPlan
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


def act_before_commit() -> Any:
    """The effects of a turn are carried out when it is submitted, not when it is committed."""
    submit = Committer.submit

    def submit_and_act(self: Committer, write: Any, on_result: Any, *, wait_for_store: bool = True) -> None:
        func = on_result.func if isinstance(on_result, partial) else None
        if isinstance(write, CommitTurn) and getattr(func, "__name__", "") == "_on_commit_result":
            cached, turn, commit, taken = on_result.args
            coordinator: Any = func
            coordinator.__self__._effects.start(cached, turn, write.now, draining=False)
            on_result = partial(on_result.func, cached, replace(turn, effects=()), commit, taken)
        submit(self, write, on_result, wait_for_store=wait_for_store)

    return mock.patch.object(Committer, "submit", submit_and_act)


def skip_the_position_check() -> Any:
    """A turn is taken wherever the history stands by now."""

    def refuse(turn: Any, run: Any, alive: bool) -> Any:
        if run.status.terminal:
            return AlreadyEnded(run.status)
        owned = run.owner == turn.worker or (run.owner is None and not turn.owned)
        return None if alive and owned else Superseded()

    return mock.patch.object(rules, "refuse_turn", refuse)


def skip_the_owner_check() -> Any:
    """A turn is taken from anyone who has the position right."""

    def refuse(turn: Any, run: Any, alive: bool) -> Any:
        if run.status.terminal:
            return AlreadyEnded(run.status)
        return None if turn.base == run.position else Superseded()

    return mock.patch.object(rules, "refuse_turn", refuse)


def overwrite_the_wake_up() -> Any:
    """A commit sets `wake_at` as it likes, whatever mail it has not seen."""
    return mock.patch.object(rules, "wake_after", lambda patch, now, unseen: patch.wake_at)


def drop_mail_on_suspend() -> Any:
    """A run that suspends throws away the mail that it has not received."""
    commit_of = turns_room.build_turn_commit

    def commit_without_mail(resident: Any, turn: Any, *rest: Any) -> Any:
        commit = commit_of(resident, turn, *rest)
        if commit is None or commit.patch is None or commit.patch.status is not RunStatus.SUSPENDED:
            return commit
        mailbox = resident.runner.state.mailbox
        unread = [each.number for queue in mailbox._by_name.values() for each in queue]
        mailbox._by_name.clear()
        return replace(commit, consumed=(*commit.consumed, *unread))

    return mock.patch.object(coordinator_room, "build_turn_commit", commit_without_mail)


def forget_the_generation_check() -> Any:
    """Mail for a generation that is gone is taken for the present one's."""
    apply_message = InputApplier._apply_message

    def take_any(self: Any, message: Message, now: float) -> None:
        location = (message.target or "").partition("/")[2]
        pending = self._entries.pending.get(location)
        if message.kind in ("child", "assignment") and pending is not None:
            message = replace(message, target=pending.target)
        elif message.kind == "deferred":
            message = replace(message, id=f"deferred/{self._state.start.epoch}/{message.name}")
        apply_message(self, message, now)

    return mock.patch.object(InputApplier, "_apply_message", take_any)


@contextlib.contextmanager
def emit_effects_during_replay() -> Iterator[None]:
    """Steps that a replay asks for are executed, on record or not."""
    replay, take_effects = Runner._replay, TurnBuilder._take_effects
    again: dict[int, list[RunStep]] = {}

    def replay_and_note(self: Any, now: float) -> None:
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
        mock.patch.object(Runner, "_replay", replay_and_note),
        mock.patch.object(TurnBuilder, "_take_effects", take_more_effects),
    ):
        yield


def apply_completions_out_of_order() -> Any:
    """A replay applies completions in the order in which they were asked for."""
    arrange = History._arrange

    def arrange_wrongly(self: History) -> None:
        arrange(self)
        self._completions.sort(key=lambda entry: entry.call_seq)

    return mock.patch.object(History, "_arrange", arrange_wrongly)


def take_a_lost_answer_for_a_failure() -> Any:
    """A batch whose answer is lost, or that the store could not take just now, is given up."""

    async def commit_once(self: Any, batch: Sequence[Any]) -> list[Any]:
        try:
            return list(await self._store.commit([write for write, _, _ in batch]))
        except StoreError as error:
            return [error for _ in batch]

    return mock.patch.object(Committer, "_commit", commit_once)


def forget_lost_claims() -> Any:
    """After a claim whose answer was lost nobody looks what has become ours."""

    async def claim(self: Any, claim: Any) -> Any:
        return await self._store.claim(claim)

    return mock.patch.object(Claimer, "_claim", claim)


def never_take_over() -> Any:
    """A worker whose lease has run out is not declared gone."""

    async def fence_if_dead(self: Any, worker: Any, now: float) -> bool:
        return bool(worker.fenced)

    return mock.patch.object(Membership, "_fence_if_dead", fence_if_dead)


def forget_own_turns() -> Any:
    """The store does not recognise a turn that it has taken already, and takes it once more, where it belongs now."""
    commit_turn = memory_turns.commit_turn

    def commit_again(state: Any, turn: Any) -> Any:
        run = state.runs.get(turn.run_id)
        if run is not None and run.turn_at(turn.base + 1) == turn.turn_id and not run.record.status.terminal:
            return commit_turn(state, replace(turn, base=run.position, turn_id=f"{turn.turn_id}/again"))
        return commit_turn(state, turn)

    return mock.patch("perdure.stores.memory.writes.commit_turn", commit_again)


def forget_the_dead_letters() -> Any:
    """Unread events of a run that has ended are ticked off, and none is kept."""
    build = FinalizationPlan.build_finalize_run
    return mock.patch.object(FinalizationPlan, "build_finalize_run", lambda self: replace(build(self), dead_letters=()))


def let_forks_keep_children() -> Any:
    """A fork takes the children of the run that it was made from for its own."""
    return mock.patch.object(rewinding, "_of_another", lambda row: row)


def try_again_without_undoing() -> Any:
    """A run that failed is tried again, and what it had done stays done."""

    def cleanup_of_the_last(run: Any, rolling: Any, *, compensate: bool, run_exit_hooks: bool) -> Any:
        return run_cleanup(run, rolling, compensate=compensate and run_exit_hooks, run_exit_hooks=run_exit_hooks)

    return mock.patch.object(function_end, "run_cleanup", cleanup_of_the_last)


def let_limits_pass() -> Any:
    """Nothing happens when a run has exceeded its timeout or was suspended for too long."""
    return mock.patch.object(limits, "next_limit", return_value=None)


def forget_the_pins() -> Any:
    """What a gate has answered is not written down."""
    return mock.patch.object(VersionGates, "take_pins", return_value=())


def fail_instead_of_holding() -> Any:
    """A step without attempts left fails, also where it is to hold the run."""
    return mock.patch.object(InputApplier, "_hold_on_exhausted", return_value=False)


def stay_in_the_old_version() -> Any:
    """A run continues in the version that it has."""
    successor = ContextApi._successor

    def own(self: Any, workflow: Any) -> Any:
        return self._state.start.definition if workflow is None else successor(self, workflow)

    return mock.patch.object(ContextApi, "_successor", own)


def prune_too_early() -> Any:
    """Finished runs go before their time has come."""
    prune = MemoryRuns.prune
    return mock.patch.object(MemoryRuns, "prune", lambda self, now, limit: prune(self, now + 1.0, limit))


MUTANTS: dict[str, Mutant] = {
    mutant.__name__: mutant
    for mutant in (
        act_before_commit,
        skip_the_position_check,
        skip_the_owner_check,
        overwrite_the_wake_up,
        drop_mail_on_suspend,
        forget_the_generation_check,
        emit_effects_during_replay,
        apply_completions_out_of_order,
        take_a_lost_answer_for_a_failure,
        forget_lost_claims,
        never_take_over,
        forget_own_turns,
        forget_the_dead_letters,
        let_forks_keep_children,
        try_again_without_undoing,
        let_limits_pass,
        forget_the_pins,
        fail_instead_of_holding,
        stay_in_the_old_version,
        prune_too_early,
    )
}

AMONG: dict[str, str] = {
    "try_again_without_undoing": "sim.again",
    "let_limits_pass": "sim.hasty",
    "forget_the_pins": "sim.gated",
    "fail_instead_of_holding": "sim.patient",
    "stay_in_the_old_version": "sim.grown",
    "prune_too_early": "sim.brief",
}
"""Bugs in what a single option does are looked for among runs that have it."""
