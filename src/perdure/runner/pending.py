"""What a run has asked for and not yet got: the futures its tasks wait on, and which of them are steps under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from perdure.records import Entry
from perdure.runner.loop import WorkflowFuture

if TYPE_CHECKING:
    from perdure.runner.loop import WorkflowLoop
    from perdure.steps import StepCall


class Cancels(Protocol):
    """Who is told when a task gives up what it asked for."""

    def ask_cancelled(self, location: str) -> None: ...


class EntryFuture(WorkflowFuture):
    """The future of an entry. Being cancelled is noticed here and not by a done-callback, which would come too late."""

    def __init__(self, loop: WorkflowLoop, number: int, location: str, run: Cancels) -> None:
        self.location = location
        self._run = run
        super().__init__(loop, number)

    def cancel(self, msg: Any = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self._run.ask_cancelled(self.location)
        return cancelled


class Pending:
    """One thing asked for: its entry as it stands, the future, and for a step the call and the attempt that is next.

    A step is `waiting` until a turn hands it out, then `under_way`; between two attempts it is neither.
    """

    __slots__ = ("attempt", "call", "entry", "future", "under_way", "waiting")

    def __init__(self, entry: Entry, future: EntryFuture, call: StepCall | None) -> None:
        self.entry = entry
        self.future = future
        self.call = call
        self.attempt = 1
        self.waiting = False
        self.under_way = False


class Forever:
    """An awaitable that never ends: given to handlers that go on asking while their run is being closed."""

    def __await__(self) -> Any:
        while True:
            yield
