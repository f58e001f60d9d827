-- Documents that perdure stores for itself, and the search for runs by tags and fields.
--
-- * `counters` has numbers that are never given twice: the versions of documents, and later the places in queues.
-- * `run_tags` has one row per tag of a run. Its indexes find the newest runs with a value, and the runs of a range.
--   A run without tags has no row. The rows change in the same commit as `runs.tags`.

CREATE TABLE counters (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE documents (
    kind       TEXT NOT NULL,
    id         TEXT NOT NULL,
    version    INTEGER NOT NULL,
    body       ANY NOT NULL,
    write_id   TEXT NOT NULL,         -- of the write that stored it: a repeated call is recognised
    due_at     REAL,
    expires_at REAL
) STRICT;

CREATE UNIQUE INDEX documents_by_id ON documents (kind, id);
CREATE INDEX documents_due ON documents (kind, due_at, id) WHERE due_at IS NOT NULL;
CREATE INDEX documents_expiring ON documents (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE run_tags (
    run_pk     INTEGER NOT NULL,
    key        TEXT NOT NULL,
    kind       TEXT NOT NULL,         -- 'text', 'number', 'boolean' or 'time'
    text       TEXT NOT NULL,         -- canonical: equality compares it
    number     REAL,                  -- of a number or a time: ranges compare it
    created_at REAL NOT NULL,         -- of the run
    PRIMARY KEY (run_pk, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX run_tags_by_text ON run_tags (key, text, created_at, run_pk, kind);
CREATE INDEX run_tags_by_number ON run_tags (key, number, created_at, run_pk) WHERE number IS NOT NULL;

-- Tags were plain strings before.
INSERT OR IGNORE INTO run_tags (run_pk, key, kind, text, created_at)
    SELECT runs.pk, tag.key, 'text', tag.value, runs.created_at
    FROM runs, json_each(CASE WHEN json_valid(runs.tags) THEN runs.tags END) AS tag
    WHERE runs.tags IS NOT NULL AND tag.type = 'text';

CREATE INDEX runs_by_workflow ON runs (workflow, created_at, id);
CREATE INDEX runs_by_end ON runs (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX runs_by_error ON runs (CASE WHEN json_valid(error) THEN error ->> '$.type' END, created_at, id)
    WHERE error IS NOT NULL;
