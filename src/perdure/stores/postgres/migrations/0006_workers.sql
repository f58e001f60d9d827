-- Claims, removal of workers, pruning and signing keys: what needs more than one statement.
--
-- A claim makes a worker the owner of due runs. A run has one owner at a time, because the claim locks the run's row
-- and checks `owner IS NULL` under that lock. A claim locks the worker's row with FOR KEY SHARE. So `remove_worker`,
-- which takes FOR UPDATE, waits for running claims and then sees their runs.

-- Wait until no other transaction holds the earliest of these due runs. Returns whether one of them is still due.
-- Called only by `claim_due`, whose settings it uses.
CREATE FUNCTION wait_for_due(
    due_by float8, of_pool text, names text[], versions bigint[], shards integer[], lim bigint)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    due bigint[];
BEGIN
    due := ARRAY(
        SELECT r.pk FROM unnest(names, versions) AS w (name, version)
        JOIN runs r ON r.pool = of_pool AND r.workflow = w.name AND r.version = w.version AND r.wake_at <= due_by
             AND r.owner IS NULL AND r.ended_at IS NULL AND (shards IS NULL OR r.shard = ANY (shards))
        ORDER BY r.wake_at, r.id LIMIT lim);
    PERFORM FROM runs r
    WHERE r.pk = ANY (due) AND r.wake_at <= due_by AND r.owner IS NULL AND r.ended_at IS NULL
    ORDER BY r.id FOR NO KEY UPDATE;  -- the order of commits, and no other run is locked: no deadlock
    RETURN FOUND;
END;
$$;

-- Make a worker the owner of due runs, earliest first.
--
-- Rows that other transactions hold are skipped, so that claims do not wait for commits. If nothing else is due, the
-- claim waits for those rows once and tries again. Otherwise a run that a commit was just changing would stay due
-- until the next sweep, because no further change hint follows.
CREATE FUNCTION claim_due(
    claimer text, now float8, due_by float8, of_pool text, names text[], versions bigint[], shards integer[],
    lim bigint)
RETURNS TABLE (id text, last_message_no bigint, "position" bigint) LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    claimed bigint[];
BEGIN
    PERFORM FROM workers w WHERE w.id = claimer AND NOT w.fenced FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    FOR attempt IN 1..2 LOOP
        SELECT array_agg(first.pk ORDER BY first.wake_at, first.id) INTO claimed
        FROM (
            SELECT due.pk, due.wake_at, due.id
            FROM (SELECT DISTINCT w.name, w.version FROM unnest(names, versions) AS w (name, version)) AS w
            CROSS JOIN LATERAL (
                SELECT r.pk, r.wake_at, r.id FROM runs r
                WHERE r.pool = of_pool AND r.workflow = w.name AND r.version = w.version AND r.wake_at <= due_by
                      AND r.owner IS NULL AND r.ended_at IS NULL AND (shards IS NULL OR r.shard = ANY (shards))
                ORDER BY r.wake_at, r.id LIMIT lim
                FOR NO KEY UPDATE SKIP LOCKED
            ) AS due
            ORDER BY due.wake_at, due.id LIMIT lim
        ) AS first;
        EXIT WHEN claimed IS NOT NULL OR attempt = 2;
        EXIT WHEN NOT wait_for_due(due_by, of_pool, names, versions, shards, lim);
    END LOOP;
    UPDATE runs r
    SET owner = claimer, status = 'running', wake_at = NULL, has_new_messages = false,
        first_executed_at = coalesce(r.first_executed_at, claim_due.now), updated_at = claim_due.now
    WHERE r.pk = ANY (claimed);
    RETURN QUERY
    SELECT r.id, r.last_message_no, position_of(r)
    FROM unnest(claimed) WITH ORDINALITY AS t (pk, nth) JOIN runs r ON r.pk = t.pk ORDER BY t.nth;
END;
$$;

-- Remove a worker. A worker that still owns runs is fenced instead: without its row no takeover would find the runs.
CREATE FUNCTION remove_worker(removed text) RETURNS void LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM FROM workers w WHERE w.id = removed FOR UPDATE;  -- waits for transactions that give it runs
    IF EXISTS (SELECT FROM runs r WHERE r.owner = removed) THEN
        UPDATE workers w SET fenced = true WHERE w.id = removed;
    ELSE
        DELETE FROM workers w WHERE w.id = removed;
    END IF;
END;
$$;

-- Delete a page of ended runs, expired values and events, and ids of consumed events. Returns the number of deleted
-- runs.
CREATE FUNCTION prune_page(now float8, lim bigint, remember float8) RETURNS bigint LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    pruned bigint[];
BEGIN
    SELECT array_agg(d.pk) INTO pruned
    FROM (
        SELECT r.pk FROM runs r
        WHERE r.prune_at <= prune_page.now AND r.ended_at IS NOT NULL AND NOT r.unfinalized
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
        DELETE FROM runs x WHERE x.pk = ANY (pruned);
    END IF;
    DELETE FROM published x WHERE x.ctid = ANY (ARRAY(
        SELECT p.ctid FROM published p WHERE p.expires_at <= prune_page.now LIMIT lim FOR UPDATE SKIP LOCKED));
    UPDATE topic_events x
    SET assigned_to = NULL, queued = false, fan_out_cursor = NULL, body = NULL, deleted_at = prune_page.now
    WHERE x.ctid = ANY (ARRAY(
        SELECT e.ctid FROM topic_events e
        WHERE e.expires_at <= prune_page.now AND e.deleted_at IS NULL LIMIT lim FOR UPDATE SKIP LOCKED));
    DELETE FROM topic_events x WHERE x.ctid = ANY (ARRAY(
        SELECT e.ctid FROM topic_events e
        WHERE e.deleted_at <= prune_page.now - remember LIMIT lim FOR UPDATE SKIP LOCKED));
    DELETE FROM inbox x WHERE x.ctid = ANY (ARRAY(
        SELECT i.ctid FROM inbox i
        WHERE i.consumed_at <= prune_page.now - remember AND i.kind IN ('event', 'assignment')
              AND (i.kind = 'event' OR NOT EXISTS (  -- as long as the event exists, it must count as seen
                  SELECT FROM topic_events e JOIN topics t ON t.pk = e.topic_pk
                  WHERE t.name = i.name AND e.event_offset = i.topic_offset AND e.deleted_at IS NULL))
        LIMIT lim FOR UPDATE OF i SKIP LOCKED));
    RETURN coalesce(cardinality(pruned), 0);
END;
$$;

-- The keys of a name, oldest first. Creates the first one from this secret if there is none.
CREATE FUNCTION signing_keys_of(wanted text, now float8, secret bytea) RETURNS SETOF signing_keys LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO signing_keys (name, number, created_at, secret) SELECT wanted, 1, now, signing_keys_of.secret
    WHERE NOT EXISTS (SELECT FROM signing_keys k WHERE k.name = wanted)
    ON CONFLICT DO NOTHING;
    RETURN QUERY SELECT * FROM signing_keys k WHERE k.name = wanted ORDER BY k.number;
END;
$$;
