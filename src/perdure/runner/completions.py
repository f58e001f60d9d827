"""CompletionApplier: apply completions one at a time, live and on replay alike.

A completion resumes the task that awaits it; then the loop is drained, so that user code runs until every task waits
again. A task therefore sees the same state at the same point however often it is replayed. A completion and its whole
drain belong to one turn and are committed together.

Immediate results (a receive whose event is present, a published value, a loop's next iteration) are completions of
their own, after the drain that requested them (ADR 6). Completing them inside the call would let tasks run in another
order than on replay.
"""

from __future__ import annotations

import msgspec

from perdure.codec import Codec
from perdure.codec.failures import error_to_record_lossy
from perdure.errors import InvalidPayload
from perdure.model.records import Entry, EntryStatus, ErrorRecord, Hold, Message, RunResult, StreamItem
from perdure.model.turns import Input, MessageReceived
from perdure.runner.event_loop import MAX_CALLBACKS
from perdure.runner.function_end import FunctionEnd
from perdure.runner.pending import PendingEntry
from perdure.runner.state import RunnerState
from perdure.workflows.commands import Command

MAX_IMMEDIATE_PER_TURN = 1_000  # further immediate results get a turn of their own, which bounds the size of a commit
SUCCEEDED = EntryStatus.SUCCEEDED


class CompletionApplier:
    """See the module's docstring."""

    __slots__ = ("_entries", "_function_end", "_loop", "_mailbox", "_state")

    def __init__(self, state: RunnerState, function_end: FunctionEnd) -> None:
        self._state = state
        self._function_end = function_end
        self._entries = state.entries
        self._loop = state.loop
        self._mailbox = state.mailbox

    def complete(
        self, pending: PendingEntry, now: float, value: bytes | None = None, error: ErrorRecord | None = None
    ) -> None:
        """Complete a requested entry with a value or an error, and run user code until it waits again."""
        if pending.command is not None and error is None:
            self._publish(pending, pending.command, now)
        if pending.seq is not None:  # a rerun step: the replay continues after it
            self._state.rerun_pending = None
        self._loop.callbacks = 0
        self._entries.complete(pending, now, value, error)
        self.drain()

    def apply(self, entry: Entry) -> None:
        """Apply a recorded completion, and run user code until it waits again."""
        self._loop.callbacks = 0
        if not self._entries.apply(entry):
            self._apply_unrequested(entry)
        self.drain()

    def _apply_unrequested(self, entry: Entry) -> None:
        """Apply a completion that no pending request awaits: a timer, a cancel, or an entry that `removed` skips."""
        entries, location = self._entries, entry.location
        if location in self._state.versions.removed:
            return
        if entry.kind == "timer":
            entries.timers.remove(location)
            if not self._loop.fire(location):
                entries.diverge(location, "a timer that fired", "no such timer", self._loop.waiting_line())
        elif entry.kind == "cancel":
            self._cancel_main(entry)
        else:
            entries.diverge(location, f"{entry.kind} {entry.name!r}", "nothing", self._loop.waiting_line())

    def _cancel_main(self, entry: Entry) -> None:
        state = self._state
        assert state.main is not None
        state.stop_reason = entry.name
        if entry.value is not None:
            state.cancel_reason = str(state.start.codec.decode(entry.value))
        state.main.cancel(state.cancel_reason)

    def apply_external(self, location: str, kind: str, name: str, now: float, value: bytes | None = None) -> None:
        """Record and apply something that no call requested: a fired timer, a cancel."""
        self.apply(self._entries.log.record_external(location, kind, name, now, value))

    def drain(self) -> None:
        """Run user code until every task waits; when the workflow function has ended, run its cleanup likewise.

        If `loop.paused` is set on return, the next call continues.
        """
        state, loop = self._state, self._loop
        if not state.cancelling_tasks:
            try:
                if not loop.drain():
                    return
            except SystemExit as exit:
                state.exit = exit
                loop.halted = True
            if loop.spinning and not loop.stopped and self._stop_spinning():
                return
            if not loop.stopped or state.function_outcome is not None or not self._function_end.cancel_tasks():
                return
        if self._function_end.start_cleanup():
            self.drain()  # once: the outcome of the function is set now

    def _stop_spinning(self) -> bool:
        """Stop a workflow that spins. True if the next completion is a cancel, which stops it.

        A function that spins after it was cancelled is ended; one that was not cancelled holds the run.
        """
        state, loop = self._state, self._loop
        if state.stop_reason is not None:
            loop.halted = True
            return False
        following = state.history.next_completion
        if following.kind == "cancel" if following is not None else any(map(_is_cancel, state.inputs)):
            return True
        reason = f"the workflow ran {MAX_CALLBACKS:,} callbacks without waiting for anything durable"
        self._entries.hold(Hold("livelock", reason, line=loop.waiting_line()))
        return False

    def _publish(self, pending: PendingEntry, command: Command, now: float) -> None:
        published = command.publishes
        if published is not None:
            if isinstance(published, StreamItem):
                published = msgspec.structs.replace(published, location=pending.location, at=now)
            self._state.extras.publish(published)
        if command.tags is not None:
            self._state.extras.tag(command.tags)

    # --- immediate results

    def complete_immediate(self, now: float) -> None:
        """Complete every request whose result is known already, one at a time: known values first, then messages.

        If `loop.paused` is set on return, the next call continues.
        """
        state, entries, loop = self._state, self._entries, self._loop
        while not loop.stopped and state.immediate_count < MAX_IMMEDIATE_PER_TURN and not loop.paused:
            known = entries.take_immediate()
            if known is not None:
                state.immediate_count += 1
                self._complete_known(*known, now)
            elif not self._complete_from_mailbox(now):
                return
            loop.pause_if_due()

    def _complete_known(self, pending: PendingEntry, value: bytes | None, now: float) -> None:
        command = pending.command
        if value is None and command is not None and command.deferred is not None:
            before = self._entries.deferreds[command.deferred]
            self._complete_deferred(pending, before.value, before.error, now)
        else:
            self.complete(pending, now, value)

    def _complete_from_mailbox(self, now: float) -> bool:
        """Complete the open receive that the earliest message is for. False if no message is awaited."""
        entries, mailbox = self._entries, self._mailbox
        receiver = mailbox.next_receiver(entries.waiting)
        if receiver is None:
            return False
        messages = mailbox.take_for(receiver, now)
        self._state.immediate_count += 1
        if messages:  # otherwise the message was expired, invalid or rejected: the next may be for another receive
            self._complete_receive(receiver, messages, now)
        return True

    def _complete_receive(self, pending: PendingEntry, messages: list[Message], now: float) -> None:
        """Complete an open receive with messages, which are consumed by the same commit."""
        codec, command = self._state.start.codec, pending.command
        assert command is not None
        self._mailbox.consume(messages)
        pending.detail = msgspec.json.encode(messages)
        if command.deferred is not None:
            result = msgspec.json.decode(messages[0].body or b"{}", type=RunResult)
            self._complete_deferred(pending, result.result, result.error, now)
        elif command.wants is not None and command.wants.empty_on_timeout:
            self.complete(pending, now, _encode_batch(codec, messages))
        else:
            self.complete(pending, now, messages[0].body)

    def _complete_deferred(
        self, pending: PendingEntry, value: bytes | None, error: ErrorRecord | None, now: float
    ) -> None:
        """Complete a deferred; fail it if the value does not match the type that this call expects."""
        command = pending.command
        assert command is not None
        if value is not None and command.read is not None:
            try:
                command.read(pending.to_entry(SUCCEEDED, value=value))
                error = None
            except InvalidPayload as mismatch:
                error = error_to_record_lossy(mismatch, self._state.start.codec)
        self.complete(pending, now, value, error)

    def time_out(self, pending: PendingEntry, now: float) -> None:
        """Complete a sleep, or a receive whose timeout has expired."""
        wants = pending.command.wants if pending.command is not None else None
        if wants is None:
            self.complete(pending, now)
        elif wants.empty_on_timeout:
            self.complete(pending, now, self._state.start.codec.encode([]))
        else:
            error = ErrorRecord("TimeoutError", "no event came in time", qualified="builtins:TimeoutError")
            self.complete(pending, now, None, error)


def _encode_batch(codec: Codec, messages: list[Message]) -> bytes | None:
    """Return the values of a batch for people to read, or None if together they exceed a limit of one value.

    The workflow gets them from the messages in the entry's detail.
    """
    try:
        return codec.encode([codec.decode(message.body or b"null") for message in messages])
    except InvalidPayload:
        return None


def _is_cancel(given: Input) -> bool:
    return isinstance(given, MessageReceived) and given.message.kind == "cancel"
