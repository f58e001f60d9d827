"""A tiny engine for tests: plays a workflow without I/O, a loop or a clock.

`Play` does what the engine does around a runner, and nothing else: it appends the entries of each turn to `rows` (the
store), executes step bodies by calling them, feeds their outcomes back, and jumps to the next moment at which anything
is due. `crash()` throws the runner away and begins again from the rows, as a restarted process would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from perdure.codec import JSON
from perdure.codec.failures import error_to_record
from perdure.errors import InvalidPayload
from perdure.model.records import Entry, EntryStatus, Hold, Message, RunResult, RunStatus, SigningKey, Wait
from perdure.model.turns import (
    AwaitingResult,
    BroadcastEvent,
    Cancelled,
    CancelStep,
    ExternalEffect,
    Failed,
    Input,
    MessageReceived,
    ObserveRun,
    Outcome,
    RecordRunningSteps,
    RunStep,
    SendEvent,
    StartChild,
    StepDone,
    StopChildren,
    Succeeded,
    Turn,
    TurnExtras,
)
from perdure.runner.runner import Runner, RunStart
from perdure.workflows.context import Context, RunInfo
from perdure.workflows.definition import Workflow, WorkflowOptions

BEGUN_AT = 1_000.0

_notes: list[Any] = []


def note(what: Any) -> None:
    """Called by workflows under test: what user code did, in order. Each `Play` has its own list."""
    _notes.append(what)


def definition(fn: Any, **options: Any) -> Workflow[Any, Any]:
    """A workflow that is in no registry, so that tests may define as many of one name as they like."""
    return fn if isinstance(fn, Workflow) else Workflow(fn, fn.__name__, 1, WorkflowOptions(**options))


class Play:
    """One run and the little world around it."""

    def __init__(
        self,
        fn: Any,
        *args: Any,
        rows: Sequence[Entry] = (),
        now: float = BEGUN_AT,
        seed: int = 7,
        deadline_at: float | None = None,
        strict: bool = False,
        run_id: str = "run-1",
        generation: int = 0,
        epoch: int = 0,
        inbox: Sequence[Message] = (),
        waits: tuple[Wait, ...] = (),
        run_attempt: int = 1,
        **options: Any,
    ) -> None:
        self.definition = definition(fn, **options)
        self.args = args
        self.rows = list(rows)
        self.now = now
        self.seed = seed
        self.deadline_at = deadline_at
        self.strict = strict
        self.facts = RunInfo(
            id=run_id,
            workflow=self.definition.name,
            version=1,
            generation=generation,
            tags={"team": "blue"},
            parent=None,
        )
        self.running: dict[str, RunStep] = {}
        self.effects: dict[str, ExternalEffect] = {}
        self.inbox: dict[int, Message] = {message.number: message for message in inbox}
        self.waiting_for: list[tuple[str, str]] = []  # child runs whose end is awaited, and the target
        self.extras: list[TurnExtras] = []
        self.epoch = epoch
        self.suspended_for = waits
        self.cancelled: list[str] = []
        self.notes: list[Any] = []
        self.message_count = 0
        self.turn = Turn()
        self.runner = Runner(
            RunStart(
                definition=self.definition,
                facts=self.facts,
                input=self.definition.parameters.encode(JSON, args, {}, what="payload"),
                seed=seed,
                first_executed_at=BEGUN_AT,
                history=tuple(self.rows),
                deadline_at=deadline_at,
                strict=strict,
                epoch=epoch,
                waits=waits,
                run_attempt=run_attempt,
                keys=(SigningKey(1, 0.0, b"k" * 32),),
            )
        )

    # --- driving

    def begin(self) -> Play:
        """The first turn, with the messages that are there."""
        self.advance(*(MessageReceived(message) for message in self.inbox.values()))
        return self

    def advance(self, *inputs: Input, now: float | None = None) -> Turn:
        """One turn, committed."""
        global _notes
        self.now = max(self.now, now) if now is not None else self.now
        before, _notes = _notes, self.notes
        try:
            turn = self.runner.advance(self.now, inputs)
        finally:
            _notes = before
        assert turn is not None
        self.turn = turn
        if turn.extras is not None:
            self.extras.append(turn.extras)
            dropped = tuple(f"{path}/" for path in turn.extras.dropped)
            self.rows = (
                [row for row in self.rows if not f"{row.location}/".startswith(dropped)] if dropped else self.rows
            )
        if turn.entries or turn.consumed or turn.extras or not turn.busy:
            self.rows.extend(turn.entries + turn.version_pins)
        if not turn.busy:
            self.suspended_for = turn.waits
        for number in (*turn.consumed, *(turn.extras.released_assignments if turn.extras else ())):
            self.inbox.pop(number, None)
        for effect in turn.effects:
            if isinstance(effect, RunStep):
                self.running[effect.location] = effect
            elif isinstance(effect, ExternalEffect):
                self.effects[effect.location] = effect
            elif isinstance(effect, CancelStep):
                self.running.pop(effect.location, None)
                self.cancelled.append(effect.location)
        if turn.outcome is not None or turn.held is not None:
            self.close()
        return turn

    def outcome_of_body(self, location: str) -> StepDone:
        """Execute the body of a step that is under way, as the executor would, without feeding the outcome back."""
        return execute(self.running[location])

    def complete(self, location: str | None = None, *, now: float | None = None) -> Turn:
        """Execute the body of one step that is under way and advance with what came of it."""
        chosen = location if location is not None else next(iter(self.running))
        done = self.outcome_of_body(chosen)
        del self.running[chosen]
        return self.advance(done, now=now)

    def run(self, choose: Callable[[list[str]], str] | None = None) -> Play:
        """To the end, or until nothing moves any more. `choose` picks what happens next: a step, or the clock."""
        self.begin()
        while self.alive and (choices := self.choices()):
            self.move(choices[0] if choose is None else choose(choices))
        return self

    def choices(self) -> list[str]:
        more = [MORE] if self.turn.more else []
        effects = [f"{EFFECT}{location}" for location in self.effects]
        children = [f"{CHILD}{target}" for _, target in self.waiting_for]
        return [*more, *self.running, *effects, *children, *([CLOCK] if self.turn.wake_at is not None else [])]

    def move(self, choice: str) -> Turn:
        if choice == MORE:
            return self.advance()
        if choice == CLOCK:
            return self.advance(now=self.turn.wake_at)
        if choice.startswith(EFFECT):
            return self.apply_effect(choice.removeprefix(EFFECT), now=self.now + 1)
        if choice.startswith(CHILD):
            return self.child_ends(choice.removeprefix(CHILD), now=self.now + 1)
        return self.complete(choice, now=self.now + 1)

    def cancel(self) -> Turn:
        return self.post("cancel")

    def resume(self) -> Turn:
        return self.post("resume")

    # --- messages and external effects

    def post(self, kind: str, name: str = "", value: Any = None, *, now: float | None = None, **fields: Any) -> Turn:
        """A message arrives."""
        return self.advance(MessageReceived(self.add_message(kind, name, value, **fields)), now=now)

    def add_message(self, kind: str, name: str = "", value: Any = None, **fields: Any) -> Message:
        """Return a new message that is in the inbox and that the run has not seen."""
        self.message_count += 1
        id = fields.get("id", f"m{self.message_count}")
        known: dict[str, Any] = {"id": id, "event_id": id, "number": self.message_count, "sent_at": self.now}
        body = fields.pop("body", None) or JSON.encode(value)
        message = Message(kind=kind, name=name, body=body, **(known | fields))
        self.inbox[message.number] = message
        return message

    def send(self, name: str, value: Any = None, **fields: Any) -> Turn:
        return self.post("event", name, value, **fields)

    def settle_deferred(self, name: str, value: Any = None, *, error: BaseException | None = None) -> Turn:
        ending = RunResult(result=JSON.encode(value))
        if error is not None:
            ending = RunResult(RunStatus.FAILED, error=error_to_record(error, JSON, raises=(type(error),)))
        return self.post("deferred", name, body=msgspec.json.encode(ending), id=f"deferred/{self.epoch}/{name}")

    def apply_effect(
        self, location: str, value: Any = None, *, error: BaseException | None = None, now: float | None = None
    ) -> Turn:
        """Apply an external effect as the engine would. Started children wait in `waiting_for`."""
        effect = self.effects.pop(location)
        work = effect.work
        if error is not None:
            record = error_to_record(error, JSON, raises=(type(error),))
            return self.advance(StepDone(location, effect.attempt, error=record), now=now)
        if isinstance(work, StartChild | ObserveRun) and work.target is not None:
            self.waiting_for.append((work.run_id, work.target))
            return self.advance(AwaitingResult(location, (work.run_id,)), now=now)
        if isinstance(work, BroadcastEvent) and value is None:
            value = 0
        if isinstance(work, SendEvent) and work.run_id == self.facts.id and work.message.kind == "deferred":
            sent = self.deliver_to_itself(work.message)
            return self.advance(StepDone(location, effect.attempt, value=JSON.encode(value)), sent, now=now)
        if isinstance(work, StartChild):
            value = {"id": work.run_id, "created": True}
        if isinstance(work, StopChildren) and self.waiting_for:
            open_runs = tuple({run for run, _ in self.waiting_for})
            self.waiting_for = [(run, work.target) for run in open_runs]
            return self.advance(AwaitingResult(location, open_runs), now=now)
        return self.advance(StepDone(location, effect.attempt, value=JSON.encode(value)), now=now)

    def deliver_to_itself(self, message: Message) -> MessageReceived:
        """Put a message of the run to itself into the inbox: its deferred timed out."""
        self.message_count += 1
        numbered = msgspec.structs.replace(message, number=self.message_count)
        self.inbox[numbered.number] = numbered
        return MessageReceived(numbered)

    def child_ends(
        self,
        target: str,
        value: Any = "done",
        *,
        status: RunStatus = RunStatus.SUCCEEDED,
        error: BaseException | None = None,
        now: float | None = None,
    ) -> Turn:
        """A child that the wait at this target waits for has ended."""
        waited = next(each for each in self.waiting_for if each[1] == target)
        self.waiting_for.remove(waited)
        ending = RunResult(status, JSON.encode(value) if status is RunStatus.SUCCEEDED else None)
        if error is not None:
            ending = RunResult(RunStatus.FAILED, error=error_to_record(error, JSON))
        return self.post("child", waited[0], body=msgspec.json.encode(ending), target=target, now=now)

    def expose(self, *locations: str) -> Turn:
        return self.advance(RecordRunningSteps(locations))

    def replayed_by(self, fn: Any, *args: Any, rows: Sequence[Entry] | None = None, **options: Any) -> Play:
        """The same run, cold, from the rows, by this code."""
        settings: dict[str, Any] = {
            "seed": self.seed,
            "deadline_at": self.deadline_at,
            "now": self.now,
            "epoch": self.epoch,
            "inbox": list(self.inbox.values()),
            "waits": self.suspended_for,
        } | options
        return Play(fn, *(args or self.args), rows=self.rows if rows is None else rows, **settings)

    def crash(self) -> Play:
        """The same run after a crash: cold, with the same code, at the same time; its first turn not yet done."""
        cold = self.replayed_by(self.definition)
        cold.message_count = self.message_count
        cold.waiting_for = list(self.waiting_for)
        self.close()
        return cold

    def close(self) -> list[Any]:
        """Drop the run from memory. What its handlers did meanwhile comes back, and is no part of `notes`."""
        global _notes
        before, _notes = _notes, []
        try:
            self.runner.close()
            return _notes
        finally:
            _notes = before

    # --- looking

    @property
    def alive(self) -> bool:
        return self.turn.outcome is None and self.turn.held is None

    @property
    def outcome(self) -> Outcome:
        assert self.turn.outcome is not None, self.turn
        return self.turn.outcome

    @property
    def value(self) -> Any:
        """What the workflow returned."""
        assert isinstance(self.outcome, Succeeded), self.outcome
        return JSON.decode(self.outcome.value)

    @property
    def failure(self) -> Any:
        """The record of the error that the workflow ended with."""
        assert isinstance(self.outcome, Failed), self.outcome
        return self.outcome.error

    @property
    def was_cancelled(self) -> bool:
        return isinstance(self.outcome, Cancelled)

    @property
    def held(self) -> Hold:
        assert self.turn.held is not None, self.turn
        return self.turn.held

    @property
    def entries(self) -> dict[str, Entry]:
        """The latest row of each location."""
        return {row.location: row for row in self.rows}

    @property
    def attempts(self) -> dict[str, int]:
        """The steps that are under way, with their attempts."""
        return {location: step.attempt for location, step in self.running.items()}

    @property
    def waits(self) -> list[tuple[str, float | None]]:
        return [(wait.location or "", wait.until) for wait in self.turn.waits]

    def state(self) -> dict[str, Any]:
        """Everything by which the outside can tell where a run stands."""
        return {
            "notes": list(self.notes),
            "attempts": dict(sorted(self.attempts.items())),
            "busy": self.turn.busy,
            "waits": sorted(self.turn.waits, key=_by_location),
            "wake_at": self.turn.wake_at,
            "outcome": _plain(self.turn.outcome),
            "held": self.turn.held,
            "now": self.runner.state.loop.now,
        }


CLOCK, MORE, EFFECT, CHILD = "(the clock)", "(more)", "(effect) ", "(child) "


def _plain(outcome: Outcome | None) -> Any:
    """An outcome without its traceback, which names lines of whatever drove the run."""
    return (outcome.error.type, outcome.error.message) if isinstance(outcome, Failed) else outcome


def _by_location(wait: Wait) -> tuple[str, str]:
    return (wait.location or "", wait.kind)


def execute(step: RunStep) -> StepDone:
    """Run a body to its end; it must not wait for anything."""
    kind = step.call.step
    try:
        value = kind.fn(*step.call.args, **step.call.kwargs)
        if kind.body.is_async:
            value = _run_coroutine(value)
        return StepDone(step.location, step.attempt, value=JSON.encode(value, kind.body.returns, what="result"))
    except InvalidPayload as refused:
        return StepDone(step.location, step.attempt, error=error_to_record(refused, JSON, location=step.location))
    except Exception as error:
        retry = kind.settings.retry
        return StepDone(
            step.location,
            step.attempt,
            error=error_to_record(error, JSON, raises=kind.settings.raises, location=step.location),
            retryable=retry is not None and retry.should_retry(error),
        )


def _run_coroutine(coro: Any) -> Any:
    try:
        coro.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the body of a step under test must not wait")


def step_row(location: str, value: Any = None, *, ordinal: int, seq: int | None, **fields: Any) -> Entry:
    """A literal row of a step: settled if it has a `seq`, else pending."""
    settled: dict[str, Any] = {"value": JSON.encode(value), "settled_at": BEGUN_AT + seq} if seq is not None else {}
    known: dict[str, Any] = {
        "location": location,
        "kind": "step",
        "name": location.rpartition("/")[2].partition("#")[0].partition("[")[0],
        "status": EntryStatus.SUCCEEDED if seq is not None else EntryStatus.PENDING,
        "call_seq": ordinal + 1,
        "ordinal": ordinal,
        "seq": seq,
        "attempts": 1,
        "started_at": BEGUN_AT,
    }
    return Entry(**(known | settled | fields))


__all__ = [
    "BEGUN_AT",
    "CLOCK",
    "Context",
    "Entry",
    "EntryStatus",
    "Hold",
    "Play",
    "StepDone",
    "definition",
    "execute",
    "note",
    "step_row",
]
