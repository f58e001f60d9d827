"""Compute the history that a rewind or a fork keeps, and the write that stores it. Pure: it writes nothing itself.

The cut drops every entry that was requested at or after the location, by call order and never by name. The kept part is
a history that the same code has had before, so it replays. Four effects of the dropped part on the kept one are
reverted:

- a loop that has continued since is open again, at its last committed iteration that is kept;
- an entry that the workflow cancelled since (losers of a race, all that was open when the run ended) is open again;
- a step that a rollback has compensated since is executed again, and recorded compensations are due again;
- messages that were received since are unread again, and children that were started since are stopped.

The workflow's clock continues from now. An entry of kind "rewind" records after which completion it does, so that a
replay gives the next requests the time of the rewind.

A fork makes the same cut the history of a new run. The old run and its children do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import InvalidArgument
from perdure.model.queue_records import Place
from perdure.model.records import Entry, EntryStatus, Message, RunRecord
from perdure.stores.results import Snapshot
from perdure.stores.writes import CreateRun, RewindRun
from perdure.workflows.run_tags import tags_at_start

PENDING, CANCELLED = EntryStatus.PENDING, EntryStatus.CANCELLED
SUCCEEDED, FAILED = EntryStatus.SUCCEEDED, EntryStatus.FAILED
RECEIVING_KINDS = (
    "receive",
    "receive_batch",
    "receive_request",
    "deferred",
)  # kinds whose detail is what they have consumed
CHILDREN = ("child", "start_child")
CHILD_REQUESTS = ("stop", "watch")  # pending requests to children, which belong to the run that has started them
NOTE = "compensation"
UNORDERED_KINDS = (NOTE, "rewind")  # not in call order, so a run cannot be rewound to them
PINS = ("version", "removed")
MAX_DIGITS = 20  # of an iteration; Python refuses to convert more than 4,300


class _Undoing(Struct):
    """The detail of an entry in a rollback: the step that it compensates, if any."""

    of: str | None = None


class _Child(Struct):
    """The detail of an entry that started a child. After the child's end it has the result and no `attached`."""

    id: str
    attached: bool = False


def plan_rewind(snapshot: Snapshot, location: str, *, now: float, turn_id: str) -> RewindRun:
    """Return the write that cuts a run's history back to just before this location.

    `InvalidArgument` if the history does not contain the location, or cannot be cut there.
    """
    cut = _cut(snapshot, location)
    return RewindRun(
        run_id=snapshot.record.id,
        base=snapshot.position,
        turn_id=turn_id,
        now=now,
        dropped=tuple(entry.location for entry in cut.dropped),
        entries=(*cut.rewritten, *_stop_entries(snapshot, cut.dropped, now), _rewind_marker(cut, snapshot.record, now)),
        returned=tuple(_messages_to_return(snapshot, cut.dropped)),
        deadline_at=_renewed_deadline(snapshot.record, now),
        place=_place_of(snapshot.record),
    )


def _place_of(record: RunRecord) -> Place | None:
    """Return the place of an ended run in its queue. It takes its dedupe key not again, and never expires."""
    if record.queue is None or not record.status.terminal:
        return None
    return Place(queue=record.queue, partition=record.partition, priority=record.priority)


def plan_fork(snapshot: Snapshot, location: str, *, run_id: str, created_by: str, shard: int, now: float) -> CreateRun:
    """Return the write that creates a run with this run's history before the location.

    Its inbox has the events and completed deferreds that the dropped part had received, and the unread ones. Pending
    stops of the old run's children are not copied. `InvalidArgument` as for `plan_rewind`.
    """
    cut = _cut(snapshot, location)
    omitted = {entry.location for entry in cut.dropped}
    omitted.update(entry.location for entry in cut.kept if entry.kind in CHILD_REQUESTS)
    rows = (*(row for row in snapshot.entries if row.location not in omitted), *cut.rewritten)
    unread = (message for message in snapshot.inbox if message.kind in ("event", "deferred"))
    messages = sorted([*_messages_to_return(snapshot, cut.dropped), *unread], key=lambda message: message.number)
    return CreateRun(
        replace(
            _fork_record(snapshot.record, run_id, created_by, shard, now),
            tags=tags_at_start(snapshot.record.tags, cut.dropped),
        ),
        entries=(*map(_without_notes, map(as_detached_child, rows)), _rewind_marker(cut, snapshot.record, now)),
        inbox=tuple(messages),
        received=snapshot.record.last_message_no,
    )


def as_detached_child(row: Entry) -> Entry:
    """Return the entry with its child detached: a fork may wait for the old run's children, but does not own them."""
    if row.kind not in CHILDREN or row.detail is None or b'"attached":true' not in row.detail:
        return row
    child = msgspec.json.decode(row.detail)
    return replace(row, detail=msgspec.json.encode({**child, "attached": False}))


def _without_notes(row: Entry) -> Entry:
    """Return the entry without the notes of a pending step: the fork executes that step itself, from the start."""
    return row if row.status is not PENDING or row.value is None else replace(row, value=None)


def _fork_record(record: RunRecord, run_id: str, created_by: str, shard: int, now: float) -> RunRecord:
    """Return the record of a fork. Its replay needs the old run's seed, epoch and time of first execution."""
    return RunRecord(
        id=run_id,
        workflow=record.workflow,
        version=record.version,
        input=record.input,
        created_at=now,
        created_by=created_by,
        seed=record.seed,
        pool=record.pool,
        shard=shard,
        generation=record.generation + 1,
        epoch=record.epoch,
        run_attempt=record.run_attempt,
        original_workflow=record.original_workflow,
        original_input=record.original_input,
        tags=record.tags,
        first_executed_at=record.first_executed_at,
        updated_at=now,
        wake_at=now,
        deadline_at=_renewed_deadline(record, now),
        retention=record.retention,
    )


def _renewed_deadline(record: RunRecord, now: float) -> float | None:
    """Return a new deadline that gives the run its whole time limit again."""
    return None if record.deadline_at is None else now + (record.deadline_at - record.created_at)


def _rewind_marker(cut: _Cut, record: RunRecord, now: float) -> Entry:
    """Return the entry that records the cut: after the completion that is its name, time continues from now.

    It also keeps the time of the run's first execution, which is the time of the first requests of a fork.
    """
    remaining = {entry.location: entry.seq or 0 for entry in (*cut.kept, *cut.rewritten)}
    generation = record.generation + 1
    return Entry(
        f"~rewind/{generation}",
        "rewind",
        str(max(remaining.values(), default=0)),
        SUCCEEDED,
        max((entry.call_seq for entry in cut.kept), default=0),
        generation=generation,
        started_at=now if record.first_executed_at is None else record.first_executed_at,
        settled_at=now,
    )


# --- the cut -------------------------------------------------------------------------------------------------------


class _Cut(Struct, frozen=True):
    """The latest row of every location, in call order: kept, dropped, and kept ones that change."""

    kept: tuple[Entry, ...]
    dropped: tuple[Entry, ...]
    rewritten: tuple[Entry, ...]


def _cut(snapshot: Snapshot, location: str) -> _Cut:
    run_id, generation = snapshot.record.id, snapshot.record.generation + 1
    past = _HistoryIndex(snapshot.entries)
    target = _find_target(run_id, past, location)
    # The entry of an iteration has the state to continue with, so it is kept. A version pin that was set on a replay
    # has the call number of the request before it, which is kept too.
    first = target.call_seq + 1 if target.kind in ("iteration", *PINS) else target.call_seq
    kept = tuple(entry for entry in past.in_order if _is_kept(entry, first, target))
    dropped = tuple(entry for entry in past.in_order if not _is_kept(entry, first, target))
    _check_loops(run_id, location, past, kept, dropped)
    reopened = {entry.location: entry for entry in _reopened_loops(kept, dropped)}
    reopened |= {entry.location: entry for entry in _reopened_waits(snapshot.entries, kept, target, generation)}
    reopened |= {entry.location: entry for entry in _restored_compensations(snapshot.entries, kept, target)}
    remaining = _HistoryIndex([*kept, *reopened.values()])
    reruns = _steps_to_rerun(run_id, location, remaining, dropped, generation)
    rewritten = sorted([*reopened.values(), *reruns], key=lambda entry: entry.call_seq)
    return _Cut(kept, dropped, tuple(rewritten))


def _is_kept(entry: Entry, first: int, target: Entry) -> bool:
    return (entry.call_seq < first and not (entry is target and target.kind in PINS)) or _is_carried_over(entry)


def _check_loops(
    run_id: str, location: str, past: _HistoryIndex, kept: Iterable[Entry], dropped: Iterable[Entry]
) -> None:
    """Refuse a cut into a loop whose state at the cut cannot be rebuilt, because earlier iterations were pruned."""
    cut_into = {above for entry in dropped for above in _paths_above(entry.location)}
    committed = _HistoryIndex(tuple(kept)).committed
    for entry in kept:
        loop = entry.location
        if entry.kind == "loop" and loop in cut_into and loop not in committed and not past.is_whole(loop, 0):
            raise InvalidArgument(
                f"run {run_id!r} cannot be rewound to {location!r}: the iterations that the loop {loop!r} had done by "
                f"then have been pruned; use a remaining iteration, or {loop!r}, the loop's beginning"
            )


def _find_target(run_id: str, past: _HistoryIndex, location: str) -> Entry:
    for loop, iteration in past.iterations_around(location):
        if not past.is_whole(loop, iteration):
            raise InvalidArgument(
                f"run {run_id!r} cannot be rewound to {location!r}: iteration {iteration} of the loop {loop!r} has "
                f"been pruned; use iteration {past.committed[loop][0]} or later, or {loop!r}, the loop's beginning"
            )
    target = past.latest.get(location)
    if target is None or target.kind in UNORDERED_KINDS:
        locations = [entry.location for entry in past.in_order if entry.kind not in UNORDERED_KINDS]
        similar = get_close_matches(location, locations, n=5) or locations[-5:]
        existing = f"there are {', '.join(map(repr, similar))}" if similar else "its history is empty"
        raise InvalidArgument(f"run {run_id!r} has no entry at {location!r}; {existing}")
    return target


def _reopened_waits(rows: Sequence[Entry], kept: Iterable[Entry], target: Entry, generation: int) -> Iterator[Entry]:
    """Yield the entries that the workflow cancelled after it requested the target, open again; effects get new ids.

    An entry that was cancelled at the same time as the target was requested is opened too. If the cancellation came
    first, a replay cancels the entry again before it has any effect.
    """
    opened = {row.location: row for row in rows if row.status is PENDING}
    for entry in kept:
        # A loop whose body raised is cancelled too: it has no number in the order of completions.
        cancelled = entry.status in (CANCELLED, FAILED) and entry.seq is None
        if not cancelled or entry.settled_at is None or entry.settled_at < target.started_at:
            continue
        before = opened.get(entry.location)
        if before is None and entry.kind != NOTE:  # requested and cancelled in one turn, or a step
            before = replace(entry, status=PENDING, error=None, settled_at=None)
        if before is not None:
            # An open receive keeps its generation: a replay compares it, to see that it must subscribe again.
            keeps = before.kind in RECEIVING_KINDS or (before.kind == "loop" and entry.location not in opened)
            renewed = before.generation if keeps else generation
            # Without a value: it is a new execution of a step, which must not see the heartbeats of the old one.
            yield replace(before, generation=renewed, detail=entry.detail or before.detail, value=None)


def _reopened_loops(kept: Iterable[Entry], dropped: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the ended loops that the cut goes into, open again."""
    cut_into = {above for entry in dropped for above in _paths_above(entry.location)}
    for entry in kept:
        if entry.kind == "loop" and entry.status is not PENDING and entry.location in cut_into:
            yield replace(entry, status=PENDING, seq=None, value=None, error=None, settled_at=None)


def _restored_compensations(rows: Sequence[Entry], kept: Iterable[Entry], target: Entry) -> Iterator[Entry]:
    """Yield the compensations and exit hooks that were executed, and so cancelled, after the target was written."""
    written = next(position for position, row in enumerate(rows) if row.location == target.location)
    later = {row.location for row in rows[written + 1 :] if row.kind == NOTE and row.status is CANCELLED}
    recorded = {row.location: row for row in rows if row.kind == NOTE and row.status is SUCCEEDED}
    for entry in kept:
        if entry.status is CANCELLED and entry.location in later and entry.location in recorded:
            yield recorded[entry.location]


def _is_carried_over(entry: Entry) -> bool:
    """Return whether it is a compensation that was carried over when the run continued as new, before any request."""
    return entry.kind == NOTE and entry.location.startswith("~compensation/~before/")


def _steps_to_rerun(
    run_id: str, location: str, remaining: _HistoryIndex, dropped: Iterable[Entry], generation: int
) -> Iterator[Entry]:
    """Yield the kept steps that a dropped rollback has compensated, to be executed again.

    Such a step is pending and has a `seq`: it was the seq-th completion, and will be that again. A step in an iteration
    that is not replayed cannot be executed again. It is refused: the run would continue as if it had not been rolled
    back.
    """
    for compensated in _compensated_steps(dropped):
        for loop, iteration in remaining.iterations_around(compensated):
            if not remaining.is_replayed(loop, iteration):
                raise InvalidArgument(
                    f"run {run_id!r} cannot be rewound to {location!r}: step {compensated!r} before it was rolled back "
                    f"and cannot be executed again, because iteration {iteration} of the loop {loop!r} is over; use "
                    f"that step or {loop!r}"
                )
        step = remaining.latest.get(compensated)
        if step is not None and step.status is SUCCEEDED:
            yield replace(
                step,
                status=PENDING,
                value=None,
                error=None,
                attempts=0,
                generation=generation,
                settled_at=None,
                due_at=None,
            )


def _compensated_steps(dropped: Iterable[Entry]) -> Iterator[str]:
    """Yield the locations of steps that these entries compensated, each once; a failed entry compensated nothing."""
    found: dict[str, None] = {}
    for entry in dropped:
        scope = entry.location.rpartition("/")[0]
        if (
            entry.status is SUCCEEDED
            and entry.detail is not None
            and scope.rpartition("/")[2].partition("#")[0] == "~rollback"
        ):
            of = msgspec.json.decode(entry.detail, type=_Undoing).of
            if of is not None:
                found[of] = None
    return iter(found)


# --- messages and children of the dropped part ---------------------------------------------------------------------


def _messages_to_return(snapshot: Snapshot, dropped: Iterable[Entry]) -> list[Message]:
    """Return the messages that these entries consumed, in order of arrival, each id once.

    An event from a topic goes to the run's own inbox: the topic has deleted it. A fork accepts an id that its original
    has received; then the later message counts.
    """
    unread = {message.id for message in snapshot.inbox}
    latest = {
        message.id: message
        for message in sorted(received_messages(dropped), key=lambda message: message.number)
        if message.id not in unread
    }
    found = sorted(latest.values(), key=lambda message: message.number)
    return [as_targeted(message) for message in found if message.kind in ("event", "deferred", "assignment")]


def received_messages(entries: Iterable[Entry]) -> Iterator[Message]:
    """Yield the messages that these entries consumed."""
    for entry in entries:
        if entry.kind in RECEIVING_KINDS and entry.status in (SUCCEEDED, FAILED) and entry.detail is not None:
            yield from msgspec.json.decode(entry.detail, type=list[Message])


def as_targeted(message: Message) -> Message:
    """Return an event of a topic as one that was sent to the run; other messages unchanged."""
    if message.kind != "assignment":
        return message
    return replace(message, kind="event", target=None, offset=0)


def _stop_entries(snapshot: Snapshot, dropped: Iterable[Entry], now: float) -> list[Entry]:
    """Return the entries by which the run stops the children that the dropped part started."""
    generation = snapshot.record.generation + 1
    last_call = max(row.call_seq for row in snapshot.entries)
    return [
        Entry(
            f"~stop/{generation}/{number}",
            "stop",
            child,
            PENDING,
            last_call + 1 + number,
            generation=generation,
            started_at=now,
        )
        for number, child in enumerate(dict.fromkeys(_attached_children(dropped)))
    ]


def _attached_children(dropped: Iterable[Entry]) -> Iterator[str]:
    for entry in dropped:
        if entry.kind == "stop" and entry.status is not SUCCEEDED:
            yield entry.name  # requested by an earlier rewind and not done yet
        elif entry.kind in CHILDREN and entry.status is not FAILED and entry.detail is not None:
            # A failed entry needs no stop: its child has ended, or another run had its id.
            child = msgspec.json.decode(entry.detail, type=_Child)
            if child.attached:
                yield child.id


# --- reading a history ---------------------------------------------------------------------------------------------


class _HistoryIndex:
    """The entries of a history by location and in call order, and the iterations of its loops.

    `committed` has the iterations of each loop whose state is recorded.
    """

    def __init__(self, rows: Sequence[Entry]) -> None:
        # A changed entry is written again: the latest row of a location counts.
        self.latest = {row.location: row for row in rows}
        self.in_order = sorted(self.latest.values(), key=lambda entry: entry.call_seq)
        self.committed: dict[str, list[int]] = {}
        for entry in self.latest.values():
            loop, _, segment = entry.location.rpartition("/")
            if entry.kind == "iteration" and entry.seq is not None:
                self.committed.setdefault(loop, []).append(int(segment[1:]))
        for iterations in self.committed.values():
            iterations.sort()

    def iterations_around(self, location: str) -> Iterator[tuple[str, int]]:
        """Yield the loops that contain a location, outermost first, each with the iteration."""
        for path in _paths_above(location):
            segment = location[len(path) + 1 :].partition("/")[0]
            entry = self.latest.get(path)
            is_iteration = segment.startswith("~") and segment[1:].isdecimal() and len(segment) <= MAX_DIGITS
            if entry is not None and entry.kind == "loop" and is_iteration:
                yield path, int(segment[1:])

    def is_whole(self, loop: str, iteration: int) -> bool:
        """Return whether the history that leads to this iteration is complete: from a recorded state, or the start.

        Single entries may outlast their iteration. Without an earlier state, nothing was pruned if the first recorded
        state is the first ever: as far from the start as the second is from it, or with no iteration missing.
        """
        states = self.committed.get(loop, [])
        if not states or states[0] <= iteration:
            return True
        if len(states) > 1:
            return states[0] <= states[1] - states[0]
        whole = (
            each.location for each in self.in_order if each.kind != "deferred"
        )  # deferreds outlast their iteration
        seen = {number for each in whole for path, number in self.iterations_around(each) if path == loop}
        return seen.issuperset(range(states[0]))

    def is_replayed(self, loop: str, iteration: int) -> bool:
        """Return whether a replay executes this iteration: the loop is open and continues from a state up to it."""
        states = self.committed.get(loop, [])
        return self.latest[loop].seq is None and (not states or states[-1] <= iteration)


def _paths_above(location: str) -> Iterator[str]:
    """Yield every scope that contains a location, outermost first: `a` and `a/b` for `a/b/c`."""
    cut = location.find("/")
    while cut >= 0:
        yield location[:cut]
        cut = location.find("/", cut + 1)
