"""Rewinding: from a run as it stands and a location to what is left of its history. Pure: it only says what to write.

What was asked for at or after the location goes, by order of asking and never by name; what is left is a history that
the same code has once had, and so replays. Four things reach across the cut from the part that goes, and are undone:

- a loop that has gone on since is open again, at the last committed iteration of it that stays;
- what the workflow gave up since (losers of a race, all that was open when the run ended) is open again;
- a step that a rollback has undone since is to be done again in its place, and noted compensations are due again;
- messages that were received since are unread again, and children that were started since are to be stopped.

The workflow's clock goes on from now: an entry of kind "rewind" says after which completion, so that what is asked for
next is asked for at the time of the rewind.

A fork is the same cut, made into the beginning of a new run; the old one, its children included, is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import InvalidArgument
from perdure.model.records import Entry, EntryStatus, Message, RunRecord
from perdure.stores.results import Snapshot
from perdure.stores.writes import CreateRun, RewindRun

PENDING, CANCELLED = EntryStatus.PENDING, EntryStatus.CANCELLED
SUCCEEDED, FAILED = EntryStatus.SUCCEEDED, EntryStatus.FAILED
RECEIVING_KINDS = (
    "receive",
    "receive_batch",
    "receive_request",
    "deferred",
)  # kinds whose detail is what they have consumed
CHILDREN = ("child", "start_child")
NOTE = "compensation"
UNORDERED_KINDS = (NOTE, "rewind")  # these have no place in the order of asking: there is nothing to go back to
PINS = ("version", "removed")


class _Undoing(Struct):
    """The detail of an entry in a rollback: the step that it undoes, if it undoes one."""

    of: str | None = None


class _Child(Struct):
    """The detail of an entry that has started a run. Once that has ended, it says how, and nothing of attachment."""

    id: str
    attached: bool = False


def plan_rewind(snapshot: Snapshot, location: str, *, now: float, turn_id: str) -> RewindRun:
    """Cut the run's history back to just before this location. `InvalidArgument` if there is no way back to it."""
    cut = _cut(snapshot, location)
    return RewindRun(
        run_id=snapshot.record.id,
        base=snapshot.position,
        turn_id=turn_id,
        now=now,
        dropped=tuple(entry.location for entry in cut.dropped),
        entries=(*cut.rewritten, *_stops(snapshot, cut.dropped, now), _rewind_marker(cut, snapshot.record, now)),
        returned=tuple(_returned(cut.dropped)),
        deadline_at=_renewed_deadline(snapshot.record, now),
    )


def plan_fork(snapshot: Snapshot, location: str, *, run_id: str, created_by: str, shard: int, now: float) -> CreateRun:
    """A new run whose history is that of this one up to the location. `InvalidArgument` as for `rewind_of`.

    Its mailbox holds what the part that is left out had received and what is unread: events and settled deferreds. That
    the old run is still to stop children of its own is no business of the new one.
    """
    cut = _cut(snapshot, location)
    left_out = {entry.location for entry in cut.dropped}
    left_out.update(entry.location for entry in cut.kept if entry.kind in ("stop", "watch"))
    rows = (*(row for row in snapshot.entries if row.location not in left_out), *cut.rewritten)
    unread = (message for message in snapshot.inbox if message.kind in ("event", "deferred"))
    mail = sorted([*_returned(cut.dropped), *unread], key=lambda message: message.number)
    return CreateRun(
        _forked(snapshot.record, run_id, created_by, shard, now),
        entries=(*map(_of_another, rows), _rewind_marker(cut, snapshot.record, now)),
        inbox=tuple(replace(message, number=number) for number, message in enumerate(mail, start=1)),
    )


def _of_another(row: Entry) -> Entry:
    """The children of the old run are not the new one's: it may wait for them, and does not take them with it."""
    if row.kind not in CHILDREN or row.detail is None or b'"attached":true' not in row.detail:
        return row
    child = msgspec.json.decode(row.detail)
    return replace(row, detail=msgspec.json.encode({**child, "attached": False}))


def _forked(record: RunRecord, run_id: str, created_by: str, shard: int, now: float) -> RunRecord:
    """The row of a fork. Seed, epoch and the moment it began are the old run's: the replay must see what it saw."""
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
    """A run with a time limit gets it again."""
    return None if record.deadline_at is None else now + (record.deadline_at - record.created_at)


def _rewind_marker(cut: _Cut, record: RunRecord, now: float) -> Entry:
    """That the history was cut back here: after the completion that its name says, time goes on from now.

    It keeps when the run had begun: to a fork, which begins now, that is the time of its first asks.
    """
    left = {entry.location: entry.seq or 0 for entry in (*cut.kept, *cut.rewritten)}
    generation = record.generation + 1
    return Entry(
        f"~rewind/{generation}",
        "rewind",
        str(max(left.values(), default=0)),
        SUCCEEDED,
        max((entry.call_seq for entry in cut.kept), default=0),
        generation=generation,
        started_at=now if record.first_executed_at is None else record.first_executed_at,
        settled_at=now,
    )


# --- the cut -------------------------------------------------------------------------------------------------------


class _Cut(Struct, frozen=True):
    """The latest row of every location, in order of asking: what stays, what goes, what changes of that which stays."""

    kept: tuple[Entry, ...]
    dropped: tuple[Entry, ...]
    rewritten: tuple[Entry, ...]


def _cut(snapshot: Snapshot, location: str) -> _Cut:
    run_id, generation = snapshot.record.id, snapshot.record.generation + 1
    past = _HistoryIndex(snapshot.entries)
    target = _target(run_id, past, location)
    # The start of an iteration is a place of its own: its entry is the state to go on with, and stays. A pin that was
    # set on a replay stands where the ask before it stands, which stays too.
    first = target.call_seq + 1 if target.kind in ("iteration", *PINS) else target.call_seq
    kept = tuple(entry for entry in past.in_order if _stays(entry, first, target))
    dropped = tuple(entry for entry in past.in_order if not _stays(entry, first, target))
    _check_loops(run_id, location, past, kept, dropped)
    reopened = {entry.location: entry for entry in _reopened_loops(kept, dropped)}
    reopened |= {entry.location: entry for entry in _reopened_waits(snapshot.entries, kept, target, generation)}
    reopened |= {entry.location: entry for entry in _noted_again(snapshot.entries, kept, target)}
    left = _HistoryIndex([*kept, *reopened.values()])
    redone = _to_redo(run_id, location, left, dropped, generation)
    rewritten = sorted([*reopened.values(), *redone], key=lambda entry: entry.call_seq)
    return _Cut(kept, dropped, tuple(rewritten))


def _stays(entry: Entry, first: int, target: Entry) -> bool:
    return (entry.call_seq < first and not (entry is target and target.kind in PINS)) or _is_carried(entry)


def _check_loops(
    run_id: str, location: str, past: _HistoryIndex, kept: Iterable[Entry], dropped: Iterable[Entry]
) -> None:
    """Refuse a cut through a loop that then was where nothing leads to any more: all before it has been pruned."""
    cut_into = {above for entry in dropped for above in _paths_above(entry.location)}
    left = _HistoryIndex(tuple(kept)).committed
    for entry in kept:
        loop = entry.location
        if entry.kind == "loop" and loop in cut_into and loop not in left and not past.is_whole(loop, 0):
            raise InvalidArgument(
                f"run {run_id!r} cannot go back to {location!r}: the iterations that the loop {loop!r} had done by "
                f"then have been pruned; go back to an iteration that is left, or to {loop!r}, its beginning"
            )


def _target(run_id: str, past: _HistoryIndex, location: str) -> Entry:
    for loop, iteration in past.iterations_around(location):
        if not past.is_whole(loop, iteration):
            raise InvalidArgument(
                f"run {run_id!r} cannot go back to {location!r}: iteration {iteration} of the loop {loop!r} has been "
                f"pruned; the oldest that is left is {past.committed[loop][0]}, and {loop!r} is the loop's beginning"
            )
    target = past.latest.get(location)
    if target is None or target.kind in UNORDERED_KINDS:
        places = [entry.location for entry in past.in_order if entry.kind not in UNORDERED_KINDS]
        near = get_close_matches(location, places, n=5) or places[-5:]
        there = f"there are {', '.join(map(repr, near))}" if near else "its history is empty"
        raise InvalidArgument(f"run {run_id!r} has no entry at {location!r}; {there}")
    return target


def _reopened_waits(rows: Sequence[Entry], kept: Iterable[Entry], target: Entry, generation: int) -> Iterator[Entry]:
    """What the workflow gave up after it had asked for the target stands again as it stood; its effects get new ids.

    What it gave up in that very moment is opened too: if that came first, a replay gives it up again, before it has had
    any effect.
    """
    opened = {row.location: row for row in rows if row.status is PENDING}
    for entry in kept:
        # A loop that its body has left with an error is given up too: it has no place in the order of completions.
        given_up = entry.status in (CANCELLED, FAILED) and entry.seq is None
        if not given_up or entry.settled_at is None or entry.settled_at < target.started_at:
            continue
        before = opened.get(entry.location)
        if before is None and entry.kind != NOTE:  # it was asked for and given up in one turn, or is a step
            before = replace(entry, status=PENDING, error=None, settled_at=None)
        if before is not None:
            # An open receive keeps its generation: by that a replay sees that it has to subscribe anew.
            keeps = before.kind in RECEIVING_KINDS or (before.kind == "loop" and entry.location not in opened)
            renewed = before.generation if keeps else generation
            yield replace(before, generation=renewed, detail=entry.detail or before.detail)


def _reopened_loops(kept: Iterable[Entry], dropped: Iterable[Entry]) -> Iterator[Entry]:
    """Loops that had ended, and of which something goes."""
    cut_into = {above for entry in dropped for above in _paths_above(entry.location)}
    for entry in kept:
        if entry.kind == "loop" and entry.status is not PENDING and entry.location in cut_into:
            yield replace(entry, status=PENDING, seq=None, value=None, error=None, settled_at=None)


def _noted_again(rows: Sequence[Entry], kept: Iterable[Entry], target: Entry) -> Iterator[Entry]:
    """Notes of compensations and exits that were taken up, and so struck out, after the target was written."""
    written = next(position for position, row in enumerate(rows) if row.location == target.location)
    later = {row.location for row in rows[written + 1 :] if row.kind == NOTE and row.status is CANCELLED}
    standing = {row.location: row for row in rows if row.kind == NOTE and row.status is SUCCEEDED}
    for entry in kept:
        if entry.status is CANCELLED and entry.location in later and entry.location in standing:
            yield standing[entry.location]


def _is_carried(entry: Entry) -> bool:
    """Whether it is a note from before the run continued as what it is: it was there before anything was asked for."""
    return entry.kind == NOTE and entry.location.startswith("~compensation/~before/")


def _to_redo(
    run_id: str, location: str, left: _HistoryIndex, dropped: Iterable[Entry], generation: int
) -> Iterator[Entry]:
    """Steps that stay, and that a rollback which goes has undone.

    Pending with a `seq` is the mark of such a step: it was the seq-th completion, and will be that again. A step in an
    iteration that is not replayed, and so cannot be done again, is refused: the run would go on as if nothing had been
    undone.
    """
    for undone in _undone(dropped):
        for loop, iteration in left.iterations_around(undone):
            if not left.is_replayed(loop, iteration):
                raise InvalidArgument(
                    f"run {run_id!r} cannot go back to {location!r}: step {undone!r} stays, was rolled back, and "
                    f"cannot be done again, because iteration {iteration} of the loop {loop!r} is over; go back to "
                    f"that step or to {loop!r}"
                )
        step = left.latest.get(undone)
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


def _undone(dropped: Iterable[Entry]) -> Iterator[str]:
    """The locations of steps that these entries have undone, each once. One that failed has undone nothing."""
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


# --- what goes with the part that is dropped -----------------------------------------------------------------------


def _returned(dropped: Iterable[Entry]) -> list[Message]:
    """The messages that these entries had consumed, in the order in which they had come.

    An event that came from a topic is in the mailbox from now on: the topic has let go of it.
    """
    found: dict[int, Message] = {}
    for entry in dropped:
        if entry.kind in RECEIVING_KINDS and entry.status in (SUCCEEDED, FAILED) and entry.detail is not None:
            for message in msgspec.json.decode(entry.detail, type=list[Message]):
                if message.kind == "assignment":
                    found[message.number] = replace(message, kind="event", target=None, offset=0)
                elif message.kind in ("event", "deferred"):
                    found[message.number] = message
    return [found[number] for number in sorted(found)]


def _stops(snapshot: Snapshot, dropped: Iterable[Entry], now: float) -> list[Entry]:
    """Entries by which the run stops the children that it no longer knows of."""
    generation = snapshot.record.generation + 1
    asked = max(row.call_seq for row in snapshot.entries)
    return [
        Entry(
            f"~stop/{generation}/{number}",
            "stop",
            child,
            PENDING,
            asked + 1 + number,
            generation=generation,
            started_at=now,
        )
        for number, child in enumerate(dict.fromkeys(_children(dropped)))
    ]


def _children(dropped: Iterable[Entry]) -> Iterator[str]:
    for entry in dropped:
        if entry.kind == "stop" and entry.status is not SUCCEEDED:
            yield entry.name  # an earlier rewind has asked for it, and nobody has done it yet
        elif entry.kind in CHILDREN and entry.status is not FAILED and entry.detail is not None:
            child = msgspec.json.decode(entry.detail, type=_Child)
            if child.attached:  # one that failed has ended, or was never ours: its id was taken
                yield child.id


# --- reading a history ---------------------------------------------------------------------------------------------


class _HistoryIndex:
    """The entries of a history by location and in order of asking, and how far its loops have come.

    `committed` are the iterations of each loop whose state is on record.
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
        """The loops that a location is in, outermost first, and in which iteration of each."""
        for path in _paths_above(location):
            segment = location[len(path) + 1 :].partition("/")[0]
            entry = self.latest.get(path)
            if entry is not None and entry.kind == "loop" and segment.startswith("~") and segment[1:].isdecimal():
                yield path, int(segment[1:])

    def is_whole(self, loop: str, iteration: int) -> bool:
        """Whether all that leads to this iteration is still there: a state before it, or everything from the start.

        Single entries may outlast their iteration. So without a state, that nothing was pruned shows in the first state
        on record being the first ever: as far from the start as the second is from it, or with no iteration missing.
        """
        states = self.committed.get(loop, [])
        if not states or states[0] <= iteration:
            return True
        if len(states) > 1:
            return states[0] <= states[1] - states[0]
        whole = (each.location for each in self.in_order if each.kind != "deferred")  # those outlast
        seen = {number for each in whole for path, number in self.iterations_around(each) if path == loop}
        return seen.issuperset(range(states[0]))

    def is_replayed(self, loop: str, iteration: int) -> bool:
        """Whether a replay comes by this iteration: the loop is not over, and goes on from a state before or at it."""
        states = self.committed.get(loop, [])
        return self.latest[loop].seq is None and (not states or states[-1] <= iteration)


def _paths_above(location: str) -> Iterator[str]:
    """Every scope that a location is in, from the outermost: `a` and `a/b` for `a/b/c`."""
    cut = location.find("/")
    while cut >= 0:
        yield location[:cut]
        cut = location.find("/", cut + 1)
