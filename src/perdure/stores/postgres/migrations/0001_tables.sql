-- Tables: runs with their histories and inboxes, topics, workers, dead letters and signing keys.
--
-- A step's commit is one row in `entries`. Its position is the fence: the primary key lets one of two racing turns
-- win. The row of a run changes only with its status, wait or owner, so that a step updates no index of `runs`.
--
-- `runs.wake_at` is the earliest time at which a worker must process a run. The index `runs_due` contains only runs
-- without an owner, so that suspended and ended runs cost a claim nothing. Rows refer to each other by `pk`, without
-- foreign keys: a transaction that changes the rows of a run holds the lock on the run's row.
--
-- Text is compared byte by byte (COLLATE "C"), as Python compares it, whatever the collation of the database. The
-- columns error, waits, held and drift contain JSON as text, because jsonb cannot store a NUL that a message may
-- contain. The migration runs with the store's schema as its search_path.

CREATE TABLE meta (
    key   text PRIMARY KEY,
    value text NOT NULL
);

CREATE TABLE runs (
    pk                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- other tables refer to it
    id                text COLLATE "C" NOT NULL UNIQUE,
    workflow          text COLLATE "C" NOT NULL,
    version           bigint NOT NULL,
    input             bytea NOT NULL,
    created_at        float8 NOT NULL,
    created_by        text NOT NULL,
    seed              text NOT NULL,                   -- an integer that may have more than 63 bits
    pool              text COLLATE "C" NOT NULL,
    shard             integer NOT NULL,
    status            text COLLATE "C" NOT NULL,
    generation        integer NOT NULL,
    epoch             integer NOT NULL,
    run_attempt       integer NOT NULL,
    original_workflow text,
    original_input    bytea,
    result            bytea,
    error             text,
    parent            text COLLATE "C",
    attached          boolean NOT NULL,
    tags              jsonb NOT NULL,
    first_executed_at float8,
    updated_at        float8 NOT NULL,
    ended_at          float8,
    wake_at           float8,
    owner             text COLLATE "C",
    recoveries        integer NOT NULL DEFAULT 0,
    deadline_at       float8,
    retention         float8,
    waits             text,
    held              text,
    held_kind         text COLLATE "C",
    drift             text,
    last_message_no   bigint NOT NULL DEFAULT 0,
    fence             bigint NOT NULL DEFAULT 0,       -- turns computed from an earlier position are refused
    has_new_messages  boolean NOT NULL DEFAULT false,  -- owned, and the owner has not seen all messages
    prune_at          float8,
    unfinalized       boolean NOT NULL DEFAULT false,  -- ended, and finalization is pending
    orphaned_children boolean NOT NULL DEFAULT false   -- ended from outside: its children must be ended
) WITH (fillfactor = 80);

CREATE INDEX runs_due ON runs (pool, workflow, version, wake_at, id, shard)
    WHERE owner IS NULL AND wake_at IS NOT NULL AND ended_at IS NULL;
CREATE INDEX runs_owned ON runs (owner, id) WHERE owner IS NOT NULL;
CREATE INDEX runs_with_new_messages ON runs (owner, id) WHERE has_new_messages;
CREATE INDEX runs_held ON runs (workflow, version, held_kind) WHERE held_kind IS NOT NULL;
CREATE INDEX runs_prunable ON runs (prune_at) WHERE prune_at IS NOT NULL AND ended_at IS NOT NULL AND NOT unfinalized;
CREATE INDEX runs_unfinalized ON runs (ended_at, id) WHERE unfinalized;
CREATE INDEX runs_newest ON runs (created_at, id);
CREATE INDEX runs_by_status ON runs (status, created_at, id);
CREATE INDEX runs_by_parent ON runs (parent, created_at, id) WHERE parent IS NOT NULL;
CREATE INDEX runs_open_children ON runs (parent, id) WHERE attached AND ended_at IS NULL;

CREATE TABLE entries (
    run_pk      bigint NOT NULL,
    position    bigint NOT NULL,
    turn_id     text,           -- on the first row of a turn
    location    text COLLATE "C" NOT NULL,
    kind        text NOT NULL,  -- 'marker': the row of a turn without entries
    name        text NOT NULL,
    status      text NOT NULL,
    call_seq    bigint NOT NULL,
    ordinal     bigint NOT NULL,
    seq         bigint,
    value       bytea,
    error       text,
    attempts    integer NOT NULL,
    generation  integer NOT NULL,
    started_at  float8 NOT NULL,
    settled_at  float8,
    due_at      float8,
    fingerprint bytea,
    detail      bytea,
    PRIMARY KEY (run_pk, position)
);

CREATE VIEW history AS
    SELECT runs.id AS run, entries.*
    FROM entries JOIN runs ON runs.pk = entries.run_pk
    WHERE entries.kind <> 'marker';

CREATE TABLE inbox (
    run_pk       bigint NOT NULL,
    number       bigint NOT NULL,  -- counts messages in commit order
    id           text COLLATE "C" NOT NULL,
    kind         text NOT NULL,
    name         text NOT NULL,
    body         bytea,            -- NULL when consumed; the id is kept
    sender       text,
    sent_at      float8 NOT NULL,
    expires_at   float8,
    policy       text NOT NULL,
    target       text,
    topic_offset bigint NOT NULL,
    wants_reply  boolean NOT NULL,
    event_id     text,             -- of an event: stays when it is redirected
    consumed_at  float8,
    PRIMARY KEY (run_pk, number),
    UNIQUE (run_pk, id)
);

CREATE INDEX inbox_unread ON inbox (run_pk, number) WHERE consumed_at IS NULL;
CREATE INDEX inbox_assigned ON inbox (name, topic_offset) WHERE kind = 'assignment' AND consumed_at IS NULL;
CREATE INDEX inbox_consumed ON inbox (consumed_at) WHERE consumed_at IS NOT NULL AND kind IN ('event', 'assignment');

CREATE TABLE observers (
    run_pk   bigint NOT NULL,
    observer text COLLATE "C" NOT NULL,
    target   text COLLATE "C" NOT NULL
);

CREATE INDEX observers_of_run ON observers (run_pk, observer);

CREATE TABLE published (
    run_pk     bigint NOT NULL,
    key        text COLLATE "C" NOT NULL,
    value      bytea NOT NULL,
    expires_at float8,
    PRIMARY KEY (run_pk, key)
);

CREATE INDEX published_expiring ON published (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE stream_items (
    run_pk     bigint NOT NULL,
    stream     text COLLATE "C" NOT NULL,
    at_offset  bigint NOT NULL,
    value      bytea NOT NULL,
    location   text COLLATE "C" NOT NULL,
    at         float8 NOT NULL,
    attempt    integer NOT NULL,
    writer     text COLLATE "C" NOT NULL,
    writer_seq bigint,           -- counts the writer's items in all streams; identifies a repeated call
    epoch      bigint NOT NULL,  -- of the run: locations are unique in an epoch
    superseded boolean NOT NULL DEFAULT false,
    PRIMARY KEY (run_pk, stream, at_offset)
);

CREATE INDEX stream_items_of_writer ON stream_items (run_pk, writer, writer_seq) WHERE writer_seq IS NOT NULL;

-- The row of a topic is its lock. Offsets are given, and events are matched with subscriptions, while it is held.
CREATE TABLE topics (
    pk          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text COLLATE "C" NOT NULL UNIQUE,
    last_offset bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

CREATE TABLE subscriptions (
    pk       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- the oldest has the lowest
    topic_pk bigint NOT NULL,
    run_pk   bigint NOT NULL,
    target   text COLLATE "C" NOT NULL
);

CREATE INDEX subscriptions_of_topic ON subscriptions (topic_pk, pk);
CREATE INDEX subscriptions_of_run ON subscriptions (run_pk);

-- An event waits for readers (queued), or is being assigned in pages (fan_out_cursor), or is in the inbox of its only
-- reader (assigned_to), or is deleted and only its id is kept (deleted_at).
CREATE TABLE topic_events (
    topic_pk          bigint NOT NULL,
    event_offset      bigint NOT NULL,
    id                text COLLATE "C" NOT NULL,
    body              bytea,
    sent_at           float8 NOT NULL,
    expires_at        float8,
    delivery          text NOT NULL,
    consume           boolean NOT NULL,
    sender            text,
    event_id          text,
    last_subscription bigint NOT NULL DEFAULT 0,  -- the newest one at publication
    fan_out_cursor    bigint,                     -- the last subscription checked; NULL: all
    queued            boolean NOT NULL DEFAULT false,
    assigned_to       bigint,
    deleted_at        float8,
    PRIMARY KEY (topic_pk, event_offset),
    UNIQUE (topic_pk, id)
) WITH (fillfactor = 80);

CREATE INDEX topic_events_queued ON topic_events (topic_pk, event_offset) WHERE queued;
CREATE INDEX topic_events_unfinished ON topic_events (topic_pk, event_offset) WHERE fan_out_cursor IS NOT NULL;
CREATE INDEX topic_events_expiring ON topic_events (expires_at) WHERE deleted_at IS NULL AND expires_at IS NOT NULL;
CREATE INDEX topic_events_deleted ON topic_events (deleted_at) WHERE deleted_at IS NOT NULL;

CREATE TABLE workers (
    id          text COLLATE "C" PRIMARY KEY,
    pool        text NOT NULL,
    workflows   text NOT NULL,                  -- JSON pairs of name and version
    lease_until float8 NOT NULL,
    started_at  float8 NOT NULL,
    host        text NOT NULL,
    pid         bigint NOT NULL,
    fenced      boolean NOT NULL DEFAULT false  -- the store refuses all its writes
) WITH (fillfactor = 50);

CREATE TABLE dead_letters (
    pk              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id              text COLLATE "C" NOT NULL UNIQUE,
    kind            text NOT NULL,
    at              float8 NOT NULL,
    reason          text NOT NULL,
    event_id        text,
    event_name      text,
    value           bytea,
    original_target text,
    target_status   text,
    target_ended_at float8,
    sent_at         float8
);

CREATE INDEX dead_letters_by_kind ON dead_letters (kind, pk);
CREATE INDEX dead_letters_by_event ON dead_letters (event_name, pk) WHERE event_name IS NOT NULL;

CREATE TABLE signing_keys (
    name       text COLLATE "C" NOT NULL,
    number     bigint NOT NULL,
    created_at float8 NOT NULL,
    secret     bytea NOT NULL,
    PRIMARY KEY (name, number)
);
