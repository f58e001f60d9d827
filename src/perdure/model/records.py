"""The values that pass between rooms: what is stored of a run, what a turn takes in and what it gives out.

Everything here is frozen and knows nothing: no clock, no store, no workflow code. Times are seconds since the epoch
(the facade turns them into aware datetimes), payloads are encoded bytes (the codec's business). `gc=False` where one is
made per turn and nothing in it can refer back to it: the garbage collector then need not look at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from msgspec import Struct


class RunStatus(StrEnum):
    """Where a run stands; the last three are terminal."""

    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    terminal: bool  # an attribute and no property: it is asked of every turn

    def __init__(self, value: str) -> None:
        self.terminal = value in ("succeeded", "failed", "cancelled")


class EntryStatus(StrEnum):
    """Where an entry stands. Cancelled ones were asked for and given up by the workflow itself."""

    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ErrorRecord(Struct, frozen=True, gc=False, omit_defaults=True):
    """An exception as data. `fields` is set where it must come back as itself (`raises`)."""

    type: str
    message: str
    traceback: str = ""
    location: str | None = None
    qualified: str = ""
    fields: bytes | None = None
    cause: ErrorRecord | None = None


# --- a run and its history --------------------------------------------------------------------------------------


class Entry(Struct, frozen=True, gc=False):
    """One record of a run's history. Written again with a new position whenever it changes; the latest one counts.

    `asked` orders all entries of the run by when they were first asked for, `ordinal` those of one scope (-1: not part
    of the scope's order), `seq` orders completions. A step's `attempts` counts attempts begun; `due_at` is when the
    next one, or a sleep's end, is due.
    """

    location: str
    kind: str
    name: str
    status: EntryStatus
    call_seq: int
    ordinal: int = -1
    seq: int | None = None
    value: bytes | None = None
    error: ErrorRecord | None = None
    attempts: int = 0
    generation: int = 0
    started_at: float = 0.0
    settled_at: float | None = None
    due_at: float | None = None
    fingerprint: bytes | None = None
    detail: bytes | None = None


class Wait(Struct, frozen=True, gc=False, omit_defaults=True):
    """One reason why a run waits: a timer, a retry, an event, a child, a deferred ... with what is known of it."""

    kind: str
    location: str | None = None
    name: str | None = None
    until: float | None = None


class Hold(Struct, frozen=True, omit_defaults=True):
    """Why a run is suspended until a person or fitting code resumes it."""

    kind: str  # "diverged", "deadlock", "livelock", "internal_error", "poison", "step_failed"
    reason: str
    location: str | None = None
    recorded: str | None = None
    asked: str | None = None
    line: str | None = None


class RunRecord(Struct, frozen=True, gc=False, kw_only=True):
    """The row of a run: everything about it but its history and mail."""

    id: str
    workflow: str
    version: int
    input: bytes
    created_at: float
    created_by: str  # unique per call of start: a retry after a lost answer recognises its own run
    seed: int
    pool: str = "default"
    shard: int = 0
    status: RunStatus = RunStatus.PENDING
    generation: int = 0  # how often its history was begun anew or cut back
    epoch: int = 0  # how often it was begun anew: what is drawn by lot and the tokens of deferreds belong to one
    run_attempt: int = 1  # of the whole run, when its workflow has a retry
    original_workflow: str | None = None  # these two are set once a run has begun anew: an id means what it first meant
    original_input: bytes | None = None
    result: bytes | None = None
    error: ErrorRecord | None = None
    parent: str | None = None
    attached: bool = False  # to its parent, and ends with it
    tags: Mapping[str, str] = {}
    first_executed_at: float | None = None  # when this generation first executed; the workflow's clock starts there
    updated_at: float = 0.0
    ended_at: float | None = None
    wake_at: float | None = None
    owner: str | None = None
    recoveries: int = 0
    deadline_at: float | None = None
    retention: float | None = None
    waits: tuple[Wait, ...] = ()
    held: Hold | None = None
    drift: tuple[str, ...] = ()  # locations whose arguments differed on a replay
    last_message_no: int = 0
    fence: int = 0  # turns computed from a position before this one are refused


class Message(Struct, frozen=True, gc=False, kw_only=True):
    """One outside input of a run, numbered in the order in which it was accepted.

    cancel, resume   from a person or a parent
    event            a targeted event: `name` is its type's, `policy` what becomes of it if the run ends without it
    assignment       an event of a topic, given to the receive at `target`; `place` is its number in the topic
    child            a run that the wait at `target` waits for has ended: `name` is its id, `body` an `Ending`
    deferred         `name` is the deferred's, `body` an `Ending` without a status of its own

    A `target` is the generation and location of what it answers: one that is not there any more is passed over.
    By its `id` mail of a run is taken once. An event's own id, which its sender gave it or was given, is `event_id`: it
    stays the same when the event goes another way, into a topic or through a dead letter.
    """

    id: str
    kind: str
    number: int = 0
    name: str = ""
    body: bytes | None = None
    sender: str | None = None
    sent_at: float = 0.0
    expires_at: float | None = None
    policy: str = "discard"
    target: str | None = None
    offset: int = 0
    wants_reply: bool = False
    event_id: str | None = None


class RunResult(Struct, frozen=True, omit_defaults=True):
    """How something that was waited for came out, as it travels in a message."""

    status: RunStatus = RunStatus.SUCCEEDED
    result: bytes | None = None
    error: ErrorRecord | None = None


class TopicEvent(Struct, frozen=True, kw_only=True):
    """An event that is broadcast: to whom it may go (`delivery`), and whether its first reader takes it away.

    By its `id` a topic takes it once; `event_id` is its own, as in a `Message`.
    """

    topic: str
    id: str
    body: bytes | None
    sent_at: float
    delivery: str = "all"  # "after_wait", "after_create", "all"; "first" is "all" with consume
    consume: bool = True
    expires_at: float | None = None
    sender: str | None = None
    offset: int = 0  # its number in the topic, given when it is accepted
    event_id: str | None = None


class Subscription(Struct, frozen=True):
    """An open receive that also takes events of these topics; `target` is its generation and location."""

    target: str
    topics: tuple[str, ...]


class PublishedValue(Struct, frozen=True):
    """A value that a run shows under a key. Keys that begin with a tilde are perdure's own (replies)."""

    key: str
    value: bytes
    expires_at: float | None = None


class StreamItem(Struct, frozen=True, kw_only=True):
    """One item of a run's stream; `offset` counts from 0. A step's belong to one execution of it (`writer`)."""

    stream: str
    value: bytes
    location: str
    at: float
    attempt: int = 0
    writer: str = ""
    offset: int = 0
    superseded: bool = False


class DeadLetter(Struct, frozen=True, kw_only=True):
    """Something that could not be delivered or carried out, kept for a person."""

    id: str
    kind: str  # "event", "compensation", "poison", "schedule"
    at: float
    reason: str
    event_id: str | None = None
    event_name: str | None = None
    value: bytes | None = None
    original_target: str | None = None
    target_status: str | None = None
    target_ended_at: float | None = None
    sent_at: float | None = None


class WorkerRecord(Struct, frozen=True, kw_only=True):
    """A worker's sign of life and what it can execute: (workflow, version) pairs."""

    id: str
    pool: str
    workflows: tuple[tuple[str, int], ...]
    lease_until: float
    started_at: float
    node: str = ""  # identifies machine and process space, so that a dead neighbour is seen at once
    pid: int = 0
    fenced: bool = False


class Takeover(Struct, frozen=True):
    """What became of workers that were gone: how many there were, and how many of their runs were released."""

    workers: int = 0
    runs: int = 0


# --- what goes into a turn -----------------------------------------------------------------------------------------


# --- what comes out of a turn --------------------------------------------------------------------------------------


# --- queries -------------------------------------------------------------------------------------------------------


ChangeCallback = Callable[[frozenset[str] | None], None]
"""Called when runs changed in a way that others care about (due, mailed, ended); None: any run may have."""
