"""What the witness knows of one run: as far as its writes tell, and with none of the store's code."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from perdure.model.records import Entry, EntryStatus, Message, RunStatus
from perdure.stores.writes import CreateRun


@dataclass(slots=True)
class RunModel:
    """A run, as far as its writes tell."""

    id: str
    created_by: str
    workflow: str = ""
    version: int = 1
    created_at: float = 0.0
    parent: str | None = None
    attached: bool = False
    retention: float | None = None
    prune_at: float | None = None
    forked: bool = False  # it began with a history
    run_attempt: int = 1
    position: int = 0
    generation: int = 0
    epoch: int = 0
    begun_in: int = 0  # the generation in which its history was last begun anew
    owner: str | None = None
    status: RunStatus = RunStatus.RUNNING
    ending: tuple[RunStatus, bytes | None] | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    last_seq: int = -1
    turns: set[str] = field(default_factory=set)
    touched: bool = False  # stopped, rewound or resumed from outside
    terminated: bool = False
    rewound: bool = False
    pruned: set[str] = field(default_factory=set)  # locations that were on record and were dropped on purpose
    accepted: dict[str, Message] = field(default_factory=dict)  # events of the mailbox, by id
    completed: dict[str, Message] = field(default_factory=dict)  # completions of deferreds, by id
    consumed: dict[str, Message] = field(default_factory=dict)  # events and assignments that a turn took, by id
    returned: dict[str, Message] = field(default_factory=dict)  # what a rewind has put back into the mailbox
    streamed: int = 0  # items that turns have written
    recorded: list[Entry] = field(default_factory=list)  # what was ever settled, in order
    before_retry: int = 0  # how many of those, when the run was last tried again
    before_epoch: int = 0  # how many of those, when its history was last begun anew
    undone_before: set[str] = field(default_factory=set)  # steps that a fork began with, and that were undone by then
    copied: dict[str, Message] = field(default_factory=dict)  # mail that a fork began with, by id

    def settled_at(self, location: str) -> Entry | None:
        entry = self.entries.get(location)
        return entry if entry is not None and entry.status is not EntryStatus.PENDING else None


def born(write: CreateRun, owner: str | None) -> RunModel:
    """The picture of a new run. A fork begins with a history and mail."""
    record = write.record
    picture = RunModel(
        record.id,
        record.created_by,
        workflow=record.workflow,
        version=record.version,
        created_at=record.created_at,
        parent=record.parent,
        attached=record.attached,
        retention=record.retention,
        forked=bool(write.entries),
        run_attempt=record.run_attempt,
        position=len(write.entries),
        generation=record.generation,
        epoch=record.epoch,
        owner=owner,
        entries={entry.location: entry for entry in write.entries},
    )
    settled = [entry for entry in picture.entries.values() if entry.seq is not None]
    picture.last_seq = max((entry.seq or 0 for entry in settled), default=-1)
    picture.recorded = [entry for entry in settled if entry.status is not EntryStatus.PENDING]
    for entry in picture.recorded:
        if "~rollback" in entry.location and entry.detail is not None:
            picture.undone_before.add(str(msgspec.json.decode(entry.detail).get("of")))
    for message in write.inbox:
        picture.copied[message.id] = message
        if message.kind == "deferred":
            picture.completed[message.id] = message
    return picture


def started_at(child: RunModel, run: RunModel) -> str | None:
    """Where a run has started this child of its, in the history that it has now."""
    generation, _, location = child.created_by.removeprefix(f"child/{run.id}/").partition("/")
    ours = child.parent == run.id and child.attached and generation.isdecimal() and int(generation) >= run.begun_in
    return location if ours else None


def is_known(run: RunModel, deferred: Entry) -> bool:
    """Whether it was awaited before, and came to just that."""
    return any(
        (each.kind, each.name, each.value) == (deferred.kind, deferred.name, deferred.value)
        for each in run.entries.values()
        if each.status is not EntryStatus.PENDING
    )
