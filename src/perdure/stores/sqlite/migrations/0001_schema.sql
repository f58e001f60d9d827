-- Schema of the SQLite store.
--
-- Tables
--   meta                     settings of the file: the number of shards
--   runs                     one row per run: status, owner, wake-up time
--   entries                  the histories of runs; `history` is a view of them for people
--   inbox                    messages to runs: events, child results, assignments, control messages
--   observers                runs to notify when a run ends
--   topics, topic_events     topics and their events
--   subscriptions            open receives of runs that wait for events of a topic
--   topic_cursors            per run and topic: the offset up to which the run has read
--   published, stream_items  values that runs publish, items that runs and steps stream
--   workers                  live and fenced workers with their leases
--   dead_letters             messages that could not be delivered or processed
--   signing_keys             keys that sign the tokens of deferreds
--
-- Invariants
-- * A step's commit is one insert into `entries`. The unique (run_pk, position) is the compare-and-set: of two turns
--   computed from the same position, one is committed. The row of a run changes only with its status, wait or owner.
-- * Positions up to `runs.fence` are taken, also if their rows were deleted. A position is never given twice.
-- * `runs.wake_at` is the earliest time at which a worker must process a run without an owner. The index `runs_due`
--   contains only such runs, so suspended, owned and ended runs cost a claim nothing.
-- * Rare states have a partial index over the few rows that have them. A run without them is in none of these indexes.
-- * `inbox.number` follows the order of commits. A consumed message loses its body; its id stays for deduplication.
-- * The rows that a run owns refer to `runs.pk`, which is shorter than the id.
-- * Payloads (ANY) are stored as text if they are valid text without NUL bytes, otherwise as blobs.

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE runs (
    pk                INTEGER PRIMARY KEY,
    id                TEXT NOT NULL UNIQUE,
    workflow          TEXT NOT NULL,
    version           INTEGER NOT NULL,
    input             ANY NOT NULL,
    created_at        REAL NOT NULL,
    created_by        TEXT NOT NULL,
    seed              TEXT NOT NULL,      -- a number that may have more than 63 bits
    pool              TEXT NOT NULL,
    shard             INTEGER NOT NULL,
    status            TEXT NOT NULL,
    generation        INTEGER NOT NULL,
    epoch             INTEGER NOT NULL,
    run_attempt       INTEGER NOT NULL,
    original_workflow TEXT,
    original_input    ANY,
    result            ANY,
    error             TEXT,               -- JSON, like tags, waits, held and drift
    parent            TEXT,
    attached          INTEGER NOT NULL,
    tags              TEXT,
    first_executed_at REAL,
    updated_at        REAL NOT NULL,
    ended_at          REAL,
    wake_at           REAL,
    owner             TEXT,
    recoveries        INTEGER NOT NULL,
    deadline_at       REAL,
    retention         REAL,
    waits             TEXT,
    held              TEXT,
    drift             TEXT,
    last_message_no   INTEGER NOT NULL,
    fence             INTEGER NOT NULL,
    has_new_messages  INTEGER NOT NULL DEFAULT 0,  -- has an owner that has not seen all messages
    prune_at          REAL,
    has_observers     INTEGER NOT NULL DEFAULT 0,  -- has rows in observers
    has_subscriptions INTEGER NOT NULL DEFAULT 0,  -- has or had rows in subscriptions
    unfinalized       INTEGER NOT NULL DEFAULT 0,  -- has ended and needs finalization
    orphaned_children INTEGER NOT NULL DEFAULT 0   -- was terminated; its attached children have not been ended yet
) STRICT;

CREATE INDEX runs_due ON runs (pool, workflow, version, wake_at, id, shard)
    WHERE owner IS NULL AND wake_at IS NOT NULL AND ended_at IS NULL;
CREATE INDEX runs_owned ON runs (owner, has_new_messages, id) WHERE owner IS NOT NULL;
CREATE INDEX runs_held ON runs (workflow, version) WHERE held IS NOT NULL;
CREATE INDEX runs_prunable ON runs (prune_at)
    WHERE prune_at IS NOT NULL AND ended_at IS NOT NULL AND unfinalized = 0;
CREATE INDEX runs_unfinalized ON runs (ended_at, id) WHERE unfinalized = 1;
CREATE INDEX runs_open_children ON runs (parent, id) WHERE attached = 1 AND ended_at IS NULL;
CREATE INDEX runs_newest ON runs (created_at, id);
CREATE INDEX runs_by_status ON runs (status, created_at, id);
CREATE INDEX runs_by_parent ON runs (parent, created_at, id) WHERE parent IS NOT NULL;

CREATE TABLE entries (
    run_pk      INTEGER NOT NULL,
    position    INTEGER NOT NULL,
    turn_id     TEXT,                 -- on the first row of a turn
    location    TEXT NOT NULL,
    kind        TEXT NOT NULL,        -- 'marker': the row of a turn without entries
    name        TEXT NOT NULL,
    status      TEXT NOT NULL,
    call_seq    INTEGER NOT NULL,
    ordinal     INTEGER NOT NULL,
    seq         INTEGER,
    value       ANY,
    error       TEXT,
    attempts    INTEGER NOT NULL,
    generation  INTEGER NOT NULL,
    started_at  REAL NOT NULL,
    settled_at  REAL,
    due_at      REAL,
    fingerprint ANY,
    detail      ANY
) STRICT;

CREATE UNIQUE INDEX entries_by_position ON entries (run_pk, position);
CREATE INDEX entries_markers ON entries (run_pk, position) WHERE kind = 'marker';

CREATE VIEW history AS
    SELECT runs.id AS run, entries.*
    FROM entries JOIN runs ON runs.pk = entries.run_pk
    WHERE entries.kind <> 'marker';

CREATE TABLE inbox (
    run_pk       INTEGER NOT NULL,
    number       INTEGER NOT NULL,
    id           TEXT NOT NULL,
    kind         TEXT NOT NULL,
    name         TEXT NOT NULL,
    body         ANY,
    sender       TEXT,
    sent_at      REAL NOT NULL,
    expires_at   REAL,
    policy       TEXT NOT NULL,
    target       TEXT,
    topic_offset INTEGER NOT NULL,    -- of an assignment: the event's offset in the topic `name`
    wants_reply  INTEGER NOT NULL,
    event_id     TEXT,                -- of an event: the same id for a direct and a topic delivery
    consumed_at  REAL
) STRICT;

CREATE UNIQUE INDEX inbox_by_id ON inbox (run_pk, id);
CREATE UNIQUE INDEX inbox_by_number ON inbox (run_pk, number);
CREATE INDEX inbox_unread ON inbox (run_pk, number) WHERE consumed_at IS NULL;
CREATE INDEX inbox_consumed_events ON inbox (consumed_at) WHERE consumed_at IS NOT NULL AND kind = 'event';
CREATE INDEX inbox_assignments ON inbox (name, topic_offset, consumed_at) WHERE kind = 'assignment';

CREATE TABLE observers (
    run_pk   INTEGER NOT NULL,        -- the observed run
    observer TEXT NOT NULL,           -- the id of the run to notify; it may be in another store
    target   TEXT NOT NULL,
    PRIMARY KEY (run_pk, observer, target)
) STRICT, WITHOUT ROWID;

-- Topics. An event is offered to subscriptions in the order of `subscriptions.pk`, which is never reused. An event is
-- `queued` while a future subscription may receive it. A consumable event is `assigned_to` one run while it is unread
-- in that run's inbox. A deleted event keeps its id and offset for deduplication until it is pruned. A run has seen an
-- event if its inbox has an assignment of it, read or unread. `topic_cursors` saves a new subscription from scanning
-- the events that its run has seen or may not receive; it applies to events that every run may read.

CREATE TABLE topics (
    name        TEXT PRIMARY KEY,
    last_offset INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE topic_events (
    topic             TEXT NOT NULL,
    event_offset      INTEGER NOT NULL,
    id                TEXT NOT NULL,
    body              ANY,
    sent_at           REAL NOT NULL,
    delivery          TEXT NOT NULL,
    consume           INTEGER NOT NULL,
    expires_at        REAL,
    sender            TEXT,
    event_id          TEXT,
    last_subscription INTEGER NOT NULL,  -- the newest subscription at the time of publishing
    fan_out_cursor    INTEGER,           -- the last subscription it was offered to; NULL when the fan-out is finished
    queued            INTEGER NOT NULL,
    assigned_to       INTEGER,
    deleted_at        REAL
) STRICT;

CREATE UNIQUE INDEX topic_events_by_offset ON topic_events (topic, event_offset);
CREATE UNIQUE INDEX topic_events_by_id ON topic_events (topic, id);
CREATE INDEX topic_events_queued ON topic_events (topic, consume, event_offset, expires_at) WHERE queued = 1;
CREATE INDEX topic_events_stored ON topic_events (topic, event_offset) WHERE deleted_at IS NULL;
CREATE INDEX topic_events_unfinished ON topic_events (topic, event_offset) WHERE fan_out_cursor IS NOT NULL;
CREATE INDEX topic_events_expiring ON topic_events (expires_at)
    WHERE expires_at IS NOT NULL AND deleted_at IS NULL;
CREATE INDEX topic_events_deleted ON topic_events (deleted_at) WHERE deleted_at IS NOT NULL;

CREATE TABLE topic_cursors (
    run_pk      INTEGER NOT NULL,
    topic       TEXT NOT NULL,
    read_offset INTEGER NOT NULL,
    PRIMARY KEY (run_pk, topic)
) STRICT, WITHOUT ROWID;

CREATE TABLE subscriptions (
    pk     INTEGER PRIMARY KEY AUTOINCREMENT,  -- ascending by age: the oldest subscription is the lowest
    topic  TEXT NOT NULL,
    run_pk INTEGER NOT NULL,
    target TEXT NOT NULL
) STRICT;

CREATE INDEX subscriptions_by_topic ON subscriptions (topic, pk, run_pk);
CREATE UNIQUE INDEX subscriptions_by_target ON subscriptions (run_pk, target, topic);

CREATE TABLE published (
    run_pk     INTEGER NOT NULL,
    key        TEXT NOT NULL,
    value      ANY NOT NULL,
    expires_at REAL,
    PRIMARY KEY (run_pk, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX published_expiring ON published (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE stream_items (
    run_pk     INTEGER NOT NULL,
    stream     TEXT NOT NULL,
    offset     INTEGER NOT NULL,
    value      ANY NOT NULL,
    location   TEXT NOT NULL,
    at         REAL NOT NULL,
    attempt    INTEGER NOT NULL,
    writer     TEXT NOT NULL,
    writer_seq INTEGER NOT NULL,      -- the number of the item among all items of its writer
    epoch      INTEGER NOT NULL,      -- of the run: the same location in another epoch is another call
    superseded INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_pk, stream, offset)
) STRICT, WITHOUT ROWID;

CREATE INDEX stream_items_by_location ON stream_items (run_pk, location);
CREATE INDEX stream_items_by_writer ON stream_items (run_pk, writer, writer_seq);

CREATE TABLE workers (
    id          TEXT PRIMARY KEY,
    pool        TEXT NOT NULL,
    workflows   TEXT NOT NULL,        -- JSON pairs of name and version
    lease_until REAL NOT NULL,
    started_at  REAL NOT NULL,
    host        TEXT NOT NULL,
    pid         INTEGER NOT NULL,
    fenced      INTEGER NOT NULL DEFAULT 0  -- the store rejects all writes from this worker
) STRICT, WITHOUT ROWID;

CREATE TABLE dead_letters (
    pk              INTEGER PRIMARY KEY AUTOINCREMENT,
    id              TEXT NOT NULL UNIQUE,
    kind            TEXT NOT NULL,
    at              REAL NOT NULL,
    reason          TEXT NOT NULL,
    event_id        TEXT,
    event_name      TEXT,
    value           ANY,
    original_target TEXT,
    target_status   TEXT,
    target_ended_at REAL,
    sent_at         REAL
) STRICT;

CREATE INDEX dead_letters_by_kind ON dead_letters (kind, pk);
CREATE INDEX dead_letters_by_event ON dead_letters (event_name, pk);

CREATE TABLE signing_keys (
    name       TEXT NOT NULL,
    number     INTEGER NOT NULL,
    created_at REAL NOT NULL,
    secret     BLOB NOT NULL,
    PRIMARY KEY (name, number)
) STRICT, WITHOUT ROWID;
