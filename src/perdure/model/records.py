"""Stored records: a run, its history, its messages, and the values it publishes.

All records are frozen. This module knows no clock, no store and no workflow code. Times are seconds since the epoch;
the client converts them to aware datetimes. Payloads are encoded bytes. `gc=False` marks records that are created per
turn and cannot be part of a reference cycle, so that the garbage collector skips them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from msgspec import Struct

from perdure.model.tags import Tags


class RunStatus(StrEnum):
    """Status of a run; the last three are terminal."""

    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    terminal: bool  # An attribute, not a property: every turn reads it.

    def __init__(self, value: str) -> None:
        self.terminal = value in ("succeeded", "failed", "cancelled")


class EntryStatus(StrEnum):
    """Status of an entry. CANCELLED: the workflow requested the operation and then cancelled it."""

    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ErrorRecord(Struct, frozen=True, gc=False, omit_defaults=True):
    """An exception as data. `fields` is set when the original type can be reconstructed (`raises`).

    `dropped` names the fields that could not be encoded. `rollback`: the error is a `RollbackError`. `retry_after` are
    the seconds that the exception requests before the next attempt.
    """

    type: str
    message: str
    traceback: str = ""
    location: str | None = None
    qualified: str = ""
    fields: bytes | None = None
    cause: ErrorRecord | None = None
    dropped: tuple[str, ...] = ()
    rollback: bool = False
    retry_after: float | None = None


# --- a run and its history --------------------------------------------------------------------------------------


class Entry(Struct, frozen=True, gc=False):
    """One record of a run's history. A changed entry is written again at a new position; the latest version counts.

    `call_seq` orders all entries of the run by their first request. `ordinal` orders the entries of one scope (-1: the
    entry has no order in its scope). `seq` orders completions. `attempts` counts the attempts of a step that started;
    `due_at` is when the next attempt, or the end of a sleep, is due. The value of a pending step is what its next
    attempt needs of earlier ones (`AttemptNotes`).
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
    """One condition that a run waits for: a timer, retry, event, child, deferred, ..."""

    kind: str
    location: str | None = None
    name: str | None = None
    until: float | None = None


CODE_HOLD_KINDS = ("diverged", "deadlock", "livelock")
"""Kinds of holds that the code of the workflow causes. The same code would hold the run again."""
HOLD_KINDS = (
    *CODE_HOLD_KINDS,
    *("poison", "step_failed", "paused", "sealed", "unstorable", "imported", "internal_error"),
)


class Hold(Struct, frozen=True, omit_defaults=True):
    """Why a run is held: it stays suspended until a person, or a worker with compatible code, resumes it.

    `line` is the line of user code that caused it. `fingerprints` are those of the code that could not continue the
    run from its present history, latest last; such code does not try it again.
    """

    kind: str  # one of HOLD_KINDS
    reason: str
    location: str | None = None
    recorded: str | None = None
    asked: str | None = None
    line: str | None = None
    fingerprints: tuple[str, ...] = ()


class RunRecord(Struct, frozen=True, gc=False, kw_only=True):
    """The stored state of a run, without its history and inbox."""

    id: str
    workflow: str
    version: int
    input: bytes
    created_at: float
    created_by: str  # Unique per start call: a retry after a lost response recognizes its own run.
    seed: int
    pool: str = "default"
    shard: int = 0
    status: RunStatus = RunStatus.PENDING
    generation: int = 0  # Incremented when the history is continued, retried or rewound.
    epoch: int = 0  # Incremented when the run is continued or retried; scopes random values and deferred tokens.
    run_attempt: int = 1  # Attempt of the whole run, if its workflow has a retry policy.
    # Set when the run continues as another workflow or payload: the id still identifies the original start.
    original_workflow: str | None = None
    original_input: bytes | None = None
    result: bytes | None = None
    error: ErrorRecord | None = None
    parent: str | None = None
    attached: bool = False  # An attached child ends with its parent.
    tags: Tags = {}
    first_executed_at: float | None = None  # When this generation first executed; start of the workflow clock.
    updated_at: float = 0.0
    ended_at: float | None = None
    wake_at: float | None = None
    owner: str | None = None
    recoveries: int = 0
    deadline_at: float | None = None
    retention: float | None = None
    waits: tuple[Wait, ...] = ()
    held: Hold | None = None
    drift: tuple[str, ...] = ()  # Locations whose arguments differed on a replay.
    last_message_no: int = 0
    fence: int = 0  # The store rejects turns computed from an earlier position.
    # A run of a queue keeps the queue, partition and priority of its start. `waiting`: it has a place that no admission
    # has taken. While it waits no write sets `wake_at`. `gate` is the queue, while the queue limits runs per worker.
    queue: str | None = None
    partition: str = ""
    priority: int = 0
    waiting: bool = False
    gate: str = ""
    ancestor_queues: tuple[str, ...] = ()  # queues in which an ancestor, through attached children, holds a slot

    @property
    def current_hold(self) -> Hold | None:
        """Why the run is held now. `held` is also set while a held run is executed again, until its next suspension."""
        return self.held if self.status is RunStatus.SUSPENDED else None


class Message(Struct, frozen=True, gc=False, kw_only=True):
    """One external input of a run, numbered in the order in which the store accepted it. By `kind`:

    cancel, resume   from a person or a parent run; the body of a cancel is its reason, encoded
    pause            from a person; its body is the reason, encoded
    tag              from a person; its body are changes of the run's tags (`encode_tag_changes`)
    event            a targeted event; `name` is its event type, `policy` applies if the run ends without reading it:
                     "discard", "dead_letter", "broadcast", or "broadcast:<delivery>:<consume|keep>"
    assignment       a topic event assigned to the receive at `target`; `offset` is its offset in the topic
    child            the run awaited at `target` has ended; `name` is its id, `body` a `RunResult`
    deferred         a completed deferred; `name` is its name, `body` a `RunResult` whose status is unused

    `target` is the generation and location of the waiting entry; the run ignores a message whose target is missing.
    `id` makes delivery to a run idempotent. `event_id` is the id of the event itself: the sender chose it or received
    it, and it stays the same when the event moves to a topic or through a dead letter.
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
    """The result of an awaited run or deferred, as the body of a message."""

    status: RunStatus = RunStatus.SUCCEEDED
    result: bytes | None = None
    error: ErrorRecord | None = None


class TopicEvent(Struct, frozen=True, kw_only=True):
    """A broadcast event: which receives are eligible (`delivery`), and whether the first reader consumes it.

    `id` makes publishing to the topic idempotent; `event_id` is the id of the event itself, as in `Message`.
    """

    topic: str
    id: str
    body: bytes | None
    sent_at: float
    delivery: str = "all"  # "after_wait", "after_create", "all"; "first" is "all" with consume
    consume: bool = True
    expires_at: float | None = None
    sender: str | None = None
    offset: int = 0  # Offset in the topic, assigned by the store.
    event_id: str | None = None


class Subscription(Struct, frozen=True):
    """An open receive that accepts events of these topics; `target` is its generation and location."""

    target: str
    topics: tuple[str, ...]


class PublishedValue(Struct, frozen=True):
    """A value that a run publishes under a key. Keys that start with a tilde are reserved (replies)."""

    key: str
    value: bytes
    expires_at: float | None = None


class StreamItem(Struct, frozen=True, kw_only=True):
    """One item of a stream; offsets start at 0. An item that a step wrote belongs to one execution (`writer`)."""

    stream: str
    value: bytes
    location: str
    at: float
    attempt: int = 0
    writer: str = ""
    offset: int = 0
    superseded: bool = False


class DeadLetter(Struct, frozen=True, kw_only=True):
    """An event or action that failed permanently, stored until a person handles it."""

    id: str
    kind: str  # "event", "compensation", "poison", "schedule", "misfit" (completion of a deferred), "expired_wait"
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
    """A registered worker: its lease, and the (workflow, version) pairs that it can execute."""

    id: str
    pool: str
    workflows: tuple[tuple[str, int], ...]
    lease_until: float
    started_at: float
    host: str = ""  # Identifies host and process namespace: a dead process on this host is detected at once.
    pid: int = 0
    fenced: bool = False


class SigningKey(Struct, frozen=True):
    """A random secret of the store that signs the tokens of deferreds. Older keys stay valid for verification."""

    number: int
    created_at: float
    secret: bytes


class Takeover(Struct, frozen=True):
    """Result of a takeover: how many workers were fenced, and how many of their runs were released."""

    workers: int = 0
    runs: int = 0


ChangeCallback = Callable[[frozenset[str] | None], None]
"""Callback for change hints: ids of runs that became due, got messages or ended; None: anything may have changed.

A hint also names queues (`queue_hint`) that need an admission, and kinds of documents (`document_hint`) of which one
became due earlier. A run whose id equals such a name causes a look-up too many, nothing else.
"""
ProgressCallback = Callable[[], None]


def queue_hint(queue: str) -> str:
    """Return the name of a queue in a change hint."""
    return f"queue:{queue}"


def document_hint(kind: str) -> str:
    """Return the name of a kind of documents in a change hint."""
    return f"document:{kind}"
