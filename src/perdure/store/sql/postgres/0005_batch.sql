-- A batch of writes, carried out in one statement of the client.
--
-- Locks are taken in one order: workers, topics, runs by id, new runs by id. Nothing is awaited while they are held.
-- Most writes are new runs, mail, and turns that only append and patch: those are judged and written all at once. The
-- others follow one by one.

-- Plain turns (t_) are each the only write to its run in this batch. They append entries (e_), read mail (c_) and
-- perhaps change the run's row (p_), and nothing else; `e_turn`, `c_turn` and `p_turn` say which of them is meant,
-- counted from 1. What is in `b_mail` is the only write to its run, too. A turn that is simply committed gets no row in
-- the answer. A row at -1 names a run that others want to hear of.
CREATE FUNCTION commit_batch(
    b_workers text[], b_topics text[], b_runs text[], b_creates jsonb, b_mail jsonb, b_writes jsonb,
    t_at integer[], t_run text[], t_base bigint[], t_id text[], t_worker text[], t_owned boolean[], t_now float8[],
    t_seen bigint[], t_rows integer[],
    e_turn integer[], e_nth integer[], e_location text[], e_kind text[], e_name text[], e_status text[],
    e_asked bigint[], e_ordinal bigint[], e_seq bigint[], e_value bytea[], e_error text[], e_attempts integer[],
    e_generation integer[], e_started_at float8[], e_settled_at float8[], e_due_at float8[], e_fingerprint bytea[],
    e_detail bytea[],
    c_turn integer[], c_number bigint[],
    p_turn integer[], p_status text[], p_owner text[], p_wake_at float8[], p_waits text[], p_held text[],
    p_held_kind text[], p_drift text[], p_recoveries integer[], p_result bytea[], p_error text[], p_ended_at float8[],
    p_prune_at float8[])
RETURNS TABLE (at integer, verdict text, number bigint, flag boolean, label text, body bytea, note text)
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
    a answer;
    -- of each plain turn
    run_nos bigint[];
    verdicts text[];
    statuses text[];
    lasts bigint[];
    mails boolean[];
    marked boolean[];  -- as having mail that the owner has not seen
BEGIN
    IF b_workers IS NOT NULL THEN  -- none of them is forgotten while it gets a run
        PERFORM FROM workers x WHERE x.id = ANY (b_workers) ORDER BY x.id FOR KEY SHARE;
    END IF;
    IF b_topics IS NOT NULL THEN
        PERFORM lock_topics(b_topics, b_writes);
        b_runs := b_runs || first_in_lines(b_writes);
    END IF;
    PERFORM FROM runs r WHERE r.id = ANY (b_runs) ORDER BY r.id FOR NO KEY UPDATE;
    IF b_creates IS NOT NULL THEN
        RETURN QUERY SELECT * FROM create_runs(b_creates);
    END IF;
    IF b_mail IS NOT NULL THEN
        RETURN QUERY SELECT * FROM deliver_all(b_mail);
    END IF;
    IF t_at IS NOT NULL THEN
        SELECT array_agg(j.no ORDER BY j.nth), array_agg(j.verdict ORDER BY j.nth),
               array_agg(j.status ORDER BY j.nth), array_agg(j.inbox_last ORDER BY j.nth),
               array_agg(j.mailed ORDER BY j.nth)
        INTO run_nos, verdicts, statuses, lasts, marked
        FROM (
            SELECT k.nth, k.no, k.status, k.inbox_last, k.mailed,
                   CASE WHEN k.no IS NULL THEN 'missing'
                        WHEN k.position > k.base AND k.id = (
                            SELECT e.turn_id FROM entries e WHERE e.run_no = k.no AND e.position = k.base + 1)
                        THEN 'again'
                        WHEN terminal(k.status) THEN 'ended'
                        WHEN k.base <> k.position
                             OR (k.owner IS DISTINCT FROM k.worker AND (k.owned OR k.owner IS NOT NULL))
                             OR NOT EXISTS (SELECT FROM workers x WHERE x.id = k.worker AND NOT x.gone)
                        THEN 'superseded'
                        ELSE 'committed' END AS verdict
            FROM (
                SELECT t.*, r.no, r.status, r.owner, r.mailed, r.inbox_last,
                       greatest(r.fence, (SELECT max(e.position) FROM entries e WHERE e.run_no = r.no), 0) AS position
                FROM unnest(t_run, t_base, t_id, t_worker, t_owned) WITH ORDINALITY
                     AS t (run, base, id, worker, owned, nth)
                LEFT JOIN runs r ON r.id = t.run
                OFFSET 0  -- the position is computed once
            ) AS k
        ) AS j;
        IF c_turn IS NOT NULL THEN
            FOR w IN
                UPDATE inbox i SET consumed_at = t_now[c.turn], body = NULL
                FROM unnest(c_turn, c_number) AS c (turn, number)
                WHERE verdicts[c.turn] = 'committed' AND i.run_no = run_nos[c.turn] AND i.number = c.number
                      AND i.consumed_at IS NULL
                RETURNING i.run_no, i.kind, i.name, i.place, i.consumed_at
            LOOP
                IF w.kind = 'assignment' THEN
                    PERFORM event_was_read(w.run_no, w.name, w.place, w.consumed_at);
                END IF;
            END LOOP;
        END IF;
        mails := ARRAY(
            SELECT coalesce(lasts[n] > t_seen[n], false) AND EXISTS (
                SELECT FROM inbox i WHERE i.run_no = run_nos[n] AND i.number > t_seen[n] AND i.consumed_at IS NULL)
            FROM generate_subscripts(t_rows, 1) AS n ORDER BY n);
        IF e_turn IS NOT NULL THEN
            INSERT INTO entries
            SELECT run_nos[e.turn], t_base[e.turn] + e.nth, CASE WHEN e.nth = 1 THEN t_id[e.turn] END, e.location,
                e.kind,
                   e.name, e.status, e.asked, e.ordinal, e.seq, e.value, e.error, e.attempts, e.generation,
                       e.started_at,
                   e.settled_at, e.due_at, e.fingerprint, e.detail
            FROM unnest(e_turn, e_nth, e_location, e_kind, e_name, e_status, e_asked, e_ordinal, e_seq, e_value,
                e_error,
                        e_attempts, e_generation, e_started_at, e_settled_at, e_due_at, e_fingerprint, e_detail)
                 AS e (turn, nth, location, kind, name, status, asked, ordinal, seq, value, error, attempts,
                     generation,
                       started_at, settled_at, due_at, fingerprint, detail)
            WHERE verdicts[e.turn] = 'committed';
        END IF;
        IF 0 = ANY (t_rows) THEN
            INSERT INTO entries (run_no, position, turn_id, location, kind, name, status, asked, ordinal, attempts,
                                 generation, started_at)
            SELECT run_nos[n], t_base[n] + 1, t_id[n], '', 'marker', '', 'succeeded', 0, -1, 0, 0, t_now[n]
            FROM generate_subscripts(t_rows, 1) AS n WHERE t_rows[n] = 0 AND verdicts[n] = 'committed';
        END IF;
        IF p_turn IS NOT NULL THEN
            RETURN QUERY
            WITH patched AS (
                UPDATE runs r
                SET status = p.status, owner = p.owner, wake_at = p.wake_at, mailed = p.unseen
                    AND p.owner IS NOT NULL,
                    waits = p.waits, held = p.held, held_kind = p.held_kind, drift = p.drift,
                        recoveries = p.recoveries,
                    result = p.result, error = p.error, ended_at = p.ended_at, prune_at = p.prune_at,
                    updated_at = p.now,
                    unsettled = p.ended AND (
                        EXISTS (SELECT FROM observers o WHERE o.run_no = r.no)
                        OR EXISTS (SELECT FROM inbox i
                                   WHERE i.run_no = r.no AND i.consumed_at IS NULL AND is_event(i.kind)))
                FROM (
                    SELECT run_nos[p.turn] AS no, t_now[p.turn] AS now, c.ended, c.owner, u.unseen, p.status, p.waits,
                           p.held, p.held_kind, p.drift, p.recoveries, p.result, p.error, p.ended_at, p.prune_at,
                           CASE WHEN c.ended THEN NULL WHEN u.unseen THEN t_now[p.turn] ELSE p.wake_at END AS wake_at
                    FROM unnest(p_turn, p_status, p_owner, p_wake_at, p_waits, p_held, p_held_kind, p_drift,
                                p_recoveries, p_result, p_error, p_ended_at, p_prune_at)
                         AS p (turn, status, owner, wake_at, waits, held, held_kind, drift, recoveries, result, error,
                               ended_at, prune_at)
                    CROSS JOIN LATERAL (
                        SELECT terminal(p.status), CASE WHEN NOT terminal(p.status) THEN p.owner END
                    ) AS c (ended, owner)
                    CROSS JOIN LATERAL (
                        SELECT mails[p.turn] AND (p.held IS NULL OR c.owner IS NOT NULL OR EXISTS (
                            SELECT FROM inbox i
                            WHERE i.run_no = run_nos[p.turn] AND i.number > t_seen[p.turn] AND i.consumed_at IS NULL
                                  AND wakes_held(i.kind)))
                    ) AS u (unseen)
                    WHERE verdicts[p.turn] = 'committed'
                    OFFSET 0
                ) AS p
                WHERE r.no = p.no
                RETURNING r.no, r.id, p.ended, p.ended OR (p.owner IS NULL AND p.wake_at IS NOT NULL) AS told
            ), unsubscribed AS (
                DELETE FROM subscriptions s USING patched p WHERE p.ended AND s.run_no = p.no
            )
            SELECT -1, NULL, NULL::bigint, NULL::boolean, p.id, NULL::bytea, NULL FROM patched p WHERE p.told;
        END IF;
        IF true = ANY (marked) THEN  -- what the owner had not seen, he has seen now
            UPDATE runs r SET wake_at = NULL, mailed = false
            WHERE r.no = ANY (ARRAY(
                SELECT run_nos[n] FROM generate_subscripts(t_rows, 1) AS n
                WHERE marked[n] AND NOT mails[n] AND verdicts[n] = 'committed'
                      AND (p_turn IS NULL OR n <> ALL (p_turn))));
        END IF;
        IF 'committed' <> ANY (verdicts) OR true = ANY (mails) THEN
            RETURN QUERY
            SELECT t_at[n], verdicts[n], NULL::bigint, mails[n], statuses[n], NULL::bytea, NULL
            FROM generate_subscripts(t_rows, 1) AS n WHERE verdicts[n] <> 'committed' OR mails[n];
        END IF;
    END IF;
    IF b_writes IS NOT NULL THEN
        FOR w IN SELECT x.value FROM jsonb_array_elements(b_writes) AS x LOOP
            a := carry_out(w.value);
            at := (w.value->>'at')::integer;
            verdict := a.verdict;
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
