-- Writes, one function per kind. `apply_write` selects the function.
--
-- `apply_write` and `write_turn` lock the row of the run. In a batch all rows have been locked before the first write
-- is applied, in order of their ids, so that the locks here are held already and nothing waits.
--
-- `create_runs`, `write_messages` and `mark_notified` apply many writes of one kind with few statements, for
-- `commit_batch`. They follow the same rules as the functions for one write; tests run the store contract through
-- both.
--
-- A run that ends with observers, unread events or (if ended from outside) children is `unfinalized`. Workers read
-- such runs, notify their observers, redirect or drop the events and end the children. `write_finalize` records what
-- is done, and clears the flag when nothing is left. Until then `prune_page` keeps the run.

-- Create runs, given in order of their ids, unless their ids are taken. Returns the created runs, and those of them
-- without an owner. A worker becomes owner only if it is not fenced; its row is locked so that it is not removed
-- meanwhile. Only created runs are observed: rows of existing runs are not locked.
CREATE FUNCTION add_runs(given jsonb, OUT created text[], OUT unowned text[]) LANGUAGE plpgsql AS $$
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

-- Create many runs. A run that is created and owned gets no row in the result. The others are 'created', or
-- 'created_before' by the same call, or one 'exists'. Rows at -1 name the new runs without an owner.
CREATE FUNCTION create_runs(given jsonb)
RETURNS TABLE (at integer, result_kind text, number bigint, flag boolean, label text, body bytea, note text)
LANGUAGE plpgsql AS $$
DECLARE
    n record := add_runs(given);
    all_created boolean :=  -- then no lookup per run is needed
        coalesce(cardinality(n.created), 0) = jsonb_array_length(given);
BEGIN
    IF NOT all_created OR n.unowned IS NOT NULL THEN
        RETURN QUERY
        SELECT c.at,
               CASE WHEN all_created OR r.id = ANY (n.created) THEN 'created'
                    WHEN r.created_by = c.created_by THEN 'created_before'
                    ELSE 'exists' END,
               NULL::bigint, c.owner IS NOT NULL AND coalesce(r.owner = c.owner, false), NULL, NULL::bytea, NULL
        FROM jsonb_to_recordset(given) AS c (at integer, id text, created_by text, owner text)
        LEFT JOIN runs r ON r.id = c.id  -- no row if it was pruned meanwhile
        UNION ALL
        SELECT -1, NULL, NULL, NULL, u.id, NULL, NULL FROM unnest(n.unowned) AS u (id);
    END IF;
END;
$$;

-- Create one run. A fork has a history and an inbox from the start.
CREATE FUNCTION write_create(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    n record := add_runs(jsonb_build_array(w));
    r runs;
BEGIN
    IF n.created IS NULL THEN
        SELECT * INTO r FROM runs x WHERE x.id = w->>'id';
        RETURN result_of(CASE WHEN r.created_by = w->>'created_by' THEN 'created_before' ELSE 'exists' END,
                        flag => coalesce(r.owner = w->>'owner', false));
    END IF;
    IF w ?| '{entries, inbox}' THEN
        SELECT * INTO r FROM runs x WHERE x.id = w->>'id';
        IF w ? 'entries' THEN
            PERFORM append_entries(r.pk, 0, NULL, w->'entries', r.created_at);
        END IF;
        PERFORM insert_message(r.pk, m.number, m.message)
        FROM jsonb_array_elements(coalesce(w->'inbox', '[]')) WITH ORDINALITY AS m (message, number);
        UPDATE runs x SET last_message_no = coalesce(jsonb_array_length(w->'inbox'), 0) WHERE x.pk = r.pk;
    END IF;
    RETURN result_of('created', flag => n.unowned IS NULL, changed => n.unowned);
END;
$$;

-- Commit a turn. In a larger batch, turns that only append entries, consume messages and patch the run are applied by
-- `commit_batch` instead. A single turn of any kind is applied here, so the common case must be cheap: a statement
-- costs about 15 us and an expression 1 us.
CREATE FUNCTION write_turn(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
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
    SELECT r.pk, r.status, r.owner, r.fence, r.last_message_no, r.has_new_messages INTO run
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
          OR (run.owner IS DISTINCT FROM w->>'worker'  -- rule 5
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
        SELECT r.pk, r.last_message_no, r.has_new_messages INTO run FROM runs r WHERE r.pk = run.pk;
    END IF;
    unread := run.last_message_no > seen AND unread_after(run.pk, seen);
    IF w ? 'patch' THEN
        changed := changed || patch_run(run.pk, w, unread, now);
    ELSIF run.has_new_messages AND NOT unread THEN
        UPDATE runs x SET wake_at = NULL, has_new_messages = false WHERE x.pk = run.pk;
    END IF;
    RETURN result_of('committed', flag => unread, changed => changed);
END;
$$;

-- Drop the entries that a turn makes obsolete: all of them if it continues as new, otherwise those of its dropped
-- locations. Returns the entries to append. The fence moves behind this turn, because the positions of dropped entries
-- must not be used again.
CREATE FUNCTION drop_entries(run runs, w jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    dropped jsonb := w->'extras'->'dropped';
    added jsonb := coalesce(w->'entries', '[]');
BEGIN
    IF w ? 'restart' THEN
        PERFORM start_generation(run, w->'restart');
        added := coalesce(w->'restart'->'entries', '[]');
    ELSIF dropped IS NULL THEN
        RETURN added;
    END IF;
    DELETE FROM entries e
    USING jsonb_array_elements_text('[""]'::jsonb || dropped) AS removed (location)
    WHERE e.run_pk = run.pk AND (e.location = removed.location
                                 OR (removed.location <> '' AND starts_with(e.location, removed.location || '/')))
          AND (removed.location <> '' OR e.kind = 'marker');
    UPDATE runs r
    SET fence = (w->>'base')::bigint
            + greatest(1, coalesce(jsonb_array_length(w->'entries'), 0), jsonb_array_length(added))
    WHERE r.pk = run.pk;
    RETURN added;
END;
$$;

-- Change a run's row for the next generation.
CREATE FUNCTION start_generation(run runs, restart jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM entries e WHERE e.run_pk = run.pk;
    UPDATE runs r
    SET original_workflow = coalesce(r.original_workflow, r.workflow),
        original_input = coalesce(r.original_input, r.input),
        workflow = restart->>'workflow', version = (restart->>'version')::bigint,
        input = decode(restart->>'input', 'base64'), first_executed_at = (restart->>'first_executed_at')::float8,
        run_attempt = (restart->>'run_attempt')::integer, pool = coalesce(restart->>'pool', r.pool),
        generation = r.generation + 1, epoch = r.epoch + 1
    WHERE r.pk = run.pk;
END;
$$;

-- Apply the extras of a turn, which few turns have. Returns the runs that got released events.
CREATE FUNCTION write_extras(run runs, extras jsonb, ends_generation boolean, now float8) RETURNS text[]
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
    RETURN woken;
END;
$$;

-- Change the run's row after a turn; `unread`: there are messages that the turn has not seen. Returns the run's id if
-- other processes must be notified.
CREATE FUNCTION patch_run(of_run bigint, w jsonb, unread boolean, now float8) RETURNS text LANGUAGE plpgsql AS $$
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
        updated_at = now,
        -- The result of `needs_finalization`, which need not be called for the many runs without messages.
        unfinalized = ended AND (
            EXISTS (SELECT FROM observers o WHERE o.run_pk = of_run)
            OR (r.last_message_no > 0 AND needs_finalization(r.pk)))
    WHERE r.pk = of_run;
    RETURN CASE WHEN ended OR (new_owner IS NULL AND wake IS NOT NULL) THEN w->>'run_id' END;
END;
$$;

-- Deliver a message, once per id.
CREATE FUNCTION write_message(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    m jsonb := w->'message';
    capacity bigint := (w->>'limit')::bigint;
    number_before bigint;  -- if the message was delivered before
    pending bigint;
BEGIN
    number_before := message_number(r.pk, m->>'id');
    IF number_before IS NOT NULL THEN
        RETURN result_of('delivered', number_before, false, r.owner);
    ELSIF terminal(r.status) THEN
        RETURN result_of('ended', label => r.status);
    END IF;
    IF r.last_message_no >= capacity AND is_event(m->>'kind') THEN  -- otherwise the inbox cannot be full
        SELECT count(*) INTO pending FROM inbox i WHERE i.run_pk = r.pk AND i.consumed_at IS NULL AND is_event(i.kind);
        IF pending >= capacity THEN
            RETURN result_of('full', pending);
        END IF;
    END IF;
    PERFORM insert_message(r.pk, r.last_message_no + 1, m);
    PERFORM on_message(r, r.last_message_no + 1, m->>'kind', (w->>'now')::float8);
    RETURN result_of('delivered', r.last_message_no + 1, true, r.owner, ARRAY[r.id]);
END;
$$;

-- Deliver many messages. Several messages to one run are numbered in their order. They have different ids and no
-- limit.
CREATE FUNCTION write_messages(given jsonb)
RETURNS TABLE (at integer, result_kind text, number bigint, flag boolean, label text, body bytea, note text)
LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    WITH checked AS MATERIALIZED (
        SELECT k.*, k.last_message_no + count(*) FILTER (WHERE k.result_kind = 'fresh')
                                   OVER (PARTITION BY k.pk ORDER BY k.at) AS next
        FROM (
            SELECT m.*, r.pk, r.status, r.owner, r.last_message_no, before.number AS number_before, pending.count,
                   (r.held IS NULL AND r.first_executed_at IS NOT NULL) OR r.owner IS NOT NULL
                       OR wakes_held(m.kind) AS wakes,
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
                SELECT CASE WHEN r.last_message_no >= m.capacity AND is_event(m.kind) THEN (
                    SELECT count(*) FROM inbox i
                    WHERE i.run_pk = r.pk AND i.consumed_at IS NULL AND is_event(i.kind)) END
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

-- End a run from outside. It takes a position and moves the fence, so that a turn computed meanwhile is refused.
CREATE FUNCTION write_end(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
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
        held_kind = NULL,
        ended_at = now, updated_at = now, prune_at = now + (w->>'prune_after')::float8, fence = last + 1,
        orphaned_children = has_started(r), unfinalized = has_started(r) OR needs_finalization(r.pk)
    WHERE x.pk = r.pk;
    RETURN result_of('committed', changed => ARRAY[r.id]);
END;
$$;

CREATE FUNCTION write_release(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
BEGIN
    IF terminal(r.status) OR NOT alive(w->>'worker') OR r.owner <> w->>'worker' THEN
        RETURN result_of('superseded');
    ELSIF r.owner IS NULL THEN
        RETURN result_of('committed');
    END IF;
    UPDATE runs x
    SET owner = NULL, has_new_messages = false, status = status_released(r), wake_at = (w->>'now')::float8,
        updated_at = (w->>'now')::float8
    WHERE x.pk = r.pk;
    RETURN result_of('committed', changed => ARRAY[r.id]);
END;
$$;

CREATE FUNCTION write_observe(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
BEGIN
    IF terminal(r.status) THEN
        RETURN result_of('ended_with_result', label => r.status, body => r.result, note => r.error);
    END IF;
    INSERT INTO observers (run_pk, observer, target)
    SELECT r.pk, w->>'observer', w->>'target'
    WHERE NOT EXISTS (
        SELECT FROM observers o WHERE o.run_pk = r.pk AND o.observer = w->>'observer' AND o.target = w->>'target');
    RETURN result_of('observing');
END;
$$;

CREATE FUNCTION write_rewind(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    base bigint := (w->>'base')::bigint;
    now float8 := (w->>'now')::float8;
    dropped text[] := ARRAY(SELECT jsonb_array_elements_text(w->'dropped'));
    last bigint;
BEGIN
    last := position_of(r);
    IF last > base AND turn_at(r.pk, base + 1) = w->>'turn_id' THEN
        RETURN result_of('committed');
    ELSIF last <> base THEN
        RETURN result_of('superseded');
    END IF;
    DELETE FROM entries e WHERE e.run_pk = r.pk AND e.kind <> 'marker' AND e.location = ANY (dropped);
    UPDATE stream_items s SET superseded = true WHERE s.run_pk = r.pk AND s.location = ANY (dropped)
        AND s.epoch = r.epoch AND NOT s.superseded;
    DELETE FROM subscriptions s WHERE s.run_pk = r.pk;
    PERFORM append_entries(r.pk, base, w->>'turn_id', w->'entries', now);
    PERFORM restore_message(r.pk, message) FROM jsonb_array_elements(coalesce(w->'returned', '[]')) AS message;
    UPDATE runs x
    SET status = status_released(r), generation = r.generation + 1, owner = NULL, has_new_messages = false,
        wake_at = now, updated_at = now, result = NULL, error = NULL, ended_at = NULL, held = NULL,
        held_kind = NULL, waits = NULL, drift = NULL, recoveries = 0, prune_at = NULL, unfinalized = false,
        orphaned_children = false, deadline_at = (w->>'deadline_at')::float8,
        fence = base + greatest(1, jsonb_array_length(coalesce(w->'entries', '[]')))
    WHERE x.pk = r.pk;
    RETURN result_of('committed', changed => ARRAY[r.id]);
END;
$$;

-- Restore a consumed message as unread. An event that was deleted when it was consumed is assigned to the run again.
CREATE FUNCTION restore_message(of_run bigint, message jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM insert_message(of_run, (message->>'number')::bigint, message);
    IF message->>'kind' = 'assignment' THEN
        UPDATE topic_events e SET assigned_to = of_run, body = decode(message->>'body', 'base64'), deleted_at = NULL
        FROM topics t
        WHERE t.name = message->>'name' AND e.topic_pk = t.pk AND e.event_offset = (message->>'offset')::bigint
              AND e.consume AND e.deleted_at IS NOT NULL;
    END IF;
END;
$$;

-- Record the finalization of an ended run: observers notified, messages consumed, released or redirected, children
-- ended. Does nothing if the run is already finalized or was rewound: a repeated call must not consume messages of a
-- new generation.
CREATE FUNCTION write_finalize(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    woken text[];
    redirected jsonb;
    published write_result;
BEGIN
    IF NOT r.unfinalized THEN
        RETURN result_of('committed');
    END IF;
    DELETE FROM observers o
    USING jsonb_to_recordset(coalesce(w->'notified', '[]')) AS notified (run_id text, target text)
    WHERE o.run_pk = r.pk AND o.observer = notified.run_id AND o.target = notified.target;
    IF w ? 'consumed' THEN
        PERFORM consume_messages(r.pk, w->'consumed', (w->>'now')::float8);
    END IF;
    IF w ? 'returned' THEN
        woken := release_assignments(r.pk, w->'returned', (w->>'now')::float8);
    END IF;
    IF w ? 'dead_letters' THEN
        PERFORM add_dead_letters(w->'dead_letters');
    END IF;
    FOR redirected IN SELECT * FROM jsonb_array_elements(coalesce(w->'redirected', '[]')) LOOP
        CONTINUE WHEN consume_messages(r.pk, jsonb_build_array(redirected->'number'), (w->>'now')::float8) = 0;
        published := write_publish(redirected->'to');
        woken := woken || published.changed;
        IF published.result_kind = 'full' THEN
            PERFORM add_dead_letters(jsonb_build_array(redirected->'otherwise'));
        END IF;
    END LOOP;
    r.orphaned_children := r.orphaned_children AND NOT (w->>'orphaned_children')::boolean;
    UPDATE runs x
    SET orphaned_children = r.orphaned_children, unfinalized = r.orphaned_children OR needs_finalization(r.pk)
    WHERE x.pk = r.pk;
    RETURN result_of('committed', changed => woken);
END;
$$;

-- Record that observers of different ended runs were notified, at most one per row. An existing run gets no row in the
-- result.
CREATE FUNCTION mark_notified(given jsonb)
RETURNS TABLE (at integer, result_kind text, number bigint, flag boolean, label text, body bytea, note text)
LANGUAGE plpgsql AS $$
DECLARE
    unfinalized_runs bigint[] := ARRAY(
        SELECT r.pk FROM jsonb_to_recordset(given) AS s (run_id text)
        CROSS JOIN LATERAL (SELECT x.pk FROM runs x WHERE x.id = s.run_id AND x.unfinalized OFFSET 0) AS r);
BEGIN
    DELETE FROM observers o
    USING (  -- looks up each one separately
        SELECT notified.row FROM jsonb_to_recordset(given) AS s (run_id text, observer text, target text)
        CROSS JOIN LATERAL (SELECT x.pk FROM runs x WHERE x.id = s.run_id AND x.unfinalized OFFSET 0) AS r
        CROSS JOIN LATERAL (
            SELECT x.ctid FROM observers x
            WHERE x.run_pk = r.pk AND x.observer = s.observer AND x.target = s.target OFFSET 0
        ) AS notified (row)
        OFFSET 0
    ) AS notified
    WHERE o.ctid = notified.row;
    UPDATE runs r  -- OFFSET 0: looks up the messages of each run, instead of reading all unread messages
    SET unfinalized = r.orphaned_children
        OR EXISTS (SELECT FROM observers o WHERE o.run_pk = r.pk)
        OR EXISTS (SELECT FROM inbox i WHERE i.run_pk = r.pk AND i.consumed_at IS NULL AND is_event(i.kind) OFFSET 0)
    FROM unnest(unfinalized_runs) AS s (pk)
    WHERE r.pk = s.pk;
    RETURN QUERY
    SELECT s.at, 'missing', NULL::bigint, NULL::boolean, NULL, NULL::bytea, NULL
    FROM jsonb_to_recordset(given) AS s (at integer, run_id text)
    WHERE NOT EXISTS (SELECT FROM runs r WHERE r.id = s.run_id);
END;
$$;

-- Send a dead letter again and remove it, or neither. The id of the sent message or event identifies a repeated call.
-- The dead letter is locked last: a transaction that holds it waits for no other lock, so that this cannot deadlock.
CREATE FUNCTION write_replay(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    send jsonb := w->'send';
    sent write_result;
BEGIN
    PERFORM FROM dead_letters d WHERE d.id = w->>'dead_letter_id' FOR UPDATE;
    IF NOT FOUND AND NOT EXISTS (
        SELECT FROM topic_events e JOIN topics t ON t.pk = e.topic_pk
        WHERE t.name = send->'event'->>'topic' AND e.id = send->'event'->>'id'
        UNION ALL
        SELECT FROM inbox i JOIN runs r ON r.pk = i.run_pk
        WHERE r.id = send->>'run_id' AND i.id = send->'message'->>'id')
    THEN
        RETURN result_of('dead_letter_missing');
    END IF;
    sent := apply_write(send);
    IF sent.result_kind IN ('delivered', 'published', 'published_before') THEN
        DELETE FROM dead_letters d WHERE d.id = w->>'dead_letter_id';
    END IF;
    RETURN sent;
END;
$$;

CREATE FUNCTION write_append_stream(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    items jsonb := coalesce(w->'items', '[]');
    stored bigint;
    first bigint;
BEGIN
    IF terminal(r.status) THEN
        RETURN result_of('ended', label => r.status);
    ELSIF r.owner IS DISTINCT FROM w->>'worker' OR NOT alive(w->>'worker') THEN
        RETURN result_of('superseded');
    END IF;
    SELECT coalesce(max(s.writer_seq) + 1, 0) INTO stored FROM stream_items s
    WHERE s.run_pk = r.pk AND s.writer = items->0->>'writer' AND s.writer_seq IS NOT NULL;
    first := coalesce((w->>'first')::bigint, stored);
    items := coalesce(
        (SELECT jsonb_agg(i.item ORDER BY i.nth) FROM jsonb_array_elements(items) WITH ORDINALITY AS i (item, nth)
         WHERE first + i.nth > stored), '[]');
    PERFORM add_items(r, items, greatest(first, stored));
    RETURN result_of('committed');
END;
$$;

CREATE FUNCTION write_supersede_stream(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
BEGIN
    UPDATE stream_items s SET superseded = true
    WHERE s.run_pk = r.pk AND s.epoch = r.epoch AND s.location = w->>'location' AND s.writer <> w->>'writer'
          AND NOT s.superseded;
    RETURN result_of('committed');
END;
$$;

-- Apply one write. Most kinds require that their run exists.
CREATE FUNCTION apply_write(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    r runs;
BEGIN
    CASE w->>'kind'
        WHEN 'turn' THEN RETURN write_turn(w);
        WHEN 'create' THEN RETURN write_create(w);
        WHEN 'publish' THEN RETURN write_publish(w);
        WHEN 'fan_out' THEN RETURN write_fan_out(w);
        WHEN 'replay' THEN RETURN write_replay(w);
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
    END CASE;
END;
$$;
