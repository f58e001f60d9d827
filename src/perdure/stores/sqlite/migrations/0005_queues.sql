-- Work queues: places of runs that wait or hold a slot, and the partitions of each queue.
--
-- * A run of a queue has one row in `places` from its creation to its end, in the same commits. A place waits, is
--   delayed (`eligible_at` is set), or holds a slot (`held`). Limits are counted from the places that are held.
-- * While a run waits, no write makes it due: a CHECK refuses the write.
-- * `partitions` counts the places of a partition and has what the last admission stored. A queue without partitions
--   has one, named ''. A partition is ready if it has eligible places and fewer slots than its limit, from `ready_at`.
-- * Place numbers and versions grow. They come from `counters` and from the queue's row.

CREATE TABLE queues (
    pk        INTEGER PRIMARY KEY,
    name      TEXT NOT NULL UNIQUE,
    version   INTEGER NOT NULL,
    declared  TEXT NOT NULL,          -- JSON, like override and paused
    override  TEXT NOT NULL,
    paused    TEXT,
    state     BLOB NOT NULL,          -- of the last admission, like the next three
    taken     INTEGER NOT NULL,
    is_full   INTEGER NOT NULL,
    last_turn INTEGER NOT NULL        -- the highest turn of a partition that an admission has set
) STRICT;

CREATE TABLE places (
    run_pk      INTEGER PRIMARY KEY,
    queue_pk    INTEGER NOT NULL,
    partition   TEXT NOT NULL,
    priority    INTEGER NOT NULL,
    number      INTEGER NOT NULL,     -- the order of the places of one partition and priority
    since       REAL NOT NULL,
    held        INTEGER NOT NULL CHECK (held IN (0, 1)),
    admitted_at REAL,
    eligible_at REAL,
    expires_at  REAL,
    latest_at   REAL,
    dedupe      TEXT,
    joined_by   TEXT                  -- `created_by` of the last start that changed the place by joining it
) STRICT;

CREATE INDEX places_waiting ON places (queue_pk, partition, priority, number) WHERE held = 0 AND eligible_at IS NULL;
CREATE INDEX places_delayed ON places (queue_pk, eligible_at, number) WHERE held = 0 AND eligible_at IS NOT NULL;
CREATE INDEX places_delayed_in_order ON places (queue_pk, partition, priority, number)
    WHERE held = 0 AND eligible_at IS NOT NULL;
CREATE INDEX places_expiring ON places (queue_pk, expires_at) WHERE held = 0 AND expires_at IS NOT NULL;
CREATE INDEX places_held ON places (queue_pk, partition, priority, number) WHERE held = 1;
CREATE INDEX places_by_key ON places (queue_pk, dedupe) WHERE dedupe IS NOT NULL;

CREATE TABLE partitions (
    queue_pk    INTEGER NOT NULL,
    partition   TEXT NOT NULL,
    waiting     INTEGER NOT NULL,     -- places that are not delayed
    delayed     INTEGER NOT NULL,
    held        INTEGER NOT NULL,
    turn        INTEGER NOT NULL,
    state       BLOB NOT NULL,        -- of the last take, like the next four
    taken       INTEGER NOT NULL,
    slot_limit  INTEGER,
    ready_at    REAL,
    keep_until  REAL,
    override    TEXT,                 -- JSON
    lacks_only_time INTEGER AS (waiting > 0 AND (slot_limit IS NULL OR held < slot_limit)),
    unused_from REAL AS (
        CASE WHEN waiting > 0 OR delayed > 0 OR held > 0 OR override IS NOT NULL THEN NULL
             WHEN keep_until IS NOT NULL THEN keep_until
             WHEN length(state) = 0 THEN 0.0 END),
    PRIMARY KEY (queue_pk, partition)
) STRICT, WITHOUT ROWID;

CREATE INDEX partitions_ready ON partitions (queue_pk, turn, partition) WHERE lacks_only_time = 1 AND ready_at IS NULL;
CREATE INDEX partitions_timed ON partitions (queue_pk, ready_at, turn, partition)
    WHERE lacks_only_time = 1 AND ready_at IS NOT NULL;
CREATE INDEX partitions_unused ON partitions (unused_from) WHERE unused_from IS NOT NULL;

ALTER TABLE runs ADD COLUMN queue TEXT;
ALTER TABLE runs ADD COLUMN partition TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN waiting INTEGER NOT NULL DEFAULT 0
    CHECK (waiting = 0 OR (waiting = 1 AND wake_at IS NULL AND owner IS NULL AND ended_at IS NULL));
ALTER TABLE runs ADD COLUMN gate TEXT NOT NULL DEFAULT '';  -- the queue, while it limits runs per worker
ALTER TABLE runs ADD COLUMN ancestor_queues TEXT;           -- JSON

CREATE INDEX runs_by_queue ON runs (queue, created_at, id) WHERE queue IS NOT NULL;

-- A claim names the gates for which the worker has free slots.
DROP INDEX runs_due;
CREATE INDEX runs_due ON runs (pool, gate, workflow, version, wake_at, id, shard)
    WHERE owner IS NULL AND wake_at IS NOT NULL AND ended_at IS NULL;
