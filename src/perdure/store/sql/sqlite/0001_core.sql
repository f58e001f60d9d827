-- Runs, their histories and mail, and the workers that execute them.
--
-- A step's commit is one insert into `entries`: the unique (run_no, position) is the fence that lets one of two racing
-- turns win. The row of a run is touched only when its status, wait or owner changes. `wake_at` is the earliest moment
-- that anyone must look at a run; the index `runs_due` holds only runs that nobody owns, so that sleeping and finished
-- ones cost a claim nothing. Payloads (ANY) are text where they are readable and blobs where not; `history` is for
-- people.

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE runs (
    no          INTEGER PRIMARY KEY,  -- what entries and inbox refer to, shorter than the id
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
    run_attempt INTEGER NOT NULL,
    first_workflow TEXT,
    first_input ANY,
    result      ANY,
    error       TEXT,                 -- JSON, like tags, waits, held and drift
    parent      TEXT,
    tags        TEXT,
    begun_at    REAL,
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
    inbox_last  INTEGER NOT NULL,
    fence       INTEGER NOT NULL,     -- turns computed from before this position are refused
    mailed      INTEGER NOT NULL DEFAULT 0,  -- owned, and mail has come that the owner has not seen
    prune_at    REAL
) STRICT;

CREATE INDEX runs_due ON runs (pool, workflow, version, wake_at, id, shard)
    WHERE owner IS NULL AND wake_at IS NOT NULL AND ended_at IS NULL;
CREATE INDEX runs_owned ON runs (owner, mailed, id) WHERE owner IS NOT NULL;
CREATE INDEX runs_held ON runs (workflow, version) WHERE held IS NOT NULL;
CREATE INDEX runs_prunable ON runs (prune_at) WHERE prune_at IS NOT NULL AND ended_at IS NOT NULL;
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
    consumed_at REAL
) STRICT;

CREATE UNIQUE INDEX inbox_by_id ON inbox (run_no, id);
CREATE UNIQUE INDEX inbox_by_number ON inbox (run_no, number);
CREATE INDEX inbox_unread ON inbox (run_no, number) WHERE consumed_at IS NULL;

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

CREATE TABLE secrets (
    name  TEXT PRIMARY KEY,
    value BLOB NOT NULL
) STRICT, WITHOUT ROWID;
