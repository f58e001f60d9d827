-- Checks that decide whether a write is accepted, and helpers of all writes.
--
-- All functions here are called while the rows of the runs concerned are locked. A function sees what other
-- transactions have committed before each of its statements started. That is why locks are always taken by a statement
-- of their own: the next statement then sees what the previous holder of the lock has written.
--
-- Acceptance of a turn (rules 1 to 7 of stores/protocol.py) is implemented three times in SQL: in `write_turn` for one
-- write, in `commit_batch` for many turns together, and in `fast_commit_turn`, which applies the common case or
-- declines. All use the same position (`position_of`), fence and ownership.

-- The result of a write. The meaning of the columns depends on `result_kind`; stores/postgres/batch.py decodes them.
-- `changed` are runs whose change other processes must be notified of.
CREATE TYPE write_result AS (
    result_kind text,
    number  bigint,
    flag    boolean,
    label   text,
    body    bytea,
    note    text,
    changed text[]
);

CREATE FUNCTION result_of(
    result_kind text, number bigint DEFAULT NULL, flag boolean DEFAULT NULL, label text DEFAULT NULL,
    changed text[] DEFAULT NULL, body bytea DEFAULT NULL, note text DEFAULT NULL) RETURNS write_result
LANGUAGE sql IMMUTABLE
RETURN ROW (result_kind, number, flag, label, body, note, changed)::write_result;

CREATE FUNCTION terminal(status text) RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN status IN ('succeeded', 'failed', 'cancelled');

-- Whether a message of this kind wakes a held run. No other kind does.
CREATE FUNCTION wakes_held(kind text) RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN kind IN ('resume', 'cancel');

-- Whether messages of this kind count towards the inbox limit, and need finalization if the run ends without consuming
-- them.
CREATE FUNCTION is_event(kind text) RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN kind IN ('event', 'assignment');

CREATE FUNCTION expired(expires_at float8, now float8) RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN coalesce(expires_at <= now, false);

CREATE FUNCTION has_started(run runs) RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN (run).first_executed_at IS NOT NULL OR (run).generation > 0;

-- The status of a run that has no owner and is to be executed further.
CREATE FUNCTION status_released(run runs) RETURNS text LANGUAGE sql IMMUTABLE
RETURN CASE WHEN (run).first_executed_at IS NOT NULL OR (run).generation > 0 THEN 'running' ELSE 'pending' END;

CREATE FUNCTION alive(worker text) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM workers w WHERE w.id = worker AND NOT w.fenced);
END;
$$;

-- The position of a run's history. The fence counts (acceptance rule 6).
CREATE FUNCTION position_of(run runs) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN greatest(run.fence, (SELECT max(e.position) FROM entries e WHERE e.run_pk = run.pk), 0);
END;
$$;

-- The id of the turn stored at a position (acceptance rule 2).
CREATE FUNCTION turn_at(of_run bigint, at bigint) RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT e.turn_id FROM entries e WHERE e.run_pk = of_run AND e.position = at);
END;
$$;

-- Whether the inbox contains unread messages after number `seen`; that requires a higher `last_message_no`. With
-- `held`, only messages that wake a held run count.
--
-- This decides the race between a send and a suspension, and no message can be missed. Both hold the lock on the run's
-- row, so one is first. A message delivered before the turn is found here and leaves the run due. A message delivered
-- after the turn finds the run suspended and makes it due (`on_message`).
CREATE FUNCTION unread_after(of_run bigint, seen bigint, held boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM inbox i
        WHERE i.run_pk = of_run AND i.number > seen AND i.consumed_at IS NULL AND (NOT held OR wakes_held(i.kind)));
END;
$$;

-- Whether an ended run still has observers to notify or events to deal with. Its children are not checked here.
CREATE FUNCTION needs_finalization(run_pk bigint) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM observers o WHERE o.run_pk = needs_finalization.run_pk)
        OR EXISTS (
            SELECT FROM inbox i
            WHERE i.run_pk = needs_finalization.run_pk AND i.consumed_at IS NULL AND is_event(i.kind));
END;
$$;

-- Append a turn's entries after `base`, or a marker if the turn has none. Returns the position of the last one.
CREATE FUNCTION append_entries(run_pk bigint, base bigint, turn text, added jsonb, now float8) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    many integer := coalesce(jsonb_array_length(added), 0);
BEGIN
    IF many = 0 THEN
        INSERT INTO entries (run_pk, position, turn_id, location, kind, name, status, call_seq, ordinal, attempts,
                             generation, started_at)
        VALUES (append_entries.run_pk, base + 1, turn, '', 'marker', '', 'succeeded', 0, -1, 0, 0, now);
        RETURN base + 1;
    END IF;
    INSERT INTO entries
    SELECT append_entries.run_pk, base + e.nth, CASE WHEN e.nth = 1 THEN turn END, e.v->>'location', e.v->>'kind',
           e.v->>'name', e.v->>'status', (e.v->>'call_seq')::bigint, (e.v->>'ordinal')::bigint, (e.v->>'seq')::bigint,
           decode(e.v->>'value', 'base64'), e.v->>'error', (e.v->>'attempts')::integer,
           (e.v->>'generation')::integer, (e.v->>'started_at')::float8, (e.v->>'settled_at')::float8,
           (e.v->>'due_at')::float8, decode(e.v->>'fingerprint', 'base64'), decode(e.v->>'detail', 'base64')
    FROM jsonb_array_elements(added) WITH ORDINALITY AS e (v, nth);
    RETURN base + many;
END;
$$;

-- Insert a message into an inbox with this number. A message that a rewind restores has its row already.
CREATE FUNCTION insert_message(run_pk bigint, number bigint, m jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO inbox (run_pk, number, id, kind, name, body, sender, sent_at, expires_at, policy, target, topic_offset,
                       wants_reply, event_id)
    VALUES (insert_message.run_pk, insert_message.number, m->>'id', m->>'kind', m->>'name',
            decode(m->>'body', 'base64'), m->>'sender', (m->>'sent_at')::float8, (m->>'expires_at')::float8,
            m->>'policy', m->>'target', (m->>'offset')::bigint, (m->>'wants_reply')::boolean, m->>'event_id')
    ON CONFLICT ON CONSTRAINT inbox_pkey DO UPDATE SET consumed_at = NULL, body = excluded.body,
        kind = excluded.kind, target = excluded.target, topic_offset = excluded.topic_offset;
END;
$$;

-- The number of the message with this id, or NULL. The query requests the first id that is not smaller, which only the
-- index on ids returns in order. For an equality the planner may scan all messages of the run.
CREATE FUNCTION message_number(of_run bigint, message_id text) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT CASE WHEN f.id = message_id THEN f.number END
            FROM (SELECT i.id, i.number FROM inbox i
                  WHERE i.run_pk = of_run AND i.id >= message_id COLLATE "C" ORDER BY i.id LIMIT 1) AS f);
END;
$$;

-- Make a run due because of a new message. A held run stays suspended. So does a run whose generation has not started:
-- it waits for its start time. If the run has an owner, the owner is to be notified in any case.
CREATE FUNCTION on_message(run runs, number bigint, kind text, now float8) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF (run.held IS NULL AND run.first_executed_at IS NOT NULL) OR run.owner IS NOT NULL OR wakes_held(kind) THEN
        UPDATE runs r
        SET last_message_no = number, wake_at = least(r.wake_at, now), has_new_messages = r.owner IS NOT NULL
        WHERE r.pk = run.pk;
    ELSE
        UPDATE runs r SET last_message_no = number WHERE r.pk = run.pk;
    END IF;
END;
$$;

CREATE FUNCTION add_dead_letters(given jsonb) RETURNS void LANGUAGE sql
BEGIN ATOMIC
    INSERT INTO dead_letters (id, kind, at, reason, event_id, event_name, value, original_target, target_status,
                              target_ended_at, sent_at)
    SELECT l.id, l.kind, l.at, l.reason, l.event_id, l.event_name, decode(l.value, 'base64'), l.original_target,
           l.target_status, l.target_ended_at, l.sent_at
    FROM jsonb_to_recordset(given) AS l (
        id text, kind text, at float8, reason text, event_id text, event_name text, value text, original_target text,
        target_status text, target_ended_at float8, sent_at float8)
    ON CONFLICT (id) DO NOTHING;
END;

-- Append items to streams. They get the next offsets of their streams, and `writer_seq` from `first_seq` on if given.
CREATE FUNCTION add_items(run runs, items jsonb, first_seq bigint DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    item jsonb;
BEGIN
    FOR item IN SELECT * FROM jsonb_array_elements(items) LOOP
        INSERT INTO stream_items (run_pk, stream, at_offset, value, location, at, attempt, writer, writer_seq, epoch)
        SELECT run.pk, item->>'stream', coalesce(max(s.at_offset) + 1, 0), decode(item->>'value', 'base64'),
               item->>'location', (item->>'at')::float8, (item->>'attempt')::integer, item->>'writer',
               add_items.first_seq, run.epoch
        FROM stream_items s WHERE s.run_pk = run.pk AND s.stream = item->>'stream';
        first_seq := first_seq + 1;
    END LOOP;
END;
$$;
