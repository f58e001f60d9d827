"""What a fork must have: the history up to its location, and the mail that it has not read there. Shares no code."""

from collections import Counter
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from perdure.model.records import Entry, EntryStatus, Message
from perdure.stores.results import Snapshot
from perdure.stores.writes import CreateRun

OWN = ("stop", "watch", "loop")  # duties of the old run; a loop may be open again, of which its iterations tell
READERS = ("receive", "receive_batch", "receive_request", "deferred")


def wrong_with_fork(source: Snapshot, location: str, made: CreateRun) -> Iterator[str]:
    """Hold a fork against the run that it was made from, as that was then."""
    rows = {row.location: row for row in source.entries}
    copies = {row.location: row for row in made.entries}
    target = rows[location]
    first = target.call_seq + 1 if target.kind in ("iteration", "version") else target.call_seq
    later = [
        row for row in rows.values() if row.call_seq >= first and not row.location.startswith("~compensation/~before")
    ]
    later += [target] if target.kind == "version" and target not in later else []
    undone = {of for row in later if (of := _undoes(row)) is not None}
    for row in rows.values():
        copy = copies.get(row.location)
        if row in later:
            if copy is not None:
                yield f"{row.location} came after, and was kept"
        elif (row.seq is not None or row.kind == "version") and row.kind not in OWN and copy != _of_another(row):
            again = copy is not None and (copy.status, copy.seq) == (EntryStatus.PENDING, row.seq)
            if not (again and (row.location in undone or row.status is EntryStatus.PENDING)):
                yield f"{row.location} was {row}, and became {copy}"
    unread = [message for message in source.inbox if message.kind in ("event", "deferred")]
    wanted = Counter(message.id for message in {each.number: each for each in [*unread, *_read_in(later)]}.values())
    if (there := Counter(message.id for message in made.inbox)) != wanted:
        yield f"its mail is {sorted(there)}, and should be {sorted(wanted)}"


def _of_another(row: Entry) -> Entry:
    """A child that the old run has started is not the fork's."""
    if row.kind not in ("child", "start_child") or row.detail is None:
        return row
    child = msgspec.json.decode(row.detail)
    return replace(row, detail=msgspec.json.encode(child | {"attached": False} if child.get("attached") else child))


def _undoes(row: Entry) -> str | None:
    """The step that this one has undone."""
    if "~rollback" not in row.location or row.detail is None or row.status is not EntryStatus.SUCCEEDED:
        return None
    of: str | None = msgspec.json.decode(row.detail).get("of")
    return of


def _read_in(rows: list[Entry]) -> Iterator[Message]:
    for row in rows:
        settled = row.status in (EntryStatus.SUCCEEDED, EntryStatus.FAILED)
        if row.kind in READERS and settled and row.detail is not None:
            yield from msgspec.json.decode(row.detail, type=list[Message])
