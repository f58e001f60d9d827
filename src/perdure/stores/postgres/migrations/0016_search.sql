-- Search: an index of tags, and indexes by which queries find runs of a workflow, an error or an end.
--
-- `run_tags` has a row for each tag of a run, in the form of perdure.model.tags.IndexedTag. Clients send these rows
-- beside the tags, because only Python knows the canonical text of a number. Rows of text are derived from the tags; so
-- the tags that processes of earlier versions send are indexed, too.

CREATE TABLE run_tags (
    run_pk     bigint NOT NULL,
    key        text COLLATE "C" NOT NULL,
    kind       text NOT NULL,
    text       text COLLATE "C" NOT NULL,
    number     float8,
    created_at float8 NOT NULL,  -- of the run
    PRIMARY KEY (run_pk, key)
);

-- The type of an error that is stored as JSON. It matches text, because jsonb cannot contain every message.
CREATE FUNCTION error_type(error text) RETURNS text LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN substring(error from '^\{"type":"([^"\\]*)"');

CREATE INDEX runs_by_workflow ON runs (workflow, created_at, id);
CREATE INDEX runs_by_error ON runs (error_type(error), created_at, id) WHERE error IS NOT NULL;
CREATE INDEX runs_ended ON runs (ended_at) WHERE ended_at IS NOT NULL;

-- The indexes above have locked the table of runs, so that no run is created before this migration is complete.
INSERT INTO run_tags (run_pk, key, kind, text, created_at)
SELECT r.pk, t.key, 'text', t.value, r.created_at
FROM runs r CROSS JOIN LATERAL jsonb_each_text(r.tags) AS t WHERE r.tags <> '{}';

CREATE INDEX run_tags_by_text ON run_tags (key, text, created_at, run_pk);
CREATE INDEX run_tags_by_number ON run_tags (key, number, created_at, run_pk) WHERE number IS NOT NULL;

-- The rows of the index of tags. `given` has `tags`, and `tag_rows` (key, kind, text, number) unless all are text.
CREATE FUNCTION tags_to_index(given jsonb) RETURNS TABLE (key text, kind text, text text, number float8)
LANGUAGE sql IMMUTABLE
BEGIN ATOMIC
    SELECT t->>0, t->>1, t->>2, (t->>3)::float8 FROM jsonb_array_elements(given->'tag_rows') AS t
    UNION ALL
    SELECT t.key, 'text', t.value, NULL
    FROM jsonb_each_text(CASE WHEN NOT given ? 'tag_rows' THEN given->'tags' END) AS t;
END;

-- Index the tags of one run, which has none in the index.
CREATE FUNCTION index_tags(of_run bigint, created_at float8, given jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO run_tags (run_pk, key, kind, text, number, created_at)
    SELECT of_run, t.key, t.kind, t.text, t.number, index_tags.created_at FROM tags_to_index(given) AS t;
END;
$$;

-- Set tags of a run and remove others.
CREATE FUNCTION change_tags(run runs, changes jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    removed text[] := ARRAY(SELECT jsonb_array_elements_text(changes->'removed'));
BEGIN
    UPDATE runs r SET tags = (r.tags - removed) || (changes->'tags') WHERE r.pk = run.pk;
    DELETE FROM run_tags t WHERE t.run_pk = run.pk AND (t.key = ANY (removed) OR changes->'tags' ? t.key);
    PERFORM index_tags(run.pk, run.created_at, changes);
END;
$$;

CREATE FUNCTION write_tags(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
BEGIN
    IF r.owner IS NOT NULL THEN
        RETURN result_of('superseded');
    END IF;
    PERFORM change_tags(r, w->'changes');
    RETURN result_of('committed');
END;
$$;

-- --- writes that have tags -----------------------------------------------------------------------------------------

-- Create runs, given in order of their ids, unless their ids are taken. Returns the created runs, and those of them
-- without an owner. A worker becomes owner only if it is not fenced; its row is locked so that it is not removed
-- meanwhile. Only created runs are observed: rows of existing runs are not locked.
CREATE OR REPLACE FUNCTION add_runs(given jsonb, OUT created text[], OUT unowned text[]) LANGUAGE plpgsql AS $$
BEGIN
    WITH added AS (
        INSERT INTO runs AS r (
            id, workflow, version, input, created_at, created_by, seed, pool, shard, status, generation, epoch,
            run_attempt, original_workflow, original_input, parent, attached, tags, first_executed_at, updated_at,
            wake_at, owner, deadline_at, retention)
        SELECT c->>'id', c->>'workflow', (c->>'version')::bigint, decode(c->>'input', 'base64'),
               (c->>'created_at')::float8, c->>'created_by', c->>'seed', c->>'pool', (c->>'shard')::integer,
               CASE WHEN o.owner IS NULL THEN 'pending' ELSE 'running' END, (c->>'generation')::integer,
               (c->>'epoch')::integer, (c->>'run_attempt')::integer, c->>'original_workflow',
               decode(c->>'original_input', 'base64'), c->>'parent', (c->>'attached')::boolean, c->'tags',
               CASE WHEN o.owner IS NOT NULL THEN (c->>'created_at')::float8 END, (c->>'created_at')::float8,
               CASE WHEN o.owner IS NULL THEN coalesce(c->>'wake_at', c->>'created_at')::float8 END, o.owner,
               (c->>'deadline_at')::float8, (c->>'retention')::float8
        FROM jsonb_array_elements(given) AS c
        LEFT JOIN LATERAL (
            SELECT w.id FROM workers w WHERE w.id = c->>'owner' AND NOT w.fenced FOR KEY SHARE) AS o (owner) ON true
        ON CONFLICT (id) DO NOTHING
        RETURNING r.id, r.owner
    )
    SELECT array_agg(a.id), array_agg(a.id) FILTER (WHERE a.owner IS NULL) INTO created, unowned FROM added a;
    IF given @? '$[*].tags.*' THEN
        INSERT INTO run_tags (run_pk, key, kind, text, number, created_at)
        SELECT r.pk, t.key, t.kind, t.text, t.number, r.created_at
        FROM jsonb_array_elements(given) AS c
        CROSS JOIN LATERAL (  -- looks up each one separately
            SELECT x.pk, x.id, x.created_at FROM runs x WHERE x.id = c->>'id' OFFSET 0
        ) AS r
        CROSS JOIN LATERAL tags_to_index(c) AS t
        WHERE cardinality(created) = jsonb_array_length(given) OR r.id = ANY (created);
    END IF;
    IF given @? '$[*].observer' THEN
        INSERT INTO observers (run_pk, observer, target)
        SELECT r.pk, c.observer, c.target
        FROM jsonb_to_recordset(given) AS c (id text, observer text, target text)
        CROSS JOIN LATERAL (  -- looks up each one separately
            SELECT x.pk, x.id FROM runs x WHERE x.id = c.id OFFSET 0
        ) AS r
        WHERE c.observer IS NOT NULL AND (cardinality(created) = jsonb_array_length(given) OR r.id = ANY (created));
    END IF;
END;
$$;

-- Create one run, or replace an ended one. A fork has a history and an inbox from the start.
CREATE OR REPLACE FUNCTION write_create(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    n record;
    received bigint := coalesce((w->>'received')::bigint, 0);
    r runs;
    replaced write_result;
BEGIN
    IF w ? 'by' AND NOT alive(w->>'by') THEN
        RETURN result_of('superseded');
    END IF;
    IF w ? 'replaces' THEN
        replaced := replace_run(w);
        IF replaced.result_kind IS NOT NULL THEN
            SELECT * INTO r FROM runs x WHERE x.id = w->>'id';
            DELETE FROM run_tags t WHERE t.run_pk = r.pk;
            PERFORM index_tags(r.pk, r.created_at, w);
            RETURN replaced;
        END IF;
    END IF;
    n := add_runs(jsonb_build_array(w));
    IF n.created IS NULL THEN
        SELECT * INTO r FROM runs x WHERE x.id = w->>'id';
        RETURN result_of(CASE WHEN r.created_by = w->>'created_by' THEN 'created_before' ELSE 'exists' END,
                        flag => coalesce(r.owner = w->>'owner', false));
    END IF;
    IF w ?| '{entries, inbox, received}' THEN
        SELECT * INTO r FROM runs x WHERE x.id = w->>'id';
        IF w ? 'entries' THEN
            PERFORM append_entries(r.pk, 0, NULL, w->'entries', r.created_at);
        END IF;
        PERFORM insert_message(r.pk, received + m.number, m.message)
        FROM jsonb_array_elements(coalesce(w->'inbox', '[]')) WITH ORDINALITY AS m (message, number);
        UPDATE runs x SET last_message_no = received + coalesce(jsonb_array_length(w->'inbox'), 0) WHERE x.pk = r.pk;
    END IF;
    RETURN result_of('created', flag => n.unowned IS NULL, changed => n.unowned);
END;
$$;

-- Apply the extras of a turn, which few turns have. Returns the runs that got released events.
CREATE OR REPLACE FUNCTION write_extras(run runs, extras jsonb, ends_generation boolean, now float8) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    woken text[];
BEGIN
    IF extras ? 'unsubscribe' THEN
        DELETE FROM subscriptions s
        WHERE s.run_pk = run.pk AND s.target IN (SELECT jsonb_array_elements_text(extras->'unsubscribe'));
    END IF;
    IF extras ? 'released_assignments' THEN
        woken := release_assignments(run.pk, extras->'released_assignments', now);
    END IF;
    IF extras ? 'subscribe' AND NOT ends_generation THEN
        PERFORM subscribe(run, wanted, now) FROM jsonb_array_elements(extras->'subscribe') AS wanted;
    END IF;
    IF extras ? 'published' THEN
        INSERT INTO published AS p (run_pk, key, value, expires_at)
        SELECT DISTINCT ON (v.item->>'key')
               run.pk, v.item->>'key', decode(v.item->>'value', 'base64'), (v.item->>'expires_at')::float8
        FROM jsonb_array_elements(extras->'published') WITH ORDINALITY AS v (item, nth)
        ORDER BY v.item->>'key', v.nth DESC
        ON CONFLICT ON CONSTRAINT published_pkey DO UPDATE SET value = excluded.value,
            expires_at = excluded.expires_at;
    END IF;
    IF extras ? 'streamed' THEN
        PERFORM add_items(run, extras->'streamed');
    END IF;
    IF extras ? 'dead_letters' THEN
        PERFORM add_dead_letters(extras->'dead_letters');
    END IF;
    IF extras ? 'changed_tags' THEN
        PERFORM change_tags(run, extras->'changed_tags');
    END IF;
    RETURN woken;
END;
$$;

-- Create a run that its worker owns. Declines if the id is taken or the worker is fenced. Its tags are text.
CREATE OR REPLACE FUNCTION fast_create_run(
    run_id text, workflow text, version bigint, input bytea, created_at float8, created_by text, pool text,
    shard integer, generation integer, epoch integer, run_attempt integer, original_workflow text, original_input bytea,
    parent text, attached boolean, owner text, deadline_at float8, retention float8, seed text, tags jsonb)
RETURNS boolean LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
#variable_conflict use_variable
DECLARE
    run_pk bigint;
BEGIN
    INSERT INTO runs AS r (
        id, workflow, version, input, created_at, created_by, seed, pool, shard, status, generation, epoch,
        run_attempt, original_workflow, original_input, parent, attached, tags, first_executed_at, updated_at, owner,
        deadline_at, retention)
    SELECT run_id, workflow, version, input, created_at, created_by, seed, pool, shard, 'running', generation, epoch,
           run_attempt, original_workflow, original_input, parent, attached, tags, created_at, created_at, w.id,
           deadline_at, retention
    FROM workers w WHERE w.id = owner AND NOT w.fenced FOR KEY SHARE
    ON CONFLICT DO NOTHING
    RETURNING r.pk INTO run_pk;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF tags <> '{}' THEN
        PERFORM index_tags(run_pk, created_at, jsonb_build_object('tags', tags));
    END IF;
    RETURN true;
END;
$$;

-- Apply one write. Most kinds require that their run exists.
CREATE OR REPLACE FUNCTION apply_write(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    r runs;
BEGIN
    CASE w->>'kind'
        WHEN 'turn' THEN RETURN write_turn(w);
        WHEN 'create' THEN RETURN write_create(w);
        WHEN 'publish' THEN RETURN write_publish(w);
        WHEN 'fan_out' THEN RETURN write_fan_out(w);
        WHEN 'replay' THEN RETURN write_replay(w);
        WHEN 'document' THEN RETURN write_document(w);
        ELSE SELECT * INTO r FROM runs WHERE id = w->>'run_id' FOR NO KEY UPDATE;
    END CASE;
    IF r.pk IS NULL THEN
        RETURN result_of(CASE w->>'kind' WHEN 'release' THEN 'superseded' ELSE 'missing' END);
    END IF;
    CASE w->>'kind'
        WHEN 'message' THEN RETURN write_message(w, r);
        WHEN 'end' THEN RETURN write_end(w, r);
        WHEN 'release' THEN RETURN write_release(w, r);
        WHEN 'observe' THEN RETURN write_observe(w, r);
        WHEN 'finalize' THEN RETURN write_finalize(w, r);
        WHEN 'rewind' THEN RETURN write_rewind(w, r);
        WHEN 'append_stream' THEN RETURN write_append_stream(w, r);
        WHEN 'supersede_stream' THEN RETURN write_supersede_stream(w, r);
        WHEN 'tags' THEN RETURN write_tags(w, r);
    END CASE;
END;
$$;

-- --- pruning -------------------------------------------------------------------------------------------------------

-- Delete a page of ended runs, expired values, events and documents, and ids of consumed events. Returns the ids of the
-- deleted runs.
CREATE FUNCTION prune_runs(now float8, lim bigint, remember float8) RETURNS text[] LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    pruned bigint[];
    ids text[];
BEGIN
    SELECT array_agg(d.pk), array_agg(d.id) INTO pruned, ids
    FROM (
        SELECT r.pk, r.id FROM runs r
        WHERE r.prune_at <= prune_runs.now AND r.ended_at IS NOT NULL AND NOT r.unfinalized
              AND NOT EXISTS (SELECT FROM runs above WHERE above.id = r.parent AND above.ended_at IS NULL)
        ORDER BY r.prune_at LIMIT lim
        FOR UPDATE SKIP LOCKED
    ) AS d;
    IF pruned IS NOT NULL THEN
        DELETE FROM entries x WHERE x.run_pk = ANY (pruned);
        DELETE FROM inbox x WHERE x.run_pk = ANY (pruned);
        DELETE FROM observers x WHERE x.run_pk = ANY (pruned);
        DELETE FROM published x WHERE x.run_pk = ANY (pruned);
        DELETE FROM stream_items x WHERE x.run_pk = ANY (pruned);
        DELETE FROM subscriptions x WHERE x.run_pk = ANY (pruned);
        DELETE FROM run_tags x WHERE x.run_pk = ANY (pruned);
        DELETE FROM runs x WHERE x.pk = ANY (pruned);
    END IF;
    DELETE FROM published x WHERE x.ctid = ANY (ARRAY(
        SELECT p.ctid FROM published p WHERE p.expires_at <= prune_runs.now LIMIT lim FOR UPDATE SKIP LOCKED));
    DELETE FROM documents x WHERE x.ctid = ANY (ARRAY(
        SELECT d.ctid FROM documents d WHERE d.expires_at <= prune_runs.now LIMIT lim FOR UPDATE SKIP LOCKED));
    UPDATE topic_events x
    SET assigned_to = NULL, queued = false, fan_out_cursor = NULL, body = NULL, deleted_at = prune_runs.now
    WHERE x.ctid = ANY (ARRAY(
        SELECT e.ctid FROM topic_events e
        WHERE e.expires_at <= prune_runs.now AND e.deleted_at IS NULL LIMIT lim FOR UPDATE SKIP LOCKED));
    DELETE FROM topic_events x WHERE x.ctid = ANY (ARRAY(
        SELECT e.ctid FROM topic_events e
        WHERE e.deleted_at <= prune_runs.now - remember LIMIT lim FOR UPDATE SKIP LOCKED));
    DELETE FROM inbox x WHERE x.ctid = ANY (ARRAY(
        SELECT i.ctid FROM inbox i
        WHERE i.consumed_at <= prune_runs.now - remember AND i.kind IN ('event', 'assignment')
              AND (i.kind = 'event' OR NOT EXISTS (  -- as long as the event exists, it must count as seen
                  SELECT FROM topic_events e JOIN topics t ON t.pk = e.topic_pk
                  WHERE t.name = i.name AND e.event_offset = i.topic_offset AND e.deleted_at IS NULL))
        LIMIT lim FOR UPDATE OF i SKIP LOCKED));
    RETURN coalesce(ids, '{}');
END;
$$;

-- Processes of earlier versions call it.
CREATE OR REPLACE FUNCTION prune_page(now float8, lim bigint, remember float8) RETURNS bigint LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN cardinality(prune_runs(now, lim, remember));
END;
$$;
