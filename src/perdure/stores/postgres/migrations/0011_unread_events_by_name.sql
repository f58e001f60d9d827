-- Unread events of a run by name: the limit of a mailbox counts per event name.

CREATE INDEX inbox_unread_events ON inbox (run_pk, name, number)
    WHERE consumed_at IS NULL AND kind IN ('event', 'assignment');

-- Return the number of unread events of this name if it may have reached `capacity`, otherwise 0. The numbers of these
-- messages lie between that of the first and that of the run's last message. So most calls read one row of the index.
CREATE FUNCTION unread_if_full(run bigint, last_message_no bigint, event text, capacity bigint) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    first bigint;
BEGIN
    IF last_message_no < capacity THEN
        RETURN 0;
    END IF;
    SELECT i.number INTO first FROM inbox i
    WHERE i.run_pk = run AND i.name = event AND i.consumed_at IS NULL AND i.kind IN ('event', 'assignment')
    ORDER BY i.number LIMIT 1;
    IF coalesce(last_message_no - first + 1, 0) < capacity THEN
        RETURN 0;
    END IF;
    RETURN (SELECT count(*) FROM inbox i
            WHERE i.run_pk = run AND i.name = event AND i.consumed_at IS NULL AND i.kind IN ('event', 'assignment'));
END;
$$;

-- Deliver a message, once per id.
CREATE OR REPLACE FUNCTION write_message(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
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
        pending := unread_if_full(r.pk, r.last_message_no, m->>'name', capacity);
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
