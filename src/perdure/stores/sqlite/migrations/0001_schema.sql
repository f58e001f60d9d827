-- Runs, their histories and mail, the topics that they listen to, what they show, and the workers that execute them.
--
-- A step's commit is one insert into `entries`: the unique (run_no, position) is the fence that lets one of two racing
-- turns win. The row of a run is touched only when its status, wait or owner changes. `wake_at` is the earliest moment
-- that anyone must look at a run; the index `runs_due` holds only runs that nobody owns, so that sleeping and finished
-- ones cost a claim nothing. What happens seldom has a partial index over the few rows that it is about, so that a
-- plain run is in none of them. Payloads (ANY) are text where they are readable and blobs where not; `history` is for
-- people.

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE runs (
    no          INTEGER PRIMARY KEY,  -- what all that it owns refers to, shorter than the id
    id          TEXT NOT NULL UNIQUE,
    workflow    TEXT NOT NULL,
    version     INTEGER NOT NULL,
    input       ANY NOT NULL,
    created_at  REAL NOT NULL,
    created_by  TEXT NOT NULL,
    seed        TEXT NOT NULL,        -- a number that may have more than 63 bits
    pool        TEXT NOT NULL,
    shard       INTEGER NOT NULL,
    status      TEXT NOT NULL,
    generation  INTEGER NOT NULL,
    epoch       INTEGER NOT NULL,
    run_attempt INTEGER NOT NULL,
    original_workflow TEXT,
    original_input ANY,
    result      ANY,
    error       TEXT,                 -- JSON, like tags, waits, held and drift
    parent      TEXT,
    attached    INTEGER NOT NULL,
    tags        TEXT,
    first_executed_at    REAL,
    updated_at  REAL NOT NULL,
    ended_at    REAL,
    wake_at     REAL,
    owner       TEXT,
    recoveries  INTEGER NOT NULL,
    deadline_at REAL,
    retention   REAL,
    waits       TEXT,
    held        TEXT,
    drift       TEXT,
    last_message_no  INTEGER NOT NULL,
    fence       INTEGER NOT NULL,     -- turns computed from before this position are refused
    mailed      INTEGER NOT NULL DEFAULT 0,  -- owned, and mail has come that the owner has not seen
    prune_at    REAL,
    observed    INTEGER NOT NULL DEFAULT 0,  -- has rows in observers
    listens     INTEGER NOT NULL DEFAULT 0,  -- has, or once had, rows in subscriptions
    unsettled   INTEGER NOT NULL DEFAULT 0,  -- ended, and still owes something
    orphans     INTEGER NOT NULL DEFAULT 0   -- was terminated, and its attached children have not been told
) STRICT;

CREATE INDEX runs_due ON runs (pool, workflow, version, wake_at, id, shard)
    WHERE owner IS NULL AND wake_at IS NOT NULL AND ended_at IS NULL;
CREATE INDEX runs_owned ON runs (owner, mailed, id) WHERE owner IS NOT NULL;
CREATE INDEX runs_held ON runs (workflow, version) WHERE held IS NOT NULL;
CREATE INDEX runs_prunable ON runs (prune_at)
    WHERE prune_at IS NOT NULL AND ended_at IS NOT NULL AND unsettled = 0;
CREATE INDEX runs_unsettled ON runs (ended_at, id) WHERE unsettled = 1;
CREATE INDEX runs_open_children ON runs (parent, id) WHERE attached = 1 AND ended_at IS NULL;
CREATE INDEX runs_newest ON runs (created_at, id);
CREATE INDEX runs_by_status ON runs (status, created_at, id);
CREATE INDEX runs_by_parent ON runs (parent, created_at, id) WHERE parent IS NOT NULL;

CREATE TABLE entries (
    run_no      INTEGER NOT NULL,
    position    INTEGER NOT NULL,
    turn_id     TEXT,                 -- on the first row of a turn
    location    TEXT NOT NULL,
    kind        TEXT NOT NULL,        -- 'marker': the row of a turn without entries
    name        TEXT NOT NULL,
    status      TEXT NOT NULL,
    asked       INTEGER NOT NULL,
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

CREATE UNIQUE INDEX entries_by_position ON entries (run_no, position);
CREATE INDEX entries_markers ON entries (run_no, position) WHERE kind = 'marker';

CREATE VIEW history AS
    SELECT runs.id AS run, entries.*
    FROM entries JOIN runs ON runs.no = entries.run_no
    WHERE entries.kind <> 'marker';

CREATE TABLE inbox (
    run_no      INTEGER NOT NULL,
    number      INTEGER NOT NULL,     -- the order in which messages were committed
    id          TEXT NOT NULL,
    kind        TEXT NOT NULL,
    name        TEXT NOT NULL,
    body        ANY,                  -- dropped once consumed; the id is remembered
    sender      TEXT,
    sent_at     REAL NOT NULL,
    expires_at  REAL,
    policy      TEXT NOT NULL,
    target      TEXT,
    place       INTEGER NOT NULL,     -- of an assignment: the event's number in the topic of this name
    wants_reply INTEGER NOT NULL,
    event_id    TEXT,                 -- of an event: its own, whichever way it came
    consumed_at REAL
) STRICT;

CREATE UNIQUE INDEX inbox_by_id ON inbox (run_no, id);
CREATE UNIQUE INDEX inbox_by_number ON inbox (run_no, number);
CREATE INDEX inbox_unread ON inbox (run_no, number) WHERE consumed_at IS NULL;
CREATE INDEX inbox_forgettable ON inbox (consumed_at) WHERE consumed_at IS NOT NULL AND kind = 'event';
CREATE INDEX inbox_assignments ON inbox (name, place, consumed_at) WHERE kind = 'assignment';

CREATE TABLE observers (
    run_no   INTEGER NOT NULL,        -- whose end is to be told
    observer TEXT NOT NULL,           -- the id of a run, perhaps of another store
    target   TEXT NOT NULL,
    PRIMARY KEY (run_no, observer, target)
) STRICT, WITHOUT ROWID;

-- Topics. An event is offered to `subscriptions` in the order of their numbers, which are never given twice. It is
-- `queued` while a subscription to come may have it. One that its first reader takes away is `assigned_to` one run while
-- it lies unread in that inbox. What nobody can have any more is gone: only its id and place are kept, for a while. A
-- run has seen an event if its inbox has an assignment of it, read or unread. Of events that every run may read, a run
-- that comes back need not look at those up to its floor again: it has seen them or may not have them.

CREATE TABLE topics (
    name       TEXT PRIMARY KEY,
    last_offset INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE topic_events (
    topic       TEXT NOT NULL,
    place       INTEGER NOT NULL,
    id          TEXT NOT NULL,
    body        ANY,
    sent_at     REAL NOT NULL,
    delivery    TEXT NOT NULL,
    consume     INTEGER NOT NULL,
    expires_at  REAL,
    sender      TEXT,
    event_id    TEXT,
    bound       INTEGER NOT NULL,      -- the last subscription that stood when it was published
    fan_out_cursor    INTEGER,               -- the last subscription that it was offered to, while there are more
    queued      INTEGER NOT NULL,
    assigned_to INTEGER,
    deleted_at     REAL
) STRICT;

CREATE UNIQUE INDEX topic_events_by_place ON topic_events (topic, place);
CREATE UNIQUE INDEX topic_events_by_id ON topic_events (topic, id);
CREATE INDEX topic_events_queued ON topic_events (topic, consume, place, expires_at) WHERE queued = 1;
CREATE INDEX topic_events_held ON topic_events (topic, place) WHERE deleted_at IS NULL;
CREATE INDEX topic_events_unfinished ON topic_events (topic, place) WHERE fan_out_cursor IS NOT NULL;
CREATE INDEX topic_events_expiring ON topic_events (expires_at)
    WHERE expires_at IS NOT NULL AND deleted_at IS NULL;
CREATE INDEX topic_events_gone ON topic_events (deleted_at) WHERE deleted_at IS NOT NULL;

CREATE TABLE topic_cursors (
    run_no INTEGER NOT NULL,
    topic  TEXT NOT NULL,
    place  INTEGER NOT NULL,
    PRIMARY KEY (run_no, topic)
) STRICT, WITHOUT ROWID;

CREATE TABLE subscriptions (
    no     INTEGER PRIMARY KEY AUTOINCREMENT,  -- who has stood longer has the lower one
    topic  TEXT NOT NULL,
    run_no INTEGER NOT NULL,
    target TEXT NOT NULL
) STRICT;

CREATE INDEX subscriptions_by_topic ON subscriptions (topic, no, run_no);
CREATE UNIQUE INDEX subscriptions_by_target ON subscriptions (run_no, target, topic);

-- What runs show.

CREATE TABLE published (
    run_no     INTEGER NOT NULL,
    key        TEXT NOT NULL,
    value      ANY NOT NULL,
    expires_at REAL,
    PRIMARY KEY (run_no, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX published_expiring ON published (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE stream_items (
    run_no     INTEGER NOT NULL,
    stream     TEXT NOT NULL,
    offset     INTEGER NOT NULL,
    value      ANY NOT NULL,
    location   TEXT NOT NULL,
    at         REAL NOT NULL,
    attempt    INTEGER NOT NULL,
    writer     TEXT NOT NULL,
    nth        INTEGER NOT NULL,      -- of all that its writer has written
    epoch      INTEGER NOT NULL,      -- of the run: a location of another one is another place
    superseded INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_no, stream, offset)
) STRICT, WITHOUT ROWID;

CREATE INDEX stream_items_by_location ON stream_items (run_no, location);
CREATE INDEX stream_items_by_writer ON stream_items (run_no, writer, nth);

CREATE TABLE workers (
    id          TEXT PRIMARY KEY,
    pool        TEXT NOT NULL,
    workflows   TEXT NOT NULL,        -- JSON pairs of name and version
    lease_until REAL NOT NULL,
    started_at  REAL NOT NULL,
    node        TEXT NOT NULL,
    pid         INTEGER NOT NULL,
    gone        INTEGER NOT NULL DEFAULT 0  -- nothing that it commits is taken any more
) STRICT, WITHOUT ROWID;

CREATE TABLE dead_letters (
    no              INTEGER PRIMARY KEY AUTOINCREMENT,
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

CREATE INDEX dead_letters_by_kind ON dead_letters (kind, no);
CREATE INDEX dead_letters_by_event ON dead_letters (event_name, no);

CREATE TABLE keys (
    name    TEXT NOT NULL,
    number  INTEGER NOT NULL,
    made_at REAL NOT NULL,
    secret  BLOB NOT NULL,
    PRIMARY KEY (name, number)
) STRICT, WITHOUT ROWID;
