-- Writes, one function each. The row of the run that one is about is locked here, for one that comes by itself; in a
-- batch all are locked before the first is carried out, in order, and are not waited for again.

-- Make runs, which come in the order of their ids, unless these are taken: those that were made, and which of them
-- nobody owns. A worker owns one only if it is not gone, and is not forgotten meanwhile. Only those that are made are
-- observed: the others are not locked.
CREATE FUNCTION add_runs(given jsonb, OUT made text[], OUT unowned text[]) LANGUAGE plpgsql AS $$
BEGIN
    WITH added AS (
        INSERT INTO runs AS r (
            id, workflow, version, input, created_at, created_by, seed, pool, shard, status, generation, epoch,
            run_attempt, original_workflow, original_input, parent, attached, tags, first_executed_at, updated_at, wake_at, owner,
            deadline_at, retention)
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
            SELECT w.id FROM workers w WHERE w.id = c->>'owner' AND NOT w.gone FOR KEY SHARE) AS o (owner) ON true
        ON CONFLICT (id) DO NOTHING
        RETURNING r.id, r.owner
    )
    SELECT array_agg(a.id), array_agg(a.id) FILTER (WHERE a.owner IS NULL) INTO made, unowned FROM added a;
    IF given @? '$[*].observer' THEN
        INSERT INTO observers (run_no, observer, target)
        SELECT r.no, c.observer, c.target
        FROM jsonb_to_recordset(given) AS c (id text, observer text, target text)
        CROSS JOIN LATERAL (SELECT x.no, x.id FROM runs x WHERE x.id = c.id OFFSET 0) AS r  -- each by itself
        WHERE c.observer IS NOT NULL AND (cardinality(made) = jsonb_array_length(given) OR r.id = ANY (made));
    END IF;
END;
$$;

-- Make runs, all at once. One that is made and owned gets no row; the others are 'made', or were 'created' before by
-- the same call, or one 'exists'. New runs that nobody owns are named in rows at -1.
CREATE FUNCTION create_runs(given jsonb)
RETURNS TABLE (at integer, verdict text, number bigint, flag boolean, label text, body bytea, note text)
LANGUAGE plpgsql AS $$
DECLARE
    n record := add_runs(given);
    all_made boolean := coalesce(cardinality(n.made), 0) = jsonb_array_length(given);  -- spares looking for each
BEGIN
    IF NOT all_made OR n.unowned IS NOT NULL THEN
        RETURN QUERY
        SELECT c.at,
               CASE WHEN all_made OR r.id = ANY (n.made) THEN 'made'
                    WHEN r.created_by = c.created_by THEN 'created'
                    ELSE 'exists' END,
               NULL::bigint, c.owner IS NOT NULL AND coalesce(r.owner = c.owner, false), NULL, NULL::bytea, NULL
        FROM jsonb_to_recordset(given) AS c (at integer, id text, created_by text, owner text)
        LEFT JOIN runs r ON r.id = c.id  -- unless it was pruned just now
        UNION ALL
        SELECT -1, NULL, NULL, NULL, u.id, NULL, NULL FROM unnest(n.unowned) AS u (id);
    END IF;
END;
$$;

-- Make one run, perhaps with a history and an inbox of its own from the beginning.
CREATE FUNCTION write_create(w jsonb) RETURNS answer LANGUAGE plpgsql AS $$
DECLARE
    n record := add_runs(jsonb_build_array(w));
    r runs;
BEGIN
    IF n.made IS NULL THEN
        SELECT * INTO r FROM runs x WHERE x.id = w->>'id';
        RETURN answered(CASE WHEN r.created_by = w->>'created_by' THEN 'created' ELSE 'exists' END,
                        flag => coalesce(r.owner = w->>'owner', false));
    END IF;
    IF w ?| '{entries, inbox}' THEN
        SELECT * INTO r FROM runs x WHERE x.id = w->>'id';
        IF w ? 'entries' THEN
            PERFORM append_entries(r.no, 0, NULL, w->'entries', r.created_at);
        END IF;
        PERFORM put_message(r.no, m.number, m.message)
        FROM jsonb_array_elements(coalesce(w->'inbox', '[]')) WITH ORDINALITY AS m (message, number);
        UPDATE runs x SET last_message_no = coalesce(jsonb_array_length(w->'inbox'), 0) WHERE x.no = r.no;
    END IF;
    RETURN answered('made', flag => n.unowned IS NULL, changed => n.unowned);
END;
$$;

-- Turns that are not alone in their batch come here only if they are more than entries, read mail and a patch. One that
-- is alone does whatever it is, so this is to be cheap if there is little to do: a statement costs some 15 us, and an
-- expression of this language 1.
CREATE FUNCTION write_turn(w jsonb) RETURNS answer LANGUAGE plpgsql AS $$
DECLARE
    base bigint := (w->>'base')::bigint;
    seen bigint := (w->>'seen')::bigint;
    now float8 := (w->>'now')::float8;
    added jsonb := w->'entries';
    leaves boolean := w ? 'restart' OR terminal(coalesce(w->'patch'->>'status', ''));
    run record;
    before runs;
    last bigint;
    lives boolean;
    unread boolean;
    changed text[];
BEGIN
    IF w->'patch' ? 'owner' THEN  -- who must not be forgotten while it gets a run
        PERFORM FROM workers x WHERE x.id = w->'patch'->>'owner' FOR KEY SHARE;
    END IF;
    SELECT r.no, r.status, r.owner, r.fence, r.last_message_no, r.mailed INTO run
    FROM runs r WHERE r.id = w->>'run_id' FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN answered('missing');
    END IF;
    SELECT greatest(run.fence, (SELECT max(e.position) FROM entries e WHERE e.run_no = run.no), 0),
           EXISTS (SELECT FROM workers x WHERE x.id = w->>'worker' AND NOT x.gone)
    INTO last, lives;
    IF last > base AND turn_at(run.no, base + 1) = w->>'turn_id' THEN
        RETURN answered('committed', flag => run.last_message_no > seen AND unread_after(run.no, seen));
    ELSIF terminal(run.status) THEN
        RETURN answered('ended', label => run.status);
    ELSIF base <> last OR NOT lives
          OR (run.owner IS DISTINCT FROM w->>'worker' AND ((w->>'owned')::boolean OR run.owner IS NOT NULL)) THEN
        RETURN answered('superseded');
    END IF;
    IF w ?| '{restart, extras}' THEN
        SELECT * INTO before FROM runs r WHERE r.no = run.no;
        added := make_way(before, w);
    END IF;
    last := append_entries(run.no, base, w->>'turn_id', added, now);
    IF w ? 'consumed' THEN
        PERFORM consume_mail(run.no, w->'consumed', now);
    END IF;
    IF leaves THEN
        DELETE FROM subscriptions s WHERE s.run_no = run.no;
    END IF;
    IF w ? 'extras' THEN
        changed := write_extras(before, w->'extras', leaves, now);
        SELECT r.no, r.last_message_no, r.mailed INTO run FROM runs r WHERE r.no = run.no;  -- it may have got mail
    END IF;
    unread := run.last_message_no > seen AND unread_after(run.no, seen);
    IF w ? 'patch' THEN
        changed := changed || patch_run(run.no, w, unread, now);
    ELSIF run.mailed AND NOT unread THEN
        UPDATE runs x SET wake_at = NULL, mailed = false WHERE x.no = run.no;
    END IF;
    RETURN answered('committed', flag => unread, changed => changed);
END;
$$;

-- Drop what a turn that begins anew, or rewinds a part, leaves behind. What it appends.
CREATE FUNCTION make_way(run runs, w jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    dropped jsonb := w->'extras'->'dropped';
    added jsonb := coalesce(w->'entries', '[]');
BEGIN
    IF w ? 'restart' THEN
        PERFORM begin_anew(run, w->'restart');
        added := coalesce(w->'restart'->'entries', '[]');
    ELSIF dropped IS NULL THEN
        RETURN added;
    END IF;
    DELETE FROM entries e
    USING jsonb_array_elements_text('[""]'::jsonb || dropped) AS gone (location)
    WHERE e.run_no = run.no AND (e.location = gone.location
                                 OR (gone.location <> '' AND starts_with(e.location, gone.location || '/')))
          AND (gone.location <> '' OR e.kind = 'marker');
    UPDATE runs r
    SET fence = (w->>'base')::bigint
            + greatest(1, coalesce(jsonb_array_length(w->'entries'), 0), jsonb_array_length(added))
    WHERE r.no = run.no;
    RETURN added;
END;
$$;

CREATE FUNCTION begin_anew(run runs, restart jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM entries e WHERE e.run_no = run.no;
    UPDATE runs r
    SET original_workflow = coalesce(r.original_workflow, r.workflow), original_input = coalesce(r.original_input, r.input),
        workflow = restart->>'workflow', version = (restart->>'version')::bigint,
        input = decode(restart->>'input', 'base64'), first_executed_at = (restart->>'first_executed_at')::float8,
        run_attempt = (restart->>'run_attempt')::integer, pool = coalesce(restart->>'pool', r.pool),
        generation = r.generation + 1, epoch = r.epoch + 1
    WHERE r.no = run.no;
END;
$$;

-- What few turns have; the runs that were given returned events.
CREATE FUNCTION write_extras(run runs, extras jsonb, leaves boolean, now float8) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    woken text[];
BEGIN
    IF extras ? 'unsubscribe' THEN
        DELETE FROM subscriptions s
        WHERE s.run_no = run.no AND s.target IN (SELECT jsonb_array_elements_text(extras->'unsubscribe'));
    END IF;
    IF extras ? 'returned' THEN
        woken := give_back(run.no, extras->'returned', now);
    END IF;
    IF extras ? 'subscribe' AND NOT leaves THEN
        PERFORM subscribe(run, wanted, now) FROM jsonb_array_elements(extras->'subscribe') AS wanted;
    END IF;
    IF extras ? 'published' THEN
        INSERT INTO published AS p (run_no, key, value, expires_at)
        SELECT DISTINCT ON (v.shown->>'key')
               run.no, v.shown->>'key', decode(v.shown->>'value', 'base64'), (v.shown->>'expires_at')::float8
        FROM jsonb_array_elements(extras->'published') WITH ORDINALITY AS v (shown, nth)
        ORDER BY v.shown->>'key', v.nth DESC
        ON CONFLICT ON CONSTRAINT published_pkey DO UPDATE SET value = excluded.value,
            expires_at = excluded.expires_at;
    END IF;
    IF extras ? 'streamed' THEN
        PERFORM add_items(run, extras->'streamed');
    END IF;
    IF extras ? 'dead_letters' THEN
        PERFORM add_letters(extras->'dead_letters');
    END IF;
    RETURN woken;
END;
$$;

-- The run's row after a turn; `unread`: there is mail that it has not seen. Returns its id if others want to hear of it.
CREATE FUNCTION patch_run(of_run bigint, w jsonb, unread boolean, now float8) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    patch jsonb := w->'patch';
    ended boolean := terminal(patch->>'status');
    new_owner text := CASE WHEN NOT ended THEN patch->>'owner' END;
    asleep boolean := new_owner IS NULL AND (
        patch->>'held' IS NOT NULL OR (w ? 'restart' AND w->'restart'->>'first_executed_at' IS NULL));
    unseen boolean := unread AND (NOT asleep OR unread_after(of_run, (w->>'seen')::bigint, true));
    wake float8 := CASE WHEN ended THEN NULL WHEN unseen THEN now ELSE (patch->>'wake_at')::float8 END;
BEGIN
    UPDATE runs r
    SET status = patch->>'status', owner = new_owner, wake_at = wake, mailed = unseen AND new_owner IS NOT NULL,
        waits = patch->>'waits', held = patch->>'held', held_kind = patch->>'held_kind', drift = patch->>'drift',
        recoveries = (patch->>'recoveries')::integer, result = decode(patch->>'result', 'base64'),
        error = patch->>'error', ended_at = (patch->>'ended_at')::float8, prune_at = (patch->>'prune_at')::float8,
        updated_at = now, unsettled = ended AND (  -- as `owes` says, which need not be asked about mail of most
            EXISTS (SELECT FROM observers o WHERE o.run_no = of_run) OR (r.last_message_no > 0 AND owes(r.no)))
    WHERE r.no = of_run;
    RETURN CASE WHEN ended OR (new_owner IS NULL AND wake IS NOT NULL) THEN w->>'run_id' END;
END;
$$;

CREATE FUNCTION write_mail(w jsonb, r runs) RETURNS answer LANGUAGE plpgsql AS $$
DECLARE
    m jsonb := w->'message';
    room bigint := (w->>'limit')::bigint;
    known bigint;
BEGIN
    known := message_number(r.no, m->>'id');
    IF known IS NOT NULL THEN
        RETURN answered('delivered', known, false, r.owner);
    ELSIF terminal(r.status) THEN
        RETURN answered('ended', label => r.status);
    END IF;
    IF r.last_message_no >= room AND is_event(m->>'kind') THEN  -- only then it may be full
        SELECT count(*) INTO known FROM inbox i WHERE i.run_no = r.no AND i.consumed_at IS NULL AND is_event(i.kind);
        IF known >= room THEN
            RETURN answered('full', known);
        END IF;
    END IF;
    PERFORM put_message(r.no, r.last_message_no + 1, m);
    PERFORM mail_came(r, r.last_message_no + 1, m->>'kind', (w->>'now')::float8);
    RETURN answered('delivered', r.last_message_no + 1, true, r.owner, ARRAY[r.id]);
END;
$$;

-- Messages, all at once; those to one run get their numbers in the order in which they stand. Of several to one run
-- none has an id that another has, nor a limit.
CREATE FUNCTION deliver_all(given jsonb)
RETURNS TABLE (at integer, verdict text, number bigint, flag boolean, label text, body bytea, note text)
LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    WITH judged AS MATERIALIZED (
        SELECT k.*, k.last_message_no + count(*) FILTER (WHERE k.verdict = 'fresh')
                                   OVER (PARTITION BY k.no ORDER BY k.at) AS next
        FROM (
            SELECT m.*, r.no, r.status, r.owner, r.last_message_no, known.number AS known, pending.count,
                   (r.held IS NULL AND r.first_executed_at IS NOT NULL) OR r.owner IS NOT NULL OR wakes_held(m.kind) AS wakes,
                   CASE WHEN r.no IS NULL THEN 'missing'
                        WHEN known.number IS NOT NULL THEN 'delivered'
                        WHEN terminal(r.status) THEN 'ended'
                        WHEN pending.count >= m.room THEN 'full'
                        ELSE 'fresh' END AS verdict
            FROM jsonb_to_recordset(given) AS m (
                at integer, run_id text, now float8, room bigint, id text, kind text, name text, body text, sender text,
                sent_at float8, expires_at float8, policy text, target text, place bigint, wants_reply boolean,
                event_id text)
            LEFT JOIN runs r ON r.id = m.run_id
            LEFT JOIN LATERAL (SELECT message_number(r.no, m.id) OFFSET 0) AS known (number) ON true
            CROSS JOIN LATERAL (
                SELECT CASE WHEN r.last_message_no >= m.room AND is_event(m.kind) THEN (
                    SELECT count(*) FROM inbox i
                    WHERE i.run_no = r.no AND i.consumed_at IS NULL AND is_event(i.kind)) END
                OFFSET 0  -- computed once
            ) AS pending (count)
        ) AS k
    ), added AS (
        INSERT INTO inbox (run_no, number, id, kind, name, body, sender, sent_at, expires_at, policy, target, place,
                           wants_reply, event_id)
        SELECT j.no, j.next, j.id, j.kind, j.name, decode(j.body, 'base64'), j.sender, j.sent_at, j.expires_at,
               j.policy, j.target, j.place, j.wants_reply, j.event_id
        FROM judged j WHERE j.verdict = 'fresh'
    ), woken AS (
        UPDATE runs r
        SET last_message_no = j.last,
            wake_at = CASE WHEN j.wakes THEN least(r.wake_at, j.now) ELSE r.wake_at END,
            mailed = CASE WHEN j.wakes THEN r.owner IS NOT NULL ELSE r.mailed END
        FROM (
            SELECT x.no, max(x.next) AS last, min(x.now) FILTER (WHERE x.wakes) AS now, bool_or(x.wakes) AS wakes
            FROM judged x WHERE x.verdict = 'fresh' GROUP BY x.no
        ) AS j
        WHERE r.no = j.no
    )
    SELECT j.at, CASE j.verdict WHEN 'fresh' THEN 'delivered' ELSE j.verdict END,
           CASE j.verdict WHEN 'fresh' THEN j.next WHEN 'full' THEN j.count ELSE j.known END, j.verdict = 'fresh',
           CASE j.verdict WHEN 'ended' THEN j.status ELSE j.owner END, NULL::bytea, NULL
    FROM judged j
    UNION ALL
    SELECT DISTINCT -1, NULL, NULL::bigint, NULL::boolean, j.run_id, NULL::bytea, NULL
    FROM judged j WHERE j.verdict = 'fresh';
END;
$$;

CREATE FUNCTION write_end(w jsonb, r runs) RETURNS answer LANGUAGE plpgsql AS $$
DECLARE
    now float8 := (w->>'now')::float8;
    last bigint;
BEGIN
    last := position_of(r);
    IF turn_at(r.no, last) = w->>'turn_id' THEN
        RETURN answered('committed');
    ELSIF terminal(r.status) THEN
        RETURN answered('ended', label => r.status);
    ELSIF (w->>'only_if_not_started')::boolean AND has_begun(r) THEN
        RETURN answered('begun');
    END IF;
    PERFORM append_entries(r.no, last, w->>'turn_id', NULL, now);
    DELETE FROM subscriptions s WHERE s.run_no = r.no;
    UPDATE runs x
    SET status = w->>'status', owner = NULL, wake_at = NULL, mailed = false, waits = NULL, held = NULL,
        held_kind = NULL,
        ended_at = now, updated_at = now, prune_at = now + (w->>'prune_after')::float8, fence = last + 1,
        orphans = has_begun(r), unsettled = has_begun(r) OR owes(r.no)
    WHERE x.no = r.no;
    RETURN answered('committed', changed => ARRAY[r.id]);
END;
$$;

CREATE FUNCTION write_release(w jsonb, r runs) RETURNS answer LANGUAGE plpgsql AS $$
BEGIN
    IF terminal(r.status) OR NOT alive(w->>'worker') OR r.owner <> w->>'worker' THEN
        RETURN answered('superseded');
    ELSIF r.owner IS NULL THEN
        RETURN answered('committed');
    END IF;
    UPDATE runs x
    SET owner = NULL, mailed = false, status = status_released(r), wake_at = (w->>'now')::float8,
        updated_at = (w->>'now')::float8
    WHERE x.no = r.no;
    RETURN answered('committed', changed => ARRAY[r.id]);
END;
$$;

CREATE FUNCTION write_observe(w jsonb, r runs) RETURNS answer LANGUAGE plpgsql AS $$
BEGIN
    IF terminal(r.status) THEN
        RETURN answered('ended so', label => r.status, body => r.result, note => r.error);
    END IF;
    INSERT INTO observers (run_no, observer, target)
    SELECT r.no, w->>'observer', w->>'target'
    WHERE NOT EXISTS (
        SELECT FROM observers o WHERE o.run_no = r.no AND o.observer = w->>'observer' AND o.target = w->>'target');
    RETURN answered('observing');
END;
$$;

CREATE FUNCTION write_rewind(w jsonb, r runs) RETURNS answer LANGUAGE plpgsql AS $$
DECLARE
    base bigint := (w->>'base')::bigint;
    now float8 := (w->>'now')::float8;
    dropped text[] := ARRAY(SELECT jsonb_array_elements_text(w->'dropped'));
    last bigint;
BEGIN
    last := position_of(r);
    IF last > base AND turn_at(r.no, base + 1) = w->>'turn_id' THEN
        RETURN answered('committed');
    ELSIF last <> base THEN
        RETURN answered('superseded');
    END IF;
    DELETE FROM entries e WHERE e.run_no = r.no AND e.kind <> 'marker' AND e.location = ANY (dropped);
    UPDATE stream_items s SET superseded = true WHERE s.run_no = r.no AND s.location = ANY (dropped)
        AND s.epoch = r.epoch AND NOT s.superseded;
    DELETE FROM subscriptions s WHERE s.run_no = r.no;
    PERFORM append_entries(r.no, base, w->>'turn_id', w->'entries', now);
    PERFORM take_again(r.no, message) FROM jsonb_array_elements(coalesce(w->'returned', '[]')) AS message;
    UPDATE runs x
    SET status = status_released(r), generation = r.generation + 1, owner = NULL, mailed = false, wake_at = now,
        updated_at = now, result = NULL, error = NULL, ended_at = NULL, held = NULL, held_kind = NULL, waits = NULL,
        drift = NULL, recoveries = 0, prune_at = NULL, unsettled = false, orphans = false,
        deadline_at = (w->>'deadline_at')::float8,
        fence = base + greatest(1, jsonb_array_length(coalesce(w->'entries', '[]')))
    WHERE x.no = r.no;
    RETURN answered('committed', changed => ARRAY[r.id]);
END;
$$;

-- A message that was consumed is unread again; an event that was gone by it is its reader's again.
CREATE FUNCTION take_again(of_run bigint, message jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM put_message(of_run, (message->>'number')::bigint, message);
    IF message->>'kind' = 'assignment' THEN
        UPDATE topic_events e SET assigned_to = of_run, body = decode(message->>'body', 'base64'), deleted_at = NULL
        FROM topics t
        WHERE t.name = message->>'name' AND e.topic_no = t.no AND e.place = (message->>'place')::bigint AND e.consume
              AND e.deleted_at IS NOT NULL;
    END IF;
END;
$$;

CREATE FUNCTION write_settle(w jsonb, r runs) RETURNS answer LANGUAGE plpgsql AS $$
DECLARE
    woken text[];
    moved jsonb;
    published answer;
BEGIN
    IF NOT r.unsettled THEN
        RETURN answered('committed');
    END IF;
    DELETE FROM observers o
    USING jsonb_to_recordset(coalesce(w->'told', '[]')) AS told (run_id text, target text)
    WHERE o.run_no = r.no AND o.observer = told.run_id AND o.target = told.target;
    IF w ? 'consumed' THEN
        PERFORM consume_mail(r.no, w->'consumed', (w->>'now')::float8);
    END IF;
    IF w ? 'returned' THEN
        woken := give_back(r.no, w->'returned', (w->>'now')::float8);
    END IF;
    IF w ? 'dead_letters' THEN
        PERFORM add_letters(w->'dead_letters');
    END IF;
    FOR moved IN SELECT * FROM jsonb_array_elements(coalesce(w->'moved', '[]')) LOOP
        CONTINUE WHEN consume_mail(r.no, jsonb_build_array(moved->'number'), (w->>'now')::float8) = 0;
        published := write_publish(moved->'to');
        woken := woken || published.changed;
        IF published.verdict = 'full' THEN
            PERFORM add_letters(jsonb_build_array(moved->'otherwise'));
        END IF;
    END LOOP;
    r.orphans := r.orphans AND NOT (w->>'orphans')::boolean;
    UPDATE runs x SET orphans = r.orphans, unsettled = r.orphans OR owes(r.no) WHERE x.no = r.no;
    RETURN answered('committed', changed => woken);
END;
$$;

-- Tick off who was told of the ends of different runs, one or nobody a row, all at once. A run that is there gets no
-- row in the answer.
CREATE FUNCTION tick_off(given jsonb)
RETURNS TABLE (at integer, verdict text, number bigint, flag boolean, label text, body bytea, note text)
LANGUAGE plpgsql AS $$
DECLARE
    owing bigint[] := ARRAY(
        SELECT r.no FROM jsonb_to_recordset(given) AS s (run_id text)
        CROSS JOIN LATERAL (SELECT x.no FROM runs x WHERE x.id = s.run_id AND x.unsettled OFFSET 0) AS r);
BEGIN
    DELETE FROM observers o
    USING (  -- each is looked up by itself
        SELECT told.row FROM jsonb_to_recordset(given) AS s (run_id text, observer text, target text)
        CROSS JOIN LATERAL (SELECT x.no FROM runs x WHERE x.id = s.run_id AND x.unsettled OFFSET 0) AS r
        CROSS JOIN LATERAL (
            SELECT x.ctid FROM observers x
            WHERE x.run_no = r.no AND x.observer = s.observer AND x.target = s.target OFFSET 0
        ) AS told (row)
        OFFSET 0
    ) AS told
    WHERE o.ctid = told.row;
    UPDATE runs r  -- OFFSET: each is asked for by itself, instead of all unread mail that there is
    SET unsettled = r.orphans
        OR EXISTS (SELECT FROM observers o WHERE o.run_no = r.no)
        OR EXISTS (SELECT FROM inbox i WHERE i.run_no = r.no AND i.consumed_at IS NULL AND is_event(i.kind) OFFSET 0)
    FROM unnest(owing) AS s (no)
    WHERE r.no = s.no;
    RETURN QUERY
    SELECT s.at, 'missing', NULL::bigint, NULL::boolean, NULL, NULL::bytea, NULL
    FROM jsonb_to_recordset(given) AS s (at integer, run_id text)
    WHERE NOT EXISTS (SELECT FROM runs r WHERE r.id = s.run_id);
END;
$$;

-- Send a dead letter again and remove it, or neither. A call that was carried out before is known by the id of what it
-- sends. The letter is locked last: who has it waits for nobody any more.
CREATE FUNCTION write_replay(w jsonb) RETURNS answer LANGUAGE plpgsql AS $$
DECLARE
    send jsonb := w->'send';
    sent answer;
BEGIN
    PERFORM FROM dead_letters d WHERE d.id = w->>'letter_id' FOR UPDATE;
    IF NOT FOUND AND NOT EXISTS (
        SELECT FROM topic_events e JOIN topics t ON t.no = e.topic_no
        WHERE t.name = send->'event'->>'topic' AND e.id = send->'event'->>'id'
        UNION ALL
        SELECT FROM inbox i JOIN runs r ON r.no = i.run_no
        WHERE r.id = send->>'run_id' AND i.id = send->'message'->>'id')
    THEN
        RETURN answered('gone');
    END IF;
    sent := carry_out(send);
    IF sent.verdict IN ('delivered', 'published', 'known') THEN
        DELETE FROM dead_letters d WHERE d.id = w->>'letter_id';
    END IF;
    RETURN sent;
END;
$$;

CREATE FUNCTION write_append_stream(w jsonb, r runs) RETURNS answer LANGUAGE plpgsql AS $$
DECLARE
    items jsonb := coalesce(w->'items', '[]');
    known bigint;
    first bigint;
BEGIN
    IF terminal(r.status) THEN
        RETURN answered('ended', label => r.status);
    ELSIF r.owner IS DISTINCT FROM w->>'worker' OR NOT alive(w->>'worker') THEN
        RETURN answered('superseded');
    END IF;
    SELECT coalesce(max(s.nth) + 1, 0) INTO known FROM stream_items s
    WHERE s.run_no = r.no AND s.writer = items->0->>'writer' AND s.nth IS NOT NULL;
    first := coalesce((w->>'first')::bigint, known);
    items := coalesce(
        (SELECT jsonb_agg(i.item ORDER BY i.nth) FROM jsonb_array_elements(items) WITH ORDINALITY AS i (item, nth)
         WHERE first + i.nth > known), '[]');
    PERFORM add_items(r, items, greatest(first, known));
    RETURN answered('committed');
END;
$$;

CREATE FUNCTION write_supersede_stream(w jsonb, r runs) RETURNS answer LANGUAGE plpgsql AS $$
BEGIN
    UPDATE stream_items s SET superseded = true
    WHERE s.run_no = r.no AND s.epoch = r.epoch AND s.location = w->>'location' AND s.writer <> w->>'writer'
          AND NOT s.superseded;
    RETURN answered('committed');
END;
$$;

-- One write. Most are about a run that must be there.
CREATE FUNCTION carry_out(w jsonb) RETURNS answer LANGUAGE plpgsql AS $$
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
    IF r.no IS NULL THEN
        RETURN answered(CASE w->>'kind' WHEN 'release' THEN 'superseded' ELSE 'missing' END);
    END IF;
    CASE w->>'kind'
        WHEN 'mail' THEN RETURN write_mail(w, r);
        WHEN 'end' THEN RETURN write_end(w, r);
        WHEN 'release' THEN RETURN write_release(w, r);
        WHEN 'observe' THEN RETURN write_observe(w, r);
        WHEN 'settle' THEN RETURN write_settle(w, r);
        WHEN 'rewind' THEN RETURN write_rewind(w, r);
        WHEN 'append_stream' THEN RETURN write_append_stream(w, r);
        WHEN 'supersede_stream' THEN RETURN write_supersede_stream(w, r);
    END CASE;
END;
$$;
