"""Split a batch into parts whose rows can be written together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from perdure.stores import semantics as rules
from perdure.stores.queue_rules import QueueWrite
from perdure.stores.writes import (
    AppendStream,
    CommitTurn,
    CreateRun,
    DeliverMessage,
    EndRun,
    FanOut,
    FinalizeRun,
    LeaveQueue,
    ObserveRunEnd,
    PublishEvent,
    ReplayDeadLetter,
    Requeue,
    RewindRun,
    SupersedeStream,
    TagRun,
    Write,
)

Part = list[tuple[rules.Key, Write]]
"""Writes to different runs, or several messages to one run, each with the key of its run or topic."""


RunWrite = (
    DeliverMessage
    | EndRun
    | ObserveRunEnd
    | FinalizeRun
    | RewindRun
    | AppendStream
    | SupersedeStream
    | TagRun
    | Requeue
    | LeaveQueue
)
"""A write that changes a run which must exist, except for a turn."""


def split_batch(batch: Sequence[Write]) -> Iterator[Part]:
    """Split the batch so that a run occurs once per part, except for messages, and a write that may change other runs
    is a part of its own."""
    part: Part = []
    seen: dict[rules.Key, bool] = {}  # whether more messages to the run may follow in this part
    key: rules.Key
    for write in batch:
        if type(write) is CommitTurn and write.extras is None:  # the common case, without function calls
            key, alone, is_message = write.run_id, False, False
        else:
            key, alone = rules.run_of(write), is_alone(write)
            is_message = isinstance(write, DeliverMessage) and rules.is_unbounded(write)
        if part and (alone or (key in seen and not (is_message and seen[key]))):
            yield part
            part, seen = [], {}
        part.append((key, write))
        seen[key] = is_message
        if alone:
            yield part
            part, seen = [], {}
    yield part


def is_alone(write: Write) -> bool:
    """Return whether the write may change other runs than its own, or needs rows that were flushed before."""
    if isinstance(write, CommitTurn):
        extras = write.extras
        return extras is not None and bool(extras.subscribe or extras.unsubscribe or extras.released_assignments)
    if isinstance(write, CreateRun):
        return has_more_rows(write) or (write.place is not None and write.place.dedupe is not None)
    if isinstance(write, FinalizeRun):
        return not rules.only_marks_notified(write)
    return isinstance(write, _ALONE)


def has_more_rows(write: CreateRun) -> bool:
    """Return whether a new run has a history or an inbox, or replaces another run."""
    return bool(write.entries or write.inbox or write.received) or write.replaces is not None


_ALONE = (PublishEvent, FanOut, RewindRun, ReplayDeadLetter, *get_args(QueueWrite))


def closes_receives(turn: CommitTurn) -> bool:
    """Return whether the turn ends or restarts the run, which closes all its open receives."""
    return turn.continue_as is not None or (turn.patch is not None and turn.patch.status.terminal)
