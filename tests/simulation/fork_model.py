"""Reference model of a fork: the history before its location, and the unread messages. Shares no code with perdure."""

from collections import Counter
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from perdure.model.records import Entry, EntryStatus, Message
from perdure.stores.results import Snapshot
from perdure.stores.writes import CreateRun

OWN = ("stop", "watch", "loop")  # belong to the original run; a loop may be open again, as its iterations show
READERS = ("receive", "receive_batch", "receive_request", "deferred")


def wrong_with_fork(source: Snapshot, location: str, made: CreateRun) -> Iterator[str]:
    """Yield the differences between a fork and the expected copy of its original run."""
    rows = {row.location: row for row in source.entries}
    copies = {row.location: row for row in made.entries}
    target = rows[location]
    first = target.call_seq + 1 if target.kind in ("iteration", "version") else target.call_seq
    later = [
        row for row in rows.values() if row.call_seq >= first and not row.location.startswith("~compensation/~before")
    ]
    later += [target] if target.kind == "version" and target not in later else []
    undone = {of for row in later if (of := _compensated_by(row)) is not None}
    for row in rows.values():
        copy = copies.get(row.location)
        if row in later:
            if copy is not None:
                yield f"{row.location} is after the location, but was copied"
        elif (row.seq is not None or row.kind == "version") and row.kind not in OWN and copy != _as_copied(row):
            again = copy is not None and (copy.status, copy.seq) == (EntryStatus.PENDING, row.seq)
            if not (again and (row.location in undone or row.status is EntryStatus.PENDING)):
                yield f"{row.location} is {row}, but the copy is {copy}"
    unread = [message for message in source.inbox if message.kind in ("event", "deferred")]
    wanted = Counter({message.id for message in [*unread, *_read_in(later)]})
    if (there := Counter(message.id for message in made.inbox)) != wanted:
        yield f"its messages are {sorted(there)}, expected {sorted(wanted)}"
    numbers = [message.number for message in [*source.inbox, *_read_in(list(rows.values()))]]
    if made.received < max(numbers, default=0):
        yield f"its messages are numbered from {made.received + 1}, but its original had {max(numbers)} messages"


def _as_copied(row: Entry) -> Entry:
    """Return the entry as a fork has it: children of the original are not attached to the fork."""
    if row.kind not in ("child", "start_child") or row.detail is None:
        return row
    child = msgspec.json.decode(row.detail)
    return replace(row, detail=msgspec.json.encode(child | {"attached": False} if child.get("attached") else child))


def _compensated_by(row: Entry) -> str | None:
    """Return the location of the step that this entry compensates, or None."""
    if "~rollback" not in row.location or row.detail is None or row.status is not EntryStatus.SUCCEEDED:
        return None
    of: str | None = msgspec.json.decode(row.detail).get("of")
    return of


def _read_in(rows: list[Entry]) -> Iterator[Message]:
    for row in rows:
        completed = row.status in (EntryStatus.SUCCEEDED, EntryStatus.FAILED)
        if row.kind in READERS and completed and row.detail is not None:
            yield from msgspec.json.decode(row.detail, type=list[Message])
