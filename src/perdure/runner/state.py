"""RunnerState: what the collaborators of one runner share.

References point one way only: collaborators refer to the state, the state refers to none of them. An evicted run is
therefore freed by reference counting, and the garbage collector has nothing to trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context as VariableContext
from typing import Any

from msgspec import Struct

from perdure.codec import JSON, Codec
from perdure.model.records import Entry, Message, SigningKey, Wait
from perdure.model.turns import Continued, Input, Outcome
from perdure.runner.entry_tracker import EntryTracker
from perdure.runner.event_loop import WorkflowLoop
from perdure.runner.function_names import RegisteredFunctions
from perdure.runner.history import History
from perdure.runner.mailbox import Mailbox
from perdure.runner.pending import PendingEntry
from perdure.runner.scopes import Scope
from perdure.runner.tasks import WorkflowTask
from perdure.runner.turn_extras import TurnExtrasBuilder
from perdure.runner.versioning import VersionGates
from perdure.workflows.context import Context, RunInfo
from perdure.workflows.definition import REGISTRY, Workflow, WorkflowLookup


class RunStart(Struct, frozen=True):
    """Everything that a run is replayed from."""

    definition: Workflow[Any, Any]
    facts: RunInfo
    input: bytes
    seed: int
    first_executed_at: float
    history: Sequence[Entry] = ()
    deadline_at: float | None = None
    codec: Codec = JSON
    strict: bool = False
    under_way: frozenset[str] = frozenset()  # locations of steps that this process executes since before a reload
    run_attempt: int = 1
    epoch: int = 0
    keys: tuple[SigningKey, ...] = ()
    arranged: History | None = None  # the history, if it was arranged before
    should_pause: Callable[[], bool] | None = None  # whether a turn that is being computed must be paused now
    waits: tuple[Wait, ...] = ()  # of the last suspension: other runs are observed already and need no second request
    workflows: WorkflowLookup = REGISTRY  # those that the worker can execute


class RunnerState:
    """Entry tracker, mailbox, loop, history and flags of one run in memory.

    `main` is the task of the workflow function, None before the first turn. `exit` is a `SystemExit` that user code
    raised, `continued` what `continue_as` was called with, `stop_reason` why the function was cancelled, and
    `cancel_reason` the text that a caller gave with its cancel. `inputs` are those of the present turn. `pause` is a
    request to hold the run, which is consumed by the turn that does so: when no step or external effect is running.
    `function_outcome` is set when the function has ended; the run itself ends after its cleanup. `cancelling_tasks` is
    set while the remaining tasks of an ended function run their handlers. `rerun_pending` is a
    step of the recorded history that runs again after a rewind: the replay waits for it. `immediate_count` counts the
    immediate results of the present turn.
    """

    __slots__ = (
        "cancel_reason",
        "cancelling_tasks",
        "context",
        "continued",
        "entries",
        "exit",
        "extras",
        "function_outcome",
        "history",
        "immediate_count",
        "info",
        "inputs",
        "limited",
        "loop",
        "mailbox",
        "main",
        "pause",
        "replaying",
        "rerun_pending",
        "start",
        "stop_reason",
        "variables",
        "versions",
    )

    def __init__(self, start: RunStart) -> None:
        self.start = start
        self.info = info = start.facts
        self.history = history = History(start.history) if start.arranged is None else start.arranged
        self.loop = WorkflowLoop(start.seed, _first_time(start, history), Scope("", history.scope("")))
        self.loop.should_pause = start.should_pause
        self.extras = TurnExtrasBuilder()
        strict = start.strict or start.definition.settings.strict
        functions = RegisteredFunctions(start.definition, start.workflows)
        self.entries = EntryTracker(
            info, history, self.loop, start.codec, self.extras, functions, strict=strict, epoch=start.epoch
        )
        self.entries.add_observed_runs(start.waits)
        self.variables = VariableContext()  # empty: user code sees no context variables of the worker
        self.mailbox = Mailbox(info, start.codec, self.extras, self.variables)
        self.versions = VersionGates(self.entries, history, self.loop, info.generation)
        self.context: Context | None = None
        self.main: WorkflowTask | None = None
        self.replaying = len(start.history) > 0
        self.limited = start.deadline_at is not None or start.definition.settings.max_suspend is not None
        self.continued: Continued | None = None
        self.exit: SystemExit | None = None
        self.stop_reason: str | None = None
        self.cancel_reason: str | None = None
        self.inputs: Sequence[Input] = ()
        self.pause: Message | None = None
        self.function_outcome: Outcome | None = None
        self.cancelling_tasks = False
        self.rerun_pending: PendingEntry | None = None
        self.immediate_count = 0

    @property
    def may_have_children(self) -> bool:
        """Whether the run may have attached children; earlier generations may have left some."""
        return self.start.epoch > 0 or self.entries.children.may_exist


def _first_time(start: RunStart, history: History) -> float:
    """Return the time at which the workflow function starts, the same on every replay."""
    first = start.first_executed_at if history.first_executed_at is None else history.first_executed_at
    return max(first, history.rewound.get(0, 0.0))
