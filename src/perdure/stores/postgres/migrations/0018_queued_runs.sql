-- Runs of queues: the functions that create, change, end, claim and prune runs, with the rules of queues.
--
-- While a run waits, nothing makes it due but its admission, or its departure from the queue: the constraint
-- `runs_waiting_not_due` refuses a violation. Every function that ends a run calls `leave_queues`. A run without a queue
-- costs no further statement.

-- The hold of a waiting run with an unread pause (perdure.stores.queue_rules.PAUSED_IN_QUEUE).
CREATE FUNCTION paused_in_queue() RETURNS text LANGUAGE sql IMMUTABLE
RETURN '{"kind":"paused","reason":"paused while it waits in its queue"}';

-- Whether a new run may replace a run, as the caller has read it.
CREATE FUNCTION can_be_replaced(r runs, replaces jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN terminal((r).status) AND NOT (r).unfinalized
       AND ((r).created_by, (r).generation) = (replaces->>'created_by', (replaces->>'generation')::integer);

-- --- creation ------------------------------------------------------------------------------------------------------

-- Create runs, given in order of their ids, unless their ids are taken. Returns the created runs, and those of them that
-- are due without an owner. A worker becomes owner only if it is not fenced; its row is locked so that it is not removed
-- meanwhile. Only created runs are observed: rows of existing runs are not locked.
CREATE OR REPLACE FUNCTION add_runs(given jsonb, OUT created text[], OUT unowned text[]) LANGUAGE plpgsql AS $$
BEGIN
    WITH added AS (
        INSERT INTO runs AS r (
            id, workflow, version, input, created_at, created_by, seed, pool, shard, status, generation, epoch,
            run_attempt, original_workflow, original_input, parent, attached, tags, first_executed_at, updated_at,
            wake_at, owner, deadline_at, retention, queue, partition, priority, waiting, ancestor_queues)
        SELECT c->>'id', c->>'workflow', (c->>'version')::bigint, decode(c->>'input', 'base64'),
               (c->>'created_at')::float8, c->>'created_by', c->>'seed', c->>'pool', (c->>'shard')::integer,
               CASE WHEN o.owner IS NULL THEN 'pending' ELSE 'running' END, (c->>'generation')::integer,
               (c->>'epoch')::integer, (c->>'run_attempt')::integer, c->>'original_workflow',
               decode(c->>'original_input', 'base64'), c->>'parent', (c->>'attached')::boolean, c->'tags',
               CASE WHEN o.owner IS NOT NULL THEN (c->>'created_at')::float8 END, (c->>'created_at')::float8,
               CASE WHEN o.owner IS NULL AND NOT c ? 'place'
                    THEN coalesce(c->>'wake_at', c->>'created_at')::float8 END, o.owner,
               (c->>'deadline_at')::float8, (c->>'retention')::float8, c->'place'->>'queue',
               coalesce(c->'place'->>'partition', ''), coalesce((c->'place'->>'priority')::integer, 0), c ? 'place',
               c->>'ancestor_queues'
        FROM jsonb_array_elements(given) AS c
        LEFT JOIN LATERAL (
            SELECT w.id FROM workers w WHERE w.id = c->>'owner' AND NOT w.fenced AND NOT c ? 'place' FOR KEY SHARE
        ) AS o (owner) ON true
        ON CONFLICT (id) DO NOTHING
        RETURNING r.id, r.owner IS NULL AND NOT r.waiting AS is_due
    )
    SELECT array_agg(a.id), array_agg(a.id) FILTER (WHERE a.is_due) INTO created, unowned FROM added a;
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

-- Create runs that wait in queues: no other start of this batch has their keys. A created run gets no row in the result,
-- others as from `create_runs`. Places are in the order of the batch.
CREATE FUNCTION create_queued(given jsonb)
RETURNS TABLE (at integer, result_kind text, number bigint, flag boolean, label text, body bytea, note text)
LANGUAGE plpgsql AS $$
DECLARE
    open_queues text[];
    refused boolean;
    n record;
    all_created boolean;
BEGIN
    SELECT array_agg(x.name) FILTER (WHERE q.pk IS NOT NULL AND NOT q.is_full), bool_or(q.pk IS NULL OR q.is_full)
    INTO open_queues, refused
    FROM (SELECT DISTINCT c->'place'->>'queue' AS name FROM jsonb_array_elements(given) AS c) AS x
    LEFT JOIN queues q ON q.name = x.name;
    IF refused THEN
        RETURN QUERY
        SELECT (c->>'at')::integer, r.result_kind, r.number, r.flag, r.label, r.body, r.note
        FROM jsonb_array_elements(given) AS c
        CROSS JOIN LATERAL refuse_place(c) AS r
        WHERE NOT coalesce(c->'place'->>'queue' = ANY (open_queues), false)
              AND NOT EXISTS (SELECT FROM runs x WHERE x.id = c->>'id');
        RETURN QUERY
        SELECT (c->>'at')::integer, CASE WHEN r.created_by = c->>'created_by' THEN 'created_before' ELSE 'exists' END,
               NULL::bigint, coalesce(r.owner = c->>'owner', false), NULL, NULL::bytea, NULL
        FROM jsonb_array_elements(given) AS c
        CROSS JOIN LATERAL (SELECT * FROM runs x WHERE x.id = c->>'id' OFFSET 0) AS r
        WHERE NOT coalesce(c->'place'->>'queue' = ANY (open_queues), false);
        given := (
            SELECT jsonb_agg(c ORDER BY c->>'id' COLLATE "C") FROM jsonb_array_elements(given) AS c
            WHERE c->'place'->>'queue' = ANY (open_queues));
        IF given IS NULL THEN
            RETURN;
        END IF;
    END IF;
    n := add_runs(given);
    all_created := coalesce(cardinality(n.created), 0) = jsonb_array_length(given);
    IF n.created IS NOT NULL THEN
        PERFORM add_places(given, CASE WHEN NOT all_created THEN n.created END);
        RETURN QUERY
        SELECT -1, NULL, NULL::bigint, NULL::boolean, queue_hint(q.name), NULL::bytea, NULL
        FROM unnest(open_queues) AS q (name);
    END IF;
    IF NOT all_created THEN
        RETURN QUERY
        SELECT c.at, CASE WHEN r.created_by = c.created_by THEN 'created_before' ELSE 'exists' END, NULL::bigint,
               coalesce(r.owner = c.owner, false), NULL, NULL::bytea, NULL
        FROM jsonb_to_recordset(given) AS c (at integer, id text, created_by text, owner text)
        LEFT JOIN LATERAL (SELECT * FROM runs x WHERE x.id = c.id OFFSET 0) AS r ON true  -- none if it was just pruned
        WHERE NOT coalesce(c.id = ANY (n.created), false);
    END IF;
END;
$$;

-- Add the places of many new runs; `created` are those that were created, NULL for all.
CREATE FUNCTION add_places(given jsonb, created text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    WITH added AS (
        INSERT INTO places AS p (
            run_pk, queue_pk, partition, priority, number, since, eligible_at, expires_at, dedupe, latest_at)
        SELECT o.pk, o.queue_pk, o.place->>'partition', (o.place->>'priority')::integer, nextval('place_numbers'),
               o.created_at, (o.place->>'eligible_at')::float8, (o.place->>'expires_at')::float8, o.place->>'dedupe',
               (o.place->>'latest_at')::float8
        FROM (
            SELECT r.pk, r.created_at, q.pk AS queue_pk, c->'place' AS place
            FROM jsonb_array_elements(given) AS c
            CROSS JOIN LATERAL (SELECT x.pk, x.created_at FROM runs x WHERE x.id = c->>'id' OFFSET 0) AS r
            CROSS JOIN LATERAL (SELECT x.pk FROM queues x WHERE x.name = c->'place'->>'queue' OFFSET 0) AS q
            WHERE created IS NULL OR c->>'id' = ANY (created)
            ORDER BY (c->>'at')::integer OFFSET 0
        ) AS o
        RETURNING p.queue_pk, p.partition, p.eligible_at
    )
    UPDATE partitions p SET waiting = p.waiting + a.waiting, delayed = p.delayed + a.delayed
    FROM (
        SELECT l.row, g.waiting, g.delayed
        FROM (
            SELECT x.queue_pk, x.partition, count(*) FILTER (WHERE x.eligible_at IS NULL) AS waiting,
                   count(*) FILTER (WHERE x.eligible_at IS NOT NULL) AS delayed
            FROM added x GROUP BY x.queue_pk, x.partition
        ) AS g
        CROSS JOIN LATERAL (
            SELECT y.ctid FROM partitions y WHERE y.queue_pk = g.queue_pk AND y.partition = g.partition OFFSET 0
        ) AS l (row)
        OFFSET 0
    ) AS a
    WHERE p.ctid = a.row AND p.is_counted;
END;
$$;

-- Replace a run that has ended and is finalized by a new run. Returns NULL without a change if the run is missing, open,
-- not finalized, or another generation than the caller has read.
--
-- The row is updated, not deleted and inserted: a transaction that waits for its lock must find the run. Positions and
-- message numbers of the old run stay taken, so that a late write to the old generation changes nothing.
CREATE OR REPLACE FUNCTION replace_run(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    r runs;
    last bigint;
    worker text;
    now float8 := (w->>'created_at')::float8;
BEGIN
    SELECT * INTO r FROM runs x WHERE x.id = w->>'id' FOR NO KEY UPDATE;
    IF r.pk IS NULL OR NOT can_be_replaced(r, w->'replaces') THEN
        RETURN NULL;
    END IF;
    last := position_of(r);
    SELECT x.id INTO worker FROM workers x WHERE x.id = w->>'owner' AND NOT x.fenced AND NOT w ? 'place' FOR KEY SHARE;
    DELETE FROM entries x WHERE x.run_pk = r.pk;
    DELETE FROM inbox x WHERE x.run_pk = r.pk;
    DELETE FROM observers x WHERE x.run_pk = r.pk;
    DELETE FROM published x WHERE x.run_pk = r.pk;
    DELETE FROM stream_items x WHERE x.run_pk = r.pk;
    DELETE FROM subscriptions x WHERE x.run_pk = r.pk;
    DELETE FROM run_tags x WHERE x.run_pk = r.pk;
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
        wake_at = CASE WHEN worker IS NULL AND NOT w ? 'place' THEN coalesce((w->>'wake_at')::float8, now) END,
        owner = worker, recoveries = 0, deadline_at = (w->>'deadline_at')::float8,
        retention = (w->>'retention')::float8, waits = NULL, held = NULL, held_kind = NULL, drift = NULL,
        last_message_no = r.last_message_no + coalesce(jsonb_array_length(w->'inbox'), 0), fence = last + 1,
        has_new_messages = false, prune_at = NULL, unfinalized = false, orphaned_children = false,
        queue = w->'place'->>'queue', partition = coalesce(w->'place'->>'partition', ''),
        priority = coalesce((w->'place'->>'priority')::integer, 0), waiting = w ? 'place', gate = '',
        ancestor_queues = w->>'ancestor_queues'
    WHERE x.pk = r.pk;
    PERFORM index_tags(r.pk, now, w);
    IF w ? 'place' THEN
        RETURN result_of('created', flag => false, changed => ARRAY[add_place(r.pk, w->'place', now)]);
    END IF;
    RETURN result_of('created', flag => worker IS NOT NULL, changed => CASE WHEN worker IS NULL THEN ARRAY[r.id] END);
END;
$$;

-- Create one run, or replace an ended one. A fork has a history and an inbox from the start.
CREATE OR REPLACE FUNCTION write_create(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    n record;
    received bigint := coalesce((w->>'received')::bigint, 0);
    r runs;
    refused write_result;
    replaced write_result;
BEGIN
    IF w ? 'by' AND NOT alive(w->>'by') THEN
        RETURN result_of('superseded');
    END IF;
    IF w ? 'place' THEN
        SELECT * INTO r FROM runs x WHERE x.id = w->>'id';
        IF r.pk IS NULL OR can_be_replaced(r, w->'replaces') THEN  -- the id is checked first
            refused := refuse_place(w);
            IF refused.result_kind IS NOT NULL THEN
                RETURN refused;
            END IF;
        END IF;
    END IF;
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
    IF w ?| '{entries, inbox, received, place}' THEN
        SELECT * INTO r FROM runs x WHERE x.id = w->>'id';
        IF w ? 'entries' THEN
            PERFORM append_entries(r.pk, 0, NULL, w->'entries', r.created_at);
        END IF;
        PERFORM insert_message(r.pk, received + m.number, m.message)
        FROM jsonb_array_elements(coalesce(w->'inbox', '[]')) WITH ORDINALITY AS m (message, number);
        IF w ?| '{inbox, received}' THEN
            UPDATE runs x SET last_message_no = received + coalesce(jsonb_array_length(w->'inbox'), 0)
            WHERE x.pk = r.pk;
        END IF;
    END IF;
    IF w ? 'place' THEN
        RETURN result_of('created', flag => false, changed => ARRAY[add_place(r.pk, w->'place', r.created_at)]);
    END IF;
    RETURN result_of('created', flag => n.unowned IS NULL, changed => n.unowned);
END;
$$;

-- --- turns and ends ------------------------------------------------------------------------------------------------

-- Commit a turn. In a larger batch, turns that only append entries, consume messages and patch the run are applied by
-- `commit_batch` instead. A single turn of any kind is applied here, so the common case must be cheap: a statement
-- costs about 15 us and an expression 1 us.
CREATE OR REPLACE FUNCTION write_turn(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    base bigint := (w->>'base')::bigint;
    seen bigint := (w->>'seen')::bigint;
    now float8 := (w->>'now')::float8;
    added jsonb := w->'entries';
    ends_generation boolean := w ? 'restart' OR terminal(coalesce(w->'patch'->>'status', ''));
    run record;
    before runs;
    last bigint;
    is_alive boolean;
    unread boolean;
    changed text[];
BEGIN
    IF w->'patch' ? 'owner' THEN  -- the new owner must not be removed meanwhile
        PERFORM FROM workers x WHERE x.id = w->'patch'->>'owner' FOR KEY SHARE;
    END IF;
    SELECT r.pk, r.status, r.owner, r.fence, r.last_message_no, r.has_new_messages, r.waiting, r.queue INTO run
    FROM runs r WHERE r.id = w->>'run_id' FOR NO KEY UPDATE;
    IF NOT FOUND THEN  -- rule 1 of the acceptance rule in stores/protocol.py
        RETURN result_of('missing');
    END IF;
    SELECT greatest(run.fence, (SELECT max(e.position) FROM entries e WHERE e.run_pk = run.pk), 0),
           EXISTS (SELECT FROM workers x WHERE x.id = w->>'worker' AND NOT x.fenced)
    INTO last, is_alive;
    IF last > base AND turn_at(run.pk, base + 1) = w->>'turn_id' THEN  -- rule 2
        RETURN result_of('committed', flag => run.last_message_no > seen AND unread_after(run.pk, seen));
    ELSIF terminal(run.status) THEN  -- rule 3
        RETURN result_of('ended', label => run.status);
    ELSIF NOT is_alive  -- rule 4
          OR run.waiting OR (run.owner IS DISTINCT FROM w->>'worker'  -- rule 5
              AND ((w->>'owned')::boolean OR run.owner IS NOT NULL))
          OR base <> last THEN  -- rule 6
        RETURN result_of('superseded');
    END IF;
    -- Rule 7: the turn is applied.
    IF w ?| '{restart, extras}' THEN
        SELECT * INTO before FROM runs r WHERE r.pk = run.pk;
        added := drop_entries(before, w);
    END IF;
    last := append_entries(run.pk, base, w->>'turn_id', added, now);
    IF w ? 'consumed' THEN
        PERFORM consume_messages(run.pk, w->'consumed', now);
    END IF;
    IF ends_generation THEN
        DELETE FROM subscriptions s WHERE s.run_pk = run.pk;
    END IF;
    IF w ? 'extras' THEN
        changed := write_extras(before, w->'extras', ends_generation, now);
        -- Read again: `subscribe` may have assigned an event to the run.
        SELECT r.pk, r.last_message_no, r.has_new_messages, r.queue INTO run FROM runs r WHERE r.pk = run.pk;
    END IF;
    unread := run.last_message_no > seen AND unread_after(run.pk, seen);
    IF w ? 'patch' THEN
        changed := changed || patch_run(run.pk, w, unread, now);
        IF run.queue IS NOT NULL AND terminal(w->'patch'->>'status') THEN
            changed := changed || leave_queues(ARRAY[run.pk]);
        END IF;
    ELSIF run.has_new_messages AND NOT unread THEN
        UPDATE runs x SET wake_at = NULL, has_new_messages = false WHERE x.pk = run.pk;
    END IF;
    RETURN result_of('committed', flag => unread, changed => array_remove(changed, NULL));
END;
$$;

-- Change the run's row after a turn; `unread`: there are messages that the turn has not seen. Returns the run's id if
-- other processes must be notified.
CREATE OR REPLACE FUNCTION patch_run(of_run bigint, w jsonb, unread boolean, now float8) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    patch jsonb := w->'patch';
    ended boolean := terminal(patch->>'status');
    new_owner text := CASE WHEN NOT ended THEN patch->>'owner' END;
    ignores_messages boolean := new_owner IS NULL AND (
        patch->>'held' IS NOT NULL OR (w ? 'restart' AND w->'restart'->>'first_executed_at' IS NULL));
    unseen boolean := unread AND (NOT ignores_messages OR unread_after(of_run, (w->>'seen')::bigint, true));
    wake float8 := CASE WHEN ended THEN NULL WHEN unseen THEN now ELSE (patch->>'wake_at')::float8 END;
BEGIN
    UPDATE runs r
    SET status = patch->>'status', owner = new_owner, wake_at = wake,
        has_new_messages = unseen AND new_owner IS NOT NULL,
        waits = patch->>'waits', held = patch->>'held', held_kind = patch->>'held_kind', drift = patch->>'drift',
        recoveries = (patch->>'recoveries')::integer, result = decode(patch->>'result', 'base64'),
        error = patch->>'error', ended_at = (patch->>'ended_at')::float8, prune_at = (patch->>'prune_at')::float8,
        updated_at = now, gate = CASE WHEN ended THEN '' ELSE r.gate END,
        -- The result of `needs_finalization`, which need not be called for the many runs without messages.
        unfinalized = ended AND (
            EXISTS (SELECT FROM observers o WHERE o.run_pk = of_run)
            OR (r.last_message_no > 0 AND needs_finalization(r.pk)))
    WHERE r.pk = of_run;
    RETURN CASE WHEN ended OR (new_owner IS NULL AND wake IS NOT NULL) THEN w->>'run_id' END;
END;
$$;

-- End a run from outside. It takes a position and moves the fence, so that a turn computed meanwhile is refused.
CREATE OR REPLACE FUNCTION write_end(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    now float8 := (w->>'now')::float8;
    last bigint;
BEGIN
    last := position_of(r);
    IF turn_at(r.pk, last) = w->>'turn_id' THEN
        RETURN result_of('committed');
    ELSIF terminal(r.status) THEN
        RETURN result_of('ended', label => r.status);
    ELSIF (w->>'only_if_not_started')::boolean AND has_started(r) THEN
        RETURN result_of('already_started');
    END IF;
    PERFORM append_entries(r.pk, last, w->>'turn_id', NULL, now);
    DELETE FROM subscriptions s WHERE s.run_pk = r.pk;
    UPDATE runs x
    SET status = w->>'status', owner = NULL, wake_at = NULL, has_new_messages = false, waits = NULL, held = NULL,
        held_kind = NULL, waiting = false, gate = '',
        ended_at = now, updated_at = now, prune_at = now + (w->>'prune_after')::float8, fence = last + 1,
        orphaned_children = has_started(r), unfinalized = has_started(r) OR needs_finalization(r.pk)
    WHERE x.pk = r.pk;
    RETURN result_of('committed', changed => CASE WHEN r.queue IS NOT NULL THEN leave_queues(ARRAY[r.pk]) END || r.id);
END;
$$;

-- Rewind a run. One that has ended may wait in a queue again.
CREATE OR REPLACE FUNCTION write_rewind(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    base bigint := (w->>'base')::bigint;
    now float8 := (w->>'now')::float8;
    dropped text[] := ARRAY(SELECT jsonb_array_elements_text(w->'dropped'));
    last bigint;
    will_wait boolean := w ? 'place' AND terminal(r.status);  -- an open run keeps its place or slot
    changed text[] := ARRAY[r.id];
BEGIN
    last := position_of(r);
    IF last > base AND turn_at(r.pk, base + 1) = w->>'turn_id' THEN
        RETURN result_of('committed');
    ELSIF last <> base THEN
        RETURN result_of('superseded');
    ELSIF will_wait AND NOT EXISTS (SELECT FROM queues q WHERE q.name = w->'place'->>'queue') THEN
        RETURN result_of('queue_missing');
    END IF;
    DELETE FROM entries e WHERE e.run_pk = r.pk AND e.kind <> 'marker' AND e.location = ANY (dropped);
    UPDATE stream_items s SET superseded = true WHERE s.run_pk = r.pk AND s.location = ANY (dropped)
        AND s.epoch = r.epoch AND NOT s.superseded;
    DELETE FROM subscriptions s WHERE s.run_pk = r.pk;
    PERFORM append_entries(r.pk, base, w->>'turn_id', w->'entries', now);
    PERFORM restore_message(r.pk, message) FROM jsonb_array_elements(coalesce(w->'returned', '[]')) AS message;
    UPDATE runs x
    SET status = status_released(r), generation = r.generation + 1, owner = NULL, has_new_messages = false,
        wake_at = CASE WHEN NOT will_wait AND NOT r.waiting THEN now END, updated_at = now, result = NULL, error = NULL,
        ended_at = NULL, held = NULL, held_kind = NULL, waits = NULL, drift = NULL, recoveries = 0, prune_at = NULL,
        unfinalized = false, orphaned_children = false, deadline_at = (w->>'deadline_at')::float8,
        fence = base + greatest(1, jsonb_array_length(coalesce(w->'entries', '[]')))
    WHERE x.pk = r.pk;
    IF will_wait THEN
        UPDATE runs x
        SET queue = w->'place'->>'queue', partition = w->'place'->>'partition',
            priority = (w->'place'->>'priority')::integer, waiting = true, gate = ''
        WHERE x.pk = r.pk;
        changed := changed || add_place(r.pk, w->'place', now);
    END IF;
    RETURN result_of('committed', changed => changed);
END;
$$;

-- Commit a turn of one entry. `ends` is the status with which the run ends; NULL: the run does not end, and the
-- following arguments are not used.
--
-- The turn is applied (rule 7 of the acceptance rule in stores/protocol.py) if none of rules 1 to 6 can apply;
-- otherwise the function declines. Rules 1, 3 and 5 are checked by the first query, since an ended run has no owner.
-- Rules 2, 4 and 6 are checked by the INSERT; a turn that is stored already has moved the position.
--
-- An end on this path notifies no observer and releases nothing, so it declines for a run with observers, messages,
-- subscriptions or a queue. Observers are checked twice. The check before the lock avoids a lock that would have to reach
-- the disk for nothing. The check after it is the valid one.
CREATE OR REPLACE FUNCTION fast_commit_turn(
    of_run text, worker text, base bigint, seen bigint, turn text, location text, kind text, name text, status text,
    call_seq bigint, ordinal bigint, seq bigint, value bytea, error text, attempts integer, generation integer,
    started_at float8, settled_at float8, due_at float8, fingerprint bytea, detail bytea, ends text, now float8,
    result bytea, failure text, drift text, recoveries integer, ended_at float8, prune_at float8)
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
    fence bigint;
BEGIN
    SELECT r.pk, r.fence INTO run_pk, fence FROM runs r
    WHERE r.id = of_run AND r.owner = worker AND NOT r.has_new_messages AND r.last_message_no <= seen
          AND (ends IS NULL OR r.queue IS NULL AND r.last_message_no = 0
                               AND NOT EXISTS (SELECT FROM observers o WHERE o.run_pk = r.pk))
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO entries (
        run_pk, position, turn_id, location, kind, name, status, call_seq, ordinal, seq, value, error, attempts,
        generation, started_at, settled_at, due_at, fingerprint, detail)
    SELECT run_pk, base + 1, turn, location, kind, name, status, call_seq, ordinal, seq, value, error, attempts,
           generation, started_at, settled_at, due_at, fingerprint, detail
    WHERE base = greatest(fence, (SELECT max(e.position) FROM entries e WHERE e.run_pk = run_pk), 0)
          AND EXISTS (SELECT FROM workers x WHERE x.id = worker AND NOT x.fenced)
          AND (ends IS NULL OR NOT EXISTS (SELECT FROM observers o WHERE o.run_pk = run_pk)
                               AND NOT EXISTS (SELECT FROM subscriptions s WHERE s.run_pk = run_pk));
    IF FOUND AND ends IS NOT NULL THEN
        UPDATE runs r
        SET status = ends, owner = NULL, wake_at = NULL, waits = NULL, held = NULL, held_kind = NULL, drift = drift,
            recoveries = recoveries, result = result, error = failure, ended_at = ended_at, prune_at = prune_at,
            updated_at = now
        WHERE r.pk = run_pk;
    END IF;
    RETURN FOUND;
END;
$$;

-- --- messages ------------------------------------------------------------------------------------------------------

-- Make a run due because of a new message. A held run stays suspended. So does a run whose generation has not started:
-- it waits for its start time. A run that waits in a queue is not due either: a pause holds it, and a resume or cancel
-- ends that hold. If the run has an owner, the owner is to be notified in any case.
CREATE OR REPLACE FUNCTION on_message(run runs, number bigint, kind text, now float8) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF run.waiting THEN
        UPDATE runs r
        SET last_message_no = number,
            held = CASE kind WHEN 'pause' THEN paused_in_queue() WHEN 'resume' THEN NULL WHEN 'cancel' THEN NULL
                   ELSE r.held END
        WHERE r.pk = run.pk;
    ELSIF (run.held IS NULL AND run.first_executed_at IS NOT NULL) OR run.owner IS NOT NULL OR wakes_held(kind) THEN
        UPDATE runs r
        SET last_message_no = number, wake_at = least(r.wake_at, now), has_new_messages = r.owner IS NOT NULL
        WHERE r.pk = run.pk;
    ELSE
        UPDATE runs r SET last_message_no = number WHERE r.pk = run.pk;
    END IF;
END;
$$;

-- Deliver a message, once per id.
CREATE OR REPLACE FUNCTION write_message(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    m jsonb := w->'message';
    capacity bigint := (w->>'limit')::bigint;
    number_before bigint;  -- if the message was delivered before
    pending bigint;
    changed text[] := ARRAY[r.id];
BEGIN
    number_before := message_number(r.pk, m->>'id');
    IF number_before IS NOT NULL THEN
        RETURN result_of('delivered', number_before, false, r.owner);
    ELSIF terminal(r.status) THEN
        RETURN result_of('ended', label => r.status);
    END IF;
    IF r.last_message_no >= capacity AND is_event(m->>'kind') THEN  -- otherwise the inbox cannot be full
        pending := unread_if_full(r.pk, r.last_message_no, m->>'name', capacity);
        IF pending >= capacity THEN
            RETURN result_of('full', pending);
        END IF;
    END IF;
    PERFORM insert_message(r.pk, r.last_message_no + 1, m);
    PERFORM on_message(r, r.last_message_no + 1, m->>'kind', (w->>'now')::float8);
    IF r.waiting AND r.held IS NOT NULL AND wakes_held(m->>'kind') THEN  -- it may be admitted again
        changed := changed || queue_hint(r.queue);
    END IF;
    RETURN result_of('delivered', r.last_message_no + 1, true, r.owner, changed);
END;
$$;

-- Deliver many messages, none of which pauses, resumes or cancels its run. Several messages to one run are numbered in
-- their order. They have different ids and no limit.
CREATE OR REPLACE FUNCTION write_messages(given jsonb)
RETURNS TABLE (at integer, result_kind text, number bigint, flag boolean, label text, body bytea, note text)
LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    WITH checked AS MATERIALIZED (
        SELECT k.*, k.last_message_no + count(*) FILTER (WHERE k.result_kind = 'fresh')
                                   OVER (PARTITION BY k.pk ORDER BY k.at) AS next
        FROM (
            SELECT m.*, r.pk, r.status, r.owner, r.last_message_no, before.number AS number_before, pending.count,
                   NOT r.waiting AND ((r.held IS NULL AND r.first_executed_at IS NOT NULL) OR r.owner IS NOT NULL
                       OR wakes_held(m.kind)) AS wakes,
                   CASE WHEN r.pk IS NULL THEN 'missing'
                        WHEN before.number IS NOT NULL THEN 'delivered'
                        WHEN terminal(r.status) THEN 'ended'
                        WHEN pending.count >= m.capacity THEN 'full'
                        ELSE 'fresh' END AS result_kind
            FROM jsonb_to_recordset(given) AS m (
                at integer, run_id text, now float8, capacity bigint, id text, kind text, name text, body text,
                sender text, sent_at float8, expires_at float8, policy text, target text, "offset" bigint,
                wants_reply boolean, event_id text)
            LEFT JOIN runs r ON r.id = m.run_id
            LEFT JOIN LATERAL (SELECT message_number(r.pk, m.id) OFFSET 0) AS before (number) ON true
            CROSS JOIN LATERAL (
                SELECT CASE WHEN r.last_message_no >= m.capacity AND is_event(m.kind)
                            THEN unread_if_full(r.pk, r.last_message_no, m.name, m.capacity) END
                OFFSET 0  -- computed once
            ) AS pending (count)
        ) AS k
    ), added AS (
        INSERT INTO inbox (run_pk, number, id, kind, name, body, sender, sent_at, expires_at, policy, target,
                           topic_offset, wants_reply, event_id)
        SELECT j.pk, j.next, j.id, j.kind, j.name, decode(j.body, 'base64'), j.sender, j.sent_at, j.expires_at,
               j.policy, j.target, j."offset", j.wants_reply, j.event_id
        FROM checked j WHERE j.result_kind = 'fresh'
    ), woken AS (
        UPDATE runs r
        SET last_message_no = j.last,
            wake_at = CASE WHEN j.wakes THEN least(r.wake_at, j.now) ELSE r.wake_at END,
            has_new_messages = CASE WHEN j.wakes THEN r.owner IS NOT NULL ELSE r.has_new_messages END
        FROM (
            SELECT x.pk, max(x.next) AS last, min(x.now) FILTER (WHERE x.wakes) AS now, bool_or(x.wakes) AS wakes
            FROM checked x WHERE x.result_kind = 'fresh' GROUP BY x.pk
        ) AS j
        WHERE r.pk = j.pk
    )
    SELECT j.at, CASE j.result_kind WHEN 'fresh' THEN 'delivered' ELSE j.result_kind END,
           CASE j.result_kind WHEN 'fresh' THEN j.next WHEN 'full' THEN j.count ELSE j.number_before END,
           j.result_kind = 'fresh', CASE j.result_kind WHEN 'ended' THEN j.status ELSE j.owner END, NULL::bytea, NULL
    FROM checked j
    UNION ALL
    SELECT DISTINCT -1, NULL, NULL::bigint, NULL::boolean, j.run_id, NULL::bytea, NULL
    FROM checked j WHERE j.result_kind = 'fresh';
END;
$$;

-- --- batches -------------------------------------------------------------------------------------------------------

-- Apply a batch. Returns rows of results by index in the batch (`at`). A write that was applied as requested gets no
-- row. A row at -1 names a run whose change other processes must be notified of.
--
-- Grouped turns (`b_turns`; `b_at` are their indexes in the batch) append entries, consume messages and perhaps patch
-- the run's row, nothing else. Each is the only write to its run in this batch. So is each row of `b_finalizes`. A run
-- with messages in `b_messages` has no other writes. New runs of queues are one write of `b_writes`, with `creates`.
--
-- Turns are `json`, not `jsonb`: JSON columns are copied from it as text, which may contain an escaped NUL.
--
-- A statement costs about 25 us even if it finds nothing. Statements that few batches need are therefore executed only
-- if a flag (`some_...`) says so; the flags come from statements that are needed anyway. (Measured: 599 us for a
-- single turn, 709 us before.)
CREATE OR REPLACE FUNCTION commit_batch(
    b_workers text[], b_topics text[], b_runs text[], b_creates jsonb, b_messages jsonb, b_writes jsonb, b_at json,
    b_turns json, b_finalizes jsonb)
RETURNS TABLE (at integer, result_kind text, number bigint, flag boolean, label text, body bytea, note text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
DECLARE
    w record;
    a write_result;
    -- fields of each grouped turn
    t_run text[];
    t_base bigint[];
    t_id text[];
    t_worker text[];
    t_owned boolean[];
    t_now float8[];
    t_seen bigint[];
    t_entries json[];
    t_consumed json[];
    t_patch json[];
    some_empty boolean;
    some_consume boolean;
    some_patch boolean;
    -- and the state of its run
    run_pks bigint[];
    result_kinds text[];
    statuses text[];
    lasts bigint[];
    has_unread boolean[];
    marked boolean[];  -- has_new_messages of the run
    some_unread boolean;
    some_queue boolean;  -- a run of a queue is among the locked ones
BEGIN
    IF b_workers IS NOT NULL THEN  -- new owners must not be removed meanwhile
        PERFORM FROM workers x WHERE x.id = ANY (b_workers) ORDER BY x.id FOR KEY SHARE;
    END IF;
    IF b_topics IS NOT NULL THEN
        PERFORM lock_topics(b_topics, b_writes);
        b_runs := b_runs || oldest_subscriptions(b_writes);
    END IF;
    IF b_turns IS NOT NULL THEN  -- rows have the order of the document
        SELECT array_agg(t.run_id), array_agg(t.base), array_agg(t.turn_id), array_agg(t.worker), array_agg(t.owned),
               array_agg(t.now), array_agg(t.seen), array_agg(nullif(t.entries::text, '[]')::json),
               array_agg(nullif(t.consumed::text, '[]')::json), array_agg(t.patch),
               bool_or(t.entries::text = '[]'), bool_or(t.consumed::text <> '[]'), bool_or(t.patch IS NOT NULL)
        INTO t_run, t_base, t_id, t_worker, t_owned, t_now, t_seen, t_entries, t_consumed, t_patch,
             some_empty, some_consume, some_patch
        FROM json_to_recordset(b_turns) AS t (
            run_id text, base bigint, turn_id text, worker text, owned boolean, now float8, seen bigint, entries json,
            consumed json, patch json);
        b_runs := b_runs || t_run;
    END IF;
    IF b_writes @? '$[*].queues' THEN
        b_runs := b_runs || runs_to_join(b_writes);
    END IF;
    IF b_runs <> '{}' THEN
        SELECT bool_or(l.queue IS NOT NULL) INTO some_queue
        FROM (SELECT r.queue FROM runs r WHERE r.id = ANY (b_runs) ORDER BY r.id FOR NO KEY UPDATE) AS l;
    END IF;
    IF some_queue OR b_writes @? '$[*].queues' THEN
        PERFORM lock_queues(b_writes, ARRAY(
            SELECT t_run[n] FROM generate_subscripts(t_patch, 1) AS n WHERE terminal(t_patch[n]->>'status')
            UNION ALL
            SELECT x->>'run_id' FROM jsonb_array_elements(b_writes) AS x
            WHERE x->>'kind' IN ('end', 'leave_queue') OR terminal(x->'patch'->>'status')));
    END IF;
    IF b_creates IS NOT NULL THEN
        RETURN QUERY SELECT * FROM create_runs(b_creates);
    END IF;
    IF b_messages IS NOT NULL THEN
        RETURN QUERY SELECT * FROM write_messages(b_messages);
    END IF;
    IF b_turns IS NOT NULL THEN
        SELECT array_agg(j.pk ORDER BY j.nth), array_agg(j.result_kind ORDER BY j.nth),
               array_agg(j.status ORDER BY j.nth), array_agg(j.last_message_no ORDER BY j.nth),
               array_agg(j.has_new_messages ORDER BY j.nth), coalesce(bool_or(j.last_message_no > j.seen), false)
        INTO run_pks, result_kinds, statuses, lasts, marked, some_unread
        FROM (
            SELECT k.nth, k.pk, k.status, k.last_message_no, k.has_new_messages, k.seen,
                   -- Rules 1 to 7 of the acceptance rule in stores/protocol.py, in their order; 4 to 6 have one result.
                   CASE WHEN k.pk IS NULL THEN 'missing'
                        WHEN k.position > k.base AND k.id = (
                            SELECT e.turn_id FROM entries e WHERE e.run_pk = k.pk AND e.position = k.base + 1)
                        THEN 'committed_before'
                        WHEN terminal(k.status) THEN 'ended'
                        WHEN NOT EXISTS (SELECT FROM workers x WHERE x.id = k.worker AND NOT x.fenced)
                             OR k.waiting OR (k.owner IS DISTINCT FROM k.worker AND (k.owned OR k.owner IS NOT NULL))
                             OR k.base <> k.position
                        THEN 'superseded'
                        ELSE 'committed' END AS result_kind
            FROM (
                SELECT t.*, r.pk, r.status, r.owner, r.has_new_messages, r.last_message_no, r.waiting,
                       greatest(r.fence, (SELECT max(e.position) FROM entries e WHERE e.run_pk = r.pk), 0) AS position
                FROM unnest(t_run, t_base, t_id, t_worker, t_owned, t_seen) WITH ORDINALITY
                     AS t (run, base, id, worker, owned, seen, nth)
                LEFT JOIN runs r ON r.id = t.run
                OFFSET 0  -- computes the position once
            ) AS k
        ) AS j;
        IF some_consume THEN
            FOR w IN
                UPDATE inbox i SET consumed_at = t_now[c.turn], body = NULL
                FROM (  -- looks up each one separately, as in `message_number`
                    SELECT n AS turn, m.row
                    FROM generate_subscripts(t_consumed, 1) AS n
                    CROSS JOIN LATERAL json_array_elements_text(t_consumed[n]) AS x
                    CROSS JOIN LATERAL (
                        SELECT m.ctid, m.number FROM inbox m
                        WHERE m.run_pk = run_pks[n] AND m.number >= x::bigint AND m.consumed_at IS NULL
                        ORDER BY m.number LIMIT 1
                    ) AS m (row, number)
                    WHERE result_kinds[n] = 'committed' AND m.number = x::bigint
                ) AS c
                WHERE i.ctid = c.row
                RETURNING i.run_pk, i.kind, i.name, i.topic_offset, i.consumed_at
            LOOP
                IF w.kind = 'assignment' THEN
                    PERFORM on_event_consumed(w.run_pk, w.name, w.topic_offset, w.consumed_at);
                END IF;
            END LOOP;
        END IF;
        has_unread := array_fill(false, ARRAY[cardinality(t_run)]);
        IF some_unread THEN
            has_unread := ARRAY(
                SELECT coalesce(lasts[n] > t_seen[n], false) AND EXISTS (
                    SELECT FROM inbox i WHERE i.run_pk = run_pks[n] AND i.number > t_seen[n] AND i.consumed_at IS NULL)
                FROM generate_subscripts(t_run, 1) AS n ORDER BY n);
        END IF;
        INSERT INTO entries
        SELECT run_pks[n], t_base[n] + e.nth, CASE WHEN e.nth = 1 THEN t_id[n] END, e.location, e.kind, e.name,
               e.status, e.call_seq, e.ordinal, e.seq, decode(e.value, 'base64'), e.error, e.attempts, e.generation,
               e.started_at, e.settled_at, e.due_at, decode(e.fingerprint, 'base64'), decode(e.detail, 'base64')
        FROM generate_subscripts(t_entries, 1) AS n
        CROSS JOIN LATERAL ROWS FROM (json_to_recordset(t_entries[n]) AS (
            location text, kind text, name text, status text, call_seq bigint, ordinal bigint, seq bigint, value text,
            error text, attempts integer, generation integer, started_at float8, settled_at float8, due_at float8,
            fingerprint text, detail text)) WITH ORDINALITY
            AS e (location, kind, name, status, call_seq, ordinal, seq, value, error, attempts, generation, started_at,
                  settled_at, due_at, fingerprint, detail, nth)
        WHERE result_kinds[n] = 'committed' AND t_entries[n] IS NOT NULL;
        IF some_empty THEN
            INSERT INTO entries (run_pk, position, turn_id, location, kind, name, status, call_seq, ordinal, attempts,
                                 generation, started_at)
            SELECT run_pks[n], t_base[n] + 1, t_id[n], '', 'marker', '', 'succeeded', 0, -1, 0, 0, t_now[n]
            FROM generate_subscripts(t_entries, 1) AS n WHERE t_entries[n] IS NULL AND result_kinds[n] = 'committed';
        END IF;
        IF some_patch THEN
            RETURN QUERY
            WITH patched AS (
                UPDATE runs r
                SET status = p.status, owner = p.owner, wake_at = p.wake_at, has_new_messages = p.unseen
                    AND p.owner IS NOT NULL,
                    waits = p.waits, held = p.held, held_kind = p.held_kind, drift = p.drift,
                        recoveries = p.recoveries,
                    result = p.result, error = p.error, ended_at = p.ended_at, prune_at = p.prune_at,
                    updated_at = p.now, gate = CASE WHEN p.ended THEN '' ELSE r.gate END,
                    unfinalized = p.ended AND (
                        EXISTS (SELECT FROM observers o WHERE o.run_pk = r.pk)
                        OR EXISTS (SELECT FROM inbox i
                                   WHERE i.run_pk = r.pk AND i.consumed_at IS NULL AND is_event(i.kind)))
                FROM (
                    SELECT run_pks[n] AS pk, t_now[n] AS now, c.ended, c.owner, u.unseen, p.status,
                           nullif(p.waits, '[]') AS waits, p.held, p.held::json->>'kind' AS held_kind,
                           nullif(p.drift, '[]') AS drift, p.recoveries, decode(p.result, 'base64') AS result, p.error,
                           p.ended_at, p.prune_at,
                           CASE WHEN c.ended THEN NULL WHEN u.unseen THEN t_now[n] ELSE p.wake_at END AS wake_at
                    FROM generate_subscripts(t_patch, 1) AS n
                    CROSS JOIN LATERAL json_to_record(t_patch[n]) AS p (
                        status text, owner text, wake_at float8, waits text, held text, drift text, recoveries integer,
                        result text, error text, ended_at float8, prune_at float8)
                    CROSS JOIN LATERAL (
                        SELECT terminal(p.status), CASE WHEN NOT terminal(p.status) THEN p.owner END
                    ) AS c (ended, owner)
                    CROSS JOIN LATERAL (
                        SELECT has_unread[n] AND (p.held IS NULL OR c.owner IS NOT NULL OR EXISTS (
                            SELECT FROM inbox i
                            WHERE i.run_pk = run_pks[n] AND i.number > t_seen[n] AND i.consumed_at IS NULL
                                  AND wakes_held(i.kind)))
                    ) AS u (unseen)
                    WHERE result_kinds[n] = 'committed' AND t_patch[n] IS NOT NULL
                    OFFSET 0
                ) AS p
                WHERE r.pk = p.pk
                RETURNING r.pk, r.id, p.ended, p.ended OR (p.owner IS NULL AND p.wake_at IS NOT NULL) AS is_notified
            ), unsubscribed AS (
                DELETE FROM subscriptions s USING patched p WHERE p.ended AND s.run_pk = p.pk
            )
            SELECT -1, NULL, NULL::bigint, NULL::boolean, p.id, NULL::bytea, NULL FROM patched p WHERE p.is_notified;
            IF some_queue THEN
                RETURN QUERY
                SELECT -1, NULL, NULL::bigint, NULL::boolean, h.hint, NULL::bytea, NULL
                FROM unnest(leave_queues(ARRAY(
                    SELECT run_pks[n] FROM generate_subscripts(t_patch, 1) AS n
                    WHERE result_kinds[n] = 'committed' AND terminal(t_patch[n]->>'status')))) AS h (hint);
            END IF;
        END IF;
        IF true = ANY (marked) THEN  -- their owner has seen all messages by now
            UPDATE runs r SET wake_at = NULL, has_new_messages = false
            WHERE r.pk = ANY (ARRAY(
                SELECT run_pks[n] FROM generate_subscripts(t_run, 1) AS n
                WHERE marked[n] AND NOT has_unread[n] AND result_kinds[n] = 'committed'
                      AND t_patch[n] IS NULL));
        END IF;
        IF 'committed' <> ANY (result_kinds) OR true = ANY (has_unread) THEN
            RETURN QUERY
            SELECT (b_at->>(n - 1))::integer, result_kinds[n], NULL::bigint, has_unread[n], statuses[n],
                   NULL::bytea, NULL
            FROM generate_subscripts(t_run, 1) AS n WHERE result_kinds[n] <> 'committed' OR has_unread[n];
        END IF;
    END IF;
    IF b_finalizes IS NOT NULL THEN
        RETURN QUERY SELECT * FROM mark_notified(b_finalizes);
    END IF;
    IF b_writes IS NOT NULL THEN
        FOR nth IN 0..jsonb_array_length(b_writes) - 1 LOOP
            IF b_writes->nth ? 'creates' THEN
                RETURN QUERY SELECT * FROM create_queued(b_writes->nth->'creates');
                CONTINUE;
            END IF;
            a := apply_write(b_writes->nth);
            at := (b_writes->nth->>'at')::integer;
            result_kind := a.result_kind;
            number := a.number;
            flag := a.flag;
            label := a.label;
            body := a.body;
            note := a.note;
            RETURN NEXT;
            IF a.changed IS NOT NULL THEN
                FOREACH label IN ARRAY a.changed LOOP
                    at := -1;
                    RETURN NEXT;
                END LOOP;
            END IF;
        END LOOP;
    END IF;
END;
$$;

-- Apply a single write that needs no lock except that of its run. It uses `apply_write`, as `commit_batch` does for
-- writes that are not grouped, so that there is no other set of rules.
CREATE OR REPLACE FUNCTION commit_write(w jsonb) RETURNS write_result LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
BEGIN
    IF w ? 'queues' THEN
        IF w ?| '{run_id, replaces}' OR w->'place' ? 'dedupe' THEN
            PERFORM FROM runs r
            WHERE r.id = ANY (runs_to_join(jsonb_build_array(w)) || ARRAY[w->>'id', w->>'run_id'])
            ORDER BY r.id FOR NO KEY UPDATE;
        END IF;
        PERFORM lock_queues(jsonb_build_array(w), '{}');
    END IF;
    RETURN apply_write(w);
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
        WHEN 'admit' THEN RETURN write_admit(w);
        WHEN 'configure_queue' THEN RETURN write_configure_queue(w);
        WHEN 'configure_partition' THEN RETURN write_configure_partition(w);
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
        WHEN 'requeue' THEN RETURN write_requeue(w, r);
        WHEN 'leave_queue' THEN RETURN write_leave_queue(w, r);
    END CASE;
END;
$$;

-- --- claims and pruning --------------------------------------------------------------------------------------------

-- Wait until no other transaction holds the earliest of these due runs. Returns whether one of them is still due.
-- Called only by `claim_due`, whose settings it uses.
CREATE OR REPLACE FUNCTION wait_for_due(
    due_by float8, of_pool text, names text[], versions bigint[], shards integer[], lim bigint)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    due bigint[];
BEGIN
    due := ARRAY(
        SELECT r.pk FROM unnest(names, versions) AS w (name, version)
        JOIN runs r ON r.pool = of_pool AND r.gate = '' AND r.workflow = w.name AND r.version = w.version
             AND r.wake_at <= due_by
             AND r.owner IS NULL AND r.ended_at IS NULL AND (shards IS NULL OR r.shard = ANY (shards))
        ORDER BY r.wake_at, r.id LIMIT lim);
    PERFORM FROM runs r
    WHERE r.pk = ANY (due) AND r.wake_at <= due_by AND r.owner IS NULL AND r.ended_at IS NULL
    ORDER BY r.id FOR NO KEY UPDATE;  -- the order of commits, and no other run is locked: no deadlock
    RETURN FOUND;
END;
$$;

-- Processes of earlier versions call it: it claims no runs with a gate.
CREATE OR REPLACE FUNCTION claim_due(
    claimer text, now float8, due_by float8, of_pool text, names text[], versions bigint[], shards integer[],
    lim bigint)
RETURNS TABLE (id text, last_message_no bigint, "position" bigint) LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN QUERY SELECT * FROM claim_runs(claimer, now, due_by, of_pool, names, versions, shards, lim, lim, '{}', '{}');
END;
$$;

-- Due runs behind these gates, locked, up to the number that is free for each gate. They are of all shards.
CREATE FUNCTION gated_runs(
    due_by float8, of_pool text, names text[], versions bigint[], gates text[], free bigint[]) RETURNS bigint[]
LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT first.pk
        FROM unnest(gates, free) AS g (name, free)
        CROSS JOIN LATERAL (
            SELECT due.pk
            FROM (SELECT DISTINCT w.name, w.version FROM unnest(names, versions) AS w (name, version)) AS w
            CROSS JOIN LATERAL (
                SELECT r.pk, r.wake_at, r.id FROM runs r
                WHERE r.pool = of_pool AND r.gate = g.name AND r.workflow = w.name AND r.version = w.version
                      AND r.wake_at <= due_by AND r.owner IS NULL AND r.ended_at IS NULL
                ORDER BY r.wake_at, r.id LIMIT g.free
                FOR NO KEY UPDATE SKIP LOCKED
            ) AS due
            ORDER BY due.wake_at, due.id LIMIT g.free
        ) AS first);
END;
$$;

-- The earliest of locked due runs.
CREATE FUNCTION earliest_of(these bigint[], others bigint[], lim bigint) RETURNS bigint[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN (
        SELECT array_agg(x.pk ORDER BY x.wake_at, x.id)
        FROM (
            SELECT r.pk, r.wake_at, r.id FROM runs r WHERE r.pk = ANY (these || others)
            ORDER BY r.wake_at, r.id LIMIT lim
        ) AS x);
END;
$$;

-- Wait until no other transaction holds a due run behind these gates. Returns whether one of them is still due.
CREATE FUNCTION wait_for_gated(
    due_by float8, of_pool text, names text[], versions bigint[], gates text[], free bigint[]) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    due bigint[];
BEGIN
    due := ARRAY(
        SELECT first.pk
        FROM unnest(gates, free) AS g (name, free)
        CROSS JOIN unnest(names, versions) AS w (name, version)
        CROSS JOIN LATERAL (
            SELECT r.pk FROM runs r
            WHERE r.pool = of_pool AND r.gate = g.name AND r.workflow = w.name AND r.version = w.version
                  AND r.wake_at <= due_by AND r.owner IS NULL AND r.ended_at IS NULL
            ORDER BY r.wake_at, r.id LIMIT g.free
        ) AS first);
    PERFORM FROM runs r
    WHERE r.pk = ANY (due) AND r.wake_at <= due_by AND r.owner IS NULL AND r.ended_at IS NULL
    ORDER BY r.id FOR NO KEY UPDATE;
    RETURN FOUND;
END;
$$;

-- Make a worker the owner of due runs, earliest first: up to `lim`, of them `ungated` without a gate and so many of each
-- gate as `free` says.
--
-- Rows that other transactions hold are skipped, so that claims do not wait for commits. If nothing else is due, the
-- claim waits for those rows once and tries again. Otherwise a run that a commit was just changing would stay due
-- until the next sweep, because no further change hint follows.
CREATE FUNCTION claim_runs(
    claimer text, now float8, due_by float8, of_pool text, names text[], versions bigint[], shards integer[],
    lim bigint, ungated bigint, gates text[], free bigint[])
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
                WHERE r.pool = of_pool AND r.gate = '' AND r.workflow = w.name AND r.version = w.version
                      AND r.wake_at <= due_by
                      AND r.owner IS NULL AND r.ended_at IS NULL AND (shards IS NULL OR r.shard = ANY (shards))
                ORDER BY r.wake_at, r.id LIMIT ungated
                FOR NO KEY UPDATE SKIP LOCKED
            ) AS due
            ORDER BY due.wake_at, due.id LIMIT ungated
        ) AS first;
        IF gates <> '{}' THEN
            claimed := earliest_of(claimed, gated_runs(due_by, of_pool, names, versions, gates, free), lim);
        END IF;
        EXIT WHEN claimed IS NOT NULL OR attempt = 2;
        EXIT WHEN NOT (
            wait_for_due(due_by, of_pool, names, versions, shards, ungated)
            OR (gates <> '{}' AND wait_for_gated(due_by, of_pool, names, versions, gates, free)));
    END LOOP;
    UPDATE runs r
    SET owner = claimer, status = 'running', wake_at = NULL, has_new_messages = false,
        first_executed_at = coalesce(r.first_executed_at, claim_runs.now), updated_at = claim_runs.now
    WHERE r.pk = ANY (claimed);
    RETURN QUERY
    SELECT r.id, r.last_message_no, position_of(r)
    FROM unnest(claimed) WITH ORDINALITY AS t (pk, nth) JOIN runs r ON r.pk = t.pk ORDER BY t.nth;
END;
$$;

-- Delete a page of ended runs, expired values, events and documents, ids of consumed events, and unused partitions.
-- Returns the ids of the deleted runs.
CREATE OR REPLACE FUNCTION prune_runs(now float8, lim bigint, remember float8) RETURNS text[] LANGUAGE plpgsql
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
    DELETE FROM partitions x WHERE x.ctid = ANY (ARRAY(
        SELECT p.ctid FROM partitions p
        WHERE p.is_unused AND p.is_counted
              AND CASE WHEN p.keep_until IS NULL THEN p.state = '' ELSE p.keep_until <= prune_runs.now END
        LIMIT lim FOR UPDATE OF p SKIP LOCKED));
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
