-- A batch of writes, applied by one statement of the client.
--
-- Locks are taken in one order: topics by name, runs by id, new runs by id. Rows of workers are locked at any time
-- with FOR KEY SHARE; only `remove_worker` takes a stronger lock, and it waits for nothing else. No client is awaited
-- while locks are held.
--
-- Most writes are new runs, messages, turns that only append and patch, and notified observers of ended runs. They are
-- checked and applied together, with a fixed number of statements. The others follow one by one.

-- Apply a batch. Returns rows of results by index in the batch (`at`). A write that was applied as requested gets no
-- row. A row at -1 names a run whose change other processes must be notified of.
--
-- Grouped turns (`b_turns`; `b_at` are their indexes in the batch) append entries, consume messages and perhaps patch
-- the run's row, nothing else. Each is the only write to its run in this batch. So is each row of `b_finalizes`. A run
-- with messages in `b_messages` has no other writes.
--
-- Turns are `json`, not `jsonb`: JSON columns are copied from it as text, which may contain an escaped NUL.
--
-- A statement costs about 25 us even if it finds nothing. Statements that few batches need are therefore executed only
-- if a flag (`some_...`) says so; the flags come from statements that are needed anyway. (Measured: 599 us for a
-- single turn, 709 us before.)
CREATE FUNCTION commit_batch(
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
    IF b_runs <> '{}' THEN
        PERFORM FROM runs r WHERE r.id = ANY (b_runs) ORDER BY r.id FOR NO KEY UPDATE;
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
                             OR (k.owner IS DISTINCT FROM k.worker AND (k.owned OR k.owner IS NOT NULL))
                             OR k.base <> k.position
                        THEN 'superseded'
                        ELSE 'committed' END AS result_kind
            FROM (
                SELECT t.*, r.pk, r.status, r.owner, r.has_new_messages, r.last_message_no,
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
                    updated_at = p.now,
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
CREATE FUNCTION commit_write(w jsonb) RETURNS write_result LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
BEGIN
    RETURN apply_write(w);
END;
$$;
