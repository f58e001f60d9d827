"""RunModel: the state of one run, derived by the invariant checker from committed writes, without code of the store."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from perdure.model.ids import incarnation_of, origin_of
from perdure.model.records import Entry, EntryStatus, Message, RunStatus
from perdure.stores.writes import CreateRun


@dataclass(slots=True)
class RunModel:
    """The state of a run, derived from its committed writes."""

    id: str
    created_by: str
    workflow: str = ""
    version: int = 1
    pool: str = "default"
    created_at: float = 0.0
    parent: str | None = None
    attached: bool = False
    retention: float | None = None
    prune_at: float | None = None
    forked: bool = False  # created with a history
    run_attempt: int = 1
    position: int = 0
    generation: int = 0
    epoch: int = 0
    first_epoch: int = 0  # higher if the run replaced another one
    begun_in: int = 0  # the generation in which it was last continued as new or retried
    owner: str | None = None
    status: RunStatus = RunStatus.RUNNING
    ending: tuple[RunStatus, bytes | None] | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    last_seq: int = -1
    turns: set[str] = field(default_factory=set)
    touched: bool = False  # stopped, rewound or resumed by a caller
    terminated: bool = False
    rewound: bool = False
    pruned: set[str] = field(default_factory=set)  # locations of entries that were recorded and then pruned
    accepted: dict[str, Message] = field(default_factory=dict)  # events of the mailbox, by id
    completed: dict[str, Message] = field(default_factory=dict)  # completions of deferreds, by id
    consumed: dict[str, Message] = field(default_factory=dict)  # events and assignments that a turn consumed, by id
    returned: dict[str, Message] = field(default_factory=dict)  # messages that a rewind returned to the mailbox
    streamed: int = 0  # items that turns have written
    recorded: list[Entry] = field(default_factory=list)  # all completed entries, in order
    before_retry: int = 0  # the length of `recorded` at the last retry of the run
    before_epoch: int = 0  # the length of `recorded` when the current epoch started
    undone_before: set[str] = field(default_factory=set)  # steps of a fork that were compensated before the fork
    copied: dict[str, Message] = field(default_factory=dict)  # messages that a fork was created with, by id

    def completed_entry(self, location: str) -> Entry | None:
        entry = self.entries.get(location)
        return entry if entry is not None and entry.status is not EntryStatus.PENDING else None


def new_run_model(write: CreateRun, owner: str | None) -> RunModel:
    """Return the model of a new run. A fork starts with a history and messages."""
    record = write.record
    model = RunModel(
        record.id,
        record.created_by,
        workflow=record.workflow,
        version=record.version,
        pool=record.pool,
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
    completed = [entry for entry in model.entries.values() if entry.seq is not None]
    model.last_seq = max((entry.seq or 0 for entry in completed), default=-1)
    model.recorded = [entry for entry in completed if entry.status is not EntryStatus.PENDING]
    for entry in model.recorded:
        if "~rollback" in entry.location and entry.detail is not None:
            model.undone_before.add(str(msgspec.json.decode(entry.detail).get("of")))
    for message in write.inbox:
        model.copied[message.id] = message
        if message.kind == "deferred":
            model.completed[message.id] = message
    return model


def started_at(child: RunModel, run: RunModel) -> str | None:
    """Return the location at which `run` started `child` in its current history, or None."""
    origin = origin_of(run.id, incarnation_of(run.created_by))
    target = child.created_by.removeprefix(f"child/{origin}/").removesuffix(f"~~{incarnation_of(child.created_by)}")
    generation, _, location = target.partition("/")
    is_own = child.parent == run.id and child.attached and generation.isdecimal() and int(generation) >= run.begun_in
    return location if is_own else None


def is_sent_by_parent(cancel_id: str, child: RunModel) -> bool:
    """Return whether the run that started `child` has sent this cancel, and not another run of the parent's id."""
    parent, of_parent = child.parent, f"child/{child.parent}~"
    if not child.created_by.startswith(of_parent):
        return cancel_id.startswith((f"cancel/{parent}/", f"cancel/{parent}~"))
    incarnation = child.created_by.removeprefix(of_parent).partition("/")[0]
    return cancel_id.startswith(f"cancel/{parent}~{incarnation}/")


def is_known(run: RunModel, deferred: Entry) -> bool:
    """Return whether the run has recorded the same value of this deferred before."""
    return any(
        (each.kind, each.name, each.value) == (deferred.kind, deferred.name, deferred.value)
        for each in run.entries.values()
        if each.status is not EntryStatus.PENDING
    )
