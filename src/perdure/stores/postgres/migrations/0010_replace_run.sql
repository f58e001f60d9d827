-- A new run may replace an ended one under the same id: `start` with `if_exists="restart"` or `"restart_ended"`.

-- Replace a run that has ended and is finalized by a new run. Returns NULL without a change if the run is missing, open,
-- not finalized, or another generation than the caller has read.
--
-- The row is updated, not deleted and inserted: a transaction that waits for its lock must find the run. Positions and
-- message numbers of the old run stay taken, so that a late write to the old generation changes nothing.
CREATE FUNCTION replace_run(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    r runs;
    last bigint;
    worker text;
    now float8 := (w->>'created_at')::float8;
BEGIN
    SELECT * INTO r FROM runs x WHERE x.id = w->>'id' FOR NO KEY UPDATE;
    IF r.pk IS NULL OR r.unfinalized OR NOT terminal(r.status)
       OR (r.created_by, r.generation) <> (w->'replaces'->>'created_by', (w->'replaces'->>'generation')::integer)
    THEN
        RETURN NULL;
    END IF;
    last := position_of(r);
    SELECT x.id INTO worker FROM workers x WHERE x.id = w->>'owner' AND NOT x.fenced FOR KEY SHARE;
    DELETE FROM entries x WHERE x.run_pk = r.pk;
    DELETE FROM inbox x WHERE x.run_pk = r.pk;
    DELETE FROM observers x WHERE x.run_pk = r.pk;
    DELETE FROM published x WHERE x.run_pk = r.pk;
    DELETE FROM stream_items x WHERE x.run_pk = r.pk;
    DELETE FROM subscriptions x WHERE x.run_pk = r.pk;
    PERFORM insert_message(r.pk, r.last_message_no + m.nth, m.message)
    FROM jsonb_array_elements(coalesce(w->'inbox', '[]')) WITH ORDINALITY AS m (message, nth);
    INSERT INTO observers (run_pk, observer, target)
    SELECT r.pk, w->>'observer', w->>'target' WHERE w->>'observer' IS NOT NULL;
    UPDATE runs x
    SET workflow = w->>'workflow', version = (w->>'version')::bigint, input = decode(w->>'input', 'base64'),
        created_at = now, created_by = w->>'created_by', seed = w->>'seed', pool = w->>'pool',
        shard = (w->>'shard')::integer, status = CASE WHEN worker IS NULL THEN 'pending' ELSE 'running' END,
        generation = (w->>'generation')::integer, epoch = (w->>'epoch')::integer,
        run_attempt = (w->>'run_attempt')::integer, original_workflow = w->>'original_workflow',
        original_input = decode(w->>'original_input', 'base64'), result = NULL, error = NULL, parent = w->>'parent',
        attached = (w->>'attached')::boolean, tags = w->'tags',
        first_executed_at = CASE WHEN worker IS NOT NULL THEN now END,
        updated_at = now, ended_at = NULL,
        wake_at = CASE WHEN worker IS NULL THEN coalesce((w->>'wake_at')::float8, now) END,
        owner = worker, recoveries = 0, deadline_at = (w->>'deadline_at')::float8,
        retention = (w->>'retention')::float8, waits = NULL, held = NULL, held_kind = NULL, drift = NULL,
        last_message_no = r.last_message_no + coalesce(jsonb_array_length(w->'inbox'), 0), fence = last + 1,
        has_new_messages = false, prune_at = NULL, unfinalized = false, orphaned_children = false
    WHERE x.pk = r.pk;
    RETURN result_of('created', flag => worker IS NOT NULL, changed => CASE WHEN worker IS NULL THEN ARRAY[r.id] END);
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
    IF w ? 'replaces' THEN
        replaced := replace_run(w);
        IF replaced.result_kind IS NOT NULL THEN
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
